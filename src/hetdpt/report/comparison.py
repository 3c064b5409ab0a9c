"""A comparison of methods as a figure and as a table for spreadsheets. Draws what it is given; no torch."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetdpt.report.observation import spell
from hetdpt.report.panels import require_figure, tidy
from hetdpt.report.scan import Look

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from hetdpt.results import ComparisonRow, MethodComparison, MethodSummary

COLUMNS = (
    "layers", "method", "seed", "split", "attention", "activation", "removal", "start", "accuracy", "speedup",
    "speedup_low", "speedup_high", "measured", "macs", "macs_part", "params", "seconds",
)  # fmt: skip
LOOKS = {
    "hetdpt": Look("#D55E00", "o"),
    "map+te": Look("#E69F00", "s"),
    "map+greedy": Look("#882255", "d"),
    "te-static": Look("#0072B2", "^"),
    "importance-only": Look("#009E73", "D"),
    "attention-only": Look("#56B4E9", "v"),
    "activation-only": Look("#CC79A7", "P"),
    "random": Look("#999999", "X"),
    "calibrated-greedy": Look("#000000", "h"),
}
OTHER = Look("#000000", ".")
EMPHASISED = "hetdpt"


def write_csv(comparison: MethodComparison, path: Path) -> None:
    """Write one line for each number of layers, method and seed."""
    with path.open("w", newline="", encoding="utf-8") as file:
        lines = csv.DictWriter(file, COLUMNS)
        lines.writeheader()
        lines.writerows(_cells(row, comparison) for row in comparison.rows)


def _cells(row: ComparisonRow, comparison: MethodComparison) -> dict[str, Any]:
    plan, speed = row.plan, row.speed
    values = (
        row.layers, row.method, row.seed, row.split, _blocks(plan.attention), _blocks(plan.activation),
        spell(plan.removal), row.start, row.accuracy, speed.speedup, speed.low, speed.high, comparison.measured,
        speed.macs, speed.macs / comparison.dense.macs, speed.params, round(row.seconds, 1),
    )  # fmt: skip
    return dict(zip(COLUMNS, values, strict=True))


def _blocks(blocks: Sequence[int]) -> str:
    return " ".join(str(block) for block in blocks)


def draw(comparison: MethodComparison, path: Path) -> None:
    """Write a figure, PNG or SVG by the name of the file: accuracy by measured speedup, a line for each method."""
    require_figure(path)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 6.5), layout="constrained")
    panel = figure.subplots()
    for method in comparison.methods:
        _draw_method(panel, method, comparison.of(method))
    for summary in comparison.of(EMPHASISED):
        _label(panel, summary, comparison)
    dense: Any = {"s": 90, "color": "#000000", "marker": "*", "zorder": 5, "label": "dense"}
    panel.scatter([1.0], [comparison.dense.accuracy], **dense)
    _finish(panel, comparison)
    figure.savefig(path, dpi=150, format=path.suffix[1:].lower())


def _draw_method(panel: Axes, method: str, found: Sequence[MethodSummary]) -> None:
    look, is_ours = LOOKS.get(method, OTHER), method == EMPHASISED
    places, values = [summary.speedup for summary in found], [summary.accuracy for summary in found]
    spreads = [summary.spread or 0.0 for summary in found]
    bars: Any = {"yerr": spreads, "capsize": 3} if any(spreads) else {}
    # methods that chose the same lie on each other: ours is below, the others are hollow
    ours: Any = {"linewidth": 3, "markersize": 13, "alpha": 0.6, "zorder": 2}
    others: Any = {"linewidth": 1.1, "markersize": 7, "markerfacecolor": "none", "zorder": 3}
    size = ours if is_ours else others
    panel.errorbar(places, values, color=look.colour, marker=look.marker, label=method, **bars, **size)


def _label(panel: Axes, summary: MethodSummary, comparison: MethodComparison) -> None:
    """Name a point by its split, and by the methods that lie on it, or how many they are."""
    at = summary.speedup, summary.accuracy
    others = [one.method for one in comparison.summaries if (one.speedup, one.accuracy) == at and one is not summary]
    names = ", ".join(others) if len(others) == 1 else f"{len(others)} others"
    text = ", ".join(summary.splits) + (f", also of {names}" if others else "")
    panel.annotate(text, at, xytext=(8, 8), textcoords="offset points", fontsize="small", zorder=6)


def _finish(panel: Axes, comparison: MethodComparison) -> None:
    seeds = max(len(summary.seeds) for summary in comparison.summaries)
    bars = f"; bars: standard deviation over {seeds} seeds" if seeds > 1 else "; one seed"
    panel.set_title(f"same fine-tuning for all, {comparison.dense.images} validation images{bars}")
    panel.set_xlabel(f"measured speedup over the dense model ({comparison.measured})")
    tidy(panel, columns=5)
