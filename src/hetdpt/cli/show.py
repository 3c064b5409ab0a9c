"""What commands print: JSON and tables."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hetdpt.core.format import amount, percent
from hetdpt.core.plan import Plan

if TYPE_CHECKING:
    from hetdpt.measurement.costs import Costs
    from hetdpt.measurement.speed import LatencyTable, ThroughputComparison
    from hetdpt.training.trainer import Epoch

WIDE = 200  # columns of a file or pipe, so that no path in a table is broken


def is_first_process() -> bool:
    """Whether this process is the one that prints; torchrun and accelerate number the processes."""
    return os.environ.get("RANK", "0") == "0"


def print_json(**values: Any) -> None:
    click.echo(json.dumps(values, indent=1))


def table(title: str, *columns: str) -> Any:
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", overflow="fold")
    return table


def print_(table: Any) -> None:
    from rich.console import Console

    Console(width=None if sys.stdout.isatty() else WIDE).print(table)


def print_costs(costs: dict[str, Costs]) -> None:
    rows = table("costs of one image", "", "params", "MACs", "MACs without attention products")
    for name, cost in costs.items():
        numbers = cost.params, cost.macs, cost.macs_without_attention_products
        rows.add_row(name, *(amount(number, 2) for number in numbers))
    print_(rows)
    if len(costs) > 1:
        dense, *_, pruned = costs.values()
        click.echo(f"{dense.macs / pruned.macs:.3f}x fewer MACs, {dense.params / pruned.params:.3f}x fewer parameters")


def print_speed(speed: ThroughputComparison, costs: dict[str, Costs]) -> None:
    for name, value in speed.throughput.items():
        click.echo(f"{name}: {value}")
    fewer = costs["dense"].macs / costs["pruned"].macs
    click.echo(f"speedup {speed.speedup['pruned']} measured, {fewer:.3f}x fewer MACs")


def print_sites(sites: list[Any], plan: Plan, latency: LatencyTable | None) -> None:
    saved = {saving.site.path: f"{saving.saved.value:.2f}" for saving in latency.savings} if latency else {}
    extra = ["saves ms"] if latency else []
    rows = table("sites", "block", "attention", *extra, "activation", *extra)
    for block in sorted({site.block for site in sites}):
        row = [str(block)]
        for kind in ("attention", "activation"):
            site = next((s for s in sites if (s.kind, s.block) == (kind, block)), None)
            row.append(_cell(site, plan))
            row += [saved.get(site.path, "") if site else ""] if latency else []
        rows.add_row(*row)
    print_(rows)


def _cell(site: Any, plan: Plan) -> str:
    if site is None:
        return "-"
    note = " (gated FFN)" if site.is_gated else ""
    return f"{site.path}{note}{' REMOVED' if plan.removes(site) else ''}"


def print_breakdown(latency: LatencyTable) -> None:
    click.echo(str(latency.dense))  # as a title it would be broken to the width of the table
    rows = table("time by kind of layer", "kind of layer", "ms", "share")
    total = sum(value.value for value in latency.breakdown.values())
    for kind, value in latency.breakdown.items():
        rows.add_row(kind, f"{value.value:.2f}", percent(100 * value.value / total, 0))
    print_(rows)


def epoch_line(epoch: Epoch, metric: str = "accuracy") -> str:
    """Return the results of an epoch as a line; ``metric`` is what its score is called."""
    apart = f", KL to the teacher {epoch.divergence:.4f}" if epoch.divergence is not None else ""
    if not epoch.number:
        return f"before training: {metric} {percent(epoch.last)}{apart}"
    ema = f", ema {percent(epoch.ema)}" if epoch.ema is not None else ""
    return (
        f"epoch {epoch.number}/{epoch.epochs}: loss {epoch.loss:.4f}, last {percent(epoch.last)}{apart}, "
        f"best {percent(epoch.best)}{ema}, {epoch.images_per_second:.1f} images/s, {epoch.seconds:.0f} s"
    )


def print_summary(directory: Path, metric: str, was_done: bool, as_json: bool) -> None:
    """Print the scores of a training that is done, and where its models are."""
    from hetdpt.results import unhelpful
    from hetdpt.store.run_directory import summary_of

    if not is_first_process():
        return
    summary = summary_of(directory)
    if as_json:
        return print_json(directory=str(directory), **summary)
    if was_done:
        click.echo(f"{directory} is already done")
    names = [name for name in ("start", "last", "best", "ema") if summary[name] is not None]
    metric, where = summary.get("metric", metric), f" of {summary['measured_on']}" if "measured_on" in summary else ""
    click.echo(f"{metric}{where}: " + ", ".join(f"{name} {percent(summary[name])}" for name in names))
    if found := summary.get("validation"):
        interval = f"95 % interval {found['low']:.1f} to {found['high']:.1f}"
        click.echo(f"{metric} of {found['count']} validation images: best {percent(found['top1'])} ({interval})")
    numbers: dict[str, Any] = {name: summary.get(name) for name in ("start", "last", "best_epoch", "divergence")}
    if text := unhelpful(**numbers, kept="best"):
        click.echo(f"warning: {text} as best", err=True)
    if "scores" in summary:
        click.echo(score_line(summary["scores"]))
    warn_of(summary["unreadable"])
    click.echo(f"saved to {directory}: {', '.join(name for name in names if name != 'start')}")


def score_line(scores: dict[str, Any]) -> str:
    """Return the numbers among ``scores`` as a line."""
    return ", ".join(f"{name} {percent(value)}" for name, value in scores.items() if isinstance(value, float))


def by_others(is_own: bool) -> str:
    """Return the note on a result that this process did not work out itself."""
    return "" if is_own else " (done before, or by another process)"


def warn_of(unreadable: tuple[str, ...] | list[str]) -> None:
    """Print a warning with the names of files that could not be read, if there are any."""
    if unreadable:
        shown = ", ".join(unreadable[:10]) + (", ..." if len(unreadable) > 10 else "")
        files = f"{len(unreadable)} file{'s' if len(unreadable) > 1 else ''}"
        click.echo(f"warning: {files} could not be read: {shown}", err=True)
