"""The steps of a run, tried and timed: a few updates of each training, a choice on a few images, a batch.

They are tried by the very functions that a run calls, on the dense model. Nothing is written but to a folder for
temporary files.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from itertools import islice, pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from hetdpt.adapters.preprocessing import preprocessing_of
from hetdpt.core.errors import DataError
from hetdpt.core.modules import evaluating
from hetdpt.core.plan import Kind, Plan, Site
from hetdpt.data.batches import EvaluationBatches
from hetdpt.data.fixed_batches import ImageBatches, LabelledBatches
from hetdpt.data.sources import Data
from hetdpt.export.saved import load, save
from hetdpt.flow.config import RunConfig
from hetdpt.measurement.accuracy import BATCH
from hetdpt.measurement.costs import Costs
from hetdpt.measurement.speed import measure_throughput, synchronize
from hetdpt.reduce.width.narrow import narrow_to
from hetdpt.selection.importance import ImportanceSearch
from hetdpt.selection.predictor.samples import prune_next
from hetdpt.surgery.calibrate import gate_fitted_
from hetdpt.surgery.merge import merge_
from hetdpt.surgery.record import require_record
from hetdpt.surgery.remove import ready, without
from hetdpt.training.recover import RecoverConfig, recover
from hetdpt.training.trainer import Companion, Progress, State

PATIENCE = 2.0  # seconds after which a trial is long enough
UPDATES = 5
FEW, MORE, MANY = 4, 16, 64  # images
RATIO = 0.3  # of the width, in a trial
SMALL = 1 << 28  # bytes of a model that is saved for a trial; what a larger one takes is little beside its training


@dataclass(frozen=True)
class Training:
    """What a training is made of."""

    epochs: int
    updates: int
    """In all."""
    seconds: float
    """Of each update, with the reading of its images."""
    images: int
    """Of an epoch."""
    state: int
    """Bytes of a checkpoint."""
    asks: bool
    """Whether the teacher is asked once for every image, before it begins."""
    has_average: bool
    """Whether there is a moving average of the weights."""
    evaluations: int
    """Of all validation images."""


def try_training(
    model: nn.Module,
    data: Data,
    settings: RecoverConfig,
    config: RunConfig,
    student: nn.Module | None = None,
    companion: Companion | None = None,
) -> Training:
    """Return what a training with ``settings`` is made of, after a few updates of ``student`` or a copy of ``model``.

    The dense ``model`` is the teacher.
    """
    trial, training = _Trial(device=next(model.parameters()).device), settings.training
    epochs = recover(
        student or deepcopy(model),
        None if settings.cache_teacher else model,  # whose answers are then at hand
        data,
        settings.with_settings({"cache_teacher": False}),
        device=config.device,
        workers=config.workers,
        keeper=trial,
        watch=trial.watch,
        companion=companion,
        evaluates=False,
    )
    with suppress(_Enough):
        for _ in epochs:
            trial.begin()
    times = [later - earlier for earlier, later in pairwise(trial.times)]
    has_average = bool(training.ema_decay)
    return Training(
        epochs=training.epochs,
        updates=trial.updates,
        seconds=statistics.median(times[1:] or times),  # the first one warms up
        images=trial.updates // training.epochs * training.images_per_update(),
        state=trial.state,
        asks=settings.cache_teacher,
        has_average=has_average,
        evaluations=(1 + training.epochs) * (1 + has_average),
    )


class _Enough(BaseException):
    """Ends a training that was a trial; nothing on the way takes it for a failure."""


@dataclass
class _Trial:
    """Takes the place of what keeps states, and ends the training when it is asked to keep the first."""

    device: torch.device
    times: list[float] = field(default_factory=list)
    """When it began, and when each update was done."""
    updates: int = 0
    state: int = 0

    def begin(self) -> None:
        self.times.append(time.perf_counter())

    def watch(self, now: Progress) -> None:
        synchronize(self.device)
        self.times.append(time.perf_counter())
        self.updates = now.updates

    def latest(self) -> State | None:
        return None

    def is_due(self) -> bool:
        done = len(self.times)  # with the update that nobody was told of yet
        return done >= UPDATES or time.perf_counter() - self.times[0] > PATIENCE

    def keep(self, state: State) -> None:
        self.state = _bytes_in(state)
        raise _Enough


def _bytes_in(value: Any) -> int:
    """Return how much the tensors in a state take."""
    if isinstance(value, Tensor):
        return value.nbytes
    if isinstance(value, dict):
        return sum(map(_bytes_in, value.values()))
    return sum(map(_bytes_in, value)) if isinstance(value, list | tuple) else 0


def try_search(
    model: nn.Module, data: Data, config: RunConfig, kinds: Sequence[Kind | None], sites: list[Site]
) -> Training:
    """Return what a search for importances among ``sites`` is made of."""
    student, settings = deepcopy(model), config.search.with_settings({"training.ema_decay": 0.0, "train_merged": False})
    gate_fitted_(student, Plan(removal=config.removal), _images(model, data, config, FEW), sites=sites)
    search = ImportanceSearch(student, kinds, explores=config.explores, seed=settings.training.seed)
    return try_training(model, data, settings, config, student, search)


def try_choice(model: nn.Module, data: Data, config: RunConfig, kind: Kind) -> float:
    """Return the seconds in which one more layer of ``kind`` is chosen, and replaced."""
    return _stretched(partial(prune_next, model, kind, removal=config.removal), model, data, config)


def try_fit(model: nn.Module, data: Data, config: RunConfig, sites: list[Site]) -> float:
    """Return the seconds in which the replacements of all ``sites`` are fitted, each as if it were the only one."""
    plan = Plan(removal=config.removal)
    if not plan.is_any_fitted:
        return 0.0

    def fit(images: Iterable[Tensor]) -> None:
        gate_fitted_(deepcopy(model), plan, images, sites=sites)

    return _stretched(fit, model, data, config)


def try_narrowing(model: nn.Module, data: Data, config: RunConfig) -> float:
    """Return the seconds in which a part of the width goes, without the search for how much it is to be."""
    wants = preprocessing_of(model)

    def narrow(images: ImageBatches) -> None:
        batches = LabelledBatches(data.train, wants, count=images.count, workers=config.workers)
        narrow_to(model, ratio=RATIO, config=config.width, batches=batches)

    return _stretched(narrow, model, data, config)


def _stretched(call: Callable[[ImageBatches], object], model: nn.Module, data: Data, config: RunConfig) -> float:
    """Return the seconds of ``call`` on all images that it is to see, from those on a few and on some more."""
    few, device = _images(model, data, config, FEW), next(model.parameters()).device
    first = _seconds(partial(call, few), device)
    some = _images(model, data, config, MANY if first < PATIENCE else MORE)
    whole = _images(model, data, config, config.images).count
    if some.count == few.count:
        return first
    second = _seconds(partial(call, some), device)
    each = max(second - first, 0.0) / (some.count - few.count)
    return second + each * (whole - some.count)


def _images(model: nn.Module, data: Data, config: RunConfig, count: int) -> ImageBatches:
    """Return so many training images, or as many as a run looks at, read already."""
    if data.train is None:
        raise DataError("layers are chosen on training images; open the data with the split train")
    images = ImageBatches(data.train, preprocessing_of(model), count=min(count, config.images), workers=config.workers)
    for _ in images:
        pass
    return images


def try_evaluation(model: nn.Module, data: Data, workers: int) -> float:
    """Return the seconds in which one image is read and evaluated."""
    if data.val is None:
        raise DataError("accuracy is measured on the split val; open the data with it")
    batches = EvaluationBatches(data.val, preprocessing_of(model), batch_size=BATCH, workers=workers)
    weight, marks, each = next(model.parameters()), [time.perf_counter()], list[float]()
    with torch.no_grad(), evaluating(model):
        for batch in islice(batches, 3):
            model(batch.images.to(weight))
            synchronize(weight.device)
            marks.append(time.perf_counter())
            each.append((marks[-1] - marks[-2]) / len(batch.images))
            if marks[-1] - marks[0] > PATIENCE:
                break
    return statistics.median(each[1:] or each)  # the first one warms up


def try_batch(model: nn.Module, batch: int | None) -> float:
    """Return the seconds of a batch when speed is measured."""
    rate = measure_throughput({"dense": model}, batch=batch, runs=20, warmup=1, seconds=1.0).throughput["dense"]
    return rate.batch / rate.value


def try_count(model: nn.Module, config: RunConfig, site: Site) -> float:
    """Return the seconds in which the costs without one layer are counted."""
    base = ready(model, config.removal)
    size = require_record(base).survey.input_size
    count = partial(_seconds, lambda: Costs.of(merge_(without(base, site)), size), next(model.parameters()).device)
    return min(count(), count())  # the first one warms up


def try_saving(model: nn.Module) -> float:
    """Return the seconds in which a model is saved and loaded; 0 for one that is too large to try."""
    if sum(tensor.nbytes for tensor in model.state_dict().values()) > SMALL:
        return 0.0
    with TemporaryDirectory() as folder:
        place = Path(folder) / "model"
        copy = deepcopy(model).cpu()
        return _seconds(lambda: load(save(copy, place)), torch.device("cpu"))


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    begun = time.perf_counter()
    call()
    synchronize(device)
    return time.perf_counter() - begun
