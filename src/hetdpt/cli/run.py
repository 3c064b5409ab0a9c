"""The commands run and demo: from a dense model to a faster one, with a report."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hetdpt.cli.command import Options, goal_options, option, tail_length
from hetdpt.cli.options import (
    ANY_METHOD,
    IMAGES,
    ModelOptions,
    OutputOptions,
    PlaceOptions,
    WorkOptions,
    given_alone,
    read_settings,
    require_one_length,
    workers_of,
)
from hetdpt.cli.show import is_first_process, print_, print_json, table
from hetdpt.core.format import amount, counted, duration, machine, milliseconds, percent, times, widths
from hetdpt.core.plan import KINDS
from hetdpt.export.runtimes import EXPORTS

if TYPE_CHECKING:
    from hetdpt.flow.config import RunConfig
    from hetdpt.flow.dry_run import Estimate
    from hetdpt.report.run import RunRecord
    from hetdpt.results import RunSummary


def everywhere(setting: str, *more: str, **words: Any) -> Any:
    """Return the option of a setting that all trainings of a run have."""
    trainings = (f"RunConfig.{part}.{setting}" for part in ("collection", "search", "recovery"))
    return option(*trainings, *more, shows_default=False, **words)


class SelectionOptions(Options, panel="Choice of layers"):
    """How a run chooses layers."""

    method: Any = option("RunConfig.method", help=ANY_METHOD)
    moves: Any = option("RunConfig.moves")
    compare: Any = option("RunConfig.compare")
    samples: Any = option("RunConfig.samples")
    rounds: Any = option("RunConfig.rounds")
    removal: Any = option("RunConfig.removal", shows_default=False)
    class_token: Any = option("RunConfig.class_token")
    images: Any = option("RunConfig.images")
    candidates: Any = option("RunConfig.candidates", shows_default=False)


class FineTuningOptions(Options, panel="Training"):
    """The settings of the trainings of a run that are changed most; --set changes the others."""

    keep: Any = option("RunConfig.keep")
    lr: Any = option("RunConfig.recovery.training.lr", shows_default=False)
    """Peak learning rate of the final fine-tuning, used as given."""
    batch_size: Any = everywhere("training.batch_size", least=1)
    fraction: Any = everywhere("fraction")
    per_class: Any = everywhere("per_class", least=1)
    precision: Any = everywhere("training.precision")
    seed: Any = everywhere("training.seed", "RunConfig.width.seed", least=0)


class FurtherOptions(Options, panel="Width, tokens, export"):
    """What a run does beyond removing layers."""

    plus: Any = option("RunConfig.plus")
    depths: Any = option("RunConfig.depths")
    round_to: Any = option("RunConfig.width.round_to", least=1)
    tail: Any = option("RunConfig.tail", type=tail_length)
    trim: Any = option("RunConfig.trim")
    tokens: Any = option("RunConfig.tokens")
    export: Any = option("RunConfig.export", help=f"Runtimes to export the model to as well: {', '.join(EXPORTS)}.")
    onnx: Any = option("RunConfig.onnx")


class RunOptions(
    SelectionOptions, FineTuningOptions, FurtherOptions, ModelOptions, PlaceOptions, WorkOptions, OutputOptions
):
    model: Any = option("RunConfig.model", is_argument=True)
    data: Any = option("RunConfig.data", help=IMAGES)
    out: Any = option("RunConfig.out")
    goals: dict[str, Any] = goal_options()
    epochs: Any = option("RunConfig.recovery.training.epochs", least=1, shows_default=False)
    """Epochs of the final fine-tuning."""
    minutes: Any = option("RunConfig.recovery.training.minutes")
    """Minutes that the final fine-tuning may take, instead of --epochs."""
    recipe: str | None = None
    """Recipe that sets the defaults; hetdpt recipes lists them."""
    config: Path | None = option(panel="Settings and stages")
    """File with settings (.toml, .yaml); options override it."""
    changes: list[str] = option(flag="--set", default=[], panel="Settings and stages")
    """Any setting, such as recovery.training.lr=1e-4; may be repeated."""
    dry_run: bool = False
    """Only estimate what would be done and how long it takes; write nothing."""
    redo: str | None = option(panel="Settings and stages")
    """Repeat this stage and all that follow it."""
    until: str | None = option(panel="Settings and stages")
    """Stop after this stage."""
    checkpoint_minutes: Any = option("RunConfig.checkpoint_minutes", least=0, panel="Device")
    batch: Any = option("RunConfig.batch", least=1, panel="Device")

    @property
    def asked(self) -> RunConfig:
        """The settings of the run: the options over the file over the recipe."""
        from hetdpt.flow.config import RunConfig
        from hetdpt.store.stage_directory import FLOW

        changes = {**given_alone(self.settings("RunConfig"), "recovery.training."), **self.goals}
        if self.workers is None and self.config is None:
            changes["workers"] = workers_of(None)
        if self.config is not None and self.out is None and (self.config.parent / FLOW).is_file():
            changes["out"] = self.config.parent  # a run directory, which may have been moved
        changes |= read_settings(self.changes)
        require_one_length(changes, "recovery.training.")
        return RunConfig.resolve(recipe=self.recipe, file=self.config, changes=changes)


def run(options: RunOptions) -> None:
    """Make a model faster: choose layers, remove them, fine-tune, measure, save, report."""
    config = options.asked
    if options.dry_run:
        return _estimate(config.located(), options)
    do(config, options, options.redo, options.until)


def do(config: RunConfig, output: OutputOptions, redo: str | None = None, until: str | None = None) -> None:
    """Do a run and print its results."""
    from hetdpt.flow.pipeline import run as run_all

    with output.live() as display:
        found = run_all(config, redo=redo, until=until, watch=display.event)
    if not is_first_process():
        return
    if found is None:
        return click.echo(f"stopped after {until}; the same command without --until resumes", err=output.as_json)
    if output.as_json:
        return print_json(directory=str(config.out), **found.to_dict())
    _print(found, config.out)


def _print(found: RunSummary, out: Path) -> None:
    from hetdpt.flow.stages.outcome import SAVED
    from hetdpt.report.commands import further
    from hetdpt.report.headline import title
    from hetdpt.report.run import RunRecord
    from hetdpt.report.write import REPORTS

    record = RunRecord.read(out)
    print_(_table(found, record))
    measured = record.results.measure
    assert measured is not None
    click.echo(f"{title(record)}; {found.images} images, {machine(measured, measured.batch)}")
    removed = (f"{kind} {' '.join(map(str, getattr(found.plan, kind))) or 'none'}" for kind in KINDS)
    click.echo(f"removed: {'; '.join(removed)}")
    if found.plan.tail:
        click.echo(f"tail: patches are not updated in the last {counted(found.plan.tail, 'block')}")
    if found.plan.narrowed:
        click.echo(f"fewer hidden features or heads: in {counted(found.plan.narrowed, 'layer')}")
    if found.ratios:
        click.echo(f"width: {widths(found.ratios)} less")
    if found.tokens:
        click.echo(f"tokens: {found.tokens}")
    if not found.goal.is_met:
        click.echo(f"goal missed: {found.goal.text}", err=True)
        if found.goal.next:
            click.echo(f"to try it: {further(found.goal.next.budget, out)}", err=True)
    for warning in found.warnings:
        click.echo(f"warning: {warning}", err=True)
    exported = "".join(f", {out / file}" for file in (record.results.save.exports if record.results.save else ()))
    click.echo(f"model: {out / SAVED}{exported}; hetdpt.load({str(out / SAVED)!r}) opens it")
    click.echo(f"report: {(out / REPORTS['html']).resolve()}")


def _table(found: RunSummary, record: RunRecord) -> Any:
    rows = table("results", "", found.metric, "params", "MACs", "of a batch", "speedup")
    models: list[tuple[Any, ...]] = [
        ("dense", found.dense_accuracy, found.dense_params, found.dense_macs, found.dense_ms, 1.0)
    ]
    models.append((found.method, found.pruned_accuracy, found.params, found.macs, found.ms, found.speedup))
    compared = record.results.compare
    for row in compared.rows if compared else ():
        speed = row.speed
        models.append((row.method, row.accuracy, speed.params, speed.macs, speed.ms, speed.speedup))
    for name, accuracy, params, macs, ms, speedup in models:
        rows.add_row(name, percent(accuracy), amount(params), amount(macs), milliseconds(ms), times(speedup))
    return rows


def _estimate(config: RunConfig, options: RunOptions) -> None:
    """Try the steps of a run and print what it would do; nothing is written."""
    from hetdpt.flow.dry_run import estimate
    from hetdpt.flow.pipeline import done_before, open_inputs

    model, data = open_inputs(config)
    done = done_before(config, model, data, options.redo)
    with options.live() as display:
        found = estimate(config, model, data, display.step, done=done)
    if options.as_json:
        return print_json(**found.to_dict())
    _print_estimate(found, config)


def _print_estimate(found: Estimate, config: RunConfig) -> None:
    rows = table("what would be done", "stage", "about", "what")
    rows.columns[-1].justify = "left"
    for stage in found.stages:
        about = "already done" if stage.is_done else duration(stage.seconds) if stage.seconds else ""
        rows.add_row(stage.stage, about, stage.text)
    print_(rows)
    guess = f" (assuming that {found.layers} layers are removed)" if found.is_guess else ""
    click.echo(f"about {duration(found.seconds)} on {found.processor} ({found.device}, {found.threads} threads){guess}")
    click.echo(f"memory {found.memory / 2**30:.1f} GiB at most ({found.memory_of}); disk {found.disk / 2**20:.0f} MiB")
    click.echo(f"nothing was written; without --dry-run the run directory is {config.out}")


class DemoOptions(OutputOptions):
    out: Path = Path("runs/demo")
    """Run directory; the same command resumes an interrupted run."""
    retrain: bool = False
    """Train the dense model again first, which takes minutes."""
    redo: str | None = None
    """Repeat this stage and all that follow it."""


def demo(options: DemoOptions) -> None:
    """Make the model that comes with hetdpt faster, compare methods, write a report; minutes on a CPU."""
    from hetdpt.flow.demo import demo_config, train_model

    out = options.out
    config = demo_config(out)
    if options.retrain:
        dense = out.with_name(f"{out.name}-dense")
        with options.live() as display:
            train_model(dense, progress=display.step)
        config = replace(config, model=str(dense))
    do(config, options, options.redo)
