"""The command collect: samples of how accuracy depends on the layers removed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hetdpt.cli.options import (
    Batch,
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
    read_rounds,
    workers_of,
)
from hetdpt.cli.show import note_random_weights, print_, print_json, stages, table

if TYPE_CHECKING:
    from hetdpt.flow.collection.work import SampleDone


def collect(
    context: typer.Context,
    model: Model,
    data: DataName,
    out: Annotated[
        Path, typer.Option(help="Run directory; processes that share it share the work, kills lose little.")
    ],
    chain: Annotated[
        str | None, typer.Option(help="Only one chain: attention, activation or interleaved; all by default.")
    ] = None,
    rounds: Annotated[
        str | None, typer.Option(help="Of the three chains, such as 8,8,3 (the default for 12 blocks); more go on.")
    ] = None,
    removal: Annotated[str | None, typer.Option(help="plain, calibrated, ...; by default as the recipe says.")] = None,
    images: Annotated[int, typer.Option(min=2, help="Training images to choose layers and fit replacements on.")] = 256,
    weights: Weights = None,
    pretrained: Pretrained = False,
    num_classes: Classes = None,
    img_size: ImgSize = None,
    data_root: DataRoot = None,
    download: Download = False,
    recipe: RecipeName = "brief",
    epochs: Annotated[
        int | None, typer.Option(min=0, help="Of the fine-tuning after each removal, 0 for none; as the recipe says.")
    ] = None,
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
    """Sample accuracy: remove a layer, fine-tune briefly, evaluate, and again; hetdpt predict makes a budget of it."""
    from hetdpt.core.randomness import seeded
    from hetdpt.data.sources import open_data
    from hetdpt.export.saved import open_model
    from hetdpt.flow.collection.collect import collect_into
    from hetdpt.flow.execution import Execution
    from hetdpt.flow.recipes import recipe as recipe_called
    from hetdpt.selection.predictor.polynomial import FEWEST
    from hetdpt.selection.predictor.samples import CollectConfig

    given = given_settings(context)
    if epochs == 0:
        del given["training.epochs"]  # a longer run, if there is one, takes the recipe's
    config = CollectConfig(
        rounds=read_rounds(rounds) if rounds is not None else None,
        removal=read_removal(removal or recipe_called(recipe).removal),
        images=images,
        recovery=config_of(recipe, given, settings),
        fine_tunes=epochs != 0,
    )
    opened = open_data(data, root=data_root, download=download)
    with seeded(config.recovery.training.seed):  # random weights too are the same in all processes
        network = open_model(model, weights=weights, pretrained=pretrained, num_classes=num_classes, img_size=img_size)
    found: list[SampleDone] = []
    with stages(quiet or as_json) as (move, say):
        place = Execution(device=device, workers=workers_of(workers), minutes=minutes, batch=batch, progress=move)
        for done in collect_into(out, network, opened, config, place, chain=chain):  # type: ignore[arg-type]
            found.append(done)
            if not as_json:
                say(_line(done))
    if as_json:
        return print_json(directory=str(out), samples=[_record(done) for done in found])
    _print(found)
    note_random_weights(model, weights, pretrained)
    hint = f"; hetdpt predict {out} --layers 4 splits a budget" if len(found) >= FEWEST else ""
    typer.echo(f"written to {out}{hint}")


def _line(done: SampleDone) -> str:
    step = done.result
    if not step.kinds:
        return f"dense: accuracy {step.accuracy:.2f} %"
    gone = ", ".join(f"{pick.site.kind} {pick.site.block} (TE {pick.te:.3g})" for pick in step.picks)
    by = "" if done.is_own else " (done before, or by another process)"
    counts = f"{step.budget.attention}+{step.budget.activation}"
    return f"{done.subject.chain} {counts}: without {gone} {step.before:.2f} -> {step.accuracy:.2f} %{by}"


def _record(done: SampleDone) -> dict[str, Any]:
    return {"key": done.subject.key, "chain": done.subject.chain, "is_own": done.is_own, **done.result.to_dict()}


def _print(found: list[SampleDone]) -> None:
    rows = table("samples", "attention removed", "activation removed", "before", "accuracy", "layer", "seconds")
    for done in found:
        step = done.result
        layers = " ".join(f"{pick.site.kind} {pick.site.block}" for pick in step.picks)
        counts = str(step.budget.attention), str(step.budget.activation)
        rows.add_row(*counts, f"{step.before:.2f}", f"{step.accuracy:.2f}", layers, f"{step.seconds:.0f}")
    print_(rows)
