"""``merge_``: fewer layers that compute the same as a pruned model's, up to rounding."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor, nn

from hetdpt.adapters.anatomy import Handle
from hetdpt.adapters.branches import MULTIPLICATIONS
from hetdpt.adapters.ffn import Ffn
from hetdpt.core.fold import add, fold_norm, fold_pair, is_cheaper_folded
from hetdpt.core.gates import Constant, Pass, PatchMap, PatchPass, Zero
from hetdpt.core.modules import put_
from hetdpt.surgery.arrange import arrange_
from hetdpt.surgery.record import RECORD, Record, layer_at, parts_of, record_of, refuse_gated, require_record

CHANGES = MULTIPLICATIONS | {"constant_pad_nd"}
"""Operations that change a constant."""


def merge_(model: nn.Module, fold_norms: bool = False, fold_constants: bool = True) -> nn.Module:
    """Fold the two linear layers that a removed activation left into one (paper, Eq. 7), where that is cheaper.

    Where the class token keeps its FFN, the folded layer is beside it, and LayerScale and norms stay. Elsewhere
    LayerScale is folded in; with ``fold_norms`` also the affine part of the LayerNorm before it, which saves 2 D
    parameters. With ``fold_constants`` a constant in place of attention is added to the bias of the FFN before it, or
    to the position embedding, where no other layer and no output sees the difference; turn it off if streams between
    blocks are read by other ways than ``forward``. The function stays the same up to rounding; merging twice changes
    nothing.
    """
    record = record_of(model)
    if record is None:
        return model
    ffns = _linear_ffns(record)
    worth = [block for block, ffn in ffns.items() if block in record.merged or _is_worth_merging(model, ffn)]
    constants = record.plan.attention if fold_constants else ()
    return merge_blocks_(model, worth, worth if fold_norms else (), constants)


def merge_blocks_(
    model: nn.Module,
    blocks: Iterable[int],
    folded_norms: Iterable[int] = (),
    folded_constants: Iterable[int] = (),
) -> nn.Module:
    """Merge the FFNs of these ``blocks``, and fold the norms and constants of some; earlier merges stay.

    Those of ``folded_constants`` that cannot be folded into a bias are skipped.
    """
    refuse_gated(model)
    record = require_record(model)
    ffns = _linear_ffns(record)
    styles = {handle.site.block: record.plan.style_of(handle.site) for handle in record.removed if handle.ffn}
    kept = {block for block, style in styles.items() if style.class_token == "keep"}
    merged, folded, constants = [*record.merged], [*record.folded_norms], [*record.folded_constants]
    for block in blocks:
        if block in ffns and block not in merged:
            _merge_for_patches(model, ffns[block]) if block in kept else merge_ffn_(model, ffns[block])
            merged.append(block)
    for block in (block for block in folded_norms if block not in kept):
        if block in merged and block not in folded and ffns[block].norm:
            _fold_norm(model, ffns[block])
            folded.append(block)
    record = replace(record, merged=tuple(merged), folded_norms=tuple(folded))
    stop = record.survey.anatomy.blocks - record.plan.tail  # patches there must not get what is added in that block
    for handle in record.survey.handles:
        is_wanted = handle.site.kind == "attention" and handle.site.block in {*folded_constants} - {stop}
        if is_wanted and handle.site.block not in constants and _fold_constant(model, handle, record):
            constants.append(handle.site.block)
    vars(model)[RECORD] = replace(record, folded_constants=tuple(constants))
    return arrange_(model)


def _linear_ffns(record: Record) -> dict[int, Ffn]:
    """Return by block the FFNs whose activation was removed so that two linear layers are left in a row, or one."""
    handles = [handle for handle in record.removed if record.plan.style_of(handle.site).merge == "pair"]
    return {handle.site.block: handle.ffn for handle in handles if handle.ffn}


def _is_worth_merging(model: nn.Module, ffn: Ffn) -> bool:
    return is_cheaper_folded(layer_at(model, ffn.first), layer_at(model, ffn.second))


def merge_ffn_(model: nn.Module, ffn: Ffn) -> None:
    first, second = layer_at(model, ffn.first), layer_at(model, ffn.second)
    scale = model.get_parameter(ffn.scale) if ffn.scale else None
    put_(model, ffn.first, fold_pair(first, second, scale))
    for path in (ffn.activation, *ffn.between, ffn.second):
        put_(model, path, Pass())
    if ffn.scale:
        neutralise_(model, ffn.scale)


def _merge_for_patches(model: nn.Module, ffn: Ffn) -> None:
    """Fold the two layers for patches; the FFN, with its activation again, is what class tokens keep."""
    patches = model.get_submodule(f"{ffn.activation}.patches")
    assert isinstance(patches, PatchPass)
    assert ffn.core is not None
    patches.release_()
    folded = fold_pair(layer_at(model, ffn.first), layer_at(model, ffn.second))
    PatchMap(model.get_submodule(ffn.core), patches.protected, folded).keep_()


def _fold_norm(model: nn.Module, ffn: Ffn) -> None:
    assert ffn.norm is not None
    norm = model.get_submodule(ffn.norm)
    assert isinstance(norm, nn.LayerNorm)
    if norm.elementwise_affine:
        put_(model, ffn.first, fold_norm(norm, layer_at(model, ffn.first)))
        norm.weight = norm.bias = None  # type: ignore[assignment]
        norm.elementwise_affine = False


def _fold_constant(model: nn.Module, handle: Handle, record: Record) -> bool:
    """Add a constant to the bias before it instead; return whether there is such a constant and such a bias."""
    constant = model.get_submodule(parts_of(handle).core)
    names = _biases_now(handle, record)
    is_changed = not CHANGES.isdisjoint(parts_of(handle).tail)
    if record.plan.style_of(handle.site).merge != "bias" or not names or is_changed:
        return False
    if not isinstance(constant, Constant):
        return False
    biases = {name: model.get_parameter(name) for name in names}
    value: Tensor
    if all(bias.ndim == constant.bias.ndim == 1 for bias in biases.values()):
        value = constant.bias
    elif parts_of(handle).is_direct and all(b.ndim > 1 and _fits(constant.value, b) for b in biases.values()):
        value = constant.value
    else:
        return False
    for name, bias in biases.items():
        path, _, leaf = name.rpartition(".")
        total = nn.Parameter(add(bias, value), requires_grad=bias.requires_grad)
        model.get_submodule(path).register_parameter(leaf, total)
    put_(model, parts_of(handle).core, Zero(constant.extras))
    return True


def _fits(value: Tensor, bias: Tensor) -> bool:
    """Whether ``bias`` has as many positions as ``value``, which it has not if positions are interpolated."""
    return all(side in (1, full) for side, full in zip(value.shape[::-1], bias.shape[::-1], strict=False))


def _biases_now(handle: Handle, record: Record) -> list[str]:
    """Return the current name of the parameter that is added to the stream right before a branch; none if removed.

    Where class tokens keep their FFN there are two, one of them for patches.
    """
    name = handle.bias
    for other in record.survey.handles:
        if other.ffn and name == f"{other.ffn.second}.bias":
            style = record.plan.style_of(other.site)
            is_merged, is_removed = other.site.block in record.merged, record.plan.removes(other.site)
            if style.class_token == "keep" and (is_merged or (is_removed and style.removes == "patches")):
                return [name, f"{other.ffn.core}.patches.linear.bias"] if not other.ffn.scale else []
            if is_merged:
                return [f"{other.ffn.first}.bias"]
            is_dropped = is_removed and style.removes == "branch"
            return [] if is_dropped or other.ffn.scale else [name]
    return [name] if name else []


def neutralise_(model: nn.Module, name: str) -> None:
    """Replace a LayerScale parameter by 1; a module that is only a LayerScale becomes a ``Pass``."""
    path, _, leaf = name.rpartition(".")
    owner = model.get_submodule(path)
    if len(list(owner.parameters())) == 1 and not any(owner.children()):
        return put_(model, path, Pass())
    parameter = owner._parameters.pop(leaf)
    assert parameter is not None
    device = "cpu" if parameter.is_meta else parameter.device  # on meta it would never get its value
    one = torch.ones([1] * parameter.ndim, dtype=parameter.dtype, device=device)
    owner.register_buffer(leaf, one, persistent=False)
