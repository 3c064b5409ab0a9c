"""The command run: from a dense model to a shipped one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hetdpt.cli.dry_run import show_estimate
from hetdpt.cli.live import live
from hetdpt.cli.options import (
    Batch,
    BatchSize,
    Classes,
    DataRoot,
    Device,
    Download,
    Fraction,
    ImgSize,
    Json,
    PerClass,
    Precision,
    Pretrained,
    Quiet,
    Seed,
    Weights,
    Workers,
    read_numbers,
    read_removal,
    read_rounds,
    read_settings,
    workers_of,
)
from hetdpt.cli.select import NAMES
from hetdpt.cli.show import is_first_process, print_, print_json, table
from hetdpt.core.plan import KINDS
from hetdpt.data.table import FORMS
from hetdpt.export.runtimes import EXPORTS

if TYPE_CHECKING:
    from hetdpt.flow.config import RunConfig
    from hetdpt.report.run import RunRecord
    from hetdpt.results import RunSummary

TRAININGS = ("collection", "search", "recovery")
EVERYWHERE = {  # options that hold for each of them
    "batch_size": "training.batch_size",
    "precision": "training.precision",
    "seed": "training.seed",
    "fraction": "fraction",
    "per_class": "per_class",
}
FIELDS = (
    "model", "data", "out", "weights", "num_classes", "img_size", "data_root", "layers", "speedup", "macs", "params",
    "method", "samples", "images", "candidates", "keep", "tokens", "device", "batch", "minutes",
)  # fmt: skip
"""Options that are fields of the configuration, by their own names."""


def run(
    context: typer.Context,
    model: Annotated[
        str | None, typer.Argument(help="A timm name, hf:NAME, a saved directory, or demo; or say it in --config.")
    ] = None,
    data: Annotated[str | None, typer.Option(help=f"The images to train and measure on: {FORMS}.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Run directory; the same command again goes on where it stopped.")
    ] = None,
    layers: Annotated[int | None, typer.Option(help="Goal: how many layers go.")] = None,
    speedup: Annotated[
        float | None, typer.Option(help="Goal: how many times faster on this machine, such as 1.5.")
    ] = None,
    macs: Annotated[str | None, typer.Option(help="Goal: MACs left at most, such as 3G or 70%.")] = None,
    params: Annotated[str | None, typer.Option(help="Goal: parameters left at most, such as 16M or 70%.")] = None,
    config: Annotated[
        Path | None, typer.Option(help="Settings from a file (.toml, .yaml); options given here win over it.")
    ] = None,
    recipe: Annotated[str | None, typer.Option(help="Settings to begin with; hetdpt recipes lists them.")] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="Any setting, such as recovery.training.lr=1e-4; may be repeated."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be done and about how long it takes; write nothing.")
    ] = False,
    redo: Annotated[str | None, typer.Option(help="Do this stage and all that follow anew.")] = None,
    until: Annotated[str | None, typer.Option(help="Stop after this stage.")] = None,
    method: Annotated[str | None, typer.Option(help=f"How layers are chosen: {NAMES}.")] = None,
    compare: Annotated[
        str | None, typer.Option(help="Other methods to try at the same budget, such as random,attention-only.")
    ] = None,
    samples: Annotated[
        Path | None, typer.Option(help="A CSV of samples, or a directory of hetdpt collect, instead of collecting.")
    ] = None,
    rounds: Annotated[str | None, typer.Option(help="Of the three chains of samples, such as 8,8,3.")] = None,
    removal: Annotated[str | None, typer.Option(help="plain, calibrated, ...; by default as the recipe says.")] = None,
    images: Annotated[int | None, typer.Option(help="Training images to fit replacements on: 256 by default.")] = None,
    candidates: Annotated[str | None, typer.Option(help="Layers to search: all, or te.")] = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="Of the fine-tuning at the end.")] = None,
    keep: Annotated[str | None, typer.Option(help="Which model of it is kept: last, best or ema.")] = None,
    batch_size: BatchSize = None,
    fraction: Fraction = None,
    per_class: PerClass = None,
    precision: Precision = None,
    seed: Seed = None,
    plus: Annotated[
        bool,
        typer.Option("--plus", help="HetDPT+: after layers, width goes until --macs, --params or --speedup is met."),
    ] = False,
    depths: Annotated[str | None, typer.Option(help="Numbers of layers to try with --plus, such as 0,4,8.")] = None,
    round_to: Annotated[
        int | None, typer.Option(min=1, help="With --plus, sizes are multiples of this; 8 for wide models by default.")
    ] = None,
    tokens: Annotated[
        str | None, typer.Option(help="Reduce tokens of the model at the end, such as tome:8 or gtp:8.")
    ] = None,
    export: Annotated[
        str | None, typer.Option(help=f"Other runtimes to export the model to as well: {', '.join(EXPORTS)}.")
    ] = None,
    onnx: Annotated[bool, typer.Option("--onnx", help="The same as --export onnx.")] = False,
    weights: Weights = None,
    pretrained: Pretrained = False,
    num_classes: Classes = None,
    img_size: ImgSize = None,
    data_root: DataRoot = None,
    download: Download = False,
    batch: Batch = None,
    workers: Workers = None,
    device: Device = None,
    minutes: Annotated[
        float | None, typer.Option("--checkpoint-minutes", min=0, help="Time between checkpoints in an epoch.")
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Make a model faster: sample, split the budget, choose layers, recover, merge, measure, save, report."""
    from hetdpt.flow.config import RunConfig

    given = {name: value for name, value in context.params.items() if value is not None}
    asked = RunConfig.resolve(recipe=recipe, file=config, changes=_changes(given, config))
    if dry_run:
        return show_estimate(asked.located(), redo, as_json, quiet)
    do(asked, redo, until, as_json, quiet)


