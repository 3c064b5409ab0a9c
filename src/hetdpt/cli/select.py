"""The commands select and compare: which layers to remove, by one method of the table or by all of them."""

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
    config_of,
    read_samples,
)
from hetdpt.cli.show import by_others, is_first_process, print_, print_json, table
from hetdpt.core.errors import PlanError
from hetdpt.core.format import amount, estimate, percent, signed, times
from hetdpt.core.plan import KINDS, Budget
from hetdpt.selection.methods import method_called

if TYPE_CHECKING:
    from torch import nn

    from hetdpt.core.plan import Removal
    from hetdpt.flow.collection.work import SampleDone
    from hetdpt.flow.comparison.compare import CompareConfig
    from hetdpt.flow.comparison.work import ComparisonDone
    from hetdpt.results import Difference, MethodComparison
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
            display.say(f"{len(found)}: remove {picked.move} (score {picked.score:.4g})")

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


ALL = ("all",)
COMMON = ("training.batch_size", "training.precision", "training.seed", "fraction", "per_class", "augmentation.")
"""How the settings begin that searches and samples share: those about images, not about epochs."""


class CompareOptions(SearchOptions, ModelOptions, DataOptions, TrainingOptions, WorkOptions, OutputOptions):
    out: Path
    """Run directory; processes that share it share the work, and an interrupted one is resumed."""
    layers: Any = option("CompareConfig.layers", is_required=True)
    methods: Any = option("CompareConfig.methods")
    """Methods to compare, such as hetdpt,random, or all, the default."""
    seeds: Any = option("CompareConfig.seeds", least=1)
    samples: Any = option("RunConfig.samples")
    search_recipe: str = option(panel="Training", default="search")
    """Recipe of the search for importances."""
    search_changes: list[str] = option(flag="--search-set", panel="Training", default=[])
    """As --set, for the search; may be repeated."""
    batch: Any = option("RunConfig.batch", least=1, panel="Device")

    @property
    def config(self) -> CompareConfig:
        from hetdpt.flow.comparison.compare import CompareConfig
        from hetdpt.selection.predictor.samples import CollectConfig
        from hetdpt.selection.select import SelectConfig

        common = {name: value for name, value in self.given.items() if name.startswith(COMMON)}
        more = [change for change in self.changes if change.startswith(COMMON)]
        compared = self.settings("CompareConfig")
        if compared.get("methods") == ALL:
            del compared["methods"]
        choosing = {"removal": self.usual_removal, **self.settings("SelectConfig")}
        search = config_of(self.search_recipe, common, [*more, *self.search_changes])
        sampling = {name: choosing[name] for name in ("removal", "images") if name in choosing}
        return CompareConfig(
            selection=SelectConfig(search=search, **choosing),
            recovery=self.recovery(),
            collection=CollectConfig(recovery=config_of("brief", common, more), **sampling),
            **compared,
        )


def compare(options: CompareOptions) -> None:
    """Compare methods: each chooses layers for every budget, all get the same fine-tuning."""
    from hetdpt.flow.comparison.compare import FIGURE, RESULTS, TABLE, compare_into, read_comparison
    from hetdpt.flow.comparison.work import PLANS

    config, out = options.config, options.out
    data, network = options.open_data(), options.open_model(config.recovery.training.seed)
    with options.live() as display:
        place = options.execution(display, batch=options.batch)
        samples = read_samples(options.samples, network) if options.samples else None
        for done in compare_into(out, network, data, config, place, samples=samples):
            display.say(_line(done))
    found = read_comparison(out)
    if options.as_json:
        return print_json(directory=str(out), **found.to_dict())
    _print(found)
    options.note_random_weights()
    click.echo(f"written to {out}: {RESULTS}, {TABLE}, {FIGURE}; the layers are in {out / PLANS}")


def _line(done: ComparisonDone | SampleDone) -> str:
    from hetdpt.flow.comparison.work import Cell, Chosen, Timed
    from hetdpt.selection.predictor.samples import SampleStep

    by, outcome = by_others(done.is_own), done.result
    if isinstance(outcome, SampleStep):
        return f"sample with {done.subject}: {percent(outcome.accuracy)} of images held out{by}"
    cell = done.subject if isinstance(done.subject, Cell) else None
    about = f"{cell.layers} layers, {cell.method}, seed {cell.seed}" if cell else "dense"
    if isinstance(outcome, Timed):
        return f"timed: {len(outcome.plans)} models on {outcome.measured}{by}"
    if isinstance(outcome, Chosen):
        plan = outcome.plan
        return f"{about}: removes attention {_blocks(plan.attention)}, activation {_blocks(plan.activation)}{by}"
    if cell is None:
        return f"{about}: accuracy {percent(outcome.accuracy)}{by}"
    if outcome.method != cell.method:
        by = f" (the model of {outcome.method}, which chose the same)"
    return f"{about}: {outcome.start:.2f} -> {percent(outcome.accuracy)}{by}"


def _blocks(blocks: tuple[int, ...]) -> str:
    return " ".join(map(str, blocks)) or "none"


def _print(found: MethodComparison) -> None:
    dense = found.dense
    click.echo(
        f"dense: accuracy {percent(dense.accuracy)} of {dense.images} images, {amount(dense.macs)} MACs, "
        f"{dense.throughput:.4g} img/s ({found.measured})"
    )
    columns = ("split", "before", "accuracy", "spread", f"to {found.first} [95 %]", "speedup", "MACs", "seconds")
    rows = table("same fine-tuning for all", "layers", "method", *columns)
    for one in found.summaries:
        spread = f"{one.spread:.2f}" if one.spread is not None else "-"
        numbers = f"{one.start:.2f}", f"{one.accuracy:.2f}", spread, _spell(one.difference)
        costs = times(one.speedup, 3, "x"), percent(100 * one.macs, 0), f"{one.seconds:.0f}"
        rows.add_row(str(one.layers), one.method, ", ".join(one.splits), *numbers, *costs)
    print_(rows)
    for warning in found.warnings:
        click.echo(f"warning: {warning}", err=True)


def _spell(difference: Difference | None) -> str:
    if difference is None:
        return "-"
    return estimate(signed(difference.value), difference.low, difference.high, signed)
