"""What a stage of a run is, what it is given, the events it reports, and how it runs once and not again."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, TypeVar

import torch
from torch import nn

from hetdpt.adapters.identity import fingerprint
from hetdpt.core.errors import TrainError
from hetdpt.core.modules import find_device
from hetdpt.core.plan import Plan
from hetdpt.data.sources import Data
from hetdpt.flow.config import RunConfig
from hetdpt.flow.execution import Execution
from hetdpt.flow.resumable import remove_layers_
from hetdpt.results import AnalyseResult, from_json, to_json
from hetdpt.selection.predictor.polynomial import Row
from hetdpt.selection.predictor.rows import plain_rows
from hetdpt.store.atomic import checksum
from hetdpt.store.stage_directory import STAGE, WORK, Asked, Clock, StageRecord, begin, stage_directory
from hetdpt.training.processes import Accelerator

if TYPE_CHECKING:
    from hetdpt.flow.stages.timing import Trials

MODEL, DATA, SAMPLES = GIVEN = "model", "data", "samples"  # inputs that are not stages
EVERY_STAGE = "every stage"  # before it, as inputs
DERIVED = ("sampled_layers", "tail_goal", "priced_goal", "has_free_tail", "mixed_moves")
"""Properties of the configuration by which a stage is known, in place of the settings that they are made of."""
R = TypeVar("R")


@dataclass(frozen=True)
class Event:
    """One thing that happened in a run.

    The first event of a run has no ``stage``, is a ``begin``, and its ``text`` names all stages, separated by commas.
    """

    stage: str
    """Name of the stage."""
    kind: Literal["begin", "skip", "progress", "note", "done"]
    """Whether the stage begins, is skipped as its result is there, makes progress, has a line to show, or is done."""
    text: str = ""
    """The step that is running, or the line to show."""
    done: int = 0
    """Steps of ``text`` that are done."""
    total: int = 0
    """Steps of ``text`` in all; 0 if not known."""
    best: float | None = None
    """The best accuracy so far in percent, if there is one."""
    seconds: float = 0.0
    """Time spent on the stage, once it is done."""


@dataclass(frozen=True)
class RunContext:
    """What a stage is given: the settings and inputs of the run, and the results of the stages before it."""

    config: RunConfig
    model: nn.Module
    """The dense model, on the device."""
    data: Data
    known_by: dict[str, Any]
    """What identifies each input: the model, the data, samples, and the stages that are done."""
    processes: Accelerator
    tell: Callable[[Event], None]
    results: dict[type, Any] = field(default_factory=dict)
    """Of the stages that are done, by type."""
    stage: str = ""
    """The stage that is running."""

    @cached_property
    def base(self) -> nn.Module:
        """The model that layers are chosen in: the dense one, with the tail of the run."""
        config = self.config
        if not self.tail:
            return self.model
        plan, seed = Plan(removal=config.removal, tail=self.tail), config.recovery.training.seed
        return remove_layers_(deepcopy(self.model), plan, self.data, config.images, seed, config.workers)

    @property
    def tail(self) -> int:
        """The length of the tail, once the model is analysed."""
        return self.of(AnalyseResult).prices.tail

    def of(self, kind: type[R]) -> R:
        """Return the result of that type, from an earlier stage."""
        found: R = self.results[kind]
        return found

    def get(self, kind: type[R]) -> R | None:
        """Return the result of that type; None if the run has no such stage."""
        return self.results.get(kind)

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def directory(self) -> Path:
        """Where the running stage may write."""
        return self.work_of(self.stage)

    def work_of(self, stage: str) -> Path:
        """Return the folder that a stage has written to."""
        return stage_directory(self.config.out, stage) / WORK

    def note(self, text: str, best: float | None = None) -> None:
        """Show a line."""
        self.tell(Event(self.stage, "note", text, best=best))

    def progress(self, text: str, done: int, total: int) -> None:
        self.tell(Event(self.stage, "progress", text, done, total))

    def part(self, text: str) -> Callable[[int, int], None]:
        """Return the function that reports the progress of one part of the stage."""
        return partial(self.progress, text)

    def require_single_process(self) -> None:
        """Raise ``TrainError`` in a group of processes: some stages run in one process only."""
        if self.processes.num_processes > 1:
            raise TrainError(
                f"the stage {self.stage} runs in one process; run the same command without torchrun and with "
                f"--until {self.stage}, then resume with torchrun"
            )

    @cached_property
    def execution(self) -> Execution:
        config = self.config
        return Execution(
            device=config.device,
            workers=config.workers,
            minutes=config.checkpoint_minutes,
            batch=config.batch,
            progress=self.progress,
            note=self.note,
        )


@dataclass(frozen=True, kw_only=True)
class StageEstimate:
    """What one stage will do, and about how long it takes."""

    stage: str
    text: str
    """In words."""
    updates: int = 0
    """Of weights, in all its trainings."""
    evaluations: int = 0
    """Images evaluated; one evaluated twice counts twice."""
    seconds: float | None = None
    """None for a moment, which is not worth a trial."""
    left: int = 0
    """Bytes on disk when it is done."""
    most: int = 0
    """Bytes on disk at most before that."""
    is_done: bool = False
    """Whether the run directory has its result already."""


class Stage(ABC, Generic[R]):
    """One stage of a run: what decides its result, what it does, and how long that takes."""

    name: ClassVar[str]
    result: type[R]
    settings: ClassVar[tuple[str, ...]] = ()
    """Fields of the configuration that change the result, and the names in ``DERIVED``."""
    inputs: ClassVar[tuple[str, ...]] = ()
    """Names of the stages whose results it uses, and of inputs that are not stages."""
    by_all: ClassVar[bool] = False
    """Whether all processes of a group run it together; else the first runs it for all."""
    is_derived: ClassVar[bool] = False
    """Whether it is cheap, so that it runs again without asking if its inputs have changed."""

    def is_needed(self, config: RunConfig) -> bool:
        """Whether a run of ``config`` has this stage."""
        return True

    @abstractmethod
    def run(self, context: RunContext) -> R:
        """Do the work and return its result."""

    @abstractmethod
    def estimate(self, trials: Trials) -> StageEstimate:
        """Return what ``run`` will do and about how long it takes."""

    def asked_of(self, config: RunConfig, known_by: Mapping[str, Any]) -> Asked:
        """Return the settings and inputs that decide the result, as far as they are known, as plain JSON."""
        derived = {name: getattr(config, name) for name in DERIVED} | {"keep": config.kept}
        derived |= {"device": find_device(config.device).type, "method": config.chooser.name}
        values = asdict(config) | derived
        settings = {name: values[name] for name in self.settings}
        return {"settings": settings, "inputs": {name: known_by[name] for name in known_by if self._uses(name)}}

    def _uses(self, name: str) -> bool:
        return name in self.inputs or (EVERY_STAGE in self.inputs and name not in GIVEN)

    def __str__(self) -> str:
        return f"{self.name:9} {', '.join(self.inputs)} -> {self.result.__name__}"


def complete(stage: Stage[Any], context: RunContext) -> None:
    """Add the result of ``stage`` to ``context``: from the run directory if it has one for the same inputs."""
    context = replace(context, stage=stage.name)
    record = None
    if context.processes.is_main_process:
        asked = stage.asked_of(context.config, context.known_by)
        record = begin(context.config.out, stage.name, asked, _versions(), stage.is_derived)
    context.processes.wait_for_everyone()
    found = StageRecord.read(stage_directory(context.config.out, stage.name))
    if found.is_done:
        context.tell(Event(stage.name, "skip", f"as before, {found.seconds:.0f} s"))
    else:
        if record is not None:
            _run(stage, context, record)
        elif stage.by_all:
            stage.run(context)
        context.processes.wait_for_everyone()
        found = StageRecord.read(found.directory)
    context.results[stage.result] = from_json(stage.result, found.result, found.directory / STAGE)
    context.known_by[stage.name] = checksum(found.result)


def _run(stage: Stage[Any], context: RunContext, record: StageRecord) -> None:
    clock = Clock(record)

    def tell(event: Event) -> None:
        if event.kind == "progress":
            clock.note(event.text, event.done, event.total)
        context.tell(event)

    context.tell(Event(stage.name, "begin"))
    clock.finish(to_json(stage.run(replace(context, tell=tell))))
    context.tell(Event(stage.name, "done", seconds=clock.seconds))


def identities(model: nn.Module, data: Data, samples: Sequence[Row] | None) -> dict[str, Any]:
    """Return what identifies the inputs of a run that are not stages."""
    return {MODEL: fingerprint(model), DATA: data.identity, SAMPLES: checksum(plain_rows(samples or ()))}


def _versions() -> dict[str, str]:
    found = {"python": sys.version.split()[0]}
    for package in ("hetdpt", "torch", "timm", "transformers", "accelerate", "torch-pruning"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
