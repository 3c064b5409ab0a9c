"""The frontier of a model: the least damage at every speed, from one search over all moves. No labels, no training.

The directory is that of a run: after a kill, the same call resumes with the round that was interrupted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from hetdpt.core.errors import PlanError
from hetdpt.core.plan import KINDS, NARROWER, Removal
from hetdpt.core.progress import StageProgress
from hetdpt.flow.oneshot import ImagesSeen, asked_of
from hetdpt.results import FrontierPoint, FrontierResult, from_json, to_json
from hetdpt.selection.frontier import FrontierSearch
from hetdpt.selection.move_prices import MovePrices, measure_move_prices
from hetdpt.selection.moves import MOVES
from hetdpt.store.atomic import write_csv, write_text
from hetdpt.store.run_directory import Run
from hetdpt.surgery.record import InputSize
from hetdpt.surgery.remove import settled_removal

PLANS, TABLE = "plans", "frontier.csv"
COLUMNS = ("speedup", "damage", "ms", "attention", "activation", "tail", *NARROWER, "plan")


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

    Everything is fitted on ``batches``; damage is measured on ``judge``. ``watch`` is called with every new point and
    its speedup.
    """
    config = config or FrontierConfig()
    seen = {"fit": ImagesSeen.of(batches, model), "judge": ImagesSeen.of(judge, model)}
    run = Run.open(directory, {**asked_of(model, seen), "speedup": config.speedup, "moves": [*config.moves]})
    if run.summary is not None:
        return from_json(FrontierResult, run.summary, directory)
    with run.alone():
        removal = settled_removal(model, "calibrated", "auto", seen["fit"].size)
        prices, found = _begin(run, model, removal, seen["fit"].size, progress)
        dense, counts = prices.ms(), {name: one.count for name, one in seen.items()}
        search = FrontierSearch(model, batches, judge, prices.ms, removal=removal, kinds=config.moves, step=prices.step)
        for point in _points(run, search, prices, found, dense / config.speedup):
            if watch is not None:
                watch(point, dense / point.cost)
        result = FrontierResult(dense_ms=dense, measured=prices.layers.measured, points=tuple(found), images=counts)
        _write(directory, result)
        run.finish(to_json(result))
    return result


def _begin(
    run: Run, model: nn.Module, removal: Removal, size: InputSize, progress: StageProgress | None
) -> tuple[MovePrices, list[FrontierPoint]]:
    """Return the prices and the points so far: those of an interrupted run, or new prices and no points."""
    file = run.directory / "checkpoints"
    if (state := run.checkpoints.latest()) is not None:
        return from_json(MovePrices, state["prices"], file), from_json(list[FrontierPoint], state["points"], file)
    return measure_move_prices(model, removal=removal, input_size=size, progress=progress), []


def _points(
    run: Run, search: FrontierSearch, prices: MovePrices, found: list[FrontierPoint], least: float
) -> Iterator[FrontierPoint]:
    """Yield the points that are not in ``found`` yet; each is kept before the next round begins."""
    if found:
        search.resume(found[-1])
    for point in search.rounds(least):
        found.append(point)
        run.checkpoints.keep({"prices": to_json(prices), "points": [to_json(one) for one in found]})
        yield point


def plan_file(found: FrontierResult, number: int) -> str:
    """Return the file in the run directory that has the plan of a point."""
    return f"{PLANS}/{number + 1:02d}-{found.speedup(found.points[number]):.2f}x.json"


def _write(directory: Path, found: FrontierResult) -> None:
    """Write the table, and the plan of each point to a file that ``--plan`` takes."""
    rows = list[dict[str, Any]]()
    (directory / PLANS).mkdir(exist_ok=True)
    for number, point in enumerate(found.points):
        speedup, plan = found.speedup(point), point.plan
        name = plan_file(found, number)
        write_text(directory / name, f"{plan.to_json()}\n")
        left = {name: " ".join(f"{b}:{n}" for b, n in getattr(plan, name)) for name in NARROWER}
        kinds: dict[str, str] = {kind: " ".join(map(str, getattr(plan, kind))) for kind in KINDS}
        numbers = {"speedup": f"{speedup:.4f}", "damage": f"{point.damage:.5g}", "ms": f"{point.cost:.4g}"}
        rows.append({**numbers, **kinds, "tail": plan.tail, **left, "plan": name})
    write_csv(directory / TABLE, COLUMNS, rows)
