"""The summary of a run: the numbers to quote, whether the goal was met, what to try if not, and what is in doubt."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hetdpt.core.errors import PredictError
from hetdpt.core.format import budget_text, percent
from hetdpt.core.goals import GOALS, Measures, Wanted
from hetdpt.flow.comparison.compare import GIVEN
from hetdpt.flow.stages.budget import predictor_of
from hetdpt.flow.stages.stage import RunContext
from hetdpt.results import (
    AllocateResult,
    AnalyseResult,
    CollectResult,
    CompareResult,
    FitResult,
    GoalResult,
    MeasureResult,
    NarrowResult,
    NextBudget,
    RecoverResult,
    RunSummary,
    SelectResult,
)
from hetdpt.selection.predictor.allocate import allocate
from hetdpt.store.stage_directory import read_stages

AGREES = 1.1  # times that two ways to tell a speedup may differ


def summarise(context: RunContext) -> RunSummary:
    """Return the summary of a run whose stages are done."""
    config, measured, plan = context.config, context.of(MeasureResult), context.of(SelectResult).plan
    dense, pruned, speedup, narrowed = measured.dense, measured.pruned, measured.speedup, context.get(NarrowResult)
    return RunSummary(
        dense_accuracy=dense.accuracy.top1,
        pruned_accuracy=pruned.accuracy.top1,
        speedup=speedup.value,
        speedup_low=speedup.low,
        speedup_high=speedup.high,
        macs=pruned.macs,
        params=pruned.params,
        dense_macs=dense.macs,
        dense_params=dense.params,
        ms=pruned.ms,
        dense_ms=dense.ms,
        plan=plan,
        budget=plan.budget,
        ratios=narrowed.ratios if narrowed else None,
        tokens=config.tokens or (f"{plan.tokens.method}:{plan.tokens.r}" if plan.tokens else None),
        method=config.chooser.name,
        device=measured.device,
        processor=measured.processor,
        threads=measured.threads,
        dtype=measured.dtype,
        batch=measured.batch,
        images=pruned.accuracy.count,
        goal=_goal(context),
        warnings=tuple(dict.fromkeys(_warnings(context))),
        seconds=sum(stage.seconds for stage in read_stages(config.out)),
        model=config.model,
        data=config.data,
        metric=context.data.metric,
    )


def _goal(context: RunContext) -> GoalResult:
    measured, config = context.of(MeasureResult), context.config
    wanted = config.with_numbers(context.of(AnalyseResult).prices.dense).wanted
    reached = Measures(
        layers=len(context.of(SelectResult).plan),
        macs=measured.pruned.macs,
        params=measured.pruned.params,
        ms=measured.pruned.ms,
        speedup=measured.speedup.value,
    )
    missed, goals = wanted.missed(reached), dict(wanted.conditions)
    if not missed:
        return GoalResult(goals, True, f"{wanted}: met")
    text = "; ".join(GOALS[name].shortfall(_value(name, reached), goals[name]) for name in missed)
    if config.plus:
        return GoalResult(goals, False, f"{text}; width meets a goal within 2 %, so set it a little higher")
    if config.priced_goal:
        what = "what is removed was" if config.is_mixed else "layers were"
        return GoalResult(goals, False, f"{text}; {what} chosen by predicted costs, so set it a little higher")
    further = _next(context, wanted, reached) if config.is_split else None
    hint = f"next: {budget_text(further.budget)}" if further else ""
    return GoalResult(goals, False, f"{text}; {hint or 'no other budget meets it'}", further)


def _value(name: str, reached: Measures) -> float:
    value = GOALS[name].reached(reached)
    assert value is not None, "all of it was measured"
    return value


def _next(context: RunContext, wanted: Wanted, reached: Measures) -> NextBudget | None:
    """Return the budget that would meet the goal if prices are as wrong there as they were here; None beyond reach."""
    prices, here = context.of(FitResult).prices, context.of(AllocateResult).budget
    expected, asked = prices.measures(here), dict[str, Any](wanted.conditions)
    for name in asked:
        if GOALS[name].is_bound:
            asked[name] *= (GOALS[name].reached(expected) or _value(name, reached)) / _value(name, reached)
    try:
        best = allocate(predictor_of(context), prices=prices, **asked).best
    except PredictError:
        return None
    return NextBudget(best.budget) if best.budget != here else None


def _warnings(context: RunContext) -> Iterator[str]:
    """Yield a sentence for everything that makes the numbers doubtful."""
    analysis, samples = context.of(AnalyseResult), context.get(CollectResult)
    accuracy, classes = analysis.accuracy, analysis.classes
    if accuracy.low <= 100 / classes:
        chance = f"{percent(accuracy.top1, 1)} in {classes} classes"
        yield f"the dense model is no better than chance: {chance}; were its weights given?"
    for found in (context.get(AllocateResult), context.get(CompareResult)):
        yield from found.warnings if found else ()
    yield from _doubts_of_speed(context.of(MeasureResult), analysis)
    if samples and "validation" in samples.measured_on:
        yield "samples of accuracy were measured on the validation images, as a stream has none to hold out"
    if unreadable := sorted({*accuracy.unreadable, *context.of(RecoverResult).unreadable}):
        yield f"{len(unreadable)} images could not be read, {unreadable[0]} first"
    if context.config.samples is not None:
        yield GIVEN
    if text := context.of(RecoverResult).warning(context.config.kept):
        yield text
    if context.config.kept == "best" and not context.of(RecoverResult).is_held_out:
        yield "the saved model is that of the best epoch, chosen on the validation images, whose accuracy flatters it"


def _doubts_of_speed(measured: MeasureResult, analysis: AnalyseResult) -> Iterator[str]:
    speedup, of_medians = measured.speedup, measured.dense.ms / measured.pruned.ms
    if not speedup.low / AGREES < of_medians < speedup.high * AGREES:
        yield (
            f"times do not agree: {speedup.value:.2f}x in turns, but {of_medians:.2f}x by the median times of a batch; "
            "was the machine busy? --redo measure measures again"
        )
    before, now = ((part.processor, part.threads) for part in (analysis, measured))
    if before != now:
        yield (
            f"layers were timed on {before[0]} with {before[1]} threads, but the speedup was measured on {now[0]} "
            f"with {now[1]}"
        )
