"""The two observations as a figure and as rows for a spreadsheet. Draws what it is given; no torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetdpt.core.format import counted, removal_text
from hetdpt.core.plan import KINDS, Kind, Plan, Removal
from hetdpt.report.charts import Chart, save
from hetdpt.report.scan import FLOOR, draw_line, size_of

if TYPE_CHECKING:
    from hetdpt.results import Observations

COLUMNS = (
    "kind", "block", "path", "is_gated", "removal", "style", "gradient", "mean_gradient", "dense", "removed",
    "recovered", "epochs",
)  # fmt: skip


def csv_rows(found: Observations) -> list[dict[str, Any]]:
    """Return one row for each layer and removal."""
    lines: dict[Any, dict[str, Any]] = {}

    def line(site: Any, removal: Removal) -> dict[str, Any]:
        style = Plan(removal=removal).style_of(site.kind).name
        start = {**vars(site), "removal": removal_text(removal), "style": style}
        return lines.setdefault((site, removal), start)

    for one in found.disparities:
        for layer in one.layers:
            line(layer.site, one.removal).update(gradient=layer.magnitude, mean_gradient=layer.mean)
    for row in found.asymmetries:
        ends = {"removed": row.accuracies[0], "recovered": row.accuracies[-1], "epochs": len(row.accuracies) - 1}
        line(row.site, row.removal).update(dense=found.dense, **ends)
    return [*lines.values()]


def draw(found: Observations, path: Path) -> None:
    """Write a figure, PNG or SVG by its name: gradients, and accuracies after the removal of each layer."""
    sites = [layer.site for one in found.disparities for layer in one.layers] + [row.site for row in found.asymmetries]
    blocks = 1 + max(site.block for site in sites)

    def draw_all(gradients: Chart, removed: Chart, recovered: Chart, by_epoch: Chart) -> None:
        _draw_gradients(gradients, found)
        after = f"after {counted(found.epochs, 'epoch')} of fine-tuning"
        _draw_accuracies(removed, found, 0, "one layer alone removed: right after")
        _draw_accuracies(recovered, found, found.epochs, f"one layer alone removed: {after}")
        _draw_epochs(by_epoch, found)
        for chart in (gradients, removed, recovered):
            chart.places(blocks, "block")
        by_epoch.places(found.epochs + 1, "epochs of fine-tuning")
        for chart in (gradients, removed, recovered, by_epoch):
            chart.legend(columns=6, below=0.13)

    save(path, draw_all, size_of(blocks), (2, 2))


def _draw_gradients(chart: Chart, found: Observations) -> None:
    layers = [layer for one in found.disparities for layer in one.layers]
    if not layers:
        return chart.say("no gradients were recorded")
    least = FLOOR * max(layer.magnitude for layer in layers) or FLOOR
    for one in found.disparities:
        for kind in KINDS:
            if some := [layer for layer in one.layers if layer.site.kind == kind]:
                values = [max(layer.magnitude, least) for layer in some]
                draw_line(chart, [layer.site.block for layer in some], values, *_style(one.removal, kind))
    chart.logarithm()
    one = found.disparities[0]
    title = f"gradient of the importance, {one.updates * one.epochs} updates of {one.batch} images"
    chart.name("block", "mean |gradient|", title)


def _draw_accuracies(chart: Chart, found: Observations, epoch: int, title: str) -> None:
    for removal, kind in _both(found):
        if rows := found.of(removal, kind):
            values = [row.accuracies[epoch] for row in rows]
            draw_line(chart, [row.site.block for row in rows], values, *_style(removal, kind))
    _finish(chart, found, title)


def _draw_epochs(chart: Chart, found: Observations) -> None:
    for removal, kind in _both(found):
        if medians := found.medians(removal, kind):
            draw_line(chart, range(len(medians)), medians, *_style(removal, kind))
    _finish(chart, found, "the same, median over blocks")


def _finish(chart: Chart, found: Observations, title: str) -> None:
    if not found.asymmetries:
        return chart.say("no layer was removed")
    assert found.dense is not None  # it is measured before a layer is removed
    chart.level(found.dense, "dense")
    chart.name("block", "accuracy [%]", title)


def _both(found: Observations) -> Iterator[tuple[Removal, Kind]]:
    return ((removal, kind) for removal in found.removals for kind in KINDS)


def _style(removal: Removal, kind: Kind) -> tuple[str, str]:
    """Return the style, by which lines are distinguished, and its label."""
    style = Plan(removal=removal).style_of(kind).name
    return style, f"{kind}: {style}"
