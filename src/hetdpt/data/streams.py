"""Shards of webdataset, read from front to back as timm does it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from PIL.Image import Image
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from hetdpt.core.errors import DataError, first_line
from hetdpt.core.randomness import seeded
from hetdpt.data.augmentation import Transform
from hetdpt.data.folders import choose_split
from hetdpt.data.views import in_mode
from hetdpt.store.atomic import parse_json

INFO = "_info.json"
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Stream:
    """One split in shards, whose images have an order but no numbers.

    What follows from that: no subset, no repeats, no fixed views. Which images come in which order depends on the
    numbers of processes and workers, and is the same for the same numbers. An epoch of training is rounded up to
    whole batches of every worker. timm drops an unreadable image with a line in the log; its name is not known here.
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

        The reader is made to believe that it is alone with these shards: by itself it would show some images twice
        to give every process the same number.
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
            input_img_mode="",  # as they are: timm's own change of mode would make grey of 16 bits white
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
                log.warning("an image of the stream is left out: %s", error)
                continue
            yield view, label


def open_wds(name: str, split: str, root: Path | None) -> Stream:
    """Return a split of the shards in a folder, as its ``_info.json`` tells.

    That is timm's file, with ``splits``, and beside it ``num_classes`` or ``classes`` (names), which timm does not
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
            f"{folder / INFO} lacks something: num_classes and, in each split, filenames and shard_lengths were "
            f"expected ({type(error).__name__}: {error})"
        ) from None
    if missing := [shard for shard in shards if not (folder / shard).is_file()]:
        raise DataError(f"{folder / INFO} names {len(missing)} shards that are not there, for example {missing[0]}")
    return Stream(folder, chosen, tuple(map(str, classes)), shards, lengths)


def _info(folder: Path) -> dict[str, Any]:
    try:
        info = parse_json((folder / INFO).read_text(encoding="utf-8"))
    except OSError:
        raise DataError(f"there is no {folder / INFO}, which says what is in the shards") from None
    except ValueError as error:
        raise DataError(f"{folder / INFO} is not JSON: {first_line(error)}") from None
    if not isinstance(info, dict) or not isinstance(info.get("splits"), dict):
        raise DataError(f"{folder / INFO} has no splits")
    return info
