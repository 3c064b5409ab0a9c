"""Which tokens each block of a model computes: the steps that ``trim_`` and the tail of a plan put into its blocks.

From one block on, the stop, patches are not updated: blocks run on the class token and those beside it alone, and
patches give only keys and values. In the stop itself these are exact, in later blocks linear maps of the patches as
they were at the stop. How a block runs on few tokens is in ``surgery.kept``; nothing is fitted here.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from hetdpt.adapters.anatomy import Handle
from hetdpt.adapters.attention import key_value_matrix, rope_of, why_no_keys
from hetdpt.core.errors import ModelError
from hetdpt.core.fold import new_layer
from hetdpt.core.gates import ConstantPerPosition
from hetdpt.core.modules import clone
from hetdpt.core.plan import KINDS
from hetdpt.surgery.kept import STEP, MeanStep, TailStep, connect_, disconnect_, run_on_mean, unwrapped
from hetdpt.surgery.map_calls import guard_maps_
from hetdpt.surgery.record import (
    LEFT_OUT,
    RECORD,
    Record,
    is_whole,
    layer_at,
    layout_of,
    parts_of,
    record_of,
    require_record,
)

Maps = dict[int, tuple[Tensor, Tensor]]
"""The matrix and the bias that give keys and values of patches, by block."""


def arrange_(model: nn.Module, maps: Maps | None = None) -> nn.Module:
    """Let blocks run on as few tokens as the record of ``model`` says; maps that are there already keep their values.

    ``maps`` are those that ``take_off_`` returned, if it was called before.
    Called whenever that may have changed: by ``trim_`` and ``untrim_``, and after layers were removed.
    """
    record = require_record(model)
    maps = take_off_(model) | (maps or {})
    guard_maps_(model)
    if not record.leaves_out_tokens:
        return model
    if layout_of(record).read is None:
        return _put_behind_mean(model, record)
    steps = _steps(model, record)
    for number, step in steps.items():
        block = model.get_submodule(record.attentions[number].owner)
        block.add_module(STEP, step.train(block.training))
        connect_(block)
    stop, readers = stop_of(record)
    if later := [number for number in readers if number != stop]:
        steps[stop].maps = _joined(model, record, later, steps, maps)
    return keep_positions_(model)


def take_off_(model: nn.Module) -> Maps:
    """Let every block run on all tokens, and return the maps that it had."""
    maps: Maps = {}
    joined: nn.Linear | None = None
    record = record_of(model)
    numbers = {handle.owner: number for number, handle in record.attentions.items()} if record else {}
    for path, module in model.named_modules():
        if isinstance(module, ConstantPerPosition):
            module.kept = None
        step = module._modules.get(STEP)
        if isinstance(step, TailStep | MeanStep):
            disconnect_(module)
        if isinstance(step, TailStep):
            joined = step.maps or joined
            if step.columns is not None:
                assert joined is not None
                part = slice(*step.columns)
                maps[numbers[path]] = joined.weight.detach()[part], joined.bias.detach()[part]
    return maps


def with_all_tokens(model: nn.Module) -> nn.Module:
    """Return a copy in eval mode that computes all tokens in all blocks."""
    whole, record = clone(model).eval(), require_record(model)
    vars(whole)[RECORD] = replace(record, plan=replace(record.plan, tail=0), is_trimmed=False)
    return arrange_(whole)


def keep_positions_(model: nn.Module) -> nn.Module:
    """Let replacements with values for each position, also those of gates, use those of the tokens that are kept."""
    record = require_record(model)
    kept = next((step.kept for step in model.modules() if isinstance(step, TailStep)), None)
    if kept is None:
        return model
    owners = [handle.owner for number, handle in record.attentions.items() if number >= stop_of(record)[0]]
    for module in (module for owner in owners for module in model.get_submodule(owner).modules()):
        if isinstance(module, ConstantPerPosition):
            module.kept = kept
    return model


def stop_of(record: Record) -> tuple[int, list[int]]:
    """Return the first block that does not update patches, and the blocks from there on whose attention reads them."""
    left = [handle.site.block for handle in record.left if handle.site.kind == "attention"]
    stops = [max(left, default=0)] if record.is_trimmed else []
    if record.plan.tail:
        stops.append(record.survey.anatomy.blocks - record.plan.tail)
    return min(stops), [block for block in left if block >= min(stops)]


def kept_of(record: Record) -> tuple[int, int]:
    """Return the first block that does not update patches, and how many of its tokens the head reads.

    That block is beyond the last one where all tokens are computed in all of them.
    """
    layout = layout_of(record)
    if layout.read is None or not record.leaves_out_tokens:
        return record.survey.anatomy.blocks, layout.tokens
    return stop_of(record)[0], layout.read


def require_arrangeable(model: nn.Module, record: Record) -> None:
    """Raise ``ModelError`` if blocks of ``model`` cannot run on as few tokens as ``record`` says."""
    if not record.leaves_out_tokens:
        return
    if layout_of(record).read is None:
        _path_behind_mean(model, record)
        return
    owners = {(handle.site.block, handle.owner) for handle in record.survey.handles}
    if not len(owners) == len(record.attentions) == record.survey.anatomy.blocks:
        raise ModelError(f"{LEFT_OUT} in models whose blocks are modules with an attention each; this one has others")
    for number in stop_of(record)[1]:
        _require_keys(model, record.attentions[number])


def _require_keys(model: nn.Module, handle: Handle) -> None:
    """Raise ``ModelError`` if keys and values of this attention cannot be computed for other tokens than queries."""
    parts, why = parts_of(handle), why_no_keys(_attention(model, handle))
    if parts.early or not parts.is_direct or parts.core != handle.site.path:
        why = "it changes its tokens before they are projected"
    if why:
        raise ModelError(f"{handle.site.path} cannot attend to patches that are not computed: {why}")


def _attention(model: nn.Module, handle: Handle) -> nn.Module:
    return unwrapped(model.get_submodule(handle.site.path))


def _steps(model: nn.Module, record: Record) -> dict[int, TailStep]:
    """Return the steps of the blocks from the stop to the last one that reads patches."""
    layout, (stop, readers) = layout_of(record), stop_of(record)
    last = max(readers, default=stop)
    ropes = {number: rope_of(_attention(model, record.attentions[number])) for number in readers}
    assert layout.read is not None
    kept = layout.protected if last > stop or any(ropes.values()) else layout.read
    steps = {number: TailStep(kept, number == last) for number in range(stop, last + 1)}
    for number in readers:
        handle, step = record.attentions[number], steps[number]
        step.attention = handle.site.path.removeprefix(f"{handle.owner}.")
        step.entry = tuple(path.removeprefix(f"{handle.owner}.") for path in parts_of(handle).entry)
        step.rope = ropes[number]
    return steps


def _joined(model: nn.Module, record: Record, later: list[int], steps: dict[int, TailStep], maps: Maps) -> nn.Linear:
    """Return one layer for the keys and values of patches in ``later`` blocks; their steps get their columns of it.

    Maps that are not in ``maps`` are 0.
    """
    weights, biases, start = [], [], 0
    for number in later:
        attention = _attention(model, record.attentions[number])
        like = next(attention.parameters())
        rows, width = key_value_matrix(attention)[0].shape
        weight, bias = maps.get(number, (like.new_zeros(rows, width), like.new_zeros(rows)))
        weights.append(weight)
        biases.append(bias)
        steps[number].columns, start = (start, start + rows), start + rows
    layer = new_layer(torch.cat(weights), torch.cat(biases), like)
    assert isinstance(layer, nn.Linear)
    return layer


def _path_behind_mean(model: nn.Module, record: Record) -> str:
    """Return the last linear layer of the last FFN, whose output is added to the stream and averaged."""
    last = record.survey.handles[-1]
    branches = [handle.parts for handle in record.survey.handles if handle.owner == last.owner and handle.parts]
    is_last = last.site.kind == "activation" and is_whole(model, last.owner, *branches)
    if not is_last or last.ffn is None or not last.ffn.is_end:
        raise ModelError("this model cannot be trimmed: no linear layer is the last before the mean of its tokens")
    style = record.plan.style_of(last.site)
    is_kept = style.class_token == "keep"  # in two layers, one for patches
    if record.plan.removes(last.site) and (is_kept or style.removes == "branch"):
        raise ModelError("this model cannot be trimmed: the last FFN, which would run after the mean, was removed")
    if record.plan.has_stream_gelu and all(last.site.block in getattr(record.plan, kind) for kind in KINDS):
        raise ModelError("this model cannot be trimmed: a GELU is between its last block and the mean of its tokens")
    return last.ffn.first if last.site.block in record.merged else last.ffn.second


def _put_behind_mean(model: nn.Module, record: Record) -> nn.Module:
    """Let the last linear layer of the last FFN run on the mean of the tokens."""
    layer, first = layer_at(model, _path_behind_mean(model, record)), layout_of(record).mean_from
    assert first is not None
    layer.add_module(STEP, MeanStep(first).train(layer.training))
    vars(layer)["forward"] = partial(run_on_mean, layer)
    return model
