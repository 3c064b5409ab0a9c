"""``gate_`` and ``restore_``: a gate on every removable layer, put on and taken off again. Nothing is removed here."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import torch
from torch import nn

from hetdpt.adapters.anatomy import Handle
from hetdpt.adapters.ffn import Ffn
from hetdpt.adapters.output_attentions import keep_places_
from hetdpt.core.errors import PlanError
from hetdpt.core.fold import new_layer
from hetdpt.core.gates import Behind, Gate, Mapped, StreamGelu, Zero
from hetdpt.core.modules import put_
from hetdpt.core.plan import Plan, Site
from hetdpt.surgery.record import RECORD, InputSize, begin, goes_whole, layer_at, parts_of, record_of, require_record
from hetdpt.surgery.remove import stream_owners
from hetdpt.surgery.replacement import (
    Values,
    fill_values,
    new_replacement,
    place_of,
    require_removable,
    stand_in,
    why_not_removable,
)


def gate_(model: nn.Module, plan: Plan | None = None, input_size: InputSize | None = None) -> nn.Module:
    """Put a gate on every site that the plan's removal style can remove, closed where the plan removes it.

    With no plan all gates are open and the outputs are bit-equal to the ungated model's, or equal up to rounding where
    that ran on torch's fast path (``nn.TransformerEncoderLayer``). ``restore_`` undoes it.
    """
    plan = Plan() if plan is None else plan  # an empty plan is false, but its removal style counts
    if plan.is_any_fitted:
        raise PlanError(
            f"a gate has no images to fit removal {plan.removal!r} on; call "
            "hetdpt.surgery.calibrate.gate_fitted_(model, plan, batches), or gate with removal 'plain'"
        )
    return place_gates_(model, plan, input_size)


def place_gates_(
    model: nn.Module, plan: Plan, input_size: InputSize | None = None, sites: Collection[Site] | None = None
) -> nn.Module:
    """Do what ``gate_`` does, under any style and on some ``sites`` alone: what is to be fitted has no values yet."""
    record = begin(model, plan, input_size, is_temporary=True)
    left = [h for h in record.survey.handles if not record.plan.removes(h.site) and (sites is None or h.site in sites)]
    gated = [h for h in left if plan.removes(h.site) or why_not_removable(h, plan) is None]
    require_removable(gated, plan)
    owners = stream_owners(gated) if plan.removal == "authors" else {}
    if record_of(model) is None:
        keep_places_(model, record.survey)
    paths = {handle.site: _put_gate(model, handle, plan) for handle in gated}
    vars(model)[RECORD] = replace(record, gates=tuple(paths.items()))
    gates = gates_by_site(model)
    for site, gate in gates.items():
        gate.is_open = not plan.removes(site)
    for block, owner in owners.items():
        pair = tuple(gate for site, gate in gates.items() if site.block == block)
        model.get_submodule(owner).register_forward_hook(StreamGelu(pair), prepend=True)
    return model


def restore_(model: nn.Module) -> nn.Module:
    """Take all gates off again: the very modules that were there before, so outputs are bit-equal."""
    wrapped = [(path, m) for path, m in model.named_modules() if isinstance(m, Gate | Behind)]
    for path, wrapper in sorted(wrapped, key=lambda pair: -len(pair[0])):
        model.set_submodule(path, wrapper.release())
    for module in model.modules():
        for number, hook in list(module._forward_hooks.items()):
            if isinstance(hook, StreamGelu) and hook.gates:
                del module._forward_hooks[number]
    if record := record_of(model):
        vars(model)[RECORD] = replace(record, gates=())
    return model


def gates_of(model: nn.Module) -> dict[str, Gate]:
    """Return the gates of a gated model by path."""
    return {path: module for path, module in model.named_modules() if isinstance(module, Gate)}


def gates_by_site(model: nn.Module) -> dict[Site, Gate]:
    """Return the gates of a gated model by the site that each of them is for, in order of execution."""
    gates = gates_of(model)
    return {site: gates[path] for site, path in require_record(model).gates}


def fill_gate_(model: nn.Module, site: Site, values: Values) -> nn.Module:
    """Set the values of the replacement that a gate has on its other side."""
    handle = next(handle for handle in require_record(model).survey.handles if handle.site == site)
    gate, parts = gates_by_site(model)[site], handle.parts
    is_core = parts is None or gate is model.get_submodule(parts.core)
    layout = parts and (parts.core_layout if is_core else parts.gate_layout)
    fill_values(gate.removed, values, layout.axis if layout else -1)
    return model


def _put_gate(model: nn.Module, handle: Handle, plan: Plan) -> str:
    """Gate a site and return where; a whole branch at its end, so that norms and scales behind the core are masked too.

    The gate is before scales that are no modules, so that its other side is not yet scaled either.
    """
    style = plan.style_of(handle.site.kind)
    if handle.ffn and style == "calibrated":
        return _put_gate_on_ffn(model, handle.ffn, handle.images_at)
    if plan.is_fitted(handle.site.kind):
        path, end = parts_of(handle).core, place_of(model, handle, style).target
        layout = parts_of(handle).core_layout if end == path else parts_of(handle).gate_layout
        like = next(model.get_submodule(path).parameters())
        removed = new_replacement(style, layout, like, parts_of(handle).extras if end == path else None)
    else:
        path, removed = stand_in(handle, plan)
        end = parts_of(handle).gate if goes_whole(handle, plan) else path
        removed = removed if end == path else Zero()
    gate = Gate(model.get_submodule(end), removed, handle.images_at)
    gate.to(next(model.parameters()).device)
    if end != path:
        is_source = isinstance(removed, Mapped)
        put_(model, path, Behind(model.get_submodule(path), gate, parts_of(handle).extras, is_source))
    put_(model, end, gate)
    return end


def _put_gate_on_ffn(model: nn.Module, ffn: Ffn, images_at: int) -> str:
    """Gate an FFN whose other side is one layer; closed, neither of its two layers runs, nor what is between them."""
    first, second = layer_at(model, ffn.first), layer_at(model, ffn.second)
    zeros = first.weight.new_zeros(len(second.weight), first.weight.shape[1], dtype=torch.float64)
    layer = new_layer(zeros, zeros.sum(1), first.weight, isinstance(first, nn.Conv2d))
    gate = Gate(second, Mapped(layer), images_at).to(first.weight.device)
    put_(model, ffn.first, Behind(first, gate, is_source=True))
    for path in (ffn.activation, *ffn.between):
        put_(model, path, Behind(model.get_submodule(path), gate))
    put_(model, ffn.second, gate)
    return ffn.second
