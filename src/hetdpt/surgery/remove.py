"""``prune_``: the layers of a plan removed for good, module for module.

No ``forward`` is copied: what is removed is replaced by a module with the same calling habits (``core.gates``).
Nothing is trained, fitted, measured or chosen here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from torch import Tensor, nn

from hetdpt.adapters.anatomy import Handle
from hetdpt.adapters.ffn import Ffn
from hetdpt.adapters.output_attentions import keep_places_
from hetdpt.core.errors import PlanError
from hetdpt.core.gates import Pass, Removed, StreamGelu
from hetdpt.core.modules import clone, put_, require_takes
from hetdpt.core.plan import Fit, Plan, Site
from hetdpt.surgery.merge import merge_ffn_, neutralise_
from hetdpt.surgery.record import (
    RECORD,
    InputSize,
    Record,
    Removal,
    begin,
    goes_whole,
    is_idle,
    layer_at,
    parts_of,
    record_of,
    require_record,
)
from hetdpt.surgery.replacement import (
    Values,
    fill_values,
    new_replacement,
    place_of,
    require_removable,
    stand_in,
    why_not_removable,
)


def prune_(model: nn.Module, plan: Plan, input_size: InputSize | None = None) -> nn.Module:
    """Remove the layers of ``plan`` for good. A model already pruned may lose more under a larger plan.

    Removals that are fitted on images are the business of ``hetdpt.calibrate_``.

    >>> import timm
    >>> model = timm.create_model("vit_tiny_patch16_224", depth=2, num_classes=10)
    >>> model = prune_(model, Plan(attention=(0,), activation=(1,)))
    >>> [site.path for site in sites(model)]
    ['blocks.0.mlp.act', 'blocks.1.attn']
    """
    if plan.fitted:
        raise PlanError(
            f"removal style {plan.fitted[0]!r} is fitted on images, and there are none here; give --data, call "
            "hetdpt.calibrate_(model, plan, batches), or use removal 'plain'"
        )
    return place_(model, replace(plan, fits=()), input_size)


def place_(model: nn.Module, plan: Plan, input_size: InputSize | None = None) -> nn.Module:
    """Do what ``prune_`` does, under any style: a layer that is to be fitted has its place and shape, not its values.

    Until they are set (``fill_``), a constant is 0, and so is a map in place of attention or of a gated FFN; the map
    in place of an FFN is what ``identity`` would leave.
    """
    record = begin(model, plan, input_size)
    going = [h for h in record.survey.handles if plan.removes(h.site) and not record.plan.removes(h.site)]
    require_removable(going, plan)
    _require_empty(going, plan, record)
    whole = replace(
        plan,
        attention=tuple({*plan.attention, *record.plan.attention}),
        activation=tuple({*plan.activation, *record.plan.activation}),
        anatomy=record.survey.anatomy,
        fits=record.plan.fits or plan.fits,
    )
    gone = [h for h in record.survey.handles if whole.removes(h.site)]
    owners = stream_owners(gone) if plan.removal == "authors" else {}
    if record_of(model) is None:
        keep_places_(model, record.survey)
    for handle in going:
        _remove(model, handle, plan)
    for block in {handle.site.block for handle in going} & owners.keys():
        model.get_submodule(owners[block]).register_forward_hook(StreamGelu(), prepend=True)
    single = tuple(h.site.block for h in going if h.ffn and plan.style_of(h.site.kind) == "calibrated")
    vars(model)[RECORD] = replace(record, plan=whole, merged=record.merged + single)
    return model


def ready(model: nn.Module, removal: Removal, input_size: InputSize | None = None) -> nn.Module:
    """Return a copy of ``model`` in eval mode that knows its sites and by what removal it will lose them.

    A model pruned already keeps the removal it was pruned with.
    """
    record = record_of(model)
    is_pruned = record is not None and len(record.plan) > 0
    known = Plan(removal=record.plan.removal if record and is_pruned else removal)
    return place_(clone(model).eval(), known, input_size)


def ready_for(images: Tensor, model: nn.Module, removal: Removal) -> nn.Module:
    """Do what ``ready`` does, for a model that takes ``images`` (B, C, H, W); ``DataError`` where it does not."""
    require_takes(clone(model).eval(), images)
    channels, height, width = images.shape[1:]
    return ready(model, removal, (channels, height, width))


def without(model: nn.Module, site: Site, style: str | None = None) -> nn.Module:
    """Return a copy of ``model`` (one that is ``ready``) that has lost one site, by its own removal or by ``style``.

    A replacement that is to be fitted has no values yet.
    """
    record = require_record(model)
    removal = record.plan.removal
    if style not in (None, record.plan.style_of(site.kind)):
        removal = (style or "", "identity") if site.kind == "attention" else ("skip", style or "")
    return place_(clone(model), Plan(**{site.kind: (site.block,)}, removal=removal))  # type: ignore[arg-type]


def removable(model: nn.Module, asked: Iterable[Site] | None = None) -> list[Site]:
    """Return the sites asked for, or all that a model that is ``ready`` can lose; ``PlanError`` if one cannot go."""
    record = require_record(model)
    left = {handle.site: handle for handle in record.survey.handles if not record.plan.removes(handle.site)}
    if asked is None:
        return [site for site, handle in left.items() if why_not_removable(handle, record.plan) is None]
    asked = list(asked)
    for site in asked:
        if site not in left:
            raise PlanError(
                f"{site.kind} {site.block} at {site.path} is no site of this model, or is removed already; "
                "hetdpt.sites(model) lists what is left"
            )
        if why := why_not_removable(left[site], record.plan):
            raise PlanError(why)
    return [site for site in left if site in asked]


def fill_(model: nn.Module, site: Site, values: Values, fit: Fit) -> nn.Module:
    """Set the values of a replacement that ``place_`` made: a constant, or a matrix and a bias."""
    record = require_record(model)
    handle = next(handle for handle in record.survey.handles if handle.site == site)
    if handle.ffn:
        fill_values(model.get_submodule(handle.ffn.first), values)
    else:
        fill_values(model.get_submodule(parts_of(handle).core), values, parts_of(handle).core_layout.axis)
    vars(model)[RECORD] = replace(record, plan=replace(record.plan, fits=(*record.plan.fits, fit)))
    return model


def _require_empty(handles: list[Handle], plan: Plan, record: Record) -> None:
    """Refuse to drop an FFN whose bias has taken in what replaced an attention."""
    full = {h.bias: h.site.block for h in record.survey.handles if h.site.block in record.folded_constants and h.bias}
    for handle in handles:
        name = f"{handle.ffn.second}.bias" if handle.ffn and goes_whole(handle, plan) else None
        if name in full:
            raise PlanError(
                f"the FFN of block {handle.site.block} cannot go: merging has put into its bias what replaced "
                f"attention {full[name]}; remove both before merging"
            )


def _remove(model: nn.Module, handle: Handle, plan: Plan) -> None:
    is_fitted = plan.is_fitted(handle.site.kind)
    if is_fitted and handle.ffn:
        return _put_single(model, handle.ffn)
    is_at_end = (
        not is_fitted or place_of(model, handle, plan.style_of(handle.site.kind)).target == parts_of(handle).gate
    )
    put_(model, *(_fitted(model, handle, plan) if is_fitted else stand_in(handle, plan)))
    if is_idle(handle, plan):
        for path in parts_of(handle).entry:
            put_(model, path, Pass())
    if (is_fitted or goes_whole(handle, plan)) and is_at_end:
        for path in parts_of(handle).exits:
            put_(model, path, Pass())
        kept = () if is_idle(handle, plan) else parts_of(handle).early  # a map was fitted to what they give
        for name in (name for name in parts_of(handle).parameters if name not in kept):
            neutralise_(model, name)


def _fitted(model: nn.Module, handle: Handle, plan: Plan) -> tuple[str, Removed]:
    """Return which module goes and the replacement that is to be fitted, with zeros for now."""
    style, parts = plan.style_of(handle.site.kind), parts_of(handle)
    like = next(model.get_submodule(parts.core).parameters())
    return parts.core, new_replacement(style, parts.core_layout, like, parts.extras)


def _put_single(model: nn.Module, ffn: Ffn) -> None:
    """Put one layer in place of an FFN; as in merging, but with a bias in any case."""
    merge_ffn_(model, ffn)
    layer = layer_at(model, ffn.first)
    if layer.bias is None:
        layer.bias = nn.Parameter(layer.weight.new_zeros(len(layer.weight)), layer.weight.requires_grad)


def stream_owners(handles: list[Handle]) -> dict[int, str]:
    """Return the module of each block of which ``handles`` name both layers."""
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
