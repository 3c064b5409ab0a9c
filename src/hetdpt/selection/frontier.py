"""One search over all moves: what is the least damage at every speed? No labels, no training.

In every round the moves that do the least damage for what they save are made and fitted, until a few percent of the
dense model's cost are saved; then what is left is measured again. So one search gives a plan for every speed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf, isfinite

import torch
from torch import Tensor, nn

from hetdpt.core.modules import Peeked, clone, require_more_than_once
from hetdpt.core.plan import FewerTokens, FrontierMove, Narrower, Plan, Removal, Styled, Tail
from hetdpt.measurement.agreement import measure_damage
from hetdpt.reduce.apply import apply_
from hetdpt.reduce.tokens.reduce import restore_tokens_
from hetdpt.results import FrontierPoint
from hetdpt.selection.damage import PURPOSE, Cost, DenseOutputs
from hetdpt.selection.moves import MOVES, STEP, kind_of, offered, variants
from hetdpt.surgery.record import require_record
from hetdpt.surgery.remove import ready_for
from hetdpt.surgery.tail import trim_to_class_token_

SHARE = 0.03  # of the dense model's cost is saved in a round
MEASURED = 14  # moves whose damage is measured again in a round, the most promising ones
WORTH = 1e-3  # of the dense model's cost, a move saves at least
WORSE = 2.0  # times the damage per cost of the best move, others of the same round may have


@dataclass(frozen=True)
class TriedMove:
    """A move, what it would save and the damage it would add, as measured last."""

    move: FrontierMove
    gain: float
    damage: float

    @property
    def ratio(self) -> float:
        """Damage for what is saved."""
        return self.damage / self.gain


class FrontierSearch:
    """Moves made so far on a copy of ``model``, and the damage that others would do.

    ``step`` is that of the sizes of FFNs which the device likes.
    """

    def __init__(
        self,
        model: nn.Module,
        batches: Iterable[Tensor],
        judge: Iterable[Tensor],
        cost: Cost,
        *,
        removal: Removal = "calibrated",
        kinds: Sequence[str] = tuple(MOVES),
        share: float = SHARE,
        step: int = STEP,
    ) -> None:
        for images in (batches, judge):
            require_more_than_once(images, "in every round")
        self.images, self.judge, self.cost = Peeked(batches, model, PURPOSE), judge, cost
        self.kinds, self.share, self.step = kinds, share, step
        self.dense = trim_to_class_token_(ready_for(self.images.first, model, removal))
        record = require_record(self.dense)
        self.plan = Plan(removal=record.plan.removal, anatomy=record.survey.anatomy)
        self.whole, self.damage = cost(self.plan), 0.0
        self.current = clone(self.dense)
        self.outputs = DenseOutputs(self.dense, judge)
        self._known: dict[object, float] = {}
        """The damage for what is saved of each kind of move in each block, as measured last."""

    def resume(self, point: FrontierPoint) -> None:
        """Continue from the last point of an earlier search, whose plan is fitted again."""
        self.plan, self.current = point.plan, apply_(clone(self.dense), point.plan, self.images)
        self.damage = measure_damage(self.dense, self.current, self.judge)

    def rounds(self, least: float = 0.0) -> Iterator[FrontierPoint]:
        """Yield a point after every round until a plan costs ``least``, or nothing is left to remove."""
        while self.cost(self.plan) > least:
            taken = self._best(self._tried())
            if not taken:
                return
            self._take(taken)
            yield FrontierPoint(self.plan, self.damage, self.cost(self.plan), tuple(map(str, taken)))

    def _tried(self) -> list[TriedMove]:
        """Return the most promising moves with the damage that each would add now."""
        before = self.cost(self.plan)
        possible = offered(self.current, self.dense, self.kinds, self.step)
        gains = {move: before - self.cost(self.plan.plus(move)) for move in possible}
        gains = {move: gain for move, gain in gains.items() if gain > WORTH * self.whole}
        order = sorted(gains, key=lambda move: self._known.get(_key(move), -inf))
        unknown = sum(_key(move) not in self._known for move in order)
        chosen = order[: max(MEASURED, unknown)]
        models = variants(self.current, chosen, self.images)
        damages = self.outputs.damages(self.current, models)
        finite = [move for move in chosen if isfinite(damages[move])]
        found = [TriedMove(move, gains[move], max(damages[move] - self.damage, 0.0)) for move in finite]
        self._known |= {_key(one.move): one.ratio for one in found}
        return found

    def _best(self, tried: list[TriedMove]) -> list[FrontierMove]:
        """Return the moves of this round: those with the least damage for what they save, one in a branch."""
        taken, saved, branches = list[FrontierMove](), 0.0, set[object]()
        order = sorted(tried, key=lambda one: one.ratio)
        for one in order:
            if saved >= self.share * self.whole or (taken and one.ratio > WORSE * order[0].ratio):
                break
            if _branch(one.move) not in branches:
                taken.append(one.move)
                branches.add(_branch(one.move))
                saved += one.gain
            if isinstance(one.move, Tail | FewerTokens):  # it changes what all others save
                break
        return taken

    @torch.no_grad()
    def _take(self, taken: list[FrontierMove]) -> None:
        """Make these moves, which fits a tail again, and measure the damage of all that was made so far."""
        more = Plan(removal=self.plan.removal).plus(*taken)
        self.plan = self.plan.plus(*taken)
        more = replace(more, tokens=self.plan.tokens)
        self.current = apply_(restore_tokens_(self.current), more, self.images)
        self.damage = measure_damage(self.dense, self.current, self.judge)


def _key(move: FrontierMove) -> object:
    """Return what stays the same when a move is offered again, with one more block or a narrower branch."""
    if isinstance(move, Styled):
        return move
    return (kind_of(move), move.block) if isinstance(move, Narrower) else kind_of(move)


def _branch(move: FrontierMove) -> object:
    """Return the branch that a move changes."""
    if isinstance(move, Styled):
        return move.site.kind, move.site.block
    return (move.kind, move.block) if isinstance(move, Narrower) else move
