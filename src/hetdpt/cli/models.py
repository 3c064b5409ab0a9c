"""Commands on a single model: inspect, bench, apply, export, push."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from hetdpt.cli.command import Options, option
from hetdpt.cli.options import (
    DeviceOptions,
    JsonOptions,
    ModelOptions,
    OutputOptions,
    OverwriteOptions,
    TrimOptions,
    read_plan,
    with_removal,
)
from hetdpt.cli.show import print_breakdown, print_costs, print_json, print_sites, print_speed
from hetdpt.core.plan import Plan
from hetdpt.export.runtimes import SUFFIXES, runtime_of


class InspectOptions(ModelOptions, DeviceOptions, OutputOptions):
    plan: str | None = None
    """A plan whose removals and costs to show: a JSON file, or a plan of the paper such as paper/deit_base-10."""
    latency: bool = False
    """Measure how much time the removal of each layer saves."""
    batch: Any = option("RunConfig.batch", least=1, panel="Device")


def inspect(options: InspectOptions) -> None:
    """Show the blocks of a model, the layers that can be removed, and the costs before and after."""
    from hetdpt.core.modules import find_device
    from hetdpt.measurement.costs import Costs, plan_costs
    from hetdpt.measurement.speed import latency_table
    from hetdpt.surgery.record import sites, survey_of

    plan, device = read_plan(options.plan) if options.plan else Plan(), find_device(options.device)
    network = options.open_model(is_empty=not options.latency)
    found, offered = survey_of(network), sites(network)
    costs = {"dense": Costs.of(network, found.input_size)}
    if not plan.is_empty:
        costs |= {"pruned": plan_costs(network, plan, trim=False), "trimmed": plan_costs(network, plan)}
        if costs["trimmed"] == costs["pruned"]:
            del costs["trimmed"]
    table = None
    if options.latency:
        network.to(device)
        with options.live() as display:
            table = latency_table(network, batch=options.batch, progress=display.counter("timing"))
    if options.as_json:
        return print_json(
            model=options.model,
            blocks=found.anatomy.blocks,
            input_size=found.input_size,
            sites=[{**asdict(site), "removed": plan.removes(site)} for site in offered],
            refusals=found.refusals,
            costs={name: asdict(cost) for name, cost in costs.items()},
            latency=asdict(table) if table else None,
        )
    print_sites(offered, plan, table)
    for refusal in found.refusals:
        click.echo(f"not offered: {refusal}")
    print_costs(costs)
    if table:
        print_breakdown(table)


class BenchOptions(ModelOptions, DeviceOptions, TrimOptions, OutputOptions):
    plan: str
    """A JSON file, or a plan of the paper such as paper/deit_base-10."""
    batch: Any = option("RunConfig.batch", least=1, panel="Device")
    runs: Any = option("TokensConfig.runs", least=1, default=100)
    seconds: float | None = None
    """Stop early after this time."""


def bench(options: BenchOptions) -> None:
    """Measure the speedup of a plan on this machine; dense and pruned models take turns."""
    from hetdpt.core.modules import clone, find_device
    from hetdpt.measurement.costs import Costs
    from hetdpt.measurement.speed import measure_throughput
    from hetdpt.surgery.merge import merge_
    from hetdpt.surgery.record import survey_of
    from hetdpt.surgery.remove import place_, refuse_reductions
    from hetdpt.surgery.tail import trim_if_possible_

    plan, device = read_plan(options.plan), find_device(options.device)
    refuse_reductions(plan)
    dense = options.open_model().to(device)
    size = survey_of(dense).input_size
    models = {"dense": dense, "pruned": merge_(place_(clone(dense), plan))}
    why_not = trim_if_possible_(models["pruned"]) if options.trim else None
    costs = {name: Costs.of(network, size) for name, network in models.items()}
    rounds = {name: getattr(options, name) for name in ("batch", "runs", "seconds")}
    with options.live() as display:
        result = measure_throughput(models, size, **rounds, progress=display.counter("timing"))
    if options.as_json:
        return print_json(
            throughput={name: asdict(value) for name, value in result.throughput.items()},
            speedup=asdict(result.speedup["pruned"]),
            mac_ratio=costs["dense"].macs / costs["pruned"].macs,
        )
    print_costs(costs)
    print_speed(result, costs)
    if why_not:
        click.echo(why_not)


class ApplyOptions(ModelOptions, DeviceOptions, TrimOptions, OverwriteOptions, OutputOptions):
    plan: str
    """A JSON file, or a plan of the paper such as paper/deit_base-10."""
    out: Path
    """Directory to write."""
    data: str | None = None
    """Images, without labels, to fit calibrated removal on."""
    data_root: Any = option("RunConfig.data_root")
    images: int = option(least=1, default=256)
    """How many images to use."""
    removal: Any = option("RunConfig.removal", shows_default=False)
    """What replaces the layers: calibrated if there are images, else plain."""
    fold_norms: bool = False
    """Fold LayerNorm into merged layers too."""


def apply(options: ApplyOptions) -> None:
    """Remove the layers of a plan, merge what became linear, and save the smaller model."""
    from hetdpt.adapters.preprocessing import preprocessing_of
    from hetdpt.core.modules import clone, find_device
    from hetdpt.data.fixed_batches import ImageBatches
    from hetdpt.data.images import open_images
    from hetdpt.export.saved import RECIPE, save
    from hetdpt.measurement.agreement import relative_difference
    from hetdpt.measurement.costs import Costs
    from hetdpt.reduce.apply import apply_
    from hetdpt.store.atomic import require_new
    from hetdpt.surgery.merge import merge_
    from hetdpt.surgery.record import survey_of
    from hetdpt.surgery.remove import prune_
    from hetdpt.surgery.tail import trim_if_possible_

    data, out = options.data, options.out
    require_new(out, options.overwrite, RECIPE)
    plan = with_removal(read_plan(options.plan), options.removal, "calibrated" if data else "plain")
    device, dense = find_device(options.device), options.open_model()
    size = survey_of(dense).input_size
    if data and (plan.needs_images or plan.tokens):
        dense.to(device)
        batches = ImageBatches(open_images(data, root=options.data_root), preprocessing_of(dense), count=options.images)
        with options.live() as display:
            pruned = apply_(clone(dense), plan, batches, progress=display.counter("calibrating")).cpu()
        dense.cpu()
    else:
        pruned = prune_(clone(dense), plan)
    merged = merge_(clone(pruned), options.fold_norms)
    difference = relative_difference(pruned, merged, size)
    why_not = trim_if_possible_(merged) if options.trim else None
    costs = {"dense": Costs.of(dense, size), "pruned": Costs.of(merged, size)}
    save(merged, out, overwrite=options.overwrite)
    if options.as_json:
        rows = {name: asdict(cost) for name, cost in costs.items()}
        return print_json(directory=str(out), costs=rows, merge_difference=difference)
    print_costs(costs)
    click.echo(f"merging changed the outputs by {difference:.1e} of the largest one (float rounding)")
    if why_not:
        click.echo(why_not)
    options.note_random_weights()
    click.echo(f"saved to {out}; load it with hetdpt.load({str(out)!r})")


class ExportOptions(TrimOptions, OverwriteOptions, JsonOptions):
    directory: str = option(is_argument=True, is_required=True)
    """A saved directory, or the name of a model."""
    out: Path = option(is_required=True, help=f"File to write, in the format of its ending: {SUFFIXES}.")


def export(options: ExportOptions) -> None:
    """Write a saved model for another runtime, with a dynamic batch, and compare that with torch."""
    from hetdpt.export.exported import export_model
    from hetdpt.export.saved import open_model
    from hetdpt.surgery.tail import trim_if_possible_

    out, model = options.out, open_model(options.directory)
    why_not = trim_if_possible_(model) if options.trim else None
    result = export_model(model, out, overwrite=options.overwrite)
    if options.as_json:
        return print_json(**{**asdict(result), "path": str(result.path)})
    size = out.stat().st_size / 2**20
    click.echo(
        f"wrote {out} ({size:.1f} MiB); {runtime_of(out).runner} differs from torch by at most "
        f"{result.largest_difference:.1e}"
    )
    if why_not:
        click.echo(why_not)


class PushOptions(Options):
    directory: Path = option(is_argument=True, is_required=True)
    """A saved directory."""
    repo: str = option(is_argument=True, is_required=True)
    """USER/NAME on the hub."""
    private: bool = False
    """Make a new repository private."""


def push(options: PushOptions) -> None:
    """Upload a saved model to the Hugging Face hub."""
    from hetdpt.export.hub import push_to_hub

    click.echo(push_to_hub(options.directory, options.repo, private=options.private))
