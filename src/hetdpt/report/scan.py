"""A scan as a figure and as rows for a spreadsheet. Draws what it is given; no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetdpt.core.plan import Site
from hetdpt.core.styles import STYLES
from hetdpt.report.charts import BLUE, GREEN, GREY, ORANGE, PINK, SKY, YELLOW, Chart, Look, save

if TYPE_CHECKING:
    from hetdpt.studies.scan import ScanRow, ScanTable

COLUMNS = (
    "kind", "block", "path", "is_gated", "style", "te", "r2", "damage", "is_replaceable", "macs_saved", "ms_saved",
    "ms_spread", "device", "dtype", "batch",
)  # fmt: skip
FLOOR = 1e-4  # of the largest value there should be: less is drawn there, since a logarithm has no 0
CEILING = 6.0  # times the uninformed damage: more, infinity too, is drawn there
LOOKS = {
    "skip": Look("ink", "o"),
    "norm": Look(GREY, "v"),
    "constant": Look(BLUE, "s"),
    "position": Look(SKY, "D"),
    "linear": Look(GREEN, "^"),
    "identity": Look(ORANGE, "o"),
    "calibrated": Look(YELLOW, "P"),
    "drop": Look(PINK, "X"),
}
TAIL = Look(PINK, "<", 5, line="-", width=1.0)
OTHER = Look(GREY, "*")
TITLES = {"attention": "attention removed", "activation": "activation removed, FFN merged"}


def csv_rows(table: ScanTable) -> Iterator[dict[str, Any]]:
    """Yield one row for each site and style, then one for each tail, at its first block."""
    for row in table.rows:
        saved = row.ms_saved
        timed = [saved.value, saved.spread, saved.device, saved.dtype, saved.batch] if saved else [None] * 5
        numbers = [row.te, row.r2, row.damage, row.is_replaceable, row.macs_saved]
        site = [row.site.kind, row.site.block, row.site.path, row.site.is_gated]
        yield dict(zip(COLUMNS, [*site, row.style, *numbers, *timed], strict=True))
    whole = table.latency
    where = [None, whole.device, whole.dtype, whole.batch] if whole else [None] * 4
    for tail in table.tails:
        numbers = [tail.te, tail.r2, tail.damage, tail.damage <= table.limit, tail.macs_saved, tail.ms_saved]
        site = ["tail", table.blocks - tail.blocks, "", False]
        yield dict(zip(COLUMNS, [*site, "tail", *numbers, *where], strict=True))


def size_of(blocks: int) -> tuple[float, float]:
    """Return the size in inches of a figure with so many blocks along the bottom of two columns of charts."""
    return min(max(12.0, 3 + 0.35 * blocks), 18), 9


def draw(table: ScanTable, path: Path) -> None:
    """Write a figure, PNG or SVG by its name: damage, transfer entropy and milliseconds for each block."""
    blocks = table.blocks

    def draw_all(attention: Chart, activation: Chart, entropy: Chart, savings: Chart) -> None:
        activation.panel.sharey(attention.panel)
        for chart, kind in ((attention, "attention"), (activation, "activation")):
            _draw_damage(chart, table, kind)
        _draw_entropy(entropy, table)
        _draw_savings(savings, table)
        for chart in (attention, activation, entropy, savings):
            chart.places(blocks, "block")
            chart.legend(columns=6, below=0.13)

    save(path, draw_all, size_of(blocks), (2, 2))


def _draw_damage(chart: Chart, table: ScanTable, kind: str) -> None:
    least, most = FLOOR * table.uninformed, CEILING * table.uninformed
    rows = [row for row in table.rows if row.site.kind == kind]
    if not rows:
        return chart.say(f"no {kind} site")
    for style in _styles(rows):
        _draw_style(chart, rows, style, lambda row: min(max(row.damage, least), most))
    if kind == "attention" and table.tails:
        damages = [min(max(tail.damage, least), most) for tail in table.tails]
        places = [table.blocks - tail.blocks for tail in table.tails]
        chart.plot(places, damages, TAIL, "tail from that block on")
    chart.level(table.uninformed, "an answer that ignores the image", "-")
    chart.level(table.limit, "limit of replacement")
    _shade(chart, [site for site in table.irreplaceable if site.kind == kind])
    chart.logarithm()
    unit = "KL to dense [nats]" if table.is_classifier else "error of features [part of their size]"
    chart.name("block", unit, f"{TITLES[kind]}: damage on {table.judged_on} images")


def _shade(chart: Chart, sites: list[Site]) -> None:
    """Shade the blocks whose layer no style replaces."""
    band: Any = {"facecolor": "#F0E442", "alpha": 0.4, "hatch": "///", "edgecolor": GREY, "linewidth": 0.0}
    for number, site in enumerate(sites):
        label = None if number else "nothing replaces it"
        chart.panel.axvspan(site.block - 0.45, site.block + 0.45, zorder=0, label=label, **band)


def _draw_entropy(chart: Chart, table: ScanTable) -> None:
    rows = [row for row in table.rows if isfinite(row.te)]
    least = FLOOR * max((row.te for row in rows), default=1.0) or FLOOR
    shown = [style for style in ("skip", "constant", "identity", "calibrated", "drop") if style in _styles(rows)]
    for style in shown or _styles(rows):
        _draw_style(chart, rows, style, lambda row: max(row.te, least), f"{_kind(rows, style)} {style}")
    chart.logarithm()
    chart.name("block", "|H(dense) - H(removed)| [nats]", "transfer entropy of the removal, from the logits")


def _draw_savings(chart: Chart, table: ScanTable) -> None:
    """Draw the styles that are measured by themselves; a constant costs what a skip does."""
    whole = table.latency
    if whole is None:
        return chart.say("not timed")
    rows = [row for row in table.rows if row.ms_saved is not None]
    shown = [style for style in ("skip", "linear", "calibrated", "drop") if style in _styles(table.rows)]
    for style in shown or _styles(table.rows):
        name = f"{_kind(rows, style)} {'skip, constant' if style == 'skip' else style}"
        _draw_style(chart, rows, style, lambda row: row.ms_saved.value if row.ms_saved else 0.0, name)
    if tails := [(table.blocks - tail.blocks, tail.ms_saved) for tail in table.tails if tail.ms_saved is not None]:
        places, saved = zip(*tails, strict=True)
        chart.plot(list(places), list(saved), TAIL, "tail from that block on")
    chart.panel.axhline(0, color=chart.colour("ink"), linewidth=0.8)
    title = f"time saved, of {whole.value:.3g} ms ({whole.device}, {whole.dtype}, batch {whole.batch})"
    chart.name("block", "saved [ms per batch]", title)


def _draw_style(
    chart: Chart, rows: list[ScanRow], style: str, value: Callable[[ScanRow], float], label: str = ""
) -> None:
    some = [row for row in rows if row.style == style]
    draw_line(chart, [row.site.block for row in some], [value(row) for row in some], style, label or style)


def draw_line(chart: Chart, places: Iterable[int], values: Iterable[float], style: str, label: str) -> None:
    """Draw ``values`` in the look of a removal style."""
    look = LOOKS.get(style, OTHER)
    chart.plot(list(places), list(values), Look(look.colour, look.marker, 5, line="-", width=1.0), label)


def _styles(rows: Iterable[ScanRow]) -> list[str]:
    """Return the styles of ``rows`` in the order in which they are drawn."""
    found = {row.style for row in rows}
    return [style for style in STYLES if style in found]


def _kind(rows: list[ScanRow], style: str) -> str:
    is_attention = any(row.site.kind == "attention" for row in rows if row.style == style)
    return "attention:" if is_attention else "FFN:"
