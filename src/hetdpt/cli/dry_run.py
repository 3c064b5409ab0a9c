"""What a run would do, and about how long that takes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from hetdpt.cli.show import print_, print_json, stages, table

if TYPE_CHECKING:
    from hetdpt.flow.config import RunConfig
    from hetdpt.flow.dry_run import Estimate


def show_estimate(asked: RunConfig, redo: str | None, as_json: bool, quiet: bool) -> None:
    """Try the steps of a run and print what it would do; nothing is written."""
    from hetdpt.flow.dry_run import estimate
    from hetdpt.flow.pipeline import done_before, open_inputs

    model, data = open_inputs(asked)
    done = done_before(asked, model, data, redo)
    with stages(quiet or as_json) as (move, _):
        found = estimate(asked, model, data, move, done=done)
    if as_json:
        return print_json(**found.to_dict())
    _print(found, asked)


def _print(found: Estimate, asked: RunConfig) -> None:
    from hetdpt.core.format import duration

    rows = table("what would be done", "stage", "about", "what")
    rows.columns[-1].justify = "left"
    for stage in found.stages:
        about = "done already" if stage.is_done else duration(stage.seconds) if stage.seconds else ""
        rows.add_row(stage.stage, about, stage.text)
    print_(rows)
    guess = f" ({found.layers} layers are taken to go)" if found.is_guess else ""
    typer.echo(f"about {duration(found.seconds)} on {found.processor} ({found.device}, {found.threads} threads){guess}")
    typer.echo(f"memory {found.memory / 2**30:.1f} GiB at most ({found.memory_of}); disk {found.disk / 2**20:.0f} MiB")
    typer.echo(f"nothing was written; without --dry-run it goes to {asked.out}")
