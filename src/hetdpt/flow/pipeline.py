"""The whole flow, from a dense model to a shipped one, on one screen. What a stage does is in ``stages``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn

from hetdpt.core.errors import PlanError
from hetdpt.core.goals import GOALS
from hetdpt.core.randomness import seeded
from hetdpt.data.sources import Data, open_data
from hetdpt.export.saved import open_model
from hetdpt.flow.collection.collect import read_samples
from hetdpt.flow.config import RunConfig
from hetdpt.flow.stages.budget import allocate, analyse, collect, fit
from hetdpt.flow.stages.events import Event
from hetdpt.flow.stages.layers import merge, recover, reduce, select
from hetdpt.flow.stages.outcome import compare, measure, report, save
from hetdpt.flow.stages.summary import RunSummary
from hetdpt.flow.stages.task import DATA, MODEL, SAMPLES, Stage, StageTask, do, identities
from hetdpt.flow.stages.width import balance, narrow
from hetdpt.store.stage_directory import STAGES, Asked, held, is_as_before
from hetdpt.surgery.record import survey_of
from hetdpt.training.processes import Accelerator, start

HOW = ("removal", "images")
GOAL = tuple(name for name, goal in GOALS.items() if goal.is_bound)
SEARCH = ("method", *HOW, "search", "candidates", "explores")
FLOW = (
    Stage(analyse, ("removal", "batch", "device"), (MODEL, DATA), by_all=True),
    Stage(collect, (*HOW, "rounds", "sampled_layers", "collection"), (MODEL, DATA)),
    Stage(fit, (), (MODEL, "analyse", "collect", SAMPLES)),
    Stage(allocate, ("layers", *GOAL, "plus"), ("analyse", "fit")),
    Stage(balance, (*HOW, *GOAL, "width", "depths", "collection", "search", "batch"), (MODEL, DATA, "analyse", "fit")),
    Stage(select, (*SEARCH, "layers", "budget"), (MODEL, DATA, "allocate", "balance"), by_all=True),
    Stage(narrow, ("images", *GOAL, "width", "batch"), (MODEL, DATA, "analyse", "select")),
    Stage(recover, ("images", "recovery"), (MODEL, DATA, "select", "narrow"), by_all=True),
    Stage(merge, ("keep",), ("recover",)),
    Stage(reduce, ("tokens",), ("merge",)),
    Stage(measure, ("batch", "device"), (MODEL, DATA, "merge", "reduce"), by_all=True),
    Stage(save, ("export", "onnx"), ("merge", "reduce")),
    Stage(compare, ("compare", *SEARCH, "recovery"), (MODEL, DATA, "select")),
    Stage(report, ("model", "data", *GOAL), STAGES[:-1], is_derived=True),
)


def run(
    config: RunConfig,
    *,
    inputs: tuple[nn.Module, Data] | None = None,
    redo: str | None = None,
    until: str | None = None,
    watch: Callable[[Event], None] | None = None,
) -> RunSummary | None:
    """Make a dense model faster and ship it: all stages, each on disk before the next begins.

    Called again it goes on where it was killed, and does nothing twice. A stage that was begun with other settings or
    inputs is refused by name; ``redo`` does it and all that follow anew. ``until`` ends after that stage, with None.
    ``inputs``, a model and data, take the place of those that the configuration names. ``watch`` is told what happens.
    """
    config, flow = config.located(), _flow(config, redo, until)
    processes = start(config.recovery.training.precision, config.device)
    tell = watch if watch and processes.is_main_process else _silent
    task = _task(config, *(inputs or open_inputs(config)), processes, tell)
    with _held(task, flow, redo):
        tell(Event("", "begin", ",".join(config.stages)))
        for stage in flow:
            task.results[stage.name] = do(stage, task)
            if stage.name == until != flow[-1].name:
                return None
    return RunSummary.read(config.out)


def _flow(config: RunConfig, redo: str | None, until: str | None) -> list[Stage]:
    """Return the stages that a run has; ``PlanError`` where ``redo`` or ``until`` name none of them."""
    for name in (redo, until):
        if name not in (None, *config.stages):
            raise PlanError(f"this run has no stage {name}; its stages are {', '.join(config.stages)}")
    if redo and until and config.stages.index(until) < config.stages.index(redo):
        raise PlanError(f"--until {until} ends before --redo {redo} begins; leave one of them out")
    return [stage for stage in FLOW if stage.name in config.stages]


def _held(task: StageTask, flow: list[Stage], redo: str | None) -> AbstractContextManager[None]:
    """Hold the run directory in the first process of a group."""
    if not task.processes.is_main_process:
        return nullcontext()
    config, derived = task.config, [stage.name for stage in flow if stage.is_derived]
    return held(config.out, config.to_yaml(), asked_of(flow, config, task.given), redo, derived)


def asked_of(flow: list[Stage], config: RunConfig, given: Mapping[str, Any]) -> dict[str, Asked]:
    """Return what is asked of each stage, as far as that is known beforehand."""
    return {stage.name: stage.asked_of(config, given) for stage in flow}


def done_before(config: RunConfig, model: nn.Module, data: Data, redo: str | None = None) -> list[str]:
    """Return the names of the stages that a run would not do again, without touching anything."""
    flow, given = _flow(config, redo, None), _identities(config, model, data)
    if not config.out.is_dir():
        return []
    kept = config.stages[: config.stages.index(redo)] if redo else config.stages
    asked = asked_of(flow, config, given)
    return [name for name in kept if is_as_before(config.out, name, asked[name])]


def open_inputs(config: RunConfig) -> tuple[nn.Module, Data]:
    """Return the dense model and the data that a run is to begin from."""
    processes = start(config.recovery.training.precision, config.device)
    with processes.local_main_process_first():  # one of them downloads
        data = open_data(config.data, root=config.data_root, download=config.download)
    with seeded(config.recovery.training.seed):  # random weights too are the same in all processes
        model = open_model(
            config.model,
            weights=config.weights,
            pretrained=config.pretrained,
            num_classes=config.num_classes,
            img_size=config.img_size,
        )
    return model, data


def _task(
    config: RunConfig, model: nn.Module, data: Data, processes: Accelerator, tell: Callable[[Event], None]
) -> StageTask:
    """Return what the stages are given."""
    return StageTask(config, model.to(processes.device), data, _identities(config, model, data), processes, tell)


def _identities(config: RunConfig, model: nn.Module, data: Data) -> dict[str, Any]:
    samples = read_samples(config.samples, survey_of(model).anatomy.blocks) if config.samples else None
    return identities(model, data, samples)


def _silent(_: Event) -> None:
    pass
