"""One search over all moves: what is the least damage at every speed? No labels, no training.

In every round the moves that do the least damage for what they save are made and fitted, until a few percent of the
dense model's cost are saved; then what is left is measured again. Now and then something is given back that by now does
more damage for what it saves than other moves would. So one search gives a plan for every speed. No files here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain
from math import inf, isfinite
from typing import TypeVar

from torch import Tensor, nn

from hetdpt.core.modules import Held, Peeked, require_more_than_once
from hetdpt.core.plan import FewerTokens, FrontierMove, Narrower, Plan, Removal, Styled, Tail
from hetdpt.reduce.apply import Refits, placed
from hetdpt.results import FrontierPoint
from hetdpt.selection.damage import PURPOSE, Cost, DenseOutputs
from hetdpt.selection.moves import MOVES, STEP, Batches, kind_of, offered, variants
from hetdpt.selection.returns import Return, put_back, returns, without_pointless
from hetdpt.surgery.record import require_record
from hetdpt.surgery.remove import ready_for
from hetdpt.surgery.tail import trim_to_class_token_

SHARE = 0.04  # of the dense model's cost is saved in a round
MEASURED = 12  # moves whose damage is measured again in a round, the most promising ones
GROUP = 6  # of them are measured by one process
WORTH = 1e-3  # of the dense model's cost, a move saves at least
WORSE = 2.0  # times the damage per cost of the best move, others of the same round may have
EXCESS = 0.5  # of what moves add to the damage one by one, they may add more together
NOISE = 0.05  # of the damage, by which that of a plan may differ anyway, as it is fitted anew
POINTLESS = 1e-5  # of the dense model's cost; what saves less is given back at once
LOOK = 4  # rounds from one look at what can be given back to the next
TRIALS = 2  # returns that are tried then, the most promising ones
MARGIN = 1.25  # times the price of the latest round, what is given back undoes at least


@dataclass(frozen=True)
class DamageJob:
    """Damages that one process measures at once."""

    name: str
    """The same in every search of the same settings."""
    subjects: tuple[str, ...]
    """What each damage is of."""
    run: Callable[[], list[float]]
    """Measures them."""


Change = TypeVar("Change", FrontierMove, Return)
Variants = Callable[[nn.Module, Iterable[Change], Batches], dict[Change, nn.Module]]
"""Returns a copy of a model with each of some changes, fitted on images."""
Measure = Callable[[Sequence[DamageJob]], list[list[float]]]
"""Returns the damages of jobs, measured now or before, by this or by another process."""


def measure_now(jobs: Sequence[DamageJob]) -> list[list[float]]:
    """Return the damages of ``jobs``, measured one after another."""
    return [job.run() for job in jobs]


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
    """Plans of more and more moves, each with the damage of the model that ``apply_`` makes of it.

    Decisions depend on costs and measured damages alone, and the model of a plan on the plan alone. So a search whose
    damages are kept (``measure``) repeats itself without measuring, and several processes can share one.

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
        measure: Measure = measure_now,
    ) -> None:
        for images in (batches, judge):
            require_more_than_once(images, "in every round")
        self.cost, self.kinds, self.share, self.step, self.measure = cost, kinds, share, step, measure
        self.images, self.judge = Peeked(Held(batches), model, PURPOSE), Held(judge)
        self.dense = trim_to_class_token_(ready_for(self.images.first, model, removal))
        record = require_record(self.dense)
        self.plan = Plan(removal=record.plan.removal, anatomy=record.survey.anatomy)
        self.whole, self.damage = cost(self.plan), 0.0
        self.fitted = Refits(self.dense, self.images)
        self._price = 0.0
        """Damage for what was saved in the latest round."""
        self._known: dict[object, float] = {}
        """The damage for what is saved of each kind of move in each block, as measured last."""
        self._given_back = set[str]()
        self._earlier = list[tuple[float, float]]()
        """The cost and the damage of each plan so far."""
        self._number = self._rounds = 0

    @cached_property
    def outputs(self) -> DenseOutputs:
        """The outputs of the dense model for the images of ``judge``."""
        return DenseOutputs(self.dense, self.judge)

    def rounds(self, least: float = 0.0) -> Iterator[FrontierPoint]:
        """Yield a point after every round until a plan costs ``least``, or nothing is left to remove.

        A round that gives something back yields a point that is slower than the one before; ``frontier_of`` leaves out
        the points that others make pointless.
        """
        while self.cost(self.plan) > least and (point := self._look_back() or self._round()):
            yield point

    def _round(self) -> FrontierPoint | None:
        """Make the best moves, or the better half of them while together they do much more damage than one by one."""
        taken = self._best(self._tried())
        while taken:
            plan = self.plan.plus(*(one.move for one in taken))
            plan = without_pointless(plan, self.cost, POINTLESS * self.whole)
            names = tuple(str(one.move) for one in taken)
            if not _is_possible(plan):
                taken = taken[: len(taken) // 2]
                continue
            damage = self._damage_of(plan, ", ".join(names))
            if len(taken) == 1 or damage <= self._expected(taken):
                break
            taken = taken[: len(taken) // 2]
        if not taken or not isfinite(damage):
            return None
        self._price = (damage - self.damage) / (self.cost(self.plan) - self.cost(plan))
        self._rounds += 1
        return self._move_to(plan, damage, names)

    def _expected(self, taken: list[TriedMove]) -> float:
        """Return the damage up to which moves are made together."""
        return (1 + NOISE) * self.damage + (1 + EXCESS) * sum(one.damage for one in taken)

    def _move_to(self, plan: Plan, damage: float, names: tuple[str, ...]) -> FrontierPoint:
        self.plan, self.damage = plan, damage
        self._earlier.append((self.cost(plan), damage))
        return FrontierPoint(plan, damage, self.cost(plan), names)

    def _tried(self) -> list[TriedMove]:
        """Return the most promising moves with the damage that each would add now."""
        before = self.cost(self.plan)
        moves = offered(placed(self.dense, self.plan), self.dense, self.kinds, self.step)
        plans = {move: plan for move in moves if _is_possible(plan := self.plan.plus(move))}
        gains = {move: gain for move, plan in plans.items() if (gain := before - self.cost(plan)) > WORTH * self.whole}
        order = sorted(gains, key=lambda move: self._known.get(_key(move), -inf))
        unknown = sum(_key(move) not in self._known for move in order)
        chosen = {*order[: max(MEASURED, unknown)]}
        damages = self._damages_of([move for move in gains if move in chosen], variants)
        found = [TriedMove(move, gains[move], max(one - self.damage, 0.0)) for move, one in damages.items()]
        self._known |= {_key(one.move): one.ratio for one in sorted(found, key=lambda one: -one.ratio)}  # the least
        return [one for one in found if isfinite(one.damage)]

    def _best(self, tried: list[TriedMove]) -> list[TriedMove]:
        """Return the moves of this round: those with the least damage for what they save, one in a branch.

        After half of a round's share, only moves with at most ``WORSE`` times the ratio of the best one are added, or
        with that of the latest round. Without this half, moves that do no damage would be made one by one.
        """
        taken, saved, branches = list[TriedMove](), 0.0, set[object]()
        order = sorted(tried, key=lambda one: one.ratio)
        limit, share = max(WORSE * order[0].ratio, self._price) if order else 0.0, self.share * self.whole
        for one in order:
            if saved >= (share if one.ratio <= limit else share / 2):
                break
            if _branch(one.move) not in branches:
                taken.append(one)
                branches.add(_branch(one.move))
                saved += one.gain
            if isinstance(one.move, Tail | FewerTokens):  # it changes what all others save
                break
        return taken

    def _look_back(self) -> FrontierPoint | None:
        """Give back what undoes more damage for its cost than the latest round did for what it saved, if there is such.

        It is looked for in every ``LOOK``-th round; no layer, block or tail is given back twice.
        """
        if self._rounds < LOOK or self._price <= 0:
            return None
        self._rounds = 0
        offers = [one for one in returns(self.plan, self.dense, self.step) if one.what not in self._given_back]
        rough = self._damages_of(offers, self._put_back)
        worth = {one: undone for one, found in rough.items() if (undone := self._undone(one, found)) > 1}
        for one in sorted(worth, key=lambda one: -worth[one])[:TRIALS]:
            damage = self._damage_of(one.plan, str(one))
            if self._undone(one, damage) > MARGIN and not self._is_pointless(one.plan, damage):
                self._given_back.add(one.what)
                return self._move_to(one.plan, damage, (str(one),))
        return None

    def _is_pointless(self, plan: Plan, damage: float) -> bool:
        """Whether an earlier plan costs no more than ``plan`` and does no more than this damage."""
        cost = self.cost(plan)
        return any(earlier_cost <= cost and earlier <= damage for earlier_cost, earlier in self._earlier)

    def _undone(self, one: Return, damage: float) -> float:
        """Return how much damage a return undoes for its cost, in prices of the latest round."""
        undone, cost = self.damage - damage, self.cost(one.plan) - self.cost(self.plan)
        return undone / max(self._price * cost, sys.float_info.min) if undone > 0 else 0.0

    def _put_back(self, current: nn.Module, offers: Iterable[Return], images: Batches) -> dict[Return, nn.Module]:
        return {one: put_back(current, self.dense, one.plan, images) for one in offers}

    def _damages_of(self, changes: list[Change], make: Variants[Change]) -> dict[Change, float]:
        """Return the damage of the current model with each of some changes."""

        def run(group: list[Change]) -> list[float]:
            current = self.fitted(self.plan)
            found = self.outputs.damages(current, make(current, group, self.images))
            return [found[change] for change in group]

        self._number += 1
        groups = [changes[start : start + GROUP] for start in range(0, len(changes), GROUP)]
        jobs = [
            DamageJob(f"{self._number:04d}-{number}", tuple(map(str, group)), partial(run, group))
            for number, group in enumerate(groups, 1)
        ]
        return dict(zip(changes, chain.from_iterable(self.measure(jobs)), strict=True))

    def _damage_of(self, plan: Plan, what: str) -> float:
        """Return the damage of the model of ``plan``, which ``what`` names."""
        self._number += 1
        job = DamageJob(f"{self._number:04d}-plan", (what,), lambda: [self.outputs.damage(self.fitted(plan))])
        [[damage]] = self.measure([job])
        return damage


def frontier_of(points: Iterable[FrontierPoint]) -> tuple[FrontierPoint, ...]:
    """Return the points that no other one makes pointless by at most its damage at at most its cost, slowest first.

    >>> points = [FrontierPoint(Plan(), *numbers) for numbers in [(0.1, 9.0), (0.3, 8.0), (0.2, 7.0), (0.5, 7.5)]]
    >>> [(point.damage, point.cost) for point in frontier_of(points)]
    [(0.1, 9.0), (0.2, 7.0)]
    """
    found = list[FrontierPoint]()
    for point in sorted(points, key=lambda point: (point.cost, point.damage)):
        if not found or point.damage < found[-1].damage:
            found.append(point)
    return tuple(reversed(found))


def _is_possible(plan: Plan) -> bool:
    """Whether blocks are left that merge tokens, if ``plan`` says so: those with attention before the last one."""
    assert plan.anatomy is not None
    left = {*plan.anatomy.attention} - {*plan.attention}
    stop = min(plan.anatomy.blocks - plan.tail, max(left, default=0))
    return plan.tokens is None or any(block < stop for block in left)


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
