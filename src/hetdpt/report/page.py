"""Runs as one HTML page that needs nothing else: style, script and charts are in it, and it uses no network.

Templates escape everything that they are given. The page forbids itself every script but its own, by its checksum.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from hetdpt.core.format import counted, machine
from hetdpt.core.goals import describe
from hetdpt.report import headline, run_charts, tables
from hetdpt.report.commands import further
from hetdpt.report.panels import panels_of
from hetdpt.report.run import RunRecord


def render(records: Sequence[RunRecord], data: Any) -> str:
    """Return the page of one run, or of several; ``data`` is what it offers as JSON."""
    names = tables.labels(records)
    return fill(
        "page.html",
        title=_page_title(records),
        runs=[_view(record, f"run-{number}", names[number]) for number, record in enumerate(records)],
        comparison=_comparison(records, names) if len(records) > 1 else None,
        data=data,
    )


def fill(template: str, **values: Any) -> str:
    """Return a page: a template that extends ``base.html``, with its ``title``, ``data`` and other values."""
    style, script = _file("style.css"), _file("script.js")
    policy = f"default-src 'none'; img-src data:; style-src '{_sum(style)}'; script-src '{_sum(script)}'"
    found = _templates().get_template(template)
    return found.render(**values, style=Markup(style), script=Markup(script), policy=policy)


@cache
def _templates() -> Environment:
    found = Environment(
        loader=PackageLoader("hetdpt.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters["kind"] = lambda part: type(part).__name__
    return found


@cache
def _file(name: str) -> str:
    return files("hetdpt.report").joinpath("templates", name).read_text(encoding="utf-8")


def _sum(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _page_title(records: Sequence[RunRecord]) -> str:
    if len(records) > 1:
        return f"{len(records)} runs compared"
    return f"{records[0].name}: {headline.title(records[0])}"


def _comparison(records: Sequence[RunRecord], names: Sequence[str]) -> dict[str, Any]:
    measured = [record.results.measure for record in records if record.results.measure]
    return {
        "table": tables.runs_table(records),
        "drawing": run_charts.runs(records, names) if measured else None,
        "machines": list(dict.fromkeys(machine(one, one.batch) for one in measured)),
    }


def _view(record: RunRecord, key: str, name: str) -> dict[str, Any]:
    measured, analysis = record.results.measure, record.results.analyse
    goal = record.summary.goal if record.summary else None
    where = ""
    if measured:
        count = f"{measured.pruned.accuracy.count:,}"
        images = "validation images" if record.is_labelled else "images that were held out; no labels"
        where = f"{machine(measured, measured.batch)}; {record.metric} on {count} {images}"
    elif analysis:
        where = machine(analysis)
    return {
        "key": key,
        "name": name,
        "record": record,
        "phrases": headline.title(record).split(", "),
        "lead": headline.lead(record),
        "tiles": headline.tiles(record),
        "where": where,
        "goal": goal,
        "goal_line": headline.goal_line(goal, record.results) if goal else f"Goal: {describe(record.goals)}",
        "next": further(goal.next.budget, record.directory) if goal and goal.next else None,
        "panels": [(panel, list(panel.parts(record))) for panel in panels_of(record)],
        "warnings": counted(len(record.warnings), "warning") if record.warnings else "",
    }
