"""Removal in one shot: choose what to remove, replace it, merge, measure, save. No labels, no training.

What was chosen so far is kept beside the directory to be written, so that a kill loses one step at most.
"""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from hetdpt.adapters.preprocessing import preprocessing_of
from hetdpt.core.errors import PlanError
from hetdpt.core.modules import clone
from hetdpt.core.plan import Plan, with_class_token
from hetdpt.core.progress import StageProgress
from hetdpt.data.fixed_batches import ImageBatches
from hetdpt.data.sources import Data
from hetdpt.export.saved import RECIPE, load, save
from hetdpt.flow.execution import Execution
from hetdpt.flow.images_seen import ImagesSeen, asked_of
from hetdpt.flow.mix import ATTEMPTS, TIMING_SECONDS, Mix, MixConfig
from hetdpt.flow.resumable import recover_into
from hetdpt.measurement.accuracy import evaluate
from hetdpt.measurement.agreement import Damage, measure_damage
from hetdpt.measurement.costs import Costs
from hetdpt.measurement.speed import ThroughputComparison, measure_throughput
from hetdpt.reduce.apply import apply_
from hetdpt.results import FrontierPoint, from_json
from hetdpt.selection.damage import GreedyChoice, choose
from hetdpt.selection.goal import OneShotConfig, RemovalTarget
from hetdpt.selection.moves import MOVES
from hetdpt.store.atomic import parse_json, require_new
from hetdpt.store.config_diff import flat
from hetdpt.store.run_directory import Run, summary_of
from hetdpt.surgery.merge import merge_
from hetdpt.surgery.record import InputSize, record_of, require_record
from hetdpt.surgery.remove import prune_, settled_removal
from hetdpt.surgery.tail import trim_if_possible_
from hetdpt.training.recover import RecoverConfig, require_no_labels
from hetdpt.training.trainer import Epoch

PLAN_FILE, ONESHOT_FILE = "plan.json", "oneshot.json"


@dataclass(frozen=True)
class OneShotStep:
    """One layer was chosen, or what is removed in one round of a search."""

    number: int
    moves: tuple[str, ...]
    """In words."""
    damage: float
    """Of the model without all that was chosen so far."""
    reached: float
    """Layers removed, or the speedup by the times of blocks."""
    wanted: float


@dataclass(frozen=True, kw_only=True)
class OneShotRecovery:
    """What a recovery without labels made of a model; damage and agreement are of images that were not trained on."""

    damage_before: float
    damage_after: float
    agreement_before: float
    """Images in percent that get the class that the dense model predicts."""
    agreement_after: float
    images: int
    """To measure these on."""
    trained_on: int
    epochs: int
    best_epoch: int
    """Whose model was kept; 0 is the one before training."""
    measured_on: str
    """The images that decided which epoch is the best."""
    seconds: float


@dataclass(frozen=True)
class OneShotResult:
    """The result of a removal in one shot, as in ``oneshot.json``."""

    plan: Plan
    """With how well each replacement fits."""
    damage: float
    """Of the model before any training, in ``damage_unit``."""
    damage_unit: str
    costs: dict[str, Costs]
    """Of ``dense`` and ``pruned``."""
    speed: ThroughputComparison
    wanted_speedup: float | None
    images: dict[str, int]
    """For ``calibration`` and to ``judge`` damage."""
    seconds: float
    notes: tuple[str, ...] = ()
    """Sentences for the user, such as why it is not trimmed."""
    choices: tuple[GreedyChoice, ...] = ()
    """The layers in the order in which they were chosen, if only layers were removed."""
    rounds: tuple[FrontierPoint, ...] = ()
    """What was removed in each round of the search, if everything that can be removed was offered."""
    layer_ms: float | None = None
    """Milliseconds of a batch of the dense model, by the times of layers that the costs of ``rounds`` are made of."""
    recovery: OneShotRecovery | None = None
    """What training made of it; None without."""

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)


