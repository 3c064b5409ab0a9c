"""The tasks beyond classification, one row each: the model, its data, how it is trained and measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hetdpt.adapters.preprocessing import Preprocessing
from hetdpt.core.errors import TrainError
from hetdpt.tasks.annotated import AnnotatedData, AnnotatedView
from hetdpt.tasks.boxes import BoxView, open_boxes
from hetdpt.tasks.detector import Detector, DetectorConfig
from hetdpt.tasks.masks import MaskView, open_masks
from hetdpt.tasks.model import TaskModel, TaskScores
from hetdpt.tasks.scores import measure_detection, measure_segmentation
from hetdpt.tasks.segmenter import Segmenter, SegmenterConfig
from hetdpt.training.config import TrainConfig


@dataclass(frozen=True)
class TaskType:
    """One task."""

    metric: str
    """The name of its score."""
    model: type[TaskModel]
    config: type[Any]
    """The settings of ``model``."""
    open: Callable[..., AnnotatedData]
    """Opens data by its name."""
    view: Callable[[tuple[int, int], Preprocessing, bool], AnnotatedView]
    """Makes the views from the canvas, the backbone's preprocessing and whether it is for training."""
    measure: Callable[..., TaskScores]
    training: TrainConfig
    """The paper's settings, or its framework's where the paper does not say."""
    size: tuple[int, int]
    """The canvas by default."""


_PLAIN: dict[str, Any] = {"mixup": 0.0, "cutmix": 0.0, "smoothing": 0.0, "ema_decay": 0.0, "warmup_epochs": 0.0}
TASKS = {
    Detector.task: TaskType(
        "mAP",
        Detector,
        DetectorConfig,
        open_boxes,
        BoxView,
        measure_detection,
        # Paper, appendix "Experiment Setup"; the step after epoch 11 and the clipping are Deformable DETR's.
        TrainConfig(
            epochs=12,
            batch_size=1,
            lr=1e-4,
            lr_batch=8,
            backbone_lr=0.5,
            weight_decay=0.05,
            schedule="step",
            decay_epochs=11.0,
            clip_grad=0.1,
            **_PLAIN,
        ),
        (800, 800),
    ),
    Segmenter.task: TaskType(
        "mIoU",
        Segmenter,
        SegmenterConfig,
        open_masks,
        MaskView,
        measure_segmentation,
        # Paper, as above; 160,000 updates of 16 images and the weight decay are the framework's.
        TrainConfig(
            epochs=127,
            batch_size=2,
            optimizer="momentum",  # SGD without Nesterov, in the words of timm
            lr=0.01,
            lr_batch=16,
            weight_decay=5e-4,
            schedule="poly",
            final_lr=0.01,
            **_PLAIN,
        ),
        (512, 512),
    ),
}


def task_called(name: str) -> TaskType:
    """Return the row called ``name``.

    >>> task_called("detection").metric
    'mAP'
    """
    if name not in TASKS:
        raise TrainError(f"the tasks are {' and '.join(TASKS)}, not {name!r}")
    return TASKS[name]
