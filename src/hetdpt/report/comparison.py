"""A comparison of methods as a figure and as rows for a spreadsheet. Draws what it is given; no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetdpt.core.format import removal_text
from hetdpt.report.charts import Chart, save
from hetdpt.report.run_charts import DENSE, method_look

if TYPE_CHECKING:
    from hetdpt.results import MethodComparison, MethodSummary

COLUMNS = (
    "layers", "method", "seed", "split", "attention", "activation", "removal", "start", "accuracy", "speedup",
    "speedup_low", "speedup_high", "measured", "macs", "macs_part", "params", "seconds",
)  # fmt: skip
EMPHASISED = "hetdpt"


def csv_rows(comparison: MethodComparison) -> Iterator[dict[str, Any]]:
    """Yield one row for each number of layers, method and seed."""
    for row in comparison.rows:
        plan, speed = row.plan, row.speed
        blocks = (" ".join(map(str, numbers)) for numbers in (plan.attention, plan.activation))
        values = (
            row.layers, row.method, row.seed, row.split, *blocks, removal_text(plan.removal), row.start, row.accuracy,
            speed.speedup, speed.low, speed.high, comparison.measured, speed.macs, speed.macs / comparison.dense.macs,
            speed.params, round(row.seconds, 1),
        )  # fmt: skip
        yield dict(zip(COLUMNS, values, strict=True))


def draw(comparison: MethodComparison, path: Path) -> None:
    """Write a figure, PNG or SVG by its name: accuracy by measured speedup, a line for each method."""

    def draw_all(chart: Chart) -> None:
        for method in comparison.methods:
            _draw_method(chart, method, comparison.of(method))
        for summary in comparison.of(EMPHASISED):
            _label(chart, summary, comparison)
        chart.plot([1.0], [comparison.dense.accuracy], DENSE, "dense")
        seeds = max(len(summary.seeds) for summary in comparison.summaries)
        bars = f"; bars: standard deviation over {seeds} seeds" if seeds > 1 else "; one seed"
        title = f"same fine-tuning for all, {comparison.dense.images} validation images{bars}"
        chart.name(f"measured speedup over the dense model ({comparison.measured})", "accuracy [%]", title)
        chart.legend(columns=5)

    save(path, draw_all)


def _draw_method(chart: Chart, method: str, found: Sequence[MethodSummary]) -> None:
    # methods that chose the same layers cover each other: ours is below, the others are hollow
    ours: Any = {"line": "-", "width": 3, "size": 13, "alpha": 0.6, "order": 2}
    others: Any = {"line": "-", "width": 1.1, "size": 7, "fill": "none"}
    look = replace(method_look(method), **(ours if method == EMPHASISED else others))
    places, values = [summary.speedup for summary in found], [summary.accuracy for summary in found]
    chart.plot(places, values, look, method)
    spreads = [summary.spread or 0.0 for summary in found]
    if any(spreads):
        colour = chart.colour(look.colour)
        chart.panel.errorbar(places, values, spreads, color=colour, linestyle="none", capsize=3, zorder=look.order)


def _label(chart: Chart, summary: MethodSummary, comparison: MethodComparison) -> None:
    """Name a point by its split, and by the other methods at the same place, or their number."""
    at = summary.speedup, summary.accuracy
    others = [one.method for one in comparison.summaries if (one.speedup, one.accuracy) == at and one is not summary]
    names = ", ".join(others) if len(others) == 1 else f"{len(others)} others"
    text = ", ".join(summary.splits) + (f", also of {names}" if others else "")
    chart.text(*at, text, (8, 8), fontsize="small")
