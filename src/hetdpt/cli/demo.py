"""The command demo: a run on the model and the images that come with hetdpt."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hetdpt.cli.options import Json, Quiet
from hetdpt.cli.run import do
from hetdpt.cli.show import stages


def demo(
    out: Annotated[Path, typer.Option(help="Run directory; again, it goes on where it stopped.")] = Path("runs/demo"),
    retrain: Annotated[bool, typer.Option("--retrain", help="Train the dense model anew first, in minutes.")] = False,
    redo: Annotated[str | None, typer.Option(help="Do this stage and all that follow anew.")] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Make the model that comes with hetdpt faster, compare methods, write a report; minutes on a CPU."""
    from dataclasses import replace

    from hetdpt.flow.demo import demo_config, train_model

    config = demo_config(out)
    if retrain:
        dense = out.with_name(f"{out.name}-dense")
        with stages(quiet or as_json) as (move, _):
            train_model(dense, progress=move)
        config = replace(config, model=str(dense))
    do(config, redo, None, as_json, quiet)
