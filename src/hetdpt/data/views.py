"""Batches of views: images read, decoded and transformed, in worker processes or in this one.

A view is a function of its key and the source, and of nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import torch
from PIL.Image import Image, fromarray
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, Dataset, default_collate

from hetdpt.adapters.preprocessing import Preprocessing
from hetdpt.core.errors import DataError
from hetdpt.core.randomness import seeded
from hetdpt.data.augmentation import Transform

NOTHING = -1
"""The index of padding, and the label where there is no image."""
Targets = TypeVar("Targets")


@dataclass(frozen=True)
class ViewBatch(Generic[Targets]):
    """Views for one step, with their targets."""

    images: Tensor
    """(B, C, H, W), float32, normalised; zeros where there is no image."""
    targets: Targets
    """Labels (B,), int64, -1 where there is no image (padding, or unreadable in an evaluation); or of each image the
    tensors that are known of it, by name, none where there is no image."""
    indices: Tensor
    """(B,), int64: which image of the source it is; -1 for padding, and for all images of a stream."""
    unreadable: tuple[str, ...] = ()
    """The files that could not be read for this batch."""
    view: int = 0
    """Which of the fixed views of an image these are."""

    def pin_memory(self) -> ViewBatch[Targets]:
        """Return the batch in page-locked memory; the loader calls it where there is a CUDA device."""
        targets = tree_map(Tensor.pin_memory, self.targets)
        return ViewBatch(self.images.pin_memory(), targets, self.indices.pin_memory(), self.unreadable)

    def to(self, device: torch.device) -> ViewBatch[Targets]:
        """Return the batch with images and targets on ``device``."""
        targets = tree_map(lambda tensor: tensor.to(device), self.targets)
        return replace(self, images=self.images.to(device, non_blocking=True), targets=targets)


Batch = ViewBatch[Tensor]


@dataclass(frozen=True)
class Share:
    """This process's part of every batch: that of its rank among ``world`` processes."""

    rank: int = 0
    world: int = 1

    def __post_init__(self) -> None:
        assert 0 <= self.rank < self.world, self


@dataclass(frozen=True, kw_only=True)
class Loading:
    """How images are loaded."""

    batch_size: int
    """Images of a batch in one process."""
    seed: int = 0
    share: Share = Share()
    workers: int = 0
    """Processes that read images; 0 reads them in this one."""

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise DataError(f"a batch has at least 1 image, not {self.batch_size}")
        if self.workers < 0 or self.seed < 0:
            raise DataError(f"workers and seed are at least 0, not {self.workers} and {self.seed}")


def check_label(label: int, num_classes: int, name: str) -> None:
    """Raise ``DataError`` for a label outside the classes; ``name`` is the image."""
    if not 0 <= label < num_classes:
        raise DataError(f"{name} has label {label} but there are {num_classes} classes, 0-{num_classes - 1}")


TRIES = 20
"""Training stops after this many unreadable images in a row."""


@dataclass(frozen=True)
class Key:
    """One view: the index of the image, and what seeds its transform (nothing if it is not random)."""

    index: int
    entropy: tuple[int, ...] = ()


