"""What a run came to: measured, saved, compared with other methods, reported."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import nn

from hetdpt.export.exported import export_model
from hetdpt.export.saved import load
from hetdpt.export.saved import save as save_model
from hetdpt.flow.comparison.compare import GIVEN, CompareConfig, compare_into, read_comparison
from hetdpt.flow.comparison.work import Trained
from hetdpt.flow.stages.budget import samples_of
from hetdpt.flow.stages.layers import FOLDER, plan_of
from hetdpt.flow.stages.summary import summarise
from hetdpt.flow.stages.task import Result, StageTask
from hetdpt.measurement.accuracy import evaluate
from hetdpt.measurement.costs import Costs
from hetdpt.measurement.machine import Machine
from hetdpt.measurement.speed import latency_breakdown, measure_throughput
from hetdpt.report.write import write_reports
from hetdpt.results import ComparisonRow
from hetdpt.selection.methods import method_called
from hetdpt.store.atomic import sha256, write_json
from hetdpt.store.stage_directory import SUMMARY
from hetdpt.surgery.record import require_record

SAVED = "model"  # in the run directory
ROUNDS, TIMING_SECONDS = 500, 10.0  # whichever is over first


def measure(task: StageTask) -> Result:
    """Return accuracy, costs and speed of the dense and the pruned model, speeds of interleaved runs."""
    config, dense, pruned = task.config, task.model, final_model(task)
    scores = evaluate(pruned, task.data, workers=config.workers, progress=task.part("evaluating the pruned model"))
    task.note(f"pruned: {scores.top1:.2f} % of {scores.count} images", best=scores.top1)
    models = {"dense": dense, "pruned": pruned}
    accuracies = {"dense": task.results["analyse"]["accuracy"], "pruned": asdict(scores)}
    size = require_record(pruned).survey.input_size
    speed = measure_throughput(
        models, size, batch=config.batch, runs=ROUNDS, seconds=TIMING_SECONDS, progress=task.part("timing in turns")
    )
    found: Result = {}
    for name, model in models.items():
        costs, rate = Costs.of(model, size), speed.throughput[name]
        found[name] = {"accuracy": accuracies[name], "params": costs.params, "macs": costs.macs}
        found[name] |= {"ms": 1e3 * rate.batch / rate.value, "throughput": rate.value}
    task.note(f"speedup {speed.speedup['pruned']}")
    spent = latency_breakdown(models, size, batch=config.batch)
    return {
        **found,
        "speedup": asdict(speed.speedup["pruned"]),
        **asdict(Machine.of(next(dense.parameters()).device)),
        "dtype": rate.dtype,
        "batch": rate.batch,
        "breakdown": {name: {kind: ms.value for kind, ms in kinds.items()} for name, kinds in spent.items()},
    }


def final_model(task: StageTask) -> nn.Module:
    """Return the pruned and merged model, its tokens reduced if that was asked for, on the dense one's device."""
    last = "merge" if task.config.tokens is None else "reduce"
    return load(task.work_of(last) / FOLDER).to(next(task.model.parameters()).device)


def save(task: StageTask) -> Result:
    """Return where the model is that the user ships."""
    model, out = final_model(task).cpu(), task.config.out
    save_model(model, out / SAVED, overwrite=True)
    exported = {row.file: export_model(model, out / row.file, overwrite=True) for row in task.config.exports}
    return {
        "model": SAVED,
        "exports": {file: found.largest_difference for file, found in exported.items()},
        "bytes": _size(out / SAVED),
        "files": {SAVED: None} | {file: sha256(out / file) for file in exported},
    }


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())


def compare(task: StageTask) -> Result:
    """Return what other methods come to with as many layers, the same fine-tuning and the same images."""
    task.require_alone()
    config, layers = task.config, len(plan_of(task))
    why_not = {name: _why_not(name, layers, task) for name in config.compare}
    methods = tuple(name for name, why in why_not.items() if not why)
    left_out = [f"{name} is not compared: {why}" for name, why in why_not.items() if why]
    if not methods:
        return {"rows": [], "images": 0, "warnings": left_out}
    asked = CompareConfig(layers=(layers,), methods=methods, selection=config.select_config, recovery=config.recovery)
    steps = compare_into(
        task.directory, task.model, task.data, asked, task.place, samples=samples_of(task) if config.is_split else ()
    )
    for done in steps:
        outcome = getattr(done, "outcome", None)
        if isinstance(outcome, Trained) and outcome.method:
            task.note(f"{outcome.method}: {outcome.accuracy:.2f} %")
    found = read_comparison(task.directory)
    rows = [_row(row) for row in found.rows]
    warnings = [*left_out, *(text for text in found.warnings if text != GIVEN)]  # ours are of images held out
    return {"rows": rows, "images": found.dense.images, "measured": found.measured, "warnings": warnings}


def _why_not(name: str, layers: int, task: StageTask) -> str:
    """Return why a method cannot take so many layers; empty where it can."""
    method, sites = method_called(name), task.results["analyse"]["sites"]
    count = len([site for site in sites if method.only in (None, site["kind"])])
    if count < layers:
        return f"{layers} layers go, and there are {count} that it could take"
    return "there are no samples to split its budget by" if method.split == "map" and not task.config.is_split else ""


def _row(row: ComparisonRow) -> dict[str, Any]:
    return {
        "method": row.method,
        "plan": asdict(row.plan),
        "start": row.start,
        "accuracy": row.accuracy,
        "params": row.speed.params,
        "macs": row.speed.macs,
        "ms": row.speed.ms,
        "speedup": row.speed.speedup,
        "low": row.speed.low,
        "high": row.speed.high,
    }


def report(task: StageTask) -> Result:
    """Return the names of the reports, which are written with the summary of the run."""
    out = task.config.out
    found = summarise(task).to_dict()
    names = write_reports(out, found)
    write_json(out / SUMMARY, found)  # last: with it the run is finished
    return {"files": {name: sha256(out / name) for name in (*names.values(), SUMMARY)}}
