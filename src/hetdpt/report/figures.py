"""The figures of a page: pictures for a desk and for a phone, and what their signs stand for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from hetdpt.report import tables
from hetdpt.report.pictures import balance, epochs, speed
from hetdpt.report.pictures.blocks import blocks
from hetdpt.report.pictures.latency import breakdown, colour_of
from hetdpt.report.pictures.surface import surface as draw_surface
from hetdpt.report.pictures.svg import circle, cross, line, rectangle, shape, tag
from hetdpt.report.run import RunRecord

WIDE, NARROW = 820.0, 312.0  # of a picture on a desk and on a phone, in pixels
HALF = 400.0  # of one of two beside each other
SQUARE = 500.0  # of one with words beside it


@dataclass(frozen=True)
class Sign:
    """What stands for what in a picture; one with a name is a button that shows and hides it."""

    label: str
    swatch: Markup
    name: str | None = None


@dataclass(frozen=True)
class Figure:
    """Pictures beside each other, each for two widths: a page shows those that fit."""

    pictures: tuple[tuple[Markup, Markup], ...]
    signs: tuple[Sign, ...] = ()


def _figure(*draws: Callable[[float], Markup], wide: float = WIDE, signs: Iterable[Sign] = ()) -> Figure:
    return Figure(tuple((draw(wide), draw(NARROW)) for draw in draws), tuple(signs))


def layers(record: RunRecord) -> Figure:
    """Return the blocks, with the layers that went."""
    signs = [Sign("stays" if record.results.select else "can go", _swatch(rectangle(1, 0, 16, 14, "kept", rx=3)))]
    if record.results.select and record.results.select.plan:
        gone = rectangle(1, 0, 16, 14, "gone", rx=3), cross(9, 7, "crossed", 3)
        signs.append(Sign("went, with its turn", _swatch(*gone)))
    return _figure(lambda width: blocks(record, width), signs=signs)


def surface(record: RunRecord) -> Figure:
    """Return predicted accuracy by layers removed."""
    fit, allocation = record.results.fit, record.results.allocate
    assert fit is not None
    signs = [Sign("sample", _swatch(cross(9, 7, "sample")))]
    if record.results.budget:
        signs.append(Sign("chosen split", _swatch(circle(9, 7, 5.5, "chosen"))))
    if allocation and allocation.tied:
        signs.append(Sign("the best cannot be told from it", _swatch(rectangle(3, 1.5, 12, 11, "tied", rx=2))))
    signs.append(Sign("beyond the samples: a guess", _swatch(rectangle(2, 1, 14, 12, "hatched"))))
    return _figure(lambda width: draw_surface(record, width), wide=SQUARE, signs=signs)


def layers_or_width(record: RunRecord) -> Figure:
    """Return accuracy and speedup by the number of layers that were tried with width for the rest."""
    found = record.results.balance
    assert found is not None
    signs = [
        Sign("tried, after brief fine-tuning", _swatch(circle(9, 7, 4, "best"))),
        Sign("chosen", _swatch(circle(9, 7, 5.5, "chosen"))),
    ]
    draws = (lambda width: balance.accuracies(found, width)), (lambda width: balance.speedups(found, width))
    return _figure(*draws, wide=HALF, signs=signs)


def frontier(record: RunRecord) -> Figure:
    """Return predicted accuracy by speedup."""
    signs = [
        Sign("best predicted (hollow: a guess)", _swatch(circle(9, 7, 4, "best")), "best"),
        Sign("95 % intervals", _swatch(line(9, 1, 9, 13, "interval")), "intervals"),
        Sign("samples", _swatch(cross(9, 7, "sample")), "samples"),
        Sign("chosen split", _swatch(circle(9, 7, 5.5, "chosen")), "chosen"),
    ]
    if record.results.measure:
        signs.append(Sign("final model, measured", _swatch(shape("D", 9, 7, 4.5, "ink")), "final"))
    return _figure(lambda width: speed.frontier(record, width), signs=signs)


def methods(record: RunRecord) -> Figure:
    """Return accuracy by speedup of several methods."""
    signs = [Sign("dense", _swatch(shape("*", 9, 7, 5, "ink")), "dense")]
    signs += [
        Sign(row.method, _swatch(speed.marker(row.method, 9, 7, 4.5)), row.method) for row in tables.compared(record)
    ]
    return _figure(lambda width: speed.methods(record, width), signs=signs)


def runs(records: Sequence[RunRecord]) -> Figure:
    """Return accuracy by speedup of several runs, of which one at least is measured."""
    found = [(name, one) for name, one in zip(tables.labels(records), records, strict=True) if one.results.measure]
    signs = [Sign(name, _swatch(speed.marker(one.method, 9, 7, 4.5)), name) for name, one in found]
    return _figure(lambda width: speed.runs(records, width), signs=signs)


def recovery(record: RunRecord) -> Figure:
    """Return accuracy and loss by epoch."""
    found, analysis = record.results.recover, record.results.analyse
    assert found is not None
    dense = analysis.accuracy.top1 if analysis else None
    there = [name for name in epochs.MARKERS if any(getattr(one, name) is not None for one in found.epochs)]
    said = {**epochs.SERIES, "loss": "training loss"}
    signs = [
        Sign(said[name], _swatch(line(0, 7, 18, 7, f"curve {name}"), epochs.dot(name, 9, 7)), name) for name in there
    ]
    signs += [Sign("dense model", _swatch(line(0, 7, 18, 7, "level")), "dense")] if dense is not None else []
    draws = [lambda width: epochs.accuracies(found, dense, width)]
    draws += [lambda width: epochs.losses(found, width)] if "loss" in there else []
    return _figure(*draws, wide=HALF, signs=signs)


def latency(record: RunRecord) -> Figure:
    """Return milliseconds by kind of layer."""
    measured = record.results.measure
    assert measured is not None
    kinds = dict.fromkeys(kind for side in measured.breakdown.values() for kind in side)
    signs = [Sign(kind, _swatch(rectangle(2, 1, 14, 12, colour_of(kind), rx=2)), kind) for kind in kinds]
    return _figure(lambda width: breakdown(measured, width), signs=signs)


def _swatch(*inside: Markup) -> Markup:
    return tag("svg", *inside, viewBox="0 0 18 14", class_="swatch", aria_hidden="true")
