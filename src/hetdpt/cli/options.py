"""The options that several commands share."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hetdpt.core.errors import ModelError, PlanError, PredictError, TrainError
from hetdpt.core.host import cores
from hetdpt.core.plan import Plan
from hetdpt.core.published import PREFIX, published_plan
from hetdpt.data.table import FORMS
from hetdpt.store.atomic import parse_json

if TYPE_CHECKING:
    from torch import nn

    from hetdpt.data.fixed_batches import ImageBatches
    from hetdpt.data.sources import Source
    from hetdpt.data.streams import Stream
    from hetdpt.selection.predictor.polynomial import Row
    from hetdpt.training.recover import RecoverConfig

Model = Annotated[
    str, typer.Argument(help="A timm name, hf:NAME (hub name, directory or model type), a saved directory, or demo.")
]
PlanName = Annotated[
    str, typer.Option("--plan", help="A JSON file, or a plan of the paper such as paper/deit_base-10.")
]
Weights = Annotated[Path | None, typer.Option(help="Checkpoint (.safetensors or .pth) that fits the model exactly.")]
Pretrained = Annotated[bool, typer.Option("--pretrained", help="Download the library's own weights.")]
Classes = Annotated[int | None, typer.Option("--num-classes", min=1, help="Number of classes of the head.")]
ImgSize = Annotated[int | None, typer.Option("--img-size", min=1, help="Side of the images in pixels.")]
Images = Annotated[
    str, typer.Option("--data", help="A folder of images, or any data of hetdpt recover; labels are not looked at.")
]
DataRoot = Annotated[
    Path | None, typer.Option(help="Where torch/, hfds/ and wds/ data is kept, and where a relative folder begins.")
]
Download = Annotated[bool, typer.Option("--download", help="Fetch torch/ data that is not there.")]
Batch = Annotated[int | None, typer.Option(min=1, help="Images per batch: 256 on a GPU, 8 on a CPU by default.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1 or mps: the fastest there is by default.")]
Runs = Annotated[int, typer.Option(min=1, help="Rounds in which each model runs once.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress bar.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace what is there.")]
DataName = Annotated[
    str,
    typer.Option("--data", help=f"The images to train and measure on: {FORMS}."),
]
Fraction = Annotated[float | None, typer.Option(help="Part of the images to use, 0 to 1.")]
PerClass = Annotated[int | None, typer.Option(min=1, help="Images of each class to use.")]
Workers = Annotated[
    int | None, typer.Option(min=0, help="Processes that read images: one per core by default, at most 8.")
]
Out = Annotated[Path, typer.Option(help="Run directory; the same command again goes on where it stopped.")]
RecipeName = Annotated[str, typer.Option("--recipe", help="Settings to begin with; hetdpt recipes lists them.")]
Epochs = Annotated[int | None, typer.Option(min=1, help="Passes over the training images.")]
BatchSize = Annotated[int | None, typer.Option(min=1, help="Images per process and forward pass.")]
Accumulate = Annotated[int | None, typer.Option(min=1, help="Forward passes per update of the weights.")]
Lr = Annotated[float | None, typer.Option(help="Learning rate at its peak, taken as it is.")]
ClipGrad = Annotated[float | None, typer.Option(help="Largest norm of the gradient.")]
Precision = Annotated[str | None, typer.Option(help="auto, float32, bfloat16 or float16.")]
Seed = Annotated[int | None, typer.Option(min=0, help="Order of images, augmentation, mixing.")]
Minutes = Annotated[float, typer.Option("--checkpoint-minutes", min=0, help="Time between checkpoints in an epoch.")]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", help="Any other setting, such as training.weight_decay=0.05; may be repeated."),
]
Board = Annotated[bool, typer.Option("--tensorboard", help="Write TensorBoard files to OUT/tensorboard too.")]

# Options that stand for settings; the others of those are reached by --set.
SETTINGS = {
    "epochs": "training.epochs",
    "batch_size": "training.batch_size",
    "accumulate": "training.accumulate",
    "lr": "training.lr",
    "clip_grad": "training.clip_grad",
    "precision": "training.precision",
    "seed": "training.seed",
    "distill": "distillation.kind",
    "alpha": "distillation.alpha",
    "temperature": "distillation.temperature",
    "fraction": "fraction",
    "per_class": "per_class",
}


def read_plan(name: str) -> Plan:
    if name.startswith(PREFIX):
        return published_plan(name)
    try:
        plan = Plan.from_json(Path(name).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(
            f"the plan {name} cannot be read: {error}; give a JSON file or a name such as paper/deit_base-10"
        ) from None
    if not len(plan):
        raise PlanError(f"the plan {name} removes nothing; list block numbers under 'attention' or 'activation'")
    return plan


def read_removal(text: str) -> str | tuple[str, str]:
    """Return the removal written in ``text``: a name, or two styles with a comma between."""
    styles = tuple(style.strip() for style in text.split(","))
    return Plan(removal=(styles[0], styles[1]) if len(styles) == 2 else text).removal


def with_removal(plan: Plan, removal: str | None, usual: str) -> Plan:
    """Return ``plan`` with the removal asked for; where nobody asks, with its own, or the ``usual`` one for ``plain``.

    A plan that says nothing is ``plain``, so that word in a file does not count as asking.
    """
    if removal is not None:
        return replace(plan, removal=read_removal(removal))
    return replace(plan, removal=usual) if plan.removal == "plain" else plan


def open_beside(model: str, beside: list[str], options: dict[str, Any]) -> dict[str, nn.Module]:
    """Return the models by name; those beside the first bring their own weights."""
    from hetdpt.core.randomness import seeded
    from hetdpt.export.saved import open_model, saved_directory

    for name in beside:
        if saved_directory(name) is None:
            raise ModelError(
                f"--beside takes a directory that hetdpt has saved, or demo, but {name} is neither; give it as the "
                "first model, with --weights, or save it first"
            )
    if len({model, *beside}) < 1 + len(beside):
        raise ModelError(f"{model} and {', '.join(beside)} were given, but each model can be compared but once")
    with seeded(0):  # random weights too are the same when it goes on
        return {model: open_model(model, **options), **{name: open_model(name) for name in beside}}


def read_images(
    source: Source | Stream,
    network: nn.Module,
    counts: tuple[int, int],
    options: dict[str, int],
    tell: Callable[[str], None],
) -> tuple[ImageBatches, ImageBatches]:
    """Return the images to fit on and others to judge by; the same ones, and a line that says so, where too few."""
    from hetdpt.adapters.preprocessing import preprocessing_of
    from hetdpt.data.fixed_batches import ImageBatches

    prepared = preprocessing_of(network)
    batches = ImageBatches(source, prepared, count=counts[0], **options)
    if len(source) < sum(counts):
        tell(f"{len(source)} images are too few for {counts[0]} and {counts[1]} others; damage is measured on the same")
        return batches, batches
    return batches, ImageBatches(source, prepared, count=counts[1], start=counts[0], **options)


def read_numbers(option: str, what: str, text: str) -> tuple[int, ...]:
    """Return the numbers in ``text``, with commas between; where they are none, say ``what`` the ``option`` takes."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise PlanError(f"{option} takes {what}, not {text!r}")
    return tuple(map(int, parts))


