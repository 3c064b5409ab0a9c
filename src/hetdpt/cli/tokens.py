"""The command tokens: fewer tokens in the blocks of a model, and how speed and accuracy change."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hetdpt.cli.command import option
from hetdpt.cli.live import Display
from hetdpt.cli.options import ModelOptions, OutputOptions, OverwriteOptions, PlaceOptions, WorkerOptions
from hetdpt.cli.show import by_others, print_, print_json, table
from hetdpt.core.errors import MeasureError
from hetdpt.core.format import amount, estimate, percent, times
from hetdpt.report.tokens import name_of

if TYPE_CHECKING:
    from torch import nn

    from hetdpt.data.sources import Data
    from hetdpt.studies.tokens import TokensConfig, TokensDone


class TokensOptions(ModelOptions, PlaceOptions, WorkerOptions, OverwriteOptions, OutputOptions):
    r: Any = option("TokensConfig.r", is_required=True)
    method: Any = option("TokensConfig.method")
    schedule: Any = option("TokensConfig.schedule")
    beside: list[str] = option(default=[])
    """A saved model to do the same with, such as a pruned one; may be repeated."""
    data: str | None = None
    """Labelled images, as for hetdpt eval; without them accuracy is not measured."""
    out: Path | None = None
    """Where the model is saved; with several --r, or --beside, the run directory."""
    fraction: Any = option("TokensConfig.fraction", panel="Data")
    per_class: Any = option("TokensConfig.per_class", least=1, panel="Data")
    batch_size: Any = option("TokensConfig.batch_size", least=1, panel="Data")
    batch: Any = option("TokensConfig.batch", least=1, panel="Device")
    runs: Any = option("TokensConfig.runs", least=1, panel="Device")
    seconds: Any = option("TokensConfig.seconds", least=0, panel="Device")

    @property
    def is_study(self) -> bool:
        return len(self.r) > 1 or bool(self.beside)

    def check(self) -> None:
        """Refuse what cannot be meant: a study needs images and a directory, one number has to remove tokens."""
        if self.is_study and (self.data is None or self.out is None):
            missing = "--data" if self.data is None else "--out"
            raise MeasureError(
                "several --r, or a model --beside, make a study of accuracy and speed in a run directory; "
                f"give {missing}, or only one --r"
            )
        if self.is_study and self.overwrite:
            raise MeasureError("a study resumes what is in --out and replaces nothing; leave --overwrite out")
        if not self.is_study and self.r == (0,):
            raise MeasureError("--r 0 removes no token; give 1 or more, or several numbers such as 0,4,8")
        options = ("fraction", "per_class", "data_root", "download")
        given = [f"--{name.replace('_', '-')}" for name in options if getattr(self, name) is not None]
        if given and self.data is None:
            raise MeasureError(
                f"accuracy is not measured, but {', '.join(given)} was given; add --data, or leave it out"
            )


def tokens(options: TokensOptions) -> None:
    """Reduce the tokens of a model without training, and measure its costs, speed and accuracy."""
    from hetdpt.data.sources import open_data
    from hetdpt.export.saved import RECIPE, save
    from hetdpt.reduce.tokens.reduce import reduce_tokens_
    from hetdpt.store.atomic import require_new
    from hetdpt.studies.tokens import FIGURE, RESULTS, TABLE, TokensConfig

    options.check()
    config, out = TokensConfig(**options.settings("TokensConfig")), options.out
    is_saved = out is not None and not options.is_study
    if out is not None and is_saved:
        require_new(out, options.overwrite, RECIPE)
    data = open_data(options.data, splits=("val",), **options.place) if options.data else None
    models = options.open_beside(options.beside)
    with options.live() as display:
        points = _measure(options, models, data, config, display)
    if out is not None and is_saved:
        save(reduce_tokens_(models[options.model], config.tokens(options.r[0])).cpu(), out, overwrite=options.overwrite)
    if options.as_json:
        return print_json(directory=str(out) if out else None, points=points)
    _print(points)
    options.note_random_weights()
    if options.is_study:
        click.echo(f"written to {out}: {RESULTS}, {TABLE}, {FIGURE}")
    elif out is not None:
        click.echo(f"saved to {out}; load it with hetdpt.load({str(out)!r})")


def _measure(
    options: TokensOptions, models: dict[str, nn.Module], data: Data | None, config: TokensConfig, display: Display
) -> list[dict[str, Any]]:
    from hetdpt.studies.tokens import RESULTS, measure_tokens, tokens_into

    place = options.execution(display)
    if not options.is_study:
        return [row.to_dict() for row in measure_tokens(models, data, config, place)]
    assert options.out is not None
    assert data is not None
    for done in tokens_into(options.out, models, data, config, place):
        display.say(_line(done))
    points: list[dict[str, Any]] = json.loads((options.out / RESULTS).read_text(encoding="utf-8"))["points"]
    return points


def _line(done: TokensDone) -> str:
    result, by = done.result, by_others(done.is_own)
    if isinstance(result, dict):
        return f"timed: {len(result)} models in turns{by}"
    assert done.subject is not None
    return (
        f"{done.subject.model}, r {done.subject.r}: {percent(result.top1)} of {result.images} images, "
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
    click.echo(f"{last['device']}, {last['dtype']}, batch {last['batch']}, {last['runs']} rounds in turns{images}")
    for name, numbers in _slower(points).items():
        click.echo(
            f"note: {name} is slower here with r {numbers} than with all tokens; choosing them costs more than it saves"
        )


def _slower(points: list[dict[str, Any]]) -> dict[str, str]:
    """Return the models, each with the numbers of tokens that make it slower than with all: interval below interval."""
    whole = {one["model"]: one["speedup_low"] for one in points if one["r"] == 0}
    found: dict[str, list[str]] = {}
    for one in points:
        if one["speedup_high"] < whole[one["model"]]:
            found.setdefault(one["model"], []).append(str(one["r"]))
    return {model: ", ".join(numbers) for model, numbers in found.items()}
