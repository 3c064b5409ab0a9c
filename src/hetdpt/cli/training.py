"""Commands that need labelled images: eval, train, recover, recipes. torchrun and accelerate may start them."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hetdpt.cli.command import option
from hetdpt.cli.options import (
    DataOptions,
    ModelOptions,
    OutputOptions,
    SteadyOptions,
    TrainingOptions,
    TrimOptions,
    WorkerOptions,
    WorkOptions,
    read_plan,
    with_removal,
)
from hetdpt.cli.show import epoch_line, is_first_process, print_, print_json, print_summary, table, warn_of
from hetdpt.core.errors import TrainError
from hetdpt.core.format import percent

if TYPE_CHECKING:
    from torch import nn

    from hetdpt.core.plan import Plan
    from hetdpt.training.recover import RecoverConfig


class EvalOptions(ModelOptions, DataOptions, WorkerOptions, OutputOptions):
    fraction: Any = option("TokensConfig.fraction")
    per_class: Any = option("TokensConfig.per_class", least=1)
    batch_size: int = option(least=1, default=64)
    """Images per forward pass."""


def eval_(options: EvalOptions) -> None:
    """Measure the accuracy of a model on the validation images."""
    from hetdpt.measurement.accuracy import evaluate
    from hetdpt.training.processes import start

    processes = start(device=options.device)
    with processes.local_main_process_first():  # one of them downloads
        images = options.open_data(splits=("val",))
    network = options.open_model().to(processes.device)
    reading = {name: getattr(options, name) for name in ("fraction", "per_class", "batch_size")}
    with options.live() as display:
        evaluating = display.counter("evaluating")
        scores = evaluate(network, images, **reading, workers=options.worker_count, progress=evaluating)
    if not is_first_process():
        return
    if options.as_json:
        return print_json(**asdict(scores))
    click.echo(
        f"top-1 {percent(scores.top1)} (95 % interval {scores.low:.1f} to {scores.high:.1f}), "
        f"top-5 {percent(scores.top5)}, loss {scores.loss:.4f}, {scores.count} images"
    )
    warn_of(scores.unreadable)


class TrainOptions(ModelOptions, DataOptions, TrainingOptions, SteadyOptions, WorkOptions, OutputOptions):
    out: Path
    """Run directory; the same command resumes an interrupted run."""
    minutes: Any = option("RecoverConfig.training.minutes", panel="Training")
    """Minutes that the training may take, instead of --epochs."""
    tensorboard: bool = option(panel="Output", default=False)
    """Write TensorBoard files to OUT/tensorboard too."""


def train(options: TrainOptions) -> None:
    """Train a model on labelled images."""
    if any(change.startswith("distillation.") for change in options.changes):
        raise TrainError("train has no teacher to distil from; use hetdpt recover MODEL --teacher TEACHER")
    config = options.recovery({"distillation.kind": "none"})
    _recover(options, config, options.open_model(config.training.seed), None)


class RecoverOptions(TrainOptions, TrimOptions):
    model: Any = option(flag="STUDENT", is_argument=True, is_required=True)
    """A saved directory; or, with --plan, the dense model to prune."""
    teacher: str | None = None
    """The dense model; with --plan, by default the student before pruning."""
    teacher_weights: Path | None = None
    """Checkpoint with the weights of the teacher."""
    plan: str | None = None
    """Layers to remove: a JSON file or a plan of the paper."""
    removal: Any = option("RunConfig.removal", shows_default=False)
    calibration_images: int | None = option(least=1)
    """Training images to fit calibrated removal on, 256 by default."""
    distill: Any = option("RecoverConfig.distillation.kind", panel="Training", shows_default=False)
    alpha: Any = option("RecoverConfig.distillation.alpha", panel="Training", shows_default=False)
    temperature: Any = option("RecoverConfig.distillation.temperature", panel="Training", shows_default=False)
    train_merged: Any = option("RecoverConfig.train_merged", panel="Training")
    cache_teacher: Any = option("RecoverConfig.cache_teacher", panel="Training")
    views: Any = option("RecoverConfig.augmentation.views", least=1, panel="Training", shows_default=False)
    """Fixed views of each image, one per epoch in turn; 1 by default with --cache-teacher."""


def recover(options: RecoverOptions) -> None:
    """Fine-tune a pruned model with the dense model as its teacher, then merge and save it."""
    from hetdpt.core.randomness import seeded
    from hetdpt.data.images import is_unlabelled
    from hetdpt.export.saved import open_model, saved_directory
    from hetdpt.flow.resumable import CALIBRATION

    more: dict[str, Any] = {"augmentation.views": options.views or 1} if options.cache_teacher else {}
    if options.alpha is None and is_unlabelled(options.data, options.data_root):
        more["distillation.alpha"] = 1.0
    config = options.recovery(more)
    if options.teacher_weights is not None and options.teacher is None:
        raise TrainError("--teacher-weights needs a teacher; add --teacher MODEL")
    is_saved = saved_directory(options.model) is not None  # so that it has sizes, and the options are the teacher's
    own = {"weights": options.weights} if is_saved and options.teacher else options.source
    taught = {**options.source, "weights": options.teacher_weights}
    with seeded(config.training.seed):
        network = open_model(options.model, **own)
        dense = open_model(options.teacher, **taught) if options.teacher else None
    plan = read_plan(options.plan) if options.plan is not None else None
    if plan is None and options.removal is not None:
        raise TrainError("--removal says what replaces the layers of a plan; add --plan")
    if plan is not None:
        dense = dense or deepcopy(network)
        plan = with_removal(plan, options.removal, options.usual_removal)
    if dense is None and config.distillation.kind != "none":
        raise TrainError("the student needs a teacher; give --teacher MODEL, or --distill none")
    _recover(options, config, network, dense, plan, options.calibration_images or CALIBRATION, options.trim)


def _recover(
    options: TrainOptions,
    config: RecoverConfig,
    student: nn.Module,
    teacher: nn.Module | None,
    plan: Plan | None = None,
    calibration: int | None = None,
    trims: bool = False,
) -> None:
    from hetdpt.core.modules import clone
    from hetdpt.flow.resumable import recover_into
    from hetdpt.store.checkpoints import CHECKPOINTS
    from hetdpt.store.run_directory import SUMMARY
    from hetdpt.surgery.remove import place_
    from hetdpt.surgery.tail import trim_if_possible_
    from hetdpt.training.processes import start

    out, removal = options.out, dict[str, Any]() if plan is None else {"plan": plan, "calibration": calibration}
    was_done = (out / SUMMARY).is_file()
    is_resumed = (out / CHECKPOINTS).is_dir() and not was_done
    processes = start(config.training.precision, options.device)
    with options.live() as display:
        data = options.open_labelled(teacher, config, processes, display, options.worker_count)
        if trims and (why_not := trim_if_possible_(place_(clone(student), plan) if plan else clone(student))):
            display.say(why_not)
        more = {"tensorboard": options.tensorboard, "watch": display.training, "trims": trims, **removal}
        for epoch in recover_into(out, student, teacher, data, config, options.execution(display), **more):
            if is_resumed:
                display.say(f"resuming {out}")
                is_resumed = False
            for note in epoch.notes if not epoch.number else ():
                display.say(note)
            display.say(epoch_line(epoch, data.metric))
    print_summary(out, "accuracy", was_done, options.as_json)


def recipes() -> None:
    """List the recipes: settings of the paper and ours, and the accuracy to expect."""
    from hetdpt.flow.recipes import RECIPES

    rows = table("recipes", "name", "model", "accuracy", "hours", "hardware")
    for name, make in RECIPES.items():
        row = make()
        rows.add_row(name, row.model, row.accuracy, row.hours, row.hardware)
    print_(rows)
