"""Webdataset shards, read sequentially as timm does, and their batches."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL.Image import Image
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, default_collate, get_worker_info

from hetdpt.adapters.preprocessing import Preprocessing
from hetdpt.core.errors import DataError, first_line
from hetdpt.core.randomness import seeded
from hetdpt.data.augmentation import Transform
from hetdpt.data.folders import choose_split
from hetdpt.data.views import NOTHING, Batch, Loading, check_label, in_mode, mode_of
from hetdpt.store.atomic import parse_json

INFO = "_info.json"
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Stream:
    """One split in shards, whose images have an order but no indices.

    So there are no subsets, repeats or fixed views. The order of the images depends on the numbers of processes and
    workers, and is the same for the same numbers. A training epoch is rounded up to full batches of every worker. timm
    drops an unreadable image with a line in the log; its name is not known here.
    """

    folder: Path
    split: str
    classes: tuple[str, ...]
    shards: tuple[str, ...]
    lengths: tuple[int, ...]
    """How many images are in each shard."""

    @property
    def num_classes(self) -> int:
        return len(self.classes)

    def __len__(self) -> int:
        return sum(self.lengths)

    def training_images(self, mode: str, batch_size: int, rank: int, world: int, workers: int, seed: int) -> Any:
        """Return timm's dataset of the images (PIL, in ``mode``) of one process, shuffled, shared by whole shards."""
        images = self._images(mode, is_training=True, batch_size=batch_size, seed=seed)
        images.reader.dist_rank, images.reader.dist_num_replicas = rank, world
        images.set_loader_cfg(num_workers=max(workers, 1))
        return images

    def evaluation_images(self, mode: str, rank: int, world: int) -> Any:
        """Return timm's dataset of every ``world``-th shard, each image once.

        The reader gets only these shards, as if there were one process: otherwise it would repeat some images to give
        every process the same number.
        """
        images = self._images(mode, is_training=False, batch_size=1, seed=0)
        images.reader.dist_rank, images.reader.dist_num_replicas = 0, 1
        images.reader.split_info.filenames = self.shards[rank::world]
        return images if self.shards[rank::world] else ()

    def lengths_of(self, rank: int, world: int, workers: int) -> list[int]:
        """Return how many images each worker of a process reads in an evaluation."""
        mine = self.lengths[rank::world]
        return [sum(mine[worker :: max(workers, 1)]) for worker in range(max(workers, 1))]

    def _images(self, mode: str, *, is_training: bool, batch_size: int, seed: int) -> Any:
        from timm.data.dataset_factory import create_dataset

        return create_dataset(
            "wds/",
            root=str(self.folder),
            split=self.split,
            is_training=is_training,
            batch_size=batch_size,
            input_img_mode="",  # no conversion: timm's own would turn 16-bit grey into white
            transform=partial(in_mode, mode=mode),
            seed=seed,
        )


class StreamViews(IterableDataset[tuple[Tensor, int]]):
    """The views of a stream's images with their labels; a view depends on the entropy, the worker and the count."""

    def __init__(self, images: Any, transform: Transform, entropy: tuple[int, ...]) -> None:
        self.images, self.transform, self.entropy = images, transform, entropy

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        worker = get_worker_info()
        image: Image
        for count, (image, label) in enumerate(self.images):
            try:
                with seeded(*self.entropy, worker.id if worker else 0, count):
                    view = self.transform(image)
            except OSError as error:  # too thin
                log.warning("an image of the stream is skipped: %s", error)
                continue
            yield view, label


