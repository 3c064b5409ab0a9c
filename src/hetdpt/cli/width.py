"""The command width: a model made narrower, in heads, hidden features and channels."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hetdpt.cli.command import goal_options, option
from hetdpt.cli.live import Display
from hetdpt.cli.options import (
    DeviceOptions,
    ModelOptions,
    OutputOptions,
    OverwriteOptions,
    PlaceOptions,
    ReadingOptions,
)
from hetdpt.cli.show import print_, print_costs, print_json, table
from hetdpt.core.errors import DataError, ModelError
from hetdpt.core.format import estimate, percent
from hetdpt.core.goals import BOUNDS, GOALS

if TYPE_CHECKING:
    from torch import nn

    from hetdpt.data.sources import Data
    from hetdpt.measurement.costs import Costs
    from hetdpt.reduce.width.narrow import Narrowed, WidthConfig
    from hetdpt.reduce.width.scores import Sizes
    from hetdpt.results import Scores


class WidthOptions(ModelOptions, PlaceOptions, ReadingOptions, DeviceOptions, OverwriteOptions, OutputOptions):
    out: Path
    """Directory to write."""
    goals: dict[str, Any] = goal_options(*BOUNDS)
    ratio: float | None = None
    """Part of each size to remove, times its share."""
    data: str | None = None
    """Images: any folder; for taylor with labels, as for hetdpt recover."""
    images: int = option(least=1, default=512)
    """How many images to use."""
    importance: Any = option("WidthConfig.importance")
    round_to: Any = option("WidthConfig.round_to", least=1)
    shares: Any = option("WidthConfig.shares")
    refit: Any = option("WidthConfig.refits")
    batch: Any = option("RunConfig.batch", least=1, panel="Device")


def width(options: WidthOptions) -> None:
    """Make a model narrower: fewer channels, hidden features, heads and dimensions of heads."""
    from hetdpt.core.modules import clone, find_device
    from hetdpt.export.saved import RECIPE, save
    from hetdpt.measurement.costs import Costs
    from hetdpt.reduce.width.narrow import WidthConfig, narrow_to
    from hetdpt.reduce.width.scores import sizes_of
    from hetdpt.store.atomic import require_new
    from hetdpt.surgery.merge import merge_
    from hetdpt.surgery.record import survey_of

    config, out = WidthConfig(seed=options.seed, **options.settings("WidthConfig")), options.out
    require_new(out, options.overwrite, RECIPE)
    _require_images(options.data, config)
    network = options.open_model().to(find_device(options.device))
    size = survey_of(network).input_size
    before = Costs.of(merge_(clone(network)), size)
    goals: dict[str, Any] = {
        name: GOALS[name].parse(value).of(getattr(before, name, None)) for name, value in options.goals.items()
    }
    with options.live() as display:
        val = _val(network, options) if options.data else None
        found = narrow_to(
            network,
            ratio=options.ratio,
            **goals,
            config=config,
            batches=_batches(network, options, config) if options.data else (),
            batch=options.batch,
            progress=display.step,
        )
        narrow = merge_(found.model)
        models = {"before": network, "after": narrow}
        scores = _scores(models, val, options, display) if val else {}
    costs = {"before": before, "after": Costs.of(narrow, size)}
    sizes = {name: sizes_of(network) for name, network in models.items()}
    save(narrow.cpu(), out, overwrite=options.overwrite)
    if options.as_json:
        return print_json(directory=str(out), **_plain(found, sizes, costs, scores))
    _print(found, sizes, costs, scores)
    if options.data and not val:
        click.echo(f"{options.data} has no labelled validation images that fit, so that accuracy is not measured")
    options.note_random_weights()
    click.echo(
        f"saved to {out}; load it with hetdpt.load({str(out)!r}), train it with hetdpt recover {out} --teacher MODEL "
        "--data DATA --out RUN, where MODEL is the dense one"
    )


def _require_images(data: str | None, config: WidthConfig) -> None:
    if data is None and config.importance in (kinds := {"obs": "images", "taylor": "labelled images"}):
        needs = f"importance {config.importance} needs {kinds[config.importance]}"
        raise DataError(f"{needs}; give --data, or use --importance l2 --no-refit")
    if data is None and config.refits:
        raise DataError("the refit needs images; give --data, or leave it out with --no-refit")


def _batches(network: nn.Module, options: WidthOptions, config: WidthConfig) -> Any:
    from hetdpt.adapters.models import num_classes_of
    from hetdpt.adapters.preprocessing import preprocessing_of
    from hetdpt.data.fixed_batches import ImageBatches, LabelledBatches
    from hetdpt.data.images import open_images
    from hetdpt.data.sources import check_classes, open_data

    wants, reading = preprocessing_of(network), {"count": options.images, **options.reading}
    assert options.data is not None
    if config.importance != "taylor":
        return ImageBatches(open_images(options.data, **options.place), wants, **reading)
    opened = open_data(options.data, splits=("train",), **options.place)
    check_classes(opened.num_classes, num_classes_of(network))
    return LabelledBatches(opened.train, wants, **reading)


def _val(network: nn.Module, options: WidthOptions) -> Data | None:
    """Return the labelled validation images, if there are any with the classes of ``network``."""
    from hetdpt.adapters.models import num_classes_of
    from hetdpt.data.sources import check_classes, open_data

    assert options.data is not None
    try:
        opened = open_data(options.data, splits=("val",), **options.place)
        check_classes(opened.num_classes, num_classes_of(network))
    except (DataError, ModelError):  # a model without a head has no accuracy
        return None
    return opened


def _scores(models: dict[str, nn.Module], val: Data, options: WidthOptions, display: Display) -> dict[str, Scores]:
    from hetdpt.measurement.accuracy import evaluate

    reading: dict[str, Any] = {"batch_size": options.batch_size, "workers": options.workers}
    return {
        name: evaluate(network, val, **reading, progress=display.counter(f"accuracy {name}"))
        for name, network in models.items()
    }


def _plain(
    found: Narrowed, sizes: dict[str, Sizes], costs: dict[str, Costs], scores: dict[str, Scores]
) -> dict[str, Any]:
    return {
        "ratios": asdict(found.ratios),
        "speedup": found.speedup,
        "tried": found.tried,
        "sizes": {name: asdict(size) for name, size in sizes.items()},
        "costs": {name: asdict(cost) for name, cost in costs.items()},
        "accuracy": {name: asdict(score) for name, score in scores.items()},
    }


def _print(found: Narrowed, sizes: dict[str, Sizes], costs: dict[str, Costs], scores: dict[str, Scores]) -> None:
    rows = table("sizes", "", *sizes)
    for name in asdict(sizes["before"]):
        rows.add_row(name.replace("_", " "), *(_spell(getattr(size, name)) for size in sizes.values()))
    print_(rows)
    print_costs(costs)
    if found.speedup is not None:
        click.echo(f"speedup {found.speedup:.3f}x measured, the two taking turns")
    for name, score in scores.items():
        click.echo(f"accuracy {name}: {estimate(percent(score.top1), score.low, score.high)} of {score.count} images")


def _spell(values: int | tuple[int, ...]) -> str:
    """Return a size, or that of all blocks as a range and their sum.

    >>> _spell(192), _spell((3, 3)), _spell((2, 3, 1))
    ('192', '2 x 3', '1 to 3, 6 in all')
    """
    if isinstance(values, int):
        return str(values)
    if len(set(values)) <= 1:
        return f"{len(values)} x {values[0]}" if values else "-"
    return f"{min(values)} to {max(values)}, {sum(values)} in all"
