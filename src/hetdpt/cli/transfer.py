"""The command transfer: how well models learn the classes of other images."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hetdpt.cli.options import (
    Accumulate,
    BatchSize,
    Classes,
    ClipGrad,
    DataName,
    DataRoot,
    Device,
    Download,
    Epochs,
    ImgSize,
    Json,
    Lr,
    Minutes,
    Model,
    Out,
    Precision,
    Pretrained,
    Quiet,
    Seed,
    Settings,
    Weights,
    Workers,
    config_of,
    given_settings,
    open_beside,
    read_plan,
    with_removal,
    workers_of,
)
from hetdpt.cli.show import note_random_weights, print_, print_json, stages, table
from hetdpt.core.errors import MeasureError, PlanError
from hetdpt.core.format import amount, counted
from hetdpt.report.transfer import cells, columns, measured, places

if TYPE_CHECKING:
    from hetdpt.core.plan import Plan
    from hetdpt.studies.transfer import TransferConfig, TransferDone

RECIPE = "cifar100_transfer"
PROBED = ("fraction", "per_class", "training.seed", "training.batch_size")
"""The settings that a probe has too."""


def transfer(
    context: typer.Context,
    model: Model,
    data: DataName,
    mode: Annotated[str, typer.Option(help="probe: a linear classifier on its features; finetune: all its weights.")],
    out: Out,
    plan: Annotated[
        list[str] | None,
        typer.Option(help="Layers to take from the model first: a JSON file or a plan of the paper; may be repeated."),
    ] = None,
    removal: Annotated[
        str | None, typer.Option(help="What takes their place: plain, calibrated, ...; by default as the plan says.")
    ] = None,
    calibration_images: Annotated[
        int | None, typer.Option(min=1, help="Training images to fit calibrated removal on: 256 by default.")
    ] = None,
    beside: Annotated[
        list[str] | None, typer.Option(help="A saved model to do the same with, such as a pruned one; may be repeated.")
    ] = None,
    weights: Weights = None,
    pretrained: Pretrained = False,
    num_classes: Classes = None,
    img_size: ImgSize = None,
    data_root: DataRoot = None,
    download: Download = False,
    epochs: Epochs = None,
    batch_size: BatchSize = None,
    accumulate: Accumulate = None,
    lr: Lr = None,
    clip_grad: ClipGrad = None,
    fraction: Annotated[float | None, typer.Option(help="Part of the training images to use, 0 to 1.")] = None,
    per_class: Annotated[int | None, typer.Option(min=1, help="Training images of each class to use.")] = None,
    precision: Precision = None,
    seed: Seed = None,
    settings: Settings = None,
    workers: Workers = None,
    device: Device = None,
    minutes: Minutes = 10.0,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Let a model, and pruned ones beside it, learn the classes of other images, and compare what they come to."""
    from hetdpt.data.sources import open_data
    from hetdpt.flow.execution import Execution
    from hetdpt.studies.transfer import RESULTS, TABLE, transfer_into

    config = _config(context, mode, settings, calibration_images)
    plans = _plans(plan or [], removal, calibration_images)
    opened = open_data(data, root=data_root, download=download)
    options = {"weights": weights, "pretrained": pretrained, "num_classes": num_classes, "img_size": img_size}
    models = open_beside(model, beside or [], options)
    with stages(quiet or as_json) as (move, say):
        place = Execution(device=device, workers=workers_of(workers), minutes=minutes, progress=move)
        for done in transfer_into(out, models, opened, config, plans, place):
            if not as_json:
                say(_line(done))
    rows = json.loads((out / RESULTS).read_text(encoding="utf-8"))["rows"]
    if as_json:
        return print_json(directory=str(out), mode=mode, rows=rows)
    shown = table(f"{mode} on {data}", "model", *columns(mode))
    for row in rows:
        shown.add_row(row["model"], *cells(row))
    print_(shown)
    typer.echo(measured(mode, rows))
    if unreadable := rows[0]["unreadable"]:
        typer.echo(f"warning: {counted(unreadable, 'validation image')} could not be read", err=True)
    note_random_weights(model, weights, pretrained)
    for line in places(rows, out):
        typer.echo(line)
    typer.echo(f"written to {out}: {RESULTS}, {TABLE}")


def _config(context: typer.Context, mode: str, settings: list[str] | None, calibration: int | None) -> TransferConfig:
    """Return what is asked for; a probe is refused the settings of a training, by name."""
    from hetdpt.studies.transfer import TransferConfig

    given = given_settings(context)
    more: dict[str, Any] = {"calibration": calibration} if calibration else {}
    if mode == "probe":
        names = [f"--{name.rpartition('.')[2].replace('_', '-')}" for name in given if name not in PROBED]
        if names := [*names, *(["--set"] if settings else [])]:
            raise MeasureError(
                f"a probe trains no weights of the model, but {', '.join(names)} was given; leave it out, or give "
                "--mode finetune"
            )
        if size := given.pop("training.batch_size", None):
            more["batch_size"] = size
    return TransferConfig(mode=mode, recovery=config_of(RECIPE, given, settings), **more)  # type: ignore[arg-type]


def _plans(names: list[str], removal: str | None, calibration: int | None) -> dict[str, Plan]:
    """Return the plans by name, with the removal asked for."""
    if not names and (removal or calibration):
        given = "--removal" if removal else "--calibration-images"
        raise PlanError(f"{given} says how the layers of a plan go; add --plan, or leave it out")
    if len(set(names)) < len(names):
        raise PlanError(f"the plans {', '.join(names)} were given, but each can be compared but once")
    return {name: with_removal(read_plan(name), removal, "plain") for name in names}


def _line(done: TransferDone) -> str:
    result, by = done.result, "" if done.is_own else " (done before, or by another process)"
    return f"{done.subject.name}: {result.top1:.2f} % of {result.images} images, {amount(result.macs)} MACs{by}"
