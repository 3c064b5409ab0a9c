"""The processes that torchrun or ``accelerate launch`` started together; a process alone is a group of one.

All processes of a group must call these functions, in the same order.
"""

from __future__ import annotations

from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")


def is_distributed() -> bool:
    """Whether this process has joined a group."""
    return dist.is_available() and dist.is_initialized()


def rank() -> int:
    """Return the number of this process, from 0."""
    return dist.get_rank() if is_distributed() else 0


def process_count() -> int:
    """Return how many processes there are."""
    return dist.get_world_size() if is_distributed() else 1


def sum_over_processes(values: Tensor, device: torch.device | None = None) -> Tensor:
    """Return the sum of ``values`` over all processes, which is made on ``device``, by default that of ``values``."""
    if not is_distributed():
        return values
    total = values.to(device or values.device, copy=True)
    dist.all_reduce(total)
    return total.to(values.device)


def broadcast_(values: Tensor) -> Tensor:
    """Replace ``values`` by those of the first process, and return them."""
    if is_distributed():
        dist.broadcast(values, 0)
    return values


def of_first(value: T) -> T:
    """Return the value that the first process has.

    >>> of_first(1.5)
    1.5
    """
    if not is_distributed():
        return value
    values = [value]
    dist.broadcast_object_list(values, 0)
    return values[0]


def gather_lists(mine: list[T]) -> list[T]:
    """Return the lists of all processes, joined in the order of the processes.

    >>> gather_lists([1, 2])
    [1, 2]
    """
    if not is_distributed():
        return mine
    parts: list[list[T]] = [[] for _ in range(process_count())]
    dist.all_gather_object(parts, mine)
    return [one for part in parts for one in part]
