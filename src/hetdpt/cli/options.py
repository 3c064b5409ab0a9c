"""The options that several commands share, as groups, and what a command makes of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hetdpt.cli.command import MAIN, Options, option
from hetdpt.cli.live import Display, live
from hetdpt.core.errors import ModelError, PlanError, TrainError
from hetdpt.core.host import cores
from hetdpt.core.plan import Plan
from hetdpt.core.published import PREFIX, published_plan
from hetdpt.data.table import FORMS
from hetdpt.selection.methods import BY_LAYERS, METHODS
from hetdpt.store.atomic import parse_json

if TYPE_CHECKING:
    from torch import nn

    from hetdpt.data.fixed_batches import ImageBatches
    from hetdpt.data.sources import Data, Source
    from hetdpt.data.streams import Stream
    from hetdpt.flow.execution import Execution
    from hetdpt.selection.predictor.polynomial import Row
    from hetdpt.training.recover import RecoverConfig

METHOD = f"How layers are chosen: {', '.join(BY_LAYERS)}."
ANY_METHOD = f"How layers are chosen: {', '.join(METHODS)}; by default mixed for --speedup or --macs, else hetdpt."
IMAGES = f"The images to train and measure on: {FORMS}."


class JsonOptions(Options, panel="Output"):
    """How results are shown."""

    as_json: bool = option(flag="--json", default=False)
    """Print one JSON object and nothing else."""


class OverwriteOptions(Options, panel="Output"):
    """Whether files may be replaced."""

    overwrite: bool = False
    """Replace what exists at --out."""


class OutputOptions(JsonOptions, panel="Output"):
    """How results and progress are shown."""

    quiet: bool = False
    """Show no progress."""

    def live(self) -> AbstractContextManager[Display]:
        """Return the display of this command."""
        return live(self.quiet, self.as_json)


class TrimOptions(Options, panel="Output"):
    """Whether models are trimmed."""

    trim: bool = True
    """Do not compute tokens that no output depends on; outputs stay the same."""


class BackboneOptions(Options, panel="Model"):
    """Which model, of any sizes."""

    model: Any = option("RunConfig.model", is_argument=True, is_required=True, panel=MAIN)
    weights: Any = option("RunConfig.weights")
    pretrained: Any = option("RunConfig.pretrained")

    @property
    def source(self) -> dict[str, Any]:
        """How the model is built, as ``open_model`` takes it."""
        return {"weights": self.weights, "pretrained": bool(self.pretrained)}

    def open_model(self, seed: int = 0, **more: Any) -> nn.Module:
        """Return the model; random weights are the same in all processes, and when the command is given again."""
        from hetdpt.core.randomness import seeded
        from hetdpt.export.saved import open_model

        with seeded(seed):
            return open_model(self.model, **self.source, **more)


class ModelOptions(BackboneOptions, panel="Model"):
    """Which model."""

    num_classes: Any = option("RunConfig.num_classes", least=1)
    img_size: Any = option("RunConfig.img_size", least=1)

    @property
    def source(self) -> dict[str, Any]:
        return {**super().source, "num_classes": self.num_classes, "img_size": self.img_size}

    def open_beside(self, beside: list[str]) -> dict[str, nn.Module]:
        """Return the model and those ``beside`` it, which bring their own weights, by name."""
        from hetdpt.export.saved import open_model, saved_directory

        for name in beside:
            if saved_directory(name) is None:
                raise ModelError(
                    f"--beside takes a directory saved by hetdpt, or demo, not {name}; save that model first, or give "
                    "it as the first model, with --weights"
                )
        if len({self.model, *beside}) < 1 + len(beside):
            raise ModelError(f"{self.model} and {', '.join(beside)}: each model can be compared only once")
        return {self.model: self.open_model(), **{name: open_model(name) for name in beside}}

    def note_random_weights(self) -> None:
        """Print a note if the model was built without weights."""
        from hetdpt.adapters.models import HF_PREFIX
        from hetdpt.export.saved import saved_directory

        is_local = Path(self.model.removeprefix(HF_PREFIX)).is_dir() or saved_directory(self.model) is not None
        if not (self.weights or self.pretrained or is_local):
            click.echo("note: the weights are random; give --weights FILE or --pretrained to use a trained model")


class PlaceOptions(Options, panel="Data"):
    """Where data is."""

    data_root: Any = option("RunConfig.data_root")
    download: Any = option("RunConfig.download")

    @property
    def place(self) -> dict[str, Any]:
        """Where the data is, as ``open_data`` takes it."""
        return {"root": self.data_root, "download": bool(self.download)}


class DataOptions(PlaceOptions, panel="Data"):
    """Which labelled images."""

    data: Any = option("RunConfig.data", is_required=True, panel=MAIN, help=IMAGES)

    def open_data(self, **more: Any) -> Data:
        """Return the data."""
        from hetdpt.data.sources import open_data

        return open_data(self.data, **self.place, **more)

    def open_labelled(
        self, dense: nn.Module | None, config: RecoverConfig, processes: Any, display: Display, workers: int
    ) -> Data:
        """Return the data; a folder of images without labels is labelled by the model ``dense``, and a line says so."""
        from hetdpt.data.images import is_unlabelled
        from hetdpt.flow.unlabelled import PREDICTING, note_on, open_any
        from hetdpt.training.recover import require_no_labels

        if not is_unlabelled(self.data, self.data_root):
            with processes.local_main_process_first():  # one of them downloads
                return self.open_data()
        if dense is None:
            raise TrainError(
                f"{self.data} has images without labels, which only hetdpt run, recover and oneshot can use; give a "
                "folder with train/ and val/, each with a folder per class"
            )
        require_no_labels(self.data, config.distillation)
        reading: dict[str, Any] = {"workers": workers, "progress": display.counter(PREDICTING)}
        data = open_any(self.data, dense.to(processes.device), **self.place, **reading)
        display.say(note_on(data))
        return data


class ReadingOptions(Options, panel="Data"):
    """How images are read, where that is no setting of a training."""

    batch_size: int = option(least=1, default=32)
    """Images per forward pass."""
    seed: int = option(least=0, default=0)
    """Seed of the choice of images."""
    workers: int = option(least=0, default=0)
    """Worker processes that read images."""

    @property
    def reading(self) -> dict[str, int]:
        return {"batch_size": self.batch_size, "seed": self.seed, "workers": self.workers}


class ImageOptions(PlaceOptions, ReadingOptions, panel="Data"):
    """Which images, without labels: some to fit replacements on, others to measure damage on."""

    data: str = option(is_required=True, panel=MAIN)
    """A folder of images, or any data of hetdpt recover; labels are ignored."""
    images: int = option(least=1, default=256)
    """Images to fit replacements on."""
    judge_images: int = option(least=1, default=128)
    """Other images, to measure damage on."""

    def open_source(self) -> Source | Stream:
        from hetdpt.data.images import open_images

        return open_images(self.data, **self.place)

    def read(
        self, source: Source | Stream, network: nn.Module, say: Callable[[str], None]
    ) -> tuple[ImageBatches, ImageBatches]:
        """Return the images to fit on and others to measure on; the same, and a line about it, if there are too few."""
        from hetdpt.adapters.preprocessing import preprocessing_of
        from hetdpt.data.fixed_batches import ImageBatches

        prepared = preprocessing_of(network)
        batches = ImageBatches(source, prepared, count=self.images, **self.reading)
        if len(source) < self.images + self.judge_images:
            say(
                f"{len(source)} images are too few for {self.images} and {self.judge_images} others; damage is "
                "measured on the same images"
            )
            return batches, batches
        return batches, ImageBatches(source, prepared, count=self.judge_images, start=self.images, **self.reading)


class LoopOptions(Options, panel="Training"):
    """The settings of a training that are changed most; --set changes the others."""

    epochs: Any = option("RecoverConfig.training.epochs", least=1, shows_default=False)
    batch_size: Any = option("RecoverConfig.training.batch_size", least=1, shows_default=False)
    lr: Any = option("RecoverConfig.training.lr", shows_default=False)
    """Peak learning rate, used as given."""
    precision: Any = option("RecoverConfig.training.precision", shows_default=False)
    seed: Any = option("RecoverConfig.training.seed", least=0, shows_default=False)
    changes: list[str] = option(flag="--set", default=[])
    """Any other setting, such as training.weight_decay=0.05; may be repeated."""

    @property
    def given(self) -> dict[str, Any]:
        """The settings that were given as options; a learning rate is used as it is."""
        return given_alone(self.settings("RecoverConfig"), "training.")


class TrainingOptions(LoopOptions, panel="Training"):
    """The settings of a fine-tuning, beginning with those of a recipe."""

    recipe: str = "quick"
    """Recipe that sets the defaults; hetdpt recipes lists them."""
    fraction: Any = option("RecoverConfig.fraction")
    per_class: Any = option("RecoverConfig.per_class", least=1)

    def recovery(self, more: dict[str, Any] | None = None) -> RecoverConfig:
        """Return the settings of the recipe with the options, ``more`` and --set."""
        return config_of(self.recipe, {**self.given, **(more or {})}, self.changes)

    @property
    def usual_removal(self) -> str:
        """The removal style of the recipe."""
        from hetdpt.flow.recipes import recipe

        return recipe(self.recipe).removal


class SteadyOptions(Options, panel="Training"):
    """Further settings of a training, for the commands that only train."""

    accumulate: Any = option("RecoverConfig.training.accumulate", least=1, shows_default=False)
    clip_grad: Any = option("RecoverConfig.training.clip_grad")


class DeviceOptions(Options, panel="Device"):
    """The device of a command."""

    device: Any = option("RunConfig.device")


class WorkerOptions(DeviceOptions, panel="Device"):
    """The device and the workers of a command that reads many images."""

    workers: Any = option("RunConfig.workers", least=0, shows_default=False)

    @property
    def worker_count(self) -> int:
        return workers_of(self.workers)

    def execution(self, display: Display, **more: Any) -> Execution:
        """Return how this process works: its device, the processes that read images, and how it reports progress."""
        from hetdpt.flow.execution import Execution

        return Execution(device=self.device, workers=self.worker_count, progress=display.step, note=display.say, **more)


class WorkOptions(WorkerOptions, panel="Device"):
    """The device, the workers and the checkpoints of a command that trains."""

    checkpoint_minutes: Any = option("RunConfig.checkpoint_minutes", least=0, default=10.0)

    def execution(self, display: Display, **more: Any) -> Execution:
        return super().execution(display, minutes=self.checkpoint_minutes, **more)


def read_plan(name: str) -> Plan:
    """Return the plan in a file, or the published one of that name; ``PlanError`` for one that changes nothing."""
    if name.startswith(PREFIX):
        return published_plan(name)
    try:
        plan = Plan.from_json(Path(name).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(
            f"the plan {name} cannot be read: {error}; give a JSON file or a name such as paper/deit_base-10"
        ) from None
    if plan.is_empty:
        raise PlanError(
            f"the plan {name} removes nothing; list block numbers under 'attention' or 'activation', or give a 'tail'"
        )
    return plan


def with_removal(plan: Plan, removal: Any, usual: str) -> Plan:
    """Return ``plan`` with the ``removal`` given; without one, with its own, or the ``usual`` one instead of ``plain``.

    A plan that names no removal is ``plain``, so a file cannot request ``plain``.
    """
    if removal is not None:
        return replace(plan, removal=removal)
    return replace(plan, removal=usual) if plan.removal == "plain" else plan


def read_samples(samples: Path, network: nn.Module) -> list[Row]:
    """Return the samples in a file or a directory of hetdpt collect; those of another model are refused."""
    from hetdpt.flow.collection.collect import read_samples
    from hetdpt.surgery.record import survey_of

    return read_samples(samples, survey_of(network).anatomy.blocks)


def given_alone(given: dict[str, Any], prefix: str) -> dict[str, Any]:
    """Return the settings ``given`` with those that they replace: a learning rate is used as it is, epochs or minutes.

    >>> given_alone({"training.lr": 1e-4, "training.epochs": 2}, "training.")
    {'training.lr_batch': None, 'training.minutes': None, 'training.lr': 0.0001, 'training.epochs': 2}
    """
    pairs = {"lr": "lr_batch", "epochs": "minutes"}
    replaced = {f"{prefix}{other}": None for name, other in pairs.items() if f"{prefix}{name}" in given}
    return {**replaced, **given}


def require_one_length(given: Mapping[str, Any], prefix: str) -> None:
    """Raise ``TrainError`` if epochs and minutes of a training are given."""
    if all(given.get(f"{prefix}{name}") is not None for name in ("epochs", "minutes")):
        raise TrainError("epochs and minutes both say how long to train; give one of them")


def config_of(recipe: str, given: dict[str, Any], changes: list[str]) -> RecoverConfig:
    """Return the settings of a recipe with those ``given``, and over them what --set was given."""
    from hetdpt.flow.recipes import recipe as recipe_called

    settings = {**given, **read_settings(changes)}
    require_one_length(settings, "training.")
    return recipe_called(recipe).config.with_settings(settings)


def read_settings(changes: list[str]) -> dict[str, Any]:
    """Return what ``--set`` was given, by name."""
    found = {}
    for setting in changes:
        name, equals, value = setting.partition("=")
        if not equals:
            raise TrainError(f"--set takes NAME=VALUE, such as training.weight_decay=0.05, not {setting!r}")
        found[name.strip()] = _value(value.strip())
    return found


def _value(text: str) -> Any:
    """Return what ``text`` means: a number, true, false, null, a list, or itself."""
    try:
        value = parse_json(text)
    except ValueError:
        return text
    return tuple(value) if isinstance(value, list) else value


def workers_of(given: int | None) -> int:
    """Return how many processes read images: as given, or one for each core that this process has, at most 8."""
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return given if given is not None else max(1, min(8, cores() // processes))
