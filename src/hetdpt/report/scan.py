"""A scan as a figure and as a table for spreadsheets. Draws what it is given; no torch, no window, no global state."""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hetdpt.core.styles import STYLES
from hetdpt.report.panels import require_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from hetdpt.core.plan import Site
    from hetdpt.studies.scan import ScanRow, ScanTable

COLUMNS = (
    "kind", "block", "path", "is_gated", "style", "te", "r2", "damage", "is_replaceable", "macs_saved", "ms_saved",
    "ms_spread", "device", "dtype", "batch",
)  # fmt: skip
FLOOR = 1e-4  # of the largest value there should be: less is drawn there, since a logarithm has no 0
CEILING = 6.0  # times the uninformed damage: more, infinity too, is drawn there


class Look(NamedTuple):
    """How a style is drawn: its marker, and a colour of Okabe and Ito, which the colour-blind tell apart, or grey."""

    colour: str
    marker: str


LOOKS = {
    "skip": Look("#000000", "o"),
    "norm": Look("#999999", "v"),
    "constant": Look("#0072B2", "s"),
    "position": Look("#56B4E9", "D"),
    "linear": Look("#009E73", "^"),
    "identity": Look("#D55E00", "o"),
    "calibrated": Look("#E69F00", "P"),
    "drop": Look("#CC79A7", "X"),
}
OTHER = Look("#999999", "*")
TITLES = {"attention": "attention removed", "activation": "activation removed, FFN merged"}


def write_csv(table: ScanTable, path: Path) -> None:
    """Write one line for each site and style; a cell is empty where there is no such number."""
    with path.open("w", newline="", encoding="utf-8") as file:
        lines = csv.writer(file)
        lines.writerow(COLUMNS)
        lines.writerows(_cells(row) for row in table.rows)


def _cells(row: ScanRow) -> list[Any]:
    site, saved = row.site, row.ms_saved
    timed = [saved.value, saved.spread, saved.device, saved.dtype, saved.batch] if saved else [None] * 5
    numbers = [row.te, row.r2, row.damage, row.is_replaceable, row.macs_saved]
    return [site.kind, site.block, site.path, site.is_gated, row.style, *numbers, *timed]


def draw(table: ScanTable, path: Path) -> None:
    """Write a figure, PNG or SVG by the name of the file: damage, transfer entropy and milliseconds for each block."""
    require_figure(path)
    from matplotlib.figure import Figure

    kinds = [kind for kind in TITLES if any(site.kind == kind for site in table.sites)]
    blocks = 1 + max(site.block for site in table.sites)
    is_timed = table.latency is not None
    figure = Figure(figsize=(min(max(12.0, 3 + 0.35 * blocks), 18), 9), layout="constrained")
    panels: Any = figure.subplots(2, 2, sharex=True)
    panels[0, 1].sharey(panels[0, 0])
    for panel, kind in zip(panels[0], TITLES, strict=True):
        if kind in kinds:
            _draw_damage(panel, table, kind)
        else:
            say(panel, f"no {kind} site")
    _draw_entropy(panels[1, 0], table)
    if is_timed:
        _draw_savings(panels[1, 1], table)
    else:
        say(panels[1, 1], "not timed")
    for panel in panels.flat:
        finish(panel, blocks)
    figure.savefig(path, dpi=150, format=path.suffix[1:].lower())


def _draw_damage(panel: Axes, table: ScanTable, kind: str) -> None:
    least, most = FLOOR * table.uninformed, CEILING * table.uninformed
    rows = [row for row in table.rows if row.site.kind == kind]
    for style in _styles(rows):
        chosen = [row for row in rows if row.style == style]
        _line(panel, chosen, lambda row: min(max(row.damage, least), most), style)
    draw_level(panel, table.uninformed, "-", "an answer that ignores the image")
    draw_level(panel, table.limit, "--", "limit of replacement")
    _mark(panel, [site for site in table.irreplaceable if site.kind == kind])
    to_logarithm(panel)
    panel.set_title(f"{TITLES[kind]}: damage on {table.judged_on} images")
    panel.set_ylabel("KL to dense [nats]" if table.is_classifier else "error of features [part of their size]")


def to_logarithm(panel: Axes) -> None:
    """Make the axis of values logarithmic, with plain numbers on it."""
    panel.set_yscale("log")
    panel.yaxis.set_major_formatter("{x:g}")


