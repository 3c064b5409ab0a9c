"""The interface of a split of a dataset, and the splits of data by name. No augmentation, no batches."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from PIL.Image import Image

from hetdpt.core.errors import DataError
from hetdpt.data.folders import SPLITS
from hetdpt.data.streams import Stream
from hetdpt.data.table import source_of

ACCURACY, AGREEMENT = "accuracy", "agreement with the dense model"


class Source(Protocol):
    """One split: images with labels, each read when it is accessed."""

    @property
    def num_classes(self) -> int: ...

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes, by label."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> tuple[Image, int]:
        """Return the decoded image and its label; ``OSError`` if the image cannot be read."""

    def targets(self) -> Sequence[int]:
        """Return all labels, without decoding an image."""

    def name_of(self, index: int) -> str:
        """Return the file of an image, or a description of it, for messages."""


@dataclass(frozen=True)
class Data:
    """The requested splits of a dataset; their labels mean the same."""

    name: str
    train: Source | Stream | None
    val: Source | Stream | None
    num_classes: int
    metric: str = ACCURACY
    """What the part of images is called whose label a model predicts; ``AGREEMENT`` if the dense model labelled them.
    """

    @property
    def is_labelled(self) -> bool:
        """Whether labels were given with the images."""
        return self.metric == ACCURACY

    @cached_property
    def identity(self) -> dict[str, Any]:
        """What identifies this data, wherever it is stored, as plain JSON; no image is read."""
        images = [len(split) if split is not None else None for split in (self.train, self.val)]
        return {"classes": self.num_classes, "images": images, "names": _checksum(self)}

    def facts(self, workers: int | None = None) -> dict[str, Any]:
        """Return what must be the same when a run with this data is resumed, as plain JSON.

        ``workers`` are the processes that read training images. They divide the shards of a stream and so determine the
        order of its images; for other data they make no difference.
        """
        facts = {"data": self.identity}
        return facts | {"workers": workers} if isinstance(self.train, Stream) and workers is not None else facts


def _checksum(data: Data) -> str:
    """Return a checksum of the names of classes and images, and of the labels if they were given, of both splits."""
    found = hashlib.sha256()
    for split in (data.train, data.val):
        if split is None:
            continue
        found.update("\n".join(split.classes).encode())
        if isinstance(split, Stream):
            found.update(str((split.shards, split.lengths)).encode())
        else:
            if data.is_labelled:  # otherwise the device that predicted them may have changed one
                found.update(np.asarray(split.targets(), dtype=np.int64).tobytes())
            found.update("\n".join(Path(split.name_of(index)).name for index in range(len(split))).encode())
    return found.hexdigest()


def open_data(
    name: str, *, splits: tuple[str, ...] = ("train", "val"), root: Path | None = None, download: bool = False
) -> Data:
    """Return the splits of the data called ``name``; ``splits`` are ``train``, ``val`` or both.

    ``name`` is one of the forms in :mod:`hetdpt.data.table`. ``root`` is where a library keeps its datasets, or the
    folder that a relative path starts from; ``download`` lets torchvision download missing data.

    >>> data = open_data("demo")
    >>> len(data.train), len(data.val), data.num_classes
    (1437, 360, 10)
    """
    check_splits(splits)
    row = source_of(name)
    rest = name.removeprefix(row.prefix)
    opened: dict[str, Source | Stream] = {split: row.open(rest, split, root, download) for split in splits}
    check_same_classes(name, [split.classes for split in opened.values()])
    return Data(name, opened.get("train"), opened.get("val"), opened[splits[0]].num_classes)


def check_splits(splits: Sequence[str]) -> None:
    """Raise ``DataError`` unless ``splits`` are ``train``, ``val`` or both."""
    if not splits or not set(splits) <= set(SPLITS):
        raise DataError(f"the splits are train and val, not {', '.join(splits) or 'none'}")


def check_same_classes(name: str, classes: Sequence[tuple[str, ...]]) -> None:
    """Raise ``DataError`` unless the ``classes`` of all splits of the data called ``name`` are the same."""
    for other in classes[1:]:
        if other != classes[0]:
            example = next(iter(sorted(set(other) ^ set(classes[0]))), "their order")
            raise DataError(
                f"train and val of {name} do not have the same classes, for example {example!r}; labels must mean the "
                "same in both"
            )


def check_classes(data_classes: int, model_classes: int) -> None:
    """Raise ``DataError`` if the data does not have as many classes as the model's head.

    >>> check_classes(10, 10)
    """
    if data_classes != model_classes:
        raise DataError(
            f"the data has {data_classes} classes but the model's head has {model_classes}; build the model with "
            f"--num-classes {data_classes} or give the data it was trained on"
        )
