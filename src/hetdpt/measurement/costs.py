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
from hetdpt.core.plan import Plan
from hetdpt.measurement.kept_blocks import finished, trimmed
from hetdpt.surgery.record import InputSize, require_record
from hetdpt.surgery.remove import ready
from hetdpt.surgery.tail import untrim_

aten = torch.ops.aten


def _fused_attention_flops(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    return int(sdpa_flop_count(query, key, value))


# Fused attention on a CPU is an operator of its own, which torch's counter ignores.
FUSED_ON_CPU = {aten._scaled_dot_product_flash_attention_for_cpu: _fused_attention_flops}


def count_macs(model: nn.Module, input_size: InputSize = (3, 224, 224), *, attention_products: bool = True) -> int:
    """Return the multiply-accumulates of one image: linear layers, convolutions and both attention products.

    Without ``attention_products`` the products q k and a v are left out, as in the pruned rows of the paper's tables.
    The model runs on the meta device, so its device and size do not matter.

    >>> import timm
    >>> count_macs(timm.create_model("deit_small_patch16_224"))
    4598882304
    """
    costs = Costs.of(model, input_size)
    return costs.macs if attention_products else costs.macs_without_attention_products


def _macs_by_op(model: nn.Module, input_size: InputSize, path: str) -> dict[Any, int]:
    """Return the multiply-accumulates of the module at ``path``, by operator."""
    marks: list[dict[Any, int]] = []

    @contextmanager
    def count(copy: nn.Module, stand_ins: dict[str, Tensor], images: Tensor) -> Iterator[None]:
        module = copy.get_submodule(path)
        with FlopCounterMode(display=False, custom_mapping=dict(FUSED_ON_CPU)) as counter:

            def mark(*_: Any) -> None:
                marks.append({**counter.get_flop_counts().get("Global", {})})

            with module.register_forward_pre_hook(mark), module.register_forward_hook(mark):
                yield

    dry_run(model, (1, *input_size), count)
    before, after = marks[-2:]
    return {op: (flops - before.get(op, 0)) // 2 for op, flops in after.items()}


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
    def of(cls, model: nn.Module, input_size: InputSize, path: str = "") -> Costs:
        """Return the costs of ``model``, or of its module at ``path``."""
        by_op = _macs_by_op(model, input_size, path)
        linear = sum(macs for op, macs in by_op.items() if not _is_product(op))
        return cls(count_params(model.get_submodule(path)), sum(by_op.values()), linear)


def plan_costs(model: nn.Module, plan: Plan, input_size: InputSize | None = None, *, trim: bool = True) -> Costs:
    """Return what one image costs in ``model`` without the layers of ``plan``, merged and, where possible, trimmed.

    Counted on a copy without values, so nothing is fitted or computed, and ``model`` is unchanged.

    >>> import timm
    >>> model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, num_classes=10)
    >>> plan_costs(model, Plan(activation=(0,)), trim=False).params - count_params(model)  # 8 D^2 + 5 D to D^2 + D
    -258816
    """
    base = untrim_(ready(model, plan.removal, input_size))
    base = (trimmed(base) if trim else base).to("meta")
    return Costs.of(finished(base, plan), require_record(base).survey.input_size)
