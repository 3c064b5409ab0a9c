"""A few updates of a training, tried to find out how long they take or what they do to the loss. Decides nothing."""

from __future__ import annotations

import statistics
import time
from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import replace
from itertools import chain, count, islice, pairwise
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from hetdpt.core.errors import DataError
from hetdpt.core.modules import evaluating
from hetdpt.core.processes import of_first, sum_over_processes
from hetdpt.core.randomness import seeded
from hetdpt.data.batches import EvaluationBatches
from hetdpt.measurement.speed import synchronize
from hetdpt.surgery.record import survey_of
from hetdpt.training.config import TrainConfig
from hetdpt.training.drop_paths import drop_paths
from hetdpt.training.objective import Objective
from hetdpt.training.trainer import Batches, Companion, Trainer

PATIENCE = 2.0  # seconds after which a trial is long enough
UPDATES = 5
AT_LEAST = 3  # updates: the first warms up, and may take twice as long as the others
BATCHES = 3


class Attempt:
    """A training that is only begun: its student is a copy, or is not used any more."""

    def __init__(
        self,
        accelerator: Accelerator,
        objective: Objective,
        batches: Batches,
        training: TrainConfig,
        *,
        drop_path: float = 0.0,
        companion: Companion | None = None,
        updates: int | None = None,
    ) -> None:
        """``updates``, if given, are all that it has, in one epoch: the schedule ends with them."""
        self.objective, self.drop_path, self.student = objective, drop_path, objective.student
        self.found = survey_of(self.student)  # before the weights are spread over processes
        if updates is not None:
            batches = FirstBatches(batches, updates * training.accumulate)
        self.trainer = Trainer(accelerator, objective, batches, training, companion=companion)

    def updates(self) -> Generator[None]:
        """Do the updates of the first epoch, and yield after each."""
        with drop_paths(self.student, self.drop_path, self.found):
            yield from self.trainer.trial()

    def seconds(self) -> float:
        """Return the seconds of an update, with reading its images: the median of a few, the first not counted."""
        times, device = [time.perf_counter()], self.trainer.accelerator.device
        with closing(self.updates()) as updates:
            for _ in updates:
                synchronize(device)
                times.append(time.perf_counter())
                done, is_long = len(times) - 1, times[-1] - times[0] > PATIENCE
                if of_first(done >= UPDATES or (done >= AT_LEAST and is_long)):
                    break
        return of_first(_median(times))

    @torch.no_grad()
    def loss(self, batches: EvaluationBatches) -> float:
        """Return the loss of the student's answers to images that are not mixed; infinite if it is not a number.

        Hidden states do not count: what a rate does to them in a few updates says little about the rate (docs/log.md).
        Modules are in training mode, in which a student with two heads answers with both.
        """
        accelerator, sums = self.trainer.accelerator, torch.zeros(2, dtype=torch.float64)
        self.objective.module.train()
        with drop_paths(self.student, 0.0, self.found), seeded(0, device=accelerator.device):
            for batch in batches:
                is_read = batch.targets >= 0
                number = int(is_read.sum())
                if number:
                    read = replace(
                        batch,
                        images=batch.images[is_read],
                        targets=batch.targets[is_read],
                        indices=batch.indices[is_read],
                    )
                    with accelerator.autocast():
                        loss = self.objective.of_answers(read.to(accelerator.device))
                    sums += torch.tensor([number * loss.item(), number])
        total, images = sum_over_processes(sums, accelerator.device).tolist()
        if not images:
            raise DataError("none of the images that were held out can be read; check the files")
        loss = total / images
        return of_first(loss if torch.isfinite(torch.tensor(loss)) else float("inf"))

    def close(self) -> None:
        """Give the student back the outputs it had."""
        self.objective.close()


class FirstBatches:
    """The first ``length`` batches of a training as one epoch, however many epochs they are of."""

    def __init__(self, batches: Batches, length: int) -> None:
        self._batches, self._length = batches, length

    def __len__(self) -> int:
        return self._length

    def epoch(self, number: int, start: int = 0) -> Iterator[Any]:
        """Yield the batches; ``number`` is 0."""
        epochs = (self._batches.epoch(each) for each in count())
        return islice(chain.from_iterable(epochs), start, self._length)


def evaluation_seconds(model: nn.Module, batches: EvaluationBatches) -> float:
    """Return the seconds in which one image is read and evaluated, from a few batches."""
    weight, marks, each = next(model.parameters()), [time.perf_counter()], list[float]()
    with torch.no_grad(), evaluating(model):
        for batch in islice(batches, BATCHES):
            model(batch.images.to(weight))
            synchronize(weight.device)
            marks.append(time.perf_counter())
            each.append((marks[-1] - marks[-2]) / len(batch.images))
            if len(each) > 1 and marks[-1] - marks[0] > PATIENCE:
                break
    return statistics.median(each[1:] or each)  # the first one warms up


def bytes_in(state: Any) -> int:
    """Return the bytes of all tensors in a state.

    >>> bytes_in({"model": {"weight": torch.zeros(3)}, "numbers": [torch.zeros(2), 1]})
    20
    """
    if isinstance(state, Tensor):
        return state.nbytes
    if isinstance(state, dict):
        return sum(map(bytes_in, state.values()))
    return sum(map(bytes_in, state)) if isinstance(state, list | tuple) else 0


def _median(times: list[float]) -> float:
    """Return the median time between two of ``times``, without the first, which warms up."""
    each = [later - earlier for earlier, later in pairwise(times)]
    return statistics.median(each[1:] or each)
