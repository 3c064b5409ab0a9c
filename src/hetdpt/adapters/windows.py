"""The positions in the image of the tokens that an attention sees, for blocks that cut windows, shifted or not.

No window is computed here: the blocks themselves get a stream of numbers and cut it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isqrt
from typing import Any

import torch
from torch import Tensor, nn

from hetdpt.adapters.anatomy import Handle
from hetdpt.core.errors import ModelError
from hetdpt.core.gates import Extras, Pass, Zero
from hetdpt.core.modules import clone, put_, tensors_in


@dataclass(frozen=True)
class Windows:
    """How one block cuts its tokens."""

    places: Tensor
    """(windows, N): the number of each token of each window in the image, row by row; -1 for padding."""
    grid: tuple[int, int]
    """Rows and columns of tokens in the image."""

    def put_back(self, values: Tensor) -> Tensor:
        """Return values of tokens (B, windows, N) where they belong in the image, (B, rows, columns)."""
        is_real = self.places.flatten() >= 0
        image = values.new_zeros(len(values), self.grid[0] * self.grid[1])
        image[:, self.places.flatten()[is_real]] = values.flatten(1)[:, is_real]
        return image.view(-1, *self.grid)


class _InputRecorder(Zero):
    """Records the input of the attention and adds nothing to the stream."""

    def __init__(self, extras: Extras) -> None:
        super().__init__(extras)
        self.given: Tensor | None = None

    def replace(self, x: Tensor) -> Tensor:
        self.given = x
        return super().replace(x)


@torch.no_grad()
def find_windows(model: nn.Module, handles: Sequence[Handle], images: Tensor) -> list[Windows]:
    """Return the windows of each block of ``handles``; ``ModelError`` where a token is not in exactly one.

    Two images pass through a copy in which every block gets numbered tokens, has no norm before its attention, and a
    recorder instead of its attention.
    """
    probe = clone(model).eval()
    recorders, streams = list[_InputRecorder](), list[Tensor]()

    def numbered(_: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        stream = tensors_in(args, kwargs)[0]
        numbers = torch.arange(1, stream[..., 0].numel() + 1, device=stream.device).to(stream.dtype)
        streams.append(numbers.view(*stream.shape[:-1], 1).expand(stream.shape).contiguous())
        args = tuple(streams[-1] if value is stream else value for value in args)
        return args, {name: streams[-1] if value is stream else value for name, value in kwargs.items()}

    for handle in handles:
        assert handle.parts is not None
        recorders.append(_InputRecorder(handle.parts.extras))
        put_(probe, handle.parts.core, recorders[-1])
        for path in handle.parts.entry:
            put_(probe, path, Pass())
        probe.get_submodule(handle.owner).register_forward_pre_hook(numbered, with_kwargs=True)
    probe(images[:1].expand(2, -1, -1, -1))
    sides = (images.shape[-2], images.shape[-1])
    return [_windows(*each, sides) for each in zip(handles, streams, recorders, strict=True)]


def _windows(handle: Handle, stream: Tensor, recorder: _InputRecorder, sides: tuple[int, int]) -> Windows:
    """Return the windows of a block from its numbered tokens and those that its attention got."""
    count = stream[0, ..., 0].numel()
    assert recorder.given is not None
    given = recorder.given
    numbers = given[..., 0].reshape(2, -1, given[..., 0][0].numel()).long()  # (images, windows, N)
    first, second = numbers
    found = first[first > 0].sort().values
    is_cut = torch.equal(found, torch.arange(1, count + 1, device=found.device))
    grid = (stream.shape[1], stream.shape[2]) if stream.ndim == 4 else _grid(count, sides)
    if not is_cut or not torch.equal(second, torch.where(first > 0, first + count, 0)) or grid[0] * grid[1] != count:
        raise not_tokens(handle)
    return Windows(first - 1, grid)


def not_tokens(handle: Handle) -> ModelError:
    """Return the error for a block whose attention has no such windows."""
    return ModelError(
        f"{handle.site.path} was expected to attend from all tokens to all tokens, or in windows with each token in "
        "one of them, but does not; its attention cannot be located in the image"
    )


def _grid(count: int, sides: tuple[int, int]) -> tuple[int, int]:
    """Return rows and columns of ``count`` tokens of an image with these sides.

    >>> _grid(392, (448, 224))
    (28, 14)
    """
    rows = max(isqrt(count * sides[0] // sides[1]), 1)
    return rows, count // rows
