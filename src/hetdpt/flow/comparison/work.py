"""The tasks of a comparison: evaluate the dense model, choose layers, fine-tune, and at last time all models."""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from hetdpt.adapters.models import input_size_of
from hetdpt.core.modules import clone
from hetdpt.core.plan import KINDS, Plan
from hetdpt.data.sources import Data
from hetdpt.export.saved import load
from hetdpt.flow.comparison.statistics import Answers
from hetdpt.flow.execution import Execution
from hetdpt.flow.resumable import recover_into
from hetdpt.measurement.accuracy import evaluate
from hetdpt.measurement.costs import Costs
from hetdpt.measurement.speed import measure_throughput
from hetdpt.results import PlanSpeed
from hetdpt.selection.importance import Picked
from hetdpt.selection.methods import method_called
from hetdpt.selection.predictor.allocate import Allocation
from hetdpt.selection.select import SelectConfig, select
from hetdpt.store.jobs import Finished, Guard, Task, read_result
from hetdpt.store.run_directory import summary_of
from hetdpt.surgery.merge import merge_
from hetdpt.surgery.remove import place_
from hetdpt.surgery.tail import trim_if_possible_
from hetdpt.training.recover import RecoverConfig

PLANS, MODELS, SEARCHES = "plans", "models", "searches"
DENSE_FILE, RESULT_FILE, SPEED_FILE = "dense.json", "result.json", "speed.json"
AT_ONCE = 10  # models timed in turns with the dense one
TIMING_SECONDS = 20.0


@dataclass(frozen=True)
class Cell:
    """What a row of the comparison is about."""

    layers: int
    method: str
    seed: int

    @property
    def key(self) -> str:
        """Its name among files and claims."""
        return f"{self.layers}-{self.method.replace('+', '-')}-{self.seed}"

    def __str__(self) -> str:
        return f"{self.method}, {self.layers} layers, seed {self.seed}"


@dataclass(frozen=True)
class Chosen:
    """The layers that a method chose."""

    layers: int
    method: str
    seed: int
    plan: Plan
    picks: tuple[Picked, ...]
    """In the order in which they were chosen."""
    seconds: float
    """Since the last restart; of the longer choice where this is the beginning of one."""
    warnings: tuple[str, ...] = ()
    """What makes the split of the budget doubtful."""

    @property
    def cell(self) -> Cell:
        return Cell(self.layers, self.method, self.seed)


@dataclass(frozen=True)
class Trained:
    """The accuracy of a model, in percent, and its answers."""

    start: float
    """Before the fine-tuning."""
    accuracy: float
    """After its last epoch, merged."""
    images: int
    right: str | None
    """For each validation image whether it is right; None where they have no numbers, as in a stream of shards."""
    seconds: float
    method: str | None = None
    """Whose choice it was trained for; others that chose the same share it. None for the dense model."""


@dataclass(frozen=True)
class Timed:
    """The speed of all models, measured in one session."""

    measured: str
    throughput: float
    """Of the dense model, in images per second."""
    macs: int
    params: int
    plans: dict[str, PlanSpeed]
    """By ``plan_key``."""


ComparisonDone = Finished[Cell | None, Chosen | Trained | Timed]


