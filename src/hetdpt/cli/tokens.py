"""The command tokens: fewer tokens in the blocks of a model, and what that gains and costs."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hetdpt.cli.options import (
    Batch,
    Classes,
    DataRoot,
    Device,
    Download,
    Fraction,
    ImgSize,
    Json,
    Model,
    Overwrite,
    PerClass,
    Pretrained,
    Quiet,
    Runs,
    Weights,
    Workers,
    open_beside,
    read_numbers,
    workers_of,
)
from hetdpt.cli.show import note_random_weights, print_, print_json, stages, table
from hetdpt.core.errors import MeasureError
from hetdpt.core.format import amount, estimate, percent, times
from hetdpt.report.tokens import name_of

if TYPE_CHECKING:
    from torch import nn

    from hetdpt.data.sources import Data
    from hetdpt.flow.execution import Execution
    from hetdpt.studies.tokens import TokensConfig, TokensDone


def tokens(
    model: Model,
    r: Annotated[str, typer.Option("--r", help="Tokens that go in each block with attention; 0,4,8 tries several.")],
    method: Annotated[
        str, typer.Option(help="tome merges alike tokens; gtp adds those that matter least to others.")
    ] = "tome",
    schedule: Annotated[str, typer.Option(help="constant, or decreasing: more in the first blocks.")] = "constant",
    beside: Annotated[
        list[str] | None, typer.Option(help="A saved model to do the same with, such as a pruned one; may be repeated.")
    ] = None,
    data: Annotated[str | None, typer.Option(help="Labelled images, as for hetdpt eval; without, no accuracy.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="One --r: where the model is saved. Several, or --beside: a run directory.")
    ] = None,
    weights: Weights = None,
    pretrained: Pretrained = False,
    num_classes: Classes = None,
    img_size: ImgSize = None,
    data_root: DataRoot = None,
    download: Download = False,
    fraction: Fraction = None,
    per_class: PerClass = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Images per forward pass where accuracy is measured.")] = 64,
    batch: Batch = None,
    runs: Runs = 100,
    seconds: Annotated[float, typer.Option(min=0, help="Time after which there are no more rounds.")] = 60.0,
    workers: Workers = None,
    device: Device = None,
    overwrite: Overwrite = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Reduce the tokens of a model, without training: what is left of its costs, its speed and its accuracy."""
    from hetdpt.data.sources import open_data
    from hetdpt.export.saved import RECIPE, save
    from hetdpt.flow.execution import Execution
    from hetdpt.reduce.tokens.reduce import reduce_tokens_
    from hetdpt.store.atomic import require_new
    from hetdpt.studies.tokens import FIGURE, RESULTS, TABLE, TokensConfig, measure_tokens

    numbers = read_numbers("--r", "how many tokens go, such as 8 or 0,4,8", r)
    is_study = len(numbers) > 1 or bool(beside)
    _require_sense(is_study, numbers, data, out, overwrite)
    if data is None:
        asked = {"fraction": fraction, "per-class": per_class, "data-root": data_root, "download": download or None}
        _require_none(asked)
    config = TokensConfig(
        r=numbers,
        method=method,
        schedule=schedule,
        fraction=fraction,
        per_class=per_class,
        batch_size=batch_size,
        batch=batch,
        runs=runs,
        seconds=seconds,
    )
    if out is not None and not is_study:
        require_new(out, overwrite, RECIPE)
    opened = open_data(data, splits=("val",), root=data_root, download=download) if data else None
    options = {"weights": weights, "pretrained": pretrained, "num_classes": num_classes, "img_size": img_size}
    models = open_beside(model, beside or [], options)
    with stages(quiet or as_json) as (move, say):
        place = Execution(device=device, workers=workers_of(workers), progress=move)
        if is_study:
            assert out is not None
            assert opened is not None
            points = _study(out, models, opened, config, place, None if as_json else say)
        else:
            points = [row.to_dict() for row in measure_tokens(models, opened, config, place)]
    if out is not None and not is_study:
        save(reduce_tokens_(models[model], config.tokens(numbers[0])).cpu(), out, overwrite=overwrite)
    if as_json:
        return print_json(directory=str(out) if out else None, points=points)
    _print(points)
    note_random_weights(model, weights, pretrained)
    if is_study:
        typer.echo(f"written to {out}: {RESULTS}, {TABLE}, {FIGURE}")
    elif out is not None:
        typer.echo(f"saved to {out}; load it with hetdpt.load({str(out)!r})")


