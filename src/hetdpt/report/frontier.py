"""What is predicted, as values for JSON, tables for spreadsheets and a figure. Draws what it is given; no torch."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from math import inf, isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetdpt.core.plan import Budget
from hetdpt.report.panels import require_figure, tidy

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from hetdpt.results import Prices, Split
    from hetdpt.selection.predictor.allocate import Allocation
    from hetdpt.selection.predictor.polynomial import Predictor

# Never "accuracy": a table of predictions is not to be taken for one of samples.
COLUMNS = ("attention", "activation", "layers", "predicted", "low", "high", "is_beyond", "macs", "params", "speedup")
CHOICE = ("share", "is_tied", "measured")  # which a split has only among others that meet the same
LINE, SAMPLE, CHOSEN = "#0072B2", "#D55E00", "#009E73"  # of Okabe and Ito, which the colour-blind tell apart
REACH = 1.6  # times as far as the samples the figure goes; beyond, the polynomial is a guess
WIDE, HIGH = 0.055, 0.045  # parts of the figure that a label takes


def summary(
    predictor: Predictor, frontier: Sequence[Split], allocation: Allocation | None = None, prices: Prices | None = None
) -> dict[str, Any]:
    """Return all that is known, as values for JSON; a speedup that is infinite is None."""
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
    """Return a split by ``COLUMNS``, and ``CHOICE`` where it ``is_choice``: one of a table for a budget."""
    speedup = split.speedup if split.speedup is not None and isfinite(split.speedup) else None
    known = {**asdict(split.budget), "predicted": split.accuracy, "speedup": speedup}
    names = (*COLUMNS, *CHOICE) if is_choice else COLUMNS
    return {name: known[name] if name in known else getattr(split, name) for name in names}


def write_csv(splits: Sequence[Split], path: Path, is_choice: bool = False) -> None:
    """Write one line for each split; a cell is empty where there is no such number."""
    with path.open("w", newline="", encoding="utf-8") as file:
        lines = csv.DictWriter(file, (*COLUMNS, *CHOICE) if is_choice else COLUMNS)
        lines.writeheader()
        lines.writerows(values_of(split, is_choice) for split in splits)


@dataclass(frozen=True)
class View:
    """What the axis along the bottom counts."""

    predictor: Predictor
    prices: Prices | None

    @property
    def is_timed(self) -> bool:
        return self.prices is not None and self.prices.dense.ms is not None

    @property
    def label(self) -> str:
        if self.prices is None or not self.is_timed:
            return "layers removed"
        return f"predicted speedup, by the time of each layer ({self.prices.measured or 'on an unknown device'})"

    def place(self, budget: Budget) -> float:
        """Return where a budget lies: its speedup or, where nothing is timed, its number of layers."""
        if self.prices is None or not self.is_timed:
            return budget.attention + budget.activation
        speedup = self.prices.speedup(budget)
        return inf if speedup is None else speedup

    @property
    def samples(self) -> list[tuple[float, float]]:
        """(where it lies, accuracy) of each sample."""
        blocks, found = self.predictor.blocks, []
        for (a, t), accuracy in zip(self.predictor.points, self.predictor.accuracies, strict=True):
            budget = Budget(round((1 - a) * blocks), round((1 - t) * blocks))
            found.append((self.place(budget), accuracy))
        return [point for point in found if isfinite(point[0])]


def draw(
    frontier: Sequence[Split],
    predictor: Predictor,
    path: Path,
    prices: Prices | None = None,
    chosen: Split | None = None,
) -> None:
    """Write a figure, PNG or SVG by the name of the file: accuracy by speedup, or by layers where nothing is timed."""
    require_figure(path)
    from matplotlib.figure import Figure

    view = View(predictor, prices)
    if chosen is not None and not isfinite(view.place(chosen.budget)):
        chosen = None
    shown = _in_reach(frontier, view, chosen)
    figure = Figure(figsize=(10, 6.5), layout="constrained")
    panel = figure.subplots()
    _limit(panel, [*shown, chosen] if chosen else shown, view)
    _draw_frontier(panel, shown, view)
    places, accuracies = zip(*view.samples, strict=True)
    panel.scatter(places, accuracies, s=26, color=SAMPLE, marker="x", zorder=4, label="samples")
    if chosen is not None:
        _draw_chosen(panel, chosen, view)
    _label(panel, shown, view)
    _finish(panel, view, len(frontier) - len(shown))
    figure.savefig(path, dpi=150, format=path.suffix[1:].lower())


def _in_reach(frontier: Sequence[Split], view: View, chosen: Split | None) -> list[Split]:
    """Return the splits that the figure shows: to ``REACH`` times the samples, and as far as the chosen one."""
    start = view.place(Budget(0, 0))
    far = start + REACH * (max(place for place, _ in view.samples) - start)
    if chosen is not None:
        far = max(far, view.place(chosen.budget))
    return [split for split in frontier if view.place(split.budget) <= far]


def _limit(panel: Axes, splits: Sequence[Split], view: View) -> None:
    """Set the limits by what is predicted and measured; intervals may leave them."""
    places = [view.place(split.budget) for split in splits] + [place for place, _ in view.samples]
    values = [split.accuracy for split in splits] + [accuracy for _, accuracy in view.samples]
    for set_, found in ((panel.set_xlim, places), (panel.set_ylim, values)):
        span = max(found) - min(found) or 1.0
        set_(min(found) - 0.04 * span, max(found) + 0.08 * span)


def _draw_frontier(panel: Axes, splits: Sequence[Split], view: View) -> None:
    places = [view.place(split.budget) for split in splits]
    # no band: neighbours on the frontier may be a sample, which is known well, and a mixed split, which is not
    lows, highs = [split.low for split in splits], [split.high for split in splits]
    panel.vlines(places, lows, highs, color=LINE, alpha=0.25, linewidth=3, zorder=1, label="95 % interval")
    for one, two in pairwise(splits):
        dashes = "--" if one.is_beyond or two.is_beyond else "-"
        ends = [view.place(one.budget), view.place(two.budget)]
        panel.plot(ends, [one.accuracy, two.accuracy], color=LINE, linestyle=dashes, linewidth=1.2, zorder=2)
    for is_beyond, label in ((False, "best predicted"), (True, "the same, beyond the samples")):
        some = [split for split in splits if split.is_beyond == is_beyond]
        if some:
            places, values = [view.place(split.budget) for split in some], [split.accuracy for split in some]
            look: Any = {"s": 30, "color": "white" if is_beyond else LINE, "edgecolors": LINE, "zorder": 3}
            panel.scatter(places, values, label=label, **look)


def _draw_chosen(panel: Axes, split: Split, view: View) -> None:
    text = f"chosen: {_short(split)}"
    place: Any = {"s": 130, "marker": "o", "facecolors": "none", "edgecolors": CHOSEN, "linewidths": 2, "zorder": 5}
    panel.scatter([view.place(split.budget)], [split.accuracy], label=text, **place)


def _label(panel: Axes, splits: Sequence[Split], view: View) -> None:
    """Name splits as attention+activation, as many as fit beside each other."""
    (left, right), (low, high) = panel.get_xlim(), panel.get_ylim()
    named: list[tuple[float, float]] = []
    for split in splits:
        x, y = view.place(split.budget), split.accuracy
        at = (x - left) / (right - left), (y - low) / (high - low)
        if all(abs(at[0] - other[0]) > WIDE or abs(at[1] - other[1]) > HIGH for other in named):
            named.append(at)
            place: Any = {"xytext": (5, 5), "textcoords": "offset points", "fontsize": "small", "zorder": 6}
            panel.annotate(_short(split), (x, y), **place)


def _short(split: Split) -> str:
    return f"{split.budget.attention}+{split.budget.activation}"


def _finish(panel: Axes, view: View, left_out: int) -> None:
    panel.set_title("best predicted accuracy; 4+2 is without 4 attention and 2 activation layers")
    panel.set_xlabel(view.label)
    panel.locator_params(axis="x", integer=not view.is_timed)
    tidy(panel, columns=5)
    if left_out:
        corner: Any = {"transform": panel.transAxes, "ha": "right", "va": "top", "fontsize": "x-small"}
        panel.text(1, 1, f"{left_out} further out are not drawn", **corner)
