"""The command select: which layers go, by any method of the table."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hetdpt.cli.options import (
    BatchSize,
    Classes,
    DataName,
    DataRoot,
    Device,
    Download,
    Fraction,
    ImgSize,
    Json,
    Lr,
    Minutes,
    Model,
    Overwrite,
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
    read_removal,
    read_samples,
    workers_of,
)
from hetdpt.cli.show import is_first_process, note_random_weights, print_json, stages
from hetdpt.core.errors import PlanError
from hetdpt.core.plan import KINDS, Budget
from hetdpt.selection.methods import METHODS, method_called

if TYPE_CHECKING:
    from torch import nn

    from hetdpt.selection.importance import Picked
    from hetdpt.surgery.record import Removal

NAMES = ", ".join(METHODS)
Candidates = Annotated[
    str, typer.Option(help="Layers to search: all, or te (of each kind twice as many as go, by transfer entropy).")
]
Explore = Annotated[
    bool, typer.Option("--explore/--no-explore", help="Scan first, and try candidates closed; the paper does not.")
]


def select(
    context: typer.Context,
    model: Model,
    data: DataName,
    out: Annotated[Path, typer.Option(help="The plan to write, a JSON file; hetdpt recover --plan takes it.")],
    method: Annotated[str, typer.Option(help=f"How layers are chosen: {NAMES}.")] = "hetdpt",
    attention: Annotated[int | None, typer.Option(min=0, help="How many attention layers go.")] = None,
    activation: Annotated[int | None, typer.Option(min=0, help="How many activations go.")] = None,
    layers: Annotated[
        int | None, typer.Option(min=1, help="How many layers go in all; where the method splits, by --samples.")
    ] = None,
    samples: Annotated[
        Path | None, typer.Option(help="A CSV of samples, or a directory of hetdpt collect, to split --layers by.")
    ] = None,
    removal: Annotated[str | None, typer.Option(help="plain, calibrated, ...; by default as the recipe says.")] = None,
    images: Annotated[
        int, typer.Option(min=2, help="Training images to fit replacements and measure entropy and damage on.")
    ] = 256,
    candidates: Candidates = "all",
    explore: Explore = True,
    weights: Weights = None,
    pretrained: Pretrained = False,
    num_classes: Classes = None,
    img_size: ImgSize = None,
    data_root: DataRoot = None,
    download: Download = False,
    recipe: RecipeName = "search",
    epochs: Annotated[int | None, typer.Option(min=1, help="Passes over the training images in a search.")] = None,
    batch_size: BatchSize = None,
    lr: Lr = None,
    fraction: Fraction = None,
    per_class: PerClass = None,
    precision: Precision = None,
    seed: Seed = None,
    settings: Settings = None,
    workers: Workers = None,
    device: Device = None,
    minutes: Minutes = 10.0,
    overwrite: Overwrite = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Choose which layers go, and write them as a plan; hetdpt compare tries all methods."""
    from hetdpt.core.randomness import seeded
    from hetdpt.data.sources import open_data
    from hetdpt.export.saved import open_model
    from hetdpt.flow.recipes import recipe as recipe_called
    from hetdpt.flow.resumable import select_into
    from hetdpt.selection.select import SelectConfig
    from hetdpt.training.processes import start

    method_called(method)
    config = SelectConfig(
        search=config_of(recipe, given_settings(context), settings),
        removal=read_removal(removal or recipe_called(recipe).removal),
        images=images,
        candidates=candidates,  # type: ignore[arg-type]
        explores=explore,
    )
    processes = start(config.search.training.precision, device)
    with processes.local_main_process_first():  # one of them downloads
        opened = open_data(data, root=data_root, download=download)
    with seeded(config.search.training.seed):  # random weights too are the same in all processes
        network = open_model(model, weights=weights, pretrained=pretrained, num_classes=num_classes, img_size=img_size)
    budget = read_budget(method, (attention, activation), layers, samples, network, config.removal)
    found: list[Picked] = []
    with stages(quiet or as_json or not is_first_process()) as (move, say):

        def watch(picked: Picked) -> None:
            found.append(picked)
            if is_first_process() and not as_json:
                say(f"{len(found)}: {picked.site.kind} {picked.site.block} goes (score {picked.score:.4g})")

        plan = select_into(
            out,
            network,
            opened,
            budget,
            method,
            config,
            overwrite=overwrite,
            device=device,
            workers=workers_of(workers),
            minutes=minutes,
            watch=watch,
            progress=move,
        )
    if not is_first_process():
        return
    if as_json:
        picks = [{"kind": pick.site.kind, "block": pick.site.block, "score": pick.score} for pick in found]
        return print_json(method=method, plan={"attention": plan.attention, "activation": plan.activation}, picks=picks)
    for kind in KINDS:
        typer.echo(f"{kind} that goes, by {method}: {' '.join(map(str, getattr(plan, kind))) or 'none'}")
    note_random_weights(model, weights, pretrained)
    typer.echo(f"written to {out}; hetdpt recover {model} --plan {out} --data {data} --out RUN trains what is left")


def read_budget(
    method: str,
    split: tuple[int | None, int | None],
    layers: int | None,
    samples: Path | None,
    network: nn.Module,
    removal: Removal,
) -> Budget | int:
    """Return how many layers go: of each kind where both are known, else in all; ``PlanError`` for contradictions."""
    from hetdpt.selection.predictor.pricing import split_layers

    is_split = split != (None, None)
    if is_split == (layers is not None):
        raise PlanError(
            "say either how many of each kind go (--attention 2 --activation 3) or how many in all (--layers 5)"
        )
    if samples is not None and (is_split or method_called(method).split != "map"):
        raise PlanError(f"--samples split --layers between the kinds, but {method} has no such split; leave them out")
    if is_split:
        return Budget(split[0] or 0, split[1] or 0)
    assert layers is not None
    if samples is None:
        return layers
    allocation = split_layers(network, read_samples(samples, network), [layers], removal)[layers]
    for warning in allocation.warnings:
        typer.echo(f"warning: {warning}", err=True)
    typer.echo(f"split by the samples: {allocation.best}", err=True)
    return allocation.budget
