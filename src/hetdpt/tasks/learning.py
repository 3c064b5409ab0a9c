"""Builds a detector or segmenter on a backbone, trains and measures it. Writes no file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from hetdpt.adapters.preprocessing import preprocessing_of
from hetdpt.core.errors import DataError, PlanError, TrainError
from hetdpt.core.plan import Plan
from hetdpt.core.randomness import seeded
from hetdpt.data.batches import OrderedBatches, RandomBatches
from hetdpt.data.views import Loading, Share
from hetdpt.store.settings import changed
from hetdpt.surgery.calibrate import calibrate_
from hetdpt.surgery.merge import merge_
from hetdpt.surgery.remove import prune_
from hetdpt.tasks.annotated import AnnotatedData, AnnotatedView
from hetdpt.tasks.backbone import Backbone
from hetdpt.tasks.model import TaskModel, TaskScores
from hetdpt.tasks.table import task_called
from hetdpt.training.config import TrainConfig
from hetdpt.training.objective import OwnLoss
from hetdpt.training.processes import Accelerator, is_sharded, start
from hetdpt.training.trainer import Epoch, Evaluation, Keeper, Progress, Trainer

BATCH = 8


@dataclass(frozen=True, kw_only=True)
class LearnConfig:
    """How a detector or segmenter is built and trained; ``LearnConfig.of`` has the paper's settings."""

    task: str
    """detection or segmentation."""
    training: TrainConfig
    """The loop."""
    head: Any
    """What is built on the backbone: a ``DetectorConfig`` or a ``SegmenterConfig``."""
    size: tuple[int, int]
    """Height and width of the canvas that images are placed on."""
    pyramid: int = 256
    """Channels of the pyramid computed from the last map of a plain ViT."""

    def __post_init__(self) -> None:
        wanted = task_called(self.task).config
        if not isinstance(self.head, wanted):
            raise TrainError(f"the head of {self.task} is a {wanted.__name__}, not {type(self.head).__name__}")
        if self.training.mixes or self.training.smoothing:
            raise TrainError("mixup, cutmix and smoothing apply to labels, not to boxes or masks; set them to 0")
        if self.training.is_open:
            raise TrainError("minutes and a learning rate to be found are for classifiers; give epochs and lr")
        if min(self.size) < 1:
            raise TrainError(f"the canvas is {self.size}; a height and a width above 0 were expected")
        if self.pyramid < 1:
            raise TrainError(f"the pyramid has {self.pyramid} channels; 1 or more were expected")

    @classmethod
    def of(cls, task: str) -> LearnConfig:
        """Return the paper's settings of a task.

        >>> LearnConfig.of("segmentation").training.lr
        0.01
        """
        row = task_called(task)
        return cls(task=task, training=row.training, head=row.config(), size=row.size)

    def with_settings(self, settings: dict[str, Any]) -> LearnConfig:
        """Return this config with some fields changed, named as in ``training.lr`` or ``head.width``.

        If the learning rate drops for the last epoch, as in the paper's detection, it also does with other ``epochs``.

        >>> LearnConfig.of("detection").with_settings({"training.epochs": 50}).training.decay_epochs
        49.0
        """
        found = changed(self, settings)
        is_for_last = self.training.decay_epochs == _before_last(self.training.epochs)
        if is_for_last and "training.decay_epochs" not in settings:
            found = changed(found, {"training.decay_epochs": _before_last(found.training.epochs)})
        return found


@dataclass(frozen=True)
class Learned:
    """The results of an epoch."""

    epoch: Epoch
    """Its score (``last``, ``best``) is mAP or mIoU in percent."""
    scores: TaskScores
    """All scores of ``last``."""

    def record(self) -> dict[str, Any]:
        """Return the numbers of this epoch, as JSON takes them."""
        return {**self.epoch.record(), "scores": self.scores.record()}


def build(
    model: nn.Module,
    data: AnnotatedData,
    config: LearnConfig,
    *,
    plan: Plan | None = None,
    images: int = 256,
    workers: int = 0,
) -> TaskModel:
    """Return a new detector or segmenter with ``model`` as its backbone, which is changed in place.

    With a ``plan``, layers of the backbone are removed first; replacements are fitted on that many training
    ``images``, at the size of the task. Then it is merged, so that no layer is trained that merging would remove.
    """
    if plan is not None and plan.tail:
        raise PlanError("a backbone returns maps of patches, which a tail does not update to the end; use tail=0")
    row = task_called(config.task)
    with seeded(config.training.seed):  # all processes, now and when resumed, start with the same weights
        made = row.model(Backbone(model, size=config.size, width=config.pyramid), data.classes, config.head)
    if plan is not None and plan.needs_images:
        calibrate_(model, plan, _Images(made, data, images, workers))
    elif plan is not None:
        prune_(model, plan)
    merge_(model)
    return made.train()


