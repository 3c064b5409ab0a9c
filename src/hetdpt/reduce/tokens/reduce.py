"""Token reduction applied to a model, with or without all its layers, and undone.

Whether a model supports it is found by a dry run before anything is changed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from hetdpt.adapters.anatomy import Parts
from hetdpt.adapters.layout import TokenLayout
from hetdpt.adapters.trace import dry_run
from hetdpt.core.errors import HetDPTError, ModelError, first_line
from hetdpt.core.gates import ConstantPerPosition, Pass, Zero
from hetdpt.core.modules import clone, tensors_in
from hetdpt.core.plan import KINDS, Plan
from hetdpt.core.tokens import Tokens
from hetdpt.reduce.tokens.half_blocks import STEP, Replacements, TokenStep, run_block
from hetdpt.reduce.tokens.methods import TokenMethod, merge_alike, propagate
from hetdpt.surgery.arrange import kept_of
from hetdpt.surgery.gate import gates_of
from hetdpt.surgery.kept import connect_
from hetdpt.surgery.map_calls import guard_maps_
from hetdpt.surgery.record import RECORD, InputSize, Record, is_whole, layout_of, record_of, survey_of, with_layout
from hetdpt.surgery.tail import require_trimmable

TOKEN_METHODS = {
    "tome": TokenMethod(merge_alike),
    "gtp": TokenMethod(propagate, needs_map=True),
}
"""The implementations of the rows of ``TOKEN_PAPERS``."""


def reduce_tokens_(model: nn.Module, tokens: Tokens, input_size: InputSize | None = None) -> nn.Module:
    """Let the blocks of ``model`` that have attention return fewer tokens than they get.

    Blocks without attention are skipped. If the output depends on patches (average pooling, maps of the last block),
    each position gets, after that block, the token that its own was merged into; maps of blocks before it are refused.
    ``restore_tokens_`` undoes it; remove layers before, not after.

    >>> import timm
    >>> from hetdpt.measurement.costs import count_macs
    >>> model = timm.create_model("vit_tiny_patch16_224", depth=2)
    >>> before = count_macs(model)
    >>> count_macs(reduce_tokens_(model, Tokens("tome", 16))) / before < 0.95
    True
    >>> count_macs(restore_tokens_(model)) == before
    True
    """
    record = record_of(model) or Record(survey_of(model, input_size), Plan())
    _require_reducible(model, record)
    record = replace(with_layout(model, record, "tokens can be reduced"), plan=replace(record.plan, tokens=tokens))
    layout = layout_of(record)
    if record.is_trimmed:
        require_trimmable(record)
    if layout.crowded:
        raise ModelError(
            f"{layout.crowded} cannot reduce tokens: it takes other inputs too, such as an embedding of their "
            "positions, which merged tokens do not have"
        )
    steps = _steps(model, record, tokens, layout)
    _put(probe := clone(model), record, steps)
    _require_same_shapes(model, probe, record.survey.input_size)
    _put(model, record, steps)
    return model


def restore_tokens_(model: nn.Module) -> nn.Module:
    """Let every block return all its tokens again: the modules of before are put back, so outputs are bit-equal."""
    for module in model.modules():
        if isinstance(module._modules.get(STEP), TokenStep):
            del module._modules[STEP], vars(module)["forward"]
            connect_(module)
    if record := record_of(model):
        vars(model)[RECORD] = replace(record, plan=replace(record.plan, tokens=None))
        guard_maps_(model)
    return model


def _steps(model: nn.Module, record: Record, tokens: Tokens, layout: TokenLayout) -> dict[str, TokenStep]:
    """Return the step of each block that takes part, by path."""
    parts = {(h.owner, h.site.kind): h.parts for h in record.survey.handles}
    blocks = [h for h in record.survey.handles if h.site.kind == "attention"]
    left = [h for h in record.left if h.site.kind == "attention"]
    stop = kept_of(record)[0]
    if not any(handle.site.block < stop for handle in left):
        where = "that updates all its tokens " if left else ""
        raise ModelError(f"no block of this model {where}has attention, which reducing tokens needs")
    steps, method = {}, TOKEN_METHODS[tokens.method]
    for handle, count in zip(left, tokens.amounts(len(left)), strict=True):
        if handle.site.block > stop:
            break
        step = TokenStep(handle.owner, tokens, method, layout, count, handle.site.path.removeprefix(f"{handle.owner}."))
        attention, ffn = (parts.get((handle.owner, kind)) for kind in KINDS)
        if not attention or not ffn or not is_whole(model, handle.owner, attention, ffn):
            raise ModelError(
                f"{handle.owner} cannot reduce tokens: it is not x + attention, then x + FFN and nothing more, with "
                "branches that can be removed as a whole"
            )
        step.without_attention = _replacements(attention, handle.owner)
        step.without_ffn = _replacements(ffn, handle.owner)
        steps[handle.owner] = step
    end = blocks[-1].owner
    if layout.is_patch_read and end not in steps:
        steps[end] = TokenStep(end, tokens, method, layout, 0)
    whole = list(steps.values())
    whole[0].is_first = whole[-1].is_last = True
    return steps


def _replacements(parts: Parts, owner: str) -> Replacements:
    """Return the modules that remove a branch, by path in the block."""
    passes = [(path, Pass()) for path in (*parts.entry, *parts.exits)]
    return tuple(
        (path.removeprefix(f"{owner}."), module) for path, module in [*passes, (parts.core, Zero(parts.extras))]
    )


def _put(model: nn.Module, record: Record, steps: dict[str, TokenStep]) -> None:
    for path, step in steps.items():
        block = model.get_submodule(path)
        block.add_module(STEP, step.train(block.training))
        vars(block)["forward"] = partial(run_block, block)
    vars(model)[RECORD] = record
    guard_maps_(model)


def _require_same_shapes(model: nn.Module, reduced: nn.Module, input_size: InputSize) -> None:
    """Raise ``ModelError`` unless ``reduced`` runs and its outputs have the shapes of those of ``model``."""
    expected = _shapes(model, input_size)
    try:
        found = _shapes(reduced, input_size)
    except ModelError as error:
        cause = error.__cause__
        if isinstance(cause, HetDPTError):
            raise cause from None
        raise ModelError(
            f"{type(model).__name__} cannot reduce its tokens, as it does not run with fewer of them: "
            f"{first_line(cause or error)}"
        ) from error
    if found != expected:
        raise ModelError(
            f"{type(model).__name__} cannot reduce its tokens: it returns outputs of blocks before the last one, whose "
            f"shapes would be {found} in place of {expected}"
        )


def _shapes(model: nn.Module, input_size: InputSize) -> list[tuple[int, ...]]:
    """Return the shapes of the outputs of a model for two images, found by a dry run."""
    shapes: list[tuple[int, ...]] = []

    def look(_: nn.Module, args: Any, answer: Any) -> None:
        shapes[:] = [tuple(tensor.shape) for tensor in tensors_in(answer)]

    @contextmanager
    def watch(copy: nn.Module, *_: Any) -> Iterator[None]:
        copy.register_forward_hook(look)
        with torch.no_grad():
            yield

    dry_run(model, (2, *input_size), watch)
    return shapes


def _require_reducible(model: nn.Module, record: Record) -> None:
    """Refuse models with earlier changes that do not allow fewer tokens."""
    if gates_of(model):
        raise ModelError("this model has gates on its layers; call restore_(model) before reducing its tokens")
    if record.tokens is not None:
        raise ModelError("this model reduces its tokens already; call restore_tokens_(model) first")
    if any(isinstance(module, ConstantPerPosition) for module in model.modules()):
        raise ModelError(
            "a layer of this model was replaced by values for each position in the image (removal style 'position'), "
            "which merged tokens do not have; use removal style 'constant'"
        )
