"""Images without labels, for what only looks at a model's own answers: any folder of images, or the split ``train``."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from PIL.Image import Image
from torch import Tensor

from hetdpt.adapters.preprocessing import Preprocessing
from hetdpt.core.errors import DataError
from hetdpt.data.batch import NOTHING
from hetdpt.data.batches import EvaluationBatches
from hetdpt.data.folders import EXTENSIONS, SPLITS
from hetdpt.data.listed import Listed, decode
from hetdpt.data.sources import DEMO, Source, open_data
from hetdpt.data.streams import Stream
from hetdpt.data.subset import Subset, balanced_order

KEPT = 1 << 30  # bytes of prepared images that are kept for the next time
SCHEMES = ("torch", "hfds", "wds")


def open_images(name: str, *, root: Path | None = None, download: bool = False) -> Source | Stream:
    """Return the images of the data called ``name``: those of its split ``train`` or, of a folder, all that are in it.

    For the names see ``open_data``. Folders inside a folder count as classes, but need not: neither must they be the
    same in all splits, nor must there be any.
    """
    folder = (root or Path()) / name
    is_folder = name != DEMO and name.partition("/")[0] not in SCHEMES and folder.is_dir()
    if not is_folder:
        split = open_data(name, splits=("train",), root=root, download=download).train
        assert split is not None
        return split
    files = images_in(folder)
    folders = [str(Path(file).parent) for file in files]
    classes = sorted(set(folders))
    numbers = {inner: number for number, inner in enumerate(classes)}
    return Listed(tuple(classes), [numbers[inner] for inner in folders], partial(_read, files), partial(_name, files))


def images_in(folder: Path) -> list[str]:
    """Return the images in ``folder``, or in its split ``train`` if it has one, by name; ``DataError`` without any."""
    place = next((folder / split for split in SPLITS["train"] if (folder / split).is_dir()), folder)
    files = sorted(_images_below(place))
    if not files:
        raise DataError(f"{place} has no images; files that end in {', '.join(EXTENSIONS)} were expected")
    return files


def _images_below(folder: Path) -> Iterator[str]:
    """Yield the images in ``folder`` and the folders in it, links too; hidden ones are passed over."""
    for place, folders, files in os.walk(folder, followlinks=True):
        folders[:] = [inner for inner in folders if not inner.startswith(".")]
        for file in files:
            if file.lower().endswith(EXTENSIONS) and not file.startswith("."):
                yield str(Path(place) / file)


def _read(files: list[str], index: int) -> Image:
    return decode(Path(files[index]).open("rb"))


def _name(files: list[str], index: int) -> str:
    return files[index]


class ImageBatches:
    """Batches of ``count`` images (B, C, H, W), prepared for a model, the same ones each time they are gone through.

    They are chosen by the seed, classes in proportion where there are any; ``start`` passes over the first of the
    choice, which gives others. Of a stream of shards they are the first ones. Images that cannot be read are left out.
    Up to ``KEPT`` bytes of them are read once and kept.
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
            raise DataError(f"there are {len(source)} images, which is too few; more than {start} are needed")
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
        """Yield whole batches, and what is left at the end; ``DataError`` if no image can be read."""
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
        """Yield the images that can be read, as many at once as come."""
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
