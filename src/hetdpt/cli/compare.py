"""The command compare: every method chooses layers, all get the same fine-tuning."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hetdpt.cli.options import (
    Batch,
    BatchSize,
    Classes,
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
    read_numbers,
    read_removal,
    read_samples,
    workers_of,
)
from hetdpt.cli.select import Candidates, Explore
from hetdpt.cli.show import note_random_weights, print_, print_json, stages, table
from hetdpt.core.format import amount, estimate, percent, signed, times

if TYPE_CHECKING:
    from hetdpt.flow.collection.work import SampleDone
    from hetdpt.flow.comparison.work import ComparisonDone
    from hetdpt.results import Difference, MethodComparison

ALL = "all"
COMMON = ("training.batch_size", "training.precision", "training.seed", "fraction", "per_class", "augmentation.")
"""Beginnings of the settings that hold for searches and samples too, as they are about images, not about epochs."""


def compare(
    context: typer.Context,
    model: Model,
    data: DataName,
    out: Annotated[
        Path, typer.Option(help="Run directory; processes that share it share the work, kills lose little.")
    ],
    layers: Annotated[str, typer.Option(help="How many layers go, such as 2,4,6.")],
    methods: Annotated[str, typer.Option(help="all, or names such as hetdpt,random.")] = ALL,
    seeds: Annotated[int, typer.Option(min=1, help="How often everything is done, each time with another seed.")] = 1,
    samples: Annotated[
        Path | None,
        typer.Option(help="A CSV of samples, or a directory of hetdpt collect, to split budgets by; else collected."),
    ] = None,
    removal: Annotated[str | None, typer.Option(help="plain, calibrated, ...; by default as the recipe says.")] = None,
    images: Annotated[int, typer.Option(min=2, help="Training images to choose layers and fit replacements on.")] = 256,
    candidates: Candidates = "all",
    explore: Explore = True,
    weights: Weights = None,
    pretrained: Pretrained = False,
    num_classes: Classes = None,
    img_size: ImgSize = None,
    data_root: DataRoot = None,
    download: Download = False,
    recipe: RecipeName = "quick",
    search_recipe: Annotated[
        str, typer.Option(help="Settings of the search for importances; hetdpt recipes lists them.")
    ] = "search",
    search_settings: Annotated[
        list[str] | None, typer.Option("--search-set", help="As --set, for the search; may be repeated.")
    ] = None,
    epochs: Epochs = None,
    batch_size: BatchSize = None,
    lr: Lr = None,
    fraction: Fraction = None,
    per_class: PerClass = None,
    precision: Precision = None,
    seed: Seed = None,
    settings: Settings = None,
    batch: Batch = None,
    workers: Workers = None,
    device: Device = None,
    minutes: Minutes = 10.0,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Compare methods: each chooses layers for every budget, all get the same fine-tuning; a table and a figure."""
    from hetdpt.core.randomness import seeded
    from hetdpt.data.sources import open_data
    from hetdpt.export.saved import open_model
    from hetdpt.flow.comparison.compare import FIGURE, RESULTS, TABLE, CompareConfig, compare_into, read_comparison
    from hetdpt.flow.comparison.work import PLANS
    from hetdpt.flow.execution import Execution
    from hetdpt.flow.recipes import recipe as recipe_called
    from hetdpt.selection.methods import METHODS
    from hetdpt.selection.predictor.samples import CollectConfig
    from hetdpt.selection.select import SelectConfig

    given, style = given_settings(context), read_removal(removal or recipe_called(recipe).removal)
    common = {name: value for name, value in given.items() if name.startswith(COMMON)}
    more = [setting for setting in settings or () if setting.startswith(COMMON)]
    config = CompareConfig(
        layers=read_numbers("--layers", "how many layers go, such as 2,4,6", layers),
        methods=tuple(METHODS)
        if methods == ALL
        else tuple(name.strip() for name in methods.split(",") if name.strip()),
        seeds=seeds,
        selection=SelectConfig(
            search=config_of(search_recipe, common, [*more, *(search_settings or ())]),
            removal=style,
            images=images,
            candidates=candidates,  # type: ignore[arg-type]
            explores=explore,
        ),
        recovery=config_of(recipe, given, settings),
        collection=CollectConfig(recovery=config_of("brief", common, more), removal=style, images=images),
    )
    opened = open_data(data, root=data_root, download=download)
    with seeded(config.recovery.training.seed):  # random weights too are the same in all processes
        network = open_model(model, weights=weights, pretrained=pretrained, num_classes=num_classes, img_size=img_size)
    with stages(quiet or as_json) as (move, say):
        place = Execution(device=device, workers=workers_of(workers), minutes=minutes, batch=batch, progress=move)
        for done in compare_into(
            out, network, opened, config, place, samples=read_samples(samples, network) if samples else None
        ):
            if not as_json:
                say(_line(done))
    found = read_comparison(out)
    if as_json:
        return print_json(directory=str(out), **found.to_dict())
    _print(found)
    note_random_weights(model, weights, pretrained)
    typer.echo(f"written to {out}: {RESULTS}, {TABLE}, {FIGURE}; the layers are in {out / PLANS}")


def _line(done: ComparisonDone | SampleDone) -> str:
    from hetdpt.flow.comparison.work import Cell, Chosen, Timed
    from hetdpt.selection.predictor.samples import SampleStep

    by = "" if done.is_own else " (done before, or by another process)"
    outcome = done.result
    if isinstance(outcome, SampleStep):
        return f"sample with {done.subject}: {outcome.accuracy:.2f} % of images held out{by}"
    cell = done.subject if isinstance(done.subject, Cell) else None
    about = f"{cell.layers} layers, {cell.method}, seed {cell.seed}" if cell else "dense"
    if isinstance(outcome, Timed):
        return f"timed: {len(outcome.plans)} models on {outcome.measured}{by}"
    if isinstance(outcome, Chosen):
        plan = outcome.plan
        return f"{about}: attention {_blocks(plan.attention)}, activation {_blocks(plan.activation)} go{by}"
    if cell is None:
        return f"{about}: accuracy {outcome.accuracy:.2f} %{by}"
    if outcome.method != cell.method:
        by = f" (the model of {outcome.method}, which chose the same)"
    return f"{about}: {outcome.start:.2f} -> {outcome.accuracy:.2f} %{by}"


def _blocks(blocks: tuple[int, ...]) -> str:
    return " ".join(map(str, blocks)) or "none"


def _print(found: MethodComparison) -> None:
    dense = found.dense
    typer.echo(
        f"dense: accuracy {percent(dense.accuracy)} of {dense.images} images, {amount(dense.macs)} MACs, "
        f"{dense.throughput:.4g} img/s ({found.measured})"
    )
    columns = ("split", "before", "accuracy", "spread", f"to {found.first} [95 %]", "speedup", "MACs", "seconds")
    rows = table("same fine-tuning for all", "layers", "method", *columns)
    for one in found.summaries:
        spread = f"{one.spread:.2f}" if one.spread is not None else "-"
        numbers = f"{one.start:.2f}", f"{one.accuracy:.2f}", spread, _spell(one.difference)
        costs = times(one.speedup, 3, "x"), percent(100 * one.macs, 0), f"{one.seconds:.0f}"
        rows.add_row(str(one.layers), one.method, ", ".join(one.splits), *numbers, *costs)
    print_(rows)
    for warning in found.warnings:
        typer.echo(f"warning: {warning}", err=True)


def _spell(difference: Difference | None) -> str:
    if difference is None:
        return "-"
    return estimate(signed(difference.value), difference.low, difference.high, signed)
