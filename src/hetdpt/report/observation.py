"""The two observations as a figure and as a table for spreadsheets. Draws what it is given; no torch."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetdpt.core.plan import KINDS, Kind, Plan
from hetdpt.report.panels import require_figure
from hetdpt.report.scan import FLOOR, draw_level, draw_line, finish, say, to_logarithm

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from hetdpt.results import Observations

    Removal = str | tuple[str, str]

COLUMNS = (
    "kind", "block", "path", "is_gated", "removal", "style", "gradient", "mean_gradient", "dense", "removed",
    "recovered", "epochs",
)  # fmt: skip


def spell(removal: Removal) -> str:
    """Return a removal as it is written on the command line.

    >>> spell("plain"), spell(("linear", "calibrated"))
    ('plain', 'linear,calibrated')
    """
    return removal if isinstance(removal, str) else ",".join(removal)


def write_csv(found: Observations, path: Path) -> None:
    """Write one line for each layer and removal; a cell is empty where there is no such number."""
    with path.open("w", newline="", encoding="utf-8") as file:
        lines = csv.DictWriter(file, COLUMNS)
        lines.writeheader()
        lines.writerows(_lines(found))


def _lines(found: Observations) -> list[dict[str, Any]]:
    lines: dict[Any, dict[str, Any]] = {}

    def line(site: Any, removal: Removal) -> dict[str, Any]:
        style = Plan(removal=removal).style_of(site.kind).name
        start = {**vars(site), "removal": spell(removal), "style": style}
        return lines.setdefault((site, removal), start)

    for one in found.disparities:
        for layer in one.layers:
            line(layer.site, one.removal).update(gradient=layer.magnitude, mean_gradient=layer.mean)
    for row in found.asymmetries:
        ends = {"removed": row.accuracies[0], "recovered": row.accuracies[-1], "epochs": len(row.accuracies) - 1}
        line(row.site, row.removal).update(dense=found.dense, **ends)
    return [*lines.values()]


def draw(found: Observations, path: Path) -> None:
    """Write a figure, PNG or SVG by the name of the file: gradients, and accuracies after the removal of each layer."""
    require_figure(path)
    from matplotlib.figure import Figure

    sites = [layer.site for one in found.disparities for layer in one.layers] + [row.site for row in found.asymmetries]
    blocks = 1 + max(site.block for site in sites)
    figure = Figure(figsize=(min(max(12.0, 3 + 0.35 * blocks), 18), 9), layout="constrained")
    panels: Any = figure.subplots(2, 2)
    (gradients, removed), (recovered, by_epoch) = panels
    _draw_gradients(gradients, found)
    _draw_accuracies(removed, found, 0)
    _draw_accuracies(recovered, found, found.epochs)
    _draw_epochs(by_epoch, found)
    for panel in (gradients, removed, recovered):
        finish(panel, blocks)
    finish(by_epoch, found.epochs + 1, "epochs of fine-tuning")
    figure.savefig(path, dpi=150, format=path.suffix[1:].lower())


def _draw_gradients(panel: Axes, found: Observations) -> None:
    layers = [layer for one in found.disparities for layer in one.layers]
    if not layers:
        return say(panel, "no gradients were taken down")
    least = FLOOR * max(layer.magnitude for layer in layers) or FLOOR
    for one in found.disparities:
        for kind in KINDS:
            if of := [layer for layer in one.layers if layer.site.kind == kind]:
                values = [max(layer.magnitude, least) for layer in of]
                draw_line(panel, [layer.site.block for layer in of], values, *_look(one.removal, kind))
    to_logarithm(panel)
    one = found.disparities[0]
    panel.set_title(f"gradient of the importance, {one.updates * one.epochs} updates of {one.batch} images")
    panel.set_ylabel("mean |gradient|")


def _draw_accuracies(panel: Axes, found: Observations, epoch: int) -> None:
    if not found.asymmetries:
        return say(panel, "no layer was removed")
    for removal in found.removals:
        for kind in KINDS:
            if rows := found.of(removal, kind):
                values = [row.accuracies[epoch] for row in rows]
                draw_line(panel, [row.site.block for row in rows], values, *_look(removal, kind))
    when = f"after {found.epochs} epoch{'s' * (found.epochs > 1)} of fine-tuning" if epoch else "right after"
    _finish_accuracies(panel, found, f"one layer alone removed: {when}")


def _draw_epochs(panel: Axes, found: Observations) -> None:
    if not found.asymmetries:
        return say(panel, "no layer was removed")
    for removal in found.removals:
        for kind in KINDS:
            if medians := found.medians(removal, kind):
                draw_line(panel, range(len(medians)), medians, *_look(removal, kind))
    _finish_accuracies(panel, found, "the same, median over blocks")


def _finish_accuracies(panel: Axes, found: Observations, title: str) -> None:
    assert found.dense is not None  # it is measured before a layer goes
    draw_level(panel, found.dense, "--", "dense")
    panel.set_title(title)
    panel.set_ylabel("accuracy [%]")


def _look(removal: Removal, kind: Kind) -> tuple[str, str]:
    """Return the style, by which lines are told apart, and what to call it."""
    style = Plan(removal=removal).style_of(kind).name
    return style, f"{kind}: {style}"
