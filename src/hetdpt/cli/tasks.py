"""The commands detect and segment: a model as the backbone of a detector or a segmenter, trained and measured."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hetdpt.cli.command import Options, option
from hetdpt.cli.options import (
    BackboneOptions,
    LoopOptions,
    OutputOptions,
    SteadyOptions,
    WorkerOptions,
    WorkOptions,
    read_plan,
    read_settings,
    with_removal,
)
from hetdpt.cli.show import epoch_line, is_first_process, print_json, print_summary, score_line, warn_of
from hetdpt.core.errors import FileError, ModelError, TrainError

if TYPE_CHECKING:
    from hetdpt.tasks.learning import LearnConfig

PACKAGES = ("transformers", "torchmetrics", "pycocotools")
"""What the extra ``downstream`` installs."""


class Sides(click.ParamType[Any]):
    """Height and width of images, or one number for both."""

    name = "side"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return height and width.

        >>> Sides().convert("512", None, None), Sides().convert("480x640", None, None)
        ((512, 512), (480, 640))
        """
        sides = value.split("x")
        if not 1 <= len(sides) <= 2 or not all(side.isdecimal() for side in sides):
            raise TrainError(f"--size takes a side, or height and width as in 480x640, not {value!r}")
        return int(sides[0]), int(sides[-1])


class AnnotatedOptions(Options):
    """Which annotated images."""

    data: str
    """To detect, a folder in COCO's format; to segment, one in ADE20K's or with images and masks; or shapes."""


class LearnOptions(AnnotatedOptions, BackboneOptions, LoopOptions, SteadyOptions, WorkOptions, OutputOptions):
    out: Path
    """Run directory; the same command resumes an interrupted run."""
    size: Any = option("LearnConfig.size", type=Sides())
    """Canvas for images, such as 512 or 480x640."""
    plan: str | None = None
    """Layers to remove first: a JSON file or a plan of the paper."""
    removal: Any = option("RunConfig.removal")
    calibration_images: int = option(least=1, default=256)
    """Training images to fit calibrated removal on."""
    tensorboard: bool = option(panel="Output", default=False)
    """Write TensorBoard files to OUT/tensorboard too."""

    def config(self, task: str) -> LearnConfig:
        """Return the paper's settings of the task, with the options and --set."""
        from hetdpt.tasks.learning import LearnConfig

        changes = {**self.given, **read_settings(self.changes), **self.settings("LearnConfig")}
        if "training.lr" in changes:
            changes = {"training.lr_batch": None, **changes}
        return LearnConfig.of(task).with_settings(changes)


def train(options: LearnOptions, task: str) -> None:
    """Train with the paper's settings, which options and --set change."""
    from hetdpt.store.run_directory import SUMMARY
    from hetdpt.tasks.run import learn_into
    from hetdpt.tasks.table import task_called

    _require_packages(task)
    config, out = options.config(task), options.out
    if options.plan is None and options.removal is not None:
        raise TrainError("--removal says what replaces the layers of a plan; add --plan")
    plan = with_removal(read_plan(options.plan), options.removal, "calibrated") if options.plan else None
    data = task_called(task).open(options.data)
    network, was_done = options.open_model(config.training.seed), (out / SUMMARY).is_file()
    place: dict[str, Any] = {name: getattr(options, name) for name in ("device", "tensorboard")}
    place["minutes"] = options.checkpoint_minutes
    place |= {"workers": options.worker_count, "plan": plan, "calibration": options.calibration_images}
    with options.live() as display:
        for learned in learn_into(out, network, data, config, watch=display.training, **place):
            display.say(epoch_line(learned.epoch, task_called(task).metric))
    print_summary(out, task_called(task).metric, was_done, options.as_json)


class ScoreOptions(AnnotatedOptions, WorkerOptions, OutputOptions):
    directory: Path = option(is_argument=True, is_required=True)
    """What train has written: OUT, or one of the models in it."""
    batch_size: int = option(least=1, default=8)
    """Images per forward pass."""


def eval_(options: ScoreOptions, task: str) -> None:
    """Measure a trained model on the validation images."""
    from hetdpt.tasks.learning import score
    from hetdpt.tasks.saved import TASK, load_task
    from hetdpt.tasks.table import task_called

    _require_packages(task)
    directory = options.directory
    found = next((place for place in (directory, directory / "best") if (place / TASK).is_file()), None)
    if found is None:
        raise FileError(f"{directory} has no trained model ({TASK}); give a directory that train has written")
    model = load_task(found)
    if model.task != task:
        raise FileError(f"{found} is a model for {model.task}, not for {task}; use the command for that")
    data = task_called(task).open(options.data, splits=("val",))
    reading = {"batch_size": options.batch_size, "workers": options.worker_count, "device": options.device}
    with options.live() as display:
        scores = score(model, data, **reading, progress=display.counter("evaluating"))
    if not is_first_process():
        return
    if options.as_json:
        return print_json(directory=str(found), **scores.record())
    click.echo(f"{found}: {score_line(scores.record())}")
    warn_of(scores.unreadable)


def _require_packages(task: str) -> None:
    """Refuse to begin without what is needed later, some of it only when the first scores are measured."""
    if missing := [name for name in PACKAGES if find_spec(name) is None]:
        packages = f"package{'s' if len(missing) > 1 else ''} {' and '.join(missing)}"
        raise ModelError(f'{task} needs the {packages}; pip install "hetdpt[downstream]"')
