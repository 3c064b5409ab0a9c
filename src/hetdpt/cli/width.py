"""The command width: a model made narrower, in heads, hidden features and channels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hetdpt.cli.options import (
    Batch,
    Classes,
    DataRoot,
    Device,
    Download,
    ImgSize,
    Json,
    Model,
    Overwrite,
    Pretrained,
    Quiet,
    Weights,
)
from hetdpt.cli.show import note_random_weights, print_, print_costs, print_json, stages, table
from hetdpt.core.errors import DataError, ModelError, PlanError
from hetdpt.core.format import estimate, percent
from hetdpt.core.goals import GOALS

if TYPE_CHECKING:
    from torch import nn

    from hetdpt.data.sources import Data
    from hetdpt.measurement.costs import Costs
    from hetdpt.reduce.width.narrow import Narrowed, WidthConfig
    from hetdpt.reduce.width.scores import Sizes
    from hetdpt.results import Scores


def width(
    model: Model,
    out: Annotated[Path, typer.Option(help="Directory to write.")],
    macs: Annotated[str | None, typer.Option(help="MACs of what comes out, such as 2.4G or 50%.")] = None,
    params: Annotated[str | None, typer.Option(help="Its parameters, such as 13M or 50%.")] = None,
    speedup: Annotated[float | None, typer.Option(help="How much faster it is to be on this device.")] = None,
    ratio: Annotated[float | None, typer.Option(help="Part of each size that goes, times its share.")] = None,
    data: Annotated[
        str | None, typer.Option(help="Images: with labels for taylor, as for hetdpt recover; else any folder.")
    ] = None,
    images: Annotated[int, typer.Option(min=1, help="How many of them to look at.")] = 512,
    importance: Annotated[str, typer.Option(help="What a piece is worth: taylor, l2 or random.")] = "taylor",
    round_to: Annotated[
        int | None, typer.Option(min=1, help="Make sizes multiples of this; 8 for wide models by default.")
    ] = None,
    shares: Annotated[
        str | None,
        typer.Option(
            help="How much goes of embedding, hidden features, heads, dimensions of heads, such as 1,1,1,0.5; by "
            "default hidden features first, then heads, then the embedding, as far as needed."
        ),
    ] = None,
    no_refit: Annotated[
        bool, typer.Option("--no-refit", help="Leave the layers behind removed features as they are.")
    ] = False,
    weights: Weights = None,
    pretrained: Pretrained = False,
    num_classes: Classes = None,
    img_size: ImgSize = None,
    data_root: DataRoot = None,
    download: Download = False,
    batch_size: Annotated[int, typer.Option(min=1, help="Images per forward pass.")] = 32,
    batch: Batch = None,
    seed: Annotated[int, typer.Option(min=0, help="Which images, and which pieces where they are random.")] = 0,
    workers: Annotated[int, typer.Option(min=0, help="Processes that read images.")] = 0,
    device: Device = None,
    overwrite: Overwrite = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Make a model narrower, dense or pruned: fewer channels, hidden features, heads and dimensions of heads."""
    from hetdpt.core.modules import clone, find_device
    from hetdpt.export.saved import RECIPE, open_model, save
    from hetdpt.measurement.costs import Costs
    from hetdpt.reduce.width.narrow import WidthConfig, narrow_to
    from hetdpt.store.atomic import require_new
    from hetdpt.surgery.merge import merge_
    from hetdpt.surgery.record import survey_of

    config = WidthConfig(
        importance=importance,  # type: ignore[arg-type]  # the config says what it may be
        round_to=round_to,
        shares=_shares(shares) if shares else None,
        refits=not no_refit,
        seed=seed,
    )
    require_new(out, overwrite, RECIPE)
    _require_images(data, config)
    network = open_model(model, weights=weights, pretrained=pretrained, num_classes=num_classes, img_size=img_size)
    network.to(find_device(device))
    size = survey_of(network).input_size
    before = Costs.of(merge_(clone(network)), size)
    with stages(quiet or as_json) as (move, _):
        where = {"root": data_root, "download": download}
        reading = {"count": images, "batch_size": batch_size, "seed": seed, "workers": workers}
        opened = _val(network, data, where) if data else None
        batches = _batches(network, data, config, where, reading) if data else ()
        found = narrow_to(
            network,
            ratio=ratio,
            macs=GOALS["macs"].parse(macs, "--macs").of(before.macs) if macs else None,
            params=GOALS["params"].parse(params, "--params").of(before.params) if params else None,
            speedup=speedup,
            config=config,
            batches=batches,
            batch=batch,
            progress=move,
        )
        narrow = merge_(found.model)
        scores = _scores({"before": network, "after": narrow}, opened, batch_size, workers, move) if opened else {}
    costs = {"before": before, "after": Costs.of(narrow, size)}
    sizes = _sizes({"before": network, "after": narrow})
    save(narrow.cpu(), out, overwrite=overwrite)
    if as_json:
        return print_json(directory=str(out), **_plain(found, sizes, costs, scores))
    _print(found, sizes, costs, scores)
    if data and not opened:
        typer.echo(f"{data} has no labelled images of a split val that fit, so that accuracy is not known")
    note_random_weights(model, weights, pretrained)
    typer.echo(
        f"saved to {out}; load it with hetdpt.load({str(out)!r}), train it with hetdpt recover {out} --teacher MODEL "
        "--data DATA --out RUN, where MODEL is the dense one"
    )


