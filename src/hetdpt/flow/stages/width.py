"""HetDPT+: how much of the goal is met by layers and how much by width, and the model that lost both."""

from __future__ import annotations

import json
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import asdict
from math import sqrt
from pathlib import Path
from typing import Any

from torch import nn

from hetdpt.adapters.preprocessing import preprocessing_of
from hetdpt.core.errors import PlanError
from hetdpt.core.format import counted
from hetdpt.core.plan import KINDS, Budget, Plan
from hetdpt.data.fixed_batches import LabelledBatches
from hetdpt.data.sources import Data
from hetdpt.export.saved import RECIPE, load, save
from hetdpt.flow.config import RunConfig
from hetdpt.flow.resumable import recover_into, remove_layers_
from hetdpt.flow.stages.budget import held_out, is_met, predictor_of, prices_of
from hetdpt.flow.stages.layers import FOLDER, plan_of
from hetdpt.flow.stages.task import Result, StageTask
from hetdpt.measurement.speed import measure_throughput
from hetdpt.reduce.width.narrow import Narrowed, narrow_to
from hetdpt.results import Candidate, Split
from hetdpt.selection.predictor.allocate import allocate as split_budget
from hetdpt.selection.select import select as select_layers
from hetdpt.store.config_diff import read_json
from hetdpt.store.run_directory import summary_of
from hetdpt.surgery.merge import merge_
from hetdpt.surgery.record import require_record

PARTS = (0, 1 / 6, 1 / 3, 1 / 2)  # of the layers that can go, tried by default
TIMING_SECONDS = 20.0  # at most, all candidates in turns
FASTER = 1.02  # times as fast as another is worth a choice
BY = "map+greedy"  # the method that chooses layers for a trial
START, BRIEF, FOUND = "start", "brief", "narrowed.json"


def balance(task: StageTask) -> Result:
    """Return how many layers of each kind go before width does: of a few numbers the one that comes out best."""
    task.require_alone()
    held, measured_on = held_out(task.data)
    assert held.val is not None
    splits = _splits(task)
    tried = [_try(task, split, held) for split in splits]
    speedups = _speedups(task, splits)
    candidates = [Candidate(**one, speedup=speed) for one, speed in zip(tried, speedups, strict=True)]
    best, why = choose(candidates, len(held.val))
    task.note(f"{best.budget.attention} attention + {best.budget.activation} activation go, then width: {why}")
    return {
        "target": _target(task),
        "candidates": [asdict(candidate) for candidate in candidates],
        "budget": asdict(best.budget),
        "why": why,
        "measured_on": measured_on,
        "images": len(held.val),
    }


def choose(candidates: Sequence[Candidate], images: int) -> tuple[Candidate, str]:
    """Return the most accurate candidate, or a faster one that cannot be told from it, and why.

    What is within one standard error of the best cannot be told from it; what is 2 % faster is faster.

    >>> row = {"predicted": 0.0, "ratios": {}, "macs": 1.0, "params": 1.0, "start": 0.0}
    >>> two = [Candidate(budget=Budget(0, n), accuracy=81.0 - n, speedup=1 + n, **row) for n in (0, 1)]
    >>> choose(two, 1000)[1]  # doctest: +NORMALIZE_WHITESPACE
    'with 1 layer less it is faster, 2.00x to 1.00x, and as accurate as with 0 layers less, 80.00 to 81.00 %, within a
     standard error of 1.2 points'
    >>> choose(two, 100_000)[1]
    'with 0 layers less it is the most accurate after a brief fine-tuning, 81.00 %; with 1 layer less it is 80.00 %'
    """
    best = max(candidates, key=lambda one: (one.accuracy, one.speedup))
    error = 100 * sqrt(best.accuracy / 100 * (1 - best.accuracy / 100) / images)
    tied = [one for one in candidates if one.accuracy >= best.accuracy - error]
    fastest = max(tied, key=lambda one: (one.speedup, one.accuracy))
    within = f"within a standard error of {error:.1f} points"
    if fastest.speedup > FASTER * best.speedup:
        return fastest, (
            f"with {_spell(fastest)} it is faster, {fastest.speedup:.2f}x to {best.speedup:.2f}x, and as accurate as "
            f"with {_spell(best)}, {fastest.accuracy:.2f} to {best.accuracy:.2f} %, {within}"
        )
    others = [one for one in candidates if one is not best]
    if not others:
        return best, "no other number of layers can be tried for this goal"
    if tied != [best]:
        return best, f"with {_spell(best)} it is as accurate as any, {best.accuracy:.2f} % {within}, and none is faster"
    second = max(others, key=lambda one: one.accuracy)
    return best, (
        f"with {_spell(best)} it is the most accurate after a brief fine-tuning, {best.accuracy:.2f} %; with "
        f"{_spell(second)} it is {second.accuracy:.2f} %"
    )


