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

from hetdpt.core.format import amount, percent
from hetdpt.core.plan import Plan

if TYPE_CHECKING:
    from hetdpt.measurement.costs import Costs
    from hetdpt.measurement.speed import LatencyTable, ThroughputComparison
    from hetdpt.training.trainer import Epoch, Progress

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
    pace, last = Pace(), time.monotonic()

    def move(stage: str, done: int, total: int) -> None:
        nonlocal last
        left = pace.left(stage, done, total)
        if time.monotonic() - last >= EVERY and left is not None:
            last = time.monotonic()
            typer.echo(how_far(stage, done, total, left), err=True)

    return move


class Pace:
    """How fast a piece of work goes. Another name, or fewer steps done than before, is a new piece."""

    def __init__(self) -> None:
        self._name, self._began, self._first, self._done = "", 0.0, 0, 0

    def left(self, name: str, done: int, total: int) -> float | None:
        """Return the seconds that the rest takes at the pace so far; None before a step is done."""
        now = time.monotonic()
        if name != self._name or done < self._done:
            self._name, self._began, self._first = name, now, done
        self._done = done
        return (now - self._began) / (done - self._first) * max(total - done, 0) if done > self._first else None


def how_far(text: str, done: int, total: int, left: float | None) -> str:
    """Return how far a piece of work is, in words.

    >>> how_far("evaluating", 40, 230, left=61.2)
    'evaluating 40/230, 0:01:01 left'
    """
    if not total:
        return f"{text} {done}" if done else text
    return f"{text} {done}/{total}" + ("" if left is None else f", {clock(left)} left")


def clock(seconds: float) -> str:
    """Return a time as hours, minutes and seconds."""
    return str(timedelta(seconds=round(seconds)))


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
            typer.echo(f"{_words(now)}, {clock(now.seconds_left)} left", err=True)

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
                bar.update(task, description=_words(now), left=clock(now.seconds_left))

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
    from hetdpt.export.saved import saved_directory

    is_local = Path(model.removeprefix(HF_PREFIX)).is_dir() or saved_directory(model) is not None
    if not (weights or pretrained or is_local):
        typer.echo("note: the weights are random; give --weights FILE or --pretrained for a model that sees anything")


def print_costs(costs: dict[str, Costs]) -> None:
    rows = table("costs of one image", "", "params", "MACs", "MACs without attention products")
    for name, cost in costs.items():
        numbers = cost.params, cost.macs, cost.macs_without_attention_products
        rows.add_row(name, *(amount(number, 2) for number in numbers))
    print_(rows)
    if len(costs) == 2:
        dense, pruned = costs.values()
        typer.echo(f"{dense.macs / pruned.macs:.3f}x fewer MACs, {dense.params / pruned.params:.3f}x fewer parameters")


def print_speed(speed: ThroughputComparison, costs: dict[str, Costs]) -> None:
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
        rows.add_row(kind, f"{value.value:.2f}", percent(100 * value.value / total, 0))
    print_(rows)


def epoch_line(epoch: Epoch, metric: str = "accuracy") -> str:
    """Return what an epoch came to as a line; ``metric`` is what its score is called."""
    if not epoch.number:
        return f"before training: {metric} {epoch.last:.2f} %"
    ema = f", ema {epoch.ema:.2f} %" if epoch.ema is not None else ""
    return (
        f"epoch {epoch.number}/{epoch.epochs}: loss {epoch.loss:.4f}, last {epoch.last:.2f} %, best {epoch.best:.2f} %"
        f"{ema}, {epoch.images_per_second:.1f} images/s, {epoch.seconds:.0f} s"
    )


def warn_of(unreadable: tuple[str, ...] | list[str]) -> None:
    """Print a warning with the names of files that could not be read, if there are any."""
    if unreadable:
        shown = ", ".join(unreadable[:10]) + (", ..." if len(unreadable) > 10 else "")
        files = f"{len(unreadable)} file{'s' if len(unreadable) > 1 else ''}"
        typer.echo(f"warning: {files} could not be read: {shown}", err=True)
