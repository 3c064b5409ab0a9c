"""The command observe: the two observations of the paper on any model."""

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
    workers_of,
)
from hetdpt.cli.show import note_random_weights, print_, print_json, stages, table
from hetdpt.core.errors import PlanError
from hetdpt.core.plan import KINDS, Kind

if TYPE_CHECKING:
    from hetdpt.results import Observations
    from hetdpt.studies.observe import Observed
    from hetdpt.surgery.record import Removal


def observe(
    context: typer.Context,
    model: Model,
    data: DataName,
    out: Annotated[
        Path, typer.Option(help="Run directory; processes that share it share the work, kills lose little.")
    ],
    blocks: Annotated[
        str | None, typer.Option(help="Blocks whose layers are removed, each alone, such as 0,3,6; all by default.")
    ] = None,
    removal: Annotated[
        list[str] | None, typer.Option(help="plain, calibrated, ...; may be repeated, those two by default.")
    ] = None,
    no_recovery: Annotated[bool, typer.Option("--no-recovery", help="Gradients alone; no layer is removed.")] = False,
    gradient_epochs: Annotated[int, typer.Option(min=1, help="Epochs in which gradients are taken down.")] = 1,
    images: Annotated[int, typer.Option(min=2, help="Training images to fit replacements on.")] = 256,
    weights: Weights = None,
    pretrained: Pretrained = False,
    num_classes: Classes = None,
    img_size: ImgSize = None,
    data_root: DataRoot = None,
    download: Download = False,
    recipe: RecipeName = "brief",
    epochs: Epochs = None,
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
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Observe how attention and activation differ: gradients, and accuracy without each, before and after training."""
    from hetdpt.core.randomness import seeded
    from hetdpt.data.sources import open_data
    from hetdpt.export.saved import open_model
    from hetdpt.flow.execution import Execution
    from hetdpt.studies.observe import ObserveConfig, observe_into, read_results

    if no_recovery and blocks is not None:
        raise PlanError("--no-recovery removes no layer, but --blocks says from where; leave one of them out")
    wanted = "block numbers counted from 0, such as 0,3,6"
    chosen = read_numbers("--blocks", wanted, blocks) if blocks is not None else None
    config = ObserveConfig(
        recovery=config_of(recipe, given_settings(context), settings),
        removals=tuple(map(read_removal, removal)) if removal else ObserveConfig.removals,
        blocks=() if no_recovery else chosen,
        images=images,
        gradient_epochs=gradient_epochs,
    )
    opened = open_data(data, root=data_root, download=download)
    with seeded(config.recovery.training.seed):  # random weights too are the same in all processes
        network = open_model(model, weights=weights, pretrained=pretrained, num_classes=num_classes, img_size=img_size)
    with stages(quiet or as_json) as (move, say):
        place = Execution(device=device, workers=workers_of(workers), minutes=minutes, progress=move)
        for one in observe_into(out, network, opened, config, place):
            if not as_json:
                say(_line(one))
    found = read_results(out)
    if as_json:
        return print_json(directory=str(out), **found.to_dict())
    for each in found.removals:
        _print(found, each)
    note_random_weights(model, weights, pretrained)
    typer.echo(f"written to {out}: results.json, results.csv, results.png")


def _line(one: Observed) -> str:
    from hetdpt.core.format import removal_text
    from hetdpt.results import Asymmetry, Disparity

    result, by = one.result, "" if one.is_own else " (done before, or by another process)"
    if isinstance(result, Disparity):
        medians = ", ".join(f"{kind} {_short(result.magnitude(kind))}" for kind in KINDS)
        return f"{removal_text(result.removal)}, gradients: {medians}{by}"
    if isinstance(result, Asymmetry):
        accuracies = " -> ".join(f"{accuracy:.2f}" for accuracy in result.accuracies)
        return f"{removal_text(result.removal)}, without {result.site.kind} {result.site.block}: {accuracies} %{by}"
    return f"dense: accuracy {result.accuracy:.2f} %{by}"


def _short(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _print(found: Observations, removal: Removal) -> None:
    """Print a table of the blocks, and a sentence for each observation."""
    from hetdpt.core.format import removal_text

    after = f"{found.epochs} epoch{'s' * (found.epochs > 1)}"
    columns = ["|gradient|", "removed", f"after {after}"] if found.asymmetries else ["|gradient|"]
    title = f"{removal_text(removal)}: gradients, and accuracy in % without the layer"
    rows = table(title, "block", *(f"{kind}\n{column}" for kind in KINDS for column in columns))
    cells = {kind: _cells(found, removal, kind) for kind in KINDS}
    for block in sorted({block for of in cells.values() for block in of}):
        lines = [cells[kind].get(block, ["-"] * len(columns)) for kind in KINDS]
        rows.add_row(str(block), *(cell for line in lines for cell in line[: len(columns)]))
    print_(rows)
    for sentence in (_gradients(found, removal), _drops(found, removal, after)):
        if sentence:
            typer.echo(f"{removal_text(removal)}: {sentence}")


def _cells(found: Observations, removal: Removal, kind: Kind) -> dict[int, list[str]]:
    """Return, by block, the gradient, the accuracy right after the removal and the last one."""
    cells: dict[int, list[str]] = {}
    disparity = found.disparity(removal)
    for layer in disparity.layers if disparity else ():
        if layer.site.kind == kind:
            cells[layer.site.block] = [_short(layer.magnitude), "-", "-"]
    for row in found.of(removal, kind):
        ends = [f"{row.accuracies[0]:.2f}", f"{row.accuracies[-1]:.2f}"]
        cells[row.site.block] = [*cells.get(row.site.block, ["-"])[:1], *ends]
    return cells


def _gradients(found: Observations, removal: Removal) -> str | None:
    one = found.disparity(removal)
    if one is None or one.ratio() is None:
        return None
    medians = " and ".join(_short(one.magnitude(kind)) for kind in reversed(KINDS))
    each = [_short(one.ratio(epoch)) for epoch in range(one.epochs)]
    by_epoch = f", by epoch {', '.join(each)}" if len(each) > 1 else ""
    return (
        f"gradients of activations are {_short(one.ratio())} times those of attention{by_epoch} ({medians}, medians "
        f"over blocks of the mean |gradient| of {one.epochs * one.updates} updates of {one.batch} images)"
    )


def _drops(found: Observations, removal: Removal, after: str) -> str | None:
    drops = {kind: found.drops(removal, kind) for kind in KINDS}
    first, last = (
        " and ".join(f"{each[end]:.2f} without {kind}" for kind, each in drops.items() if each) for end in (0, -1)
    )
    if not first:
        return None
    return f"points lost of {found.dense:.2f} %, medians over blocks: {first}; after {after} {last}"
