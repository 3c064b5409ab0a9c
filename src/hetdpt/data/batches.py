"""Batches of views, the same ones whatever reads them: workers, processes, a run that was resumed.

A training view is a function of the seed, the epoch, the place in the epoch and the image, and of nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from hetdpt.adapters.preprocessing import Preprocessing
from hetdpt.core.errors import DataError
from hetdpt.data.augmentation import Augmentation, evaluation_transform, training_transform
from hetdpt.data.sources import Source
from hetdpt.data.streams import Stream, StreamEvaluation, StreamTraining
from hetdpt.data.views import NOTHING, Batch, Key, Labelled, Loader, Share, Views

__all__ = ["Batch", "EvaluationBatches", "Share", "TrainingBatches"]

ALONE = Share()


class TrainingBatches:
    """Batches of random views, epoch by epoch, in an order that depends on the seed and the epoch alone.

    ``batch_size`` is that of one process: ``world`` processes together see in each step what one process with
    ``world * batch_size`` would see, view for view. Only one of its iterators may be in use at a time.
    """

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
        check_numbers(batch_size=batch_size, workers=workers, seed=seed)
        self._augmentation, self._seed, self._share = augmentation, seed, share
        self.count = len(source)
        """Images of the source."""
        self._batch_size = batch_size
        transform = training_transform(preprocessing, augmentation)
        self._stream: StreamTraining | None = None
        if isinstance(source, Stream):
            _check_streamable(augmentation)
            self._stream = StreamTraining(source, preprocessing, transform, batch_size, seed, share, workers)
        else:
            preparation = Labelled(preprocessing, transform, source.num_classes)
            self._loader = Loader(Views(source, preparation, is_replaced=True), workers)
        self._length = len(self._stream) if self._stream else self.count // (share.world * batch_size)
        if not self._length:
            raise DataError(too_few(self.count, batch_size, share.world))

    def __len__(self) -> int:
        """Return the batches of an epoch for this process; images that do not fill one are left out."""
        return self._length

    def epoch(self, number: int, start: int = 0) -> Iterator[Batch]:
        """Yield the batches of an epoch from batch ``start`` on: the very ones of the whole epoch."""
        if self._stream:
            return self._stream.epoch(number, start)
        return self._loader.load(self._keys(number, start))

    def in_order(self) -> Iterator[Batch]:
        """Yield the fixed view of every image once, in the order of the source, shared as in an evaluation."""
        if not self._augmentation.fixed_views:
            raise DataError("views that are not fixed have no order of their own; set fixed_views")
        parts = parts_of(self.count, self._batch_size, self._share)
        return self._loader.load([self._key(0, 0, index) for index in part] for part in parts)

    def _keys(self, epoch: int, start: int) -> Iterator[list[Key]]:
        order = order_of(self.count, self._seed, epoch, self._augmentation.repeats)
        for places in places_of(self._batch_size, self._share, start, self._length):
            yield [self._key(epoch, place, order[place]) for place in places]

    def _key(self, epoch: int, place: int, index: int) -> Key:
        if index == NOTHING or self._augmentation.is_plain:
            return Key(index)
        entropy = (self._seed, index) if self._augmentation.fixed_views else (self._seed, epoch, place, index)
        return Key(index, entropy)


class EvaluationBatches:
    """Every image once over all processes, in the same number of batches of the same sizes for each.

    Where a process has fewer images than another, it gets zeros with label -1.
    """

    def __init__(
        self,
        source: Source | Stream,
        preprocessing: Preprocessing,
        *,
        batch_size: int,
        share: Share = ALONE,
        workers: int = 0,
    ) -> None:
        check_numbers(batch_size=batch_size, workers=workers)
        transform = evaluation_transform(preprocessing)
        self._stream: StreamEvaluation | None = None
        if isinstance(source, Stream):
            self._stream = StreamEvaluation(source, preprocessing, transform, batch_size, share, workers)
        else:
            self._parts = parts_of(len(source), batch_size, share)
            preparation = Labelled(preprocessing, transform, source.num_classes)
            self._loader = Loader(Views(source, preparation, is_replaced=False), workers)

    def __len__(self) -> int:
        return len(self._stream) if self._stream else len(self._parts)

    def __iter__(self) -> Iterator[Batch]:
        if self._stream:
            return iter(self._stream)
        return self._loader.load([Key(index) for index in part] for part in self._parts)


def order_of(count: int, seed: int, epoch: int, repeats: int = 1) -> list[int]:
    """Return the images of an epoch for all processes together, each ``repeats`` times in a row."""
    from timm.data.distributed_sampler import RepeatAugSampler

    sampler = RepeatAugSampler(range(count), 1, 0, num_repeats=repeats, selected_round=0)
    # The sampler seeds its shuffle with what it takes for the epoch.
    sampler.set_epoch(int(np.random.SeedSequence((seed, epoch)).generate_state(1)[0]))
    return list(sampler)


def places_of(batch_size: int, share: Share, start: int, length: int) -> Iterator[range]:
    """Yield the places in an epoch of each batch of a process, from batch ``start`` of ``length`` on."""
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


def too_few(count: int, batch_size: int, world: int) -> str:
    where = f" on each of {world} processes" if world > 1 else ""
    largest = count // world
    hint = f"use a batch size of at most {largest}" if largest else f"use at most {count} processes"
    return f"{count} images do not fill a batch of {batch_size}{where}; {hint}"


def check_numbers(*, batch_size: int, workers: int, seed: int = 0) -> None:
    if batch_size < 1:
        raise DataError(f"a batch has at least 1 image, not {batch_size}")
    if workers < 0 or seed < 0:
        raise DataError(f"workers and seed are at least 0, not {workers} and {seed}")


def _check_streamable(augmentation: Augmentation) -> None:
    if augmentation.repeats > 1 or augmentation.fixed_views:
        raise DataError("a stream of shards has neither repeats nor fixed views; set repeats to 1 and fixed_views off")
