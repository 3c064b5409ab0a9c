"""The command predict: how many layers of each kind to remove, from samples of accuracy; torch only for timing."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hetdpt.cli.command import goal_options, option
from hetdpt.cli.options import ModelOptions, OutputOptions, OverwriteOptions, WorkerOptions
from hetdpt.cli.show import print_, print_json, table
from hetdpt.core.errors import PredictError
from hetdpt.core.format import amount, estimate, layers, percent, split_text, times
from hetdpt.core.goals import GOALS, Measures
from hetdpt.store.atomic import parse_json

if TYPE_CHECKING:
    from hetdpt.core.plan import Budget, Sample
    from hetdpt.results import Prices, Split
    from hetdpt.selection.predictor.allocate import Allocation
    from hetdpt.selection.predictor.polynomial import Predictor

RUN = "run.json"  # of a directory of hetdpt collect
PREDICT = "predict.json"  # identifies a directory that predict wrote
SHOWN = 20  # rows of a table
NAMED = 8  # splits in a sentence


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
    from hetdpt.selection.predictor.allocate import best_splits
    from hetdpt.selection.predictor.polynomial import fit_predictor
    from hetdpt.selection.predictor.rows import read_order, read_rows, samples_file
    from hetdpt.store.atomic import require_new

    options.check()
    if options.out is not None:
        require_new(options.out, options.overwrite, PREDICT)
    rows = read_rows(samples_file(options.samples))
    predictor = fit_predictor(rows, _blocks_of(options.samples, options.blocks), exact=not options.as_given)
    has_model = options.model is not None
    prices = _measure(options, predictor.blocks) if has_model else _read_prices(options.samples, options.prices)
    if prices is not None and (order := read_order(samples_file(options.samples))) != ((), ()):
        prices = replace(prices, order=order)
    allocation = _allocate(predictor, options.goals, prices) if options.goals else None
    if allocation and options.recheck:
        allocation = _recheck(options, allocation)
    found = Prediction(predictor, best_splits(predictor, prices), allocation, prices)
    if options.out is not None:
        write_prediction(found, options.out, options.overwrite)
    if options.as_json:
        return print_json(**found.values)
    print_prediction(found, None if options.is_all else SHOWN)
    if options.out is not None:
        click.echo(f"written to {options.out}: {', '.join(sorted(file.name for file in options.out.iterdir()))}")


def _recheck(options: PredictOptions, allocation: Allocation) -> Allocation:
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
        text = f"the goal was a speedup of {wanted:g}, but {measured:.3f} was measured; set a higher goal"
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
    """Return the settings of a directory of hetdpt collect; empty if they cannot be read."""
    try:
        values = parse_json((samples / RUN).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}


def _read_prices(samples: Path, file: Path | None) -> Prices | None:
    """Return the prices in ``file`` or, if none is given, those beside the samples, if any."""
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


@dataclass(frozen=True)
class Prediction:
    """The results of the command."""

    predictor: Predictor
    frontier: tuple[Split, ...]
    allocation: Allocation | None
    prices: Prices | None

    @property
    def is_timed(self) -> bool:
        return self.prices is not None and self.prices.dense.ms is not None

    @property
    def values(self) -> dict[str, Any]:
        """What ``--json`` prints."""
        from hetdpt.report.prediction import summary

        return summary(self.predictor, self.frontier, self.allocation, self.prices)


def write_prediction(found: Prediction, out: Path, overwrite: bool) -> None:
    """Write all of it to the directory ``out``, at once."""
    from hetdpt.report.prediction import CHOICE, COLUMNS, draw, values_of
    from hetdpt.results import PRICES_FILE
    from hetdpt.store.atomic import new_directory, write_csv

    best = found.allocation.best if found.allocation else None
    with new_directory(out, PREDICT, overwrite) as scratch:
        (scratch / PREDICT).write_text(json.dumps(found.values, indent=1) + "\n", encoding="utf-8")
        write_csv(scratch / "frontier.csv", COLUMNS, map(values_of, found.frontier))
        draw(found.frontier, found.predictor, scratch / "frontier.png", found.prices, best)
        if found.allocation:
            choice = (values_of(split, is_choice=True) for split in found.allocation.table)
            write_csv(scratch / "splits.csv", CHOICE, choice)
        if found.prices:
            (scratch / PRICES_FILE).write_text(found.prices.to_json() + "\n", encoding="utf-8")


def print_prediction(found: Prediction, most: int | None) -> None:
    """Print the fit, the splits of the budget and the frontier; ``most`` rows of each table."""
    _print_fit(found.predictor)
    if found.allocation:
        _print_allocation(found.allocation, most)
    each = "speedup" if found.is_timed else "number of layers"
    _print_splits(f"frontier: what to remove for each {each}", found.frontier, most)
    tied = "tied: the best cannot be told from it; " if found.allocation else ""
    click.echo(f"{tied}beyond: far from the samples, so extrapolated")
    if found.prices and found.is_timed:
        where = found.prices.measured or "on an unknown device"
        click.echo(f"speedups are predicted by the time of each layer ({where})")
    for text in found.allocation.warnings if found.allocation else found.predictor.warnings:
        click.echo(f"warning: {text}", err=True)


def _print_fit(predictor: Predictor) -> None:
    click.echo(f"{len(predictor.points)} samples of a model with {predictor.blocks} blocks")
    rows = table("error on samples left out, two at a time, in points", "degree", "MAE", "RMSE", "")
    rows.columns[-1].justify = "left"
    for row in predictor.tried:
        note = "chosen" if row.degree == predictor.degree else f"not eligible: {row.why_not}" if row.why_not else ""
        rows.add_row(str(row.degree), f"{row.mae:.4f}", f"{row.rmse:.4f}", note)
    print_(rows)
    click.echo(
        f"{predictor.formula}\n{predictor.pruned_formula}\n"
        "P is the accuracy in percent; a and t are the parts of attention and activation layers that are kept,\n"
        "p = 1 - a and q = 1 - t those that are removed"
    )


def _print_allocation(allocation: Allocation, most: int | None) -> None:
    from hetdpt.selection.predictor.allocate import DRAWS

    _print_splits(f"what to remove for {allocation.wanted}, by prediction", allocation.table, most, is_choice=True)
    best = allocation.best
    others = [split for split in allocation.table if split.is_tied and split != allocation.table[0]]
    remove = f"remove {best.budget.attention} attention and {best.budget.activation} activation layers: predicted "
    remove += estimate(percent(best.accuracy), best.low, best.high, 2)
    if allocation.rechecked:
        return click.echo(f"{remove}; {percent(best.measured)} measured, the best of {len(allocation.rechecked)}")
    click.echo(
        f"{remove}; wins {percent(100 * best.share, 0)} of {DRAWS:,} bootstrap draws"
        + (f"; cannot be told from: {_names(others)}" if others else "")
    )


def _print_splits(title: str, splits: Sequence[Split], most: int | None, is_choice: bool = False) -> None:
    is_priced = any(split.macs is not None for split in splits)
    is_timed = any(split.speedup is not None for split in splits)
    columns = ["attention", "activation", "layers", "predicted", "95 % interval", *(["wins"] if is_choice else [])]
    columns += [*(["MACs", "params"] if is_priced else []), *(["speedup"] if is_timed else []), ""]
    rows = table(title, *columns)
    rows.columns[-1].justify, rows.show_edge = "left", False  # so that it fits in 120 columns
    for split in splits[:most]:
        counts = split.budget.attention, split.budget.activation, split.layers
        cells = [*map(str, counts), f"{split.accuracy:.2f}", f"[{split.low:.2f}, {split.high:.2f}]"]
        cells += [percent(100 * split.share, 1)] if is_choice else []
        cells += _costs(split)
        rows.add_row(*cells, _note(split, is_first=is_choice and split == splits[0]))
    print_(rows)
    if most is not None and len(splits) > most:
        click.echo(f"{len(splits) - most} more; --all prints them too")


def _costs(split: Split) -> list[str]:
    cells = [] if split.macs is None or split.params is None else [amount(split.macs, 2), amount(split.params, 2)]
    if split.speedup is None:
        return cells
    return [*cells, times(split.speedup, 3, "x")]


def _note(split: Split, is_first: bool) -> str:
    known = (
        (is_first, "best"),
        (split.is_tied and not is_first, "tied"),
        (split.is_beyond, "beyond"),
        (split.measured is not None, f"measured {split.measured:.2f}" if split.measured is not None else ""),
    )
    return ", ".join(text for is_so, text in known if is_so)


def _names(splits: Iterable[Split]) -> str:
    names = [split_text(split.budget) for split in splits]
    return ", ".join(names[:NAMED]) + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")
