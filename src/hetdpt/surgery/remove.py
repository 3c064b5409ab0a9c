"""``gate_``, ``restore_``, ``prune_``, ``merge_``: a model changed in place by a plan, module for module.

No ``forward`` is copied: what is removed is replaced by a module with the same calling habits (``core.gates``).
Nothing is trained, fitted, measured or chosen here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.hooks import RemovableHandle

from hetdpt.adapters.anatomy import Handle, Layout, Parts, Survey, survey
from hetdpt.adapters.branches import MULTIPLICATIONS
from hetdpt.adapters.ffn import Ffn
from hetdpt.adapters.models import input_size_of, set_size_
from hetdpt.adapters.output_attentions import keep_places_
from hetdpt.adapters.preprocessing import PREPROCESSING
from hetdpt.adapters.trace import dry_run, trace
from hetdpt.core.errors import ModelError, PlanError, first_line
from hetdpt.core.fold import Layer, add, fold_norm, fold_pair, is_cheaper_folded, new_layer
from hetdpt.core.gates import Behind, Constant, Extras, Gate, Mapped, Pass, Removed, StreamGelu, Zero, per_image
from hetdpt.core.modules import clone, put_, require_takes
from hetdpt.core.plan import Fit, Plan, Site
from hetdpt.core.reductions import Tokens

InputSize = tuple[int, int, int]
Removal = str | tuple[str, str]
Values = Tensor | tuple[Tensor, Tensor]
"""A constant (places, D), or the matrix and the bias of a linear map."""
RECORD = "_hetdpt"
SAME_PLACES = {"view", "_unsafe_view", "reshape", "clone", "alias", "detach", "_to_copy"}
"""Operations that leave every value in its place where they leave the shape."""
CHANGES = MULTIPLICATIONS | {"constant_pad_nd"}
"""Operations after which a constant is another one, or none."""


@dataclass(frozen=True)
class Record:
    """What has been done to a model; kept on the model itself, copied with it, not part of its state dict."""

    survey: Survey
    plan: Plan
    merged: tuple[int, ...] = ()
    """Blocks whose FFN is one layer now."""
    folded_norms: tuple[int, ...] = ()
    """Those of them whose LayerNorm has lost its affine part to that layer."""
    folded_constants: tuple[int, ...] = ()
    """Blocks whose attention was replaced by a constant that the bias before it has taken in."""
    gates: tuple[tuple[Site, str], ...] = ()
    """The sites that have gates, and the paths of these."""
    is_narrowed: bool = False
    """Whether its sizes are others than those it was built with (:mod:`hetdpt.reduce.width.narrow`)."""
    tokens: Tokens | None = None
    """How its blocks reduce tokens, if they do (:mod:`hetdpt.reduce.tokens.reduce`)."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Record:
        return self  # nothing in it ever changes


def record_of(model: nn.Module) -> Record | None:
    """Return what has been done to ``model``; None for an untouched one."""
    return vars(model).get(RECORD)


def known(model: nn.Module) -> Record:
    """Return what has been done to a model that is pruned, or ``ready`` to be."""
    record = record_of(model)
    assert record is not None
    return record


def survey_of(model: nn.Module, input_size: InputSize | None = None) -> Survey:
    """Return where the layers of ``model`` are or, in a pruned one, were."""
    record = record_of(model)
    return record.survey if record else survey(model, input_size or input_size_of(model))


