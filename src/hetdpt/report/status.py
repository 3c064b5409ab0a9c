"""How far a run is, read from its directory while another process may be at work in it. Writes nothing, no torch."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hetdpt.core.format import amount, counted, duration, fewer_tokens, machine, percent, times, widths
from hetdpt.report.run import RunRecord
from hetdpt.results import (
    AllocateResult,
    AnalyseResult,
    BalanceResult,
    CollectResult,
    CompareResult,
    FitResult,
    MeasureResult,
    MergeResult,
    NarrowResult,
    RecoverResult,
    ReduceResult,
    SaveResult,
    SelectResult,
)
from hetdpt.store.lock import is_in_use
from hetdpt.store.stage_directory import STAGES, StageRecord

State = Literal["done", "running", "interrupted", "left", "not needed"]


@dataclass(frozen=True)
class StageStatus:
    """How far one stage is."""

    stage: str
    state: State
    seconds: float | None = None
    """At work so far; None where nothing was done, or nobody knows."""
    words: str = ""
    """What it came to, or how far it is."""


@dataclass(frozen=True)
class RunStatus:
    """How far a run is, by its stages in order."""

    is_running: bool
    """Whether a process of this machine holds the directory."""
    stages: tuple[StageStatus, ...]

    @property
    def is_done(self) -> bool:
        return all(stage.state in ("done", "not needed") for stage in self.stages)


def read_status(run: Path) -> RunStatus:
    """Return how far the run in a directory is; ``FileError`` if it is none, or a file of it is damaged.

    Whether a process works here is asked first, so that one that ends meanwhile is not called interrupted.
    """
    is_running = run.is_dir() and is_in_use(run)
    record = RunRecord.read(run)
    there = {stage.name: stage for stage in record.stages}
    stages = []
    for name in STAGES:
        if name in there:
            stages.append(_begun(there[name], getattr(record.results, name, None), is_running))
        else:
            stages.append(StageStatus(name, "left" if name in record.planned else "not needed"))
    return RunStatus(is_running, tuple(stages))


def _begun(stage: StageRecord, result: object, is_running: bool) -> StageStatus:
    if stage.is_done:
        return StageStatus(stage.name, "done", stage.seconds, _outcome(result))
    now = stage.now
    return StageStatus(stage.name, "running" if is_running else "interrupted", now.get("seconds"), _how_far(now))


def _how_far(now: dict[str, Any]) -> str:
    """Return where a stage was when it last told, such as ``fine-tuning, 40/230, 3.0 s ago``."""
    if not {"text", "done", "total", "time"} <= now.keys():
        return ""
    count = [f"{now['done']}/{now['total']}"] if now["total"] else []
    return ", ".join([now["text"], *count, f"{duration(max(0.0, time.time() - now['time']))} ago"])


def _outcome(result: object) -> str:
    """Return what a stage came to, in a few words."""
    match result:
        case AnalyseResult(accuracy=scores):
            return f"{percent(scores.top1)} of {scores.count} images, {result.blocks} blocks"
        case CollectResult(samples=samples):
            return counted(len(samples), "sample")
        case FitResult():
            return f"degree {result.degree}, wrong by {result.mae:.2f} points on average"
        case AllocateResult(budget=budget):
            return f"{budget.attention} attention + {budget.activation} activation"
        case BalanceResult(budget=budget):
            best = percent(result.candidates[result.chosen].accuracy)
            return f"{budget.attention} attention + {budget.activation} activation, then width: {best}"
        case SelectResult(plan=plan):
            gone = {"attention": plan.attention, "activation": plan.activation}
            blocks = [f"{kind} {' '.join(map(str, numbers))}" for kind, numbers in gone.items() if numbers]
            return ", ".join(blocks) or "no layers"
        case NarrowResult(macs=macs, params=params):
            return f"less {widths(result.ratios)}; {amount(macs)} MACs, {amount(params)} parameters"
        case RecoverResult(epochs=epochs) if epochs:
            after = f"{percent(epochs[-1].last)} after {counted(epochs[-1].number, 'epoch')}"
            return f"{percent(epochs[0].last)} before, {after}, best {percent(epochs[-1].best)}"
        case MergeResult(merged=merged):
            return f"{counted(merged, 'FFN')} merged"
        case ReduceResult(tokens=tokens):
            return fewer_tokens(tokens)
        case MeasureResult():
            where = machine(result, result.batch)
            return f"{percent(result.pruned.accuracy.top1)}, {times(result.speedup.value)} ({where})"
        case SaveResult():
            return ", ".join((result.model, *result.exports))
        case CompareResult(rows=rows):
            return ", ".join(f"{row.method} {percent(row.accuracy)}" for row in rows)
    return ""
