"""One process at work on a comparison: it claims a task, does it, and writes what it came to."""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

from torch import Tensor, nn

from hetdpt.adapters.models import input_size_of
from hetdpt.core.modules import clone
from hetdpt.core.plan import KINDS, Plan, Site
from hetdpt.data.sources import Data
from hetdpt.data.streams import Stream
from hetdpt.export.saved import load
from hetdpt.flow.collection.work import CLAIMS, Claimed, Workplace
from hetdpt.flow.comparison.rows import RIGHT, UNREAD, WRONG, PlanSpeed
from hetdpt.flow.resumable import recover_into
from hetdpt.measurement.accuracy import evaluate
from hetdpt.measurement.costs import Costs
from hetdpt.measurement.speed import measure_throughput
from hetdpt.selection.importance import Picked
from hetdpt.selection.methods import method_called
from hetdpt.selection.predictor.allocate import Allocation
from hetdpt.selection.select import SelectConfig, select
from hetdpt.store.atomic import keep_json, kept
from hetdpt.store.checkpoints import CHECKPOINTS, Checkpoints
from hetdpt.store.queue import Claim, work
from hetdpt.store.run_directory import summary_of
from hetdpt.surgery.merge import merge_
from hetdpt.surgery.remove import place_
from hetdpt.training.recover import RecoverConfig

PLANS, MODELS, SEARCHES = "plans", "models", "searches"
DENSE_FILE, RESULT_FILE, SPEED_FILE = "dense.json", "result.json", "speed.json"
AT_ONCE = 10  # models that take turns with the dense one
TIMING_SECONDS = 20.0
Stage = Literal["dense", "choose", "train", "time"]
Found = TypeVar("Found")


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

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Cell:
        """Return the cell that a choice was written for."""
        return cls(values["layers"], values["method"], values["seed"])


@dataclass(frozen=True)
class ComparisonTask:
    """What one process does by itself."""

    stage: Stage
    cell: Cell | None = None
    """For the stages ``choose`` and ``train``."""


@dataclass(frozen=True)
class Chosen:
    """The layers that a method chose."""

    plan: Plan
    picks: tuple[Picked, ...]
    """In the order in which they went."""
    seconds: float
    """Since the last restart; of the longer choice where it is the beginning of one."""
    warnings: tuple[str, ...] = ()
    """What makes the split of the budget doubtful."""

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Chosen:
        picks = tuple(_picked(pick) for pick in values["picks"])
        return cls(Plan.from_dict(values["plan"]), picks, values["seconds"], tuple(values["warnings"]))


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

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Trained:
        return cls(**values)


@dataclass(frozen=True)
class Timed:
    """How fast all models are, measured at one time and place."""

    measured: str
    throughput: float
    """Of the dense model, in images per second."""
    macs: int
    params: int
    plans: dict[str, PlanSpeed]
    """By ``plan_key``."""

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Timed:
        return cls(**{**values, "plans": {key: PlanSpeed(**speed) for key, speed in values["plans"].items()}})


Outcome = Chosen | Trained | Timed


@dataclass(frozen=True)
class ComparisonDone:
    """A task that is done."""

    task: ComparisonTask
    outcome: Outcome
    is_own: bool
    """Whether this process did it, now."""


