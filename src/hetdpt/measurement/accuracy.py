"""Accuracy: how many images a model gets right, and how sure that is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hetdpt.adapters.heads import logits_of
from hetdpt.adapters.models import num_classes_of
from hetdpt.adapters.preprocessing import preprocessing_of
from hetdpt.core.errors import DataError
from hetdpt.core.modules import evaluating, memory_advice
from hetdpt.core.processes import gather_lists, process_count, rank, sum_over_processes
from hetdpt.core.progress import StepProgress
from hetdpt.data.batches import EvaluationBatches
from hetdpt.data.sources import Data, check_classes, open_data
from hetdpt.data.subset import subset
from hetdpt.data.views import Batch, Share
from hetdpt.measurement.intervals import wilson_interval
from hetdpt.results import Scores

BATCH = 64
Each = Callable[[Tensor, Tensor], None]
"""Called with indices of images (B,), -1 in a stream of shards, and whether the model gets each right (B,)."""


def scores_of(sums: Tensor, unreadable: tuple[str, ...] = ()) -> Scores:
    """Return the scores of sums (right at first, right among five, cross-entropy, images).

    >>> scores_of(torch.tensor([724.0, 910.0, 1200.0, 1000.0]))
    Scores(top1=72.4, top5=91.0, loss=1.2, count=1000, low=69.5..., high=75.0..., unreadable=())
    """
    right, right5, loss, count = sums.tolist()
    low, high = wilson_interval(right, count)
    return Scores(100 * right / count, 100 * right5 / count, loss / count, int(count), low, high, unreadable)


@torch.no_grad()
def measure_accuracy(
    model: nn.Module,
    batches: EvaluationBatches,
    progress: StepProgress | None = None,
    each: Each | None = None,
    watch: Callable[[Batch, Tensor], None] | None = None,
) -> Scores:
    """Return the scores of ``model`` on all images of ``batches``, summed over all processes.

    ``each`` is called for the images that this process has read, ``watch`` with its batches and their logits (B, C).
    """
    weight = next(model.parameters())  # images are moved to its device and dtype
    sums = torch.zeros(4, dtype=torch.float64)
    unreadable: list[str] = []
    with evaluating(model):
        for number, batch in enumerate(batches, 1):
            with memory_advice(f"{len(batch.images)} images at once do not fit in memory; lower --batch-size"):
                logits = logits_of(model(batch.images.to(weight))).float()
            is_read = batch.targets >= 0
            hits, loss = _compare(logits[is_read], batch.targets[is_read].to(weight.device))
            sums += torch.stack([hits[:, 0].sum(), hits.sum(), loss, loss.new_tensor(len(hits))]).cpu().double()
            if each is not None:
                each(batch.indices[is_read], hits[:, 0].cpu())
            unreadable += batch.unreadable
            if watch is not None:
                watch(batch, logits)
            if progress is not None:
                progress(number, len(batches))
    sums, unreadable = sum_over_processes(sums, weight.device), gather_lists(unreadable)
    if not sums[3]:
        raise DataError(f"none of the images can be read, for example {unreadable[0]}; check the files")
    return scores_of(sums, tuple(sorted(set(unreadable))))


def evaluate(
    model: nn.Module,
    data: str | Path | Data,
    *,
    fraction: float | None = None,
    per_class: int | None = None,
    batch_size: int = BATCH,
    workers: int = 0,
    progress: StepProgress | None = None,
    each: Each | None = None,
) -> Scores:
    """Return the scores of ``model`` on the validation images of ``data``, prepared as the model wants them.

    ``data`` is a folder, a name such as ``torch/cifar100``, or ``demo``; ``fraction`` or ``per_class`` take a part.
    ``each`` is called with the images that the model gets right or wrong.

    >>> import timm
    >>> model = timm.create_model("vit_tiny_patch16_224", img_size=16, patch_size=4, depth=1, num_classes=10)
    >>> evaluate(model, "demo").count
    360
    """
    opened = data if isinstance(data, Data) else open_data(str(data), splits=("val",))
    check_classes(opened.num_classes, num_classes_of(model))
    if opened.val is None:
        raise DataError("accuracy is measured on the split val; open the data with it")
    source = opened.val
    if fraction is not None or per_class is not None:
        source = subset(source, fraction=fraction, per_class=per_class)
    share = Share(rank(), process_count())
    batches = EvaluationBatches(source, preprocessing_of(model), batch_size=batch_size, share=share, workers=workers)
    return measure_accuracy(model, batches, progress, each)


def _compare(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return whether each of the five best classes is the right one (B, 5), and the sum of the cross-entropies."""
    best = logits.topk(min(5, logits.shape[1]), dim=1).indices  # (B, 5)
    return best == targets[:, None], F.cross_entropy(logits, targets, reduction="sum")
