"""The command report: run directories as a page, as Markdown or as JSON; no torch."""

from __future__ import annotations

from pathlib import Path

import click

from hetdpt.cli.command import option
from hetdpt.cli.options import OverwriteOptions
from hetdpt.core.errors import FileError


class ReportOptions(OverwriteOptions):
    runs: list[Path] = option(flag="RUN...", is_argument=True, is_required=True)
    """Directories of hetdpt run, finished or not."""
    out: Path | None = None
    """A file that ends in .html, .md or .json; by default all three, in the one RUN."""


def report(options: ReportOptions) -> None:
    """Show the results of runs, side by side: one HTML page that needs nothing else, Markdown or JSON."""
    from hetdpt.report.headline import title
    from hetdpt.report.run import RunRecord
    from hetdpt.report.tables import labels
    from hetdpt.report.write import write_report, write_reports

    runs, out = options.runs, options.out
    records = [RunRecord.read(run) for run in runs]
    if out is not None:
        write_report(records, out, options.overwrite)
        written = str(out)
    elif len(runs) == 1:
        names = write_reports(runs[0])  # made from the run's own files, so that nothing is lost
        written = ", ".join(str(runs[0] / name) for name in names.values())
    else:
        raise FileError(f"a report of {len(runs)} runs belongs to none of them; say where, such as --out report.html")
    for name, record in zip(labels(records), records, strict=True):
        click.echo(f"{name}: {title(record)}")
    click.echo(f"written to {written}")
