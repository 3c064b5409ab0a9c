"""Commands on a model as it is: inspect, bench, apply, export, push, demo."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from hetdpt.cli.options import (
    Batch,
    Classes,
    DataRoot,
    Device,
    ImgSize,
    Json,
    Model,
    Overwrite,
    PlanName,
    Pretrained,
    Quiet,
    Runs,
    Weights,
    read_plan,
    with_removal,
)
from hetdpt.cli.show import (
    note_random_weights,
    print_breakdown,
    print_costs,
    print_json,
    print_sites,
    print_speed,
    progress,
)
from hetdpt.core.plan import Plan
from hetdpt.export.runtimes import SUFFIXES, runtime_of


def inspect(
    model: Model,
    plan: Annotated[str | None, typer.Option(help="A plan whose removals and costs to show.")] = None,
    latency: Annotated[bool, typer.Option("--latency", help="Measure what each site's removal saves here.")] = False,
    weights: Weights = None,
    num_classes: Classes = None,
    img_size: ImgSize = None,
    batch: Batch = None,
    device: Device = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Show the blocks of a model, what can be removed, and what it costs before and after."""
    from hetdpt.core.modules import clone, find_device
    from hetdpt.export.saved import open_model
    from hetdpt.measurement.costs import Costs
    from hetdpt.measurement.speed import latency_table
    from hetdpt.surgery.merge import merge_
    from hetdpt.surgery.record import sites, survey_of
    from hetdpt.surgery.remove import place_

    chosen, place = read_plan(plan) if plan else Plan(), find_device(device)
    network = open_model(model, weights=weights, num_classes=num_classes, img_size=img_size, is_empty=not latency)
    found = survey_of(network)
    left = sites(network)
    costs = {"dense": Costs.of(network, found.input_size)}
    if len(chosen):
        costs["pruned"] = Costs.of(merge_(place_(clone(network), chosen)), found.input_size)
    table = None
    if latency:
        network.to(place)
        with progress("timing", quiet or as_json) as move:
            table = latency_table(network, batch=batch, progress=move)
    if as_json:
        return print_json(
            model=model,
            blocks=found.anatomy.blocks,
            input_size=found.input_size,
            sites=[{**asdict(site), "removed": chosen.removes(site)} for site in left],
            refusals=found.refusals,
            costs={name: asdict(cost) for name, cost in costs.items()},
            latency=asdict(table) if table else None,
        )
    print_sites(left, chosen, table)
    for refusal in found.refusals:
        typer.echo(f"not offered: {refusal}")
    print_costs(costs)
    if table:
        print_breakdown(table)