class Pictures(Protocol):
    """Images, each with its annotation: a label, boxes, a mask."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> tuple[Image, Any]:
        """Return the decoded image and its annotation; ``OSError`` if it cannot be read."""

    def name_of(self, index: int) -> str:
        """Return the file of an image, or a description of it, for messages."""


class Preparation(Protocol):
    """How pictures become views, and views a batch."""

    def view(self, image: Image, target: Any, name: str) -> Any:
        """Return the view of one image and its target; ``OSError`` if it would take too much memory."""

    def blank(self) -> Any:
        """Return the placeholder for a missing image."""

    def batch(self, views: Sequence[Any], indices: Tensor, unreadable: tuple[str, ...]) -> Any:
        """Return the views as one batch."""


class Views(Dataset[Any]):
    """Pictures whose items are batches of views, by their keys.

    ``is_replaced``: an unreadable image is replaced by the next readable one; otherwise it is left blank.
    """

    def __init__(self, source: Pictures, preparation: Preparation, *, is_replaced: bool) -> None:
        self._source, self._preparation, self._is_replaced = source, preparation, is_replaced
        self._tries = min(TRIES, len(source)) if is_replaced else 1

    def __getitems__(self, keys: list[Key]) -> Any:
        """Return a batch, or the error: raised in a worker, its message would be lost in a traceback."""
        unreadable: list[str] = []
        try:
            views = [self._view(key, unreadable) for key in keys]
        except DataError as error:
            return error
        return self._preparation.batch(views, torch.tensor([key.index for key in keys]), tuple(unreadable))

    def _view(self, key: Key, unreadable: list[str]) -> Any:
        """Return the view of a key; files that could not be read are added to ``unreadable``."""
        failed = []
        for step in range(self._tries if key.index != NOTHING else 0):
            index = (key.index + step) % len(self._source)
            name = self._source.name_of(index)
            try:
                image, target = self._source[index]
                with seeded(*key.entropy) if key.entropy else nullcontext():
                    view = self._preparation.view(image, target, name)
            except OSError:
                failed.append(name)
                continue
            unreadable += failed
            return view
        if failed and self._is_replaced:
            raise DataError(f"{failed[0]} cannot be read, nor can the {len(failed) - 1} images after it")
        unreadable += failed
        return self._preparation.blank()


class Labelled:
    """Prepares images with labels: transformed, with the channels that the model takes; -1 for no image."""

    def __init__(self, preprocessing: Preprocessing, transform: Transform, num_classes: int) -> None:
        self._mode, self._size = mode_of(preprocessing), preprocessing.input_size
        self._transform, self._num_classes = transform, num_classes

    def view(self, image: Image, target: int, name: str) -> tuple[Tensor, int]:
        check_label(target, self._num_classes, name)
        return self._transform(in_mode(image, self._mode)), target

    def blank(self) -> tuple[Tensor, int]:
        return torch.zeros(self._size), NOTHING

    def batch(self, views: Sequence[tuple[Tensor, int]], indices: Tensor, unreadable: tuple[str, ...]) -> Batch:
        images, targets = zip(*views, strict=True)
        return Batch(default_collate(list(images)), torch.tensor(targets), indices, unreadable)


class Loader:
    """The workers of a source, which stay alive from one iteration to the next; one iteration at a time."""

    def __init__(self, views: Views, workers: int) -> None:
        self._order = _Order()
        self._loader: DataLoader[Any] = DataLoader(
            views,
            batch_sampler=self._order,
            num_workers=workers,
            persistent_workers=workers > 0,
            collate_fn=_as_it_is,
            pin_memory=torch.cuda.is_available(),
            generator=torch.Generator(),  # otherwise it draws from the global one
        )

    def load(self, batches: Iterable[list[Key]]) -> Iterator[Any]:
        self._order.batches = batches
        for batch in self._loader:
            if isinstance(batch, DataError):
                raise DataError(*batch.args)  # raising the object itself would keep this frame and the workers alive
            yield batch


class _Order:
    """A batch sampler whose batches are set before each iteration."""

    batches: Iterable[list[Key]] = ()

    def __iter__(self) -> Iterator[list[Key]]:
        return iter(self.batches)


def mode_of(preprocessing: Preprocessing) -> str:
    """Return PIL's mode for images with the channels that the model takes."""
    return "L" if preprocessing.input_size[0] == 1 else "RGB"


def in_mode(image: Image, mode: str) -> Image:
    """Return ``image`` in ``mode``, grey or colour of 8 bits; of 16-bit grey the upper 8 bits are used.

    PIL stores such grey in its modes I;16 and I, and would turn everything above 255 into white. Floats of at most 1
    are fractions of white; PIL would turn all of them into black.

    >>> in_mode(fromarray(np.array([[0, 25700, 65535]], dtype=np.uint16)), "L").getpixel((1, 0))
    100
    """
    if image.mode == mode:
        return image
    if image.mode == "I" or image.mode.startswith("I;16"):
        pixels = np.clip(np.asarray(image), 0, 65535) >> 8
        image = fromarray(pixels.astype(np.uint8))
    elif image.mode == "F" and np.max(pixels := np.nan_to_num(np.asarray(image))) <= 1:
        image = fromarray((np.clip(pixels, 0, 1) * 255).astype(np.uint8))
    elif image.mode == "P" and isinstance(image.info.get("transparency"), bytes):
        image = image.convert("RGBA")  # PIL warns about converting directly
    return image.convert(mode)


def _as_it_is(batch: Any) -> Any:
    return batch