@dataclass(frozen=True)
class ComparisonJob:
    """What there is to do in one directory, and with what."""

    directory: Path
    model: nn.Module
    data: Data
    selection: SelectConfig
    recovery: RecoverConfig
    place: Workplace
    cells: tuple[Cell, ...]
    splits: Mapping[int, Allocation]
    """By layers, for the methods that need one."""

    def work(self) -> Iterator[ComparisonDone]:
        """Do the tasks that nobody works on, one after another, until all are done; the times come last."""
        tasks = [ComparisonTask("dense")]
        for layers, seed in dict.fromkeys((cell.layers, cell.seed) for cell in self.cells):
            some = [cell for cell in self.cells if (cell.layers, cell.seed) == (layers, seed)]
            tasks += [ComparisonTask("choose", cell) for cell in some] + [
                ComparisonTask("train", cell) for cell in some
            ]
        done: Iterator[tuple[ComparisonTask, Outcome, bool]] = work(
            self.directory / CLAIMS, [*tasks, ComparisonTask("time")], self
        )
        for found in done:
            yield ComparisonDone(*found)
        self._tidy()  # what a kill has left

    def name(self, task: ComparisonTask) -> str:
        """Return what it is claimed by: equal plans are one model, and a plan that is not chosen yet is waited for."""
        if task.cell is None:
            return task.stage
        if task.stage == "train" and (chosen := self.chosen(task.cell)):
            return f"train-{_model_key(chosen.plan, task.cell.seed)}"
        return f"choose-{task.cell.key}"

    def can_begin(self, task: ComparisonTask) -> bool:
        if task.stage == "time":
            return all(self.trained(cell) for cell in self.cells)
        return task.stage != "train" or self.chosen(_cell(task)) is not None

    def result(self, task: ComparisonTask) -> Outcome | None:
        """Return what ``task`` came to if it is done."""
        if task.stage == "choose":
            return self.chosen(_cell(task))
        return self.timed() if task.stage == "time" else self.trained(task.cell)

    def take(self, task: ComparisonTask, claim: Claim) -> None:
        """Do it, and write what it came to."""
        if task.stage == "dense":
            self._evaluate_dense(claim)
        elif task.stage == "choose":
            self._choose(_cell(task), claim)
        elif task.stage == "train":
            self._train(_cell(task), claim)
        else:
            self._time(claim)

    def wait(self, who: str) -> None:
        self.place.wait(who)

    # what is done

    def chosen(self, cell: Cell) -> Chosen | None:
        """Return the layers that were chosen for ``cell``."""
        return _read(self._plan_file(cell), Chosen.from_dict)

    def trained(self, cell: Cell | None) -> Trained | None:
        """Return what the model of ``cell`` came to; None asks for the dense one."""
        if cell is None:
            return _read(self.directory / DENSE_FILE, Trained.from_dict)
        chosen = self.chosen(cell)
        return _read(self._folder(chosen.plan, cell.seed) / RESULT_FILE, Trained.from_dict) if chosen else None

    def timed(self) -> Timed | None:
        """Return how fast the models are, if that is known of all."""
        timed = _read(self.directory / SPEED_FILE, Timed.from_dict)
        wanted = (self.chosen(cell) for cell in self.cells)
        return timed if timed and all(one and plan_key(one.plan) in timed.plans for one in wanted) else None

    def every_cell(self) -> list[Cell]:
        """Return all cells that layers were chosen for in this directory, now or before."""
        found = (_read(file, Cell.from_dict) for file in (self.directory / PLANS).glob("[!.]*.json"))
        return [cell for cell in found if cell]

    # doing it

    def _evaluate_dense(self, claim: Claim) -> None:
        found = self._evaluate(self.model, "dense: evaluating")
        claim.require_held()
        keep_json(self.directory / DENSE_FILE, asdict(found))

    def _evaluate(self, model: nn.Module, stage: str) -> Trained:
        begun, answers = time.monotonic(), _Answers(self.data)
        progress = self.place.stage(stage)
        scores = evaluate(model, self.data, workers=self.place.workers, progress=progress, each=answers.add)
        return Trained(scores.top1, scores.top1, scores.count, answers.text, time.monotonic() - begun)

    def _choose(self, cell: Cell, claim: Claim) -> None:
        chosen = self._beginning(cell) or self._selected(cell, claim)
        assert len(chosen.plan) == cell.layers, f"{cell} chose {chosen.plan}"
        claim.require_held()
        keep_json(self._plan_file(cell), {**asdict(cell), **asdict(chosen)})
        self._tidy()

    def _beginning(self, cell: Cell) -> Chosen | None:
        """Return the beginning of a choice of more layers, where that is known to be the same as a choice by itself."""
        if not method_called(cell.method).is_nested:
            return None
        for other in self.every_cell():
            if (other.method, other.seed) == (cell.method, cell.seed) and other.layers > cell.layers:
                longer = self.chosen(other)
                assert longer is not None
                picks = longer.picks[: cell.layers]
                attention, activation = (tuple(p.site.block for p in picks if p.site.kind == kind) for kind in KINDS)
                plan = replace(longer.plan, attention=attention, activation=activation)
                return replace(longer, plan=plan, picks=picks)
        return None

    def _selected(self, cell: Cell, claim: Claim) -> Chosen:
        begun, folder, place = time.monotonic(), self.directory / SEARCHES / cell.key, self.place
        picks: list[Picked] = []
        split = self.splits[cell.layers] if method_called(cell.method).split == "map" else None
        search = self.selection.search.with_settings({"training.seed": cell.seed})
        plan = select(
            self.model,
            self.data,
            split.budget if split else cell.layers,
            cell.method,
            replace(self.selection, search=search),
            device=place.device,
            workers=place.workers,
            keeper=Claimed(Checkpoints(folder / CHECKPOINTS, place.minutes), claim),
            watch=picks.append,
            progress=partial(self._tell, cell),
        )
        warnings = tuple(split.warnings) if split else ()
        return Chosen(replace(plan, fits=()), tuple(picks), time.monotonic() - begun, warnings)

    def _tell(self, cell: Cell, stage: str, done: int, total: int) -> None:
        if self.place.progress:
            self.place.progress(f"{cell.key}: {stage}", done, total)

    def _train(self, cell: Cell, claim: Claim) -> None:
        chosen, place = self.chosen(cell), self.place
        assert chosen is not None
        folder = self._folder(chosen.plan, cell.seed)
        folder.parent.mkdir(exist_ok=True)
        epochs = recover_into(
            folder,
            deepcopy(self.model),
            self.model,
            self.data,
            self.recovery.with_settings({"training.seed": cell.seed}),
            plan=chosen.plan,
            calibration=self.selection.images,
            device=place.device,
            workers=place.workers,
            minutes=place.minutes,
            watch=place.watcher(f"{cell.key}: fine-tuning"),
        )
        for _ in epochs:
            claim.require_held()
        summary = summary_of(folder)
        student = load(folder / "last").to(next(self.model.parameters()).device)
        found = self._evaluate(student, f"{cell.key}: evaluating")
        claim.require_held()
        found = replace(found, start=summary["start"], seconds=summary["seconds"], method=cell.method)
        keep_json(folder / RESULT_FILE, asdict(found))
        self._tidy()

    def _tidy(self) -> None:
        """Remove the models and checkpoints of what is done."""
        for cell in self.cells:
            if self._plan_file(cell).is_file():
                shutil.rmtree(self.directory / SEARCHES / cell.key, ignore_errors=True)
        for result in (self.directory / MODELS).glob(f"*/{RESULT_FILE}"):
            for folder in [part for part in result.parent.iterdir() if part.is_dir()]:
                shutil.rmtree(folder, ignore_errors=True)

    def _time(self, claim: Claim) -> None:
        """Time all models of the directory, those that were timed before too, so that all numbers are of one session.

        Speed does not depend on weights, so that they are the dense model's here.
        """
        every = (self.chosen(cell) for cell in self.every_cell())
        plans = {plan_key(chosen.plan): chosen.plan for chosen in every if chosen}
        dense, keys, size = self.model, sorted(plans), input_size_of(self.model)
        found: dict[str, PlanSpeed] = {}
        for first in range(0, len(keys), AT_ONCE):
            models = {key: merge_(place_(clone(dense), plans[key])) for key in keys[first : first + AT_ONCE]}
            timing = measure_throughput(
                {"dense": dense, **models},
                batch=self.place.batch,
                seconds=TIMING_SECONDS,
                progress=self.place.stage("timing"),
            )
            for key, model in models.items():
                costs, ratio, rate = Costs.of(model, size), timing.speedup[key], timing.throughput[key]
                ms = 1e3 * rate.batch / rate.value
                found[key] = PlanSpeed(ratio.value, ratio.low, ratio.high, costs.macs, costs.params, ms)
        speed, costs = timing.throughput["dense"], Costs.of(dense, size)
        measured = f"{speed.device}, {speed.dtype}, batch {speed.batch}"
        claim.require_held()
        keep_json(self.directory / SPEED_FILE, asdict(Timed(measured, speed.value, costs.macs, costs.params, found)))

    def _plan_file(self, cell: Cell) -> Path:
        return self.directory / PLANS / f"{cell.key}.json"

    def _folder(self, plan: Plan, seed: int) -> Path:
        return self.directory / MODELS / _model_key(plan, seed)


class _Answers:
    """Which validation images a model gets right."""

    def __init__(self, data: Data) -> None:
        has_no_numbers = data.val is None or isinstance(data.val, Stream)
        self.found = None if has_no_numbers else [UNREAD] * len(data.val or ())

    def add(self, indices: Tensor, is_right: Tensor) -> None:
        if self.found is not None:
            for index, right in zip(indices.tolist(), is_right.tolist(), strict=True):
                self.found[index] = RIGHT if right else WRONG

    @property
    def text(self) -> str | None:
        return "".join(self.found) if self.found is not None else None


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


def _cell(task: ComparisonTask) -> Cell:
    assert task.cell is not None
    return task.cell


def _picked(values: dict[str, Any]) -> Picked:
    return Picked(Site(**values["site"]), values["score"])


def _read(file: Path, make: Callable[[dict[str, Any]], Found]) -> Found | None:
    """Return what ``keep_json`` wrote; None where it has not."""
    return kept(file, "remove it to have it made again", make)
