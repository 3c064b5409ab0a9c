"""The command oneshot: a faster model from a few hundred images, without labels and without training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hetdpt.cli.options import (
    Classes,
    DataRoot,
    Device,
    Download,
    Images,
    ImgSize,
    Json,
    Model,
    Overwrite,
    Pretrained,
    Quiet,
    Weights,
    read_images,
    read_removal,
)
from hetdpt.cli.show import note_random_weights, print_, print_costs, print_json, print_speed, stages, table

if TYPE_CHECKING:
    from hetdpt.flow.oneshot import OneShot, OneShotStep


def oneshot(
    model: Model,
    data: Images,
    out: Annotated[Path, typer.Option(help="Directory to write; after a kill, the same command goes on.")],
    layers: Annotated[int | None, typer.Option(help="How many layers go.")] = None,
    speedup: Annotated[float | None, typer.Option(help="How much faster it is to be on this device.")] = None,
    weights: Weights = None,
    pretrained: Pretrained = False,
    num_classes: Classes = None,
    img_size: ImgSize = None,
    data_root: DataRoot = None,
    download: Download = False,
    images: Annotated[int, typer.Option(min=1, help="Images to fit replacements on.")] = 256,
    judge_images: Annotated[int, typer.Option(min=1, help="Other images, to measure damage on.")] = 128,
    batch_size: Annotated[int, typer.Option(min=1, help="Images per forward pass.")] = 32,
    removal: Annotated[
        str, typer.Option(help="plain, norm, authors, calibrated, or a pair such as linear,calibrated.")
    ] = "calibrated",
    kind: Annotated[str | None, typer.Option(help="The only kind to remove: attention or activation.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Which images.")] = 0,
    device: Device = None,
    workers: Annotated[int, typer.Option(min=0, help="Processes that read images.")] = 0,
    overwrite: Overwrite = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Remove the layers whose loss does the least damage, replaced by what fits them best; no labels, no training."""
    from hetdpt.core.modules import find_device
    from hetdpt.core.randomness import seeded
    from hetdpt.data.images import open_images
    from hetdpt.export.saved import RECIPE, open_model
    from hetdpt.flow.oneshot import oneshot_into, partial_of
    from hetdpt.selection.goal import OneShotConfig
    from hetdpt.store.atomic import require_new
    from hetdpt.store.run_directory import Run

    config = OneShotConfig(
        layers=layers,
        speedup=speedup,
        kind=kind,  # type: ignore[arg-type]  # the config says what it may be
        removal=read_removal(removal),
    )
    require_new(out, overwrite, RECIPE)
    source = open_images(data, root=data_root, download=download)
    with seeded(seed):  # random weights too are the same when it goes on
        network = open_model(model, weights=weights, pretrained=pretrained, num_classes=num_classes, img_size=img_size)
    network.to(find_device(device))
    with stages(quiet or as_json) as (move, say):
        tell = say if not as_json else _silent
        options = {"batch_size": batch_size, "seed": seed, "workers": workers}
        batches, judge = read_images(source, network, (images, judge_images), options, tell)
        if Run(partial_of(out)).is_begun:
            tell(f"going on with {partial_of(out)}")

        def watch(step: OneShotStep) -> None:
            tell(_line(step, is_speedup=speedup is not None))

        found = oneshot_into(out, network, batches, judge, config, overwrite=overwrite, watch=watch, progress=move)
    if as_json:
        return print_json(directory=str(out), **json.loads(found.to_json()))
    _print(found, out)
    note_random_weights(model, weights, pretrained)


def _silent(_: str) -> None:
    pass


def _line(step: OneShotStep, is_speedup: bool) -> str:
    site = step.choice.site
    text = f"{site.kind} {site.block}, damage {step.choice.damage:.3g}"
    if is_speedup:
        return f"{step.number}: {text}, {step.reached:.3f}x of {step.wanted:g}x by the time of each layer"
    return f"{step.number}/{step.wanted:.0f}: {text}"


def _print(found: OneShot, out: Path) -> None:
    fits = {(fit.kind, fit.block): fit for fit in found.plan.fits}
    rows = table("removed, in this order", "layer", "path", "style", "R^2", "damage so far")
    for choice in found.choices:
        site, fit = choice.site, fits.get((choice.site.kind, choice.site.block))
        r2 = f"{fit.r2:.3f}" if fit else "-"
        style = found.plan.style_of(site.kind).name
        rows.add_row(f"{site.kind} {site.block}", site.path, style, r2, f"{choice.damage:.4g}")
    print_(rows)
    print_costs(found.costs)
    print_speed(found.speed, found.costs)
    measured = found.speed.speedup["pruned"].value
    if found.wanted_speedup is not None and measured < found.wanted_speedup:
        typer.echo(f"note: a speedup of {found.wanted_speedup:g} was asked for; {measured:.3f} is what was reached")
    typer.echo(f"damage {found.damage:.4g} {found.damage_unit} on {found.images['judge']} images")
    typer.echo(f"saved to {out} after {found.seconds:.0f} s; load it with hetdpt.load({str(out)!r})")
