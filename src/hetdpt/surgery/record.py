"""What has been done to a model, kept on the model itself, and where its layers are. Nothing is changed here."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from hetdpt.adapters.anatomy import Handle, Parts, Survey, survey
from hetdpt.adapters.layout import TokenLayout, find_layout
from hetdpt.adapters.models import input_size_of
from hetdpt.core.errors import ModelError, PlanError
from hetdpt.core.fold import Layer
from hetdpt.core.gates import Behind, Gate
from hetdpt.core.plan import Plan, Site
from hetdpt.core.tokens import Tokens
from hetdpt.surgery.kept import STEP

InputSize = tuple[int, int, int]
RECORD = "_hetdpt"
LEFT_OUT = "tokens that nothing reads can be left out"
"""The purpose of most layouts of tokens, as it begins the sentence of an error."""


@dataclass(frozen=True)
class Record:
    """What has been done to a model; kept on the model itself, copied with it, not part of its state dict."""

    survey: Survey
    plan: Plan
    merged: tuple[int, ...] = ()
    """Blocks whose FFN is a single layer now."""
    folded_norms: tuple[int, ...] = ()
    """Those of them whose LayerNorm had its affine part folded into that layer."""
    folded_constants: tuple[int, ...] = ()
    """Blocks whose attention was replaced by a constant that was folded into the bias before it."""
    gates: tuple[tuple[Site, str], ...] = ()
    """The gated sites and the paths of their gates."""
    is_narrowed: bool = False
    """Whether its sizes differ from those it was built with (:mod:`hetdpt.reduce.width.narrow`)."""
    channels: tuple[int, ...] | None = None
    """Channels of the original residual stream that a narrowed one has left; None if it has all of them."""
    layout: TokenLayout | None = None
    """The layout of its tokens, once a change needed it; found before blocks were changed."""
    is_trimmed: bool = False
    """Whether tokens that nothing reads are not computed (:mod:`hetdpt.surgery.arrange`)."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Record:
        return self  # it is immutable

    @property
    def tokens(self) -> Tokens | None:
        """How its blocks reduce tokens, if they do (:mod:`hetdpt.reduce.tokens.reduce`)."""
        return self.plan.tokens

    @property
    def left(self) -> list[Handle]:
        """The sites that have not been removed, in order of execution."""
        return [handle for handle in self.survey.handles if not self.plan.removes(handle.site)]

    @property
    def removed(self) -> list[Handle]:
        """The sites that have been removed, in order of execution."""
        return [handle for handle in self.survey.handles if self.plan.removes(handle.site)]

    @property
    def attentions(self) -> dict[int, Handle]:
        """The attention of each block that has one, or had it before it was removed."""
        return {handle.site.block: handle for handle in self.survey.handles if handle.site.kind == "attention"}

    @property
    def leaves_out_tokens(self) -> bool:
        """Whether there are tokens that its last blocks do not compute."""
        return self.is_trimmed or self.plan.tail > 0

    def to_remove(self, plan: Plan) -> list[Handle]:
        """Return the sites that ``plan`` removes and that have not been removed yet, in order of execution."""
        return [handle for handle in self.left if plan.removes(handle.site)]

    def handle_of(self, site: Site) -> Handle:
        return next(handle for handle in self.survey.handles if handle.site == site)


def record_of(model: nn.Module) -> Record | None:
    """Return what has been done to ``model``; None for an untouched one."""
    return vars(model).get(RECORD)


def require_record(model: nn.Module) -> Record:
    """Return what has been done to a model that is pruned, or ``ready`` to be."""
    record = record_of(model)
    assert record is not None
    return record


def survey_of(model: nn.Module, input_size: InputSize | None = None) -> Survey:
    """Return where the layers of ``model`` are or, in a pruned one, were."""
    record = record_of(model)
    return record.survey if record else survey(model, input_size or input_size_of(model))