def _shares(text: str) -> tuple[float, float, float, float]:
    try:
        embedding, hidden, heads, head_dims = (float(part) for part in text.split(","))
    except ValueError:
        raise PlanError(
            f"--shares takes four numbers from 0 to 1, of embedding, hidden, heads and head dims, not {text!r}"
        ) from None
    return embedding, hidden, heads, head_dims


def _require_images(data: str | None, config: WidthConfig) -> None:
    if data is None and config.importance == "taylor":
        raise DataError("importance taylor needs labelled images; give --data, or use --importance l2")
    if data is None and config.refits:
        raise DataError("the refit needs images; give --data, or leave it out with --no-refit")


def _batches(network: nn.Module, data: str, config: WidthConfig, where: dict[str, Any], reading: dict[str, int]) -> Any:
    from hetdpt.adapters.models import num_classes_of
    from hetdpt.adapters.preprocessing import preprocessing_of
    from hetdpt.data.fixed_batches import ImageBatches, LabelledBatches
    from hetdpt.data.images import open_images
    from hetdpt.data.sources import check_classes, open_data

    wants = preprocessing_of(network)
    if config.importance != "taylor":
        return ImageBatches(open_images(data, **where), wants, **reading)
    opened = open_data(data, splits=("train",), **where)
    check_classes(opened.num_classes, num_classes_of(network))
    return LabelledBatches(opened.train, wants, **reading)


def _val(network: nn.Module, data: str, where: dict[str, Any]) -> Data | None:
    """Return the labelled images of the split val, if there are any whose classes are those of ``network``."""
    from hetdpt.adapters.models import num_classes_of
    from hetdpt.data.sources import check_classes, open_data

    try:
        opened = open_data(data, splits=("val",), **where)
        check_classes(opened.num_classes, num_classes_of(network))
    except (DataError, ModelError):  # a model without a head has no accuracy
        return None
    return opened


def _scores(
    models: dict[str, nn.Module],
    opened: Data,
    batch_size: int,
    workers: int,
    move: Callable[[str, int, int], None] | None,
) -> dict[str, Scores]:
    from hetdpt.measurement.accuracy import evaluate

    found = {}
    for name, network in models.items():
        tell = (lambda done, total, name=name: move(f"accuracy {name}", done, total)) if move else None
        found[name] = evaluate(network, opened, batch_size=batch_size, workers=workers, progress=tell)
    return found


def _sizes(models: dict[str, nn.Module]) -> dict[str, Sizes]:
    from hetdpt.reduce.width.scores import sizes_of

    return {name: sizes_of(network) for name, network in models.items()}


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
        typer.echo(f"speedup {found.speedup:.3f}x measured, the two taking turns")
    for name, score in scores.items():
        typer.echo(f"accuracy {name}: {estimate(percent(score.top1), score.low, score.high)} of {score.count} images")


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
