"""Runs as one HTML page that needs nothing else: style, script and pictures are in it, and no address is asked.

Templates escape all that they are given. The page forbids itself every script but its own, by its checksum.
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

from hetdpt.core.format import duration, machine, percent
from hetdpt.core.goals import describe
from hetdpt.report import figures, headline, tables
from hetdpt.report.commands import commands, further
from hetdpt.report.pictures.latency import share
from hetdpt.report.run import RunRecord

TITLES = {
    "numbers": "Before and after",
    "layers": "Which layers went",
    "width": "Layers or width",
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
    return files("hetdpt.report").joinpath("templates", name).read_text(encoding="utf-8")


def _sum(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _page_title(records: Sequence[RunRecord]) -> str:
    if len(records) > 1:
        return f"{len(records)} runs compared"
    return f"{records[0].name}: {headline.title(records[0])}"


def _comparison(records: Sequence[RunRecord]) -> dict[str, Any]:
    measured = [record.results.measure for record in records if record.results.measure]
    return {
        "table": tables.runs_table(records),
        "figure": figures.runs(records) if measured else None,
        "places": list(dict.fromkeys(machine(one, one.batch) for one in measured)),
    }


def _view(record: RunRecord, key: str, name: str) -> dict[str, Any]:
    """Return what the template shows of a run; a part that is not there is None."""
    results = record.results
    parts = {
        "numbers": tables.before_and_after(results.measure) if results.measure else None,
        "layers": figures.layers(record) if results.analyse else None,
        "width": _width(record) if results.balance or results.narrow else None,
        "surface": figures.surface(record) if results.fit else None,
        "frontier": figures.frontier(record) if results.fit and results.allocate else None,
        "methods": figures.methods(record) if results.measure and results.compare else None,
        "recovery": figures.recovery(record) if results.recover and results.recover.epochs else None,
        "latency": figures.latency(record) if results.measure and results.measure.breakdown else None,
        "how": _how(record),
    }
    titles = TITLES | ({} if results.select else {"layers": "Which layers can go"})
    titles |= {} if results.balance else {"width": "How much width went"}
    measured_on, goal = results.measure or results.analyse, record.summary.goal if record.summary else None
    return {
        "key": key,
        "name": name,
        "record": record,
        "results": results,
        "phrases": headline.title(record).split(", "),
        "lead": headline.lead(record),
        "tiles": headline.tiles(record),
        "place": machine(measured_on, results.measure.batch if results.measure else None) if measured_on else None,
        "goal": goal,
        "further": further(goal.next.budget, record.directory) if goal and goal.next else None,
        "goal_line": headline.goal_line(goal) if goal else f"Asked for: {describe(record.goals)}",
        "difference": headline.difference(results.measure) if results.measure else "",
        "merged": headline.merged(results.merge) if results.merge else "",
        "tokens": headline.reduced(results.reduce.tokens) if results.reduce else "",
        "trained": headline.trained(record),
        "kept": KEPT.get(str(record.config.get("keep"))),
        "explained": percent(100 * max(results.fit.explained, 0), 0) if results.fit else "",
        "sure": headline.confidence(record),
        "doubt": headline.doubt(results.measure) if results.measure else "",
        "compared": tables.comparison_table(record),
        "times": tables.breakdown_table(results.measure) if results.measure else None,
        "sections": {name: titles[name] for name, part in parts.items() if part is not None},
        **parts,
    }


def _width(record: RunRecord) -> dict[str, Any]:
    balance, narrowing = record.results.balance, record.results.narrow
    return {
        "about": headline.balanced(balance) if balance else "",
        "figure": figures.layers_or_width(record) if balance else None,
        "table": tables.balance_table(balance) if balance else None,
        "chosen": balance.chosen if balance else None,
        "narrowed": headline.narrowed(narrowing) if narrowing else "",
    }


def _how(record: RunRecord) -> dict[str, Any]:
    whole = record.seconds or 1.0
    return {
        "commands": commands(record),
        "stages": [
            (stage.name, share(stage.seconds / whole), duration(stage.seconds) if stage.is_done else "not done")
            for stage in record.stages
            if stage.is_done or not record.is_finished  # the page is written before its own stage is done
        ],
        "seconds": duration(record.seconds),
        "versions": {package: ", ".join(found) for package, found in record.versions.items()},
        "config": record.config_text,
    }
