"""The flow from a dense model to a saved one, on one screen. So far: recovery, from a student to files."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hetdpt.data.sources import Data, open_data
from hetdpt.data.streams import Stream
from hetdpt.export.saved import save
from hetdpt.recovery import RecoverConfig, recover
from hetdpt.runs import Run
from hetdpt.surgery import merge_
from hetdpt.training.processes import start
from hetdpt.training.trainer import Epoch, Progress

EVERY = 50  # updates between two lines of metrics.jsonl


def recover_into(
    directory: Path,
    student: nn.Module,
    teacher: nn.Module | None,
    data: str | Data,
    config: RecoverConfig,
    *,
    device: str | None = None,
    workers: int = 0,
    minutes: float = 10.0,
    tensorboard: bool = False,
    watch: Callable[[Progress], None] | None = None,
) -> Iterator[Epoch]:
    """Recover ``student`` and write all of it to ``directory``; called again, it goes on where it was killed.

    When it is done there are saved models, merged: ``best``, ``last`` and, with a moving average, ``ema``.
    """
    opened = data if isinstance(data, Data) else open_data(data)
    processes = start(config.training.precision, device)
    with processes.main_process_first():
        asked = _asked(student, teacher, opened, config, processes.num_processes)
        asked["precision"] = processes.mixed_precision  # what "auto" stands for on this device
        if isinstance(opened.train, Stream):
            asked["workers"] = workers  # they share out the shards, and so decide the order
        run = Run.open(directory, asked, minutes, has_board=tensorboard, is_first=processes.is_main_process)
    if run.summary is None:
        epochs = recover(
            student,
            teacher,
            opened,
            config,
            device=device,
            workers=workers,
            keeper=run.checkpoints,
            watch=partial(_log, run, watch),
        )
        yield from _keep(run, epochs)


def _keep(run: Run, epochs: Iterator[Epoch]) -> Iterator[Epoch]:
    """Write what every epoch came to before handing it on, and at the end what the run came to."""
    if not run.is_first:
        yield from epochs
        return
    with run.alone():
        for epoch in epochs:
            run.metrics.write("epoch", **epoch.record())
            _save(epoch, run.directory)
            yield epoch
        run.finish(_summary(run.metrics.read("epoch")))


def _log(run: Run, watch: Callable[[Progress], None] | None, now: Progress) -> None:
    if now.update % EVERY == 0:
        run.metrics.write("update", update=now.update, loss=now.mean_loss(), lr=now.lr)
    if watch is not None:
        watch(now)


def _save(epoch: Epoch, directory: Path) -> None:
    """Write the models that are due after ``epoch``: a better one than ever, and at the end those of the end."""
    is_end = epoch.number == epoch.epochs
    due = {"best": epoch.is_best, "last": is_end, "ema": is_end and epoch.average is not None}
    for name in (name for name, is_due in due.items() if is_due):
        model = epoch.average if name == "ema" else epoch.student
        assert model is not None
        save(merge_(deepcopy(model).cpu()), directory / name, overwrite=True)


def _summary(epochs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what a recovery came to: accuracies by name, time and speed."""
    end = epochs[-1]
    best = next(epoch["number"] for epoch in epochs if epoch["last"] == end["best"])
    seconds = sum(epoch["seconds"] for epoch in epochs)
    images = sum(epoch["images_per_second"] * epoch["seconds"] for epoch in epochs[1:])
    return {
        "start": epochs[0]["last"],
        **{name: end[name] for name in ("last", "best", "ema")},
        "best_epoch": best,
        "epochs": end["epochs"],
        "seconds": seconds,
        "images_per_second": images / seconds,
        "unreadable": sorted({name for epoch in epochs for name in epoch["unreadable"]}),
    }


def _asked(
    student: nn.Module, teacher: nn.Module | None, data: Data, config: RecoverConfig, processes: int
) -> dict[str, Any]:
    """Return all that decides the outcome of a recovery, as plain JSON."""
    settings = asdict(config)
    for part in [part for part, value in settings.items() if isinstance(value, dict)]:
        settings |= {f"{part}.{key}": value for key, value in settings.pop(part).items()}
    return {
        "student": _digest(student),
        "teacher": _digest(teacher) if teacher is not None else None,
        "data": data.name,
        "classes": data.num_classes,
        "images": [len(split) if split is not None else None for split in (data.train, data.val)],
        "processes": processes,
        **settings,
    }


def _digest(model: nn.Module) -> str:
    """Return a checksum of the structure and the weights of ``model``."""
    found = hashlib.sha256(str(model).encode())
    for name, tensor in model.state_dict().items():
        found.update(name.encode() + tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()