def sites(model: nn.Module, input_size: InputSize | None = None) -> list[Site]:
    """Return the removable places of ``model``, in order of execution; of a pruned one, those that are left.

    ``input_size`` (C, H, W) is taken from the model where it says so.

    >>> import timm
    >>> model = timm.create_model("vit_tiny_patch16_224", depth=2)
    >>> [f"{site.kind} {site.block}: {site.path}" for site in sites(model)]  # doctest: +NORMALIZE_WHITESPACE
    ['attention 0: blocks.0.attn', 'activation 0: blocks.0.mlp.act',
     'attention 1: blocks.1.attn', 'activation 1: blocks.1.mlp.act']
    """
    record = record_of(model)
    found = survey_of(model, input_size)
    return [handle.site for handle in found.handles if record is None or not record.plan.removes(handle.site)]


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
    record = _begin(model, plan, input_size, is_temporary=True)
    left = [h for h in record.survey.handles if not record.plan.removes(h.site) and (sites is None or h.site in sites)]
    gated = [h for h in left if plan.removes(h.site) or why_not_removable(h, plan) is None]
    _require(gated, plan)
    owners = _stream_owners(gated) if plan.removal == "authors" else {}
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
    return {site: gates[path] for site, path in known(model).gates}


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
    record = _begin(model, plan, input_size)
    going = [h for h in record.survey.handles if plan.removes(h.site) and not record.plan.removes(h.site)]
    _require(going, plan)
    _require_empty(going, plan, record)
    whole = replace(
        plan,
        attention=tuple({*plan.attention, *record.plan.attention}),
        activation=tuple({*plan.activation, *record.plan.activation}),
        anatomy=record.survey.anatomy,
        fits=record.plan.fits or plan.fits,
    )
    gone = [h for h in record.survey.handles if whole.removes(h.site)]
    owners = _stream_owners(gone) if plan.removal == "authors" else {}
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
    record = known(model)
    removal = record.plan.removal
    if style not in (None, record.plan.style_of(site.kind)):
        removal = (style or "", "identity") if site.kind == "attention" else ("skip", style or "")
    return place_(clone(model), Plan(**{site.kind: (site.block,)}, removal=removal))  # type: ignore[arg-type]


def removable(model: nn.Module, asked: Iterable[Site] | None = None) -> list[Site]:
    """Return the sites asked for, or all that a model that is ``ready`` can lose; ``PlanError`` if one cannot go."""
    record = known(model)
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


def merge_(model: nn.Module, fold_norms: bool = False, fold_constants: bool = True) -> nn.Module:
    """Make one layer of the two linear ones that a removed activation left (paper, Eq. 7), where that is cheaper.

    LayerScale is folded in; with ``fold_norms`` the affine part of the LayerNorm before it too, which saves 2 D
    parameters. With ``fold_constants`` a constant in place of attention goes into the bias of the FFN before it, or the
    embedding of positions, where no other layer and no output sees the difference; leave it out where streams between
    blocks are read by other ways than ``forward``. The function stays the same up to rounding; merging twice changes
    nothing.
    """
    record = record_of(model)
    if record is None:
        return model
    ffns = {h.site.block: h.ffn for h in record.survey.handles if h.ffn and _is_linear(h, record.plan)}
    worth = [block for block, ffn in ffns.items() if block in record.merged or _is_worth_merging(model, ffn)]
    constants = record.plan.attention if fold_constants else ()
    return merge_blocks_(model, worth, worth if fold_norms else (), constants)


def merge_blocks_(
    model: nn.Module,
    blocks: Iterable[int],
    folded_norms: Iterable[int] = (),
    folded_constants: Iterable[int] = (),
) -> nn.Module:
    """Merge the FFNs of these ``blocks``, fold the norms and constants of some; what is done already stays.

    Of ``folded_constants`` those are passed over that nothing can take in.
    """
    _refuse_gated(model)
    record = known(model)
    ffns = {h.site.block: h.ffn for h in record.survey.handles if _is_linear(h, record.plan) and h.ffn}
    merged, folded, taken_in = [*record.merged], [*record.folded_norms], [*record.folded_constants]
    for block in blocks:
        if block in ffns and block not in merged:
            _merge_ffn(model, ffns[block])
            merged.append(block)
    for block in folded_norms:
        if block in merged and block not in folded and ffns[block].norm:
            _fold_norm(model, ffns[block])
            folded.append(block)
    record = replace(record, merged=tuple(merged), folded_norms=tuple(folded))
    for handle in record.survey.handles:
        is_asked = handle.site.kind == "attention" and handle.site.block in folded_constants
        if is_asked and handle.site.block not in taken_in and _fold_constant(model, handle, record):
            taken_in.append(handle.site.block)
    vars(model)[RECORD] = replace(record, folded_constants=tuple(taken_in))
    return model


