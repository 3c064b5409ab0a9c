"""The outcome of a run: measured, saved, compared with other methods, reported."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from torch import nn

from hetdpt.core.format import percent
from hetdpt.core.goals import BOUNDS
from hetdpt.export.exported import export_model
from hetdpt.export.saved import load, save
from hetdpt.flow.comparison import work as comparison
from hetdpt.flow.comparison.compare import GIVEN, CompareConfig, compare_into, read_comparison
from hetdpt.flow.comparison.work import Cell, Trained
from hetdpt.flow.config import RunConfig
from hetdpt.flow.stages.budget import samples_of
from hetdpt.flow.stages.layers import FOLDER, SEARCH
from hetdpt.flow.stages.stage import DATA, EVERY_STAGE, MODEL, RunContext, Stage, StageEstimate
from hetdpt.flow.stages.summary import summarise
from hetdpt.measurement.accuracy import evaluate
from hetdpt.measurement.costs import Costs
from hetdpt.measurement.speed import latency_breakdown, machine_of, measure_throughput
from hetdpt.report.write import write_reports
from hetdpt.results import (
    AnalyseResult,
    CompareResult,
    MeasureResult,
    ModelFigures,
    ReportResult,
    SaveResult,
    SelectResult,
)
from hetdpt.selection.methods import method_called
from hetdpt.store.atomic import sha256, write_json
from hetdpt.store.stage_directory import SUMMARY
from hetdpt.surgery.record import require_record

if TYPE_CHECKING:
    from hetdpt.flow.stages.timing import Trials

SAVED = "model"  # in the run directory
ROUNDS, TIMING_SECONDS = 500, 10.0  # whichever ends first
BREAKDOWN, COMPARED = 20, 100  # batches of latency_breakdown, of measure_throughput by default


class MeasureStage(Stage[MeasureResult]):
    """Measure accuracy, costs and speed of the dense and the pruned model, timed in turns."""

    name, result = "measure", MeasureResult
    settings = ("batch", "device")
    inputs = (MODEL, DATA, "merge", "reduce")
    by_all = True

    def run(self, context: RunContext) -> MeasureResult:
        config, pruned = context.config, final_model(context)
        watch = context.part("evaluating the pruned model")
        scores = evaluate(pruned, context.data, workers=config.workers, progress=watch)
        context.note(f"pruned model: {percent(scores.top1)} of {scores.count} images", best=scores.top1)
        models = {"dense": context.model, "pruned": pruned}
        size, watch = require_record(pruned).survey.input_size, context.part("timing in turns")
        speed = measure_throughput(
            models, size, batch=config.batch, runs=ROUNDS, seconds=TIMING_SECONDS, progress=watch
        )
        figures = {}
        for name, accuracy in {"dense": context.of(AnalyseResult).accuracy, "pruned": scores}.items():
            costs, rate = Costs.of(models[name], size), speed.throughput[name]
            ms = 1e3 * rate.batch / rate.value
            figures[name] = ModelFigures(
                accuracy=accuracy, params=costs.params, macs=costs.macs, ms=ms, throughput=rate.value
            )
        context.note(f"speedup {speed.speedup['pruned']}")
        spent = latency_breakdown(models, size, batch=config.batch)
        return MeasureResult(
            dense=figures["dense"],
            pruned=figures["pruned"],
            speedup=speed.speedup["pruned"],
            **asdict(machine_of(context.device)),
            dtype=rate.dtype,
            batch=rate.batch,
            breakdown={name: {kind: ms.value for kind, ms in kinds.items()} for name, kinds in spent.items()},
        )

    def estimate(self, trials: Trials) -> StageEstimate:
        images, timing = trials.images, trials.timing(2, ROUNDS, TIMING_SECONDS)
        return StageEstimate(
            stage=self.name,
            text=f"the pruned model on {images} images; both timed in turns",
            evaluations=images,
            seconds=images * trials.evaluation + timing + 2 * BREAKDOWN * trials.batch,
        )


def final_model(context: RunContext) -> nn.Module:
    """Return the pruned and merged model, with reduced tokens if the run has them, on the dense model's device."""
    last = "merge" if context.config.tokens is None else "reduce"
    return load(context.work_of(last) / FOLDER).to(context.device)


