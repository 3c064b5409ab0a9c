"""The command predict: how many layers of each kind to remove, from samples of accuracy; torch only for timing."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hetdpt.cli.command import goal_options, option
from hetdpt.cli.options import ModelOptions, OutputOptions, OverwriteOptions, WorkerOptions
from hetdpt.cli.prediction import PREDICT, SHOWN, Prediction, print_prediction, write_prediction
from hetdpt.cli.show import print_json
from hetdpt.core.errors import PredictError
from hetdpt.core.format import layers, percent
from hetdpt.core.goals import GOALS, Measures
from hetdpt.store.atomic import parse_json

if TYPE_CHECKING:
    from hetdpt.core.plan import Budget, Sample
    from hetdpt.results import Prices
    from hetdpt.selection.predictor.allocate import Allocation
    from hetdpt.selection.predictor.polynomial import Predictor

RUN = "run.json"  # of a directory of hetdpt collect


class PredictOptions(ModelOptions, WorkerOptions, OverwriteOptions, OutputOptions):
    samples: Path = option(is_argument=True, is_required=True)
    """A CSV of samples, or a directory of hetdpt collect."""
    goals: dict[str, Any] = goal_options()
    blocks: int | None = None
    """Blocks of the model; a directory of hetdpt collect knows them."""
    prices: Path | None = None
    """What each layer costs: a JSON file, as written to --out."""
    model: Any = option(panel="Model")
    """A model whose layers to count and time instead."""
    batch: Any = option("RunConfig.batch", least=1, panel="Model")
    removal: Any = option("RunConfig.removal", shows_default=False, panel="Model")
    """How layers of --model are removed; by default as in hetdpt collect."""
    as_given: bool = False
    """Use ratios as they are written, instead of taking 0.67 for 8/12."""
    out: Path | None = None
    """Directory for predict.json, splits.csv, prices.json, frontier.csv and .png."""
    is_all: bool = option(flag="--all", default=False, help=f"Print whole tables, not {SHOWN} rows of each.")
    recheck: int | None = option(least=1, panel="Recheck")
    """Measure this many of the best splits with a longer fine-tuning, and choose by the result."""
    data: str | None = option(panel="Recheck")
    """The data of hetdpt collect."""
    data_root: Any = option("RunConfig.data_root", panel="Recheck")
    epochs: int | None = option(least=1, panel="Recheck")
    """Epochs of that fine-tuning, three times those of hetdpt collect by default."""

    def check(self) -> None:
        """Raise ``PredictError`` for options that have no use together."""
        of_model = ("num_classes", "img_size", "weights", "pretrained", "batch", "removal")
        given = self._given(*of_model, *(() if self.recheck else ("device",)))
        if self.model is None and given:
            raise PredictError(f"there is no model for {given}; add --model MODEL")
        if self.model is not None and self.prices is not None:
            raise PredictError("--prices and --model both say what layers cost; give one of them")
        if self.recheck is None:
            if given := self._given("data", "data_root", "epochs", "workers"):
                raise PredictError(f"nothing is measured again, but {given} was given; add --recheck 3")
            return
        if not self.goals:
            raise PredictError("--recheck chooses between splits of a budget; give one, such as --layers 8")
        if not self.samples.is_dir():
            raise PredictError(f"--recheck needs the model too; give a directory of hetdpt collect, not {self.samples}")
        if self.data is None:
            raise PredictError("--recheck trains; give --data, the same as for hetdpt collect")

    def _given(self, *names: str) -> str:
        return ", ".join(f"--{name.replace('_', '-')}" for name in names if getattr(self, name) is not None)


def predict(options: PredictOptions) -> None:
    """Predict the accuracy for each number of layers removed, and split a budget between the kinds."""
    from hetdpt.selection.predictor.allocate import frontier
    from hetdpt.selection.predictor.polynomial import fit_predictor
    from hetdpt.selection.predictor.rows import read_rows, samples_file
    from hetdpt.store.atomic import require_new

    options.check()
    if options.out is not None:
        require_new(options.out, options.overwrite, PREDICT)
    rows = read_rows(samples_file(options.samples))
    predictor = fit_predictor(rows, _blocks_of(options.samples, options.blocks), exact=not options.as_given)
    has_model = options.model is not None
    prices = _measure(options, predictor.blocks) if has_model else _read_prices(options.samples, options.prices)
    allocation = _allocate(predictor, options.goals, prices) if options.goals else None
    if allocation and options.recheck:
        allocation = _recheck(options, allocation)
    found = Prediction(predictor, frontier(predictor, prices), allocation, prices)
    if options.out is not None:
        write_prediction(found, options.out, options.overwrite)
    if options.as_json:
        return print_json(**found.values)
    print_prediction(found, None if options.is_all else SHOWN)
    if options.out is not None:
        click.echo(f"written to {options.out}: {', '.join(sorted(file.name for file in options.out.iterdir()))}")


def _recheck(options: PredictOptions, allocation: Allocation) -> Allocation:
    """Return the allocation after the best splits were measured with a longer fine-tuning."""
    from hetdpt.data.sources import open_data
    from hetdpt.flow.collection.collect import recheck_into

    assert options.data is not None
    budgets = [split.budget for split in allocation.table[: options.recheck]]
    data = open_data(options.data, root=options.data_root)
    found: list[Sample] = []
    speeds: dict[Budget, float | None] = {}
    with options.live() as display:
        for done in recheck_into(options.samples, budgets, data, options.execution(display), epochs=options.epochs):
            step = done.result
            found.append(step.sample)
            speeds[step.budget] = step.speedup
            speed = f", {step.speedup:.3f}x as fast" if step.speedup else ""
            counts = layers(step.budget.attention, step.budget.activation)
            display.say(f"measured again: {counts}: {step.before:.2f} -> {percent(step.accuracy)}{speed}")
    decided = allocation.with_rechecked(found)
    wanted, measured = decided.wanted.conditions.get("speedup"), speeds.get(decided.budget)
    if wanted and measured and measured < wanted:
        text = f"the goal was a speedup of {wanted:g}, but {measured:.3f} was measured; ask for more"
        click.echo(f"warning: {text}", err=True)
    return decided


def _blocks_of(samples: Path, given: int | None) -> int:
    """Return how many blocks the sampled model has, as its directory says; a CSV does not."""
    known = _read_run(samples).get("blocks")
    if type(known) is int and given in (None, known):
        return known
    if type(known) is int:
        raise PredictError(f"{samples} was collected from a model with {known} blocks, not {given}; leave --blocks out")
    if given is None:
        raise PredictError(f"{samples} does not say how many blocks the model has; give --blocks, such as --blocks 12")
    return given


def _read_run(samples: Path) -> dict[str, Any]:
    """Return what a directory of hetdpt collect was asked for; nothing where there is none that can be read."""
    try:
        values = parse_json((samples / RUN).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}


def _read_prices(samples: Path, file: Path | None) -> Prices | None:
    """Return the prices in ``file`` or, where none is given, those beside the samples, if there are any."""
    from hetdpt.results import PRICES_FILE, Prices

    if file is None:
        file = samples / PRICES_FILE
        if not file.is_file():
            return None
    try:
        return Prices.from_json(file.read_text(encoding="utf-8"), str(file))
    except (OSError, UnicodeDecodeError) as error:
        raise PredictError(f"the prices {file} cannot be read: {error}; measure them with --model MODEL") from None


def _measure(options: PredictOptions, blocks: int) -> Prices:
    """Return the prices of the model on this device."""
    from hetdpt.core.modules import find_device
    from hetdpt.selection.predictor.pricing import measure_prices
    from hetdpt.surgery.record import survey_of

    collected = _read_run(options.samples).get("config", {}).get("removal", "plain")
    removal = options.removal or (collected if isinstance(collected, str) else tuple(collected))
    network = options.open_model().to(find_device(options.device))
    found = survey_of(network).anatomy.blocks
    if found != blocks:
        raise PredictError(
            f"{options.model} has {found} blocks, but the samples are of a model with {blocks}; give that one"
        )
    with options.live() as display:
        return measure_prices(network, removal=removal, batch=options.batch, progress=display.step)


def _allocate(predictor: Predictor, goals: dict[str, Any], prices: Prices | None) -> Allocation:
    from hetdpt.selection.predictor.allocate import allocate

    dense = prices.dense.measures if prices else Measures()
    parsed = {name: GOALS[name].parse(value) for name, value in goals.items()}
    limits: dict[str, Any] = {name: amount.of(GOALS[name].reached(dense)) for name, amount in parsed.items()}
    return allocate(predictor, prices=prices, **limits)
