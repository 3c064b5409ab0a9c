"""Commands that need images: eval, train, recover, recipes. torchrun and ``accelerate launch`` may start them."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hetdpt.cli.options import (
    Accumulate,
    BatchSize,
    Board,
    Classes,
    ClipGrad,
    DataName,
    DataRoot,
    Device,
    Download,
    Epochs,
    Fraction,
    ImgSize,
    Json,
    Lr,
    Minutes,
    Model,
    Out,
    PerClass,
    Precision,
    Pretrained,
    Quiet,
    RecipeName,
    Seed,
    Settings,
    Weights,
    Workers,
    config_of,
    given_settings,
    read_plan,
    with_removal,
    workers_of,
)
from hetdpt.cli.show import epoch_line, is_first_process, print_, print_json, progress, table, warn_of, watching
from hetdpt.core.errors import TrainError

if TYPE_CHECKING:
    from torch import nn

    from hetdpt.training.recover import RecoverConfig


def eval_(
    model: Model,
    data: DataName,
    data_root: DataRoot = None,
    download: Download = False,
    weights: Weights = None,
    pretrained: Pretrained = False,
    num_classes: Classes = None,
    img_size: ImgSize = None,
    fraction: Fraction = None,
    per_class: PerClass = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Images per forward pass.")] = 64,
    workers: Workers = None,
    device: Device = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Measure the accuracy of a model on the validation images."""
    from hetdpt.data.sources import open_data
    from hetdpt.export.saved import open_model
    from hetdpt.measurement.accuracy import evaluate
    from hetdpt.training.processes import start

    processes = start(device=device)
    with processes.local_main_process_first():  # one of them downloads
        images = open_data(data, splits=("val",), root=data_root, download=download)
    network = open_model(model, weights=weights, pretrained=pretrained, num_classes=num_classes, img_size=img_size)
    network.to(processes.device)
    with progress("evaluating", quiet or as_json or not is_first_process()) as move:
        scores = evaluate(
            network,
            images,
            fraction=fraction,
            per_class=per_class,
            batch_size=batch_size,
            workers=workers_of(workers),
            progress=move,
        )
    if not is_first_process():
        return
    if as_json:
        return print_json(**asdict(scores))
    typer.echo(
        f"top-1 {scores.top1:.2f} % (95 % interval {scores.low:.1f} to {scores.high:.1f}), top-5 {scores.top5:.2f} %, "
        f"loss {scores.loss:.4f}, {scores.count} images"
    )
    warn_of(scores.unreadable)


