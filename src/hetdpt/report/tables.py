"""The tables of a report: names of the columns, and rows of words. No torch here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from hetdpt.core.format import (
    NONE,
    SIZES,
    amount,
    change,
    interval,
    machine,
    milliseconds,
    number,
    percent,
    signed,
    split_text,
    times,
)
from hetdpt.core.goals import describe
from hetdpt.report.run import RunRecord
from hetdpt.results import BalanceResult, MeasureResult, MethodRow, ModelFigures

Table = tuple[tuple[str, ...], list[tuple[str, ...]]]
"""Names of the columns, and rows."""


def before_and_after(measured: MeasureResult) -> Table:
    """Return the table of the two models."""
    dense, pruned, speed = measured.dense, measured.pruned, measured.speedup
    points = signed(pruned.accuracy.top1 - dense.accuracy.top1)
    return ("", "dense", "pruned", "change"), [
        ("accuracy", percent(dense.accuracy.top1), percent(pruned.accuracy.top1), f"{points} points"),
        ("95 % interval", _range(dense), _range(pruned), ""),
        ("parameters", amount(dense.params), amount(pruned.params), change(dense.params, pruned.params)),
        ("MACs", amount(dense.macs), amount(pruned.macs), change(dense.macs, pruned.macs)),
        (f"batch of {measured.batch}", *map(milliseconds, (dense.ms, pruned.ms)), change(dense.ms, pruned.ms)),
        ("images/s", *map(number, (dense.throughput, pruned.throughput)), change(dense.throughput, pruned.throughput)),
        ("speedup", times(1), times(speed.value), f"{signed(100 * (speed.value - 1), 0)} %"),
        ("95 % interval", "", interval(speed.low, speed.high), ""),
    ]


def _range(side: ModelFigures) -> str:
    return interval(side.accuracy.low, side.accuracy.high)


def compared(record: RunRecord) -> list[MethodRow]:
    """Return the other methods of the run, its own before them."""
    measured, comparison = record.results.measure, record.results.compare
    if measured is None or comparison is None:
        return []
    pruned, speed, recovery = measured.pruned, measured.speedup, record.results.recover
    start = recovery.epochs[0].last if recovery and recovery.epochs else None
    own = MethodRow(
        method=record.method,
        accuracy=pruned.accuracy.top1,
        plan=record.results.select.plan if record.results.select else None,
        start=start,
        params=pruned.params,
        macs=pruned.macs,
        ms=pruned.ms,
        speedup=speed.value,
        low=speed.low,
        high=speed.high,
        note="this run, with fewer tokens" if record.results.reduce else "this run",
    )
    return [own, *comparison.rows]


def comparison_table(record: RunRecord) -> Table:
    """Return the methods, one in a row."""
    names = ("method", "split", "untrained", "accuracy", "speedup", "95 % interval", "MACs", "params", "")
    return names, [
        (
            row.method,
            split_text(row.plan.budget) if row.plan else NONE,
            percent(row.start),
            percent(row.accuracy),
            times(row.speedup),
            interval(row.low, row.high),
            amount(row.macs),
            amount(row.params),
            row.note,
        )
        for row in compared(record)
    ]


def balance_table(found: BalanceResult) -> Table:
    """Return the numbers of layers that were tried with width for the rest, one in a row."""
    names = ("split", "untrained", "accuracy", "speedup", "MACs", "params", *SIZES.values())
    return names, [
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


def runs_table(records: Sequence[RunRecord]) -> Table:
    """Return several runs, one in a row."""
    names = ("run", "model", "goal", "method", "dense", "pruned", "speedup", "MACs", "params", "measured on")
    return names, [_run_row(name, record) for name, record in zip(labels(records), records, strict=True)]


def labels(records: Sequence[RunRecord]) -> list[str]:
    """Return what to call each of several runs: its name or, where two have the same, where it is."""
    names = Counter(record.name for record in records)
    return [record.name if names[record.name] == 1 else str(record.directory) for record in records]


def _run_row(name: str, record: RunRecord) -> tuple[str, ...]:
    measured, asked = record.results.measure, describe(record.goals)
    about = name, record.model, asked, _ways(record)
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


def _ways(record: RunRecord) -> str:
    """Return the method by which layers went, and by what else the model was made faster."""
    others = ["width"] if record.config.get("plus") else []
    others += [str(tokens)] if (tokens := record.config.get("tokens")) else []
    return " + ".join([record.method, *others])


def breakdown_table(measured: MeasureResult) -> Table:
    """Return the milliseconds by kind of layer."""
    dense, pruned = (measured.breakdown.get(name, {}) for name in ("dense", "pruned"))
    sides = [(kind, dense.get(kind, 0.0), pruned.get(kind, 0.0)) for kind in dict.fromkeys([*dense, *pruned])]
    sides.append(("all", sum(dense.values()), sum(pruned.values())))
    return ("", "dense", "pruned", "change"), [
        (kind, milliseconds(one), milliseconds(two), f"{signed(two - one, 2 if abs(two - one) < 100 else 1)} ms")
        for kind, one, two in sides
    ]
