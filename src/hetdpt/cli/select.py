"""The command select: which layers to remove, by any method of the table."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hetdpt.cli.command import Options, option
from hetdpt.cli.options import (
    METHOD,
    DataOptions,
    ModelOptions,
    OutputOptions,
    OverwriteOptions,
    TrainingOptions,
    WorkOptions,
    read_samples,
)
from hetdpt.cli.show import is_first_process, print_json
from hetdpt.core.errors import PlanError
from hetdpt.core.plan import KINDS, Budget
from hetdpt.selection.methods import method_called

if TYPE_CHECKING:
    from torch import nn

    from hetdpt.core.plan import Removal
    from hetdpt.selection.importance import Picked


class SearchOptions(Options):
    """How layers are chosen."""

    removal: Any = option("SelectConfig.removal", shows_default=False)
    images: Any = option("SelectConfig.images", least=2)
    candidates: Any = option("SelectConfig.candidates")
    explore: Any = option("SelectConfig.explores")


class SelectOptions(
    SearchOptions, ModelOptions, DataOptions, TrainingOptions, WorkOptions, OverwriteOptions, OutputOptions
):
    out: Path
    """The plan to write, a JSON file for hetdpt recover --plan."""
    method: Any = option("RunConfig.method", default="hetdpt", help=METHOD)
    attention: int | None = option(least=0)
    """Number of attention layers to remove."""
    activation: int | None = option(least=0)
    """Number of activations to remove."""
    layers: int | None = option(least=1)
    """Number of layers to remove in all; --samples may split it between the kinds."""
    samples: Any = option("RunConfig.samples")
    """A CSV of samples, or a directory of hetdpt collect, to split --layers by."""
    recipe: str = option(panel="Training", default="search")
    """Recipe that sets the defaults; hetdpt recipes lists them."""


def select(options: SelectOptions) -> None:
    """Choose which layers to remove, and write them as a plan; hetdpt compare tries all methods."""
    from hetdpt.flow.resumable import select_into
    from hetdpt.selection.select import SelectConfig
    from hetdpt.training.processes import start

    method = options.method
    method_called(method)
    given = {"removal": options.usual_removal, **options.settings("SelectConfig")}
    config = SelectConfig(search=options.recovery(), **given)
    with start(config.search.training.precision, options.device).local_main_process_first():  # one of them downloads
        data = options.open_data()
    network = options.open_model(config.search.training.seed)
    budget = _budget(options, method, network, config.removal)
    found: list[Picked] = []
    with options.live() as display:

        def watch(picked: Picked) -> None:
            found.append(picked)
            display.say(f"{len(found)}: remove {picked.site.kind} {picked.site.block} (score {picked.score:.4g})")

        words: dict[str, Any] = {"overwrite": options.overwrite, "watch": watch}
        plan = select_into(options.out, network, data, budget, method, config, options.execution(display), **words)
    if not is_first_process():
        return
    if options.as_json:
        picks = [{"kind": pick.site.kind, "block": pick.site.block, "score": pick.score} for pick in found]
        return print_json(method=method, plan={"attention": plan.attention, "activation": plan.activation}, picks=picks)
    for kind in KINDS:
        click.echo(f"{kind} removed, by {method}: {' '.join(map(str, getattr(plan, kind))) or 'none'}")
    options.note_random_weights()
    again = f"hetdpt recover {options.model} --plan {options.out} --data {options.data} --out RUN"
    click.echo(f"written to {options.out}; {again} fine-tunes the rest")


def _budget(options: SelectOptions, method: str, network: nn.Module, removal: Removal) -> Budget | int:
    """Return how many layers to remove: of each kind where both are known, else in all."""
    from hetdpt.selection.predictor.pricing import split_layers

    split, layers, samples = (options.attention, options.activation), options.layers, options.samples
    is_split = split != (None, None)
    if is_split == (layers is not None):
        raise PlanError(
            "give either how many layers of each kind to remove (--attention 2 --activation 3) or how many in all "
            "(--layers 5)"
        )
    if samples is not None and (is_split or method_called(method).split != "map"):
        raise PlanError(f"--samples splits --layers between the kinds, but {method} has no such split; leave it out")
    if is_split:
        return Budget(split[0] or 0, split[1] or 0)
    assert layers is not None
    if samples is None:
        return layers
    allocation = split_layers(network, read_samples(samples, network), [layers], removal)[layers]
    for warning in allocation.warnings:
        click.echo(f"warning: {warning}", err=True)
    click.echo(f"split by the samples: {allocation.best}", err=True)
    return allocation.budget
