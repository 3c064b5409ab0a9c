"""HetDPT+: how much of the goal is met by removing layers and how much by removing width, and the narrowed model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import asdict
from math import sqrt
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from hetdpt.adapters.preprocessing import preprocessing_of
from hetdpt.core.errors import PlanError
from hetdpt.core.format import budget_text, counted, percent
from hetdpt.core.goals import BOUNDS, describe
from hetdpt.core.plan import KINDS, Budget, Plan
from hetdpt.data.fixed_batches import LabelledBatches
from hetdpt.data.sources import Data
from hetdpt.export.saved import RECIPE, load, save
from hetdpt.flow.config import RunConfig
from hetdpt.flow.resumable import recover_into, remove_layers_
from hetdpt.flow.stages.budget import HOW, held_out, is_met, predictor_of
from hetdpt.flow.stages.layers import FOLDER
from hetdpt.flow.stages.stage import DATA, MODEL, RunContext, Stage, StageEstimate
from hetdpt.measurement.speed import measure_throughput
from hetdpt.reduce.width.narrow import Narrowed, narrow_to
from hetdpt.results import AnalyseResult, BalanceResult, Candidate, FitResult, NarrowResult, SelectResult, Split
from hetdpt.selection.methods import method_called
from hetdpt.selection.predictor.allocate import allocate
from hetdpt.selection.select import select
from hetdpt.store.config_diff import read_json
from hetdpt.store.run_directory import summary_of
from hetdpt.surgery.merge import merge_
from hetdpt.surgery.record import require_record
from hetdpt.surgery.tail import trim_if_possible_

if TYPE_CHECKING:
    from hetdpt.flow.stages.timing import Trials

PARTS = (0, 1 / 6, 1 / 3, 1 / 2)  # of the removable layers, tried by default
ROUNDS, TIMING_SECONDS = 100, 20.0  # whichever ends first, all candidates in turns
FASTER = 1.02  # times as fast as another is worth a choice
BY = "map+greedy"  # the method that chooses layers for a candidate
START, BRIEF, FOUND = "start", "brief", "narrowed.json"


class BalanceStage(Stage[BalanceResult]):
    """Try a few numbers of layers, each with width for the rest of the goal, and take the best."""

    name, result = "balance", BalanceResult
    settings = (*HOW, *BOUNDS, "width", "depths", "collection", "search", "batch", "trim")
    inputs = (MODEL, DATA, "analyse", "fit")

    def is_needed(self, config: RunConfig) -> bool:
        return config.is_balanced

    def run(self, context: RunContext) -> BalanceResult:
        context.require_single_process()
        held, measured_on = held_out(context.data)
        assert held.val is not None
        splits = _splits(context)
        tried = [_try(context, split, held) for split in splits]
        speedups = _speedups(context, splits)
        candidates = tuple(Candidate(**one, speedup=speed) for one, speed in zip(tried, speedups, strict=True))
        best, why = choose(candidates, len(held.val))
        layers = f"{budget_text(best.budget)} layers"
        context.note(f"{layers} to remove, then width: {why}")
        return BalanceResult(
            target=_target(context),
            candidates=candidates,
            budget=best.budget,
            why=why,
            measured_on=measured_on,
            images=len(held.val),
        )

    def estimate(self, trials: Trials) -> StageEstimate:
        depths, training, images = trials.depths, trials.collection, trials.held_images
        tried, models = ", ".join(map(str, depths)), 1 + training.models
        evaluations, left = len(depths) * images * training.evaluations, len(depths) * models * trials.weights
        made = sum(trials.selection(method_called(BY), layers)[0] + trials.narrowing(layers) for layers in depths)
        trained = len(depths) * (trials.updating(training) + models * trials.saving) + evaluations * trials.evaluation
        return StageEstimate(
            stage=self.name,
            text=f"{tried} layers removed and width, {training} each, measured on {images} images held out",
            updates=len(depths) * training.updates,
            evaluations=evaluations,
            seconds=made + trained + trials.timing(1 + len(depths), ROUNDS, TIMING_SECONDS),
            left=left,
            most=left + training.checkpoints,
        )


def choose(candidates: Sequence[Candidate], images: int) -> tuple[Candidate, str]:
    """Return the most accurate candidate, or a faster one that cannot be told from it, and why.

    One within a standard error of the best cannot be told from it; one that is 2 % faster counts as faster.

    >>> row = {"predicted": 0.0, "ratios": {}, "macs": 1.0, "params": 1.0, "start": 0.0}
    >>> two = [Candidate(budget=Budget(0, n), accuracy=81.0 - n, speedup=1 + n, **row) for n in (0, 1)]
    >>> choose(two, 1000)[1]  # doctest: +NORMALIZE_WHITESPACE
    'with 1 layer removed it is faster, 2.00x to 1.00x, and as accurate as with 0 layers removed, 80.00 to 81.00 %,
     within a standard error of 1.2 points'
    >>> choose(two, 100_000)[1]  # doctest: +NORMALIZE_WHITESPACE
    'with 0 layers removed it is the most accurate after a brief fine-tuning, 81.00 %; with 1 layer removed it is
     80.00 %'
    """
    best = max(candidates, key=lambda one: (one.accuracy, one.speedup))
    error = 100 * sqrt(best.accuracy / 100 * (1 - best.accuracy / 100) / images)
    tied = [one for one in candidates if one.accuracy >= best.accuracy - error]
    fastest = max(tied, key=lambda one: (one.speedup, one.accuracy))
    within = f"within a standard error of {error:.1f} points"
    if fastest.speedup > FASTER * best.speedup:
        return fastest, (
            f"with {_spell(fastest)} it is faster, {fastest.speedup:.2f}x to {best.speedup:.2f}x, and as accurate as "
            f"with {_spell(best)}, {fastest.accuracy:.2f} to {percent(best.accuracy)}, {within}"
        )
    others = [one for one in candidates if one is not best]
    if not others:
        return best, "no other number of layers can be tried for this goal"
    if tied != [best]:
        accuracy = f"{percent(best.accuracy)} {within}"
        return best, f"with {_spell(best)} it is as accurate as any, {accuracy}, and none is faster"
    second = max(others, key=lambda one: one.accuracy)
    return best, (
        f"with {_spell(best)} it is the most accurate after a brief fine-tuning, {percent(best.accuracy)}; with "
        f"{_spell(second)} it is {percent(second.accuracy)}"
    )


def _spell(candidate: Candidate) -> str:
    return f"{counted(candidate.layers, 'layer')} removed"


def _splits(context: RunContext) -> list[Split]:
    """Return the best split of each number of layers to try, of those that leave something to width."""
    prices, predictor, target = context.of(FitResult).prices, predictor_of(context), _target(context)
    asked = depths_of(context.config, sum(prices.count(kind) for kind in KINDS))
    splits = [allocate(predictor, layers=count, prices=prices).best for count in asked]
    left = [split for split in splits if not is_met(split.budget, prices, target)]
    if not left:
        raise PlanError(
            f"removing {min(asked)} layers meets the goal, so nothing is left to width; leave out --plus, or try fewer "
            "layers (depths)"
        )
    return left


def depths_of(config: RunConfig, most: int) -> tuple[int, ...]:
    """Return the numbers of layers to try if ``most`` can be removed."""
    asked = config.depths or tuple(sorted({round(part * most) for part in PARTS}))
    if too_many := [count for count in asked if count > most]:
        raise PlanError(f"depths has {too_many[0]} layers, but only {most} of this model can be removed; give fewer")
    return asked


def _try(context: RunContext, split: Split, held: Data) -> dict[str, Any]:
    """Return a candidate except its speedup: the layers removed, width for the rest, briefly fine-tuned."""
    folder, config = _folder(context, split.budget), context.config
    if not (folder / START / RECIPE).is_file():  # which is written all at once
        plan = Plan(removal=config.removal)
        if split.layers:
            how = config.select_config
            plan = select(context.model, held, split.budget, BY, how, device=config.device, workers=config.workers)
        found = _narrow(context, plan, held)
        save(found.model.cpu(), folder / START, overwrite=True, notes={FOUND: json.dumps(_values(found))})
    epochs = recover_into(
        folder / BRIEF,
        load(folder / START),
        context.model,
        held,
        config.collection.with_settings({"hold_out": 0.0}),  # ``held`` has images for that
        context.execution,
        merges=False,
        trims=config.trim,
        watch=context.execution.watcher(f"{counted(split.layers, 'layer')} removed and width: fine-tuning"),
    )
    for _ in epochs:
        pass
    summary = summary_of(folder / BRIEF)
    context.note(f"{split} layers removed and width: {percent(summary['last'])}")
    scores = {"start": summary["start"], "accuracy": summary["last"], "predicted": split.accuracy}
    return {"budget": split.budget, **read_json(folder / START / FOUND), **scores}


def _speedups(context: RunContext, splits: Sequence[Split]) -> list[float]:
    """Return how many times faster than the dense model each candidate is, merged; all of them timed in turns."""
    models: dict[str, nn.Module] = {"dense": context.model}
    for split in splits:
        models[str(split)] = merge_(load(_folder(context, split.budget) / BRIEF / "last").to(context.device))
        if context.config.trim:
            trim_if_possible_(models[str(split)])
    size = require_record(models[str(splits[0])]).survey.input_size
    found = measure_throughput(
        models, size, batch=context.config.batch, seconds=TIMING_SECONDS, progress=context.part("timing in turns")
    )
    return [found.speedup[str(split)].value for split in splits]


def _folder(context: RunContext, budget: Budget) -> Path:
    return context.directory / f"{budget.attention}+{budget.activation}"


class NarrowStage(Stage[NarrowResult]):
    """Remove the chosen layers, and then as much width as the goal needs."""

    name, result = "narrow", NarrowResult
    settings = ("images", *BOUNDS, "width", "batch", "trim")
    inputs = (MODEL, DATA, "analyse", "select")

    def is_needed(self, config: RunConfig) -> bool:
        return config.plus

    def run(self, context: RunContext) -> NarrowResult:
        found = _narrow(context, context.of(SelectResult).plan, context.data)
        save(found.model.cpu(), context.directory / FOLDER, overwrite=True)
        context.note(f"{found.macs:.4g} MACs, {found.params:.4g} parameters once merged")
        return NarrowResult(target=_target(context), **_values(found), speedup=found.speedup, tried=found.tried)

    def estimate(self, trials: Trials) -> StageEstimate:
        config = trials.config
        goals = {name: value for name, value in config.goals.items() if name in BOUNDS}
        return StageEstimate(
            stage=self.name,
            text=f"width for the rest of the goal, {describe(goals)}: {config.images} training images",
            seconds=trials.narrowing(trials.layers) + trials.saving,
            left=trials.weights,
        )


def _narrow(context: RunContext, plan: Plan, data: Data) -> Narrowed:
    """Return the dense model without the layers of ``plan``, narrowed until it meets the goal."""
    config, seed = context.config, context.config.width.seed
    target: dict[str, Any] = _target(context)
    student = remove_layers_(deepcopy(context.model), plan, data, config.images, seed, config.workers)
    if config.trim:
        trim_if_possible_(student)
    wants = preprocessing_of(context.model)
    batches = LabelledBatches(data.train, wants, count=config.images, seed=seed, workers=config.workers)
    return narrow_to(
        student,
        **target,
        config=config.width,
        batches=batches,
        dense=context.model,
        batch=config.batch,
        progress=context.progress,
    )


def _target(context: RunContext) -> dict[str, float]:
    return context.config.with_numbers(context.of(AnalyseResult).prices.dense).target


def _values(found: Narrowed) -> dict[str, Any]:
    return {"ratios": asdict(found.ratios), "macs": found.macs, "params": found.params}
