"""The commands detect and segment: a model as the backbone of a detector or a segmenter, trained and measured."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hetdpt.cli.options import (
    Accumulate,
    BatchSize,
    Board,
    ClipGrad,
    Device,
    Epochs,
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
    given_settings,
    read_plan,
    read_settings,
    with_removal,
    workers_of,
)
from hetdpt.cli.show import epoch_line, is_first_process, print_json, progress, warn_of, watching
from hetdpt.core.errors import FileError, ModelError, TrainError

if TYPE_CHECKING:
    from hetdpt.core.plan import Plan
    from hetdpt.tasks.annotated import AnnotatedData
    from hetdpt.tasks.learning import LearnConfig

PACKAGES = ("transformers", "torchmetrics", "pycocotools")
"""What the extra ``downstream`` brings."""
Pictures = Annotated[
    str,
    typer.Option(
        "--data",
        help="To detect, a folder in COCO's format; to segment, one in ADE20K's or with images and masks; or shapes.",
    ),
]


def app_of(task: str, help: str) -> typer.Typer:
    """Return the commands ``train`` and ``eval`` of a task."""
    app = typer.Typer(help=help, no_args_is_help=True, add_completion=False, rich_markup_mode=None)

    @app.command()
    def train(
        context: typer.Context,
        model: Model,
        data: Pictures,
        out: Out,
        size: Annotated[str | None, typer.Option(help="Canvas for images, such as 512 or 480x640.")] = None,
        plan: Annotated[str | None, typer.Option(help="Layers to remove first: a JSON file or paper/NAME.")] = None,
        removal: Annotated[str | None, typer.Option(help="What takes their place; calibrated by default.")] = None,
        calibration_images: Annotated[
            int, typer.Option(min=1, help="Training images to fit calibrated removal on.")
        ] = 256,
        weights: Weights = None,
        pretrained: Pretrained = False,
        epochs: Epochs = None,
        batch_size: BatchSize = None,
        accumulate: Accumulate = None,
        lr: Lr = None,
        clip_grad: ClipGrad = None,
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
        """Train with the paper's settings; options and --set change them. The same command again goes on."""
        _require_packages(task)
        config = _config(task, size, given_settings(context), settings)
        chosen = _plan(plan, removal)
        place: dict[str, Any] = {"plan": chosen, "calibration": calibration_images, "device": device}
        place |= {"workers": workers_of(workers), "minutes": minutes, "tensorboard": tensorboard}
        _train(out, (model, {"weights": weights, "pretrained": pretrained}), data, config, place, as_json, quiet)

    @app.command("eval")
    def eval_(
        directory: Annotated[Path, typer.Argument(help="What train has written: OUT, or one of the models in it.")],
        data: Pictures,
        batch_size: Annotated[int, typer.Option(min=1, help="Images per forward pass.")] = 8,
        workers: Workers = None,
        device: Device = None,
        as_json: Json = False,
        quiet: Quiet = False,
    ) -> None:
        """Measure a trained model on the validation images."""
        _require_packages(task)
        _eval(task, directory, data, batch_size, workers_of(workers), device, as_json, quiet)

    return app


def _require_packages(task: str) -> None:
    """Refuse to begin without what is needed later, some of it only when the first scores are measured."""
    if missing := [name for name in PACKAGES if find_spec(name) is None]:
        packages = f"package{'s' if len(missing) > 1 else ''} {' and '.join(missing)}"
        raise ModelError(f'{task} needs the {packages}; pip install "hetdpt[downstream]"')


def _config(task: str, size: str | None, given: dict[str, Any], settings: list[str] | None) -> LearnConfig:
    from hetdpt.tasks.learning import LearnConfig

    changes = {**given, **read_settings(settings)}
    if "training.lr" in changes:
        changes = {"training.lr_batch": None, **changes}
    if size is not None:
        changes["size"] = _sides(size)
    return LearnConfig.of(task).with_settings(changes)


def _sides(text: str) -> tuple[int, int]:
    """Return height and width.

    >>> _sides("512"), _sides("480x640")
    ((512, 512), (480, 640))
    """
    sides = text.split("x")
    if not 1 <= len(sides) <= 2 or not all(side.isdecimal() for side in sides):
        raise TrainError(f"--size takes a side, or height and width as in 480x640, not {text!r}")
    return int(sides[0]), int(sides[-1])


def _plan(name: str | None, removal: str | None) -> Plan | None:
    if name is None and removal is not None:
        raise TrainError("--removal says how the layers of a plan go; add --plan")
    return with_removal(read_plan(name), removal, "calibrated") if name is not None else None


def _train(
    out: Path,
    model: tuple[str, dict[str, Any]],
    data: str,
    config: LearnConfig,
    place: dict[str, Any],
    as_json: bool,
    quiet: bool,
) -> None:
    from hetdpt.core.randomness import seeded
    from hetdpt.export.saved import open_model
    from hetdpt.store.run_directory import SUMMARY, summary_of
    from hetdpt.tasks.run import learn_into
    from hetdpt.tasks.table import task_called

    metric, is_silent = task_called(config.task).metric, as_json or not is_first_process()
    opened: AnnotatedData = task_called(config.task).open(data)
    with seeded(config.training.seed):
        network = open_model(model[0], **model[1])
    was_done = (out / SUMMARY).is_file()
    with watching(quiet or is_silent) as (watch, say):
        for learned in learn_into(out, network, opened, config, watch=watch, **place):
            if not is_silent:
                say(epoch_line(learned.epoch, metric))
    if not is_first_process():
        return
    summary = summary_of(out)
    if as_json:
        return print_json(directory=str(out), **summary)
    if was_done:
        typer.echo(f"{out} is done already")
    names = [name for name in ("start", "last", "best", "ema") if summary[name] is not None]
    typer.echo(f"{metric}: " + ", ".join(f"{name} {summary[name]:.2f} %" for name in names))
    typer.echo(_numbers(summary["scores"]))
    warn_of(summary["unreadable"])
    typer.echo(f"saved to {out}: {', '.join(name for name in names if name != 'start')}")


def _eval(
    task: str, directory: Path, data: str, batch_size: int, workers: int, device: str | None, as_json: bool, quiet: bool
) -> None:
    from hetdpt.tasks.learning import score
    from hetdpt.tasks.saved import TASK, load_task
    from hetdpt.tasks.table import task_called

    found = next((place for place in (directory, directory / "best") if (place / TASK).is_file()), None)
    if found is None:
        raise FileError(f"{directory} holds no trained model ({TASK}); give what a training has written")
    model = load_task(found)
    if model.task != task:
        raise FileError(f"{found} is a model for {model.task}, not for {task}; use the command for that")
    opened = task_called(task).open(data, splits=("val",))
    with progress("evaluating", quiet or as_json or not is_first_process()) as move:
        scores = score(model, opened, batch_size=batch_size, device=device, workers=workers, progress=move)
    if not is_first_process():
        return
    if as_json:
        return print_json(directory=str(found), **scores.record())
    typer.echo(f"{found}: {_numbers(scores.record())}")
    warn_of(scores.unreadable)


def _numbers(scores: dict[str, Any]) -> str:
    """Return the plain numbers among ``scores`` as a line."""
    plain = {name: value for name, value in scores.items() if isinstance(value, float)}
    return ", ".join(f"{name} {value:.2f} %" for name, value in plain.items())
