"""Layers or width: what was tried, by the number of layers that go before width does."""

from __future__ import annotations

from markupsafe import Markup

from hetdpt.core.format import counted, percent, split_text, times, widths
from hetdpt.report.pictures.svg import circle, drawing, frame, mark, path, ring
from hetdpt.results import BalanceResult, Candidate

HIGH = 240.0


def accuracies(found: BalanceResult, width: float) -> Markup:
    """Return accuracy after the brief fine-tuning, by layers removed."""
    return _drawn(found, "accuracy", "accuracy, %", width)


def speedups(found: BalanceResult, width: float) -> Markup:
    """Return the measured speedup, by layers removed."""
    return _drawn(found, "speedup", "speedup, measured, ×", width)


def _drawn(found: BalanceResult, name: str, up: str, width: float) -> Markup:
    tried = sorted(found.candidates, key=lambda one: one.layers)
    values = [getattr(one, name) for one in tried]
    plot = frame(width, HIGH, [one.layers for one in tried], values, "layers removed", up, is_whole=True)
    at = [plot.at(one.layers, value) for one, value in zip(tried, values, strict=True)]
    parts = [plot.axes(), path(at, "line")] if len(at) > 1 else [plot.axes()]
    for one, where in zip(tried, at, strict=True):
        is_chosen = one.budget == found.budget
        signs = [ring(*where, 9)] if is_chosen else []
        parts.append(mark(_hint(one, is_chosen), circle(*where, 9, "grasp"), *signs, circle(*where, 4, "best")))
    return drawing(width, plot.height, f"{name} by the number of layers removed before width", *parts)


def _hint(one: Candidate, is_chosen: bool) -> str:
    lines = [
        f"{counted(one.layers, 'layer')} less: {split_text(one.budget)}",
        f"{percent(one.accuracy)}, {percent(one.start)} untrained",
        f"speedup {times(one.speedup)}",
        f"less {widths(one.ratios)}",
        f"predicted {percent(one.predicted)} with all its width",
    ]
    return "\n".join(lines + ["chosen"] * is_chosen)
