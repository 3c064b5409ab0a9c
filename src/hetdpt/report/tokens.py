"""Models with fewer tokens as a figure and as a table for spreadsheets. Draws what it is given; no torch."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetdpt.core.format import layers
from hetdpt.report.panels import require_figure, tidy
from hetdpt.report.scan import Look

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Point = Mapping[str, Any]
"""One of ``points`` in tokens.json: a model with so many of its tokens gone."""
LOOKS = (
    Look("#0072B2", "o"),
    Look("#D55E00", "s"),
    Look("#009E73", "^"),
    Look("#CC79A7", "D"),
    Look("#E69F00", "v"),
    Look("#56B4E9", "P"),
)


def write_csv(points: Sequence[Point], path: Path) -> None:
    """Write one line for each point."""
    with path.open("w", newline="", encoding="utf-8") as file:
        lines = csv.DictWriter(file, list(points[0]))
        lines.writeheader()
        lines.writerows(points)


def name_of(point: Point) -> str:
    """Return the model of a point, with the layers that it has lost.

    >>> name_of({"model": "vit", "attention": 3, "activation": 0})
    'vit, 3 attention layers gone'
    """
    gone = point["attention"], point["activation"]
    return f"{point['model']}, {layers(*gone)} gone" if any(gone) else str(point["model"])


def draw(points: Sequence[Point], path: Path) -> None:
    """Write a figure, PNG or SVG by the name of the file: accuracy by throughput, a line for each model.

    Throughput is that of the first point times the speedup over it, since a speedup is of runs in turns.
    """
    require_figure(path)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 6.5), layout="constrained")
    panel = figure.subplots()
    models = list(dict.fromkeys(point["model"] for point in points))
    for number, model in enumerate(models):
        some = [point for point in points if point["model"] == model]
        _draw_model(panel, some, points[0]["throughput"], LOOKS[number % len(LOOKS)])
    _finish(panel, points[0])
    figure.savefig(path, dpi=150, format=path.suffix[1:].lower())


def _draw_model(panel: Axes, points: Sequence[Point], first: float, look: Look) -> None:
    def throughputs(name: str) -> list[float]:
        return [first * point[name] for point in points]

    places, values = throughputs("speedup"), [point["top1"] for point in points]
    looks: Any = {"color": look.colour, "marker": look.marker, "markersize": 6, "linewidth": 1.2}
    panel.plot(places, values, label=name_of(points[0]), zorder=3, **looks)
    bars: Any = {"color": look.colour, "alpha": 0.25, "linewidth": 3, "zorder": 1}
    panel.vlines(places, [point["low"] for point in points], [point["high"] for point in points], **bars)
    panel.hlines(values, throughputs("speedup_low"), throughputs("speedup_high"), **bars)
    for point, place, value in zip(points, places, values, strict=True):
        at: Any = {"xytext": (6, 6), "textcoords": "offset points", "fontsize": "small", "color": look.colour}
        panel.annotate(f"r {point['r']}", (place, value), zorder=4, **at)


def _finish(panel: Axes, first: Point) -> None:
    how = f"{first['method']}, {first['schedule']} schedule"
    panel.set_title(f"{how}: r tokens fewer by each attention; bars: 95 % intervals, {first['images']} images")
    panel.set_xlabel(f"throughput [images/s] ({first['device']}, {first['dtype']}, batch {first['batch']})")
    tidy(panel, columns=2)
