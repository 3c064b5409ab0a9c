"""What commands print: JSON, tables, progress."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from hetdpt.plan import Plan

if TYPE_CHECKING:
    from hetdpt.measurement.costs import Costs
    from hetdpt.measurement.speed import Comparison, LatencyTable
    from hetdpt.training.trainer import Progress

WIDE = 200  # columns of a file or pipe, so that no path in a table is broken


EVERY = 30.0  # seconds between two lines of progress where nobody watches


def is_first_process() -> bool:
    """Whether this process is the one of its kind that prints; torchrun and accelerate number them."""
    return os.environ.get("RANK", "0") == "0"


def print_json(**values: Any) -> None:
    typer.echo(json.dumps(values, indent=1))


@contextmanager
def progress(title: str, is_quiet: bool) -> Iterator[Callable[[int, int], None] | None]:
    """Give a function that moves a progress bar with the time left; None when nobody watches."""
    if is_quiet or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress as Bar

    with Bar(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextmanager
def stages(is_quiet: bool) -> Iterator[tuple[Callable[[str, int, int], None] | None, Callable[[str], None]]]:
    """Give a function that is told (stage, steps done, in all), and what prints a line meanwhile.

    The first is a bar with the time left for each stage in a terminal, a line now and then elsewhere, None if quiet.
    """
    if is_quiet:
        yield None, typer.echo
        return
    if not sys.stderr.isatty():
        yield _stage_lines(), typer.echo
        return
    from rich.console import Console
    from rich.progress import Progress as Bar

    with Bar(console=Console(stderr=True), transient=True) as bar:
        now = "starting"
        task = bar.add_task(now, total=None)

        def move(stage: str, done: int, total: int) -> None:
            nonlocal now, task
            if stage != now:
                bar.remove_task(task)
                now, task = stage, bar.add_task(stage, total=None)
            bar.update(task, completed=done, total=total or None)

        def say(line: str) -> None:
            bar.stop()  # takes the bar away, so that the line does not begin behind it
            typer.echo(line)
            bar.start()

        yield move, say


def _stage_lines() -> Callable[[str, int, int], None]:
    last = time.monotonic()
    now, began, first = "", last, 0

    def move(stage: str, done: int, total: int) -> None:
        nonlocal last, now, began, first
        if stage != now:
            now, began, first = stage, time.monotonic(), done
        if time.monotonic() - last >= EVERY and done > first:
            last = time.monotonic()
            left = timedelta(seconds=round((last - began) / (done - first) * max(total - done, 0)))
            typer.echo(f"{stage} {done}/{total}, {left} left" if total else f"{stage} {done}", err=True)

    return move


@contextmanager
def watching(is_quiet: bool) -> Iterator[tuple[Callable[[Progress], None] | None, Callable[[str], None]]]:
    """Give a watcher of a training, and what prints a line meanwhile.

    The watcher is a bar with the time left in a terminal, a line now and then elsewhere.
    """
    if is_quiet:
        yield None, typer.echo
    elif not sys.stderr.isatty():
        yield _lines(), typer.echo
    else:
        with _bar() as both:
            yield both


def _lines() -> Callable[[Progress], None]:
    last = time.monotonic()

    def watch(now: Progress) -> None:
        nonlocal last
        if time.monotonic() - last >= EVERY:
            last = time.monotonic()
            typer.echo(f"{_words(now)}, {timedelta(seconds=round(now.seconds_left))} left", err=True)

    return watch


@contextmanager
def _bar() -> Iterator[tuple[Callable[[Progress], None], Callable[[str], None]]]:
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[left]} left"), TimeElapsedColumn()
    with Bar(*columns, console=Console(stderr=True), transient=True, refresh_per_second=2) as bar:
        task = bar.add_task("starting", total=None, left="?")
        last = 0.0

        def watch(now: Progress) -> None:
            nonlocal last
            bar.update(task, completed=now.update, total=now.updates)
            if time.monotonic() - last >= 1:  # reading the loss waits for the device
                last = time.monotonic()
                bar.update(task, description=_words(now), left=str(timedelta(seconds=round(now.seconds_left))))

        def say(line: str) -> None:
            bar.stop()  # takes the bar away, so that the line does not begin behind it
            typer.echo(line)
            bar.start()

        yield watch, say


def _words(now: Progress) -> str:
    return (
        f"epoch {now.epoch}/{now.epochs}, update {now.update}/{now.updates}, loss {now.mean_loss():.4f}, "
        f"{now.images_per_second:.1f} images/s"
    )


def table(title: str, *columns: str) -> Any:
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", overflow="fold")
    return table


def print_(table: Any) -> None:
    from rich.console import Console

    Console(width=None if sys.stdout.isatty() else WIDE).print(table)


def note_random_weights(model: str, weights: Path | None, pretrained: bool) -> None:
    """Say so where nobody gave weights to the model called ``model``."""
    from hetdpt.adapters.models import HF_PREFIX

    if not (weights or pretrained or Path(model.removeprefix(HF_PREFIX)).is_dir()):
        typer.echo("note: the weights are random; give --weights FILE or --pretrained for a model that sees anything")


def print_costs(costs: dict[str, Costs]) -> None:
    rows = table("costs of one image", "", "params", "MACs", "MACs without attention products")
    for name, cost in costs.items():
        numbers = (cost.params / 1e6, cost.macs / 1e9, cost.macs_without_attention_products / 1e9)
        rows.add_row(name, f"{numbers[0]:.2f} M", f"{numbers[1]:.2f} G", f"{numbers[2]:.2f} G")
    print_(rows)
    if len(costs) == 2:
        dense, pruned = costs.values()
        typer.echo(f"{dense.macs / pruned.macs:.3f}x fewer MACs, {dense.params / pruned.params:.3f}x fewer parameters")


def print_speed(speed: Comparison, costs: dict[str, Costs]) -> None:
    for name, value in speed.throughput.items():
        typer.echo(f"{name}: {value}")
    fewer = costs["dense"].macs / costs["pruned"].macs
    typer.echo(f"speedup {speed.speedup['pruned']} measured, {fewer:.3f}x fewer MACs")


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
    typer.echo(str(latency.dense))  # as a title it would be broken to the width of the table
    rows = table("where it goes", "kind of layer", "ms", "share")
    total = sum(value.value for value in latency.breakdown.values())
    for kind, value in latency.breakdown.items():
        rows.add_row(kind, f"{value.value:.2f}", f"{100 * value.value / total:.0f} %")
    print_(rows)
