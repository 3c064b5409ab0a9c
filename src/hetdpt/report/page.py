"""Runs as one HTML page that needs nothing else: style, script and pictures are in it, and no address is asked.

Templates escape all that they are given. The page forbids itself every script but its own, by its checksum.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from hetdpt.report import headline, tables
from hetdpt.report.commands import commands
from hetdpt.report.pictures import blocks, epochs, latency, speed, surface
from hetdpt.report.pictures.svg import circle, cross, line, rectangle, shape, tag
from hetdpt.report.run import RunRecord
from hetdpt.report.words import duration, percent, place, wanted

WIDE, NARROW = 820.0, 312.0  # of pictures on a desk and on a phone, in pixels
HALF = 400.0  # of two pictures beside each other
SQUARE = 500.0  # of the surface, with words beside it
TITLES = {
    "numbers": "Before and after",
    "layers": "Which layers went",
    "surface": "Predicted accuracy",
    "frontier": "What other budgets would give",
    "methods": "Other ways to choose",
    "recovery": "Fine-tuning",
    "latency": "Where the time goes",
    "how": "How it was done",
}
KEPT = {
    "last": "The model after the last epoch is the one that was kept.",
    "best": "The model of the best epoch is the one that was kept; the same images said which that is.",
    "ema": "The moving average of the weights is the model that was kept.",
}


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


def render(records: Sequence[RunRecord], data: Any) -> str:
    """Return the page of one run, or of several; ``data`` is what it offers as JSON."""
    style, script, names = _part("style.css"), _part("script.js"), tables.labels(records)
    values = {
        "title": _page_title(records),
        "runs": [_view(record, f"run-{number}", names[number]) for number, record in enumerate(records)],
        "comparison": _comparison(records) if len(records) > 1 else None,
        "data": data,
        "style": Markup(style),
        "script": Markup(script),
        "policy": f"default-src 'none'; img-src data:; style-src '{_sum(style)}'; script-src '{_sum(script)}'",
    }
    return _templates().get_template("page.html").render(values)


@cache
def _templates() -> Environment:
    return Environment(
        loader=PackageLoader("hetdpt.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


@cache
def _part(name: str) -> str:
    return files("hetdpt.report").joinpath("templates", name).read_text()


def _sum(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _page_title(records: Sequence[RunRecord]) -> str:
    if len(records) > 1:
        return f"{len(records)} runs compared"
    return f"{records[0].name}: {headline.title(records[0])}"


def _comparison(records: Sequence[RunRecord]) -> dict[str, Any]:
    found = {
        name: record for name, record in zip(tables.labels(records), records, strict=True) if record.results.measure
    }
    signs = [Sign(name, _swatch(speed.marker(record.method, 9, 7, 4.5)), name) for name, record in found.items()]
    return {
        "table": tables.runs_table(records),
        "figure": _figure(lambda width: speed.runs(records, width), signs=signs) if found else None,
        "places": list(dict.fromkeys(place(one.results.measure) for one in found.values() if one.results.measure)),
    }


def _view(record: RunRecord, key: str, name: str) -> dict[str, Any]:
    """Return what the template shows of a run; a part that is not there is None."""
    results = record.results
    parts = {
        "numbers": tables.before_and_after(results.measure) if results.measure else None,
        "layers": _layers(record) if results.analyse else None,
        "surface": _surface(record) if results.fit else None,
        "frontier": _frontier(record) if results.fit and results.allocate else None,
        "methods": _methods(record) if results.measure and results.compare else None,
        "recovery": _recovery(record) if results.recover and results.recover.epochs else None,
        "latency": _latency(record) if results.measure and results.measure.breakdown else None,
        "how": _how(record),
    }
    titles = TITLES if results.select else TITLES | {"layers": "Which layers can go"}
    measured_on, goal = results.measure or results.analyse, record.summary.goal if record.summary else None
    return {
        "key": key,
        "name": name,
        "record": record,
        "results": results,
        "phrases": headline.title(record).split(", "),
        "lead": headline.lead(record),
        "tiles": headline.tiles(record),
        "place": place(measured_on) if measured_on else None,
        "goal": goal,
        "goal_line": headline.goal_line(goal) if goal else f"Asked for: {wanted(record.goals)}",
        "difference": headline.difference(results.measure) if results.measure else "",
        "merged": headline.merged(results.merge) if results.merge else "",
        "trained": headline.trained(results.recover) if results.recover else "",
        "kept": KEPT.get(str(record.config.get("keep"))),
        "sections": {name: titles[name] for name, part in parts.items() if part is not None},
        **parts,
    }


def _figure(*draws: Callable[[float], Markup], wide: float = WIDE, signs: Iterable[Sign] = ()) -> Figure:
    return Figure(tuple((draw(wide), draw(NARROW)) for draw in draws), tuple(signs))


def _layers(record: RunRecord) -> Figure:
    signs = [Sign("stays" if record.results.select else "can go", _swatch(rectangle(1, 0, 16, 14, "kept", rx=3)))]
    if record.results.select:
        gone = rectangle(1, 0, 16, 14, "gone", rx=3), cross(9, 7, "crossed", 3)
        signs.append(Sign("went, with its turn", _swatch(*gone)))
    return _figure(lambda width: blocks.blocks(record, width), signs=signs)


def _surface(record: RunRecord) -> dict[str, Any]:
    fit, allocation = record.results.fit, record.results.allocate
    assert fit is not None
    signs = [Sign("sample", _swatch(cross(9, 7, "sample")))]
    if allocation:
        signs.append(Sign("chosen split", _swatch(circle(9, 7, 5.5, "chosen"))))
    if allocation and allocation.tied:
        signs.append(Sign("the best cannot be told from it", _swatch(rectangle(3, 1.5, 12, 11, "tied", rx=2))))
    signs.append(Sign("beyond the samples: a guess", _swatch(rectangle(2, 1, 14, 12, "hatched"))))
    return {
        "figure": _figure(lambda width: surface.surface(record, width), wide=SQUARE),
        "signs": signs,
        "fit": fit,
        "explained": percent(100 * max(fit.explained, 0), 0),
        "sure": headline.confidence(record),
        "warnings": allocation.warnings if allocation else fit.warnings,
    }


def _frontier(record: RunRecord) -> Figure:
    signs = [
        Sign("best predicted (hollow: a guess)", _swatch(circle(9, 7, 4, "best")), "best"),
        Sign("95 % intervals", _swatch(line(9, 1, 9, 13, "interval")), "intervals"),
        Sign("samples", _swatch(cross(9, 7, "sample")), "samples"),
        Sign("chosen split", _swatch(circle(9, 7, 5.5, "chosen")), "chosen"),
    ]
    if record.results.measure:
        signs.append(Sign("final model, measured", _swatch(shape("D", 9, 7, 4.5, "ink")), "final"))
    return _figure(lambda width: speed.frontier(record, width), signs=signs)


def _methods(record: RunRecord) -> dict[str, Any]:
    signs = [Sign("dense", _swatch(shape("*", 9, 7, 5, "ink")), "dense")]
    signs += [
        Sign(row.method, _swatch(speed.marker(row.method, 9, 7, 4.5)), row.method) for row in tables.compared(record)
    ]
    return {
        "figure": _figure(lambda width: speed.methods(record, width), signs=signs),
        "table": tables.comparison_table(record),
    }


def _recovery(record: RunRecord) -> Figure:
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


def _latency(record: RunRecord) -> dict[str, Any]:
    measured = record.results.measure
    assert measured is not None
    kinds = dict.fromkeys(kind for side in measured.breakdown.values() for kind in side)
    signs = [Sign(kind, _swatch(rectangle(2, 1, 14, 12, latency.colour_of(kind), rx=2)), kind) for kind in kinds]
    return {
        "figure": _figure(lambda width: latency.breakdown(measured, width), signs=signs),
        "table": tables.breakdown_table(measured),
        "doubt": headline.doubt(measured),
    }


def _how(record: RunRecord) -> dict[str, Any]:
    whole = record.seconds or 1.0
    return {
        "commands": commands(record),
        "stages": [
            (stage.name, latency.share(stage.seconds / whole), duration(stage.seconds) if stage.is_done else "not done")
            for stage in record.stages
        ],
        "seconds": duration(record.seconds),
        "versions": {package: ", ".join(found) for package, found in record.versions.items()},
        "config": record.config_text,
    }


def _swatch(*inside: Markup) -> Markup:
    return tag("svg", *inside, viewBox="0 0 18 14", class_="swatch", aria_hidden="true")
