"""The training of a detector or segmenter in a run directory, resumable."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path

from torch import nn

from hetdpt.adapters.identity import fingerprint
from hetdpt.core.modules import clone
from hetdpt.core.plan import Plan
from hetdpt.flow.resumable import CALIBRATION, asked_plan, load_or_make, models_to_save, write_epochs, write_update
from hetdpt.store.config_diff import flat
from hetdpt.store.run_directory import Run
from hetdpt.surgery.remove import place_
from hetdpt.tasks.annotated import AnnotatedData
from hetdpt.tasks.learning import LearnConfig, Learned, build, learn
from hetdpt.tasks.model import TaskModel
from hetdpt.tasks.saved import load_task, save_task
from hetdpt.training.processes import start
from hetdpt.training.trainer import Progress


def learn_into(
    directory: Path,
    model: nn.Module,
    data: AnnotatedData,
    config: LearnConfig,
    *,
    plan: Plan | None = None,
    calibration: int = CALIBRATION,
    device: str | None = None,
    workers: int = 0,
    minutes: float = 10.0,
    tensorboard: bool = False,
    watch: Callable[[Progress], None] | None = None,
) -> Iterator[Learned]:
    """Train a detector or segmenter on ``model`` and write everything to ``directory``; called again, it resumes.

    With a ``plan``, layers of the backbone are removed first, calibrated on training images of the task. The initial
    model is saved as ``start``, and at the end there are ``best`` and ``last``, for ``load_task``.
    """
    processes = start(config.training.precision, device)
    probe = build(clone(model), data, config).backbone.model  # refuses what cannot be built, before writing
    if plan is not None:
        place_(probe, plan)
    with processes.main_process_first():
        asked = {
            "model": fingerprint(model),
            **data.facts,
            "processes": processes.num_processes,
            **flat(asdict(config)),
        }
        asked["precision"] = processes.mixed_precision
        if plan is not None:
            asked |= asked_plan(plan, calibration)
        run = Run.open(directory, asked, minutes, has_board=tensorboard, is_first=processes.is_main_process)
    if run.summary is None:
        with processes.main_process_first():  # the others load what the first has saved
            make = partial(
                build, model.to(processes.device), data, config, plan=plan, images=calibration, workers=workers
            )
            made = load_or_make(run, asked, lambda place: save_task(make().cpu(), **place), load_task)
        epochs = learn(
            made,
            data,
            config,
            device=device,
            workers=workers,
            keeper=run.checkpoints,
            watch=partial(write_update, run, watch),
        )
        yield from write_epochs(run, epochs, Learned.record, partial(_save, run.directory))


def _save(directory: Path, learned: Learned) -> None:
    for name, copy in models_to_save(learned.epoch):
        assert isinstance(copy, TaskModel)
        save_task(copy, directory / name, overwrite=True)
