"""Scores of detectors (average precision, computed by pycocotools) and of segmenters (mIoU, mAcc, aAcc)."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torchmetrics.functional.classification import multiclass_confusion_matrix

from hetdpt.core.errors import DataError
from hetdpt.core.processes import gather_lists, sum_over_processes
from hetdpt.data.batches import OrderedBatches
from hetdpt.tasks.annotated import AnnotatedBatch, AnnotatedSource
from hetdpt.tasks.boxes import Objects
from hetdpt.tasks.detector import Detections, Detector, detect
from hetdpt.tasks.masks import IGNORED
from hetdpt.tasks.model import measure_batches
from hetdpt.tasks.segmenter import segment


@dataclass(frozen=True)
class DetectionScores:
    """Scores of a detector, in percent; None where there is no object of that kind.

    ``ap`` is the mean over classes and over the overlap (intersection over union) of 50, 55, ..., 95 % that a box must
    have to count as found.
    """

    ap: float
    ap50: float
    """At an overlap of 50 %."""
    ap75: float
    """At an overlap of 75 %."""
    ap_small: float | None
    """For objects below 32 x 32 pixels."""
    ap_medium: float | None
    """For objects below 96 x 96 pixels."""
    ap_large: float | None
    """For larger objects."""
    recall: float
    """Fraction of objects found by 100 detections per image, mean over classes and overlaps (AR100)."""
    by_class: dict[str, float | None]
    """``ap`` of each class."""
    count: int
    """Images that were read and scored."""
    unreadable: tuple[str, ...] = ()
    """Files that could not be read and were not scored."""

    @property
    def score(self) -> float:
        """The one number: ``ap``, which is called mAP."""
        return self.ap

    def record(self) -> dict[str, Any]:
        """Return the numbers as JSON values."""
        return asdict(self)


@dataclass(frozen=True)
class Found:
    """The detections in an image and its true objects."""

    truth: Objects
    boxes: npt.NDArray[np.float64]
    """(n, 4): left, top, width and height in pixels."""
    scores: npt.NDArray[np.float64]
    """(n,)."""
    labels: npt.NDArray[np.int64]
    """(n,)."""


def measure_detection(
    model: nn.Module,
    batches: OrderedBatches,
    source: AnnotatedSource,
    progress: Callable[[int, int], None] | None = None,
) -> DetectionScores:
    """Return the scores of ``model`` on all images of ``batches``, those of all processes together."""
    assert isinstance(model, Detector)
    device = next(model.parameters()).device
    found: list[Found] = []

    def measure(batch: AnnotatedBatch) -> int:
        detections = detect(model, batch.to(device))
        here = [_found(target, one) for target, one in zip(batch.targets, detections, strict=True) if target]
        found.extend(here)
        return len(here)

    unreadable = measure_batches(batches, measure, progress)
    return average_precision(gather_lists(found), source.classes, unreadable=unreadable)


def average_precision(
    found: Sequence[Found], classes: Sequence[str], *, unreadable: Sequence[str] = ()
) -> DetectionScores:
    """Return the scores of the detections in images.

    Boxes around crowds need not be found, and detections inside them do not count as wrong.
    """
    found = sorted(found, key=lambda one: one.truth.number)
    evaluation = _evaluated(found, classes)
    means: list[float | None] = [None if value < 0 else 100 * float(value) for value in evaluation.stats]
    ap, ap50, ap75, small, medium, large, _, _, recall = means[:9]
    if ap is None or ap50 is None or ap75 is None or recall is None:
        raise DataError(f"the {len(found)} images have no objects; measure on images with boxes")
    precision = evaluation.eval["precision"][:, :, :, 0, -1]  # overlaps, recalls, classes; all sizes
    by_class = {
        name: None if (part := precision[:, :, label]).max() < 0 else 100 * float(part[part >= 0].mean())
        for label, name in enumerate(classes)
    }
    return DetectionScores(ap, ap50, ap75, small, medium, large, recall, by_class, len(found), tuple(unreadable))


def _evaluated(found: Sequence[Found], classes: Sequence[str]) -> Any:
    """Return pycocotools' evaluation, without its printed output."""
    from pycocotools.cocoeval import COCOeval

    truth = [
        _entry(one.truth.number, box, label, area=area, iscrowd=int(crowd))
        for one in found
        for box, label, area, crowd in zip(
            one.truth.boxes, one.truth.labels, one.truth.areas, one.truth.crowd, strict=True
        )
    ]
    answers = [
        _entry(one.truth.number, box, label, area=box[2] * box[3], score=score)
        for one in found
        for box, label, score in zip(one.boxes, one.labels, one.scores, strict=True)
    ]
    numbers = [one.truth.number for one in found]
    with redirect_stdout(io.StringIO()):
        evaluation = COCOeval(_coco(truth, numbers, classes), _coco(answers, numbers, classes), "bbox")
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return evaluation


