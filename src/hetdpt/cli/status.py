"""The command status: how far a run is; no torch."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from pathlib import Path

import click

from hetdpt.cli.command import option
from hetdpt.cli.options import JsonOptions
from hetdpt.cli.show import print_, print_json, table
from hetdpt.core.format import duration


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
