"""Removal of every kind until one goal is met, from one search by damage for what is saved. No labels, no training.

A kill loses a few damages at most. The search is that of a frontier; here it continues where the goal is missed when
the model that it made is measured.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn

from hetdpt.core.errors import PlanError
from hetdpt.core.goals import GOALS
from hetdpt.core.modules import clone
from hetdpt.core.plan import FewerFeatures, Plan, Removal, Tail
from hetdpt.core.progress import StageProgress
from hetdpt.flow.images_seen import ImagesSeen, asked_of
from hetdpt.flow.shared_search import SharedDamages, shared_prices
from hetdpt.measurement.costs import Costs
from hetdpt.measurement.speed import measure_throughput
from hetdpt.reduce.apply import apply_
from hetdpt.results import FrontierPoint
from hetdpt.selection.damage import cheapest
from hetdpt.selection.frontier import FrontierSearch
from hetdpt.selection.goal import longest_tail
from hetdpt.selection.move_prices import measure_move_prices
from hetdpt.selection.moves import MOVES
from hetdpt.store.config_diff import flat
from hetdpt.store.run_directory import Run
from hetdpt.surgery.merge import merge_
from hetdpt.surgery.record import InputSize
from hetdpt.surgery.remove import ready, removable
from hetdpt.surgery.tail import trim_if_possible_

ATTEMPTS = 3  # at a goal, each with more removed than the one before
TIMING_SECONDS = 20.0


@dataclass(frozen=True, kw_only=True)
class MixConfig:
    """The goal of a mix, and what it is made of."""

    goal: Literal["speedup", "macs"]
    value: float
    removal: Removal
    """The style in which layers are removed unless another does less damage."""
    moves: tuple[str, ...] = tuple(MOVES)
    """What may be removed: names from ``MOVES``."""
    batch: int | None = None
    """Batch size when layers are timed."""


class Mix:
    """The rounds of a search until plans meet a goal by their price; prices and damages are kept in ``run``."""

    def __init__(
        self,
        run: Run,
        model: nn.Module,
        batches: Iterable[Tensor],
        judge: Iterable[Tensor],
        size: InputSize,
        config: MixConfig,
        progress: StageProgress | None = None,
    ) -> None:
        self.run, self.model, self.batches, self.config, self.progress = run, model, batches, config, progress
        state, self.begun, self.points = run.checkpoints.latest() or {}, time.monotonic(), list[FrontierPoint]()
        how: dict[str, Any] = {"removal": config.removal, "input_size": size, "batch": config.batch}
        self.prices = shared_prices(run.directory, partial(measure_move_prices, model, **how, progress=progress))
        self.measure = SharedDamages(run.directory, progress)
        self.least = state.get("least", self._limit(config.value))
        self.begun -= state.get("seconds", 0.0)
        self.is_exhausted = False
        """Whether nothing is left to remove."""
        self._require_reach(ready(model, config.removal, size))
        asked: dict[str, Any] = {"removal": config.removal, "kinds": config.moves, "step": self.prices.step}
        self.search = FrontierSearch(model, batches, judge, self.cost, **asked, measure=self.measure)

    @property
    def is_replayed(self) -> bool:
        """Whether all damages so far were measured before an interruption."""
        return self.measure.is_behind

    @property
    def seconds(self) -> float:
        """Time spent, that before an interruption included."""
        return time.monotonic() - self.begun

    @property
    def plan(self) -> Plan:
        """All that was removed so far."""
        return self.points[-1].plan if self.points else Plan(removal=self.config.removal)

    def cost(self, plan: Plan) -> float:
        """Return the milliseconds of a batch or the MACs of the model that ``plan`` leaves."""
        return self.prices.ms(plan) if self.config.goal == "speedup" else self.prices.of(plan).macs

    def reached(self, plan: Plan) -> float:
        """Return the speedup or the MACs of ``plan``, by its price."""
        return self._limit(self.cost(plan))

    def rounds(self) -> Iterator[FrontierPoint]:
        """Yield the rounds that are left; ``PlanError`` if nothing is left before the goal is met.

        After an interruption they are all yielded again, those that were done without measuring anything.
        """
        for point in self.search.rounds(self.least):
            self.points.append(point)
            self._keep()
            yield point
        self.is_exhausted = self.cost(self.plan) > self.least
        if self.cost(self.plan) > self._limit(self.config.value):
            raise self._out_of_reach(self.plan)

    def continues(self, measured: float) -> bool:
        """Add what is missing from the ``measured`` speedup or MACs to the goal; return whether more rounds follow."""
        missing = self._limit(measured) - self._limit(self.config.value)
        if missing > 0:
            self.least = self.cost(self.plan) - missing
            self._keep()
        return missing > 0 and not self.is_exhausted

    def _keep(self) -> None:
        self.run.checkpoints.keep({"least": self.least, "seconds": self.seconds})

    def _limit(self, value: float) -> float:
        """Return the cost at a speedup, or the speedup at a cost; MACs are a cost themselves."""
        return self.prices.ms() / value if self.config.goal == "speedup" else value

    def _require_reach(self, base: nn.Module) -> None:
        """Raise ``PlanError`` at once for a goal that is missed without any layer."""
        longest = longest_tail(base)
        tails = [Tail(longest)] if longest else []
        plan = cheapest(self.cost, Plan(removal=self.config.removal), [*removable(base), *tails])
        kept = [FewerFeatures(block, 1) for block, _, _ in self.prices.features if block not in plan.activation]
        if self.cost(plan := plan.plus(*kept)) > self._limit(self.config.value):
            raise self._out_of_reach(plan)

    def _out_of_reach(self, plan: Plan) -> PlanError:
        show, measured = GOALS[self.config.goal].show, self.prices.layers.measured
        where = f" ({measured})" if measured else ""
        return PlanError(
            f"{show(self.config.value)} is out of reach: by the costs measured here{where}, the model without all that "
            f"can be removed has {show(self.reached(plan))}; set an easier goal"
        )


def mix_into(
    directory: Path,
    model: nn.Module,
    batches: Iterable[Tensor],
    judge: Iterable[Tensor],
    config: MixConfig,
    progress: StageProgress | None = None,
) -> Iterator[tuple[FrontierPoint, float]]:
    """Yield the rounds of a search until the model that it makes is measured to meet a goal, or after some attempts.

    Beside each is the speedup or the MACs of its plan, by its price. What was measured is kept in ``directory``; called
    again, it yields the same rounds without measuring it again. Those of a goal that is out of reach are removed.
    """
    seen = {"fit": ImagesSeen.of(batches, model), "judge": ImagesSeen.of(judge, model)}
    run = Run.open(directory, {**asked_of(model, seen), **flat(vars(config))})
    with run.alone():
        try:
            mix = Mix(run, model, batches, judge, seen["fit"].size, config, progress)
            for _ in range(ATTEMPTS):
                yield from ((point, mix.reached(point.plan)) for point in mix.rounds())
                if not mix.continues(_measured(mix, seen["fit"].size)):
                    break
        except PlanError:
            run.discard()
            raise


def _measured(mix: Mix, size: InputSize) -> float:
    """Return the speedup or the MACs of the model that the plan leaves, merged and trimmed."""
    made = merge_(apply_(clone(mix.model), mix.plan, mix.batches))
    trim_if_possible_(made)
    if mix.config.goal == "macs":
        return Costs.of(made, size).macs
    tell = None if mix.progress is None else lambda done, total: mix.progress("timing in turns", done, total)  # type: ignore[misc]
    models = {"dense": mix.model, "pruned": made}
    found = measure_throughput(models, size, batch=mix.config.batch, seconds=TIMING_SECONDS, progress=tell)
    return found.speedup["pruned"].value