def sites(model: nn.Module, input_size: InputSize | None = None) -> list[Site]:
    """Return the removable layers of ``model``, in order of execution; of a pruned one, those that are left.

    ``input_size`` (C, H, W) is read from the model if it is not given.

    >>> import timm
    >>> model = timm.create_model("vit_tiny_patch16_224", depth=2)
    >>> [f"{site.kind} {site.block}: {site.path}" for site in sites(model)]  # doctest: +NORMALIZE_WHITESPACE
    ['attention 0: blocks.0.attn', 'activation 0: blocks.0.mlp.act',
     'attention 1: blocks.1.attn', 'activation 1: blocks.1.mlp.act']
    """
    record = record_of(model)
    return [handle.site for handle in (record.left if record else survey_of(model, input_size).handles)]


def record_for(model: nn.Module, plan: Plan, input_size: InputSize | None, is_temporary: bool = False) -> Record:
    """Return the record of a model, a new one if it is untouched; ``PlanError`` if ``plan`` cannot be applied to it.

    Gates are temporary: their removal may differ from that of replacements that were fitted.
    """
    refuse_gated(model)
    found = survey_of(model, input_size)
    is_early = plan.anatomy == found.first_anatomy  # written when its width was not yet that of channels
    (replace(plan, anatomy=None) if is_early else plan).check(found.anatomy)
    record = record_of(model) or Record(found, Plan())
    if record.tokens is not None:
        raise PlanError(
            "this model reduces its tokens; call restore_tokens_(model), remove layers, then reduce them again"
        )
    before, now = ((one.styles, one.has_stream_gelu) for one in (record.plan, plan))
    if len(record.plan) and before != now and not (is_temporary and record.plan.fitted):
        raise PlanError(
            f"this model was pruned with removal {record.plan.removal!r} and the plan says {plan.removal!r}; "
            "use the same removal for all layers of a model, and site_styles for those that differ"
        )
    return with_class_layout(model, record) if plan.class_token == "keep" else record


def with_class_layout(model: nn.Module, record: Record) -> Record:
    """Return the record with the layout of tokens; ``PlanError`` if there are no class tokens to keep an FFN for."""
    advice = "use class_token 'share'"
    try:
        record = with_layout(model, record, "the class token can keep its FFN")
    except ModelError as error:
        raise PlanError(f"{error}; {advice}") from None
    if not layout_of(record).protected:
        raise PlanError(f"the blocks of this model get patches alone, no class token that keeps its FFN; {advice}")
    return record


def with_layout(model: nn.Module, record: Record, purpose: str = LEFT_OUT) -> Record:
    """Return the record with the layout of the tokens, found on a model whose blocks still compute all of them."""
    if record.layout is not None:
        return record
    blocks = list(dict.fromkeys(handle.owner for handle in record.attentions.values()))
    if not blocks:
        raise ModelError(f"{purpose} in models with attention, but this one has none that can be removed")
    return replace(record, layout=find_layout(model, record.survey.input_size, blocks, purpose))


def layout_of(record: Record) -> TokenLayout:
    assert record.layout is not None
    return record.layout


def refuse_gated(model: nn.Module) -> None:
    """Raise ``PlanError`` if ``model`` has gates."""
    if any(isinstance(module, Gate) for module in model.modules()):
        raise PlanError("this model has gates on its layers; call restore_(model) first")


def parts_of(handle: Handle) -> Parts:
    """Return the parts of a branch that can be removed as a whole, as ``require_removable`` has checked."""
    assert handle.parts is not None
    return handle.parts


def is_whole(model: nn.Module, block: str, *branches: Parts) -> bool:
    """Whether every parameter of a block, but for the maps of a tail, belongs to one of these branches."""
    paths = [f"{path}." for parts in branches for path in (*parts.entry, parts.core, *parts.exits)]
    paths.append(f"{block}.{STEP}.")
    loose = [name for parts in branches for name in parts.parameters]
    names = [name for name, _ in model.get_submodule(block).named_parameters(prefix=block)]
    return all(name in loose or name.startswith(tuple(paths)) for name in names)


def layer_at(model: nn.Module, path: str) -> Layer:
    """Return the linear layer at ``path``, or the one that a gate there is for."""
    module = model.get_submodule(path)
    layer = module.inner if isinstance(module, Gate | Behind) else module
    assert isinstance(layer, Layer)
    return layer