def resize_(model: nn.Module, size: int | tuple[int, int]) -> nn.Module:
    """Make ``model``, pruned or not, take images of ``size``, a side or height and width, for good.

    ``ModelError`` says why it cannot, and nothing has changed. What is known of a pruned model is of the new size then.

    >>> import timm
    >>> model = prune_(timm.create_model("vit_tiny_patch16_224", depth=2), Plan(attention=(0,)))
    >>> resize_(model, (96, 160))(torch.zeros(1, 3, 96, 160)).shape
    torch.Size([1, 1000])
    """
    sides = (size, size) if isinstance(size, int) else tuple(size) if isinstance(size, tuple | list) else ()
    if len(sides) != 2 or not all(isinstance(side, int) and side > 0 for side in sides):
        raise ModelError(f"a size of images is a side in pixels or a pair (height, width), not {size!r}")
    height, width = sides
    channels, *before = input_size_of(model)
    if before == [height, width]:
        return model
    record = record_of(model)
    _require_any_size(model, record)
    probe = clone(model)
    set_size_(probe, height, width)
    _require_takes(probe, (channels, height, width))
    set_size_(model, height, width)
    if record:
        vars(model)[RECORD] = replace(record, survey=resurvey(probe, record.survey, (channels, height, width)))
    if wants := vars(model).get(PREPROCESSING):
        vars(model)[PREPROCESSING] = replace(wants, input_size=(channels, height, width))
    return model


def _require_any_size(model: nn.Module, record: Record | None) -> None:
    """Refuse what was done to a model and is tied to the number of its tokens."""
    _refuse_gated(model)
    if record and record.tokens is not None:
        raise ModelError(
            "this model reduces its tokens, so many of those it has; call restore_tokens_(model), change the size of "
            "its images, then reduce them again"
        )
    if record and record.plan.attention and record.plan.style_of("attention") == "position":
        raise ModelError(
            "attention of this model was replaced by values for each place in the image (removal style 'position'), "
            "so that the size of its images cannot change; calibrate it at the new size, or use style 'constant'"
        )


def _require_takes(model: nn.Module, size: InputSize) -> None:
    try:
        dry_run(model, (2, *size), lambda *_: torch.no_grad())
    except ModelError as error:
        why = first_line(error.__cause__ or error).rstrip(".")
        raise ModelError(
            f"{type(model).__name__} cannot be given images of {size[1]} x {size[2]}: {why}; give it the size when it "
            "is built (img_size, image_size)"
        ) from None


def resurvey(model: nn.Module, found: Survey, size: InputSize) -> Survey:
    """Return ``found`` with values lying as they do in ``model``, which may have lost layers, on images of ``size``."""
    calls = trace(model, size).calls
    shapes = {call.path: call.output.shape[1:] for call in calls if call.output}

    def handle(one: Handle) -> Handle:
        if one.parts is None:
            return one
        core = replace(one.parts.core_layout, shape=shapes[one.parts.core])
        gate = replace(one.parts.gate_layout, shape=shapes[one.parts.gate])
        return replace(one, parts=replace(one.parts, core_layout=core, gate_layout=gate))

    return replace(found, handles=tuple(handle(one) for one in found.handles), input_size=size)


@contextmanager
def drop_paths(model: nn.Module, rate: float, found: Survey | None = None) -> Iterator[None]:
    """Leave out branches at random while ``model`` trains: one of image and block with probability rate * l / (L - 1).

    Where a model was built with drop path, its own modules do it. ``found`` is where its layers are, if that is known.
    """
    record, found = record_of(model), found or survey_of(model)
    gone = [h for h in found.handles if record and record.plan.removes(h.site) and _is_idle(h, record.plan)]
    chances = {block: rate * block / max(found.anatomy.blocks - 1, 1) for block in range(found.anatomy.blocks)}
    owners = {handle.owner: chances[handle.site.block] for handle in found.handles}
    inside = [(module, chance) for path, chance in owners.items() for module in model.get_submodule(path).modules()]
    own = [(module, chance) for module, chance in inside if "drop_prob" in vars(module)]
    before = [vars(module)["drop_prob"] for module, _ in own]
    drop = _DropPath()
    hooks: list[RemovableHandle] = []
    if rate and not own:
        hooks.append(model.register_forward_pre_hook(drop.begin, with_kwargs=True))
        for handle in (h for h in found.handles if h.parts and h not in gone):
            end = model.get_submodule(_parts(handle).gate)
            hooks.append(end.register_forward_hook(partial(drop, chances[handle.site.block], handle.images_at)))
    try:
        for module, chance in own:
            vars(module)["drop_prob"] = chance
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for (module, _), chance in zip(own, before, strict=True):
            vars(module)["drop_prob"] = chance