def bench(
    model: Model,
    plan: PlanName,
    weights: Weights = None,
    num_classes: Classes = None,
    img_size: ImgSize = None,
    batch: Batch = None,
    device: Device = None,
    runs: Runs = 100,
    seconds: Annotated[float | None, typer.Option(help="Stop early after this time.")] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Measure the speedup of a plan on this machine, dense and pruned taking turns."""
    from hetdpt.core.modules import clone, find_device
    from hetdpt.export.saved import open_model
    from hetdpt.measurement.costs import Costs
    from hetdpt.measurement.speed import measure_throughput
    from hetdpt.surgery.merge import merge_
    from hetdpt.surgery.record import survey_of
    from hetdpt.surgery.remove import place_

    chosen = read_plan(plan)
    place = find_device(device)
    dense = open_model(model, weights=weights, num_classes=num_classes, img_size=img_size).to(place)
    size = survey_of(dense).input_size
    models = {"dense": dense, "pruned": merge_(place_(clone(dense), chosen))}
    costs = {name: Costs.of(network, size) for name, network in models.items()}
    with progress("timing", quiet or as_json) as move:
        result = measure_throughput(models, size, batch=batch, runs=runs, seconds=seconds, progress=move)
    if as_json:
        return print_json(
            throughput={name: asdict(value) for name, value in result.throughput.items()},
            speedup=asdict(result.speedup["pruned"]),
            mac_ratio=costs["dense"].macs / costs["pruned"].macs,
        )
    print_costs(costs)
    print_speed(result, costs)


def apply(
    model: Model,
    plan: PlanName,
    out: Annotated[Path, typer.Option(help="Directory to write.")],
    weights: Weights = None,
    pretrained: Pretrained = False,
    num_classes: Classes = None,
    img_size: ImgSize = None,
    data: Annotated[str | None, typer.Option(help="Images, without labels, to fit calibrated removal on.")] = None,
    data_root: DataRoot = None,
    images: Annotated[int, typer.Option(min=1, help="How many of them to use.")] = 256,
    removal: Annotated[
        str | None, typer.Option(help="What takes their place: calibrated where there are images, else plain.")
    ] = None,
    device: Device = None,
    fold_norms: Annotated[bool, typer.Option("--fold-norms", help="Fold LayerNorm into merged layers too.")] = False,
    overwrite: Overwrite = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Remove the layers of a plan, merge what became linear, and save the smaller model."""
    from hetdpt.adapters.preprocessing import preprocessing_of
    from hetdpt.core.modules import clone, find_device
    from hetdpt.data.fixed_batches import ImageBatches
    from hetdpt.data.images import open_images
    from hetdpt.export.saved import RECIPE, open_model, save
    from hetdpt.measurement.agreement import relative_difference
    from hetdpt.measurement.costs import Costs
    from hetdpt.store.atomic import require_new
    from hetdpt.surgery.calibrate import calibrate_
    from hetdpt.surgery.merge import merge_
    from hetdpt.surgery.record import survey_of
    from hetdpt.surgery.remove import prune_

    require_new(out, overwrite, RECIPE)
    chosen, place = with_removal(read_plan(plan), removal, "calibrated" if data else "plain"), find_device(device)
    dense = open_model(model, weights=weights, pretrained=pretrained, num_classes=num_classes, img_size=img_size)
    size = survey_of(dense).input_size
    if data and chosen.fitted:
        dense.to(place)
        batches = ImageBatches(open_images(data, root=data_root), preprocessing_of(dense), count=images)
        with progress("calibrating", quiet or as_json) as move:
            pruned = calibrate_(clone(dense), chosen, batches, progress=move).cpu()
        dense.cpu()
    else:
        pruned = prune_(clone(dense), chosen)
    merged = merge_(clone(pruned), fold_norms)
    difference = relative_difference(pruned, merged, size)
    costs = {"dense": Costs.of(dense, size), "pruned": Costs.of(merged, size)}
    save(merged, out, overwrite=overwrite)
    if as_json:
        rows = {name: asdict(cost) for name, cost in costs.items()}
        return print_json(directory=str(out), costs=rows, merge_difference=difference)
    print_costs(costs)
    typer.echo(f"merging changed the outputs by {difference:.1e} of the largest one (float rounding)")
    note_random_weights(model, weights, pretrained)
    typer.echo(f"saved to {out}; load it with hetdpt.load({str(out)!r})")


def export(
    directory: Annotated[str, typer.Argument(help="A saved directory (or a model's name).")],
    out: Annotated[Path, typer.Option(help=f"File to write; its ending says what for: {SUFFIXES}.")],
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Write a saved model for another runtime, with a dynamic batch, and compare that with torch."""
    from hetdpt.export.exported import export_model
    from hetdpt.export.saved import open_model

    result = export_model(open_model(directory), out, overwrite=overwrite)
    if as_json:
        return print_json(**{**asdict(result), "path": str(result.path)})
    size = out.stat().st_size / 2**20
    typer.echo(
        f"wrote {out} ({size:.1f} MiB); {runtime_of(out).runner} differs from torch by at most "
        f"{result.largest_difference:.1e}"
    )


def push(
    directory: Annotated[Path, typer.Argument(help="A saved directory.")],
    repo: Annotated[str, typer.Argument(help="user/name on the hub.")],
    private: Annotated[bool, typer.Option("--private", help="Make a new repository private.")] = False,
) -> None:
    """Upload a saved model to the HuggingFace hub."""
    from hetdpt.export.hub import push_to_hub

    typer.echo(push_to_hub(directory, repo, private=private))