def oneshot_into(
    directory: str | Path,
    model: nn.Module,
    batches: Iterable[Tensor],
    judge: Iterable[Tensor],
    config: OneShotConfig,
    *,
    overwrite: bool = False,
    watch: Callable[[OneShotStep], None] | None = None,
    progress: StageProgress | None = None,
) -> OneShotResult:
    """Remove what does the least damage to ``model``, and save the faster model to ``directory``; no labels.

    Replacements are fitted on the images of ``batches``, damage is measured on those of ``judge``. ``directory`` also
    has the plan and the result, as JSON. Until it is written, the choices so far are in ``partial_of(directory)``;
    called again after a kill, it resumes from there. ``watch`` is called with every choice.

    >>> import tempfile, hetdpt, torch
    >>> model = hetdpt.create("test_vit", img_size=32, num_classes=10)
    >>> images, config = [torch.randn(4, 3, 32, 32)], OneShotConfig(layers=1, kind="attention", removal="plain")
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     found = oneshot_into(f"{folder}/faster", model, images, images, config)
    ...     len(hetdpt.load(f"{folder}/faster").blocks), len(found.plan.attention)
    (6, 1)
    """
    directory = Path(directory)
    require_new(directory, overwrite, RECIPE)
    seen = {"calibration": ImagesSeen.of(batches, model), "judge": ImagesSeen.of(judge, model)}
    run = Run.open(partial_of(directory), {**asked_of(model, seen), **asdict(config)})
    with run.alone():
        kind: type[_OneShotRemoval] = _Mixed if config.is_mixed else _Layers
        removal = kind(run, model, batches, judge, config, seen["calibration"].size, watch, progress)
        for _ in range(ATTEMPTS):
            removal.choose()
            models = {"dense": model, "pruned": merge_(removal.pruned())}
            why_not = trim_if_possible_(models["pruned"]) if config.trim else None
            timing = removal.part("timing the dense and the pruned model")
            speed = measure_throughput(models, removal.size, seconds=TIMING_SECONDS, progress=timing)
            if not removal.wants_more(speed):
                break
        found = OneShotResult(
            plan=require_record(models["pruned"]).plan,
            **removal.found(),
            damage=measure_damage(model, models["pruned"], judge),
            damage_unit="nats" if Damage.to(model).is_classifier else "relative squared error",
            costs={name: Costs.of(network, removal.size) for name, network in models.items()},
            speed=speed,
            wanted_speedup=config.speedup,
            images={name: images.count for name, images in seen.items()},
            seconds=removal.seconds,
            notes=(why_not,) if why_not else (),
        )
        notes = {PLAN_FILE: f"{found.plan.to_json()}\n", ONESHOT_FILE: f"{found.to_json()}\n"}
        save(deepcopy(models["pruned"]).cpu(), directory, overwrite=overwrite, notes=notes)
        run.discard()
    return found


def oneshot_recovered_into(
    directory: str | Path,
    model: nn.Module,
    batches: Iterable[Tensor],
    judge: Iterable[Tensor],
    data: Data,
    config: OneShotConfig,
    recovery: RecoverConfig,
    execution: Execution | None = None,
    *,
    overwrite: bool = False,
    watch: Callable[[OneShotStep | Epoch], None] | None = None,
) -> OneShotResult:
    """Remove layers as ``oneshot_into``, train the model with the dense ``model`` as its teacher, and save the best.

    ``data`` are images labelled by the dense model (``unlabelled.labelled_by``). Until ``directory`` is written, the
    model before training and the checkpoints are in ``recovery_of(directory)``, from which a killed call resumes.
    """
    directory, execution = Path(directory), execution or Execution()
    require_new(directory, overwrite, RECIPE)
    require_no_labels(data.name, recovery.distillation)
    seen = {"calibration": ImagesSeen.of(batches, model), "judge": ImagesSeen.of(judge, model)}
    run = Run.open(
        recovery_of(directory), {**asked_of(model, seen), **asdict(config), **data.facts(), **flat(asdict(recovery))}
    )
    removed, trained = run.directory / "removed", run.directory / "trained"
    with run.alone():
        if run.checkpoints.latest() is None:
            oneshot_into(
                removed, model, batches, judge, config, overwrite=True, watch=watch, progress=execution.progress
            )
            run.checkpoints.keep({"is_removed": True})  # from now on other settings are refused
        file = removed / ONESHOT_FILE
        found = from_json(OneShotResult, parse_json(file.read_text(encoding="utf-8")), file)
        follow = execution.watcher("recovering")
        for epoch in recover_into(
            trained, load(removed), model, data, recovery, execution, trims=config.trim, watch=follow
        ):
            if watch:
                watch(epoch)
        found = replace(found, recovery=_recovered(model, data, removed, trained, execution))
        notes = {PLAN_FILE: f"{found.plan.to_json()}\n", ONESHOT_FILE: f"{found.to_json()}\n"}
        save(load(trained / "best"), directory, overwrite=overwrite, notes=notes)
        run.discard()
    return found


