"""``prune_``: the layers of a plan removed for good, module for module.

No ``forward`` is copied: a removed layer is replaced by a module with the same signature (``core.gates``).
Nothing is trained, fitted, measured or chosen here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from hetdpt.adapters.anatomy import Handle
from hetdpt.adapters.ffn import Ffn
from hetdpt.adapters.layout import TokenLayout
from hetdpt.adapters.output_attentions import keep_places_
from hetdpt.core.errors import PlanError
from hetdpt.core.gates import (
    ForPatches,
    Pass,
    PatchMap,
    Removed,
    StreamGelu,
    Values,
    fill_layer_,
    replacement_class,
)
from hetdpt.core.modules import clone, put_, require_takes
from hetdpt.core.plan import NARROWER, Fit, Plan, Removal, Site, with_class_token
from hetdpt.core.styles import ClassTokenChoice, Style
from hetdpt.surgery.arrange import arrange_, require_arrangeable
from hetdpt.surgery.merge import merge_ffn_, neutralise_
from hetdpt.surgery.record import (
    RECORD,
    InputSize,
    Record,
    layer_at,
    layout_of,
    parts_of,
    record_for,
    record_of,
    require_record,
    with_layout,
)
from hetdpt.surgery.replacement import new_replacement, place_of, require_removable, why_not_removable
from hetdpt.surgery.tail import require_tail


def prune_(model: nn.Module, plan: Plan, input_size: InputSize | None = None) -> nn.Module:
    """Remove the layers of ``plan`` for good. More layers of a pruned model may be removed by a larger plan.

    Styles that are fitted on images need ``hetdpt.calibrate_``.

    >>> import timm
    >>> from hetdpt import sites
    >>> model = timm.create_model("vit_tiny_patch16_224", depth=2, num_classes=10)
    >>> model = prune_(model, Plan(attention=(0,), activation=(1,)))
    >>> [site.path for site in sites(model)]
    ['blocks.0.mlp.act', 'blocks.1.attn']
    """
    refuse_reductions(plan)
    if plan.tail > 1:
        raise PlanError(
            f"a tail of {plan.tail} blocks is fitted on images, but none were given; pass --data, call "
            "hetdpt.calibrate_(model, plan, batches), or use a tail of 1, which is exact"
        )
    if plan.fitted:
        raise PlanError(
            f"removal style {plan.fitted[0]!r} is fitted on images, but none were given; pass --data, call "
            "hetdpt.calibrate_(model, plan, batches), or use removal 'plain'"
        )
    return place_(model, replace(plan, fits=()), input_size)


def refuse_reductions(plan: Plan) -> None:
    """Raise ``PlanError`` if branches are to be narrower or tokens fewer, which is not done here."""
    if plan.tokens is not None:
        raise PlanError(
            f"the plan reduces tokens ({plan.tokens.method}, r = {plan.tokens.r}), which is done last; apply it "
            "with hetdpt apply --data, or hetdpt.apply_(model, plan, batches), and use that model"
        )
    for move in plan.narrower:
        raise PlanError(
            f"the plan leaves {move}, which is fitted on images; apply the plan with "
            "hetdpt apply --data, or hetdpt.apply_(model, plan, batches), and use that model"
        )


def place_(model: nn.Module, plan: Plan, input_size: InputSize | None = None) -> nn.Module:
    """Remove layers as ``prune_`` does, with any style; a replacement that has to be fitted has no values yet.

    Until they are set (``fill_``), a constant is 0, and so is a map in place of attention or of a gated FFN; the map
    in place of an FFN is what ``identity`` would leave.
    """
    record = record_for(model, plan, input_size)
    whole = _united(plan, record)
    if whole.tail:
        record = with_layout(model, record)
        require_tail(record, whole)
    removed = record.to_remove(plan)
    for handle in removed:
        require_removable(handle, plan.style_of(handle.site))
    _refuse_folded_into(removed, plan, record)
    require_arrangeable(model, replace(record, plan=whole))
    both = [handle for handle in record.survey.handles if whole.removes(handle.site)]
    owners = stream_owners(both) if plan.has_stream_gelu else {}
    if record_of(model) is None:
        keep_places_(model, record.survey)
    for handle in removed:
        _remove(model, handle, plan.style_of(handle.site), record.layout)
    for block in {handle.site.block for handle in removed} & owners.keys():
        model.get_submodule(owners[block]).register_forward_hook(StreamGelu(), prepend=True)
    single = tuple(h.site.block for h in removed if h.ffn and plan.style_of(h.site).removes == "ffn")
    vars(model)[RECORD] = replace(record, plan=whole, merged=record.merged + single)
    return arrange_(model)


def _united(plan: Plan, record: Record) -> Plan:
    """Return one plan for what was removed before and what ``plan`` removes."""
    attention = {*plan.attention, *record.plan.attention}
    fits = record.plan.fits or plan.fits
    before = [handle.site for handle in record.removed]
    kept = [(site.kind, site.block, record.plan.style_of(site).name) for site in before]
    narrower: dict[str, Any] = {name: (*getattr(record.plan, name), *getattr(plan, name)) for name in NARROWER}
    return replace(
        plan,
        attention=tuple(attention),
        activation=tuple({*plan.activation, *record.plan.activation}),
        site_styles=(*plan.site_styles, *kept),
        tail=max(plan.tail, record.plan.tail),
        **narrower,
        anatomy=record.survey.anatomy,
        fits=tuple(fit for fit in fits if fit.kind != "tail" or fit.block not in attention),
    )


def ready(model: nn.Module, removal: Removal, input_size: InputSize | None = None) -> nn.Module:
    """Return a copy of ``model`` in eval mode whose record has its sites and the ``removal`` to use for them.

    A model pruned already keeps the removal it was pruned with.
    """
    record = record_of(model)
    plan = Plan(removal=record.plan.removal if record and len(record.plan) else removal)
    return place_(clone(model).eval(), plan, input_size)


def settled_removal(
    model: nn.Module, removal: Removal, class_token: ClassTokenChoice, input_size: InputSize | None = None
) -> Removal:
    """Return ``removal`` with the activation style in which the class token keeps its FFN, or not, as chosen.

    ``auto`` is described at ``ClassTokenChoice``; a model pruned already keeps the style it was pruned with.
    """
    if class_token != "auto":
        return with_class_token(removal, class_token)
    record, style = record_of(model), Plan(removal=removal).style_of("activation")
    if not style.fit or style.removes == "branch":
        return removal
    if record and len(record.plan):
        return with_class_token(removal, record.plan.class_token)
    kept = with_class_token(removal, "keep")
    try:
        found = require_record(place_(clone(model).eval(), Plan(removal=kept), input_size))
    except PlanError:
        return with_class_token(removal, "share")
    handles = [handle for handle in found.survey.handles if handle.site.kind == "activation"]
    is_able = all(why_not_removable(handle, Plan(removal=kept).style_of("activation")) is None for handle in handles)
    is_read_alone = layout_of(found).read is not None
    return kept if is_able and is_read_alone else with_class_token(removal, "share")


def ready_for(images: Tensor, model: nn.Module, removal: Removal) -> nn.Module:
    """Return what ``ready`` does, for the size of ``images`` (B, C, H, W); ``DataError`` if the model refuses them."""
    require_takes(clone(model).eval(), images)
    channels, height, width = images.shape[1:]
    return ready(model, removal, (channels, height, width))


def without(model: nn.Module, site: Site, style: str | None = None) -> nn.Module:
    """Return a copy of ``model`` (one that is ``ready``) with one site removed, by its own removal or by ``style``.

    A replacement that has to be fitted has no values yet.
    """
    return place_(clone(model), plan_without(model, site, style))


def plan_without(model: nn.Module, site: Site, style: str | None = None) -> Plan:
    """Return the plan that removes one site of ``model`` (one that is ``ready``), as ``without`` does."""
    plan = Plan(removal=require_record(model).plan.removal)
    return plan.plus(site) if style is None else plan.with_style(site, style)


def removable(model: nn.Module, wanted: Iterable[Site] | None = None) -> list[Site]:
    """Return the ``wanted`` sites, or all before a tail that can be removed from a model that is ``ready``, in order.

    ``PlanError`` says which of the wanted sites cannot be removed.
    """
    record = require_record(model)
    left = {handle.site: (handle, record.plan.style_of(handle.site.kind)) for handle in record.left}
    if wanted is None:
        end = record.survey.anatomy.blocks - record.plan.tail  # in a tail there is next to nothing to save
        return [site for site in left if site.block < end and why_not_removable(*left[site]) is None]
    wanted = list(wanted)
    for site in wanted:
        if site not in left:
            raise PlanError(
                f"{site} at {site.path} is not a site of this model, or was removed already; "
                "hetdpt.sites(model) lists those that are left"
            )
        require_removable(*left[site])
    return [site for site in left if site in wanted]


def fill_(model: nn.Module, site: Site, values: Values, fit: Fit) -> nn.Module:
    """Set the values of a replacement that ``place_`` made."""
    record = require_record(model)
    handle = record.handle_of(site)
    if record.plan.style_of(site).removes == "patches":
        patches = model.get_submodule(f"{parts_of(handle).core}.patches")
        assert isinstance(patches, PatchMap)
        patches.fill_(values, -1)
    elif handle.ffn:
        fill_layer_(layer_at(model, handle.ffn.first), values)
    else:
        replacement = model.get_submodule(parts_of(handle).core)
        assert isinstance(replacement, Removed)
        replacement.fill_(values, parts_of(handle).core_layout.axis)
    vars(model)[RECORD] = replace(record, plan=replace(record.plan, fits=(*record.plan.fits, fit)))
    return model


def _refuse_folded_into(handles: list[Handle], plan: Plan, record: Record) -> None:
    """Refuse to remove an FFN into whose bias the replacement of an attention was folded."""
    full = {h.bias: h.site.block for h in record.survey.handles if h.site.block in record.folded_constants and h.bias}
    for handle in handles:
        is_whole = plan.style_of(handle.site).removes == "branch"
        name = f"{handle.ffn.second}.bias" if handle.ffn and is_whole else None
        if name in full:
            raise PlanError(
                f"the FFN of block {handle.site.block} cannot be removed: merging has folded the replacement of "
                f"attention {full[name]} into its bias; remove both before merging"
            )


def _remove(model: nn.Module, handle: Handle, style: Style, layout: TokenLayout | None) -> None:
    """Replace a layer and remove what its replacement makes superfluous in the branch."""
    if style.class_token == "keep":
        path = handle.site.path if style.removes == "layer" else parts_of(handle).core
        replacement = new_replacement(model, handle, style, path, layout)
        assert isinstance(replacement, ForPatches)
        return replacement.keep_()
    if style.removes == "ffn" and handle.ffn:
        return _put_single(model, handle.ffn)
    if style.removes == "layer":
        path = handle.site.path if handle.site.kind == "activation" else parts_of(handle).core
        return put_(model, path, new_replacement(model, handle, style, path, layout))
    parts, uses_input = parts_of(handle), replacement_class(style).uses_input
    is_at_end = not style.fit or place_of(model, handle, style).target == parts.gate
    put_(model, parts.core, new_replacement(model, handle, style, parts.core, layout))
    for path in (*(() if uses_input else parts.entry), *(parts.exits if is_at_end else ())):
        put_(model, path, Pass())
    if is_at_end:
        kept = parts.early if uses_input else ()  # a map was fitted to inputs that they have scaled
        for name in (name for name in parts.parameters if name not in kept):
            neutralise_(model, name)
    return None


def _put_single(model: nn.Module, ffn: Ffn) -> None:
    """Replace an FFN by a single layer, as merging does, but always with a bias."""
    merge_ffn_(model, ffn)
    layer = layer_at(model, ffn.first)
    if layer.bias is None:
        layer.bias = nn.Parameter(layer.weight.new_zeros(len(layer.weight)), layer.weight.requires_grad)


def stream_owners(handles: list[Handle]) -> dict[int, str]:
    """Return the module of each block both of whose layers are among ``handles``."""
    kinds: dict[int, list[Handle]] = {}
    for handle in handles:
        kinds.setdefault(handle.site.block, []).append(handle)
    pairs = {block: pair for block, pair in kinds.items() if len(pair) == 2}
    for block, pair in pairs.items():
        if pair[0].owner != pair[1].owner:
            raise PlanError(
                f"removal 'authors' needs blocks that are one module, but block {block} is {pair[0].owner} and "
                f"{pair[1].owner}; use removal 'norm'"
            )
    return {block: pair[0].owner for block, pair in pairs.items()}
