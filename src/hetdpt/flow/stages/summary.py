"""What a run came to, in one value: the numbers to quote, whether the goal was met, and what to try if not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hetdpt.core.errors import FileError, PredictError, first_line
from hetdpt.core.goals import GOALS, Measures, Wanted
from hetdpt.core.plan import Budget
from hetdpt.flow.comparison.compare import GIVEN
from hetdpt.flow.config import RunConfig
from hetdpt.flow.stages.budget import predictor_of, prices_of
from hetdpt.flow.stages.task import Result, StageTask
from hetdpt.results import GoalResult, NextBudget, Split
from hetdpt.selection.predictor.allocate import allocate as split_budget
from hetdpt.store.atomic import parse_json
from hetdpt.store.stage_directory import SUMMARY, read_stages

AGREES = 1.1  # times that two ways to tell a speedup may differ


@dataclass(frozen=True)
class RunSummary:
    """What a run came to; accuracies in percent of the validation images."""

    dense_accuracy: float
    pruned_accuracy: float
    speedup: float
    """Measured, dense and pruned in turns."""
    speedup_low: float
    """Lower end of its 95 % interval over rounds."""
    speedup_high: float
    macs: int
    params: int
    dense_macs: int
    dense_params: int
    ms: float
    """Of one batch."""
    dense_ms: float
    plan: dict[str, Any]
    budget: dict[str, int]
    ratios: dict[str, float] | None
    """Which part of each size went, where width went too."""
    tokens: str | None
    """How tokens are reduced, if they are."""
    method: str
    device: str
    processor: str
    threads: int
    dtype: str
    batch: int
    images: int
    """That accuracies are of."""
    goal: GoalResult
    warnings: tuple[str, ...]
    seconds: float
    """Of all stages."""
    model: str
    data: str

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain JSON."""
        return asdict(self)

    @classmethod
    def read(cls, directory: Path) -> RunSummary:
        """Return what is written in a finished run; ``FileError`` if there is none."""
        file = directory / SUMMARY
        try:
            values = parse_json(file.read_text(encoding="utf-8"))
            goal = values["goal"]
            further = NextBudget(Budget(**goal["next"]["budget"])) if goal["next"] else None
            known = {**values, "goal": GoalResult(**{**goal, "next": further}), "warnings": tuple(values["warnings"])}
            return cls(**known)
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise FileError(f"{file} cannot be read ({first_line(error)}); hetdpt run makes it") from None


def summarise(task: StageTask) -> RunSummary:
    """Return what the stages of a run came to."""
    results, config = task.results, task.config
    measured, plan = results["measure"], results["select"]["plan"]
    dense, pruned, speedup = measured["dense"], measured["pruned"], measured["speedup"]
    return RunSummary(
        dense_accuracy=dense["accuracy"]["top1"],
        pruned_accuracy=pruned["accuracy"]["top1"],
        speedup=speedup["value"],
        speedup_low=speedup["low"],
        speedup_high=speedup["high"],
        macs=pruned["macs"],
        params=pruned["params"],
        dense_macs=dense["macs"],
        dense_params=dense["params"],
        ms=pruned["ms"],
        dense_ms=dense["ms"],
        plan=plan,
        budget={kind: len(plan[kind]) for kind in ("attention", "activation")},
        ratios=results.get("narrow", {}).get("ratios"),
        tokens=config.tokens,
        method=config.method,
        **{name: measured[name] for name in ("device", "processor", "threads", "dtype", "batch")},
        images=pruned["accuracy"]["count"],
        goal=_goal(task),
        warnings=tuple(dict.fromkeys(_warnings(results, config))),
        seconds=sum(stage.seconds for stage in read_stages(config.out)),
        model=config.model,
        data=config.data,
    )


def _goal(task: StageTask) -> GoalResult:
    """Return whether what was wanted is met, by what was measured and counted."""
    measured, plan = task.results["measure"], task.results["select"]["plan"]
    wanted = task.config.with_numbers(prices_of(task.results["analyse"]).dense).wanted
    reached = Measures(
        layers=len(plan["attention"]) + len(plan["activation"]),
        macs=measured["pruned"]["macs"],
        params=measured["pruned"]["params"],
        ms=measured["pruned"]["ms"],
        speedup=measured["speedup"]["value"],
    )
    missed = wanted.missed(reached)
    if not missed:
        return GoalResult(dict(wanted.conditions), True, f"{wanted}: met")
    text = "; ".join(GOALS[name].shortfall(_value(name, reached), wanted.conditions[name]) for name in missed)
    if task.config.plus:
        hint = "width meets a goal within 2 %, so set it a little higher"
        return GoalResult(dict(wanted.conditions), False, f"{text}; {hint}")
    further = _next(task, wanted, reached) if task.config.is_split else None
    hint = f"next: {further.budget.attention} attention + {further.budget.activation} activation" if further else ""
    return GoalResult(dict(wanted.conditions), False, f"{text}; {hint or 'no other budget meets it'}", further)


def _value(name: str, reached: Measures) -> float:
    value = GOALS[name].reached(reached)
    assert value is not None, "all of it was measured"
    return value


def _next(task: StageTask, wanted: Wanted, reached: Measures) -> NextBudget | None:
    """Return the budget that would meet the goal if prices are as wrong there as they were here; None beyond reach."""
    prices = prices_of(task.results["analyse"])
    here = Budget(**task.results["allocate"]["budget"])
    expected, asked = prices.measures(here), dict[str, Any](wanted.conditions)
    for name in asked:
        if GOALS[name].is_bound:
            asked[name] *= (GOALS[name].reached(expected) or _value(name, reached)) / _value(name, reached)
    try:
        best: Split = split_budget(predictor_of(task), prices=prices, **asked).best
    except PredictError:
        return None
    return NextBudget(best.budget) if best.budget != here else None


def _warnings(results: dict[str, Result], config: RunConfig) -> Iterator[str]:
    """Yield a sentence for everything that makes the numbers doubtful."""
    accuracy, classes = results["analyse"]["accuracy"], results["analyse"]["classes"]
    if accuracy["low"] <= 100 / classes:
        top1 = accuracy["top1"]
        yield f"the dense model is no better than chance: {top1:.1f} % in {classes} classes; were its weights given?"
    for stage in ("allocate", "compare"):
        yield from results.get(stage, {}).get("warnings", ())
    yield from _doubts_of_speed(results)
    if "collect" in results and "validation" in results["collect"]["measured_on"]:
        yield "samples of accuracy were measured on the validation images, as a stream has none to hold out"
    if unreadable := sorted({*accuracy["unreadable"], *results["recover"]["unreadable"]}):
        yield f"{len(unreadable)} images could not be read, {unreadable[0]} first"
    if config.samples is not None:
        yield GIVEN
    if config.keep == "best":
        yield "the model kept is that of the best epoch, which the validation images chose; their accuracy flatters it"


def _doubts_of_speed(results: dict[str, Result]) -> Iterator[str]:
    measured, analysis = results["measure"], results["analyse"]
    speedup, of_medians = measured["speedup"], measured["dense"]["ms"] / measured["pruned"]["ms"]
    if not speedup["low"] / AGREES < of_medians < speedup["high"] * AGREES:
        yield (
            f"times do not agree: {speedup['value']:.2f}x in turns, but {of_medians:.2f}x by the median times of a "
            "batch; was the machine busy? --redo measure does it again"
        )
    before, now = ((part["processor"], part["threads"]) for part in (analysis, measured))
    if before != now:
        yield (
            f"layers were priced on {before[0]} with {before[1]} threads, but the speedup was measured on {now[0]} "
            f"with {now[1]}"
        )
