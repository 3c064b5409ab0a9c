"""Models as plans leave them: merged and trimmed; and blocks that compute only the tokens which the head reads."""

from __future__ import annotations

from torch import nn

from hetdpt.core.errors import ModelError
from hetdpt.core.modules import clone
from hetdpt.core.plan import Plan
from hetdpt.surgery.merge import merge_
from hetdpt.surgery.record import layout_of, require_record
from hetdpt.surgery.remove import place_, refuse_reductions, removable
from hetdpt.surgery.tail import trim_if_possible_, untrim_


def trimmed(model: nn.Module) -> nn.Module:
    """Return a copy of ``model`` that is trimmed, if that is possible."""
    copy = clone(model)
    trim_if_possible_(copy)
    return copy


def finished(model: nn.Module, plan: Plan) -> nn.Module:
    """Return a copy of ``model`` (one that is ``ready``) without the layers of ``plan``, merged; trimmed if it was.

    Replacements that have to be fitted have no values yet. A plan with narrower branches is refused.
    """
    refuse_reductions(plan)
    try:
        return merge_(place_(clone(model), plan))
    except ModelError:  # without these layers it cannot be trimmed
        return merge_(place_(untrim_(clone(model)), plan))


def able_to_stop(model: nn.Module) -> dict[int, str]:
    """Return the blocks of a model in which patches need not be updated, and their paths; none unless it is trimmed."""
    record = require_record(model)
    if not record.is_trimmed:
        return {}
    paths = {handle.site.block: handle.owner for handle in record.survey.handles}
    last = record.survey.anatomy.blocks - 1
    return paths if layout_of(record).read is not None else {last: paths[last]}


def stopped_at(model: nn.Module, block: int) -> dict[str, nn.Module]:
    """Return copies of a trimmed model whose ``block`` does not update patches, by the names of parts that they save.

    Later blocks have no attention, so that nothing but this block reads patches.
    """
    plan = without_later(model, block)
    own = {f"kept {site.kind}": plan.plus(site) for site in removable(model) if site.block == block}
    return {name: finished(model, plan) for name, plan in {"patches": plan, **own}.items()}


def without_later(model: nn.Module, block: int) -> Plan:
    """Return the plan that removes the attention of all blocks after ``block``."""
    later = (site.block for site in removable(model) if site.kind == "attention" and site.block > block)
    return Plan(attention=tuple(later), removal=require_record(model).plan.removal)
