"""Models with fewer tokens as a figure. Draws what it is given; no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hetdpt.core.format import layers
from hetdpt.report.charts import BLUE, GREEN, ORANGE, PINK, SKY, YELLOW, Chart, Look, save

Point = Mapping[str, Any]
"""One of ``points`` in tokens.json: a model with so many of its tokens removed."""
COLOURS = BLUE, ORANGE, GREEN, PINK, YELLOW, SKY
LOOKS = [Look(colour, marker, line="-") for colour, marker in zip(COLOURS, "os^DvP", strict=True)]


def name_of(point: Point) -> str:
    """Return the model of a point, with the layers removed from it.

    >>> name_of({"model": "vit", "attention": 3, "activation": 0})
    'vit, 3 attention layers removed'
    """
    removed = point["attention"], point["activation"]
    return f"{point['model']}, {layers(*removed)} removed" if any(removed) else str(point["model"])


def draw(points: Sequence[Point], path: Path) -> None:
    """Write a figure, PNG or SVG by its name: accuracy by throughput, a line for each model.

    Throughput is that of the first point times the speedup over it, since the models were timed in turns.
    """
    first = points[0]

    def draw_all(chart: Chart) -> None:
        for number, model in enumerate(dict.fromkeys(point["model"] for point in points)):
            some = [point for point in points if point["model"] == model]
            _draw_model(chart, some, first["throughput"], LOOKS[number % len(LOOKS)])
        how = f"{first['method']}, {first['schedule']} schedule"
        title = f"{how}: r tokens fewer by each attention; bars: 95 % intervals, {first['images']} images"
        across = f"throughput [images/s] ({first['device']}, {first['dtype']}, batch {first['batch']})"
        chart.name(across, "accuracy [%]", title)
        chart.legend(columns=2)

    save(path, draw_all)


def _draw_model(chart: Chart, points: Sequence[Point], first: float, look: Look) -> None:
    def throughputs(name: str) -> list[float]:
        return [first * point[name] for point in points]

    places, values = throughputs("speedup"), [point["top1"] for point in points]
    chart.plot(places, values, look, name_of(points[0]))
    bars: Any = {"color": look.colour, "alpha": 0.25, "linewidth": 3, "zorder": 1}
    chart.panel.vlines(places, [point["low"] for point in points], [point["high"] for point in points], **bars)
    chart.panel.hlines(values, throughputs("speedup_low"), throughputs("speedup_high"), **bars)
    for point, place, value in zip(points, places, values, strict=True):
        chart.text(place, value, f"r {point['r']}", (6, 6), fontsize="small", color=look.colour)