def _coco(entries: list[dict[str, Any]], images: list[int], classes: Sequence[str]) -> Any:
    from pycocotools.coco import COCO

    coco = COCO()
    coco.dataset = {
        "images": [{"id": number} for number in images],
        "categories": [{"id": label, "name": name} for label, name in enumerate(classes)],
        # Numbered from 1: pycocotools takes 0 for "not matched".
        "annotations": [{**entry, "id": number} for number, entry in enumerate(entries, 1)],
    }
    coco.createIndex()
    return coco


def _entry(image: int, box: npt.NDArray[np.float64], label: int, **others: Any) -> dict[str, Any]:
    return {"image_id": image, "bbox": box.tolist(), "category_id": int(label), "iscrowd": 0, **others}


def _found(target: Mapping[str, Tensor], detections: Detections) -> Found:
    known = {name: target[f"truth_{name}"].numpy() for name in ("boxes", "labels", "areas", "crowd")}
    corners = detections.boxes.cpu().double().numpy()
    boxes = np.concatenate([corners[:, :2], corners[:, 2:] - corners[:, :2]], axis=1)
    scores, labels = detections.scores.cpu().double().numpy(), detections.labels.cpu().numpy()
    return Found(Objects(int(target["image"]), **known), boxes, scores, labels)


@dataclass(frozen=True)
class OverlapScores:
    """Scores of a segmenter, in percent.

    With n_ij pixels of class i that are predicted as class j, the IoU of class i is
    n_ii / (sum_j n_ij + sum_j n_ji - n_ii) and its accuracy n_ii / sum_j n_ij. Ignored pixels are in no sum.

    >>> OverlapScores.of(torch.tensor([[3, 1], [0, 4]]), ("cat", "dog"))
    OverlapScores(miou=77.5, macc=87.5, aacc=87.5, iou={'cat': 75.0, 'dog': 80.0}, unreadable=())
    """

    miou: float
    """Mean IoU of the classes that occur in the masks or in the predictions."""
    macc: float
    """Mean accuracy of the classes that occur in the masks."""
    aacc: float
    """Fraction of pixels whose class is right."""
    iou: dict[str, float | None]
    """IoU of each class; None for a class that occurs neither in the masks nor in the predictions."""
    unreadable: tuple[str, ...] = ()
    """Files that could not be read and were not scored."""

    @classmethod
    def of(cls, counts: Tensor, classes: Sequence[str], unreadable: Sequence[str] = ()) -> OverlapScores:
        """Return the scores of ``counts`` (classes, classes): pixels by true class and by predicted class."""
        counts = counts.double().cpu()
        right, there, taken = counts.diag(), counts.sum(dim=1), counts.sum(dim=0)
        if not there.sum():
            raise DataError("all pixels of the masks are ignored, so there is nothing to score; check the masks")
        union = there + taken - right
        iou, accuracy = 100 * right / union, 100 * right / there  # nan where a class does not occur
        return cls(
            miou=float(iou.nanmean()),
            macc=float(accuracy.nanmean()),
            aacc=float(100 * right.sum() / there.sum()),
            iou={
                name: value if known else None
                for name, value, known in zip(classes, iou.tolist(), (union > 0).tolist(), strict=True)
            },
            unreadable=tuple(sorted(set(unreadable))),
        )

    @property
    def score(self) -> float:
        """The mean IoU."""
        return self.miou

    def record(self) -> dict[str, Any]:
        """Return the numbers as JSON values."""
        return asdict(self)


@torch.no_grad()
def measure_segmentation(
    model: nn.Module,
    batches: OrderedBatches,
    source: AnnotatedSource,
    progress: Callable[[int, int], None] | None = None,
) -> OverlapScores:
    """Return the scores of ``model`` on all images of ``batches``, at the size of their files, over all processes."""
    device = next(model.parameters()).device
    counts = torch.zeros(len(source.classes), len(source.classes), dtype=torch.long, device=device)

    def measure(batch: AnnotatedBatch) -> int:
        found = segment(model, batch)
        masks = (target["original"].to(device) for target in batch.targets if target)
        for classes, mask in zip(found, masks, strict=True):
            counts.add_(count(classes, mask, len(counts)))
        return len(found)

    unreadable = measure_batches(batches, measure, progress)
    return OverlapScores.of(sum_over_processes(counts), source.classes, unreadable)


def count(found: Tensor, mask: Tensor, classes: int) -> Tensor:
    """Return the number of pixels (classes, classes) by true and by predicted class, without ignored ones."""
    counts: Tensor = multiclass_confusion_matrix(
        found.flatten(), mask.flatten().long(), classes, ignore_index=IGNORED, validate_args=False
    )
    return counts