def _spell(candidate: Candidate) -> str:
    return f"{counted(candidate.layers, 'layer')} less"


def _splits(task: StageTask) -> list[Split]:
    """Return the best split of each number of layers that is to be tried, as far as they leave something to width."""
    prices, predictor, target = prices_of(task.results["analyse"]), predictor_of(task), _target(task)
    asked = depths_of(task.config, sum(prices.count(kind) for kind in KINDS))
    splits = [split_budget(predictor, layers=count, prices=prices).best for count in asked]
    left = [split for split in splits if not is_met(split.budget, prices, target)]
    if not left:
        raise PlanError(
            f"{min(asked)} layers alone come to the goal, so that there is nothing left to width; leave out --plus, or "
            "try fewer layers (depths)"
        )
    return left


def depths_of(config: RunConfig, most: int) -> tuple[int, ...]:
    """Return the numbers of layers to try where ``most`` can go."""
    asked = config.depths or tuple(sorted({round(part * most) for part in PARTS}))
    if too_many := [count for count in asked if count > most]:
        raise PlanError(f"depths has {too_many[0]} layers, but this model has {most} that can go; ask for fewer")
    return asked


def _try(task: StageTask, split: Split, held: Data) -> dict[str, Any]:
    """Return what a number of layers comes to with width for the rest, after a brief fine-tuning."""
    folder, config = _folder(task, split.budget), task.config
    if not (folder / START / RECIPE).is_file():  # which is written all at once
        select = config.select_config
        plan = Plan(removal=config.removal)
        if split.layers:
            plan = select_layers(
                task.model, held, split.budget, BY, select, device=config.device, workers=config.workers
            )
        found = _narrow(task, plan, held)
        save(found.model.cpu(), folder / START, overwrite=True, notes={FOUND: json.dumps(_values(found))})
    epochs = recover_into(
        folder / BRIEF,
        load(folder / START),
        task.model,
        held,
        config.collection,
        merges=False,
        device=config.device,
        workers=config.workers,
        minutes=config.minutes,
        watch=lambda now: task.progress(f"{counted(split.layers, 'layer')} less", now.update, now.updates),
    )
    for _ in epochs:
        pass
    summary = summary_of(folder / BRIEF)
    task.note(f"{split} and width: {summary['last']:.2f} %")
    scores = {"start": summary["start"], "accuracy": summary["last"], "predicted": split.accuracy}
    return {"budget": split.budget, **read_json(folder / START / FOUND), **scores}


def _speedups(task: StageTask, splits: Sequence[Split]) -> list[float]:
    """Return how many times faster than the dense model each candidate is, merged; all of them timed in turns."""
    device = next(task.model.parameters()).device
    models: dict[str, nn.Module] = {"dense": task.model}
    for split in splits:
        models[str(split)] = merge_(load(_folder(task, split.budget) / BRIEF / "last").to(device))
    size = require_record(models[str(splits[0])]).survey.input_size
    found = measure_throughput(
        models, size, batch=task.config.batch, seconds=TIMING_SECONDS, progress=task.part("timing in turns")
    )
    return [found.speedup[str(split)].value for split in splits]


def _folder(task: StageTask, budget: Budget) -> Path:
    return task.directory / f"{budget.attention}+{budget.activation}"


def narrow(task: StageTask) -> Result:
    """Return the sizes of the model that has lost its layers, and then as much width as the goal needs."""
    found = _narrow(task, plan_of(task), task.data)
    save(found.model.cpu(), task.directory / FOLDER, overwrite=True)
    task.note(f"{found.macs:.4g} MACs, {found.params:.4g} parameters once merged")
    return {"target": _target(task), **_values(found), "speedup": found.speedup, "tried": found.tried}


def _narrow(task: StageTask, plan: Plan, data: Data) -> Narrowed:
    """Return the dense model without the layers of ``plan``, narrowed until it meets the goal."""
    config, seed = task.config, task.config.width.seed
    target: dict[str, Any] = _target(task)
    student = remove_layers_(deepcopy(task.model), plan, data, config.images, seed, config.workers)
    wants = preprocessing_of(task.model)
    batches = LabelledBatches(data.train, wants, count=config.images, seed=seed, workers=config.workers)
    return narrow_to(
        student,
        **target,
        config=config.width,
        batches=batches,
        dense=task.model,
        batch=config.batch,
        progress=task.progress,
    )


def _target(task: StageTask) -> dict[str, float]:
    return task.config.with_numbers(prices_of(task.results["analyse"]).dense).target


def _values(found: Narrowed) -> dict[str, Any]:
    return {"ratios": asdict(found.ratios), "macs": found.macs, "params": found.params}
