"""Fine-tuning, epoch by epoch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isfinite

from markupsafe import Markup

from hetdpt.core.format import number, percent
from hetdpt.report.pictures.svg import Frame, circle, drawing, frame, line, mark, path, shape, tag, text
from hetdpt.results import EpochResult, RecoverResult

SERIES = {"last": "as trained", "ema": "moving average"}
"""What is known of the accuracy of an epoch, and what to call it."""
MARKERS = {"last": "o", "ema": "s", "loss": "D"}
HIGH = 240.0


def accuracies(recovery: RecoverResult, dense: float | None, width: float) -> Markup:
    """Return accuracy by epoch, with the ``dense`` model as a level."""
    known = [value for name in SERIES for _, value in _points(recovery.epochs, name)]
    plot = _plot(recovery.epochs, known if dense is None else [*known, dense], "accuracy, %", width)
    parts = [plot.axes()]
    if dense is not None:
        level = line(plot.x.start, plot.y(dense), plot.x.end, plot.y(dense), "level")
        words = text(plot.x.end, plot.y(dense) - 6, f"dense {percent(dense)}", anchor="end")
        parts.append(tag("g", level, words, data_series="dense"))
    for name, said in SERIES.items():
        parts.append(_curve(plot, recovery.epochs, name, lambda value, said=said: f"{percent(value)} {said}"))  # type: ignore[misc]
    return drawing(width, plot.height, "accuracy by epoch of the fine-tuning", *parts)


def losses(recovery: RecoverResult, width: float) -> Markup:
    """Return training loss by epoch."""
    known = [value for _, value in _points(recovery.epochs, "loss")]
    plot = _plot(recovery.epochs, known, "training loss", width)
    curve = _curve(plot, recovery.epochs, "loss", lambda value: f"loss {number(value)}")
    return drawing(width, plot.height, "training loss by epoch of the fine-tuning", plot.axes(), curve)


def _plot(epochs: Sequence[EpochResult], ys: Sequence[float], up: str, width: float) -> Frame:
    return frame(width, HIGH, [one.number for one in epochs], ys, "epoch", up, is_whole=True)


def _points(epochs: Sequence[EpochResult], name: str) -> list[tuple[int, float]]:
    """Return what is known by epoch; a training that goes astray may have no number."""
    values = [(one.number, getattr(one, name)) for one in epochs]
    return [(epoch, value) for epoch, value in values if value is not None and isfinite(value)]


def _curve(plot: Frame, epochs: Sequence[EpochResult], name: str, spell: Callable[[float], str]) -> Markup:
    points = _points(epochs, name)
    at = [plot.at(*point) for point in points]
    dots = [
        mark(f"epoch {epoch}\n{spell(value)}", circle(*where, 9, "grasp"), dot(name, *where))
        for (epoch, value), where in zip(points, at, strict=True)
    ]
    return tag("g", path(at, f"curve {name}") if len(at) > 1 else "", *dots, data_series=name)


def dot(name: str, x: float, y: float) -> Markup:
    """Return the marker of a curve."""
    return shape(MARKERS[name], x, y, 3.6, f"dot {name}")
