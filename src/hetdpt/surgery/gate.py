"""``gate_`` and ``restore_``: a gate on every removable layer, put on and taken off again. Nothing is removed here."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import torch
from torch import nn

from hetdpt.adapters.anatomy import Handle
from hetdpt.adapters.ffn import Ffn
from hetdpt.adapters.layout import TokenLayout
from hetdpt.adapters.output_attentions import keep_places_
from hetdpt.core.errors import PlanError
from hetdpt.core.fold import new_layer
from hetdpt.core.gates import Behind, Gate, Mapped, StreamGelu, Values
from hetdpt.core.modules import put_
from hetdpt.core.plan import Plan, Site
from hetdpt.core.styles import Style
from hetdpt.surgery.arrange import keep_positions_
from hetdpt.surgery.record import RECORD, InputSize, layer_at, parts_of, record_for, record_of, require_record
from hetdpt.surgery.remove import stream_owners
from hetdpt.surgery.replacement import new_replacement, place_of, require_removable, why_not_removable


def gate_(model: nn.Module, plan: Plan | None = None, input_size: InputSize | None = None) -> nn.Module:
    """Put a gate on every site that the plan's removal can remove, closed where the plan removes it.

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
    """Put gates as ``gate_`` does, with any style and only on ``sites``; fitted replacements have no values yet."""
    record = record_for(model, plan, input_size, is_temporary=True)
    gated = []
    for handle in record.left:
        style = plan.style_of(handle.site)
        if sites is not None and handle.site not in sites:
            continue
        if plan.removes(handle.site):
            require_removable(handle, style)
        if why_not_removable(handle, style) is None:
            gated.append(handle)
    owners = stream_owners(gated) if plan.has_stream_gelu else {}
    if record_of(model) is None:
        keep_places_(model, record.survey)
    paths = {h.site: _put_gate(model, h, plan.style_of(h.site), record.layout) for h in gated}
    vars(model)[RECORD] = replace(record, gates=tuple(paths.items()))
    gates = gates_by_site(model)
    for site, gate in gates.items():
        gate.is_open = not plan.removes(site)
    for block, owner in owners.items():
        pair = tuple(gate for site, gate in gates.items() if site.block == block)
        model.get_submodule(owner).register_forward_hook(StreamGelu(pair), prepend=True)
    return keep_positions_(model)


def restore_(model: nn.Module) -> nn.Module:
    """Take all gates off again: the modules of before are put back, so outputs are bit-equal."""
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
    """Return the gates of a gated model by site, in order of execution."""
    gates = gates_of(model)
    return {site: gates[path] for site, path in require_record(model).gates}


def fill_gate_(model: nn.Module, site: Site, values: Values) -> nn.Module:
    """Set the values of the replacement that a gate switches to."""
    gate, parts = gates_by_site(model)[site], require_record(model).handle_of(site).parts
    is_core = parts is None or gate is model.get_submodule(parts.core)
    layout = parts and (parts.core_layout if is_core else parts.gate_layout)
    gate.removed.fill_(values, layout.axis if layout else -1)
    return model


def _put_gate(model: nn.Module, handle: Handle, style: Style, layout: TokenLayout | None) -> str:
    """Gate a site and return where.

    A whole branch is gated at its end, so that norms and scales behind the core are masked too. The gate is before
    scales that are no modules, so its replacement is not scaled yet either.
    """
    if style.removes == "ffn" and handle.ffn:
        return _put_gate_on_ffn(model, handle.ffn, handle.images_at)
    if style.removes == "layer":
        path = end = handle.site.path if handle.site.kind == "activation" else parts_of(handle).core
    else:
        path = parts_of(handle).core
        end = place_of(model, handle, style).target if style.fit else parts_of(handle).gate
    removed = new_replacement(model, handle, style, end, layout)
    gate = Gate(model.get_submodule(end), removed, handle.images_at)
    gate.to(next(model.parameters()).device)
    if end != path:
        put_(model, path, Behind(model.get_submodule(path), gate, parts_of(handle).extras, removed.uses_input))
    put_(model, end, gate)
    return end


def _put_gate_on_ffn(model: nn.Module, ffn: Ffn, images_at: int) -> str:
    """Gate an FFN that a single layer replaces; while closed, neither of its two layers runs, nor what is between."""
    first, second = layer_at(model, ffn.first), layer_at(model, ffn.second)
    zeros = first.weight.new_zeros(len(second.weight), first.weight.shape[1], dtype=torch.float64)
    layer = new_layer(zeros, zeros.sum(1), first.weight, isinstance(first, nn.Conv2d))
    gate = Gate(second, Mapped(layer), images_at).to(first.weight.device)
    put_(model, ffn.first, Behind(first, gate, is_source=True))
    for path in (ffn.activation, *ffn.between):
        put_(model, path, Behind(model.get_submodule(path), gate))
    put_(model, ffn.second, gate)
    return ffn.second
