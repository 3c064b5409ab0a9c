"""Scores of a segmenter: mIoU, mAcc and aAcc, over all pixels of all images together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics.functional.classification import multiclass_confusion_matrix

from hetdpt.core.errors import DataError
from hetdpt.core.processes import sum_over_processes
from hetdpt.data.batches import OrderedBatches
from hetdpt.tasks.annotated import AnnotatedBatch, AnnotatedSource
from hetdpt.tasks.masks import IGNORED
from hetdpt.tasks.model import measure_batches
from hetdpt.tasks.segmenter import segment


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
