"""The whole flow, from a dense model to a shipped one, on one screen. What a stage does is in ``stages``.

Each stage writes its result to the run directory before the next begins, so that a run can be resumed:

>>> for stage in FLOW:
...     print(stage)
analyse   model, data -> AnalyseResult
collect   model, data -> CollectResult
fit       model, analyse, collect, samples -> FitResult
allocate  analyse, fit -> AllocateResult
balance   model, data, analyse, fit -> BalanceResult
select    model, data, analyse, allocate, balance -> SelectResult
narrow    model, data, analyse, select -> NarrowResult
recover   model, data, select, narrow -> RecoverResult
merge     recover -> MergeResult
reduce    merge -> ReduceResult
measure   model, data, merge, reduce -> MeasureResult
save      merge, reduce -> SaveResult
compare   model, data, select -> CompareResult
report    every stage -> ReportResult
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from hetdpt.core.errors import PlanError
from hetdpt.core.progress import StepProgress
from hetdpt.core.randomness import seeded
from hetdpt.data.images import is_unlabelled
from hetdpt.data.sources import Data, open_data
from hetdpt.export.saved import open_model
from hetdpt.flow.collection.collect import read_samples
from hetdpt.flow.config import RunConfig
from hetdpt.flow.stages.budget import AllocateStage, AnalyseStage, CollectStage, FitStage
from hetdpt.flow.stages.layers import MergeStage, RecoverStage, ReduceStage, SelectStage
from hetdpt.flow.stages.outcome import CompareStage, MeasureStage, ReportStage, SaveStage
from hetdpt.flow.stages.stage import Event, RunContext, Stage, complete, identities
from hetdpt.flow.stages.width import BalanceStage, NarrowStage
from hetdpt.flow.unlabelled import PREDICTING, open_any
from hetdpt.results import RunSummary
from hetdpt.store.stage_directory import Asked, held, is_as_before
from hetdpt.surgery.record import survey_of
from hetdpt.surgery.remove import settled_removal
from hetdpt.training.processes import start
from hetdpt.training.recover import require_no_labels

FLOW: tuple[Stage[Any], ...] = (
    AnalyseStage(),
    CollectStage(),
    FitStage(),
    AllocateStage(),
    BalanceStage(),
    SelectStage(),
    NarrowStage(),
    RecoverStage(),
    MergeStage(),
    ReduceStage(),
    MeasureStage(),
    SaveStage(),
    CompareStage(),
    ReportStage(),
)
"""All stages in their order, which is written here only: the run directory and the report follow it."""


def stages_of(config: RunConfig) -> tuple[Stage[Any], ...]:
    """Return the stages of a run of ``config``, in order."""
    return tuple(stage for stage in FLOW if stage.is_needed(config))


def run(
    config: RunConfig,
    *,
    inputs: tuple[nn.Module, Data] | None = None,
    redo: str | None = None,
    until: str | None = None,
    watch: Callable[[Event], None] | None = None,
) -> RunSummary | None:
    """Make a dense model faster and ship it: all stages, each on disk before the next begins.

    Called again it resumes where it was killed, and does nothing twice. A stage that was begun with other settings or
    inputs is refused by name; ``redo`` runs it and all later ones again. ``until`` ends after that stage, with None.
    ``inputs``, a model and data, replace those that the configuration names. ``watch`` is called with every event.
    """
    config, flow = config.located(), _flow(config, redo, until)
    processes = start(config.recovery.training.precision, config.device)
    tell = watch if watch and processes.is_main_process else lambda _: None
    model, data = inputs or open_inputs(config, partial(_show, tell))
    config = settled(config, model)
    known_by = _known_by(config, model, data)
    context = RunContext(config, model.to(processes.device), data, known_by, processes, tell)
    with _held(context, flow, redo):
        tell(Event("", "begin", ",".join(stage.name for stage in flow)))
        for stage in flow:
            complete(stage, context)
            if stage.name == until != flow[-1].name:
                return None
    return RunSummary.read(config.out)


def _show(tell: Callable[[Event], None], done: int, total: int) -> None:
    tell(Event(FLOW[0].name, "progress", PREDICTING, done, total))


def _flow(config: RunConfig, redo: str | None, until: str | None) -> tuple[Stage[Any], ...]:
    flow = stages_of(config)
    names = [stage.name for stage in flow]
    for name in (redo, until):
        if name not in (None, *names):
            raise PlanError(f"this run has no stage {name}; its stages are {', '.join(names)}")
    if redo and until and names.index(until) < names.index(redo):
        raise PlanError(f"--until {until} ends before --redo {redo} begins; leave one of them out")
    return flow


def _held(context: RunContext, flow: tuple[Stage[Any], ...], redo: str | None) -> AbstractContextManager[None]:
    """Lock the run directory in the first process of a group."""
    if not context.processes.is_main_process:
        return nullcontext()
    config, derived = context.config, [stage.name for stage in flow if stage.is_derived]
    asked = _asked(config, context.known_by)
    return held(config.out, [stage.name for stage in FLOW], config.to_yaml(), asked, redo, derived)


def _asked(config: RunConfig, known_by: Mapping[str, Any]) -> dict[str, Asked]:
    """Return what decides the result of each stage, as far as that is known beforehand."""
    return {stage.name: stage.asked_of(config, known_by) for stage in stages_of(config)}


def done_before(config: RunConfig, model: nn.Module, data: Data, redo: str | None = None) -> list[str]:
    """Return the names of the stages that a run would not run again, without touching anything."""
    config, names = settled(config, model), [stage.name for stage in _flow(config, redo, None)]
    asked = _asked(config, _known_by(config, model, data))
    kept = names[: names.index(redo)] if redo else names
    return [name for name in kept if is_as_before(config.out, name, asked[name])]


def open_inputs(config: RunConfig, progress: StepProgress | None = None) -> tuple[nn.Module, Data]:
    """Return the dense model and the data of a run; it labels images without labels, which reports ``progress``."""
    processes = start(config.recovery.training.precision, config.device)
    place: dict[str, Any] = {"root": config.data_root, "download": config.download}
    data = None
    if is_unlabelled(config.data, config.data_root):
        for name in ("collection", "search", "recovery"):
            require_no_labels(config.data, getattr(config, name).distillation, f"{name}.")
    else:
        with processes.local_main_process_first():  # one of them downloads
            data = open_data(config.data, **place)
    with seeded(config.recovery.training.seed):  # random weights too are the same in all processes
        model = open_model(
            config.model,
            weights=config.weights,
            pretrained=config.pretrained,
            num_classes=config.num_classes,
            img_size=config.img_size,
        )
    if data is None:
        model.to(processes.device)
        data = open_any(config.data, model, **place, workers=config.workers, progress=progress)
    return model, data


def settled(config: RunConfig, model: nn.Module) -> RunConfig:
    """Return ``config`` with the method that its goal means, and the removal that ``class_token`` means for ``model``.

    A goal of parameters is not met by FFNs that class tokens keep.
    """
    is_shared = config.class_token == "auto" and "params" in config.amounts()
    choice = "share" if is_shared else config.class_token
    removal = settled_removal(model, config.removal, choice)
    return replace(config, method=config.chooser.name, removal=removal)


def _known_by(config: RunConfig, model: nn.Module, data: Data) -> dict[str, Any]:
    samples = read_samples(config.samples, survey_of(model).anatomy.blocks) if config.samples else None
    return identities(model, data, samples)
