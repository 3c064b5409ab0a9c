"""The command predict: how many layers of each kind to remove, from samples of accuracy alone; no torch but to time."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hetdpt.cli.options import (
    Batch,
    Classes,
    DataRoot,
    Device,
    ImgSize,
    Json,
    Overwrite,
    Pretrained,
    Quiet,
    Weights,
    Workers,
    read_removal,
    workers_of,
)
from hetdpt.cli.prediction import PREDICT, SHOWN, Prediction, print_prediction, write_prediction
from hetdpt.cli.show import print_json, stages
from hetdpt.core.errors import PredictError
from hetdpt.core.goals import GOALS, Amount, Measures
from hetdpt.store.atomic import parse_json

if TYPE_CHECKING:
    from hetdpt.core.plan import Budget, Sample
    from hetdpt.results import Prices
    from hetdpt.selection.predictor.allocate import Allocation
    from hetdpt.selection.predictor.polynomial import Predictor

RUN = "run.json"  # of a directory of hetdpt collect


def predict(
    samples: Annotated[Path, typer.Argument(help="A CSV of samples, or a directory of hetdpt collect.")],
    blocks: Annotated[int | None, typer.Option(help="Blocks of the model; a directory knows them.")] = None,
    layers: Annotated[int | None, typer.Option(help="How many layers go.")] = None,
    macs: Annotated[str | None, typer.Option(help="The most MACs: 3.2G, or 70% of the dense model.")] = None,
    params: Annotated[str | None, typer.Option(help="The most parameters: 16M, or 70% of the dense model.")] = None,
    speedup: Annotated[float | None, typer.Option(help="How much faster it is to be.")] = None,
    prices: Annotated[Path | None, typer.Option(help="What each layer costs: a JSON file, see --out.")] = None,
    model: Annotated[str | None, typer.Option(help="A model whose layers to count and time here instead.")] = None,
    weights: Weights = None,
    pretrained: Pretrained = False,
    num_classes: Classes = None,
    img_size: ImgSize = None,
    batch: Batch = None,
    removal: Annotated[
        str | None, typer.Option(help="What --model loses: as in hetdpt collect or plain, unless given.")
    ] = None,
    device: Device = None,
    as_given: Annotated[
        bool, typer.Option("--as-given", help="Use ratios as they are written; else 0.67 is taken for 8/12.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="Directory for predict.json, splits.csv, prices.json, frontier.csv and .png.")
    ] = None,
    is_all: Annotated[bool, typer.Option("--all", help=f"Print whole tables, not {SHOWN} rows of each.")] = False,
    recheck: Annotated[
        int | None, typer.Option(min=1, help="Measure so many of the best splits by a longer run, and decide on that.")
    ] = None,
    data: Annotated[str | None, typer.Option(help="For --recheck: the data that was collected on.")] = None,
    data_root: DataRoot = None,
    epochs: Annotated[
        int | None, typer.Option(min=1, help="Of the fine-tuning of --recheck: three times those of hetdpt collect.")
    ] = None,
    workers: Workers = None,
    overwrite: Overwrite = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Predict the accuracy without so many layers of each kind, and choose how many go for a budget."""
    from hetdpt.selection.predictor.allocate import frontier
    from hetdpt.selection.predictor.polynomial import fit_predictor
    from hetdpt.selection.predictor.rows import read_rows, samples_file
    from hetdpt.store.atomic import require_new

    given = {"macs": macs, "params": params, "layers": layers, "speedup": speedup}
    wanted = {name: GOALS[name].parse(value, f"--{name}") for name, value in given.items() if value is not None}
    sizes: dict[str, Any] = {"num_classes": num_classes, "img_size": img_size}
    sizes |= {"weights": weights, "pretrained": pretrained}
    place: dict[str, Any] = {"batch": batch, "device": device, "removal": removal}
    again = Recheck(recheck, data, data_root, epochs, workers, device)
    _refuse_strays(model, prices, {**sizes, **place, "device": None if recheck else device})
    again.check(samples, bool(wanted))
    if out is not None:
        require_new(out, overwrite, PREDICT)
    rows = read_rows(samples_file(samples))
    predictor = fit_predictor(rows, _blocks_of(samples, blocks), exact=not as_given)
    if model is None:
        priced = _read_prices(samples, prices)
    else:
        collected = _read_run(samples).get("config", {}).get("removal", "plain")
        style = read_removal(removal) if removal else collected if isinstance(collected, str) else tuple(collected)
        priced = _measure(model, sizes, {**place, "removal": style}, predictor.blocks, quiet or as_json)
    allocation = _allocate(predictor, wanted, priced) if wanted else None
    if allocation and recheck:
        allocation = again.decide(samples, allocation, quiet or as_json, is_silent=as_json)
    found = Prediction(predictor, frontier(predictor, priced), allocation, priced)
    if out is not None:
        write_prediction(found, out, overwrite)
    if as_json:
        return print_json(**found.values)
    print_prediction(found, None if is_all else SHOWN)
    if out is not None:
        typer.echo(f"written to {out}: {', '.join(sorted(file.name for file in out.iterdir()))}")


