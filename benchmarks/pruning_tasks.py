"""What hetdpt does to a model, as tasks whose time and memory can be measured one by one; ``effort.py`` does so.

A task is set up, which is not timed, and gives a call, which is. Each can be measured in a process of its own, forked
from one that has done nothing but import hetdpt, so that the peak of memory is its own. No results are written here.
"""

from __future__ import annotations

import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count, islice
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import numpy as np
import torch
from evidence import OLD_QUICK, VIT_TINY
from torch import Tensor, nn

import hetdpt
from hetdpt.adapters.models import Base, build, input_size_of
from hetdpt.adapters.preprocessing import preprocessing_of
from hetdpt.core.plan import Budget, Plan
from hetdpt.core.randomness import seeded
from hetdpt.data.batches import EvaluationBatches, TrainingBatches
from hetdpt.data.fixed_batches import ImageBatches
from hetdpt.data.sources import Data, Source, open_data
from hetdpt.data.subset import Subset
from hetdpt.flow.recipes import quick
from hetdpt.measurement.accuracy import measure_accuracy
from hetdpt.selection.damage import choose, damage_of_each
from hetdpt.selection.importance import ImportanceSearch
from hetdpt.selection.predictor.samples import prune_next
from hetdpt.selection.schedule import removal_order
from hetdpt.surgery.calibrate import calibrate_, gate_fitted_
from hetdpt.surgery.record import survey_of
from hetdpt.training.objective import Objective
from hetdpt.training.processes import start
from hetdpt.training.recover import RecoverConfig
from hetdpt.training.teacher_cache import TeacherAnswers
from hetdpt.training.trainer import Trainer

PRELOADED = ["hetdpt.flow.pipeline"]  # it imports all that a task needs
FEW = 8  # images on which the other sides of gates are fitted where that is not what is measured
Call = Callable[[], object]
Numbers = dict[str, float]
LEAST = 2  # images from which there is a spread, and a fit can be judged
T = TypeVar("T")


@dataclass(frozen=True)
class Setting:
    """On what a task is measured: a model with random weights, and images."""

    folder: str
    """With train/ and val/, a folder for each class."""
    model: str = VIT_TINY
    arguments: dict[str, Any] = field(default_factory=dict)
    """Of the model, as timm takes them."""
    images: int = 32
    """To look at, or to fit on."""
    judge: int = 16
    """Others, to judge on."""
    batch: int = 32
    updates: int = 3
    """Of the weights, where a task trains."""
    is_noise: bool = False
    """Whether images to look at are made when they are asked for, and none is kept; else they are read from files."""
    saved: str = ""
    """Where the merged model is saved, for the task that loads it."""

    def network(self) -> nn.Module:
        """Return the dense model, the same one every time."""
        classes = sum(1 for _ in Path(self.folder, "train").iterdir())
        with seeded(0):
            return build(Base("timm", self.model, {"num_classes": classes, **self.arguments}))

    def student(self, is_merged: bool = False) -> nn.Module:
        """Return the model without the layers of ``spread_plan``, which were not fitted to anything."""
        model = self.network()
        hetdpt.prune_(model, spread_plan(model))
        return hetdpt.merge_(model) if is_merged else model

    def data(self) -> Data:
        return open_data(self.folder)

    def batches(self, model: nn.Module) -> Iterable[Tensor]:
        """Return the images to look at."""
        if self.is_noise:
            return Noise(input_size_of(model), self.images, self.batch)
        return self._read(model, self.images, 0)

    def judges(self, model: nn.Module) -> Iterable[Tensor]:
        """Return the images to judge on."""
        if self.is_noise:
            return Noise(input_size_of(model), self.judge, self.batch, seed=1)
        return self._read(model, self.judge, self.images)

    def _read(self, model: nn.Module, images: int, start: int) -> ImageBatches:
        source = self.data().train
        assert source is not None
        return ImageBatches(source, preprocessing_of(model), count=images, start=start, batch_size=self.batch)


