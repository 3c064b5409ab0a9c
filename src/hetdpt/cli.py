"""The command line: parse, call, print. torch is imported by the commands that need it, not by ``--help``."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hetdpt.errors import HetDPTError, PlanError
from hetdpt.plan import Plan
from hetdpt.published import PREFIX, published_plan

if TYPE_CHECKING:
    from hetdpt.measurement.costs import Costs
    from hetdpt.measurement.speed import Comparison, LatencyTable

app = typer.Typer(
    help="Make Vision Transformers faster by removing attention layers and FFN activations.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

Model = Annotated[
    str, typer.Argument(help="A timm name, hf:NAME (hub name, directory or model type), or a saved directory.")
]
PlanName = Annotated[
    str, typer.Option("--plan", help="A JSON file, or a plan of the paper such as paper/deit_base-10.")
]
Weights = Annotated[Path | None, typer.Option(help="Checkpoint (.safetensors or .pth) that fits the model exactly.")]
Pretrained = Annotated[bool, typer.Option("--pretrained", help="Download the library's own weights.")]
Classes = Annotated[int | None, typer.Option("--num-classes", min=1, help="Number of classes of the head.")]
ImgSize = Annotated[int | None, typer.Option("--img-size", min=1, help="Side of the images in pixels.")]
Batch = Annotated[int | None, typer.Option(min=1, help="Images per batch: 256 on a GPU, 8 on a CPU by default.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1 or mps: the fastest there is by default.")]
Runs = Annotated[int, typer.Option(min=1, help="Rounds in which each model runs once.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress bar.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace what is there.")]

WIDE = 200  # columns of a file or pipe, so that no path in a table is broken


def main() -> None:
    """Run the command line; a foreseeable failure is one sentence on stderr and exit code 2."""
    try:
        app()
    except (HetDPTError, OSError) as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(2)


@app.callback(invoke_without_command=True)
def _version(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        from hetdpt import __version__

        typer.echo(f"hetdpt {__version__}")
        raise typer.Exit


@app.command()
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
    from hetdpt.export.saved import open_model
    from hetdpt.measurement.costs import Costs
    from hetdpt.measurement.speed import find_device, latency_table
    from hetdpt.modules import clone
    from hetdpt.surgery import merge_, prune_, sites, survey_of

    chosen = _read_plan(plan) if plan else Plan()
    network = open_model(model, weights=weights, num_classes=num_classes, img_size=img_size, is_empty=not latency)
    found = survey_of(network)
    left = sites(network)
    costs = {"dense": Costs.of(network, found.input_size)}
    if len(chosen):
        costs["pruned"] = Costs.of(merge_(prune_(clone(network), chosen)), found.input_size)
    table = None
    if latency:
        network.to(find_device(device))
        with _progress("timing", quiet or as_json) as progress:
            table = latency_table(network, batch=batch, progress=progress)
    if as_json:
        return _print_json(
            model=model,
            blocks=found.anatomy.blocks,
            input_size=found.input_size,
            sites=[{**asdict(site), "removed": chosen.removes(site)} for site in left],
            refusals=found.refusals,
            costs={name: asdict(cost) for name, cost in costs.items()},
            latency=asdict(table) if table else None,
        )
    _print_sites(left, chosen, table)
    for refusal in found.refusals:
        typer.echo(f"not offered: {refusal}")
    _print_costs(costs)
    if table:
        _print_breakdown(table)


@app.command()
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
    from hetdpt.export.saved import open_model
    from hetdpt.measurement.costs import Costs
    from hetdpt.measurement.speed import find_device, measure_throughput
    from hetdpt.modules import clone
    from hetdpt.surgery import merge_, prune_, survey_of

    chosen = _read_plan(plan)
    place = find_device(device)
    dense = open_model(model, weights=weights, num_classes=num_classes, img_size=img_size).to(place)
    size = survey_of(dense).input_size
    models = {"dense": dense, "pruned": merge_(prune_(clone(dense), chosen))}
    costs = {name: Costs.of(network, size) for name, network in models.items()}
    with _progress("timing", quiet or as_json) as progress:
        result = measure_throughput(models, size, batch=batch, runs=runs, seconds=seconds, progress=progress)
    if as_json:
        return _print_json(
            throughput={name: asdict(value) for name, value in result.throughput.items()},
            speedup=asdict(result.speedup["pruned"]),
            mac_ratio=costs["dense"].macs / costs["pruned"].macs,
        )
    _print_costs(costs)
    _print_speed(result, costs)


@app.command()
def apply(
    model: Model,
    plan: PlanName,
    out: Annotated[Path, typer.Option(help="Directory to write.")],
    weights: Weights = None,
    pretrained: Pretrained = False,
    num_classes: Classes = None,
    img_size: ImgSize = None,
    fold_norms: Annotated[bool, typer.Option("--fold-norms", help="Fold LayerNorm into merged layers too.")] = False,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Remove the layers of a plan, merge what became linear, and save the smaller model."""
    from hetdpt.adapters.models import HF_PREFIX
    from hetdpt.export.saved import RECIPE, open_model, save
    from hetdpt.files import require_new
    from hetdpt.measurement.agreement import relative_difference
    from hetdpt.measurement.costs import Costs
    from hetdpt.modules import clone
    from hetdpt.surgery import merge_, prune_, survey_of

    require_new(out, overwrite, RECIPE)
    chosen = _read_plan(plan)
    dense = open_model(model, weights=weights, pretrained=pretrained, num_classes=num_classes, img_size=img_size)
    size = survey_of(dense).input_size
    pruned = prune_(clone(dense), chosen)
    merged = merge_(clone(pruned), fold_norms)
    difference = relative_difference(pruned, merged, size)
    costs = {"dense": Costs.of(dense, size), "pruned": Costs.of(merged, size)}
    save(merged, out, overwrite=overwrite)
    if as_json:
        rows = {name: asdict(cost) for name, cost in costs.items()}
        return _print_json(directory=str(out), costs=rows, merge_difference=difference)
    _print_costs(costs)
    typer.echo(f"merging changed the outputs by {difference:.1e} of the largest one (float rounding)")
    if not (weights or pretrained or Path(model.removeprefix(HF_PREFIX)).is_dir()):
        typer.echo("note: the weights are random; give --weights FILE or --pretrained for a model that sees anything")
    typer.echo(f"saved to {out}; load it with hetdpt.load({str(out)!r})")


