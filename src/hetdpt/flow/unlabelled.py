"""Images without labels as ordinary data: their labels are the classes that the dense model predicts.

So everything that takes data works with them, and what is called accuracy is agreement with the dense model.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from hetdpt.adapters.heads import logits_of
from hetdpt.adapters.models import num_classes_of
from hetdpt.adapters.preprocessing import preprocessing_of
from hetdpt.core.errors import DataError
from hetdpt.core.modules import evaluating, memory_advice
from hetdpt.core.processes import process_count, rank, sum_over_processes
from hetdpt.core.progress import StepProgress
from hetdpt.data.batches import EvaluationBatches
from hetdpt.data.images import is_unlabelled, open_images
from hetdpt.data.listed import Listed
from hetdpt.data.sources import AGREEMENT, Data, Source, open_data
from hetdpt.data.streams import Stream
from hetdpt.data.subset import Subset, hold_out_fraction
from hetdpt.data.views import Share
from hetdpt.measurement.accuracy import BATCH

VALIDATION = 0.1  # of the images, to measure on
PREDICTING = "predicting classes with the dense model"


def open_any(
    name: str,
    dense: nn.Module,
    *,
    root: Path | None = None,
    download: bool = False,
    workers: int = 0,
    progress: StepProgress | None = None,
) -> Data:
    """Return the data called ``name``; if it is a folder of images without labels, labelled by ``dense``."""
    if not is_unlabelled(name, root):
        return open_data(name, root=root, download=download)
    return labelled_by(dense, open_images(name, root=root), name, workers=workers, progress=progress)


@torch.no_grad()
def labelled_by(
    dense: nn.Module,
    source: Source | Stream,
    name: str,
    *,
    seed: int = 0,
    workers: int = 0,
    progress: StepProgress | None = None,
) -> Data:
    """Return the images of ``source`` with the classes that ``dense`` predicts; a tenth, 500 at most, is ``val``.

    Unreadable images are left out. Which images are in ``val`` does not depend on the predictions, but on ``seed``.
    """
    if not isinstance(source, Listed):
        raise DataError(f"{name} is a stream of shards, which the dense model cannot label; give a folder of images")
    classes, weight = num_classes_of(dense), next(dense.parameters())
    share = Share(rank(), process_count())
    batches = EvaluationBatches(source, preprocessing_of(dense), batch_size=BATCH, share=share, workers=workers)
    found = torch.zeros(len(source), dtype=torch.int64)  # class + 1; 0 for unreadable images
    with evaluating(dense):
        for number, batch in enumerate(batches, 1):
            with memory_advice(f"{len(batch.images)} images at once do not fit in memory; use a smaller model"):
                predicted = logits_of(dense(batch.images.to(weight))).argmax(1).cpu()
            is_read = batch.targets >= 0
            found[batch.indices[is_read]] = predicted[is_read] + 1
            if progress is not None:
                progress(number, len(batches))
    labels = sum_over_processes(found, weight.device) - 1
    if not bool((labels >= 0).any()):
        raise DataError(f"none of the {len(source)} images of {name} can be read; check the files")
    readable = Subset(source, tuple(torch.nonzero(labels >= 0).flatten().tolist()))
    parts = hold_out_fraction(Data(name, readable, None, source.num_classes), VALIDATION, seed)
    ours = replace(source, classes=tuple(map(str, range(classes))), labels=labels.clamp(min=0).tolist())
    train, val = (Subset(ours, _own_indices(part)) for part in (parts.train, parts.val))
    return Data(name, train, val, classes, AGREEMENT)


def _own_indices(part: Source | Stream | None) -> tuple[int, ...]:
    """Return the indices of a subset of a subset in the source of the latter."""
    assert isinstance(part, Subset)
    assert isinstance(part.source, Subset)
    return tuple(part.source.indices[index] for index in part.indices)


def note_on(data: Data) -> str:
    """Return what to know about data without labels, in a sentence or two."""
    counts = [len(split) if split is not None else 0 for split in (data.train, data.val)]
    return (
        f"{sum(counts)} images of {data.name}, no labels are used: accuracy is agreement with the dense model, on "
        f"{counts[1]} of them that are not trained on"
    )
