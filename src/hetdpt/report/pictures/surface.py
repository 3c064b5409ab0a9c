"""The accuracy surface: what is predicted without so many layers of each kind."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil

from markupsafe import Markup

from hetdpt.core.format import interval, percent, times
from hetdpt.core.plan import Budget
from hetdpt.report.pictures.svg import Scale, cross, drawing, mark, rectangle, ring, text
from hetdpt.report.run import RunRecord
from hetdpt.results import FitResult, Results, Split

LEFT, TOP, BELOW = 40.0, 26.0, 92.0  # room for numbers and words around the cells
MOST = 56.0  # the widest cell
FAINT, FULL = 0.08, 0.92  # how strongly the lowest and the highest accuracy are coloured
STEPS = 24  # of the scale of colours


@dataclass(frozen=True)
class _Grid:
    """Where the cells lie."""

    across: int
    up: int
    cell: float

    @property
    def right(self) -> float:
        return LEFT + self.across * self.cell

    @property
    def bottom(self) -> float:
        return TOP + self.up * self.cell

    def corner(self, budget: Budget) -> tuple[float, float]:
        return LEFT + budget.attention * self.cell, self.bottom - (budget.activation + 1) * self.cell

    def centre(self, budget: Budget) -> tuple[float, float]:
        x, y = self.corner(budget)
        return x + self.cell / 2, y + self.cell / 2


def surface(record: RunRecord, width: float) -> Markup:
    """Return predicted accuracy by layers removed, with samples, the chosen split and those it is tied with."""
    fit, budget = record.results.fit, record.results.budget
    assert fit is not None
    across = 1 + max(cell.budget.attention for cell in fit.surface)
    up = 1 + max(cell.budget.activation for cell in fit.surface)
    grid = _Grid(across, up, min((width - LEFT - 2) / max(across, up), MOST))
    tint = _tint(fit)
    parts = [_cell(one, grid, tint, record.results) for one in fit.surface]
    parts += [_tied(row, grid) for row in _tied_of(record.results)]
    if budget:
        parts.append(ring(*grid.centre(budget), min(grid.cell / 2.6, 11)))
    for one in fit.samples:
        at, size = grid.centre(one.budget), min(grid.cell / 5, 4.5)
        parts += [cross(*at, "sample under", size), cross(*at, "sample", size)]
    parts += _counts(grid)
    parts += _colours(tint, grid)
    label = "predicted accuracy by the number of attention and activation layers removed; more colour is higher"
    return drawing(width, grid.bottom + BELOW, label, *parts)


def _tint(fit: FitResult) -> Scale:
    """Return how strongly an accuracy is coloured; what is extrapolated does not stretch the scale."""
    values = [cell.accuracy for cell in fit.surface if not cell.is_beyond] + [one.accuracy for one in fit.samples]
    low, high = min(values), max(values)
    return Scale(low, high if high > low else low + 1, FAINT, FULL)


def _tied_of(results: Results) -> tuple[Split, ...]:
    return results.allocate.tied if results.allocate else ()


def _cell(one: Split, grid: _Grid, tint: Scale, results: Results) -> Markup:
    x, y = grid.corner(one.budget)
    size = grid.cell - min(1.5, grid.cell / 10)
    parts = [rectangle(x, y, size, size, "heat", fill_opacity=tint.clipped(one.accuracy))]
    if one.is_beyond:
        parts.append(rectangle(x, y, size, size, "hatched"))
    return mark("\n".join(_lines(one, results)), *parts)


def _lines(one: Split, results: Results) -> Iterator[str]:
    yield f"{one} removed"
    yield f"predicted {percent(one.accuracy)}"
    yield f"95 % interval {interval(one.low, one.high)}"
    if one.speedup is not None:
        yield f"predicted speedup {times(one.speedup)}"
    for sample in results.fit.samples if results.fit else ():
        if sample.budget == one.budget:
            yield f"sampled: {percent(sample.accuracy)}"
    if one.is_beyond:
        yield "beyond the samples: a guess"
    if results.budget == one.budget:
        yield "chosen"
    elif any(row.budget == one.budget for row in _tied_of(results)):
        yield "the best cannot be told from it"


def _tied(row: Split, grid: _Grid) -> Markup:
    x, y = grid.corner(row.budget)
    return rectangle(x + 2, y + 2, grid.cell - 5.5, grid.cell - 5.5, "tied", rx=2)


def _counts(grid: _Grid) -> Iterator[Markup]:
    step = max(1, ceil(18 / grid.cell))
    for count in range(0, grid.across, step):
        yield text(LEFT + (count + 0.5) * grid.cell, grid.bottom + 16, str(count), anchor="middle")
    for count in range(0, grid.up, step):
        yield text(LEFT - 8, grid.bottom - (count + 0.5) * grid.cell + 4, str(count), anchor="end")
    yield text(grid.right, grid.bottom + 34, "attention layers removed", "name", anchor="end")
    yield text(0, 14, "activations removed", "name")


def _colours(tint: Scale, grid: _Grid) -> Iterator[Markup]:
    """Give the scale of colours, from the lowest accuracy to the highest."""
    y, wide = grid.bottom + 54, min(grid.right - LEFT, 260.0) / STEPS
    for step in range(STEPS):
        shade = FAINT + (FULL - FAINT) * step / (STEPS - 1)
        yield rectangle(LEFT + step * wide, y, wide + 0.3, 12, "heat", fill_opacity=shade)
    yield text(LEFT, y + 28, f"{percent(tint.low, 1)} or less")
    yield text(LEFT + STEPS * wide, y + 28, percent(tint.high, 1), anchor="end")