def read_rounds(text: str) -> tuple[int, int, int]:
    """Return the rounds of the three chains that ``text`` says, such as 8,8,3."""
    parts = text.split(",")
    if len(parts) != 3 or not all(part.strip().isdecimal() for part in parts):
        raise PredictError(f"--rounds takes three numbers, of attention, activation and interleaved, not {text!r}")
    attention, activation, interleaved = (int(part) for part in parts)
    return attention, activation, interleaved


def read_samples(samples: Path, network: nn.Module) -> list[Row]:
    """Return the samples in a file or a directory of hetdpt collect; what is of another model is refused."""
    from hetdpt.flow.collection.collect import read_samples
    from hetdpt.surgery.record import survey_of

    return read_samples(samples, survey_of(network).anatomy.blocks)


def given_settings(context: typer.Context) -> dict[str, Any]:
    """Return the settings whose options were given."""
    given = {SETTINGS[name]: value for name, value in context.params.items() if name in SETTINGS}
    return {name: value for name, value in given.items() if value is not None}


def config_of(recipe: str, given: dict[str, Any], settings: list[str] | None) -> RecoverConfig:
    from hetdpt.flow.recipes import recipe as recipe_called

    config = recipe_called(recipe).config
    if "training.lr" in given:
        config = config.with_settings({"training.lr_batch": None})
    return config.with_settings({**given, **read_settings(settings)})


def read_settings(settings: list[str] | None) -> dict[str, Any]:
    """Return what ``--set`` was given, by name."""
    found = {}
    for setting in settings or ():
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
    """Return how many processes read images: this process's part of the cores, or what was given."""
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return given if given is not None else max(1, min(8, cores() // processes))
