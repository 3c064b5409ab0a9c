"""What a plan can give back of what it removes, one thing at a time, and what each would do, roughly.

Which of them is given back is decided by ``selection.frontier``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hetdpt.core.plan import KINDS, Kind, Narrower, Plan
from hetdpt.reduce.apply import placed
from hetdpt.reduce.tokens.reduce import reduce_tokens_
from hetdpt.reduce.width.inner import inner_count, narrow_branches_
from hetdpt.selection.damage import Cost
from hetdpt.selection.moves import STEP, chunk_of, dims_chunk_of, kind_of
from hetdpt.surgery.fit_tail import fit_tail_
from hetdpt.surgery.record import require_record


@dataclass(frozen=True)
class Return:
    """One thing that a plan gives back.

    >>> print(Return("attention 3", Plan(attention=(1,))))
    attention 3 given back
    """

    what: str
    """The same however much of it is given back."""
    plan: Plan
    """The plan without it."""

    def __str__(self) -> str:
        return f"{self.what} given back"


def returns(plan: Plan, dense: nn.Module, step: int = STEP) -> list[Return]:
    """Return what ``plan`` can give back: a layer, features, a head, dimensions, a tail block, half of the merging.

    Features and dimensions are given back in the chunks of their moves, those of features multiples of ``step``.
    """
    layers = [(kind, block) for kind in KINDS for block in getattr(plan, kind)]
    found = [Return(f"{kind} {block}", _with_layer(plan, kind, block)) for kind, block in layers]
    found += [_wider(plan, move, inner_count(dense, move), step) for move in plan.narrower]
    if plan.tail > 1:
        found.append(Return("a block of the tail", replace(plan, tail=plan.tail - 1 if plan.tail > 2 else 0)))
    if plan.tokens:
        half = replace(plan.tokens, r=plan.tokens.r // 2) if plan.tokens.r > 1 else None
        found.append(Return("tokens", replace(plan, tokens=half)))
    return found


def without_pointless(plan: Plan, cost: Cost, least: float) -> Plan:
    """Return ``plan`` with the layers and narrower branches given back that save less than ``least``.

    A longer tail leaves such behind: in its blocks there is next to nothing to save.

    >>> plan = Plan(activation=(1, 3), features=((2, 64),))
    >>> found = without_pointless(plan, lambda plan: -float(plan.activation.count(1)), 0.5)
    >>> found.activation, found.features
    ((1,), ())
    """
    steps: list[Callable[[Plan], Plan]] = []
    for kind in KINDS:
        steps += [partial(_with_layer, kind=kind, block=block) for block in getattr(plan, kind)]
    steps += [partial(_with_width, move=move) for move in plan.narrower]
    for step in steps:
        if cost(step(plan)) - cost(plan) < least:
            plan = step(plan)
    return plan


def _with_layer(plan: Plan, kind: Kind, block: int) -> Plan:
    """Return ``plan`` without the removal of one layer."""
    blocks = tuple(one for one in getattr(plan, kind) if one != block)
    styles = tuple(row for row in plan.site_styles if row[:2] != (kind, block))
    left = {"attention": plan.attention, "activation": plan.activation, kind: blocks}
    return replace(plan, site_styles=styles, attention=left["attention"], activation=left["activation"])


def _wider(plan: Plan, move: Narrower, whole: int, step: int) -> Return:
    """Return a chunk of features, a head or a chunk of dimensions given back to a branch that had ``whole`` of them."""
    name = kind_of(move)
    chunks = {"features": chunk_of(whole, step), "heads": 1, "head_dims": dims_chunk_of(whole)}
    more = move.count + chunks[name]
    what = f"{name.replace('_', ' ')} in block {move.block}"
    return Return(what, _with_width(plan, move, more if more < whole else None))


def _with_width(plan: Plan, move: Narrower, count: int | None = None) -> Plan:
    """Return ``plan`` with ``count`` of what ``move`` makes fewer in its block, or all of them."""
    name = kind_of(move)
    others = tuple(row for row in getattr(plan, name) if row[0] != move.block)
    left: dict[str, Any] = {name: others if count is None else (*others, (move.block, count))}
    return replace(plan, **left)


@torch.no_grad()
def put_back(current: nn.Module, dense: nn.Module, plan: Plan, batches: Iterable[Tensor]) -> nn.Module:
    """Return a copy of ``current`` that has given back what ``plan`` does not remove, taken from ``dense``.

    ``plan`` is that of a ``Return``. The rest is as it is in ``current``, not fitted again, but for the tail if more of
    it, or wider attention, reads patches. ``batches`` are read only for that, and where a branch has another width.
    """
    record = require_record(current)
    changed = {(move.kind, move.block) for move in {*plan.narrower} ^ {*record.plan.narrower}}
    same = [move for move in plan.narrower if (move.kind, move.block) not in changed]
    found = placed(dense, replace(plan.without_narrower(), tokens=None).plus(*same))
    _share_values_(found, current)
    if narrower := [move for move in plan.narrower if move not in same]:
        narrow_branches_(found, narrower, batches)
    stop = record.survey.anatomy.blocks - plan.tail
    is_in_tail = any(kind == "attention" and block >= stop for kind, block in changed)
    if is_in_tail or (plan.tail, plan.attention) != (record.plan.tail, record.plan.attention):
        fit_tail_(found, batches)
    return reduce_tokens_(found, plan.tokens) if plan.tokens else found


def _share_values_(model: nn.Module, current: nn.Module) -> None:
    """Let ``model`` have the tensors of ``current`` at equal names, but those that scale a layer it gives back.

    Layers of another size, of which a bias may have the same, keep their own.
    """
    removed, now = require_record(model).plan, require_record(current)
    given_back = [handle for handle in now.removed if not removed.removes(handle.site)]
    own = {name for handle in given_back for name in (handle.parts.parameters if handle.parts else ())}
    theirs = dict(current.named_parameters())
    for path, layer in model.named_modules():
        mine = dict(layer.named_parameters(path, recurse=False))
        shared = mine.keys() & theirs.keys()
        if all(theirs[name].shape == mine[name].shape for name in shared):
            for name in shared - own:
                setattr(layer, name.rpartition(".")[2], theirs[name])