class _DropPath:
    """Zeroes the branch of some images and scales that of the others, so that the mean stays."""

    images = 1

    def begin(self, _: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        self.images = len(next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)))

    def __call__(self, chance: float, images_at: int, module: nn.Module, _: Any, output: Any) -> Any:
        branch = output[0] if isinstance(output, tuple) else output  # (B, ...), or (B * windows, ...)
        kept = per_image(F.dropout(branch.new_ones(self.images), chance, module.training), branch, images_at)
        return (branch * kept, *output[1:]) if isinstance(output, tuple) else branch * kept


def _begin(model: nn.Module, plan: Plan, input_size: InputSize | None, is_temporary: bool = False) -> Record:
    """Return the record of a model that ``plan`` may be applied to; ``PlanError`` says why it may not.

    What is ``temporary``, gates, may be of another removal than replacements that were fitted.
    """
    _refuse_gated(model)
    found = survey_of(model, input_size)
    is_early = plan.anatomy == found.first_anatomy  # written when its width was not yet that of channels
    (replace(plan, anatomy=None) if is_early else plan).check(found.anatomy)
    record = record_of(model) or Record(found, Plan())
    if record.tokens is not None:
        raise PlanError(
            "this model reduces its tokens; call restore_tokens_(model), remove layers, then reduce them again"
        )
    is_same = record.plan.styles == plan.styles and (record.plan.removal == "authors") == (plan.removal == "authors")
    if len(record.plan) and not is_same and not (is_temporary and record.plan.fitted):
        raise PlanError(
            f"this model was pruned with removal {record.plan.removal!r} and the plan says {plan.removal!r}; "
            "use the same removal for all layers of a model"
        )
    return record


def _is_linear(handle: Handle, plan: Plan) -> bool:
    """Whether the plan leaves two linear layers in a row, or one."""
    is_linear = plan.style_of("activation") in ("identity", "calibrated")
    return handle.ffn is not None and plan.removes(handle.site) and is_linear


def _is_worth_merging(model: nn.Module, ffn: Ffn) -> bool:
    return is_cheaper_folded(_layer(model.get_submodule(ffn.first)), _layer(model.get_submodule(ffn.second)))


def _layer(module: nn.Module) -> Layer:
    assert isinstance(module, Layer)
    return module


def _merge_ffn(model: nn.Module, ffn: Ffn) -> None:
    first, second = _layer(model.get_submodule(ffn.first)), _layer(model.get_submodule(ffn.second))
    scale = model.get_parameter(ffn.scale) if ffn.scale else None
    put_(model, ffn.first, fold_pair(first, second, scale))
    for path in (ffn.activation, *ffn.between, ffn.second):
        put_(model, path, Pass())
    if ffn.scale:
        _neutralise(model, ffn.scale)


def _fold_norm(model: nn.Module, ffn: Ffn) -> None:
    assert ffn.norm is not None
    norm = model.get_submodule(ffn.norm)
    assert isinstance(norm, nn.LayerNorm)
    if norm.elementwise_affine:
        put_(model, ffn.first, fold_norm(norm, _layer(model.get_submodule(ffn.first))))
        norm.weight = norm.bias = None  # type: ignore[assignment]
        norm.elementwise_affine = False


def _fold_constant(model: nn.Module, handle: Handle, record: Record) -> bool:
    """Add what a constant adds to the bias before it instead; return whether there is one and it may."""
    constant = model.get_submodule(_parts(handle).core)
    name = _bias_now(handle, record)
    is_changed = not CHANGES.isdisjoint(_parts(handle).tail)
    if not isinstance(constant, Constant) or name is None or is_changed:
        return False
    bias = model.get_parameter(name)
    value: Tensor
    if bias.ndim == constant.bias.ndim == 1:
        value = constant.bias
    elif bias.ndim > 1 and _parts(handle).is_direct and _fits(constant.value, bias):
        value = constant.value
    else:
        return False
    path, _, leaf = name.rpartition(".")
    total = nn.Parameter(add(bias, value), requires_grad=bias.requires_grad)
    model.get_submodule(path).register_parameter(leaf, total)
    put_(model, _parts(handle).core, Zero(constant.extras))
    return True


