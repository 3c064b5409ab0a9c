"""Batches of views, which do not depend on what reads them: workers, processes, a resumed run.

A training view is a function of the seed, the epoch, the place in the epoch and the image, and of nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from hetdpt.adapters.preprocessing import Preprocessing
from hetdpt.core.errors import DataError
from hetdpt.data.augmentation import Augmentation, evaluation_transform, training_transform
from hetdpt.data.sources import Source
from hetdpt.data.streams import Stream, StreamEvaluation, StreamTraining
from hetdpt.data.views import NOTHING, Batch, Key, Labelled, Loader, Loading, Pictures, Preparation, Share, Views

ALONE = Share()
ONCE = Augmentation(repeats=1)


class RandomBatches:
    """Batches of random views of pictures, epoch by epoch, in an order that depends on the seed and the epoch alone.

    The batch size is that of one process: ``world`` processes together see in each step what one process with
    ``world`` times the batch size would see, view for view. Only one of its iterators may be in use at a time.
    """

    def __init__(
        self, source: Pictures, preparation: Preparation, loading: Loading, augmentation: Augmentation = ONCE
    ) -> None:
        self._loading, self._augmentation, self._count = loading, augmentation, len(source)
        self._length = self._count // (loading.share.world * loading.batch_size)
        self._loader = Loader(Views(source, preparation, is_replaced=True), loading.workers)
        _require_batch(self._length, self._count, loading)

    def __len__(self) -> int:
        return self._length

    def epoch(self, number: int, start: int = 0) -> Iterator[Any]:
        """Yield the batches of an epoch from batch ``start`` on, the same as in the whole epoch."""
        return self._load(self._view(number), self._keys(number, start))

    def in_order(self, view: int = 0) -> Iterator[Any]:
        """Yield a fixed view of every image once, in the order of the source, shared as in an evaluation."""
        if not view < self._augmentation.views:
            raise DataError("only fixed views can be read in order; set views to how many an image has")
        parts = parts_of(self._count, self._loading.batch_size, self._loading.share)
        return self._load(view, ([self._key(view, 0, index) for index in part] for part in parts))

    def _load(self, view: int, keys: Iterable[list[Key]]) -> Iterator[Any]:
        for batch in self._loader.load(keys):
            yield replace(batch, view=view)

    def _view(self, epoch: int) -> int:
        """Return which of the fixed views of an image an epoch has; 0 if they are not fixed."""
        return epoch % self._augmentation.views if self._augmentation.views else 0

    def _keys(self, epoch: int, start: int) -> Iterator[list[Key]]:
        order = order_of(self._count, self._loading.seed, epoch, self._augmentation.repeats)
        for places in places_of(self._loading.batch_size, self._loading.share, start, self._length):
            yield [self._key(epoch, place, order[place]) for place in places]

    def _key(self, epoch: int, place: int, index: int) -> Key:
        if index == NOTHING or self._augmentation.is_plain:
            return Key(index)
        seed = self._loading.seed
        return Key(index, (seed, self._view(epoch), index) if self._augmentation.views else (seed, epoch, place, index))


class OrderedBatches:
    """Every picture once over all processes, in the same number of batches of the same sizes for each.

    Where a process has fewer images than another, it gets blank ones.
    """

    def __init__(self, source: Pictures, preparation: Preparation, loading: Loading) -> None:
        self._parts = parts_of(len(source), loading.batch_size, loading.share)
        self._loader = Loader(Views(source, preparation, is_replaced=False), loading.workers)

    def __len__(self) -> int:
        return len(self._parts)

    def __iter__(self) -> Iterator[Any]:
        return self._loader.load([Key(index) for index in part] for part in self._parts)


class TrainingBatches:
    """Batches of random views of images with labels, epoch by epoch; see ``RandomBatches``, and ``Stream``."""

    def __init__(
        self,
        source: Source | Stream,
        preprocessing: Preprocessing,
        augmentation: Augmentation,
        *,
        batch_size: int,
        seed: int = 0,
        share: Share = ALONE,
        workers: int = 0,
    ) -> None:
        loading = Loading(batch_size=batch_size, seed=seed, share=share, workers=workers)
        self.count = len(source)
        """Images of the source."""
        transform = training_transform(preprocessing, augmentation)
        self._batches: RandomBatches | StreamTraining
        if isinstance(source, Stream):
            if augmentation.repeats > 1 or augmentation.views:
                raise DataError("a stream of shards has neither repeats nor fixed views; set repeats to 1, views to 0")
            self._batches = StreamTraining(source, preprocessing, transform, loading)
            _require_batch(len(self._batches), self.count, loading)
        else:
            preparation = Labelled(preprocessing, transform, source.num_classes)
            self._batches = RandomBatches(source, preparation, loading, augmentation)

    def __len__(self) -> int:
        """Return the batches of an epoch for this process; images that do not fill one are left out."""
        return len(self._batches)

    def epoch(self, number: int, start: int = 0) -> Iterator[Batch]:
        """Yield the batches of an epoch from batch ``start`` on, the same as in the whole epoch."""
        return self._batches.epoch(number, start)

    def in_order(self, view: int = 0) -> Iterator[Batch]:
        """Yield a fixed view of every image once, in the order of the source, shared as in an evaluation."""
        assert isinstance(self._batches, RandomBatches), "a stream has no fixed views"
        return self._batches.in_order(view)


class EvaluationBatches:
    """Every image with its label once over all processes; label -1 where a process has fewer than others."""

    def __init__(
        self,
        source: Source | Stream,
        preprocessing: Preprocessing,
        *,
        batch_size: int,
        share: Share = ALONE,
        workers: int = 0,
    ) -> None:
        loading = Loading(batch_size=batch_size, share=share, workers=workers)
        transform = evaluation_transform(preprocessing)
        self._batches: OrderedBatches | StreamEvaluation
        if isinstance(source, Stream):
            self._batches = StreamEvaluation(source, preprocessing, transform, loading)
        else:
            self._batches = OrderedBatches(source, Labelled(preprocessing, transform, source.num_classes), loading)

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Batch]:
        return iter(self._batches)


def order_of(count: int, seed: int, epoch: int, repeats: int = 1) -> list[int]:
    """Return the images of an epoch for all processes together, each ``repeats`` times in a row."""
    from timm.data.distributed_sampler import RepeatAugSampler

    sampler = RepeatAugSampler(range(count), 1, 0, num_repeats=repeats, selected_round=0)
    # The sampler seeds its shuffle with the epoch's number.
    sampler.set_epoch(int(np.random.SeedSequence((seed, epoch)).generate_state(1)[0]))
    return list(sampler)


def places_of(batch_size: int, share: Share, start: int, length: int) -> Iterator[range]:
    """Yield the positions in an epoch of each batch of a process, from batch ``start`` of ``length`` on."""
    step = batch_size * share.world
    for first in range(start * step, length * step, step):
        yield range(first + share.rank, first + step, share.world)


def parts_of(count: int, batch_size: int, share: Share) -> list[list[int]]:
    """Return the indices of each batch of a process, -1 where it has fewer than others.

    >>> parts_of(5, 2, Share(0, 2)), parts_of(5, 2, Share(1, 2))
    ([[0, 2], [4]], [[1, 3], [-1]])
    """
    each = math.ceil(count / share.world)
    mine = [*range(share.rank, count, share.world)]
    mine += [NOTHING] * (each - len(mine))
    return [mine[start : start + batch_size] for start in range(0, each, batch_size)]


def _require_batch(length: int, count: int, loading: Loading) -> None:
    if length:
        return
    world = loading.share.world
    where, largest = f" on each of {world} processes" if world > 1 else "", count // world
    hint = f"use a batch size of at most {largest}" if largest else f"use at most {count} processes"
    raise DataError(f"{count} images do not fill a batch of {loading.batch_size}{where}; {hint}")
