"""The search for the width that meets a goal: sizes are tried on a model without values, or timed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import nn

from hetdpt.core.errors import PlanError
from hetdpt.core.goals import Goal, Measures, short
from hetdpt.core.modules import clone
from hetdpt.core.progress import StageProgress
from hetdpt.measurement.speed import measure_throughput
from hetdpt.reduce.width.choice import Kept, Ratios
from hetdpt.surgery.merge import merge_

if TYPE_CHECKING:
    from hetdpt.reduce.width.narrow import WidthSurvey

TOLERANCE = 0.02  # how far from its target a search may end
CLOSE = 0.005  # how near it stops
MOST = 0.95  # of a size is removed at most in a search
SECONDS = 4.0  # of each timing
RUNGS = (Ratios(hidden=1.0), Ratios(hidden=1.0, heads=1.0, head_dims=0.5), Ratios(1.0, 1.0, 1.0, 0.5))
"""Sizes removed together, the least harmful first: hidden features, then heads too, then the embedding too."""
HALF = 0.5  # of a size is removed at most before the next rung


@dataclass(frozen=True)
class Tried:
    """The costs of a model, merged, with these ratios of its width removed."""

    ratios: Ratios
    macs: int
    params: int
    ms: float | None = None
    """Measured milliseconds of a batch; None if not needed."""
    speedup: float | None = None
    """Measured speedup; None if not needed."""

    @property
    def measures(self) -> Measures:
        return Measures(macs=self.macs, params=self.params, ms=self.ms, speedup=self.speedup)


@dataclass(frozen=True)
class Timing:
    """The model that a narrow one is timed against, and how many images at once."""

    dense: nn.Module
    batch: int | None


class RatioSearch:
    """Searches for the ratios that meet a target, and caches the costs of all it has tried."""

    def __init__(
        self,
        model: nn.Module,
        seen: WidthSurvey,
        goal: Goal | None,
        target: float,
        timing: Timing,
        progress: StageProgress | None,
    ) -> None:
        self.model, self.seen, self.goal, self.target, self.timing = model, seen, goal, target, timing
        self.progress = progress
        self._found: dict[Any, Tried] = {}
        """What was tried, by the sizes that were kept."""

    def look(self, ratios: Ratios) -> Tried:
        """Return the costs of the model with ``ratios`` removed, merged."""
        kept = self.seen.choose(ratios)
        if (earlier := self._found.get(kept.sizes)) is not None:
            return earlier
        costs = self.seen.costs(self.model, kept)
        timed = self._time(kept) if self.goal is not None and self.goal.is_timed else ()
        found = Tried(ratios, costs.macs, costs.params, *timed)
        self._found[kept.sizes] = found
        if self.progress:
            self.progress("searching for the width", len(self._found), 0)
        return found

    def _time(self, kept: Kept) -> tuple[float, float]:
        """Return the milliseconds of a batch and the speedup."""
        narrow = merge_(self.seen.shrink_(clone(self.model), kept))
        found = measure_throughput(
            {"dense": self.timing.dense, "narrow": narrow},
            self.seen.input_size,
            batch=self.timing.batch,
            runs=50,
            warmup=2,
            seconds=SECONDS,
        )
        rate = found.throughput["narrow"]
        return 1e3 * rate.batch / rate.value, found.speedup["narrow"].value

    def find_gently(self) -> Tried:
        """Return the try nearest to the target on the first rung that reaches it."""
        *gentle, last = self.seen.rungs
        for shares in gentle:
            if self.excess(self.look(shares.times(HALF))) <= 0:
                return self.find(shares)
        return self.find(last)

    def find(self, shares: Ratios) -> Tried:
        """Return the try nearest to the target; ``PlanError`` if it is not near enough."""
        whole = self.look(Ratios())
        if self.excess(whole) < -TOLERANCE:
            raise PlanError(
                f"the model already has {self._show(whole)}, which meets the goal {self._goal_text}; nothing has to be "
                "removed, so set a harder goal"
            )
        most = MOST / max(shares.by_name.values())
        self._halve(lambda part: shares.times(part), most)
        if shares.hidden and not self._is_close(self.best):
            ratios = self.best.ratios
            self._halve(lambda part: replace(ratios, hidden=part), MOST)
        if abs(self.excess(self.best)) > TOLERANCE:
            raise PlanError(
                f"the goal {self._goal_text} cannot be met within {100 * TOLERANCE:.0f} %; the nearest is "
                f"{self._show(self.best)}; use that, or change the shares or what sizes are rounded to"
            )
        return self.best

    def _halve(self, ratios: Callable[[float], Ratios], high: float) -> None:
        """Halve the range from 0 to ``high`` until the target is near, or for a fixed number of steps."""
        low, steps = 0.0, 8 if self._needed_goal.is_timed else 16
        if self.excess(self.look(ratios(high))) > 0:
            return
        for _ in range(steps):
            middle = (low + high) / 2
            found = self.look(ratios(middle))
            if self._is_close(found):
                return
            low, high = (middle, high) if self.excess(found) > 0 else (low, middle)

    def _is_close(self, tried: Tried) -> bool:
        return -CLOSE <= self.excess(tried) <= 0

    @property
    def count(self) -> int:
        """How many it has tried."""
        return len(self._found)

    @property
    def best(self) -> Tried:
        """The try nearest to the target, among those that meet it if one of them is near enough."""
        return min(
            self._found.values(), key=lambda one: (not -TOLERANCE <= self.excess(one) <= 0, abs(self.excess(one)))
        )

    def excess(self, tried: Tried) -> float:
        """Return the part by which a try misses the target; below 0 more was removed than needed."""
        return self._needed_goal.excess(self._reached(tried), self.target)

    def _reached(self, tried: Tried) -> float:
        value = self._needed_goal.reached(tried.measures)
        assert value is not None
        return value

    @property
    def _needed_goal(self) -> Goal:
        assert self.goal is not None, "a search is for a goal"
        return self.goal

    @property
    def _goal_text(self) -> str:
        return f"'{self._needed_goal.describe(short(self.target))}'"

    def _show(self, tried: Tried) -> str:
        return self._needed_goal.show(self._reached(tried))
