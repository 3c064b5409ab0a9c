"""How a process executes its work: device, workers, checkpoints, progress. Decides nothing about what is done."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from torch import nn

from hetdpt.adapters.preprocessing import preprocessing_of
from hetdpt.core.errors import DataError, TrainError
from hetdpt.core.progress import StageProgress
from hetdpt.data.fixed_batches import ImageBatches
from hetdpt.data.sources import Data
from hetdpt.store.checkpoints import CHECKPOINTS, Checkpoints
from hetdpt.store.jobs import Finished, Guard, Result, Subject, Task, run_tasks
from hetdpt.store.metrics import EPOCH, METRICS, Metrics
from hetdpt.training.processes import start
from hetdpt.training.trainer import Progress

CLAIMS = "claims"


@dataclass(frozen=True, kw_only=True)
class Execution:
    """How this process works. Only two of these change the results: ``batch`` where speed is measured, and ``workers``
    where a stream of shards is trained on."""

    device: str | None = None
    workers: int = 0
    minutes: float = 10.0
    """Between two checkpoints."""
    batch: int | None = None
    """Images at once when layers are timed."""
    progress: StageProgress | None = None
    note: Callable[[str], None] | None = None
    """Shows a line."""

    def stage(self, text: str) -> Callable[[int, int], None] | None:
        """Return the progress callback of a step described by ``text``."""
        return partial(self.progress, text) if self.progress else None

    def watcher(self, text: str) -> Callable[[Progress], None]:
        """Return the callback for every update of a training described by ``text``."""
        progress = self.stage(text)

        def watch(now: Progress) -> None:
            if progress:
                progress(now.update, now.updates)

        return watch

    def require_alone(self, precision: str, work: str) -> None:
        """Raise ``TrainError`` if this process is one of a group that torchrun started; ``work`` names the work."""
        if start(precision, self.device).num_processes > 1:
            raise TrainError(
                f"{work} by independent processes; start the same command several times, each with its own --device, "
                "instead of torchrun or accelerate"
            )

    def run(self, directory: Path, tasks: Iterable[Task[Subject, Result]]) -> Iterator[Finished[Subject, Result]]:
        """Do ``tasks`` together with all processes that work in ``directory``, and yield each when it is finished."""
        return run_tasks(directory / CLAIMS, tasks, self._wait)

    def _wait(self, who: str) -> None:
        if self.progress:
            self.progress(f"waiting for {who}", 0, 0)

    def checkpoints(self, folder: Path, guard: Guard) -> Checkpoints:
        """Return the checkpoints of a task in its ``folder``."""
        return Checkpoints(folder / CHECKPOINTS, self.minutes, guard)

    def images(self, model: nn.Module, data: Data, count: int, seed: int) -> ImageBatches:
        """Return ``count`` training images as ``model`` takes them, to choose layers and fit replacements on."""
        return fitting_images(model, data, count, seed, self.workers)


def fitting_images(
    model: nn.Module, data: Data, count: int, seed: int = 0, workers: int = 0, start: int = 0
) -> ImageBatches:
    """Return ``count`` training images of ``data`` as ``model`` takes them; ``DataError`` if it has none.

    They follow the first ``start`` images in the order that ``seed`` gives.
    """
    if data.train is None:
        raise DataError("layers are chosen and replaced using training images; open the data with the split train")
    return ImageBatches(data.train, preprocessing_of(model), count=count, start=start, seed=seed, workers=workers)


def accuracies(folder: Path, epochs: Iterable[tuple[int, float]]) -> tuple[float, ...]:
    """Return the accuracies of all ``epochs`` (number, accuracy), those before a restart included.

    They are kept in ``folder``, as a training that is resumed yields only those that are left.
    """
    folder.mkdir(parents=True, exist_ok=True)
    metrics = Metrics(folder / METRICS)
    for number, accuracy in epochs:
        metrics.write(EPOCH, update=number, number=number, accuracy=accuracy)
    return tuple(line["accuracy"] for line in metrics.read(EPOCH))


def fitting_and_judging_images(
    model: nn.Module, data: Data, count: int, seed: int = 0, workers: int = 0
) -> tuple[ImageBatches, ImageBatches]:
    """Return ``count`` training images to fit on, and as many others to judge on; the same if there are too few."""
    images = fitting_images(model, data, count, seed, workers)
    assert data.train is not None
    return images, fitting_images(model, data, count, seed, workers, count) if len(data.train) > count else images