class SaveStage(Stage[SaveResult]):
    """Save the model that the user ships, and export it to other runtimes."""

    name, result = "save", SaveResult
    settings = ("export", "onnx")
    inputs = ("merge", "reduce")

    def run(self, context: RunContext) -> SaveResult:
        model, out = final_model(context).cpu(), context.config.out
        save(model, out / SAVED, overwrite=True)
        exported = {row.file: export_model(model, out / row.file, overwrite=True) for row in context.config.exports}
        return SaveResult(
            model=SAVED,
            exports={file: found.largest_difference for file, found in exported.items()},
            bytes=sum(file.stat().st_size for file in (out / SAVED).iterdir()),
            files={SAVED: None} | {file: sha256(out / file) for file in exported},
        )

    def estimate(self, trials: Trials) -> StageEstimate:
        runtimes = trials.config.exports
        text = ", and as ".join(["the model", *(row.title for row in runtimes)])
        left = (1 + len(runtimes)) * trials.weights
        return StageEstimate(stage=self.name, text=text, seconds=2 * trials.saving, left=left)


class CompareStage(Stage[CompareResult]):
    """Run other methods with as many layers, the same fine-tuning and the same images."""

    name, result = "compare", CompareResult
    settings = ("compare", *SEARCH, "recovery", "trim")
    inputs = (MODEL, DATA, "select")

    def is_needed(self, config: RunConfig) -> bool:
        return bool(config.compare)

    def run(self, context: RunContext) -> CompareResult:
        context.require_single_process()
        config, layers = context.config, len(context.of(SelectResult).plan)
        why_not = {name: _why_not(name, layers, context) for name in config.compare}
        methods = tuple(name for name, why in why_not.items() if not why)
        left_out = [f"{name} is not compared: {why}" for name, why in why_not.items() if why]
        if not methods:
            return CompareResult(rows=(), images=0, warnings=tuple(left_out))
        asked = CompareConfig(
            layers=(layers,),
            methods=methods,
            selection=config.select_config,
            recovery=config.recovery,
            trim=config.trim,
        )
        samples = samples_of(context) if config.is_split else ()
        steps = compare_into(context.directory, context.model, context.data, asked, context.execution, samples=samples)
        for done in steps:
            if isinstance(done.result, Trained) and isinstance(done.subject, Cell):
                context.note(f"{done.subject.method}: {percent(done.result.accuracy)}")
        found = read_comparison(context.directory)
        warnings = (*left_out, *(text for text in found.warnings if text != GIVEN))  # ours are of images held out
        return CompareResult(rows=found.rows, images=found.dense.images, measured=found.measured, warnings=warnings)

    def estimate(self, trials: Trials) -> StageEstimate:
        methods = [method_called(name) for name in trials.config.compare]
        methods = [method for method in methods if trials.layers <= trials.most(method)]
        chosen, count = [trials.selection(method, trials.layers) for method in methods], len(methods)
        searches = [training for _, training in chosen if training]
        again = trials.images * (1 + count)
        timing = trials.timing(1 + count, COMPARED, comparison.TIMING_SECONDS)
        training = sum(seconds for seconds, _ in chosen) + count * trials.recovering()
        return StageEstimate(
            stage=self.name,
            text=f"{', '.join(method.name for method in methods)}: layers chosen, fine-tuned and measured as above",
            updates=sum(search.updates for search in searches) + count * trials.recovery.updates,
            evaluations=trials.images * count * trials.recovery.evaluations + again,
            seconds=training + again * trials.evaluation + timing,
            most=max(one.checkpoints for one in [*searches, trials.recovery]) + 4 * trials.weights,
        )


def _why_not(name: str, layers: int, context: RunContext) -> str:
    method = method_called(name)
    count = len([site for site in context.of(AnalyseResult).sites if method.only in (None, site.kind)])
    if count < layers:
        return f"{layers} layers are removed, but it can remove {count}"
    needs_samples = method.split == "map" and not context.config.is_split
    return "there are no samples to split its budget by" if needs_samples else ""


class ReportStage(Stage[ReportResult]):
    """Write the reports and the summary of the run."""

    name, result = "report", ReportResult
    settings = ("model", "data", *BOUNDS)
    inputs = (EVERY_STAGE,)
    is_derived = True

    def run(self, context: RunContext) -> ReportResult:
        out, found = context.config.out, summarise(context)
        names = write_reports(out, found)
        write_json(out / SUMMARY, found.to_dict())  # last: with it the run is finished
        return ReportResult({name: sha256(out / name) for name in (*names.values(), SUMMARY)})

    def estimate(self, trials: Trials) -> StageEstimate:
        return StageEstimate(stage=self.name, text="summary.json, report.html, report.md, report.json")
