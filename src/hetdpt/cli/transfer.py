"""The command transfer: how well models learn the classes of other images."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hetdpt.cli.command import option
from hetdpt.cli.options import (
    DataOptions,
    LoopOptions,
    ModelOptions,
    OutputOptions,
    SteadyOptions,
    WorkOptions,
    config_of,
    read_plan,
    with_removal,
)
from hetdpt.cli.show import by_others, print_, print_json, table
from hetdpt.core.errors import MeasureError, PlanError
from hetdpt.core.format import amount, counted, percent
from hetdpt.report.transfer import cells, columns, measured, places

if TYPE_CHECKING:
    from hetdpt.core.plan import Plan
    from hetdpt.studies.transfer import TransferConfig, TransferDone

RECIPE = "cifar100_transfer"
PROBED = ("fraction", "per_class", "training.seed", "training.batch_size")
"""The settings of a training that a probe has too."""


class TransferOptions(ModelOptions, DataOptions, LoopOptions, SteadyOptions, WorkOptions, OutputOptions):
    mode: Any = option("TransferConfig.mode", is_required=True)
    out: Path
    """Run directory; the same command resumes an interrupted run."""
    plan: list[str] = option(default=[])
    """Layers to remove from the model first: a JSON file or a plan of the paper; may be repeated."""
    removal: Any = option("RunConfig.removal", shows_default=False)
    calibration_images: int | None = option(least=1)
    """Training images to fit calibrated removal on, 256 by default."""
    beside: list[str] = option(default=[])
    """A saved model to do the same with, such as a pruned one; may be repeated."""
    fraction: Any = option("RecoverConfig.fraction", panel="Training")
    per_class: Any = option("RecoverConfig.per_class", least=1, panel="Training")

    @property
    def config(self) -> TransferConfig:
        """What is to be learned; ``MeasureError`` for settings of a training that a probe does not have."""
        from hetdpt.studies.transfer import TransferConfig

        given = self.given
        more: dict[str, Any] = {"calibration": self.calibration_images} if self.calibration_images else {}
        if self.mode == "probe":
            names = [name for name in self.settings("RecoverConfig") if name not in PROBED]
            names = [f"--{name.rpartition('.')[2].replace('_', '-')}" for name in names]
            if names := [*names, *(["--set"] if self.changes else [])]:
                raise MeasureError(
                    f"a probe trains no weights of the model, but {', '.join(names)} was given; leave it out, or give "
                    "--mode finetune"
                )
            if size := given.pop("training.batch_size", None):
                more["batch_size"] = size
        return TransferConfig(mode=self.mode, recovery=config_of(RECIPE, given, self.changes), **more)

    @property
    def plans(self) -> dict[str, Plan]:
        """The plans by name."""
        if not self.plan and (self.removal or self.calibration_images):
            given = "--removal" if self.removal else "--calibration-images"
            raise PlanError(f"{given} says what replaces the layers of a plan; add --plan, or leave it out")
        if len(set(self.plan)) < len(self.plan):
            raise PlanError(f"the plans {', '.join(self.plan)}: each plan can be compared only once")
        return {name: with_removal(read_plan(name), self.removal, "plain") for name in self.plan}


def transfer(options: TransferOptions) -> None:
    """Train a model, and pruned ones beside it, on other images, and compare their accuracy."""
    from hetdpt.studies.transfer import RESULTS, TABLE, transfer_into

    config, plans, out = options.config, options.plans, options.out
    data, models = options.open_data(), options.open_beside(options.beside)
    with options.live() as display:
        for done in transfer_into(out, models, data, config, plans, options.execution(display)):
            display.say(_line(done))
    rows = json.loads((out / RESULTS).read_text(encoding="utf-8"))["rows"]
    if options.as_json:
        return print_json(directory=str(out), mode=options.mode, rows=rows)
    shown = table(f"{options.mode} on {options.data}", "model", *columns(options.mode))
    for row in rows:
        shown.add_row(row["model"], *cells(row))
    print_(shown)
    click.echo(measured(options.mode, rows))
    if unreadable := rows[0]["unreadable"]:
        click.echo(f"warning: {counted(unreadable, 'validation image')} could not be read", err=True)
    options.note_random_weights()
    for line in places(rows, out):
        click.echo(line)
    click.echo(f"written to {out}: {RESULTS}, {TABLE}")


def _line(done: TransferDone) -> str:
    result, by = done.result, by_others(done.is_own)
    return f"{done.subject.name}: {percent(result.top1)} of {result.images} images, {amount(result.macs)} MACs{by}"