@app.command()
def export(
    directory: Annotated[str, typer.Argument(help="A saved directory (or a model's name).")],
    out: Annotated[Path, typer.Option(help="ONNX file to write.")],
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Write a saved model as ONNX with a dynamic batch and compare it with ONNX Runtime."""
    from hetdpt.export.onnx import export_onnx
    from hetdpt.export.saved import open_model

    result = export_onnx(open_model(directory), out, overwrite=overwrite)
    if as_json:
        return _print_json(**{**asdict(result), "path": str(result.path)})
    size = out.stat().st_size / 2**20
    typer.echo(
        f"wrote {out} ({size:.1f} MiB); ONNX Runtime differs from torch by {result.largest_difference:.1e} at most"
    )


@app.command()
def push(
    directory: Annotated[Path, typer.Argument(help="A saved directory.")],
    repo: Annotated[str, typer.Argument(help="user/name on the hub.")],
    private: Annotated[bool, typer.Option("--private", help="Make a new repository private.")] = False,
) -> None:
    """Upload a saved model to the HuggingFace hub."""
    from hetdpt.export.hub import push_to_hub

    typer.echo(push_to_hub(directory, repo, private=private))


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Directory to write the pruned model to.")] = Path("runs/demo"),
    runs: Runs = 20,
    quiet: Quiet = False,
) -> None:
    """Take the paper's DeiT-S plan (8 layers) through inspect, merge, bench, save and load."""
    from hetdpt.demo import MODEL, PLAN, demonstrate

    typer.echo(f"{MODEL} under {PLAN} (random weights: speed and size, not accuracy)")
    with _progress("timing", quiet) as progress:
        found = demonstrate(out, runs, progress)
    _print_sites(found.sites, found.plan, None)
    costs = {"dense": found.dense, "pruned": found.pruned}
    _print_costs(costs)
    _print_speed(found.speed, costs)
    typer.echo(f"merging changed the outputs by {found.merge_difference:.1e} of the largest one")
    typer.echo(f"saved to {found.directory} and loaded again: difference {found.reload_difference:.1e}")


def _read_plan(name: str) -> Plan:
    if name.startswith(PREFIX):
        return published_plan(name)
    try:
        plan = Plan.from_json(Path(name).read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(
            f"the plan {name} cannot be read: {error}; give a JSON file or a name such as paper/deit_base-10"
        ) from None
    if not len(plan):
        raise PlanError(f"the plan {name} removes nothing; list block numbers under 'attention' or 'activation'")
    return plan


def _print_json(**values: Any) -> None:
    typer.echo(json.dumps(values, indent=1))


@contextmanager
def _progress(title: str, is_quiet: bool) -> Iterator[Callable[[int, int], None] | None]:
    """Give a function that moves a progress bar with the time left; None when nobody watches."""
    if is_quiet or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _table(title: str, *columns: str) -> Any:
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", overflow="fold")
    return table


def _print(table: Any) -> None:
    from rich.console import Console

    Console(width=None if sys.stdout.isatty() else WIDE).print(table)


def _print_costs(costs: dict[str, Costs]) -> None:
    table = _table("costs of one image", "", "params", "MACs", "MACs without attention products")
    for name, cost in costs.items():
        numbers = (cost.params / 1e6, cost.macs / 1e9, cost.macs_without_attention_products / 1e9)
        table.add_row(name, f"{numbers[0]:.2f} M", f"{numbers[1]:.2f} G", f"{numbers[2]:.2f} G")
    _print(table)
    if len(costs) == 2:
        dense, pruned = costs.values()
        typer.echo(f"{dense.macs / pruned.macs:.3f}x fewer MACs, {dense.params / pruned.params:.3f}x fewer parameters")


def _print_speed(speed: Comparison, costs: dict[str, Costs]) -> None:
    for name, value in speed.throughput.items():
        typer.echo(f"{name}: {value}")
    fewer = costs["dense"].macs / costs["pruned"].macs
    typer.echo(f"speedup {speed.speedup['pruned']} measured, {fewer:.3f}x fewer MACs")


def _print_sites(sites: list[Any], plan: Plan, latency: LatencyTable | None) -> None:
    saved = {saving.site.path: f"{saving.saved.value:.2f}" for saving in latency.savings} if latency else {}
    extra = ["saves ms"] if latency else []
    table = _table("sites", "block", "attention", *extra, "activation", *extra)
    for block in sorted({site.block for site in sites}):
        row = [str(block)]
        for kind in ("attention", "activation"):
            site = next((s for s in sites if (s.kind, s.block) == (kind, block)), None)
            row.append(_cell(site, plan))
            row += [saved.get(site.path, "") if site else ""] if latency else []
        table.add_row(*row)
    _print(table)


def _cell(site: Any, plan: Plan) -> str:
    if site is None:
        return "-"
    note = " (gated FFN)" if site.is_gated else ""
    return f"{site.path}{note}{' REMOVED' if plan.removes(site) else ''}"


def _print_breakdown(latency: LatencyTable) -> None:
    typer.echo(str(latency.dense))  # as a title it would be broken to the width of the table
    table = _table("where it goes", "kind of layer", "ms", "share")
    total = sum(value.value for value in latency.breakdown.values())
    for kind, value in latency.breakdown.items():
        table.add_row(kind, f"{value.value:.2f}", f"{100 * value.value / total:.0f} %")
    _print(table)
