"""Accuracy against speedup: of splits, of methods, of runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import isfinite

from markupsafe import Markup

from hetdpt.core.format import interval, machine, percent, split_text, times
from hetdpt.core.plan import Budget
from hetdpt.report.comparison import LOOKS, OTHER
from hetdpt.report.frontier import REACH
from hetdpt.report.pictures.svg import (
    NARROW_BELOW,
    Frame,
    circle,
    cross,
    drawing,
    frame,
    line,
    mark,
    path,
    ring,
    shape,
    tag,
    text,
)
from hetdpt.report.run import RunRecord
from hetdpt.report.tables import compared, labels
from hetdpt.results import AnalyseResult, CollectedSample, MeasureResult, MethodRow, Scores, Split

BLACK = "#000000"  # which on a dark page is drawn in the colour of letters
NAME, LINE = 90.0, 14.0  # room that the name of a run takes
Range = tuple[float | None, float | None]


# Splits


@dataclass(frozen=True)
class _Places:
    """Where a budget lies along the bottom: by its predicted speedup or, where nothing is timed, by its layers."""

    analysis: AnalyseResult | None

    @property
    def is_timed(self) -> bool:
        prices = self.analysis.prices if self.analysis else None
        return prices is not None and prices.dense.ms is not None

    @property
    def label(self) -> str:
        return "speedup, predicted (final model: measured)" if self.is_timed else "layers removed"

    def __call__(self, budget: Budget) -> float:
        prices = self.analysis.prices if self.analysis else None
        speedup = prices.speedup(budget) if prices else None
        return float(budget.attention + budget.activation) if speedup is None else speedup

    def far(self, samples: Sequence[CollectedSample]) -> float:
        """Return how far from no layers removed the plot goes: beyond, the polynomial is a guess."""
        start, found = self(Budget(0, 0)), [self(one.budget) for one in samples]
        return start + REACH * (max((place for place in found if isfinite(place)), default=start) - start)


@dataclass(frozen=True)
class _Final:
    """The final model as a point: where it lies, and between what."""

    measured: MeasureResult
    x: float
    range: Range

    @classmethod
    def of(cls, record: RunRecord, is_timed: bool) -> _Final | None:
        measured, chosen = record.results.measure, record.results.select
        if measured is None or chosen is None:
            return None
        if is_timed:
            return cls(measured, measured.speedup.value, (measured.speedup.low, measured.speedup.high))
        return cls(measured, float(len(chosen.plan)), (None, None))

    @property
    def y(self) -> float:
        return self.measured.pruned.accuracy.top1


def frontier(record: RunRecord, width: float) -> Markup:
    """Return the best predicted accuracy by speedup, with samples, the chosen split and the final model."""
    fit, allocation = record.results.fit, record.results.allocate
    assert fit is not None
    assert allocation is not None
    where = _Places(record.results.analyse)
    final, far = _Final.of(record, where.is_timed), max(where.far(fit.samples), where(allocation.budget))
    best = [one for one in allocation.frontier if where(one.budget) <= far]
    samples = [one for one in fit.samples if isfinite(where(one.budget))]
    points = [(where(one.budget), one.accuracy) for one in best]
    points += [(where(one.budget), one.accuracy) for one in samples]
    points += _heights(final.x, final.measured.pruned.accuracy) if final else []
    plot = _plot(width, points, where.label, where.is_timed)
    crosses = [_sample(one, plot.at(where(one.budget), one.accuracy)) for one in samples]
    parts = [plot.axes(), *_best(best, where, plot), tag("g", *crosses, data_series="samples")]
    if (chosen := allocation.chosen) is not None and isfinite(where(chosen.budget)):
        x, hint = plot.x(where(chosen.budget)), f"chosen: {split_text(chosen.budget)}\n{_said(chosen)}"
        parts.append(tag("g", mark(hint, ring(x, plot.y.clipped(chosen.accuracy), 9)), data_series="chosen"))
    if final:
        parts.append(tag("g", _final(final, plot), data_series="final"))
    label = "accuracy by speedup: best predicted splits, samples, the chosen split, and the final model as measured"
    return drawing(width, plot.height, label, *parts)


def _plot(width: float, points: Sequence[tuple[float, float]], across: str, is_timed: bool = True) -> Frame:
    xs, ys = zip(*points, strict=True)
    high = 0.82 * width if width < NARROW_BELOW else 0.48 * width
    unit = "×" if is_timed else ""
    return frame(width, high, xs, ys, across, "accuracy, %", unit, is_whole=not is_timed)


def _best(best: Sequence[Split], where: _Places, plot: Frame) -> Iterator[Markup]:
    at = {one.budget: plot.at(where(one.budget), one.accuracy) for one in best}
    # no band: neighbours may be a sample, which is known well, and a mixed split, which is not
    bars = [
        line(at[one.budget][0], plot.y.clipped(one.low), at[one.budget][0], plot.y.clipped(one.high), "interval")
        for one in best
    ]
    steps = [
        path((at[one.budget], at[two.budget]), "line guess" if one.is_beyond or two.is_beyond else "line")
        for one, two in pairwise(best)
    ]
    dots = [
        mark(
            f"best predicted: {split_text(one.budget)}\n{_said(one)}",
            circle(*at[one.budget], 4, "beyond" if one.is_beyond else "best"),
        )
        for one in best
    ]
    yield tag("g", *bars, data_series="intervals")
    yield tag("g", *steps, *dots, data_series="best")


def _said(one: Split) -> str:
    lines = [f"predicted {percent(one.accuracy)}", f"95 % interval {interval(one.low, one.high)}"]
    lines += [f"predicted speedup {times(one.speedup)}"] if one.speedup is not None else []
    return "\n".join(lines + ["beyond the samples: a guess"] * one.is_beyond)


def _sample(one: CollectedSample, at: tuple[float, float]) -> Markup:
    hint = f"sample {split_text(one.budget)}\n{percent(one.accuracy)}"
    return mark(hint, circle(*at, 8, "grasp"), cross(*at, "sample"))


def _final(final: _Final, plot: Frame) -> Markup:
    scores, speed = final.measured.pruned.accuracy, final.measured.speedup
    hint = (
        f"final model, measured\n{percent(scores.top1)} of {scores.count:,} images\nspeedup {times(speed.value)}\n"
        f"95 % interval {interval(speed.low, speed.high)}"
    )
    at = plot.at(final.x, final.y)
    return mark(hint, *_bars(plot, at, final.range, scores), shape("D", *at, 6.5, "ink"))


def _bars(plot: Frame, at: tuple[float, float], speed: Range, scores: Scores | None) -> Iterator[Markup]:
    """Give the 95 % intervals of a point, as a cross of lines."""
    low, high = speed
    if low is not None and high is not None:
        yield line(plot.x.clipped(low), at[1], plot.x.clipped(high), at[1], "span")
    if scores is not None:
        yield line(at[0], plot.y.clipped(scores.low), at[0], plot.y.clipped(scores.high), "span")


def _heights(x: float, scores: Scores) -> list[tuple[float, float]]:
    """Return what has to be in a plot that shows an accuracy at ``x``: its interval, lest little look like much."""
    return [(x, scores.low), (x, scores.high)]


# Methods and runs


def methods(record: RunRecord, width: float) -> Markup:
    """Return accuracy by measured speedup of the methods that were compared, and of the dense model."""
    measured = record.results.measure
    assert measured is not None
    rows = [(row, row.speedup) for row in compared(record) if row.speedup is not None]
    dense = measured.dense.accuracy
    points = [(1.0, dense.top1), *((speedup, row.accuracy) for row, speedup in rows)]
    plot = _plot(width, points, "speedup, measured")
    star = mark(
        f"dense\n{percent(dense.top1)} of {dense.count:,} images", shape("*", *plot.at(1.0, dense.top1), 7, "ink")
    )
    drawn = [_method(row, plot.at(speedup, row.accuracy), plot) for row, speedup in reversed(rows)]  # its own on top
    label = "accuracy by measured speedup, a point for each method"
    return drawing(width, plot.height, label, plot.axes(), tag("g", star, data_series="dense"), *drawn)


def _method(row: MethodRow, at: tuple[float, float], plot: Frame) -> Markup:
    lines = [row.method, percent(row.accuracy), f"speedup {times(row.speedup)}"]
    lines += [f"95 % interval {interval(row.low, row.high)}"] if row.low is not None else []
    bars = _bars(plot, at, (row.low, row.high), None)
    return tag("g", mark("\n".join(lines), *bars, marker(row.method, *at, 6)), data_series=row.method)


def marker(method: str, x: float, y: float, size: float) -> Markup:
    """Return the marker of a method, as in the figure of ``hetdpt compare``."""
    look = LOOKS.get(method, OTHER)
    if look.colour == BLACK:
        return shape(look.marker, x, y, size, "ink")
    return shape(look.marker, x, y, size, "point", fill=look.colour)


def runs(records: Sequence[RunRecord], width: float) -> Markup:
    """Return accuracy by measured speedup of several runs, each with a line from its dense model."""
    found = [
        (name, record, record.results.measure)
        for name, record in zip(labels(records), records, strict=True)
        if record.results.measure
    ]
    points = [(1.0, one.dense.accuracy.top1) for _, _, one in found]
    points += [point for _, _, one in found for point in _heights(one.speedup.value, one.pruned.accuracy)]
    plot = _plot(width, points, "speedup, measured")
    parts, taken = [], list[tuple[float, float]]()
    for name, record, one in found:
        x, y = plot.at(one.speedup.value, one.pruned.accuracy.top1)
        while any(abs(x - other[0]) < NAME and abs(y - other[1]) < LINE for other in taken):
            y -= LINE  # so that no name is written over another
        taken.append((x, y))
        parts.append(_run(name, record.method, one, plot, y - 9))
    return drawing(width, plot.height, "accuracy by measured speedup, a point for each run", plot.axes(), *parts)


def _run(name: str, method: str, one: MeasureResult, plot: Frame, height: float) -> Markup:
    """Return a run: a line from its dense model, its point, and its name at ``height``."""
    dense, pruned, speed = one.dense.accuracy, one.pruned.accuracy, one.speedup
    start, end = plot.at(1.0, dense.top1), plot.at(speed.value, pruned.top1)
    lines = (
        name,
        f"{percent(pruned.top1)}, {percent(dense.top1)} before",
        f"speedup {times(speed.value)}",
        machine(one, one.batch),
    )
    is_right = end[0] > 0.6 * plot.width
    words = text(end[0] + (-11 if is_right else 11), height, name, "name", anchor="end" if is_right else None)
    point = mark("\n".join(lines), *_bars(plot, end, (speed.low, speed.high), pruned), marker(method, *end, 6.5), words)
    return tag("g", path((start, end), "way"), shape("*", *start, 6, "ink"), point, data_series=name)