def _fits(value: Tensor, bias: Tensor) -> bool:
    """Whether ``bias`` has a place for each that ``value`` has: not so where positions are interpolated."""
    return all(side in (1, full) for side, full in zip(value.shape[::-1], bias.shape[::-1], strict=False))


def _bias_now(handle: Handle, record: Record) -> str | None:
    """Return the parameter that is added to the stream right before a branch, where it is now; None if it is gone."""
    name = handle.bias
    for other in record.survey.handles:
        if other.ffn and name == f"{other.ffn.second}.bias":
            if other.site.block in record.merged:
                return f"{other.ffn.first}.bias"
            is_dropped = record.plan.removes(other.site) and _goes_whole(other, record.plan)
            return None if is_dropped or other.ffn.scale else name
    return name


def why_not_removable(handle: Handle, plan: Plan) -> str | None:
    """Return why the plan's style cannot remove a site, or None if it can."""
    style = plan.style_of(handle.site.kind)
    if style == "identity" and handle.site.is_gated:
        return (
            f"activation {handle.site.block} belongs to a gated FFN, which has no exact linear form; "
            "use removal 'calibrated' (a fitted linear map), or remove the whole FFN with removal=('skip', 'drop')"
        )
    if style == "drop" and handle.parts is None:
        return f"the FFN of block {handle.site.block} cannot go as a whole; use activation style 'identity'"
    if style == "position" and handle.images_at:
        return (
            f"attention {handle.site.block} has tokens before images, (N, B, D), so that there is no value for each "
            "place to be fitted; use removal style 'constant' or 'linear', or a model with batch_first=True"
        )
    return None


def _require(handles: list[Handle], plan: Plan) -> None:
    for handle in handles:
        if why := why_not_removable(handle, plan):
            raise PlanError(why)


@dataclass(frozen=True)
class Place:
    """Where a fitted replacement goes: it must give what ``target`` gives, scaled, for what ``source`` is given."""

    source: str
    """The module that the replacement takes the place of."""
    target: str
    scales: tuple[str, ...]
    """Parameters that multiply the output of ``target`` on its way to the stream; the replacement has them in it."""
    stream: str
    """The module that is given the residual stream."""
    is_end: bool
    """Whether the output of ``target``, scaled, is what the branch adds to the stream, lying the same way."""
    axis: int
    """Where the output of ``target`` has its channels, counted from the end."""


def place_of(model: nn.Module, handle: Handle, style: str) -> Place:
    """Return where the fitted replacement of a site goes that is still in ``model``."""
    if handle.ffn is not None:
        return _place_of_ffn(model, handle, handle.ffn)
    parts = _parts(handle)
    stream = (*parts.entry, parts.core)[0]
    is_mean = style == "constant"  # over all places, whatever order they are in
    if is_mean or parts.is_direct or parts.gate == parts.core:
        axis = parts.gate_layout.axis - len(parts.gate_layout.shape)
        is_end = parts.is_direct and SAME_PLACES.issuperset(parts.tail)
        return Place(parts.core, parts.gate, parts.scales, stream, is_end, axis)
    axis = parts.core_layout.axis - len(parts.core_layout.shape)
    return Place(parts.core, parts.core, (), stream, False, axis)


def _place_of_ffn(model: nn.Module, handle: Handle, ffn: Ffn) -> Place:
    scales = (ffn.scale,) if ffn.scale else ()
    parts = handle.parts
    stream = (*parts.entry, parts.core)[0] if parts else ffn.first
    is_end = ffn.is_end and parts is not None and parts.is_direct
    axis = -3 if isinstance(layer_at(model, ffn.second), nn.Conv2d) else -1
    return Place(ffn.first, ffn.second, scales, stream, is_end, axis)


def layer_at(model: nn.Module, path: str) -> nn.Module:
    """Return the layer at ``path``, also where a gate is there now."""
    module = model.get_submodule(path)
    return module.inner if isinstance(module, Gate | Behind) else module


