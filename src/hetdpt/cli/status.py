"""How far a run is."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from hetdpt.cli.options import Json
from hetdpt.cli.show import print_, print_json, table


def status(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A directory of hetdpt run.")], as_json: Json = False
) -> None:
    """Show what of a run is done, running and left; the run itself is not touched."""
    from rich.markup import escape

    from hetdpt.core.format import duration
    from hetdpt.report.status import read_status
    from hetdpt.store.stage_directory import CONFIG

    found = read_status(run)
    if as_json:
        return print_json(directory=str(run), is_done=found.is_done, **asdict(found))
    typer.echo(run)
    rows = table("", "stage", "state", "time", "what it came to")
    rows.columns[1].justify = rows.columns[3].justify = "left"
    for stage in found.stages:
        time = "" if stage.seconds is None else duration(stage.seconds)
        rows.add_row(stage.stage, stage.state, time, escape(stage.words))
    print_(rows)
    if found.is_done:
        typer.echo("done")
    elif found.is_running:
        typer.echo("a process is at work here")
    else:
        command = shlex.join(["hetdpt", "run", "--config", str(run / CONFIG), "--out", str(run)])
        typer.echo(f"nobody is at work here; {command} goes on")