def learn(
    model: TaskModel,
    data: AnnotatedData,
    config: LearnConfig,
    *,
    device: str | None = None,
    workers: int = 0,
    keeper: Keeper | None = None,
    watch: Callable[[Progress], None] | None = None,
) -> Iterator[Learned]:
    """Train ``model`` in place on ``data``; yield its results before training and after each epoch."""
    accelerator = start(config.training.precision, device)
    if is_sharded(accelerator):
        raise TrainError("a detector or segmenter cannot be trained with FSDP; use torchrun, or one device")
    if data.train is None or data.val is None:
        raise TrainError("training needs images to train on and images to measure on; open the data with both splits")
    model.to(accelerator.device, torch.float32)
    if accelerator.num_processes > 1 and accelerator.device.type == "cuda":  # only CUDA has them
        nn.SyncBatchNorm.convert_sync_batchnorm(model)
    model.require_batch(config.training.batch_size)
    loading = Loading(
        batch_size=config.training.batch_size,
        seed=config.training.seed,
        share=Share(accelerator.process_index, accelerator.num_processes),
        workers=workers,
    )
    batches = RandomBatches(data.train, _view(model, is_training=True), loading)
    validation = _evaluation(model, data, config.training.batch_size, accelerator, workers)
    found: list[TaskScores] = []

    def evaluate(student: nn.Module) -> Evaluation:
        found.append(task_called(model.task).measure(student, validation, data.val))
        return Evaluation(found[-1].score)

    trainer = Trainer(
        accelerator,
        OwnLoss(model),
        batches,
        config.training,
        evaluate=evaluate,
        keeper=keeper,
        watch=watch,
        is_new=True,
    )
    with closing(trainer.epochs()) as epochs:
        for epoch in epochs:
            names = {*epoch.unreadable, *(name for scores in found for name in scores.unreadable)}
            yield Learned(replace(epoch, unreadable=tuple(sorted(names))), found[0])  # an average comes second
            found.clear()


def score(
    model: TaskModel,
    data: AnnotatedData,
    *,
    batch_size: int = BATCH,
    device: str | None = None,
    workers: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> TaskScores:
    """Return the scores of ``model`` on the validation images of ``data``."""
    if data.val is None:
        raise DataError("scores need the split val; open the data with it")
    accelerator = start(device=device)
    model.to(accelerator.device)
    validation = _evaluation(model, data, batch_size, accelerator, workers)
    return task_called(model.task).measure(model, validation, data.val, progress)


def _evaluation(
    model: TaskModel, data: AnnotatedData, batch_size: int, accelerator: Accelerator, workers: int
) -> OrderedBatches:
    assert data.val is not None
    if model.classes != data.classes:
        raise DataError(
            f"the model was built for {_listed(model.classes)}, but {data.name} has {_listed(data.classes)}; give the "
            "data it was built for"
        )
    share = Share(accelerator.process_index, accelerator.num_processes)
    loading = Loading(batch_size=batch_size, share=share, workers=workers)
    return OrderedBatches(data.val, _view(model, is_training=False), loading)


def _view(model: TaskModel, *, is_training: bool) -> AnnotatedView:
    return task_called(model.task).view(model.size, preprocessing_of(model.backbone.model), is_training)


def _before_last(epochs: int) -> float:
    return float(max(1, epochs - 1))


def _listed(classes: tuple[str, ...]) -> str:
    shown = ", ".join(classes[:3]) + (", ..." if len(classes) > 3 else "")
    return f"{len(classes)} classes ({shown})"


class _Images:
    """The first training images of a task, without their annotations; can be iterated repeatedly."""

    def __init__(self, model: TaskModel, data: AnnotatedData, count: int, workers: int) -> None:
        if data.train is None:
            raise DataError("removal is calibrated on training images; open the data with the split train")
        loading = Loading(batch_size=BATCH, workers=workers)
        self._batches = OrderedBatches(data.train, _view(model, is_training=False), loading)
        self._count = min(count, len(data.train))

    def __iter__(self) -> Iterator[Tensor]:
        left = self._count
        for batch in self._batches:
            if left <= 0:
                return
            read = [image for image, target in zip(batch.images, batch.targets, strict=True) if target]
            if read:
                yield torch.stack(read[:left])
            left -= len(read)
