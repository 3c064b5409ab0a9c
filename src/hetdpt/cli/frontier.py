"""The command frontier: the least damage at every speed, without labels and without training."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hetdpt.cli.command import option
from hetdpt.cli.options import DeviceOptions, ImageOptions, ModelOptions, OutputOptions
from hetdpt.cli.show import print_, print_json, table
from hetdpt.core.format import times

if TYPE_CHECKING:
    from hetdpt.results import FrontierPoint, FrontierResult


class FrontierOptions(ModelOptions, ImageOptions, DeviceOptions, OutputOptions):
    out: Path
    """Run directory; the same command resumes an interrupted run, or shares a running one."""
    speedup: Any = option("FrontierConfig.speedup", least=1)
    moves: Any = option("FrontierConfig.moves")


def frontier(options: FrontierOptions) -> None:
    """Find the least damage at every speed, by all that can be removed; no labels, no training."""
    from hetdpt.core.modules import find_device
    from hetdpt.flow.frontier import FrontierConfig, frontier_into, is_begun
    from hetdpt.results import to_json

    config = FrontierConfig(**options.settings("FrontierConfig"))
    source = options.open_source()
    network = options.open_model(options.seed).to(find_device(options.device))
    with options.live() as display:
        batches, judge = options.read(source, network, display.say)
        if is_begun(options.out):
            display.say(f"resuming {options.out}")

        def watch(point: FrontierPoint, speedup: float) -> None:
            display.say(f"{times(speedup)}, damage {point.damage:.3g}: {', '.join(point.moves)}")

        found = frontier_into(options.out, network, batches, judge, config, watch=watch, progress=display.step)
    if options.as_json:
        return print_json(directory=str(options.out), **to_json(found))
    _print(found, options, config.speedup)
    options.note_random_weights()


def _print(found: FrontierResult, options: FrontierOptions, wanted: float) -> None:
    from hetdpt.flow.frontier import plan_file

    rows = table("the least damage at every speed", "speedup", "damage", "attention", "activation", "tail", "features")
    for point in found.points:
        plan = point.plan
        kept = f"{len(plan.features)} FFNs narrowed" if plan.features else "-"
        blocks = (" ".join(map(str, getattr(plan, kind))) or "-" for kind in ("attention", "activation"))
        rows.add_row(times(found.speedup(point)), f"{point.damage:.4g}", *blocks, str(plan.tail or "-"), kept)
    print_(rows)
    click.echo(f"speedups by the times of single layers ({found.measured}); damage on {found.images['judge']} images")
    if not found.points:
        return click.echo("note: nothing can be removed from this model")
    if found.speedup(found.points[-1]) < wanted:
        click.echo(f"note: {times(wanted)} was not reached; nothing more can be removed")
    file = f"{options.out}/{plan_file(found, len(found.points) - 1)}"
    click.echo(f"to use a point: hetdpt apply {options.model} --plan {file} --data {options.data} --out fast")
