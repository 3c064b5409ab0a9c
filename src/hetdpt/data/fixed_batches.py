"""A fixed choice of images, prepared as for an evaluation: the same ones every time, with labels or without."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import islice

import torch
from torch import Tensor

from hetdpt.adapters.preprocessing import Preprocessing
from hetdpt.core.errors import DataError
from hetdpt.data.batches import EvaluationBatches
from hetdpt.data.sources import Source
from hetdpt.data.streams import Stream
from hetdpt.data.subset import Subset, balanced_order, subset
from hetdpt.data.views import NOTHING

KEPT = 1 << 30  # bytes of prepared images that are kept in memory


class ImageBatches:
    """Batches of ``count`` images (B, C, H, W), prepared for a model, the same ones in every iteration.

    They are chosen by the seed, with the classes in proportion if there are any; ``start`` skips the first ones of that
    choice. From a stream of shards they are the first ones. Unreadable images are skipped. If they take at most
    ``KEPT`` bytes, they are read once and kept.
    """

    def __init__(
        self,
        source: Source | Stream,
        preprocessing: Preprocessing,
        *,
        count: int,
        start: int = 0,
        batch_size: int = 32,
        seed: int = 0,
        workers: int = 0,
    ) -> None:
        if count < 1:
            raise DataError(f"at least 1 image is needed, not {count}")
        if len(source) <= start:
            raise DataError(f"there are only {len(source)} images; more than {start} are needed")
        self.count, self.start = min(count, len(source) - start), start
        chosen: Source | Stream = source
        if not isinstance(source, Stream):
            order = balanced_order(source.targets(), seed)
            chosen = Subset(source, tuple(order[start : start + self.count]))
        self._batches = EvaluationBatches(chosen, preprocessing, batch_size=batch_size, workers=workers)
        self._skip = start if isinstance(source, Stream) else 0
        self._batch_size = batch_size
        self._is_small = 4 * self.count * math.prod(preprocessing.input_size) <= KEPT  # float32
        self._kept: list[Tensor] | None = None
        self._example = ""

    def __len__(self) -> int:
        return -(-self.count // self._batch_size)

    def __iter__(self) -> Iterator[Tensor]:
        if self._kept is None and self._is_small:
            self._kept = list(self._read())
        return iter(self._kept) if self._kept is not None else self._read()

    def _read(self) -> Iterator[Tensor]:
        """Yield full batches and the rest at the end; ``DataError`` if no image can be read."""
        rest: Tensor | None = None
        for images in self._readable():
            rest = images if rest is None else torch.cat([rest, images])
            while len(rest) >= self._batch_size:
                yield rest[: self._batch_size]
                rest = rest[self._batch_size :]
        if rest is None:
            raise DataError(f"none of {self.count} images can be read{self._example}; check the files")
        if len(rest):
            yield rest

    def _readable(self) -> Iterator[Tensor]:
        skip, left = self._skip, self.count
        for batch in self._batches:
            images = batch.images[batch.targets != NOTHING]
            if batch.unreadable:
                self._example = f", for example {batch.unreadable[0]}"
            passed, images = min(skip, len(images)), images[skip:][:left]
            skip, left = skip - passed, left - len(images)
            if len(images):
                yield images
            if not left:
                return


class LabelledBatches:
    """Batches (images (B, C, H, W), labels (B,)) of ``count`` images or, if there are fewer, of all.

    The classes are in proportion. From a stream they are the first ones. Unreadable images are skipped.
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
