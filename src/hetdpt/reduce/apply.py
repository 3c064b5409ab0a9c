"""A whole plan applied to a model: layers removed, hidden features removed, patches stopped early. Chooses nothing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from torch import Tensor, nn

from hetdpt.core.modules import require_more_than_once
from hetdpt.core.plan import Plan
from hetdpt.core.progress import StepProgress
from hetdpt.reduce.width.features import narrow_features_
from hetdpt.surgery.calibrate import remove_
from hetdpt.surgery.record import record_of


def apply_(
    model: nn.Module, plan: Plan, batches: Iterable[Tensor], *, progress: StepProgress | None = None
) -> nn.Module:
    """Apply ``plan`` to ``model``, with all that has to be fitted fitted on ``batches``, and return the model.

    Layers are replaced first, then hidden features are removed, then the tail is fitted to what is left.
    """
    if not plan.features:
        return remove_(model, plan, batches, progress=progress)
    require_more_than_once(batches, "once for each part of the plan")
    if len(plan) or record_of(model) is None:
        remove_(model, replace(plan, features=(), tail=0), batches, progress=progress)
    narrow_features_(model, dict(plan.features), batches)
    return remove_(model, Plan(removal=plan.removal, tail=plan.tail), batches) if plan.tail else model
