"""The tables of a report: names of the columns, and rows of text. No torch here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import nan

from hetdpt.core.format import (
    NONE,
    SIZES,
    amount,
    change,
    duration,
    interval,
    machine,
    milliseconds,
    number,
    percent,
    signed,
    split_text,
    times,
)  # fmt: skip
from hetdpt.core.goals import describe
from hetdpt.report.run import RunRecord
from hetdpt.results import BalanceResult, ComparisonRow, MeasureResult, PlanSpeed, SelectResult


@dataclass(frozen=True)
class Table:
    """A table of text; the first cell of a row names it."""

    label: str
    """What it shows, for those who cannot see it."""
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    words: tuple[int, ...] = ()
    """Columns of words, which are not set like numbers."""
    strong: int | None = None
    """The row to emphasise."""
    is_small: bool = False
    """Whether it may be broken to the width of a phone."""
    picks: tuple[str, ...] = ()
    """What each row picks on the page: the id of a part that is shown then; empty for rows that are only read."""


def before_and_after(measured: MeasureResult, metric: str = "accuracy") -> Table:
    """Return the table of the two models; ``metric`` is what their accuracy is."""
    dense, pruned, speed = measured.dense, measured.pruned, measured.speedup
    points = signed(pruned.accuracy.top1 - dense.accuracy.top1)
    rates = dense.throughput, pruned.throughput
    rows = [
        (metric, percent(dense.accuracy.top1), percent(pruned.accuracy.top1), f"{points} points"),
        ("95 % interval", *(interval(one.accuracy.low, one.accuracy.high) for one in (dense, pruned)), ""),
        ("parameters", amount(dense.params), amount(pruned.params), change(dense.params, pruned.params)),
        ("MACs", amount(dense.macs), amount(pruned.macs), change(dense.macs, pruned.macs)),
        (f"batch of {measured.batch}", *map(milliseconds, (dense.ms, pruned.ms)), change(dense.ms, pruned.ms)),
        ("images/s", *map(number, rates), change(*rates)),
        ("speedup", times(1), times(speed.value), f"{signed(100 * (speed.value - 1), 0)} %"),
        ("95 % interval", "", interval(speed.low, speed.high), ""),
    ]
    return Table("dense and pruned model", ("", "dense", "pruned", "change"), rows, is_small=True)


def compared(record: RunRecord) -> list[ComparisonRow]:
    """Return the methods that were compared, that of the run first."""
    measured, comparison, selected = record.results.measure, record.results.compare, record.results.select
    if measured is None or comparison is None or selected is None:
        return []
    pruned, speed, recovery = measured.pruned, measured.speedup, record.results.recover
    own = ComparisonRow(
        layers=len(selected.plan),
        method=record.method,
        seed=0,
        plan=selected.plan,
        start=recovery.start if recovery else nan,
        accuracy=pruned.accuracy.top1,
        seconds=0.0,
        speed=PlanSpeed(speed.value, speed.low, speed.high, pruned.macs, pruned.params, pruned.ms),
    )
    return [own, *comparison.rows]


def comparison_table(record: RunRecord) -> Table:
    """Return the methods, one in a row."""
    own = "this run, with fewer tokens" if record.results.reduce else "this run"
    columns = ("method", "split", "untrained", "accuracy", "speedup", "95 % interval", "MACs", "params", "")
    rows = [
        (
            row.method,
            row.split,
            percent(row.start),
            percent(row.accuracy),
            times(row.speed.speedup),
            interval(row.speed.low, row.speed.high),
            amount(row.speed.macs),
            amount(row.speed.params),
            "" if number else own,
        )
        for number, row in enumerate(compared(record))
    ]
    return Table("methods compared", columns, rows, words=(8,), strong=0)


def balance_table(found: BalanceResult) -> Table:
    """Return the numbers of layers that were tried with width for the rest, one in a row."""
    columns = ("split", "untrained", "accuracy", "speedup", "MACs", "params", *SIZES.values())
    rows = [
        (
            f"{split_text(one.budget)}{' ✓' * (one.budget == found.budget)}",
            percent(one.start),
            percent(one.accuracy),
            times(one.speedup),
            amount(one.macs),
            amount(one.params),
            *(percent(100 * one.ratios.get(name, 0.0), 0) for name in SIZES),
        )
        for one in found.candidates
    ]
    return Table("layers and width", columns, rows, strong=found.chosen)


def rounds_table(chosen: SelectResult) -> Table:
    """Return what each round of a search removed, one in a row."""
    columns = ("round", f"{chosen.quantity}, by the costs of layers", "damage", "removed")
    rows = [
        (
            str(count),
            amount(one.reached) if chosen.quantity == "MACs" else times(one.reached),
            number(one.damage),
            ", ".join(one.moves),
        )
        for count, one in enumerate(chosen.rounds, 1)
    ]
    return Table("what each round of the search removed", columns, rows, words=(3,))


def breakdown_table(measured: MeasureResult) -> Table:
    """Return the milliseconds by kind of layer."""
    dense, pruned = (measured.breakdown.get(name, {}) for name in ("dense", "pruned"))
    sides = [(kind, dense.get(kind, 0.0), pruned.get(kind, 0.0)) for kind in dict.fromkeys([*dense, *pruned])]
    sides.append(("all", sum(dense.values()), sum(pruned.values())))
    rows = [
        (
            kind,
            milliseconds(one),
            milliseconds(two),
            f"{signed(two - one, 2 if abs(two - one) < 100 else 1)} ms",
        )
        for kind, one, two in sides
    ]
    return Table("milliseconds by kind of layer", ("", "dense", "pruned", "change"), rows, is_small=True)


def time_table(record: RunRecord) -> Table:
    """Return how long each stage took."""
    shown = [stage for stage in record.stages if stage.is_done or not record.is_finished]  # not that of the report
    whole = record.seconds or 1.0
    rows = [
        (stage.name, duration(stage.seconds), percent(100 * stage.seconds / whole, 0))
        if stage.is_done
        else (stage.name, "not done", "")
        for stage in shown
    ]
    rows.append(("all", duration(record.seconds), ""))
    return Table("time of each stage", ("stage", "time", "share"), rows, strong=len(rows) - 1, is_small=True)


def runs_table(records: Sequence[RunRecord]) -> Table:
    """Return several runs, one in a row."""
    columns = ("run", "model", "goal", "method", "dense", "pruned", "speedup", "MACs", "params", "measured on")
    rows = [_run_row(name, record) for name, record in zip(labels(records), records, strict=True)]
    return Table("the runs side by side", columns, rows, words=(1, 2, 3, 9))


def labels(records: Sequence[RunRecord]) -> list[str]:
    """Return the name of each run or, if two have the same name, its directory."""
    names = Counter(record.name for record in records)
    return [record.name if names[record.name] == 1 else str(record.directory) for record in records]


def _run_row(name: str, record: RunRecord) -> tuple[str, ...]:
    measured = record.results.measure
    others = ["width"] if record.config.get("plus") else []
    others += [str(tokens)] if (tokens := record.config.get("tokens")) else []
    about = name, record.model, describe(record.goals), " + ".join([record.method, *others])
    if measured is None:
        return *about, *[NONE] * 5, f"not finished: next stage is {record.next_stage}"
    dense, pruned, speed = measured.dense, measured.pruned, measured.speedup
    return (
        *about,
        percent(dense.accuracy.top1),
        percent(pruned.accuracy.top1),
        f"{times(speed.value)} ({interval(speed.low, speed.high)})",
        amount(pruned.macs),
        amount(pruned.params),
        machine(measured, measured.batch),
    )