def _require_sense(
    is_study: bool, numbers: tuple[int, ...], data: str | None, out: Path | None, overwrite: bool
) -> None:
    """Refuse what cannot be meant: a study needs images and a directory, one number has to take tokens away."""
    if is_study and (data is None or out is None):
        missing = "--data" if data is None else "--out"
        raise MeasureError(
            "several --r, or a model --beside, make a study that sets accuracy against speed in a run directory; "
            f"give {missing}, or one --r alone"
        )
    if is_study and overwrite:
        raise MeasureError("a study goes on with what is in --out and replaces nothing; leave --overwrite out")
    if not is_study and numbers == (0,):
        raise MeasureError("--r 0 takes no token away; give 1 or more, or several numbers such as 0,4,8")


def _require_none(options: Mapping[str, object]) -> None:
    """Refuse options, by name, that say something of labelled images where there are none."""
    if given := [f"--{name}" for name, value in options.items() if value is not None]:
        raise MeasureError(f"accuracy is not measured, but {', '.join(given)} was given; add --data, or leave it out")


def _study(
    out: Path,
    models: dict[str, nn.Module],
    data: Data,
    config: TokensConfig,
    place: Execution,
    say: Callable[[str], None] | None,
) -> list[dict[str, Any]]:
    from hetdpt.studies.tokens import RESULTS, tokens_into

    for done in tokens_into(out, models, data, config, place):
        if say:
            say(_line(done))
    points: list[dict[str, Any]] = json.loads((out / RESULTS).read_text(encoding="utf-8"))["points"]
    return points


def _line(done: TokensDone) -> str:
    result, by = done.result, "" if done.is_own else " (done before, or by another process)"
    if isinstance(result, dict):
        return f"timed: {len(result)} models in turns{by}"
    assert done.subject is not None
    return (
        f"{done.subject.model}, r {done.subject.r}: {result.top1:.2f} % of {result.images} images, "
        f"{result.tokens_left} tokens left, {amount(result.macs)} MACs{by}"
    )


def _print(points: list[dict[str, Any]]) -> None:
    last = points[-1]
    has_accuracy = last["top1"] is not None
    columns = ["r", "tokens left", "MACs", "images/s", "speedup [95 %]", *(["accuracy [95 %]"] * has_accuracy)]
    rows = table(f"{last['method']}, {last['schedule']} schedule", "model", *columns)
    for one in points:
        cells = [str(one["r"]), str(one["tokens_left"]), amount(one["macs"]), f"{one['throughput']:.4g}"]
        cells.append(estimate(times(one["speedup"], 3, "x"), one["speedup_low"], one["speedup_high"], 3))
        if has_accuracy:
            cells.append(estimate(percent(one["top1"]), one["low"], one["high"]))
        rows.add_row(name_of(one), *cells)
    print_(rows)
    images = f"; accuracy on {last['images']} images" if has_accuracy else ""
    typer.echo(f"{last['device']}, {last['dtype']}, batch {last['batch']}, {last['runs']} rounds in turns{images}")
    for name, numbers in _slower(points).items():
        typer.echo(f"note: {name} is slower here with r {numbers} than as it is; to choose tokens takes what it saves")


def _slower(points: list[dict[str, Any]]) -> dict[str, str]:
    """Return the models, each with the numbers of tokens that make it slower than with all: interval below interval."""
    whole = {one["model"]: one["speedup_low"] for one in points if one["r"] == 0}
    found: dict[str, list[str]] = {}
    for one in points:
        if one["speedup_high"] < whole[one["model"]]:
            found.setdefault(one["model"], []).append(str(one["r"]))
    return {model: ", ".join(numbers) for model, numbers in found.items()}