def train(
    context: typer.Context,
    model: Model,
    data: DataName,
    out: Out,
    weights: Weights = None,
    pretrained: Pretrained = False,
    num_classes: Classes = None,
    img_size: ImgSize = None,
    data_root: DataRoot = None,
    download: Download = False,
    recipe: RecipeName = "quick",
    epochs: Epochs = None,
    batch_size: BatchSize = None,
    accumulate: Accumulate = None,
    lr: Lr = None,
    clip_grad: ClipGrad = None,
    fraction: Fraction = None,
    per_class: PerClass = None,
    precision: Precision = None,
    seed: Seed = None,
    settings: Settings = None,
    workers: Workers = None,
    device: Device = None,
    minutes: Minutes = 10.0,
    tensorboard: Board = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Train a model on labelled images."""
    from hetdpt.core.randomness import seeded
    from hetdpt.export.saved import open_model

    if any(setting.startswith("distillation.") for setting in settings or ()):
        raise TrainError("train has no teacher to distil from; use hetdpt recover MODEL --teacher TEACHER")
    config = config_of(recipe, {**given_settings(context), "distillation.kind": "none"}, settings)
    with seeded(config.training.seed):  # all processes, now and when resumed, begin with the same random weights
        network = open_model(model, weights=weights, pretrained=pretrained, num_classes=num_classes, img_size=img_size)
    place = {"device": device, "workers": workers_of(workers), "minutes": minutes, "tensorboard": tensorboard}
    _run(out, network, None, data, (data_root, download), config, place, as_json, quiet)


def recover(
    context: typer.Context,
    student: Annotated[str, typer.Argument(help="A saved directory; or, with --plan, the dense model to prune.")],
    data: DataName,
    out: Out,
    teacher: Annotated[str | None, typer.Option(help="The dense model; with --plan, the student unpruned.")] = None,
    teacher_weights: Annotated[Path | None, typer.Option(help="Checkpoint that fits the teacher.")] = None,
    plan: Annotated[str | None, typer.Option(help="Layers to remove: a JSON file or a plan of the paper.")] = None,
    removal: Annotated[
        str | None,
        typer.Option(help="What takes their place: plain, calibrated, ...; by default as plan or recipe say."),
    ] = None,
    calibration_images: Annotated[
        int | None, typer.Option(min=1, help="Training images to fit calibrated removal on: 256 by default.")
    ] = None,
    weights: Weights = None,
    pretrained: Pretrained = False,
    num_classes: Classes = None,
    img_size: ImgSize = None,
    data_root: DataRoot = None,
    download: Download = False,
    recipe: RecipeName = "quick",
    distill: Annotated[str | None, typer.Option(help="none, hard or soft.")] = None,
    alpha: Annotated[float | None, typer.Option(help="The teacher's part of the loss, 0 to 1.")] = None,
    temperature: Annotated[float | None, typer.Option(help="Of soft distillation.")] = None,
    train_merged: Annotated[bool, typer.Option("--train-merged", help="Merge before training: cheaper.")] = False,
    cache_teacher: Annotated[
        bool, typer.Option("--cache-teacher", help="One fixed view per image, which the teacher sees once.")
    ] = False,
    epochs: Epochs = None,
    batch_size: BatchSize = None,
    accumulate: Accumulate = None,
    lr: Lr = None,
    clip_grad: ClipGrad = None,
    fraction: Fraction = None,
    per_class: PerClass = None,
    precision: Precision = None,
    seed: Seed = None,
    settings: Settings = None,
    workers: Workers = None,
    device: Device = None,
    minutes: Minutes = 10.0,
    tensorboard: Board = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Train a pruned model back to accuracy, with the dense model as its teacher, then merge and save it."""
    from copy import deepcopy

    from hetdpt.core.randomness import seeded
    from hetdpt.export.saved import open_model, saved_directory
    from hetdpt.flow.recipes import recipe as recipe_called
    from hetdpt.flow.resumable import CALIBRATION

    given: dict[str, Any] = {"train_merged": True} if train_merged else {}
    given |= {"cache_teacher": True, "augmentation.fixed_views": True} if cache_teacher else {}
    config = config_of(recipe, {**given_settings(context), **given}, settings)
    if teacher_weights is not None and teacher is None:
        raise TrainError("--teacher-weights are for a teacher that is not given; add --teacher MODEL")
    sizes: dict[str, Any] = {"pretrained": pretrained, "num_classes": num_classes, "img_size": img_size}
    is_saved = saved_directory(student) is not None  # and so has its sizes; the options are then the teacher's
    with seeded(config.training.seed):
        network = open_model(student, weights=weights, **({} if is_saved and teacher else sizes))
        dense = open_model(teacher, weights=teacher_weights, **sizes) if teacher else None
    chosen = read_plan(plan) if plan is not None else None
    if chosen is None and removal is not None:
        raise TrainError("--removal says how the layers of a plan go; add --plan")
    if chosen is not None:
        dense = dense or deepcopy(network)
        chosen = with_removal(chosen, removal, recipe_called(recipe).removal)
    if dense is None and config.distillation.kind != "none":
        raise TrainError("the student needs a teacher to learn from; give --teacher MODEL, or --distill none")
    place: dict[str, Any] = {"plan": chosen, "calibration": calibration_images or CALIBRATION}
    place |= {"device": device, "workers": workers_of(workers), "minutes": minutes, "tensorboard": tensorboard}
    _run(out, network, dense, data, (data_root, download), config, place, as_json, quiet)


def recipes() -> None:
    """List the recipes: settings of the paper and ours, with what they are said to reach."""
    from hetdpt.flow.recipes import RECIPES

    rows = table("recipes", "name", "model", "accuracy", "hours", "hardware")
    for name, make in RECIPES.items():
        row = make()
        rows.add_row(name, row.model, row.accuracy, row.hours, row.hardware)
    print_(rows)


def _run(
    out: Path,
    student: nn.Module,
    teacher: nn.Module | None,
    data: str,
    where: tuple[Path | None, bool],
    config: RecoverConfig,
    place: dict[str, Any],
    as_json: bool,
    quiet: bool,
) -> None:
    from hetdpt.data.sources import open_data
    from hetdpt.flow.resumable import recover_into
    from hetdpt.store.checkpoints import CHECKPOINTS
    from hetdpt.store.run_directory import SUMMARY, summary_of
    from hetdpt.training.processes import start

    is_first, is_silent = is_first_process(), as_json or not is_first_process()
    was_begun = (out / CHECKPOINTS).is_dir() and not (out / SUMMARY).is_file()
    was_done = (out / SUMMARY).is_file()
    with start(config.training.precision, place["device"]).local_main_process_first():  # one of them downloads
        opened = open_data(data, root=where[0], download=where[1])
    with watching(quiet or is_silent) as (watch, say):
        for epoch in recover_into(out, student, teacher, opened, config, watch=watch, **place):
            if was_begun and not is_silent:
                say(f"going on with {out}")
                was_begun = False
            if not is_silent:
                say(epoch_line(epoch))
    if not is_first:
        return
    if was_done and not as_json:
        typer.echo(f"{out} is done already")
    summary = summary_of(out)
    if as_json:
        return print_json(directory=str(out), **summary)
    names = [name for name in ("start", "last", "best", "ema") if summary[name] is not None]
    typer.echo("accuracy: " + ", ".join(f"{name} {summary[name]:.2f} %" for name in names))
    warn_of(summary["unreadable"])
    typer.echo(f"saved to {out}: {', '.join(name for name in names if name != 'start')}")
