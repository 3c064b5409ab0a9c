"""The command scan: the damage of removing each layer, before anything is trained."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hetdpt.cli.command import option
from hetdpt.cli.options import DeviceOptions, ImageOptions, ModelOptions, OutputOptions, OverwriteOptions
from hetdpt.cli.show import print_, table
from hetdpt.core.plan import KINDS
from hetdpt.core.styles import STYLES

if TYPE_CHECKING:
    from hetdpt.core.plan import Kind, Site
    from hetdpt.studies.scan import ScanRow, ScanTable

SCAN = "scan.json"  # identifies a directory that scan wrote


class ScanOptions(ModelOptions, ImageOptions, DeviceOptions, OverwriteOptions, OutputOptions):
    out: Path | None = None
    """Directory for scan.json, scan.csv and scan.png."""
    judge_images: int = option(least=2, default=128, panel="Data")
    """Other images, to measure damage on."""
    no_latency: bool = False
    """Measure no milliseconds."""
    batch: Any = option("RunConfig.batch", least=1, panel="Device")


def scan(options: ScanOptions) -> None:
    """Show the damage of each way to remove each layer, and what it saves; no labels, no training."""
    from hetdpt.core.modules import find_device
    from hetdpt.store.atomic import require_new
    from hetdpt.studies.scan import scan as scan_

    if options.out is not None:
        require_new(options.out, options.overwrite, SCAN)
    source = options.open_source()
    network = options.open_model(options.seed).to(find_device(options.device))
    with options.live() as display:
        batches, judge = options.read(source, network, display.say)
        is_timed = not options.no_latency
        found = scan_(network, batches, judge=judge, batch=options.batch, latency=is_timed, progress=display.step)
    if options.out is not None:
        _write(found, options.out, options.overwrite)
    if options.as_json:
        return click.echo(found.to_json())
    _print(found)
    options.note_random_weights()
    if options.out is not None:
        click.echo(f"written to {options.out}: scan.json, scan.csv, scan.png")


def _write(found: ScanTable, out: Path, overwrite: bool) -> None:
    from hetdpt.report.scan import COLUMNS, csv_rows, draw
    from hetdpt.store.atomic import new_directory, write_csv

    with new_directory(out, SCAN, overwrite) as scratch:
        (scratch / SCAN).write_text(found.to_json() + "\n", encoding="utf-8")
        write_csv(scratch / "scan.csv", COLUMNS, csv_rows(found))
        draw(found, scratch / "scan.png")


def _print(found: ScanTable) -> None:
    for kind in KINDS:
        if chosen := [site for site in found.sites if site.kind == kind]:
            _print_kind(found, kind, chosen)
    if found.tails:
        _print_tails(found)
    measure = "KL to the dense answers, in nats" if found.is_classifier else "part of the features that is lost"
    others = "others" if found.is_apart else "of them"
    click.echo(
        f"fitted on {found.fitted_on} images, compared on {found.judged_on} {others}. "
        f"Damage is the {measure};\nan answer that ignores the image does {found.uninformed:.3g}. * does the least; "
        f"(in brackets) more than {found.limit:.3g}: no replacement.\nTE is transfer entropy in nats."
    )
    if found.latency:
        click.echo(f"dense: {found.latency}")
    for site in found.irreplaceable:
        best = found.best(site)
        click.echo(f"nothing can replace {site}: the best, {best.style}, does {_short(best.damage)}")


def _print_tails(found: ScanTable) -> None:
    columns = ["blocks", "TE", "damage", "R²", "MACs", *(["ms"] if found.latency else [])]
    lines = table("tails: damage if patches are not updated in the last blocks; what that saves", *columns)
    for tail in found.tails:
        r2 = "exact" if tail.r2 is None else f"{tail.r2:.2f}"
        saved = _saved(found, tail.macs_saved, tail.ms_saved)
        lines.add_row(str(tail.blocks), _short(tail.te), _short(tail.damage), r2, *saved)
    print_(lines)


def _priced(kind: Kind, styles: list[str]) -> list[str]:
    """Return the styles whose savings are shown: of attention styles that leave the same MACs, the first."""
    macs = [STYLES[style].macs for style in styles]
    return [style for number, style in enumerate(styles) if kind == "activation" or macs.index(macs[number]) == number]


def _print_kind(found: ScanTable, kind: Kind, sites: list[Site]) -> None:
    rows = [row for row in found.rows if row.site.kind == kind]
    styles = [*dict.fromkeys(row.style for row in rows)]
    fitted = {row.style for row in rows if row.r2 is not None}
    priced = _priced(kind, styles)
    columns = ["block", f"TE\n{styles[0]}"]
    for style in styles:
        columns += [style, "R²"] if style in fitted else [style]
    for style in priced:
        columns += [f"MACs\n{style}", f"ms\n{style}"] if found.latency else [f"MACs\n{style}"]
    lines = table(f"{kind}: damage of each way to remove it; MACs and ms that it saves", *columns)
    lines.show_edge = False  # so that it fits in 120 columns
    for site in sites:
        of = {row.style: row for row in found.of(site)}
        cells = [str(site.block), _short(of[styles[0]].te) if styles[0] in of else "-"]
        for style in styles:
            row = of.get(style)
            cells += [_damage(found, row), _r2(row)] if style in fitted else [_damage(found, row)]
        for style in priced:
            cells += _savings(found, of.get(style))
        lines.add_row(*cells)
    print_(lines)


def _damage(found: ScanTable, row: ScanRow | None) -> str:
    if row is None:
        return "-"
    text = _short(row.damage) if row.is_replaceable else f"({_short(row.damage)})"
    return f"*{text}" if row == found.best(row.site) else text


def _short(value: float) -> str:
    """Return a number in five characters or so.

    >>> [_short(value) for value in (0.0, 2.34e-5, 0.0123, 6.312, 1234.5)]
    ['0', '2e-05', '0.012', '6.31', '1234']
    """
    if value >= 100:
        return f"{value:.0f}"
    if value < 1e-3:
        return f"{value:.0e}" if value else "0"
    return f"{value:.3f}" if value < 1 else f"{value:.3g}"


def _r2(row: ScanRow | None) -> str:
    return "-" if row is None or row.r2 is None else f"{row.r2:.2f}"


def _savings(found: ScanTable, row: ScanRow | None) -> list[str]:
    """Return the cells of one style."""
    if row is None:
        return ["-", "-"] if found.latency else ["-"]
    return _saved(found, row.macs_saved, row.ms_saved.value if row.ms_saved else None)


def _saved(found: ScanTable, macs: int, ms: float | None) -> list[str]:
    """Return cells: the part of the dense MACs in percent and, where it was timed, milliseconds."""
    part = f"{100 * macs / found.dense.macs:.1f}%"
    return [part, "-" if ms is None else f"{ms:.2f}"] if found.latency else [part]
