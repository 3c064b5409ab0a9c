"""What has been done to a model, kept on the model itself; where its layers are, and which of them can be removed.

Nothing is changed here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from hetdpt.adapters.anatomy import Handle, Parts, Survey, survey
from hetdpt.adapters.models import input_size_of
from hetdpt.core.errors import PlanError
from hetdpt.core.fold import Layer
from hetdpt.core.gates import Behind, Gate
from hetdpt.core.plan import Plan, Site
from hetdpt.core.tokens import Tokens

InputSize = tuple[int, int, int]
Removal = str | tuple[str, str]
RECORD = "_hetdpt"


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


def refuse_gated(model: nn.Module) -> None:
    if any(isinstance(module, Gate) for module in model.modules()):
        raise PlanError("this model has gates on its layers; call restore_(model) first")


def begin(model: nn.Module, plan: Plan, input_size: InputSize | None, is_temporary: bool = False) -> Record:
    """Return the record of a model that ``plan`` may be applied to; ``PlanError`` says why it may not.

    What is ``temporary``, gates, may be of another removal than replacements that were fitted.
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
    is_same = record.plan.styles == plan.styles and (record.plan.removal == "authors") == (plan.removal == "authors")
    if len(record.plan) and not is_same and not (is_temporary and record.plan.fitted):
        raise PlanError(
            f"this model was pruned with removal {record.plan.removal!r} and the plan says {plan.removal!r}; "
            "use the same removal for all layers of a model"
        )
    return record


def parts_of(handle: Handle) -> Parts:
    assert handle.parts is not None  # require_removable has seen to it
    return handle.parts


def goes_whole(handle: Handle, plan: Plan) -> bool:
    return plan.style_of(handle.site.kind) in ("skip", "drop")


def is_idle(handle: Handle, plan: Plan) -> bool:
    """Whether what is left of a branch does not depend on the image."""
    return plan.style_of(handle.site.kind) in ("skip", "drop", "constant", "position")


def layer_at(model: nn.Module, path: str) -> Layer:
    """Return the linear layer at ``path``, or the one that a gate there is for."""
    module = model.get_submodule(path)
    layer = module.inner if isinstance(module, Gate | Behind) else module
    assert isinstance(layer, Layer)
    return layer