def _recovered(model: nn.Module, data: Data, removed: Path, trained: Path, execution: Execution) -> OneShotRecovery:
    """Return what training made of the model in ``removed``: measured on ``data.val``, which decided nothing."""
    assert data.train is not None
    assert data.val is not None
    summary, device = summary_of(trained), next(model.parameters()).device
    images = ImageBatches(data.val, preprocessing_of(model), count=len(data.val), workers=execution.workers)
    measured = {}
    for name, place in {"before": removed, "after": trained / "best"}.items():
        one = load(place).to(device)
        measured[f"damage_{name}"] = measure_damage(model, one, images)
        measured[f"agreement_{name}"] = evaluate(one, data, workers=execution.workers).top1
    return OneShotRecovery(
        **measured,
        images=len(data.val),
        trained_on=len(data.train),
        epochs=summary["epochs"],
        best_epoch=summary["best_epoch"],
        measured_on=summary["measured_on"],
        seconds=summary["seconds"],
    )


def recovery_of(directory: Path) -> Path:
    """Return where a recovery is kept until ``directory`` is written."""
    return Path(f"{directory}.recovery")


def partial_of(directory: Path) -> Path:
    """Return where the choices are kept until ``directory`` is written."""
    return Path(f"{directory}.partial")


class _OneShotRemoval(ABC):
    """What is removed so far; it is written to the run before ``watch`` is called with it."""

    def __init__(
        self,
        run: Run,
        model: nn.Module,
        batches: Iterable[Tensor],
        judge: Iterable[Tensor],
        config: OneShotConfig,
        size: InputSize,
        watch: Callable[[OneShotStep], None] | None,
        progress: StageProgress | None,
    ) -> None:
        removal = settled_removal(model, config.removal, config.class_token, size)
        self.run, self.model, self.batches, self.judge = run, model, batches, judge
        self.config = replace(config, removal=removal)
        self.size, self.watch, self.part = size, watch, Execution(progress=progress).stage
        try:
            self._begin(progress)
        except PlanError:  # out of reach, so nothing is begun
            run.discard()
            raise

    @abstractmethod
    def _begin(self, progress: StageProgress | None) -> None:
        """Set the goal, or read what an interrupted call has kept."""

    @property
    @abstractmethod
    def plan(self) -> Plan:
        """All that is removed so far."""

    @property
    @abstractmethod
    def seconds(self) -> float:
        """Time spent, that before an interruption included."""

    @abstractmethod
    def choose(self) -> None:
        """Choose what to remove until the goal is met by the costs of plans."""

    @abstractmethod
    def wants_more(self, speed: ThroughputComparison) -> bool:
        """Raise the goal by the time that is missing to the wanted speedup; return whether that is possible."""

    def found(self) -> dict[str, Any]:
        """Return what was chosen, as fields of ``OneShotResult``."""
        return {}

    def pruned(self) -> nn.Module:
        """Return a copy of the model without what was chosen; replacements are fitted in the order of the layers."""
        if not self.plan.needs_images and self.plan.tokens is None:
            return prune_(clone(self.model), self.plan, self.size)
        found = [
            apply_(clone(self.model), plan, self.batches, progress=self.part("calibrating")) for plan in self._plans()
        ]
        return min(found, key=lambda one: measure_damage(self.model, one, self.judge)) if len(found) > 1 else found[0]

    def _plans(self) -> list[Plan]:
        """Return the plan with FFNs that the class token keeps and without, if that was left open, or the plan."""
        record = record_of(self.model)
        is_settled = self.config.class_token != "auto" or (record is not None and len(record.plan) > 0)
        if is_settled or self.plan.class_token == "share":
            return [self.plan]
        shared = replace(self.plan, removal=with_class_token(self.plan.removal, "share"))
        return [self.plan, shared] if self.plan.activation else [shared]

    def _tell(self, moves: tuple[str, ...], damage: float, reached: float, wanted: float) -> None:
        self.number += 1
        if self.watch:
            self.watch(OneShotStep(self.number, moves, damage, reached, wanted))

    number = 0
    """Steps so far."""


