"""Multiply-accumulates and parameters, one counter for dense and pruned models."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from hetdpt.adapters.trace import dry_run

aten = torch.ops.aten


def _fused_attention_flops(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    return int(sdpa_flop_count(query, key, value))


# Fused attention on a CPU is an operator of its own, which torch's counter ignores.
FUSED_ON_CPU = {aten._scaled_dot_product_flash_attention_for_cpu: _fused_attention_flops}


def count_macs(
    model: nn.Module, input_size: tuple[int, int, int] = (3, 224, 224), *, attention_products: bool = True
) -> int:
    """Return the multiply-accumulates of one image: linear layers, convolutions and both attention products.

    Without ``attention_products`` the products q k and a v are left out, as in the pruned rows of the paper's tables.
    The model runs on the meta device, so its device and size do not matter.

    >>> import timm
    >>> count_macs(timm.create_model("deit_small_patch16_224"))
    4598882304
    """
    costs = Costs.of(model, input_size)
    return costs.macs if attention_products else costs.macs_without_attention_products


def _macs_by_op(model: nn.Module, input_size: tuple[int, int, int]) -> dict[Any, int]:
    counters: list[FlopCounterMode] = []

    @contextmanager
    def count(copy: nn.Module, stand_ins: dict[str, Tensor], images: Tensor) -> Iterator[None]:
        with FlopCounterMode(display=False, custom_mapping=dict(FUSED_ON_CPU)) as counter:
            yield
        counters.append(counter)

    dry_run(model, (1, *input_size), count)
    return {op: flops // 2 for op, flops in counters[0].get_flop_counts()["Global"].items()}


def _is_product(op: Any) -> bool:
    return op in (aten.bmm, aten.baddbmm) or "scaled_dot_product" in str(op)


def count_params(model: nn.Module) -> int:
    """Return the number of parameters, each counted once.

    >>> count_params(nn.Linear(3, 2))
    8
    """
    return sum(parameter.numel() for parameter in model.parameters())


@dataclass(frozen=True)
class Costs:
    """What one image costs: parameters and MACs, with and without the attention products."""

    params: int
    macs: int
    macs_without_attention_products: int

    @classmethod
    def of(cls, model: nn.Module, input_size: tuple[int, int, int]) -> Costs:
        by_op = _macs_by_op(model, input_size)
        linear = sum(macs for op, macs in by_op.items() if not _is_product(op))
        return cls(count_params(model), sum(by_op.values()), linear)
