"""Commands that read run directories, without torch: report and status."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from pathlib import Path

import click

from hetdpt.cli.command import option
from hetdpt.cli.options import JsonOptions, OverwriteOptions
from hetdpt.cli.show import print_, print_json, table
from hetdpt.core.errors import FileError
from hetdpt.core.format import duration


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


class StatusOptions(JsonOptions):
    run: Path = option(is_argument=True, is_required=True)
    """A directory of hetdpt run."""


def status(options: StatusOptions) -> None:
    """Show which stages of a run are done, running and left; the run itself is not touched."""
    from rich.markup import escape

    from hetdpt.report.status import read_status
    from hetdpt.store.stage_directory import CONFIG

    run = options.run
    found = read_status(run)
    if options.as_json:
        return print_json(directory=str(run), is_done=found.is_done, **asdict(found))
    click.echo(run)
    rows = table("", "stage", "state", "time", "result")
    rows.columns[1].justify = rows.columns[3].justify = "left"
    for stage in found.stages:
        time = "" if stage.seconds is None else duration(stage.seconds)
        rows.add_row(stage.stage, stage.state, time, escape(stage.words))
    print_(rows)
    if found.is_done:
        click.echo("done")
    elif found.is_running:
        click.echo("a process is working here")
    else:
        command = shlex.join(["hetdpt", "run", "--config", str(run / CONFIG), "--out", str(run)])
        click.echo(f"no process is working here; {command} resumes it")
