"""Blocks that compute only the tokens which are kept: ``trim_``, and the tail of a plan (docs/tokens_are_not_alike.md).

From one block on, the stop, patches are not updated: blocks run on the class token and those beside it alone, and
patches give only keys and values. In the stop itself these are exact, in later blocks linear maps of the patches as
they were at the stop. If there are no later blocks with attention, the model computes the same as before.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from hetdpt.adapters.anatomy import Handle
from hetdpt.adapters.attention import key_value_matrix, rope_of, why_no_keys
from hetdpt.adapters.heads import answer_tensors
from hetdpt.adapters.layout import TokenLayout
from hetdpt.core.errors import ModelError, PlanError
from hetdpt.core.fold import new_layer
from hetdpt.core.gates import ConstantPerPosition
from hetdpt.core.modules import clone, evaluating, random_images
from hetdpt.core.plan import KINDS, Plan
from hetdpt.surgery.kept import STEP, MeanStep, TailStep, connect_, run_kept, run_on_mean, unwrapped
from hetdpt.surgery.record import (
    LEFT_OUT,
    RECORD,
    InputSize,
    Record,
    is_whole,
    layer_at,
    layout_of,
    parts_of,
    record_of,
    require_record,
    survey_of,
    with_layout,
)

Maps = dict[int, tuple[Tensor, Tensor]]
"""The matrix and the bias that give keys and values of patches, by block."""


def trim_(model: nn.Module, input_size: InputSize | None = None) -> nn.Module:
    """Leave out what no output depends on: after the last attention, all tokens but those that the head reads.

    In the block of the last attention only keys and values see all tokens. Outputs stay the same up to rounding. Where
    the head averages tokens, the last linear layer of the last FFN runs after the mean instead. ``ModelError`` if the
    output depends on patches in another way; ``untrim_`` undoes it, and trimming twice changes nothing.

    >>> import hetdpt, timm
    >>> model = timm.create_model("vit_tiny_patch16_224")
    >>> before = hetdpt.count_macs(model)
    >>> round(before / hetdpt.count_macs(trim_(model)), 3)
    1.075
    """
    record = record_of(model) or Record(survey_of(model, input_size), Plan())
    if record.is_trimmed:
        return model
    record = with_layout(model, record)
    require_trimmable(record)
    vars(probe := clone(model))[RECORD] = replace(record, is_trimmed=True)
    arrange_(probe)
    _require_same_answers(model, probe, record.survey.input_size)
    vars(model)[RECORD] = replace(record, is_trimmed=True)
    return arrange_(model)


def untrim_(model: nn.Module) -> nn.Module:
    """Compute all tokens again; outputs are bit-equal to those before ``trim_``. The tail of a plan stays."""
    record = record_of(model)
    if record is None or not record.is_trimmed:
        return model
    vars(model)[RECORD] = replace(record, is_trimmed=False)
    return arrange_(model)


def trim_if_possible_(model: nn.Module, input_size: InputSize | None = None) -> str | None:
    """Trim ``model`` if that is possible; return why it is not, as a sentence for the user, or None."""
    try:
        trim_(model, input_size)
    except ModelError as error:
        return f"not trimmed: {error}"
    return None


def require_trimmable(record: Record) -> None:
    layout = layout_of(record)
    if layout.read is None and layout.mean_from is None:
        raise ModelError(
            "this model cannot be trimmed: its output depends on patches of its last block, not only on the class "
            "token or on the plain mean of tokens"
        )
    if record.tokens is not None and (layout.is_patch_read or record.tokens.sparsity < 1):
        raise ModelError(
            "this model cannot be trimmed: how it reduces tokens depends on tokens that would not be computed; call "
            "restore_tokens_(model) first"
        )


def require_tail(record: Record, plan: Plan) -> None:
    """Raise ``PlanError`` unless patches of the last blocks are read by their attention alone."""
    if layout_of(record).read is None:
        raise PlanError(
            f"this model cannot have a tail of {plan.tail}: its output depends on patches of its last block, and a "
            "tail needs a head that reads the class token alone; use tail=0"
        )
    if plan.has_stream_gelu:
        raise PlanError(
            "removal 'authors' puts a GELU on the stream of patches, which a tail does not have; use 'norm'"
        )


def is_tail_possible(model: nn.Module) -> bool:
    """Whether ``model`` can have a tail; False also for one that is not trimmed."""
    record = record_of(model)
    if record is None or not record.is_trimmed or record.plan.has_stream_gelu:
        return False
    return layout_of(record).read is not None


def trim_to_class_token_(model: nn.Module, input_size: InputSize | None = None) -> nn.Module:
    """Trim ``model`` if its head reads the class token, and tokens beside it, alone, so that it can have a tail."""
    trim_if_possible_(model, input_size)
    return model if is_tail_possible(model) else untrim_(model)


def arrange_(model: nn.Module, maps: Maps | None = None) -> nn.Module:
    """Let blocks run on as few tokens as the record of ``model`` says; maps that are there already keep their values.

    ``maps`` are those that ``take_off_`` returned, if it was called before.
    Called whenever that may have changed: by ``trim_`` and ``untrim_``, and after layers were removed.
    """
    record = require_record(model)
    maps = take_off_(model) | (maps or {})
    if not record.is_trimmed and not record.plan.tail:
        return model
    layout = layout_of(record)
    if layout.read is None:
        _put_behind_mean(model, record, layout)
        return model
    stop, readers = stop_of(record)
    blocks = _owners(record)
    steps = _steps(model, record, stop, readers)
    for number, step in steps.items():
        block = model.get_submodule(blocks[number])
        block.add_module(STEP, step.train(block.training))
        connect_(block)
    first = steps[stop]
    if later := [number for number in readers if number != stop]:
        first.maps = _joined(model, record, later, steps, maps)
    return keep_positions_(model)


def keep_positions_(model: nn.Module) -> nn.Module:
    """Tell replacements with values for each position, also those of gates, which tokens are computed there."""
    record = require_record(model)
    firsts = [module for module in model.modules() if isinstance(module, TailStep) and module.is_first]
    for number, path in _all_owners(record).items() if firsts else ():
        for module in model.get_submodule(path).modules() if number >= stop_of(record)[0] else ():
            if isinstance(module, ConstantPerPosition):
                module.kept = firsts[0].kept
    return model


def with_all_tokens(model: nn.Module) -> nn.Module:
    """Return a copy in eval mode that computes all tokens in all blocks."""
    whole, record = clone(model).eval(), require_record(model)
    vars(whole)[RECORD] = replace(record, plan=replace(record.plan, tail=0), is_trimmed=False)
    return arrange_(whole)


def stop_of(record: Record) -> tuple[int, list[int]]:
    """Return the first block that does not update patches, and the blocks from there on whose attention reads them."""
    handles = [handle.site for handle in record.left if handle.site.kind == "attention"]
    left = [site.block for site in handles]
    stops = [max(left, default=0)] if record.is_trimmed else []
    if record.plan.tail:
        stops.append(record.survey.anatomy.blocks - record.plan.tail)
    return min(stops), [block for block in left if block >= min(stops)]


def kept_of(record: Record) -> tuple[int, int]:
    """Return the first block that does not update patches, and how many of its tokens the head reads.

    That block is beyond the last one where all tokens are computed in all of them.
    """
    layout = layout_of(record)
    if layout.read is None or not (record.is_trimmed or record.plan.tail):
        return record.survey.anatomy.blocks, layout.tokens
    return stop_of(record)[0], layout.read


def _owners(record: Record) -> dict[int, str]:
    """Return the module of each block; ``ModelError`` unless every block is one that has an attention and an FFN."""
    owners: dict[int, set[str]] = {}
    for handle in record.survey.handles:
        owners.setdefault(handle.site.block, set()).add(handle.owner)
    anatomy = record.survey.anatomy
    if len(anatomy.attention) != anatomy.blocks or any(len(paths) > 1 for paths in owners.values()):
        raise ModelError(f"{LEFT_OUT} in models whose blocks are modules with an attention each; this one has others")
    return {number: path for number, (path,) in owners.items()}


def _steps(model: nn.Module, record: Record, stop: int, readers: list[int]) -> dict[int, TailStep]:
    """Return the steps of the blocks from the stop to the last one that reads patches."""
    layout, blocks = layout_of(record), _owners(record)
    handles = {h.site.block: h for h in record.survey.handles if h.site.kind == "attention"}
    last = max(readers, default=stop)
    ropes = {number: _rope(model, handles[number]) for number in readers}
    assert layout.read is not None
    kept = layout.protected if last > stop or any(ropes.values()) else layout.read
    steps = {number: TailStep(kept, number == stop, number == last) for number in range(stop, last + 1)}
    for number in readers:
        handle, step = handles[number], steps[number]
        step.attention = handle.site.path.removeprefix(f"{blocks[number]}.")
        step.entry = tuple(path.removeprefix(f"{blocks[number]}.") for path in parts_of(handle).entry)
        step.rope = ropes[number]
    return steps


def _rope(model: nn.Module, handle: Handle) -> str | None:
    """Return the name of the rotary embedding that a block gets; ``ModelError`` if its attention does not qualify."""
    attention, parts = unwrapped(model.get_submodule(handle.site.path)), parts_of(handle)
    why = why_no_keys(attention)
    if parts.early or not parts.is_direct or parts.core != handle.site.path:
        why = "it changes its tokens before they are projected"
    if why:
        raise ModelError(f"{handle.site.path} cannot attend to patches that are not computed: {why}")
    return rope_of(attention)


def _joined(model: nn.Module, record: Record, later: list[int], steps: dict[int, TailStep], maps: Maps) -> nn.Linear:
    """Return one layer for the keys and values of patches in ``later`` blocks, and tell their steps their columns.

    Maps that are not in ``maps`` are 0.
    """
    handles = {h.site.block: h for h in record.survey.handles if h.site.kind == "attention"}
    weights, biases, start = [], [], 0
    for number in later:
        attention = unwrapped(model.get_submodule(handles[number].site.path))
        like = next(attention.parameters())
        rows, width = (key_value_matrix(attention)[0]).shape
        weight, bias = maps.get(number, (like.new_zeros(rows, width), like.new_zeros(rows)))
        weights.append(weight)
        biases.append(bias)
        steps[number].columns, start = (start, start + rows), start + rows
    layer = new_layer(torch.cat(weights), torch.cat(biases), like)
    assert isinstance(layer, nn.Linear)
    return layer


def take_off_(model: nn.Module) -> Maps:
    """Let every block run on all tokens, and return the maps that it had."""
    maps: Maps = {}
    joined: nn.Linear | None = None
    record = record_of(model)
    numbers = {path: number for number, path in _all_owners(record).items()} if record else {}
    for path, module in model.named_modules():
        if isinstance(module, ConstantPerPosition):
            module.kept = None
        step = module._modules.get(STEP)
        if not isinstance(step, TailStep | MeanStep):
            continue
        del module._modules[STEP]
        forward = vars(module).get("forward")
        if isinstance(forward, partial) and forward.func in (run_kept, run_on_mean):
            del vars(module)["forward"]
        if isinstance(step, TailStep):
            joined = step.maps or joined
            if step.columns is not None:
                assert joined is not None
                part = slice(*step.columns)
                maps[numbers[path]] = joined.weight.detach()[part], joined.bias.detach()[part]
    return maps


def _all_owners(record: Record) -> dict[int, str]:
    return {h.site.block: h.owner for h in record.survey.handles if h.site.kind == "attention"}


def fill_tail_(model: nn.Module, maps: dict[int, tuple[Tensor, Tensor]]) -> nn.Module:
    """Set the maps of a tail, each W z + b for the input z of an attention, folded with its keys and values."""
    record = require_record(model)
    blocks, handles = _owners(record), {h.site.block: h for h in record.survey.handles if h.site.kind == "attention"}
    first = model.get_submodule(blocks[stop_of(record)[0]])._modules[STEP]
    assert isinstance(first, TailStep)
    assert first.maps is not None
    for number, (weight, bias) in maps.items():
        step = model.get_submodule(blocks[number])._modules[STEP]
        assert isinstance(step, TailStep)
        assert step.columns is not None
        matrix, shift = key_value_matrix(unwrapped(model.get_submodule(handles[number].site.path)))
        part = slice(*step.columns)
        with torch.no_grad():
            first.maps.weight[part] = (matrix @ weight).to(first.maps.weight)
            first.maps.bias[part] = (matrix @ bias + shift).to(first.maps.bias)
    return model


def require_behind_mean(model: nn.Module, record: Record) -> None:
    """Raise ``ModelError`` if ``model`` is trimmed, but by ``record`` nothing could run on the mean of its tokens."""
    if record.is_trimmed and layout_of(record).read is None:
        _path_behind_mean(model, record)


def _path_behind_mean(model: nn.Module, record: Record) -> str:
    """Return the last linear layer of the last FFN, whose output is added to the stream and averaged."""
    last = record.survey.handles[-1]
    branches = [handle.parts for handle in record.survey.handles if handle.owner == last.owner and handle.parts]
    is_last = last.site.kind == "activation" and is_whole(model, last.owner, *branches)
    if not is_last or last.ffn is None or not last.ffn.is_end:
        raise ModelError("this model cannot be trimmed: no linear layer is the last before the mean of its tokens")
    is_kept = record.plan.class_token == "keep"  # in two layers, one for patches
    if record.plan.removes(last.site) and (is_kept or record.plan.style_of("activation").removes == "branch"):
        raise ModelError("this model cannot be trimmed: the last FFN, which would run after the mean, was removed")
    if record.plan.has_stream_gelu and all(last.site.block in getattr(record.plan, kind) for kind in KINDS):
        raise ModelError("this model cannot be trimmed: a GELU is between its last block and the mean of its tokens")
    return last.ffn.first if last.site.block in record.merged else last.ffn.second


def _put_behind_mean(model: nn.Module, record: Record, layout: TokenLayout) -> None:
    """Let the last linear layer of the last FFN run on the mean of the tokens."""
    layer = layer_at(model, _path_behind_mean(model, record))
    assert layout.mean_from is not None
    layer.add_module(STEP, MeanStep(layout.mean_from).train(layer.training))
    vars(layer)["forward"] = partial(run_on_mean, layer)


@torch.no_grad()
def _require_same_answers(model: nn.Module, trimmed: nn.Module, size: InputSize) -> None:
    """Raise ``ModelError`` unless both models return the same for a random image, as far as they have weights."""
    weight = next(model.parameters())
    if weight.is_meta:
        return
    images, tolerance = random_images(model, size, 1), 10 * torch.finfo(weight.dtype).eps ** 0.75
    with evaluating(model, trimmed):
        pairs = zip(*(answer_tensors(one(images)) for one in (model, trimmed)), strict=True)
    for one, other in pairs:
        if not (one - other).abs().max() <= tolerance * one.abs().max().clamp(min=torch.finfo(weight.dtype).tiny):
            raise ModelError("this model cannot be trimmed: its output would change; hetdpt.sites shows its layers")
