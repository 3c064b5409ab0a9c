"""The frontier of a model: the least damage at every speed, from one search over all moves. No labels, no training.

The directory is that of a run: after a kill, the same call resumes with the damages that are not measured yet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from hetdpt.core.errors import PlanError
from hetdpt.core.progress import StageProgress
from hetdpt.flow.images_seen import ImagesSeen, asked_of
from hetdpt.flow.shared_search import SharedDamages, shared_prices
from hetdpt.report.frontier import write_table
from hetdpt.results import FrontierPoint, FrontierResult, from_json, to_json
from hetdpt.selection.frontier import FrontierSearch, frontier_of
from hetdpt.selection.move_prices import measure_move_prices
from hetdpt.selection.moves import MOVES
from hetdpt.store.run_directory import RUN, Run, share
from hetdpt.surgery.remove import settled_removal


@dataclass(frozen=True, kw_only=True)
class FrontierConfig:
    """How far a frontier goes, and what it is made of."""

    speedup: float = 2.0
    """How far to go: until the model is this many times faster, by the times of its layers."""
    moves: tuple[str, ...] = tuple(MOVES)
    """What may be removed: names of ``MOVES``."""

    def __post_init__(self) -> None:
        if not self.speedup > 1:
            raise PlanError(f"speedup is {self.speedup:g}; expected a number above 1, such as 2")
        for name in self.moves:
            if name not in MOVES:
                raise PlanError(f"no move is called {name!r}; available: {', '.join(MOVES)}")


def frontier_into(
    directory: Path,
    model: nn.Module,
    batches: Iterable[Tensor],
    judge: Iterable[Tensor],
    config: FrontierConfig | None = None,
    *,
    watch: Callable[[FrontierPoint, float], None] | None = None,
    progress: StageProgress | None = None,
) -> FrontierResult:
    """Search for the least damage at every speed up to that of ``config``; write plans and a table to ``directory``.

    Everything is fitted on ``batches``; damage is measured on ``judge``. Several processes may share one ``directory``
    that all of them see: they measure the damages of a round together. ``watch`` is called with every new point and its
    speedup, also those that later ones make pointless.
    """
    config = config or FrontierConfig()
    seen = {"fit": ImagesSeen.of(batches, model), "judge": ImagesSeen.of(judge, model)}
    share(directory, {**asked_of(model, seen), "speedup": config.speedup, "moves": [*config.moves]})
    run = Run(directory)
    if run.summary is not None:
        return from_json(FrontierResult, run.summary, directory)
    size, counts = seen["fit"].size, {name: one.count for name, one in seen.items()}
    removal = settled_removal(model, "calibrated", "auto", size)
    timed = partial(measure_move_prices, model, removal=removal, input_size=size, progress=progress)
    prices, measure = shared_prices(directory, timed, progress), SharedDamages(directory, progress)
    dense, found = prices.ms(), list[FrontierPoint]()
    how: dict[str, Any] = {"removal": removal, "kinds": config.moves, "step": prices.step, "measure": measure}
    search = FrontierSearch(model, batches, judge, prices.ms, **how)
    for point in search.rounds(dense / config.speedup):
        found.append(point)
        if watch is not None and not measure.is_behind:
            watch(point, dense / point.cost)
    points = frontier_of(found)
    result = FrontierResult(dense_ms=dense, measured=prices.layers.measured, points=points, images=counts)
    write_table(directory, result)
    run.finish(to_json(result))
    return result


def is_begun(directory: Path) -> bool:
    """Whether there is a search in ``directory`` that the same call resumes or joins."""
    return (directory / RUN).is_file()
