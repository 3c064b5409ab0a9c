"""Batches of a stream of shards. Its workers start anew for each iteration, so that nothing before has a part in it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import islice

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, default_collate

from hetdpt.adapters.preprocessing import Preprocessing
from hetdpt.core.errors import DataError
from hetdpt.data.augmentation import Transform
from hetdpt.data.batch import NOTHING, Batch, Share, check_label
from hetdpt.data.streams import Stream, StreamViews
from hetdpt.data.views import mode_of


class StreamTraining:
    """Whole batches of random views; an epoch begun in its middle reads what it leaves out."""

    def __init__(
        self,
        stream: Stream,
        preprocessing: Preprocessing,
        transform: Transform,
        batch_size: int,
        seed: int,
        share: Share,
        workers: int,
    ) -> None:
        if len(stream.shards) < share.world:
            raise DataError(f"{share.world} processes need as many shards, but there are {len(stream.shards)}")
        self._stream, self._transform, self._mode = stream, transform, mode_of(preprocessing)
        self._batch_size, self._seed, self._share = batch_size, seed, share
        self._workers = min(workers, len(stream.shards) // share.world)  # one without a shard would end at once
        self._length = len(self._views(0).images) // batch_size

    def __len__(self) -> int:
        return self._length

    def epoch(self, number: int, start: int = 0) -> Iterator[Batch]:
        return islice(self._whole(number), start, None)

    def _whole(self, epoch: int) -> Iterator[Batch]:
        seed = int(np.random.SeedSequence((self._seed, epoch)).generate_state(1)[0])
        collate = partial(_collate, self._stream.num_classes, self._batch_size)
        count = 0
        for batch in _load(self._views(epoch), self._batch_size, self._workers, collate, seed):
            count += 1
            yield batch
        if count != self._length:
            raise DataError(
                f"{self._stream.folder} gave {count} batches of {self._stream.split}, not the {self._length} that its "
                "shards promise; the log names what could not be read"
            )

    def _views(self, epoch: int) -> StreamViews:
        images = self._stream.training_images(
            self._mode, self._batch_size, self._share.rank, self._share.world, self._workers, self._seed
        )
        images.set_epoch(epoch)
        return StreamViews(images, self._transform, (self._seed, epoch, self._share.rank))


class StreamEvaluation:
    """Every image once, in the same number of whole batches for each process, filled up with zeros of label -1.

    Unreadable images, whose names are not known here, are named by their split with the last batch.
    """

    def __init__(
        self,
        stream: Stream,
        preprocessing: Preprocessing,
        transform: Transform,
        batch_size: int,
        share: Share,
        workers: int,
    ) -> None:
        self._stream, self._transform, self._preprocessing = stream, transform, preprocessing
        self._batch_size, self._share, self._workers = batch_size, share, workers
        each = [stream.lengths_of(rank, share.world, workers) for rank in range(share.world)]
        self._length = max(sum(math.ceil(length / batch_size) for length in lengths) for lengths in each)
        self._promised = sum(each[share.rank])

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Batch]:
        images = self._stream.evaluation_images(mode_of(self._preprocessing), self._share.rank, self._share.world)
        views = StreamViews(images, self._transform, ())
        collate = partial(_collate, self._stream.num_classes, self._batch_size)
        batches = _load(views, self._batch_size, self._workers, collate, 0)
        missing = self._promised
        for number in range(self._length):
            batch = next(batches, None) or self._blank()
            missing -= int((batch.targets != NOTHING).sum())
            is_last = number == self._length - 1
            yield replace(batch, unreadable=self._unreadable(missing)) if is_last else batch
        if missing < 0 or next(batches, None) is not None:
            raise DataError(f"{self._where} has more images than its shards promise; correct its _info.json")

    def _unreadable(self, count: int) -> tuple[str, ...]:
        return tuple(f"{self._where}, unreadable {n} of process {self._share.rank}" for n in range(1, count + 1))

    @property
    def _where(self) -> str:
        return f"{self._stream.folder} {self._stream.split}"

    def _blank(self) -> Batch:
        nothing = torch.full((self._batch_size,), NOTHING)
        return Batch(torch.zeros(self._batch_size, *self._preprocessing.input_size), nothing, nothing)


Sample = tuple[Tensor, int]


def _load(
    views: StreamViews, batch_size: int, workers: int, collate: partial[Batch | DataError], seed: int
) -> Iterator[Batch]:
    loader = DataLoader(
        views,
        batch_size,
        num_workers=workers,
        collate_fn=collate,
        pin_memory=torch.cuda.is_available(),
        generator=torch.Generator().manual_seed(seed),
    )
    for batch in loader:
        if isinstance(batch, DataError):
            raise DataError(*batch.args)  # raised itself, it would hold this frame and the workers
        yield batch


def _collate(num_classes: int, batch_size: int, samples: list[Sample]) -> Batch | DataError:
    """Return a batch filled up to its size; or the error, which the main process raises."""
    views, labels = [view for view, _ in samples], [label for _, label in samples]
    try:
        for label in labels:
            check_label(label, num_classes, "an image of the stream")
    except DataError as error:
        return error
    missing = batch_size - len(samples)
    views += [torch.zeros_like(views[0])] * missing
    targets = torch.tensor(labels + [NOTHING] * missing)
    return Batch(default_collate(views), targets, torch.full((batch_size,), NOTHING))
