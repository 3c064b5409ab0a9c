"""Removal in one shot: choose layers, replace them, merge, measure, save. No labels, no training.

What is chosen so far is kept beside the directory to be written, so that a kill loses one step at most.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hetdpt.core.errors import PlanError
from hetdpt.core.modules import bytes_of, checked, clone, digest, require_more_than_once
from hetdpt.core.plan import KINDS, Plan
from hetdpt.export.saved import RECIPE, save
from hetdpt.measurement.agreement import Damage, measure_damage
from hetdpt.measurement.costs import Costs
from hetdpt.measurement.speed import ThroughputComparison, measure_throughput
from hetdpt.selection.damage import GreedyChoice, choose
from hetdpt.selection.goal import OneShotConfig, RemovalTarget
from hetdpt.store.atomic import require_new
from hetdpt.store.run_directory import Run
from hetdpt.surgery.calibrate import calibrate_
from hetdpt.surgery.merge import merge_
from hetdpt.surgery.record import InputSize, require_record
from hetdpt.surgery.remove import prune_

PLAN_FILE, ONESHOT_FILE = "plan.json", "oneshot.json"
ATTEMPTS = 3  # at a speedup, each with more layers than the one before
TIMING_SECONDS = 20.0
StageProgress = Callable[[str, int, int], None]
"""Called with what is being done and (steps done, steps in all)."""


@dataclass(frozen=True)
class OneShotStep:
    """One layer was chosen."""

    number: int
    choice: GreedyChoice
    reached: float
    """Layers, or by the time of each layer the speedup."""
    wanted: float


@dataclass(frozen=True)
class OneShot:
    """What a removal in one shot came to."""

    plan: Plan
    """With how well each replacement fits."""
    choices: tuple[GreedyChoice, ...]
    """In the order in which they were chosen."""
    damage: float
    """Of the saved model, in ``damage_unit``."""
    damage_unit: str
    costs: dict[str, Costs]
    speed: ThroughputComparison
    wanted_speedup: float | None
    images: dict[str, int]
    seconds: float

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)


def oneshot_into(
    directory: Path,
    model: nn.Module,
    batches: Iterable[Tensor],
    judge: Iterable[Tensor],
    config: OneShotConfig,
    *,
    overwrite: bool = False,
    watch: Callable[[OneShotStep], None] | None = None,
    progress: StageProgress | None = None,
) -> OneShot:
    """Choose layers by the damage they do, remove them, and save the faster model to ``directory``; no labels.

    Replacements are fitted on the images of ``batches``, damage is measured on those of ``judge``. Beside the model
    there are its plan and these numbers, as JSON. Until it is done, what is chosen is in ``partial_of(directory)``;
    called again after a kill, it goes on from there.
    """
    require_new(directory, overwrite, RECIPE)
    seen = {"calibration": _ImagesSeen.of(batches, model), "judge": _ImagesSeen.of(judge, model)}
    job = _OneShotJob(model, batches, judge, config, seen["calibration"].size, watch, progress)
    run = Run.open(partial_of(directory), _asked_of_job(job, seen))
    with run.alone():
        chosen = _Chosen.of(run, job)
        for _ in range(ATTEMPTS):
            chosen.choose(job)
            models = {"dense": model, "pruned": merge_(_without(job, chosen.choices))}
            speed = measure_throughput(models, job.size, seconds=TIMING_SECONDS, progress=job.stage("timing"))
            if not chosen.wants_more(speed, config):
                break
        record = require_record(models["pruned"])
        found = OneShot(
            plan=record.plan,
            choices=tuple(chosen.choices),
            damage=measure_damage(model, models["pruned"], judge),
            damage_unit="nats" if Damage.to(model).is_classifier else "relative squared error",
            costs={name: Costs.of(network, job.size) for name, network in models.items()},
            speed=speed,
            wanted_speedup=config.speedup,
            images={name: images.count for name, images in seen.items()},
            seconds=chosen.seconds,
        )
        notes = {PLAN_FILE: f"{found.plan.to_json()}\n", ONESHOT_FILE: f"{found.to_json()}\n"}
        save(deepcopy(models["pruned"]).cpu(), directory, overwrite=overwrite, notes=notes)
        run.discard()
    return found


def partial_of(directory: Path) -> Path:
    """Return where the choices are kept while ``directory`` is not there yet."""
    return Path(f"{directory}.partial")


@dataclass(frozen=True)
class _OneShotJob:
    """What ``oneshot_into`` was given."""

    model: nn.Module
    batches: Iterable[Tensor]
    judge: Iterable[Tensor]
    config: OneShotConfig
    size: InputSize
    watch: Callable[[OneShotStep], None] | None
    progress: StageProgress | None

    def stage(self, name: str) -> Callable[[int, int], None] | None:
        return partial(self.progress, name) if self.progress else None


class _Chosen:
    """The layers chosen so far; each is written to the run before anyone hears of it."""

    def __init__(self, run: Run, goal: RemovalTarget, choices: list[GreedyChoice], seconds: float) -> None:
        self.run, self.goal, self.choices = run, goal, choices
        self.begun = time.monotonic() - seconds

    @classmethod
    def of(cls, run: Run, job: _OneShotJob) -> _Chosen:
        """Return what an earlier process left in ``run``, or begin."""
        state = run.checkpoints.latest()
        if state is None:
            begun = time.monotonic()
            try:
                goal = RemovalTarget.of(job.model, job.config, job.size, job.stage("timing layers"))
            except PlanError:  # out of reach, so nothing is begun
                run.discard()
                raise
            return cls(run, goal, [], time.monotonic() - begun)
        choices = [GreedyChoice.from_dict(choice) for choice in state["choices"]]
        return cls(run, RemovalTarget.from_dict(state["goal"]), choices, state["seconds"])

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.begun

    @property
    def gained(self) -> float:
        return sum(choice.gain for choice in self.choices)

    def choose(self, job: _OneShotJob) -> None:
        """Go on until the goal is reached."""
        self._keep()
        for choice in choose(
            job.model,
            job.batches,
            self.goal.gains,
            self.goal.target,
            judge=job.judge,
            removal=job.config.removal,
            chosen=tuple(self.choices),
            progress=job.stage("choosing"),
        ):
            self.choices.append(choice)
            self._keep()
            if job.watch:
                wanted = job.config.speedup or self.goal.target
                job.watch(OneShotStep(len(self.choices), choice, self.goal.reached(self.gained), wanted))

    def wants_more(self, speed: ThroughputComparison, config: OneShotConfig) -> bool:
        """Raise the goal by the time that is missing to the speedup asked for; return whether that can be."""
        goal = self.goal.raised(self.gained, speed.speedup["pruned"].value, config.speedup or 0.0)
        self.goal = goal or self.goal
        return goal is not None

    def _keep(self) -> None:
        choices = [asdict(choice) for choice in self.choices]
        self.run.checkpoints.keep({"goal": self.goal.to_dict(), "choices": choices, "seconds": self.seconds})


def _without(job: _OneShotJob, choices: list[GreedyChoice]) -> nn.Module:
    """Return a copy of the model without the layers chosen, replacements fitted in order on what is before them."""
    attention, activation = (tuple(c.site.block for c in choices if c.site.kind == kind) for kind in KINDS)
    plan, config = Plan(attention, activation, job.config.removal), job.config
    if not config.is_fitted:
        return prune_(clone(job.model), plan, job.size)
    progress = job.stage("calibrating")
    return calibrate_(clone(job.model), plan, job.batches, progress=progress)


@dataclass(frozen=True)
class _ImagesSeen:
    """Which images there are."""

    count: int
    size: InputSize
    checksum: str

    @classmethod
    def of(cls, batches: Iterable[Tensor], model: nn.Module) -> _ImagesSeen:
        require_more_than_once(batches, "once for each layer")
        found, count, shape = hashlib.sha256(), 0, torch.Size()
        for images in checked(batches, model, "a removal in one shot"):
            found.update(bytes_of(images))
            count, shape = count + len(images), images.shape
        return cls(count, (shape[1], shape[2], shape[3]), found.hexdigest())

    def __str__(self) -> str:
        return f"{self.count} with checksum {self.checksum[:8]}"


def _asked_of_job(job: _OneShotJob, seen: dict[str, _ImagesSeen]) -> dict[str, Any]:
    """Return all that decides the outcome, as plain JSON."""
    weight = next(job.model.parameters())
    return {
        "model": digest(job.model),
        **{f"{name} images": str(images) for name, images in seen.items()},
        "device": str(weight.device),
        "dtype": str(weight.dtype).removeprefix("torch."),
        **asdict(job.config),
    }