def _changes(given: dict[str, Any], file: Path | None) -> dict[str, Any]:
    """Return what the options say, by the names of settings."""
    changes = {name: given[name] for name in FIELDS if name in given}
    changes |= {name: True for name in ("pretrained", "download", "onnx", "plus") if given.get(name)}
    for name, setting in EVERYWHERE.items():
        if name in given:
            changes |= {f"{training}.{setting}": given[name] for training in TRAININGS}
    if "epochs" in given:
        changes["recovery.training.epochs"] = given["epochs"]
    if "compare" in given:
        changes["compare"] = [name.strip() for name in given["compare"].split(",") if name.strip()]
    if "export" in given:
        changes["export"] = [name.strip() for name in given["export"].split(",") if name.strip()]
    if "seed" in given:
        changes["width.seed"] = given["seed"]
    if "depths" in given:
        changes["depths"] = list(read_numbers("--depths", "numbers of layers, such as 0,4,8", given["depths"]))
    if "round_to" in given:
        changes["width.round_to"] = given["round_to"]
    if "rounds" in given:
        changes["rounds"] = list(read_rounds(given["rounds"]))
    if "removal" in given:
        changes["removal"] = read_removal(given["removal"])
    if "workers" in given or file is None:
        changes["workers"] = workers_of(given.get("workers"))
    if file is not None and "out" not in given and _is_run(file.parent):
        changes["out"] = file.parent  # which may have been moved
    return changes | read_settings(given.get("settings"))


def _is_run(folder: Path) -> bool:
    """Whether the file that was given for settings is that of a run."""
    from hetdpt.store.stage_directory import FLOW

    return (folder / FLOW).is_file()


def do(asked: RunConfig, redo: str | None, until: str | None, as_json: bool, quiet: bool) -> None:
    """Do a run and print what it came to."""
    from hetdpt.flow.pipeline import run as run_all

    with live(quiet, as_json) as watch:
        found = run_all(asked, redo=redo, until=until, watch=watch)
    if not is_first_process():
        return
    if found is None:
        return typer.echo(f"stopped after {until}; the same command without --until goes on", err=as_json)
    if as_json:
        return print_json(directory=str(asked.out), **found.to_dict())
    _print(found, asked.out)


def _print(found: RunSummary, out: Path) -> None:
    """Print the dense model, the pruned one and those of other methods in a table, and where all of it is."""
    from hetdpt.core.format import machine, widths
    from hetdpt.flow.stages.outcome import SAVED
    from hetdpt.report.commands import further
    from hetdpt.report.headline import title
    from hetdpt.report.run import RunRecord
    from hetdpt.report.write import REPORTS

    record = RunRecord.read(out)
    print_(_table(found, record))
    measured = record.results.measure
    assert measured is not None
    typer.echo(f"{title(record)}; {found.images} images, {machine(measured, measured.batch)}")
    gone = (f"{kind} {' '.join(map(str, getattr(found.plan, kind))) or 'none'}" for kind in KINDS)
    typer.echo(f"removed: {'; '.join(gone)}")
    if found.ratios:
        typer.echo(f"width: {widths(found.ratios)} less")
    if found.tokens:
        typer.echo(f"tokens: {found.tokens}")
    if not found.goal.is_met:
        typer.echo(f"goal missed: {found.goal.text}", err=True)
        if found.goal.next:
            typer.echo(f"to try it: {further(found.goal.next.budget, out)}", err=True)
    for warning in found.warnings:
        typer.echo(f"warning: {warning}", err=True)
    exported = "".join(f", {out / file}" for file in (record.results.save.exports if record.results.save else ()))
    typer.echo(f"model: {out / SAVED}{exported}; hetdpt.load({str(out / SAVED)!r}) opens it")
    typer.echo(f"report: {(out / REPORTS['html']).resolve()}")


def _table(found: RunSummary, record: RunRecord) -> Any:
    """Return the table of all models."""
    from hetdpt.core.format import amount, milliseconds, percent, times

    rows = table("what it came to", "", "accuracy", "params", "MACs", "of a batch", "speedup")
    models: list[tuple[Any, ...]] = [
        ("dense", found.dense_accuracy, found.dense_params, found.dense_macs, found.dense_ms, 1.0)
    ]
    models.append((found.method, found.pruned_accuracy, found.params, found.macs, found.ms, found.speedup))
    compared = record.results.compare
    for row in compared.rows if compared else ():
        models.append((row.method, row.accuracy, row.params, row.macs, row.ms, row.speedup))
    for name, accuracy, params, macs, ms, speedup in models:
        rows.add_row(name, percent(accuracy), amount(params), amount(macs), milliseconds(ms), times(speedup))
    return rows