@dataclass(frozen=True)
class ComparisonJob:
    """The tasks of one directory, and what they are done with."""

    directory: Path
    model: nn.Module
    data: Data
    selection: SelectConfig
    recovery: RecoverConfig
    execution: Execution
    cells: tuple[Cell, ...]
    splits: Mapping[int, Allocation]
    """By layers, for the methods that need one."""
    trims: bool = True

    def run(self) -> Iterator[ComparisonDone]:
        """Do all tasks together with the processes that share the directory, and yield every result."""
        for done in self.execution.run(self.directory, self._tasks()):
            if done.is_own:
                self._tidy()
            yield done
        self._tidy()  # what a kill has left

    def _tasks(self) -> Iterator[Task[Any, Any]]:
        yield Task.to_file("dense", None, self.directory / DENSE_FILE, Trained, self._evaluate_dense)
        for number, cell in enumerate(self.cells, 1):
            title = f"row {number} of {len(self.cells)}: {cell}"
            choose, train = partial(self._choose, cell, title), partial(self._training, cell, title)
            yield Task.to_file(f"choose-{cell.key}", cell, self._plan_file(cell), Chosen, choose, then=train)
        yield Task.to_file(
            "time", None, self.directory / SPEED_FILE, Timed, self._time, is_last=True, is_complete=self._has_all
        )

    def _training(self, cell: Cell, title: str, chosen: Chosen) -> Iterable[Task[Any, Any]]:
        """Return the task to train the model of a choice; choices of the same layers share it."""
        key, train = _model_key(chosen.plan, cell.seed), partial(self._train, cell, title, chosen.plan)
        return [Task.to_file(f"train-{key}", cell, self.directory / MODELS / key / RESULT_FILE, Trained, train)]

    # results

    def chosen(self, cell: Cell) -> Chosen | None:
        """Return the layers chosen for ``cell``."""
        found: Chosen | None = read_result(self._plan_file(cell), Chosen)
        return found

    def trained(self, chosen: Chosen | None) -> Trained | None:
        """Return the accuracy of the model of a choice; None asks for the dense one."""
        folder = self.directory / MODELS / _model_key(chosen.plan, chosen.seed) if chosen else self.directory
        found: Trained | None = read_result(folder / (RESULT_FILE if chosen else DENSE_FILE), Trained)
        return found

    def timed(self) -> Timed | None:
        """Return how fast the models are."""
        found: Timed | None = read_result(self.directory / SPEED_FILE, Timed)
        return found

    def every_choice(self) -> list[Chosen]:
        """Return all choices in this directory, of this call and of earlier ones."""
        found = (read_result(file, Chosen) for file in (self.directory / PLANS).glob("[!.]*.json"))
        return [chosen for chosen in found if chosen]

    def _has_all(self, timed: Timed) -> bool:
        wanted = (self.chosen(cell) for cell in self.cells)
        return all(one and plan_key(one.plan) in timed.plans for one in wanted)

    # tasks

    def _evaluate_dense(self, guard: Guard) -> Trained:
        return self._evaluate(self.model, "dense model: evaluating")

    def _evaluate(self, model: nn.Module, title: str) -> Trained:
        begun, answers, execution = time.monotonic(), Answers(self.data), self.execution
        progress = execution.stage(title)
        scores = evaluate(model, self.data, workers=execution.workers, progress=progress, each=answers.add)
        return Trained(scores.top1, scores.top1, scores.count, answers.text, time.monotonic() - begun)

    def _choose(self, cell: Cell, title: str, guard: Guard) -> Chosen:
        chosen = self._beginning(cell) or self._selected(cell, title, guard)
        assert len(chosen.plan) == cell.layers, f"{cell} chose {chosen.plan}"
        return chosen

    def _beginning(self, cell: Cell) -> Chosen | None:
        """Return the beginning of a choice of more layers, if that is known to equal a separate choice."""
        if not method_called(cell.method).is_nested:
            return None
        for longer in self.every_choice():
            if (longer.method, longer.seed) == (cell.method, cell.seed) and longer.layers > cell.layers:
                picks = longer.picks[: cell.layers]
                attention, activation = (tuple(p.site.block for p in picks if p.site.kind == kind) for kind in KINDS)
                plan = replace(longer.plan, attention=attention, activation=activation)
                return replace(longer, layers=cell.layers, plan=plan, picks=picks)
        return None

    def _selected(self, cell: Cell, title: str, guard: Guard) -> Chosen:
        begun, execution, picks = time.monotonic(), self.execution, list[Picked]()
        split = self.splits[cell.layers] if method_called(cell.method).split == "map" else None
        search = self.selection.search.with_settings({"training.seed": cell.seed})

        def tell(stage: str, done: int, total: int) -> None:
            if execution.progress:
                execution.progress(f"{title}, {stage}", done, total)

        plan = select(
            self.model,
            self.data,
            split.budget if split else cell.layers,
            cell.method,
            replace(self.selection, search=search),
            device=execution.device,
            workers=execution.workers,
            keeper=execution.checkpoints(self.directory / SEARCHES / cell.key, guard),
            watch=picks.append,
            progress=tell,
        )
        warnings = tuple(split.warnings) if split else ()
        seconds, numbers = time.monotonic() - begun, (cell.layers, cell.method, cell.seed)
        return Chosen(*numbers, replace(plan, fits=()), tuple(picks), seconds, warnings)

    def _train(self, cell: Cell, title: str, plan: Plan, guard: Guard) -> Trained:
        execution, folder = self.execution, self.directory / MODELS / _model_key(plan, cell.seed)
        folder.parent.mkdir(exist_ok=True)
        epochs = recover_into(
            folder,
            deepcopy(self.model),
            self.model,
            self.data,
            self.recovery.with_settings({"training.seed": cell.seed}),
            execution,
            plan=plan,
            calibration=self.selection.images,
            trims=self.trims,
            watch=execution.watcher(f"{title}, fine-tuning"),
        )
        for _ in epochs:
            guard()
        summary = summary_of(folder)
        student = load(folder / "last").to(next(self.model.parameters()).device)
        found = self._evaluate(student, f"{title}, evaluating")
        return replace(found, start=summary["start"], seconds=summary["seconds"], method=cell.method)

    def _time(self, guard: Guard) -> Timed:
        """Time all models of the directory, those that were timed before too, so that all numbers are of one session.

        Speed does not depend on weights, so they are the dense model's here.
        """
        plans = {plan_key(chosen.plan): chosen.plan for chosen in self.every_choice()}
        dense, keys, size = self.model, sorted(plans), input_size_of(self.model)
        found: dict[str, PlanSpeed] = {}
        for first in range(0, len(keys), AT_ONCE):
            models = {key: merge_(place_(clone(dense), plans[key])) for key in keys[first : first + AT_ONCE]}
            for model in models.values() if self.trims else ():
                trim_if_possible_(model)
            timing = measure_throughput(
                {"dense": dense, **models},
                batch=self.execution.batch,
                seconds=TIMING_SECONDS,
                progress=self.execution.stage("timing all models in turns"),
            )
            for key, model in models.items():
                costs, ratio, rate = Costs.of(model, size), timing.speedup[key], timing.throughput[key]
                ms = 1e3 * rate.batch / rate.value
                found[key] = PlanSpeed(ratio.value, ratio.low, ratio.high, costs.macs, costs.params, ms)
        speed, costs = timing.throughput["dense"], Costs.of(dense, size)
        measured = f"{speed.device}, {speed.dtype}, batch {speed.batch}"
        return Timed(measured, speed.value, costs.macs, costs.params, found)

    def _tidy(self) -> None:
        for cell in self.cells:
            if self._plan_file(cell).is_file():
                shutil.rmtree(self.directory / SEARCHES / cell.key, ignore_errors=True)
        for result in (self.directory / MODELS).glob(f"*/{RESULT_FILE}"):
            for folder in [part for part in result.parent.iterdir() if part.is_dir()]:
                shutil.rmtree(folder, ignore_errors=True)

    def _plan_file(self, cell: Cell) -> Path:
        return self.directory / PLANS / f"{cell.key}.json"


def plan_key(plan: Plan) -> str:
    """Return a short name of ``plan``, the same for equal plans.

    >>> plan_key(Plan(attention=(1,), activation=(0, 2)))
    '1-2-fe512ba811'
    """
    values = json.dumps([plan.attention, plan.activation, plan.removal])
    counts = f"{plan.budget.attention}-{plan.budget.activation}"
    return f"{counts}-{hashlib.sha256(values.encode()).hexdigest()[:10]}"


def _model_key(plan: Plan, seed: int) -> str:
    return f"{plan_key(plan)}-{seed}"