def fill_(model: nn.Module, site: Site, values: Values, fit: Fit) -> nn.Module:
    """Set the values of a replacement that ``place_`` made: a constant, or a matrix and a bias."""
    record = known(model)
    handle = next(handle for handle in record.survey.handles if handle.site == site)
    if handle.ffn:
        _fill(model.get_submodule(handle.ffn.first), values)
    else:
        _fill(model.get_submodule(_parts(handle).core), values, _parts(handle).core_layout.axis)
    vars(model)[RECORD] = replace(record, plan=replace(record.plan, fits=(*record.plan.fits, fit)))
    return model


def fill_gate_(model: nn.Module, site: Site, values: Values) -> nn.Module:
    """Set the values of the replacement that a gate has on its other side."""
    handle = next(handle for handle in known(model).survey.handles if handle.site == site)
    gate, parts = gates_by_site(model)[site], handle.parts
    is_core = parts is None or gate is model.get_submodule(parts.core)
    layout = parts and (parts.core_layout if is_core else parts.gate_layout)
    _fill(gate.removed, values, layout.axis if layout else -1)
    return model


@torch.no_grad()
def _fill(module: nn.Module, values: Values, axis: int = -1) -> None:
    """Set a constant, whose channels are on ``axis``, or a matrix and a bias."""
    if isinstance(values, Tensor):
        assert isinstance(module, Constant)
        shape = module.value.movedim(axis, -1).shape
        module.bias.copy_(values.view(shape).movedim(-1, axis).reshape(module.bias.shape))
    else:
        layer = _layer(module.linear if isinstance(module, Mapped) else module)
        assert layer.bias is not None
        layer.weight.copy_(values[0].view_as(layer.weight))
        layer.bias.copy_(values[1])


def _require_empty(handles: list[Handle], plan: Plan, record: Record) -> None:
    """Refuse to drop an FFN whose bias has taken in what replaced an attention."""
    full = {h.bias: h.site.block for h in record.survey.handles if h.site.block in record.folded_constants and h.bias}
    for handle in handles:
        name = f"{handle.ffn.second}.bias" if handle.ffn and _goes_whole(handle, plan) else None
        if name in full:
            raise PlanError(
                f"the FFN of block {handle.site.block} cannot go: merging has put into its bias what replaced "
                f"attention {full[name]}; remove both before merging"
            )


def _stand_in(handle: Handle, plan: Plan) -> tuple[str, Removed]:
    """Return which module goes and what takes its place."""
    style = plan.style_of(handle.site.kind)
    if style == "identity":
        return handle.site.path, Pass()
    parts = _parts(handle)
    return parts.core, (Pass if style == "norm" else Zero)(parts.extras)


def _goes_whole(handle: Handle, plan: Plan) -> bool:
    return plan.style_of(handle.site.kind) in ("skip", "drop")


def _is_idle(handle: Handle, plan: Plan) -> bool:
    """Whether what is left of a branch does not depend on the image."""
    return plan.style_of(handle.site.kind) in ("skip", "drop", "constant", "position")


def _remove(model: nn.Module, handle: Handle, plan: Plan) -> None:
    is_fitted = plan.is_fitted(handle.site.kind)
    if is_fitted and handle.ffn:
        return _put_single(model, handle.ffn)
    is_at_end = not is_fitted or place_of(model, handle, plan.style_of(handle.site.kind)).target == _parts(handle).gate
    put_(model, *(_fitted(model, handle, plan) if is_fitted else _stand_in(handle, plan)))
    if _is_idle(handle, plan):
        for path in _parts(handle).entry:
            put_(model, path, Pass())
    if (is_fitted or _goes_whole(handle, plan)) and is_at_end:
        for path in _parts(handle).exits:
            put_(model, path, Pass())
        kept = () if _is_idle(handle, plan) else _parts(handle).early  # a map was fitted to what they give
        for name in (name for name in _parts(handle).parameters if name not in kept):
            _neutralise(model, name)


def _fitted(model: nn.Module, handle: Handle, plan: Plan) -> tuple[str, Removed]:
    """Return which module goes and the replacement that is to be fitted, with zeros for now."""
    style, parts = plan.style_of(handle.site.kind), _parts(handle)
    like = next(model.get_submodule(parts.core).parameters())
    return parts.core, _replacement(style, parts.core_layout, like, parts.extras)


