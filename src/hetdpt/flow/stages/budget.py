"""How many layers of each kind go: measure the dense model, sample accuracy, fit a predictor, split the budget."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from math import isfinite
from typing import Any

from torch import nn

from hetdpt.core.errors import PlanError
from hetdpt.core.goals import GOALS, Measures, Wanted, short
from hetdpt.core.modules import clone
from hetdpt.core.plan import KINDS, Budget, Sample
from hetdpt.core.tokens import read_tokens
from hetdpt.data.sources import Data
from hetdpt.data.streams import Stream
from hetdpt.data.subset import hold_out
from hetdpt.flow.collection.collect import collect_into, read_samples
from hetdpt.flow.collection.work import SampleDone
from hetdpt.flow.config import RunConfig
from hetdpt.flow.stages.task import Result, StageTask
from hetdpt.measurement.accuracy import evaluate
from hetdpt.measurement.costs import Costs
from hetdpt.measurement.machine import Machine
from hetdpt.reduce.tokens.reduce import reduce_tokens_
from hetdpt.reduce.width.narrow import narrow_to
from hetdpt.reduce.width.search import MOST
from hetdpt.report.frontier import summary
from hetdpt.results import Price, Prices, Split
from hetdpt.selection.predictor.allocate import allocate as split_budget
from hetdpt.selection.predictor.allocate import frontier, surface
from hetdpt.selection.predictor.polynomial import Predictor, Row, fit_predictor
from hetdpt.selection.predictor.pricing import measure_prices
from hetdpt.surgery.record import require_record, survey_of
from hetdpt.surgery.remove import ready, removable


def analyse(task: StageTask) -> Result:
    """Return what the dense model is and costs: its layers that can go, accuracy, MACs, and the price of each layer."""
    config, model = task.config, task.model
    base = ready(model, config.removal)
    size, weight = require_record(base).survey.input_size, next(model.parameters())
    costs = Costs.of(model, size)
    require_possible(model, config, costs)
    scores = evaluate(model, task.data, workers=config.workers, progress=task.part("evaluating the dense model"))
    task.note(f"dense: {scores.top1:.2f} % of {scores.count} images", best=scores.top1)
    prices = measure_prices(model, removal=config.removal, batch=config.batch, progress=task.progress)
    _require_reach(config, prices)
    return {
        "model": config.model,
        **asdict(Machine.of(weight.device)),
        "dtype": str(weight.dtype).removeprefix("torch."),
        "blocks": require_record(base).survey.anatomy.blocks,
        "input_size": size,
        "classes": task.data.num_classes,
        "sites": [{"kind": site.kind, "block": site.block, "path": site.path} for site in removable(base)],
        "accuracy": asdict(scores),
        "params": costs.params,
        "macs": costs.macs,
        "prices": json.loads(prices.to_json()),
    }


def _require_reach(config: RunConfig, prices: Prices) -> None:
    """Raise ``PlanError`` for a goal that is missed even without any layer, before hours are spent on it."""
    offered, wanted = Budget(*(prices.count(kind) for kind in KINDS)), config.with_numbers(prices.dense).wanted
    least = prices.measures(offered)
    layers, to_remove = offered.attention + offered.activation, wanted.conditions.get("layers", 0)
    if to_remove > layers:
        raise PlanError(f"the goal is {to_remove} layers removed, but this model has {layers} that can be removed")
    if config.plus:
        if config.budget is not None:
            _require_room(Budget(*config.budget), prices, config)
        return
    for name in wanted.missed(least):
        if GOALS[name].is_bound:
            raise _out_of_reach(name, wanted, least, f"without any of its {layers} removable layers")


def require_possible(model: nn.Module, config: RunConfig, dense: Costs) -> None:
    """Raise, before hours are spent on it, where ``model`` cannot lose width or tokens, or not so much."""
    if config.tokens is not None:
        reduce_tokens_(clone(model), read_tokens(config.tokens))
    if not config.plus:
        return
    found = narrow_to(model, ratio=MOST, config=replace(config.width, importance="l2", refits=False))
    least = Measures(macs=found.macs, params=found.params)
    wanted = Wanted(config.with_numbers(Price(dense.macs, dense.params)).target)
    for name in wanted.missed(least):
        if not GOALS[name].is_timed:
            raise _out_of_reach(name, wanted, least, f"with {100 * (1 - MOST):.0f} % of its width")


def _out_of_reach(name: str, wanted: Wanted, least: Measures, when: str) -> PlanError:
    goal, reached = GOALS[name], GOALS[name].reached(least)
    shown = goal.show(reached) if reached is not None else "no known value"
    return PlanError(
        f"the goal '{goal.describe(short(wanted.conditions[name]))}' is out of reach: {when} the model would have "
        f"{shown}; set an easier goal"
    )


def _require_room(budget: Budget, prices: Prices, config: RunConfig) -> None:
    """Raise ``PlanError`` where the layers of ``budget`` alone come to the goal."""
    if is_met(budget, prices, config.with_numbers(prices.dense).target):
        raise PlanError(
            f"{budget.attention} attention + {budget.activation} activation layers alone come to the goal, so that "
            "there is nothing left to width; leave out --plus, or ask for fewer layers or for more"
        )


def is_met(budget: Budget, prices: Prices, target: dict[str, float]) -> bool:
    """Whether layers alone are expected to meet the one condition of ``target``."""
    [(name, value)] = target.items()
    return GOALS[name].is_met(prices.measures(budget), value)


def collect(task: StageTask) -> Result:
    """Return samples of accuracy after brief fine-tunings, measured on training images that are held out."""
    task.require_alone()
    config, found = task.config, list[SampleDone]()
    held, measured_on = held_out(task.data)
    prices, layers = prices_of(task.results["analyse"]), config.sampled_layers or 0
    steps = collect_into(
        task.directory, task.model, held, config.collect_config, task.place, prices=prices, layers=layers
    )
    for done in steps:
        found.append(done)
        task.note(f"sample with {done.subject}: {done.result.accuracy:.2f} %")
    return {"samples": [_sample(done) for done in found], "measured_on": measured_on}


def held_out(data: Data) -> tuple[Data, str]:
    """Return the data with images to measure samples on, and which those are; a stream has none to hold out."""
    if isinstance(data.train, Stream):
        return data, "the validation images, as none of a stream can be held out"
    held = hold_out(data)
    assert held.val is not None
    return held, f"{len(held.val)} training images that were held out"


def _sample(done: SampleDone) -> dict[str, Any]:
    step = done.result
    return {
        "budget": asdict(step.budget),
        "before": step.before,
        "accuracy": step.accuracy,
        "chain": done.subject.chain,
        "layers": [{"kind": pick.site.kind, "block": pick.site.block, "te": pick.te} for pick in step.picks],
        "seconds": step.seconds,
    }


def fit(task: StageTask) -> Result:
    """Return the predictor of accuracy by layers removed: its degree, its error, and what it predicts everywhere."""
    predictor = predictor_of(task)
    found = summary(predictor, ())
    samples = [{"budget": asdict(_budget(row, predictor)), "accuracy": row[2]} for row in _points(predictor)]
    return {
        "blocks": predictor.blocks,
        **found["fit"],
        "samples": samples,
        "surface": [_plain(split) for split in surface(predictor, prices_of(task.results["analyse"]))],
        "warnings": found["warnings"],
    }


def _points(predictor: Predictor) -> list[tuple[float, float, float]]:
    return [(a, t, value) for (a, t), value in zip(predictor.points, predictor.accuracies, strict=True)]


def _budget(row: tuple[float, float, float], predictor: Predictor) -> Budget:
    return Budget(*(round((1 - ratio) * predictor.blocks) for ratio in row[:2]))


def allocate(task: StageTask) -> Result:
    """Return how many layers of each kind go, and how sure that is."""
    config, predictor = task.config, predictor_of(task)
    prices = prices_of(task.results["analyse"])
    wanted: dict[str, Any] = dict(config.with_numbers(prices.dense).wanted.conditions)
    if config.plus:
        wanted = {"layers": config.layers}  # the rest of the goal is for width to meet
    allocation = split_budget(predictor, prices=prices, **wanted)
    best = allocation.best
    if config.plus:
        _require_room(best.budget, prices, config)
    task.note(f"{best} go: predicted {best.accuracy:.2f} %, wins {100 * best.share:.0f} % of bootstrap draws")
    return {
        "wanted": allocation.wanted.conditions,
        "budget": asdict(best.budget),
        "share": best.share,
        "speedup": best.speedup,
        "table": [_plain(split) for split in allocation.table],
        "frontier": [_plain(split) for split in frontier(predictor, prices)],
        "warnings": list(allocation.warnings),
    }


def _plain(split: Split) -> dict[str, Any]:
    """Return a split as plain JSON, which has no infinity."""
    is_finite = split.speedup is not None and isfinite(split.speedup)
    return asdict(split if is_finite else replace(split, speedup=None))


def predictor_of(task: StageTask) -> Predictor:
    return fit_predictor(samples_of(task), task.results["analyse"]["blocks"])


def samples_of(task: StageTask) -> Sequence[Row]:
    """Return the samples of the run: those that were given, or those that were collected."""
    if task.config.samples is not None:
        return read_samples(task.config.samples, survey_of(task.model).anatomy.blocks)
    values = task.results["collect"]["samples"]
    return [Sample(Budget(**row["budget"]), row["accuracy"]) for row in values]


def prices_of(analysis: Result) -> Prices:
    return Prices.from_json(json.dumps(analysis["prices"]))
