"""Predictions as JSON, as tables for spreadsheets and as a figure. Draws what it is given; no torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetdpt.core.format import split_text
from hetdpt.core.plan import Budget
from hetdpt.report.charts import Chart, save
from hetdpt.report.run_charts import Frontier, SpeedAxis
from hetdpt.results import CollectedSample, Prices, Split

if TYPE_CHECKING:
    from hetdpt.selection.predictor.allocate import Allocation
    from hetdpt.selection.predictor.polynomial import Predictor

# Never "accuracy": a table of predictions must not be taken for one of samples.
COLUMNS = ("attention", "activation", "layers", "predicted", "low", "high", "is_beyond", "macs", "params", "speedup")
CHOICE = (*COLUMNS, "share", "is_tied", "measured")  # a split has these only among others that meet the same goal
WIDE, HIGH = 0.055, 0.045  # part of the chart that a label covers


def summary(
    predictor: Predictor, frontier: Sequence[Split], allocation: Allocation | None = None, prices: Prices | None = None
) -> dict[str, Any]:
    """Return everything that is known, as values for JSON; an infinite speedup is None."""
    return {
        "blocks": predictor.blocks,
        "samples": [
            {"a": a, "t": t, "accuracy": accuracy}
            for (a, t), accuracy in zip(predictor.points, predictor.accuracies, strict=True)
        ],
        "fit": _fit(predictor),
        "wanted": allocation.wanted.conditions if allocation else None,
        "budget": asdict(allocation.budget) if allocation else None,
        "table": [values_of(split, is_choice=True) for split in allocation.table] if allocation else None,
        "frontier": [values_of(split) for split in frontier],
        "prices": json.loads(prices.to_json()) if prices else None,
        "warnings": list(allocation.warnings if allocation else predictor.warnings),
    }


def _fit(predictor: Predictor) -> dict[str, Any]:
    names = ("degree", "mae", "rmse", "explained", "formula", "coefficients", "pruned_formula", "pruned_coefficients")
    return {
        **{name: getattr(predictor, name) for name in names},
        "tried": [asdict(row) for row in predictor.tried],
    }


def values_of(split: Split, is_choice: bool = False) -> dict[str, Any]:
    """Return a split by ``COLUMNS``, or by ``CHOICE`` where it ``is_choice``: one of a table for a budget."""
    speedup = split.speedup if split.speedup is not None and isfinite(split.speedup) else None
    known = {**asdict(split.budget), "predicted": split.accuracy, "speedup": speedup}
    names = CHOICE if is_choice else COLUMNS
    return {name: known[name] if name in known else getattr(split, name) for name in names}


def draw(
    frontier: Sequence[Split],
    predictor: Predictor,
    path: Path,
    prices: Prices | None = None,
    chosen: Split | None = None,
) -> None:
    """Write a figure, PNG or SVG by its name: accuracy by predicted speedup, or by layers where nothing is timed."""
    blocks = predictor.blocks
    samples = [
        CollectedSample(budget=Budget(round((1 - a) * blocks), round((1 - t) * blocks)), accuracy=accuracy)
        for (a, t), accuracy in zip(predictor.points, predictor.accuracies, strict=True)
    ]
    found = Frontier(frontier, samples, SpeedAxis(prices), chosen)
    device = f", by the time of each layer ({prices.measured or 'on an unknown device'})" if prices else ""

    def draw_all(chart: Chart) -> None:
        found.draw(chart)
        _label(chart, found)
        across = found.axis.label + (device if found.axis.is_timed else "")
        title = "best predicted accuracy; 4+2 is without 4 attention and 2 activation layers"
        chart.name(across, "accuracy [%]", title)
        chart.legend(columns=5)
        if left_out := len(frontier) - len(found.shown):
            corner: Any = {"transform": chart.panel.transAxes, "ha": "right", "va": "top", "fontsize": "x-small"}
            chart.panel.text(1, 1, f"{left_out} further out are not drawn", **corner)

    save(path, draw_all)


def _label(chart: Chart, found: Frontier) -> None:
    """Name splits as attention+activation, as many as fit beside each other."""
    (left, right), (low, high) = chart.panel.get_xlim(), chart.panel.get_ylim()
    named: list[tuple[float, float]] = []
    for split in found.shown:
        x, y = found.axis(split.budget), split.accuracy
        at = (x - left) / (right - left), (y - low) / (high - low)
        if all(abs(at[0] - other[0]) > WIDE or abs(at[1] - other[1]) > HIGH for other in named):
            named.append(at)
            chart.text(x, y, split_text(split.budget), (5, 5), fontsize="small")