def _replacement(style: str, layout: Layout, like: Tensor, extras: Extras) -> Removed:
    """Return a replacement of that style for values that lie that way, with zeros for now."""
    if style in ("constant", "position"):
        shape = layout.vector if style == "constant" else layout.shape
        bias = torch.zeros(layout.width if style == "constant" else shape, dtype=like.dtype, device=like.device)
        return Constant(nn.Parameter(bias, like.requires_grad), shape, extras)
    zeros = torch.zeros(layout.width, layout.width, dtype=torch.float64, device=like.device)
    is_map = len(layout.shape) == 3 and layout.axis == 0
    return Mapped(new_layer(zeros, zeros[0], like, is_map), extras)


def _put_single(model: nn.Module, ffn: Ffn) -> None:
    """Put one layer in place of an FFN; as in merging, but with a bias in any case."""
    _merge_ffn(model, ffn)
    layer = _layer(model.get_submodule(ffn.first))
    if layer.bias is None:
        layer.bias = nn.Parameter(layer.weight.new_zeros(len(layer.weight)), layer.weight.requires_grad)


def _put_gate(model: nn.Module, handle: Handle, plan: Plan) -> str:
    """Gate a site and return where; a whole branch at its end, so that norms and scales behind the core are masked too.

    The gate is before scales that are no modules, so that its other side is not yet scaled either.
    """
    style = plan.style_of(handle.site.kind)
    if handle.ffn and style == "calibrated":
        return _put_gate_on_ffn(model, handle.ffn, handle.images_at)
    if plan.is_fitted(handle.site.kind):
        path, end = _parts(handle).core, place_of(model, handle, style).target
        layout = _parts(handle).core_layout if end == path else _parts(handle).gate_layout
        like = next(model.get_submodule(path).parameters())
        removed = _replacement(style, layout, like, _parts(handle).extras if end == path else None)
    else:
        path, removed = _stand_in(handle, plan)
        end = _parts(handle).gate if _goes_whole(handle, plan) else path
        removed = removed if end == path else Zero()
    gate = Gate(model.get_submodule(end), removed, handle.images_at)
    gate.to(next(model.parameters()).device)
    if end != path:
        is_source = isinstance(removed, Mapped)
        put_(model, path, Behind(model.get_submodule(path), gate, _parts(handle).extras, is_source))
    put_(model, end, gate)
    return end


def _put_gate_on_ffn(model: nn.Module, ffn: Ffn, images_at: int) -> str:
    """Gate an FFN whose other side is one layer; closed, neither of its two layers runs, nor what is between them."""
    first, second = _layer(model.get_submodule(ffn.first)), _layer(model.get_submodule(ffn.second))
    zeros = first.weight.new_zeros(len(second.weight), first.weight.shape[1], dtype=torch.float64)
    layer = new_layer(zeros, zeros.sum(1), first.weight, isinstance(first, nn.Conv2d))
    gate = Gate(second, Mapped(layer), images_at).to(first.weight.device)
    put_(model, ffn.first, Behind(first, gate, is_source=True))
    for path in (ffn.activation, *ffn.between):
        put_(model, path, Behind(model.get_submodule(path), gate))
    put_(model, ffn.second, gate)
    return ffn.second


def _parts(handle: Handle) -> Parts:
    assert handle.parts is not None  # _require has seen to it
    return handle.parts


def _stream_owners(handles: list[Handle]) -> dict[int, str]:
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


def _refuse_gated(model: nn.Module) -> None:
    if any(isinstance(module, Gate) for module in model.modules()):
        raise PlanError("this model has gates on its layers; call restore_(model) first")


def _neutralise(model: nn.Module, name: str) -> None:
    """Put a plain 1 in place of a LayerScale parameter; a LayerScale module of its own becomes a pass."""
    path, _, leaf = name.rpartition(".")
    owner = model.get_submodule(path)
    if len(list(owner.parameters())) == 1 and not any(owner.children()):
        return put_(model, path, Pass())
    parameter = owner._parameters.pop(leaf)
    assert parameter is not None
    device = "cpu" if parameter.is_meta else parameter.device  # on meta it would never get its value
    one = torch.ones([1] * parameter.ndim, dtype=parameter.dtype, device=device)
    owner.register_buffer(leaf, one, persistent=False)
