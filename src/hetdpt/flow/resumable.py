"""Selection and recovery in run directories, resumable after a kill. The work itself is done in other rooms."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from hetdpt.adapters.identity import fingerprint
from hetdpt.core.errors import FileError, HetDPTError
from hetdpt.core.plan import Budget, Plan
from hetdpt.data.sources import Data, open_data
from hetdpt.data.streams import Stream
from hetdpt.export.saved import load, save
from hetdpt.flow.execution import Execution, fitting_images
from hetdpt.measurement.accuracy import evaluate
from hetdpt.reduce.apply import apply_, require_applicable
from hetdpt.selection.goal import RemovalTarget
from hetdpt.selection.importance import Picked
from hetdpt.selection.select import SelectConfig, select
from hetdpt.store.atomic import write_text
from hetdpt.store.config_diff import flat
from hetdpt.store.metrics import EPOCH
from hetdpt.store.run_directory import Run
from hetdpt.surgery.merge import merge_
from hetdpt.surgery.remove import prune_
from hetdpt.surgery.tail import trim_if_possible_
from hetdpt.training.processes import Accelerator, start
from hetdpt.training.recover import RecoverConfig, recover, training_data
from hetdpt.training.teacher_cache import TeacherCache
from hetdpt.training.trainer import Epoch, Progress

EVERY = 50  # updates between two lines of metrics.jsonl
CALIBRATION = 256  # images
START, TEACHER = "start", "teacher"
One = TypeVar("One")


def recover_into(
    directory: Path,
    student: nn.Module,
    teacher: nn.Module | None,
    data: str | Data,
    config: RecoverConfig,
    execution: Execution | None = None,
    *,
    plan: Plan | None = None,
    calibration: int = CALIBRATION,
    merges: bool = True,
    trims: bool = False,
    tensorboard: bool = False,
    watch: Callable[[Progress], None] | None = None,
) -> Iterator[Epoch]:
    """Recover ``student`` and write all of it to ``directory``; called again, it resumes where it was killed.

    With a ``plan`` its layers are removed from the student first; replacements are fitted on ``calibration`` training
    images, and the student they make is saved as ``start``. With ``trims`` it is trained and saved trimmed, where
    that is possible. In the end there are saved models, merged unless ``merges`` is False: ``best``, ``last``
    and, with a moving average, ``ema``. The summary says on which images epochs were measured; if those were held out
    and models are merged, and so final, it has the scores of ``best`` on the validation images too.
    """
    execution = execution or Execution()
    opened = data if isinstance(data, Data) else open_data(data)
    processes = start(config.training.precision, execution.device)
    if plan is not None:
        require_applicable(student, plan)  # before anything is written
    with processes.main_process_first():
        asked = {
            "student": fingerprint(student),
            "teacher": fingerprint(teacher) if teacher is not None else None,
            **_asked(opened, execution.workers, processes),
            **flat(asdict(config)),
            "trim": trims,
        }
        if plan is not None:
            asked |= asked_plan(plan, calibration)
        run = Run.open(directory, asked, execution.minutes, has_board=tensorboard, is_first=processes.is_main_process)
    if run.summary is not None:
        _forget(run)
        return
    if plan is not None:
        with processes.main_process_first():  # the others load the model that it saved
            student = student.to(processes.device)
            options = (opened, calibration, config.training.seed, execution.workers)
            student = _start(run, asked, plan, lambda: remove_layers_(student, plan, *options))
    if trims:
        trim_if_possible_(student)
    epochs = recover(
        student,
        teacher,
        opened,
        config,
        device=execution.device,
        workers=execution.workers,
        keeper=run.checkpoints,
        watch=partial(write_update, run, watch),
        progress=execution.progress,
        cache=TeacherCache(directory / TEACHER, execution.note, execution.progress),
    )
    measured_on = training_data(opened, config)[1]

    def about() -> dict[str, Any]:
        found: dict[str, Any] = {"metric": opened.metric, "measured_on": measured_on}
        if not merges or not config.hold_out or opened.val is None or isinstance(opened.train, Stream):
            return found
        processes.wait_for_everyone()  # for the first to save the model
        best = load(run.directory / "best").to(processes.device)
        progress = execution.stage("evaluating the best model on the validation images")
        return found | {"validation": asdict(evaluate(best, opened, workers=execution.workers, progress=progress))}

    yield from write_epochs(run, epochs, Epoch.record, partial(_save, run.directory, merges), about)
    _forget(run)


def select_into(
    file: Path,
    model: nn.Module,
    data: str | Data,
    budget: Budget | int | RemovalTarget,
    method: str,
    config: SelectConfig,
    execution: Execution | None = None,
    *,
    overwrite: bool = False,
    watch: Callable[[Picked], None] | None = None,
) -> Plan:
    """Choose layers and write the plan to ``file``; a search that was killed resumes from ``file.partial``."""
    if file.is_dir() or (file.exists() and not overwrite):
        raise FileError(f"{file} exists already; give another name, or --overwrite")
    execution = execution or Execution()
    opened = data if isinstance(data, Data) else open_data(data)
    processes = start(config.search.training.precision, execution.device)
    asked = {
        "model": fingerprint(model),
        **_asked(opened, execution.workers, processes),
        "budget": _asked_budget(budget),
        "method": method,
        **asdict(config),
    }
    with processes.main_process_first():
        run = Run.open(Path(f"{file}.partial"), asked, execution.minutes, is_first=processes.is_main_process)
    options: dict[str, Any] = {"device": execution.device, "workers": execution.workers}
    options |= {"watch": watch, "progress": execution.progress, "keeper": run.checkpoints}
    with run.alone() if processes.is_main_process else nullcontext():
        try:
            plan = select(model, opened, budget, method, config, **options)
        except HetDPTError:
            if processes.is_main_process and not run.is_begun:
                run.discard()
            raise
    if processes.is_main_process:
        write_text(file, f"{plan.to_json()}\n")
        run.discard()
    processes.wait_for_everyone()
    return plan


def _asked_budget(budget: Budget | int | RemovalTarget) -> dict[str, Any] | int:
    if isinstance(budget, RemovalTarget):
        return budget.to_dict()
    return asdict(budget) if isinstance(budget, Budget) else budget


def remove_layers_(model: nn.Module, plan: Plan, data: Data, images: int, seed: int = 0, workers: int = 0) -> nn.Module:
    """Remove all of ``plan`` from ``model`` and return it; replacements are fitted on training ``images``."""
    if not plan.needs_images and plan.tokens is None:
        return prune_(model, plan)
    return apply_(model, plan, fitting_images(model, data, images, seed, workers))


def asked_plan(plan: Plan, calibration: int) -> dict[str, Any]:
    """Return what of a plan decides the outcome of a training, as plain JSON."""
    return {"plan": json.loads(plan.to_json()), "calibration": calibration if plan.needs_images else None}


def _start(run: Run, asked: dict[str, Any], plan: Plan, prune: Callable[[], nn.Module]) -> nn.Module:
    """Return the student as its training starts: pruned, or calibrated once and then loaded."""
    if not plan.needs_images:
        return prune()
    made_of = {key: asked[key] for key in ("student", "plan", "calibration", "data", "training.seed")}
    return load_or_make(run, made_of, lambda place: save(prune().cpu(), **place), load)


def load_or_make(
    run: Run, made_of: dict[str, Any], make: Callable[[dict[str, Any]], object], load: Callable[[Path], One]
) -> One:
    """Return the model that a training starts with, from ``start``; made there once, and again if ``made_of`` differs.

    A run that has no checkpoint yet may start with another model. ``make`` gets the options of ``save``.
    """
    start, text = run.directory / START, json.dumps(made_of)
    note = start / f"{START}.json"
    if not note.is_file() or note.read_text(encoding="utf-8") != text:
        with run.alone():
            make({"directory": start, "overwrite": True, "notes": {note.name: text}})
    return load(start)


def write_epochs(
    run: Run,
    epochs: Iterator[One],
    record: Callable[[One], dict[str, Any]],
    save: Callable[[One], None],
    about: Callable[[], dict[str, Any]] = dict,
) -> Iterator[One]:
    """Write the numbers and models of every epoch before yielding it, and at the end the summary of the run.

    ``about`` is called in all processes after the last epoch; what it returns is added to the summary.
    """
    if not run.is_first:
        yield from epochs
        about()
        return
    with run.alone():
        for scratch in run.directory.glob(".*"):  # which a kill has left half written
            shutil.rmtree(scratch, ignore_errors=True)
        for epoch in epochs:
            run.metrics.write(EPOCH, **record(epoch))
            save(epoch)
            yield epoch
        run.finish({**_summary(run.metrics.read(EPOCH)), **about()})


def write_update(run: Run, watch: Callable[[Progress], None] | None, now: Progress) -> None:
    """Write the numbers of every ``EVERY``-th update, and call ``watch``."""
    if now.update % EVERY == 0:
        run.metrics.write("update", update=now.update, loss=now.mean_loss(), lr=now.lr)
    if watch is not None:
        watch(now)


def _forget(run: Run) -> None:
    """Remove the answers of the teacher, which a finished run does not need."""
    if run.is_first:
        shutil.rmtree(run.directory / TEACHER, ignore_errors=True)


def _save(directory: Path, merges: bool, epoch: Epoch) -> None:
    for name, copy in models_to_save(epoch):
        save(merge_(copy) if merges else copy, directory / name, overwrite=True)


def models_to_save(epoch: Epoch) -> Iterator[tuple[str, nn.Module]]:
    """Yield copies of the models to save after ``epoch``: the best so far, and at the end the last ones."""
    is_end = epoch.number == epoch.epochs
    due = {"best": epoch.is_best, "last": is_end, "ema": is_end and epoch.average is not None}
    for name in (name for name, is_due in due.items() if is_due):
        model = epoch.average if name == "ema" else epoch.student
        assert model is not None
        yield name, deepcopy(model).cpu()


def _summary(epochs: list[dict[str, Any]]) -> dict[str, Any]:
    end = epochs[-1]
    best = max((epoch["number"] for epoch in epochs if epoch["is_best"]), default=0)
    scores = {"scores": epochs[best]["scores"]} if "scores" in end else {}  # of ``best``
    seconds = sum(epoch["seconds"] for epoch in epochs)
    images = sum(epoch["images_per_second"] * epoch["seconds"] for epoch in epochs[1:])
    return {
        "start": epochs[0]["last"],
        **{name: end[name] for name in ("last", "best", "ema")},
        "best_epoch": best,
        "divergence": None if end.get("divergence") is None else [epochs[0]["divergence"], end["divergence"]],
        "lr_found": end.get("lr_found"),
        "notes": end.get("notes", []),
        "epochs": end["epochs"],
        "seconds": seconds,
        "images_per_second": images / seconds,
        "unreadable": sorted({name for epoch in epochs for name in epoch["unreadable"]}),
        **scores,
    }


def _asked(data: Data, workers: int, processes: Accelerator) -> dict[str, Any]:
    """Return all that decides the outcome of a training beside models and settings, as plain JSON."""
    precision = processes.mixed_precision  # what "auto" stands for on this device
    return {**data.facts(workers), "processes": processes.num_processes, "precision": precision}