@dataclass(frozen=True)
class Noise:
    """Batches of random images, the same each time they are gone through, of which none is kept."""

    size: tuple[int, int, int]
    images: int
    batch: int
    seed: int = 0

    def __len__(self) -> int:
        return -(-self.images // self.batch)

    def __iter__(self) -> Iterator[Tensor]:
        generator = torch.Generator().manual_seed(self.seed)
        for begun in range(0, self.images, self.batch):
            yield torch.randn(min(self.batch, self.images - begun), *self.size, generator=generator)


def spread_plan(model: nn.Module, removal: Any = "plain") -> Plan:
    """Return a plan that takes an attention layer and an activation of every four blocks: six layers of twelve."""
    blocks = survey_of(model).anatomy.blocks
    return Plan(tuple(range(1, blocks, 4)), tuple(range(3, blocks, 4)), removal=removal)


# what needs no training


def survey(setting: Setting) -> Call:
    """Find the sites."""
    return partial(survey_of, setting.network())


def entropy(setting: Setting) -> Call:
    """Find the transfer entropy of each site by itself."""
    model = setting.network()
    return partial(hetdpt.transfer_entropy, model, setting.batches(model))


def calibration(setting: Setting) -> Call:
    """Replace the layers of ``spread_plan``, each fitted on what those before it give."""
    model = setting.network()
    return partial(calibrate_, model, spread_plan(model, "calibrated"), setting.batches(model))


def every_style(setting: Setting) -> Call:
    """Fit and judge every site under every style; no milliseconds are measured."""
    model = setting.network()
    return partial(hetdpt.scan, model, setting.batches(model), judge=setting.judges(model), latency=False)


def damages(setting: Setting) -> Call:
    """Fit and judge every site under its usual style, as a search does before it begins."""
    model = setting.network()
    return lambda: damage_of_each(model, setting.batches(model), hetdpt.sites(model), judge=setting.judges(model))


def choice(setting: Setting) -> Call:
    """Choose as many layers as ``spread_plan`` has by damage, one after another, all fitted anew in every step."""
    model = setting.network()
    gains, layers = dict.fromkeys(hetdpt.sites(model), 1.0), len(spread_plan(model))
    return lambda: list(choose(model, setting.batches(model), gains, layers, judge=setting.judges(model)))


def gates(setting: Setting) -> Call:
    """Put gates on all sites, with fitted replacements on the other side."""
    model = setting.network()
    return partial(gate_fitted_, model, Plan(removal="calibrated"), setting.batches(model))


def next_layer(setting: Setting) -> Call:
    """Choose one more attention layer by transfer entropy after its replacement was fitted, as collect does."""
    model = setting.network()
    return partial(prune_next, model, "attention", setting.batches(model))


def merge(setting: Setting) -> Call:
    """Merge what the removed activations left."""
    return partial(hetdpt.merge_, setting.student())


def save(setting: Setting) -> Call:
    """Save the merged model, and remove it."""
    model = setting.student(is_merged=True)

    def call() -> None:
        with TemporaryDirectory() as scratch:
            hetdpt.save(model, Path(scratch) / "model")

    return call


def load(setting: Setting) -> Call:
    """Load the model that was saved."""
    assert setting.saved, "a model is saved before, by another process: its memory is not that of loading"
    return partial(hetdpt.load, setting.saved)


def save_to(setting: Setting, place: str) -> None:
    """Save the merged model at ``place``."""
    hetdpt.save(setting.student(is_merged=True), place)


def save_and_load(setting: Setting) -> Call:
    """Save the merged model, load it, and remove it."""
    model = setting.student(is_merged=True)

    def call() -> None:
        with TemporaryDirectory() as scratch:
            hetdpt.load(hetdpt.save(model, Path(scratch) / "model"))

    return call


def evaluation(setting: Setting) -> Call:
    """Measure the accuracy of the merged model on ``images`` validation images."""
    model, data = setting.student(is_merged=True), setting.data()
    assert data.val is not None
    some: Source = Subset(data.val, tuple(index % len(data.val) for index in range(setting.images)))  # type: ignore[arg-type]
    batches = EvaluationBatches(some, preprocessing_of(model), batch_size=setting.batch)
    return partial(measure_accuracy, model, batches)


# training


def usual(setting: Setting) -> RecoverConfig:
    """Return how weights train here: as the recipe ``quick`` said when the first results were measured."""
    changes = {"training.batch_size": setting.batch, "training.precision": "float32"}
    return quick().config.with_settings({**OLD_QUICK, **changes})


def trainer_of(
    setting: Setting,
    student: nn.Module,
    teacher: nn.Module | None = None,
    *,
    config: RecoverConfig | None = None,
    is_cached: bool = False,
    **more: Any,
) -> Trainer:
    """Return a training as ``hetdpt.recover`` has it, ``usual`` by default; without ``teacher`` on labels alone.

    ``is_cached``: what the teacher answers is at hand for every image. ``more`` is for ``Trainer``.
    """
    config = config or usual(setting)
    source = setting.data().train
    assert source is not None
    augmentation = replace(config.augmentation, views=int(is_cached))
    batches = TrainingBatches(source, preprocessing_of(student), augmentation, batch_size=setting.batch)
    objective = Objective(student, config.training, config.distillation if teacher is not None else None, teacher)
    if is_cached:
        objective.cached = TeacherAnswers(np.zeros((1, batches.count, source.num_classes), np.float32), {})
    return Trainer(start(device="cpu"), objective, batches, config.training, **more)


def updates(setting: Setting, trainer: Trainer) -> Call:
    """Return a call that changes the weights ``setting.updates`` times, with the reading of images; once before."""
    batches = (batch for epoch in count() for batch in trainer.batches.epoch(epoch))

    def train(times: int) -> None:
        for batch in islice(batches, times):
            if trainer.companion is not None:
                trainer.companion.before_update(0, 1 << 30)
            trainer.update([batch])

    train(1)
    return partial(train, setting.updates)


def dense_update(setting: Setting) -> Call:
    """Train the dense model on labels."""
    return updates(setting, trainer_of(setting, setting.network()))


def pruned_update(setting: Setting) -> Call:
    """Train the pruned model on labels, two layers where an activation was."""
    return updates(setting, trainer_of(setting, setting.student()))


def merged_update(setting: Setting) -> Call:
    """Train the pruned, merged model on labels."""
    return updates(setting, trainer_of(setting, setting.student(is_merged=True)))


def recovery_update(setting: Setting) -> Call:
    """Train the pruned model with the dense one as its teacher."""
    return updates(setting, trainer_of(setting, setting.student(), setting.network()))


def merged_recovery_update(setting: Setting) -> Call:
    """Train the pruned, merged model with the dense one as its teacher."""
    return updates(setting, trainer_of(setting, setting.student(is_merged=True), setting.network()))


def cached_recovery_update(setting: Setting) -> Call:
    """Train the pruned, merged model on what the dense one answered before."""
    return updates(setting, trainer_of(setting, setting.student(is_merged=True), setting.network(), is_cached=True))


def search_update(setting: Setting) -> Call:
    """Train the gated model and its importances, one candidate closed for each image, with the dense one as teacher."""
    student, search = searched(setting, explores=True)
    return updates(setting, trainer_of(setting, student, setting.network(), companion=search))


def searched(setting: Setting, explores: bool) -> tuple[nn.Module, ImportanceSearch]:
    """Return a model with gates on all sites, fitted replacements on their other sides, and the search for which go."""
    student = setting.network()
    plan = spread_plan(student)
    gate_fitted_(student, Plan(removal="calibrated"), replace(setting, images=FEW).batches(student))
    kinds = removal_order(Budget(len(plan.attention), len(plan.activation)))
    return student, ImportanceSearch(student, kinds, explores=explores, seed=0)


def asking(setting: Setting) -> Call:
    """Ask the teacher about ``images`` images, as it is once where its answers are kept."""
    student = setting.student(is_merged=True)
    objective, batches = trainer_of(setting, student, setting.network()).objective, setting.batches(student)
    assert isinstance(objective, Objective)

    def ask() -> None:
        for images in batches:
            objective.teacher_logits(images)

    return ask


TASKS: dict[str, Callable[[Setting], Call]] = {
    task.__name__: task
    for task in (
        survey,
        entropy,
        calibration,
        every_style,
        damages,
        choice,
        gates,
        next_layer,
        merge,
        save,
        load,
        save_and_load,
        evaluation,
        dense_update,
        pruned_update,
        merged_update,
        recovery_update,
        merged_recovery_update,
        cached_recovery_update,
        search_update,
        asking,
    )
}


# measuring


def apart(function: Callable[..., T], *arguments: Any) -> T:
    """Return what ``function`` returns in a process of its own, forked from one that has only imported hetdpt."""
    context = get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(function, *arguments).result()


def measure(name: str, setting: Setting, patience: float = 1.0, most: int = 5) -> Numbers:
    """Return the seconds of a task and the peak of memory, above what an imported hetdpt takes.

    The task is set up and done again until ``patience`` seconds are spent in it, but not more than ``most`` times: the
    median counts. The peak is that of the first time, with the model and all that the set-up needs; it means something
    in a process of its own only.
    """
    before = settled_peak()
    seconds: list[float] = []
    highest = 0
    while not seconds or (sum(seconds) < patience and len(seconds) < most):
        seconds.append(seconds_of(TASKS[name](setting)))
        highest = highest or peak()
    return {"seconds": statistics.median(seconds), "peak_bytes": highest - before}


def stretched(name: str, setting: Setting, few: int, some: int, judge: float = 0.5) -> Numbers:
    """Return the seconds of a task on ``setting.images`` images, from those on ``few`` and on ``some``.

    seconds = a + b images: what does not grow with images stays as it is. Beside the images ``judge`` times as many
    judge. Before, the model has seen a batch, which is not timed.
    """
    with torch.no_grad():
        model = setting.network()
        model(next(iter(Noise(input_size_of(model), setting.batch, setting.batch))))
    times = []
    for images in (few, some):
        short = replace(setting, images=images, judge=max(round(judge * images), LEAST))
        times.append(seconds_of(TASKS[name](short)))
    each = max(times[1] - times[0], 0.0) / (some - few)
    return {"seconds": times[1] + each * (setting.images - some), "measured_seconds": times[1]}


def seconds_of(call: Call) -> float:
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def settled_peak() -> int:
    """Return ``peak()`` after a little arithmetic, so that threads and kernels are not counted as a task's."""
    for dtype in (torch.float32, torch.float64):
        square = torch.rand(256, 256, dtype=dtype)
        torch.linalg.eigh(square @ square.T)
    return peak()


def peak() -> int:
    """Return the largest resident memory of this process so far, in bytes."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