def draw_level(panel: Axes, value: float, dashes: str, text: str) -> None:
    """Draw a line at one value, with words on it."""
    panel.axhline(value, color="#000000", linewidth=1.0, linestyle=dashes, zorder=1)
    place: Any = {"xytext": (-3, 2), "textcoords": "offset points", "xycoords": panel.get_yaxis_transform()}
    panel.annotate(text, (1, value), ha="right", va="bottom", fontsize="x-small", zorder=1, **place)


def _mark(panel: Axes, sites: list[Site]) -> None:
    """Shade the blocks whose layer no style replaces."""
    band: Any = {"facecolor": "#F0E442", "alpha": 0.4, "hatch": "///", "edgecolor": "#999999", "linewidth": 0.0}
    for number, site in enumerate(sites):
        label = None if number else "nothing replaces it"
        panel.axvspan(site.block - 0.45, site.block + 0.45, zorder=0, label=label, **band)


def _draw_entropy(panel: Axes, table: ScanTable) -> None:
    rows = [row for row in table.rows if isfinite(row.te)]
    least = FLOOR * max((row.te for row in rows), default=1.0) or FLOOR
    shown = [style for style in ("skip", "constant", "identity", "calibrated", "drop") if style in _styles(rows)]
    for style in shown or _styles(rows):
        chosen = [row for row in rows if row.style == style]
        _line(panel, chosen, lambda row: max(row.te, least), style, f"{_short(chosen)} {style}")
    to_logarithm(panel)
    panel.set_title("transfer entropy of the removal, from the logits")
    panel.set_ylabel("|H(dense) - H(removed)| [nats]")


def _draw_savings(panel: Axes, table: ScanTable) -> None:
    """Draw the styles that are measured by themselves; a constant costs what a skip does."""
    assert table.latency is not None
    whole = table.latency
    shown = [style for style in ("skip", "linear", "calibrated", "drop") if style in _styles(table.rows)]
    for style in shown or _styles(table.rows):
        chosen = [row for row in table.rows if row.style == style and row.ms_saved is not None]
        name = "skip, constant" if style == "skip" else style
        _line(panel, chosen, lambda row: row.ms_saved.value if row.ms_saved else 0.0, style, f"{_short(chosen)} {name}")
    panel.axhline(0, color="#000000", linewidth=0.8)
    panel.set_title(f"time saved, of {whole.value:.3g} ms ({whole.device}, {whole.dtype}, batch {whole.batch})")
    panel.set_ylabel("saved [ms per batch]")


def _line(
    panel: Axes, rows: list[ScanRow], value: Callable[[ScanRow], float], style: str, label: str | None = None
) -> None:
    draw_line(panel, [row.site.block for row in rows], [value(row) for row in rows], style, label or style)


def draw_line(panel: Axes, places: Sequence[int], values: Sequence[float], style: str, label: str) -> None:
    """Draw ``values`` in the look of ``style``."""
    look = LOOKS.get(style, OTHER)
    looks: Any = {"color": look.colour, "marker": look.marker, "markersize": 5, "linewidth": 1.0}
    panel.plot(places, values, label=label, **looks)


def _styles(rows: Any) -> list[str]:
    """Return the styles of ``rows`` in the order in which they are drawn."""
    found = {row.style for row in rows}
    return [style for style in STYLES if style in found]


def _short(rows: list[ScanRow]) -> str:
    return "attention:" if rows and rows[0].site.kind == "attention" else "FFN:"


def say(panel: Axes, text: str) -> None:
    """Write ``text`` in the middle of an empty panel."""
    panel.text(0.5, 0.5, text, transform=panel.transAxes, ha="center", va="center")


def finish(panel: Axes, places: int, label: str = "block") -> None:
    """Give a panel its axis of ``places`` along the bottom, its grid and its legend."""
    step = -(-places // 20)
    panel.set_xticks(range(0, places, step))
    panel.set_xlim(-0.6, places - 0.4)
    panel.set_xlabel(label)
    panel.tick_params(labelbottom=True)
    panel.grid(axis="y", color="#DDDDDD", linewidth=0.6)
    for side in ("top", "right"):
        panel.spines[side].set_visible(False)
    if panel.get_legend_handles_labels()[0]:
        below: Any = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.13)}
        panel.legend(fontsize="small", ncols=6, frameon=False, columnspacing=1.2, handlelength=1.6, **below)
