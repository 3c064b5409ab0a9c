"""What a stage of a run is given, and how it is done once and not again."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from torch import nn

from hetdpt.adapters.identity import fingerprint
from hetdpt.core.errors import TrainError
from hetdpt.core.modules import find_device
from hetdpt.data.sources import Data
from hetdpt.flow.config import RunConfig
from hetdpt.flow.execution import Execution
from hetdpt.flow.stages.events import Event
from hetdpt.selection.predictor.polynomial import Row
from hetdpt.selection.predictor.rows import plain_rows
from hetdpt.store.stage_directory import WORK, Clock, StageRecord, begin, checksum, stage_directory
from hetdpt.training.processes import Accelerator

MODEL, DATA, SAMPLES = "model", "data", "samples"  # inputs that are no stages
Result = dict[str, Any]
"""What a stage came to, as plain JSON."""


@dataclass(frozen=True)
class StageTask:
    """What there is to do, and what is known so far."""

    config: RunConfig
    model: nn.Module
    """The dense model, on the device."""
    data: Data
    given: Mapping[str, Any]
    """What identifies the inputs that are no stages, by name."""
    processes: Accelerator
    tell: Callable[[Event], None]
    results: dict[str, Result] = field(default_factory=dict)
    """Of the stages that are done, by name."""
    stage: str = ""
    """The one at work."""

    @property
    def directory(self) -> Path:
        """Where the stage at work may write."""
        return self.work_of(self.stage)

    def work_of(self, stage: str) -> Path:
        """Return where a stage left what it came to."""
        return stage_directory(self.config.out, stage) / WORK

    def note(self, text: str, best: float | None = None) -> None:
        """Show a line."""
        self.tell(Event(self.stage, "note", text, best=best))

    def progress(self, text: str, done: int, total: int) -> None:
        self.tell(Event(self.stage, "progress", text, done, total))

    def part(self, text: str) -> Callable[[int, int], None]:
        """Return what is to be told how far a part of the stage is."""
        return partial(self.progress, text)

    def require_alone(self) -> None:
        """Raise ``TrainError`` in a group of processes: some stages are not for those."""
        if self.processes.num_processes > 1:
            raise TrainError(
                f"the stage {self.stage} is done by one process; give the same command without torchrun, with "
                f"--until {self.stage}, and then go on with the group"
            )

    @cached_property
    def place(self) -> Execution:
        config = self.config
        return Execution(
            device=config.device,
            workers=config.workers,
            minutes=config.minutes,
            batch=config.batch,
            progress=self.progress,
        )


@dataclass(frozen=True)
class Stage:
    """A row of the flow: what is done, and what decides how it comes out."""

    work: Callable[[StageTask], Result]
    settings: tuple[str, ...] = ()
    """Fields of the configuration, and ``sampled_layers``."""
    inputs: tuple[str, ...] = ()
    """Stages whose results it uses, and inputs that are no stages."""
    by_all: bool = False
    """Whether all processes of a group do it together; else the first does it for all."""
    is_derived: bool = False
    """Whether it is made anew from other inputs without a question, costing nothing."""

    @property
    def name(self) -> str:
        return self.work.__name__

    def asked_of(self, config: RunConfig, given: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """Return what is asked of it as far as that is known before the first stage, as plain JSON."""
        values = asdict(config) | {"device": find_device(config.device).type, "sampled_layers": config.sampled_layers}
        settings = {name: values[name] for name in self.settings}
        return {"settings": settings, "inputs": {name: given[name] for name in self.inputs if name in given}}


def do(stage: Stage, task: StageTask) -> Result:
    """Return what ``stage`` came to: as before where it was asked for the same, else by doing it."""
    task = replace(task, stage=stage.name)
    record = None
    if task.processes.is_main_process:
        asked = stage.asked_of(task.config, task.given)
        others = {name: checksum(task.results.get(name)) for name in stage.inputs if name not in task.given}
        inputs = asked["inputs"] | others
        record = begin(task.config.out, stage.name, asked["settings"], inputs, _versions(), stage.is_derived)
    task.processes.wait_for_everyone()
    found = StageRecord.read(stage_directory(task.config.out, stage.name))
    if found.result is not None:
        task.tell(Event(stage.name, "skip", f"as before, {found.seconds:.0f} s"))
        return found.result
    if record is not None:
        _work(stage, task, record)
    elif stage.by_all:
        stage.work(task)
    task.processes.wait_for_everyone()
    done = StageRecord.read(found.directory).result
    assert done is not None
    return done


def _work(stage: Stage, task: StageTask, record: StageRecord) -> None:
    """Do a stage and write what it came to, telling how far it is meanwhile."""
    clock = Clock(record)

    def tell(event: Event) -> None:
        if event.kind == "progress":
            clock.note(event.text, event.done, event.total)
        task.tell(event)

    task.tell(Event(stage.name, "begin"))
    clock.finish(stage.work(replace(task, tell=tell)))
    task.tell(Event(stage.name, "done", seconds=clock.seconds))


def identities(model: nn.Module, data: Data, samples: Sequence[Row] | None) -> dict[str, Any]:
    """Return what the inputs of a run are known by that are no stages."""
    return {MODEL: fingerprint(model), DATA: data.identity, SAMPLES: checksum(plain_rows(samples or ()))}


def _versions() -> dict[str, str]:
    found = {"python": sys.version.split()[0]}
    for package in ("hetdpt", "torch", "timm", "transformers", "accelerate", "torch-pruning"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
