"""A whole plan applied to a model: layers removed, branches made narrower, patches stopped early, tokens reduced.

Chooses nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from torch import Tensor, nn

from hetdpt.core.modules import Peeked, clone, require_more_than_once
from hetdpt.core.plan import Plan
from hetdpt.core.progress import StepProgress
from hetdpt.reduce.tokens.reduce import reduce_tokens_
from hetdpt.reduce.width.inner import PURPOSE, narrow_branches_, require_narrower
from hetdpt.surgery.calibrate import remove_
from hetdpt.surgery.fit_tail import fit_tail_
from hetdpt.surgery.record import InputSize, record_of
from hetdpt.surgery.remove import place_


def apply_(
    model: nn.Module, plan: Plan, batches: Iterable[Tensor], *, progress: StepProgress | None = None
) -> nn.Module:
    """Apply ``plan`` to ``model``, with all that has to be fitted fitted on ``batches``, and return the model.

    Layers are replaced first, then branches are made narrower, then the tail is fitted to what is left, and last
    tokens are reduced: what is fitted is fitted on all of them. A plan that does not fit raises before anything is
    changed.
    """
    if plan.narrower or plan.tokens:
        require_more_than_once(batches, "once for each part of the plan")
        require_applicable(model, plan, Peeked(batches, model, PURPOSE).size)
    layers = replace(plan.without_narrower(), tokens=None)
    if not layers.is_empty or record_of(model) is None:
        remove_(model, layers, batches, progress=progress)
    if plan.narrower:
        narrow_branches_(model, plan.narrower, batches)
        fit_tail_(model, batches)
    return reduce_tokens_(model, plan.tokens) if plan.tokens else model


def require_applicable(model: nn.Module, plan: Plan, input_size: InputSize | None = None) -> None:
    """Raise ``PlanError`` if ``plan`` cannot be applied to ``model``, which is not changed."""
    placed = place_(clone(model), replace(plan.without_narrower(), tokens=None, fits=()), input_size)
    require_narrower(placed, plan.narrower)
    if plan.tokens:
        reduce_tokens_(placed, plan.tokens)
