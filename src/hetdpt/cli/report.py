"""The command report: run directories as a page, as Markdown or as JSON; no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hetdpt.cli.options import Overwrite
from hetdpt.core.errors import FileError


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Directories of hetdpt run, finished or not.")],
    out: Annotated[
        Path | None,
        typer.Option(help="A file that ends in .html, .md or .json; by default all three, in the one RUN."),
    ] = None,
    overwrite: Overwrite = False,
) -> None:
    """Show what runs came to, several of them side by side: one HTML page that needs nothing else, Markdown or JSON."""
    from hetdpt.report.headline import title
    from hetdpt.report.run import RunRecord
    from hetdpt.report.tables import labels
    from hetdpt.report.write import write_report, write_reports

    records = [RunRecord.read(run) for run in runs]
    if out is not None:
        write_report(records, out, overwrite)
        written = str(out)
    elif len(runs) == 1:
        names = write_reports(runs[0])  # made of what is there, so nothing is lost
        written = ", ".join(str(runs[0] / name) for name in names.values())
    else:
        raise FileError(
            f"a report of {len(runs)} runs is in none of them; say where it goes, such as --out report.html"
        )
    for name, record in zip(labels(records), records, strict=True):
        typer.echo(f"{name}: {title(record)}")
    typer.echo(f"written to {written}")
