"""Where the time goes: bars."""

from __future__ import annotations

from markupsafe import Markup

from hetdpt.core.format import milliseconds, percent
from hetdpt.report.pictures.svg import LETTER, Scale, drawing, mark, rectangle, tag, text
from hetdpt.results import MeasureResult

KINDS = ("attention", "FFN linear", "activation", "norm", "other")
"""Kinds of layers that have a colour of their own."""
LEFT, RIGHT, HIGH, STEP = 62.0, 76.0, 44.0, 62.0
Box = tuple[float, float, float, float]


def breakdown(measured: MeasureResult, width: float) -> Markup:
    """Return two bars, dense and pruned: the milliseconds of a batch by kind of layer."""
    sides = {name: measured.breakdown.get(name, {}) for name in ("dense", "pruned")}
    scale = Scale(0, max(sum(parts.values()) for parts in sides.values()) or 1.0, LEFT, width - RIGHT)
    parts: list[Markup] = []
    for row, (side, times) in enumerate(sides.items()):
        y, begin, total = 6 + row * STEP, 0.0, sum(times.values())
        parts.append(text(0, y + HIGH / 2 + 4, side, "name"))
        for kind, ms in times.items():
            said = f"{milliseconds(ms)}, {percent(100 * ms / (total or 1), 0)} of the batch"
            parts.append(_part(kind, f"{side}: {kind}\n{said}", (scale(begin), y, scale(begin + ms), HIGH)))
            begin += ms
        parts.append(text(scale(total) + 8, y + HIGH / 2 + 4, milliseconds(total), "strong"))
    label = "milliseconds of a batch by kind of layer, dense and pruned; the same numbers are in the table"
    return drawing(width, 2 * STEP, label, *parts)


def _part(kind: str, hint: str, box: Box) -> Markup:
    x, y, end, high = box
    parts = [rectangle(x, y, end - x - 1.5, high, colour_of(kind), rx=2)]
    if len(kind) * LETTER + 10 < end - x:
        parts.append(text(x + 7, y + high / 2 + 4, kind, "on"))
    return mark(hint, *parts, data_series=kind)


def colour_of(kind: str) -> str:
    """Return the class that colours a kind of layer."""
    return f"part-{KINDS.index(kind) if kind in KINDS else len(KINDS)}"


def share(value: float) -> Markup:
    """Return a small bar for a part of the whole."""
    bars = rectangle(0, 3, 100, 6, "track", rx=3), rectangle(0, 3, 100 * value, 6, "share", rx=3)
    return tag("svg", *bars, viewBox="0 0 100 12", preserveAspectRatio="none", class_="bar", aria_hidden="true")
