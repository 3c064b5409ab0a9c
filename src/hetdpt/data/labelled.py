"""Some training images with their labels, prepared as for an evaluation; the same ones every time."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from torch import Tensor

from hetdpt.adapters.preprocessing import Preprocessing
from hetdpt.core.errors import DataError
from hetdpt.data.batches import EvaluationBatches
from hetdpt.data.sources import Source
from hetdpt.data.streams import Stream
from hetdpt.data.subset import subset


class LabelledBatches:
    """Batches (images (B, C, H, W), labels (B,)) of ``count`` images or, if there are fewer, of all.

    The classes have their part of them. Of a stream they are the first ones. Images that cannot be read are left out.
    """

    def __init__(
        self,
        source: Source | Stream | None,
        preprocessing: Preprocessing,
        *,
        count: int,
        batch_size: int = 32,
        seed: int = 0,
        workers: int = 0,
    ) -> None:
        if source is None:
            raise DataError("training images with labels were expected; open the data with the split train")
        if not isinstance(source, Stream):
            source = subset(source, fraction=min(1.0, count / len(source)), seed=seed)
        batch_size = min(batch_size, count)
        self._batches = EvaluationBatches(source, preprocessing, batch_size=batch_size, workers=workers)
        self._length = min(len(self._batches), -(-count // batch_size))

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for batch in islice(self._batches, self._length):
            is_read = batch.targets >= 0
            yield batch.images[is_read], batch.targets[is_read]