class _Layers(_OneShotRemoval):
    """Layers chosen one after another."""

    def _begin(self, progress: StageProgress | None) -> None:
        self.begun, self.choices = time.monotonic(), list[GreedyChoice]()
        if (state := self.run.checkpoints.latest()) is None:
            self.goal = RemovalTarget.of(self.model, self.config, self.size, progress)
            return
        self.begun -= state["seconds"]
        self.goal = RemovalTarget.from_dict(state["goal"])
        self.choices = [GreedyChoice.from_dict(choice) for choice in state["choices"]]
        self.number = len(self.choices)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.begun

    @property
    def plan(self) -> Plan:
        start = Plan(removal=self.config.removal, tail=self.goal.tail)
        return start.plus(*(choice.move for choice in self.choices))

    def choose(self) -> None:
        self._keep()
        for choice in choose(
            self.model,
            self.batches,
            self.goal.sites,
            self.goal.target,
            cost=self.goal.cost,
            judge=self.judge,
            removal=self.config.removal,
            tail=self.goal.tail,
            chosen=tuple(self.choices),
            progress=self.part("choosing layers"),
        ):
            self.choices.append(choice)
            self._keep()
            wanted = self.config.speedup or self.goal.target
            self._tell((str(choice.move),), choice.damage, self.goal.reached(self.plan), wanted)

    def wants_more(self, speed: ThroughputComparison) -> bool:
        goal = self.goal.raised(self.plan, speed.speedup["pruned"].value, self.config.speedup or 0.0)
        self.goal = goal or self.goal
        return goal is not None

    def found(self) -> dict[str, Any]:
        return {"choices": tuple(self.choices)}

    def _keep(self) -> None:
        choices = [asdict(choice) for choice in self.choices]
        self.run.checkpoints.keep({"goal": self.goal.to_dict(), "choices": choices, "seconds": self.seconds})


class _Mixed(_OneShotRemoval):
    """Everything that can be removed, chosen in the rounds of one search."""

    def _begin(self, progress: StageProgress | None) -> None:
        assert self.config.speedup is not None
        moves = tuple(name for name in MOVES if name != "tail" or self.config.tail is None)
        asked = MixConfig(goal="speedup", value=self.config.speedup, removal=self.config.removal, moves=moves)
        self.mix = Mix(self.run, self.model, self.batches, self.judge, self.size, asked, progress)

    @property
    def seconds(self) -> float:
        return self.mix.seconds

    @property
    def plan(self) -> Plan:
        return self.mix.plan

    def choose(self) -> None:
        try:
            for point in self.mix.rounds():
                if self.mix.is_replayed:
                    self.number += 1
                    continue
                self._tell(point.moves, point.damage, self.mix.reached(point.plan), self.mix.config.value)
        except PlanError:  # out of reach
            self.run.discard()
            raise

    def wants_more(self, speed: ThroughputComparison) -> bool:
        return self.mix.continues(speed.speedup["pruned"].value)

    def found(self) -> dict[str, Any]:
        return {"rounds": tuple(self.mix.points), "layer_ms": self.mix.prices.ms()}
