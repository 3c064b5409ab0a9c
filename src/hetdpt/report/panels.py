"""The panels of a report, a row each: the page, the Markdown and the navigation follow ``PANELS``.

To add a panel, write a function that yields its parts and add a row. No torch here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from hetdpt.core.format import machine, percent
from hetdpt.core.plan import KINDS
from hetdpt.report import headline, run_charts, tables
from hetdpt.report.charts import PageFigure
from hetdpt.report.commands import Command, commands
from hetdpt.report.run import RunRecord
from hetdpt.report.tables import Table
from hetdpt.results import Results


@dataclass(frozen=True)
class Text:
    """A paragraph; its role is how it is shown: about, caption, warning, formula, or heading."""

    words: str
    role: str = "plain"


@dataclass(frozen=True)
class Bullets:
    """A list of sentences."""

    items: tuple[str, ...]


@dataclass(frozen=True)
class Figure:
    """A chart of the page; Markdown has none, so that its numbers have to be in a table or a list too."""

    draw: Callable[[RunRecord], PageFigure]


class Folded(NamedTuple):
    """A long text that the page shows on demand and Markdown leaves out."""

    about: str
    text: str


@dataclass(frozen=True)
class Beside:
    """Two columns on a wide page."""

    left: tuple[Part, ...]
    right: tuple[Part, ...]


Part = Text | Bullets | Figure | Table | Command | Folded | Beside


@dataclass(frozen=True)
class Panel:
    """A section of a report."""

    name: str
    """Its anchor in the page."""
    title: str
    is_shown: Callable[[Results], object]
    parts: Callable[[RunRecord], Iterator[Part]]


def panels_of(record: RunRecord) -> list[Panel]:
    """Return the panels that a run has."""
    return [panel for panel in PANELS if panel.is_shown(record.results)]


def _numbers(record: RunRecord) -> Iterator[Part]:
    measured = record.results.measure
    assert measured is not None
    yield tables.before_and_after(measured, record.metric)
    where = machine(measured, measured.batch)
    text = f"{headline.difference(record)} The models took turns on {where}."
    yield Text(f"{text} MACs are multiply-accumulates of one image.", "caption")


def _layers(record: RunRecord) -> Iterator[Part]:
    results, chosen = record.results, record.results.select
    text = ["A block of a transformer has attention, then an FFN with an activation."]
    if chosen is None:
        text.append("No layer is chosen yet.")
    elif not len(chosen.plan):
        text.append("No layer was removed.")
    else:
        text.append("An empty frame with a cross is a removed layer; its number says when it was removed.")
        text += [headline.merged(results.merge)] if results.merge else []
    if chosen and results.analyse:
        text += headline.stopped(chosen.plan, results.analyse)
        text += headline.kept(chosen.plan) + headline.narrower(chosen.plan)
    text += [headline.reduced(results.reduce.tokens)] if results.reduce else []
    yield Text(" ".join(text), "about")
    yield Figure(run_charts.blocks)
    if chosen:
        removed = {kind: ", ".join(map(str, getattr(chosen.plan, kind))) or "none" for kind in KINDS}
        yield Bullets(tuple(f"{kind} of blocks: {blocks}" for kind, blocks in removed.items()))
    if chosen and chosen.rounds:
        yield Text(
            "All that was removed, with the least damage for what it saves first; no labels, no training.", "about"
        )
        yield tables.rounds_table(chosen)


def _width(record: RunRecord) -> Iterator[Part]:
    balance, narrowing = record.results.balance, record.results.narrow
    if balance:
        yield Text(headline.balanced(balance), "about")
        yield Figure(run_charts.layers_and_width)
        yield tables.balance_table(balance)
        yield Text(
            "Split: attention + activation layers removed; ✓ was chosen. Untrained: accuracy before the brief "
            "fine-tuning. Merged, all were timed in turns with the dense model. The last columns are the removed part "
            "of each size.",
            "caption",
        )
    if narrowing:
        yield Text(headline.narrowed(narrowing))


def _surface(record: RunRecord) -> Iterator[Part]:
    fit, collected = record.results.fit, record.results.collect
    assert fit is not None
    given = f", each after brief fine-tuning, measured on {collected.measured_on}" if collected else " that were given"
    yield Text(
        f"The accuracy without so many layers of each kind: a polynomial through {len(fit.samples)} samples{given}. "
        "More colour is higher.",
        "about",
    )
    sure = headline.confidence(record)
    explained = percent(100 * max(fit.explained, 0), 0)
    yield Beside(
        (Figure(run_charts.surface),),
        (
            *((Text("How sure the split is", "heading"), Bullets(tuple(sure))) if sure else ()),
            Text("The polynomial", "heading"),
            Text(
                f"Of degree {fit.degree}. On samples left out, two at a time, it is off by {fit.mae:.2f} points on "
                f"average (RMSE {fit.rmse:.2f}) and explains {explained} of the variance of the accuracies."
            ),
        ),
    )
    yield Text(fit.pruned_formula, "formula")
    yield Text(
        "P is the accuracy in percent; p and q are the parts of attention and activation layers removed.", "caption"
    )
    for text in (record.results.allocate or fit).warnings:
        yield Text(text, "warning")


def _frontier(record: RunRecord) -> Iterator[Part]:
    results = record.results
    text = ["The best predicted split for each speedup."]
    if results.measure and results.collect:
        text.append(
            f"Samples had brief fine-tuning and were measured on {results.collect.measured_on}; the final model had "
            "all of it and was measured on the validation images, so it may be above or below the line."
        )
    if results.measure and results.narrow:
        text.append("The final model has lost width too.")
    if results.measure and results.reduce:
        text.append("The final model has fewer tokens, too.")
    yield Text(" ".join(text), "about")
    yield Figure(run_charts.frontier)


def _methods(record: RunRecord) -> Iterator[Part]:
    compared = record.results.compare
    assert compared is not None
    yield Text("Other methods chose as many layers and had the same fine-tuning.", "about")
    yield Figure(run_charts.methods)
    yield tables.comparison_table(record)
    yield Text(
        "Split: attention + activation layers removed. Untrained: accuracy before fine-tuning. Each was timed in turns "
        f"with the dense model. All on {compared.images:,} validation images.",
        "caption",
    )


KEPT = {
    "last": "The model after the last epoch was kept.",
    "best": "The model of the best epoch was kept, as measured on these images.",
    "ema": "The moving average of the weights was kept as the model.",
}


def _recovery(record: RunRecord) -> Iterator[Part]:
    found, merged = record.results.recover, record.results.merge
    assert found is not None
    kept = KEPT[merged.kept] if merged else ""
    measured = f"Each epoch was measured on {found.measured_on}; epoch 0 is before training."
    yield Text(f"{headline.trained(record)} {measured} {kept}".strip(), "about")
    yield Figure(run_charts.recovery)


def _latency(record: RunRecord) -> Iterator[Part]:
    measured = record.results.measure
    assert measured is not None
    yield Text(
        f"Milliseconds of a batch by kind of layer, on {machine(measured, measured.batch)}. Timing each layer takes a "
        "little time itself, so the sum differs slightly from the time of a batch.",
        "about",
    )
    if doubt := headline.doubt(measured):
        yield Text(doubt, "warning")
    yield Figure(run_charts.latency)
    yield tables.breakdown_table(measured)


def _how(record: RunRecord) -> Iterator[Part]:
    yield from commands(record)
    yield Folded("All settings (config.yaml)", record.config_text)
    yield tables.time_table(record)
    versions = ", ".join(f"{package} {', '.join(found)}" for package, found in record.versions.items())
    if versions:
        yield Text(f"Versions: {versions}.")


PANELS = (
    Panel("numbers", "Before and after", lambda found: found.measure, _numbers),
    Panel("layers", "Removable layers", lambda found: found.analyse and not found.select, _layers),
    Panel("layers", "Removed layers", lambda found: found.analyse and found.select, _layers),
    Panel("width", "Layers and width", lambda found: found.balance, _width),
    Panel("width", "Removed width", lambda found: found.narrow and not found.balance, _width),
    Panel("surface", "Predicted accuracy", lambda found: found.fit, _surface),
    Panel("frontier", "Other budgets", lambda found: found.fit and found.allocate, _frontier),
    Panel("methods", "Other methods", lambda found: found.measure and found.compare, _methods),
    Panel("recovery", "Fine-tuning", lambda found: found.recover and found.recover.epochs, _recovery),
    Panel("latency", "Time by kind of layer", lambda found: found.measure and found.measure.breakdown, _latency),
    Panel("how", "How to reproduce it", lambda found: True, _how),
)
