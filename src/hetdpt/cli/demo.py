"""The command demo: a run on the model and the images that come with hetdpt."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from hetdpt.cli.options import OutputOptions
from hetdpt.cli.run import do


class DemoOptions(OutputOptions):
    out: Path = Path("runs/demo")
    """Run directory; the same command resumes an interrupted run."""
    retrain: bool = False
    """Train the dense model again first, which takes minutes."""
    redo: str | None = None
    """Repeat this stage and all that follow it."""


def demo(options: DemoOptions) -> None:
    """Make the model that comes with hetdpt faster, compare methods, write a report; minutes on a CPU."""
    from hetdpt.flow.demo import demo_config, train_model

    out = options.out
    config = demo_config(out)
    if options.retrain:
        dense = out.with_name(f"{out.name}-dense")
        with options.live() as display:
            train_model(dense, progress=display.step)
        config = replace(config, model=str(dense))
    do(config, options, options.redo)