def open_wds(name: str, split: str, root: Path | None, download: bool) -> Stream:
    """Return a split of the shards in a folder, as described in its ``_info.json``.

    That is timm's file with ``splits``, and in addition ``num_classes`` or ``classes`` (names), which timm does not
    need.
    """
    try:
        import webdataset  # noqa: F401
    except ImportError:
        raise DataError(f"wds/{name} needs the package webdataset; pip install hetdpt[data]") from None
    folder = (root or Path()) / name
    info = _info(folder)
    chosen = choose_split(list(info["splits"]), split, f"wds/{name}")
    try:
        classes = info.get("classes") or range(int(info["num_classes"]))
        facts = info["splits"][chosen]
        shards, lengths = tuple(facts["filenames"]), tuple(int(length) for length in facts["shard_lengths"])
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"{folder / INFO} is incomplete; expected num_classes and, in each split, filenames and shard_lengths "
            f"({type(error).__name__}: {error})"
        ) from None
    if missing := [shard for shard in shards if not (folder / shard).is_file()]:
        raise DataError(f"{folder / INFO} lists {len(missing)} shards that do not exist, for example {missing[0]}")
    return Stream(folder, chosen, tuple(map(str, classes)), shards, lengths)


def _info(folder: Path) -> dict[str, Any]:
    try:
        info = parse_json((folder / INFO).read_text(encoding="utf-8"))
    except OSError:
        raise DataError(f"{folder / INFO}, which describes the shards, does not exist") from None
    except ValueError as error:
        raise DataError(f"{folder / INFO} is not JSON: {first_line(error)}") from None
    if not isinstance(info, dict) or not isinstance(info.get("splits"), dict):
        raise DataError(f"{folder / INFO} has no splits")
    return info


class StreamTraining:
    """Full batches of random views; an epoch resumed in its middle reads the skipped images too."""

    def __init__(self, stream: Stream, preprocessing: Preprocessing, transform: Transform, loading: Loading) -> None:
        share = loading.share
        if len(stream.shards) < share.world:
            raise DataError(f"{share.world} processes need as many shards, but there are {len(stream.shards)}")
        self._stream, self._transform, self._mode = stream, transform, mode_of(preprocessing)
        self._batch_size, self._seed, self._share = loading.batch_size, loading.seed, share
        self._workers = min(loading.workers, len(stream.shards) // share.world)  # each has a shard
        self._length = len(self._views(0).images) // loading.batch_size

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
                f"{self._stream.folder} has {count} batches of {self._stream.split}, not {self._length} as _info.json "
                "says; the log lists what could not be read"
            )

    def _views(self, epoch: int) -> StreamViews:
        images = self._stream.training_images(
            self._mode, self._batch_size, self._share.rank, self._share.world, self._workers, self._seed
        )
        images.set_epoch(epoch)
        return StreamViews(images, self._transform, (self._seed, epoch, self._share.rank))


class StreamEvaluation:
    """Every image once, in the same number of full batches for each process, padded with zeros of label -1.

    Unreadable images, whose names are not known here, are named by their split with the last batch.
    """

    def __init__(self, stream: Stream, preprocessing: Preprocessing, transform: Transform, loading: Loading) -> None:
        self._stream, self._transform, self._preprocessing = stream, transform, preprocessing
        self._batch_size, self._share, self._workers = loading.batch_size, loading.share, loading.workers
        share, batch_size = loading.share, loading.batch_size
        each = [stream.lengths_of(rank, share.world, loading.workers) for rank in range(share.world)]
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
            raise DataError(f"{self._where} has more images than its _info.json says; correct that file")

    def _unreadable(self, count: int) -> tuple[str, ...]:
        return tuple(f"{self._where}, unreadable {n} of process {self._share.rank}" for n in range(1, count + 1))

    @property
    def _where(self) -> str:
        return f"{self._stream.folder} {self._stream.split}"

    def _blank(self) -> Batch:
        nothing = torch.full((self._batch_size,), NOTHING)
        return Batch(torch.zeros(self._batch_size, *self._preprocessing.input_size), nothing, nothing)


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
            raise DataError(*batch.args)  # raising the object itself would keep this frame and the workers alive
        yield batch


def _collate(num_classes: int, batch_size: int, samples: list[tuple[Tensor, int]]) -> Batch | DataError:
    """Return a batch padded to its size, or the error, which the main process raises."""
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