@dataclass(frozen=True)
class Recheck:
    """How many splits are measured again, and how."""

    count: int | None
    data: str | None
    data_root: Path | None
    epochs: int | None
    workers: int | None
    device: str | None

    def check(self, samples: Path, has_budget: bool) -> None:
        """Raise ``PredictError`` for options that nothing would come of."""
        options = {"data": self.data, "data-root": self.data_root, "epochs": self.epochs, "workers": self.workers}
        if self.count is None:
            if given := [f"--{name}" for name, value in options.items() if value is not None]:
                raise PredictError(f"nothing is measured again, but {', '.join(given)} was given; add --recheck 3")
            return
        if not has_budget:
            raise PredictError("--recheck decides between splits of a budget; give one, such as --layers 8")
        if not samples.is_dir():
            raise PredictError(f"--recheck needs the model too; give a directory of hetdpt collect, not {samples}")
        if self.data is None:
            raise PredictError("--recheck trains; give --data, the same as for hetdpt collect")

    def decide(self, samples: Path, allocation: Allocation, is_quiet: bool, is_silent: bool) -> Allocation:
        """Return the allocation after the best splits were measured by a longer run."""
        from hetdpt.data.sources import open_data
        from hetdpt.flow.collection.collect import recheck_into
        from hetdpt.flow.execution import Execution

        assert self.data is not None
        budgets = [split.budget for split in allocation.table[: self.count]]
        opened = open_data(self.data, root=self.data_root)
        found: list[Sample] = []
        speeds: dict[Budget, float | None] = {}
        with stages(is_quiet) as (move, say):
            place = Execution(device=self.device, workers=workers_of(self.workers), progress=move)
            for done in recheck_into(samples, budgets, opened, place, epochs=self.epochs):
                found.append(done.result.sample)
                speeds[done.result.budget] = done.result.speedup
                if not is_silent:
                    counts = f"{done.result.budget.attention} attention + {done.result.budget.activation} activation"
                    speed = f", {done.result.speedup:.3f}x as fast" if done.result.speedup else ""
                    say(f"measured again: {counts}: {done.result.before:.2f} -> {done.result.accuracy:.2f} %{speed}")
        decided = allocation.with_rechecked(found)
        wanted, measured = decided.wanted.conditions.get("speedup"), speeds.get(decided.budget)
        if wanted and measured and measured < wanted:
            text = f"a speedup of {wanted:g} was asked for, but {measured:.3f} is what was measured; ask for more"
            typer.echo(f"warning: {text}", err=True)
        return decided


def _refuse_strays(model: str | None, prices: Path | None, options: dict[str, Any]) -> None:
    """Raise ``PredictError`` for options that nothing would come of."""
    given = [f"--{name.replace('_', '-')}" for name, value in options.items() if value]
    if model is None and given:
        raise PredictError(f"there is no model for {', '.join(given)}; give --model MODEL too")
    if model is not None and prices is not None:
        raise PredictError("--prices and --model both say what layers cost; give one of them")


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


def _measure(model: str, sizes: dict[str, Any], place: dict[str, Any], blocks: int, is_quiet: bool) -> Prices:
    """Return the prices of ``model`` on this device."""
    from hetdpt.core.modules import find_device
    from hetdpt.export.saved import open_model
    from hetdpt.selection.predictor.pricing import measure_prices
    from hetdpt.surgery.record import survey_of

    network = open_model(model, **sizes).to(find_device(place["device"]))
    found = survey_of(network).anatomy.blocks
    if found != blocks:
        raise PredictError(f"{model} has {found} blocks, but the samples are of a model with {blocks}; give that one")
    with stages(is_quiet) as (move, _):
        return measure_prices(network, removal=place["removal"], batch=place["batch"], progress=move)


def _allocate(predictor: Predictor, wanted: dict[str, Amount], prices: Prices | None) -> Allocation:
    from hetdpt.selection.predictor.allocate import allocate

    dense = prices.dense.measures if prices else Measures()
    limits: dict[str, Any] = {name: amount.of(GOALS[name].reached(dense)) for name, amount in wanted.items()}
    return allocate(predictor, prices=prices, **limits)
