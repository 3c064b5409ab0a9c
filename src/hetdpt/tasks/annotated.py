"""Batches of images with boxes or masks, in the order that :mod:`hetdpt.data.batches` has for images with labels."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from PIL.Image import Image
from torch import Tensor

from hetdpt.adapters.preprocessing import Preprocessing
from hetdpt.core.errors import DataError
from hetdpt.data.batches import ALONE, check_numbers, order_of, parts_of, places_of, too_few
from hetdpt.data.views import Key, Loader, Pictures, Share, Views

Target = Mapping[str, Tensor]
"""What is known of an image, by name: tensors only."""


class AnnotatedSource(Pictures, Protocol):
    """One split of images with boxes or masks."""

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes, by label."""

    def facts(self) -> dict[str, Any]:
        """Return what tells this split apart from another, as plain JSON."""


class Prepare(Protocol):
    """How an image and what is known of it become a view; all chance is torch's, numpy's and Python's own."""

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of every view."""

    @property
    def preprocessing(self) -> Preprocessing:
        """What the model wants its images to be, but for their size."""

    def __call__(self, image: Image, target: Any) -> tuple[Tensor, Target]:
        """Return the view (C, H, W), normalised, and its target."""


@dataclass(frozen=True)
class AnnotatedData:
    """Images to learn from and others to measure on; their classes mean the same."""

    name: str
    train: AnnotatedSource | None
    val: AnnotatedSource | None
    classes: tuple[str, ...]

    @property
    def facts(self) -> dict[str, Any]:
        """What a run that was begun with this data is to be continued with, wherever it is stored, as plain JSON."""
        splits = {"train": self.train, "val": self.val}
        known = {name: split.facts() for name, split in splits.items() if split is not None}
        return {"data": {"classes": list(self.classes), **known}}


@dataclass(frozen=True)
class AnnotatedBatch:
    """Views for one step, with what is known of each."""

    images: Tensor
    """(B, C, H, W), float32, normalised; zeros where there is no image."""
    targets: tuple[Target, ...]
    """One for each image; empty where there is no image: padding, or unreadable in an evaluation."""
    indices: Tensor
    """(B,), int64: which image of the source was asked for; -1 for padding."""
    unreadable: tuple[str, ...] = ()
    """The files that could not be read for this batch."""

    def pin_memory(self) -> AnnotatedBatch:
        """Return the batch in page-locked memory; the loader calls it where there is a CUDA device."""
        targets = tuple({name: value.pin_memory() for name, value in target.items()} for target in self.targets)
        return replace(self, images=self.images.pin_memory(), targets=targets)

    def to(self, device: torch.device) -> AnnotatedBatch:
        """Return the batch with images and targets on ``device``."""
        targets = tuple({name: value.to(device) for name, value in target.items()} for target in self.targets)
        return replace(self, images=self.images.to(device, non_blocking=True), targets=targets)


class AnnotatedTraining:
    """Batches of random views, epoch by epoch, as ``TrainingBatches`` are of images with labels."""

    def __init__(
        self,
        source: AnnotatedSource,
        prepare: Prepare,
        *,
        batch_size: int,
        seed: int = 0,
        share: Share = ALONE,
        workers: int = 0,
    ) -> None:
        check_numbers(batch_size=batch_size, workers=workers, seed=seed)
        self._batch_size, self._seed, self._share, self.count = batch_size, seed, share, len(source)
        self._length = self.count // (share.world * batch_size)
        if not self._length:
            raise DataError(too_few(self.count, batch_size, share.world))
        self._loader = Loader(Views(source, _Targeted(prepare), is_replaced=True), workers)

    def __len__(self) -> int:
        """Return the batches of an epoch for this process; images that do not fill one are left out."""
        return self._length

    def epoch(self, number: int, start: int = 0) -> Iterator[AnnotatedBatch]:
        """Yield the batches of an epoch from batch ``start`` on: the very ones of the whole epoch."""
        order = order_of(self.count, self._seed, number)
        places = places_of(self._batch_size, self._share, start, self._length)
        return self._loader.load(
            [Key(order[place], (self._seed, number, place, order[place])) for place in batch] for batch in places
        )


class AnnotatedEvaluation:
    """Every image once over all processes, as ``EvaluationBatches`` are of images with labels."""

    def __init__(
        self, source: AnnotatedSource, prepare: Prepare, *, batch_size: int, share: Share = ALONE, workers: int = 0
    ) -> None:
        check_numbers(batch_size=batch_size, workers=workers)
        self._parts = parts_of(len(source), batch_size, share)
        self._loader = Loader(Views(source, _Targeted(prepare), is_replaced=False), workers)

    def __len__(self) -> int:
        return len(self._parts)

    def __iter__(self) -> Iterator[AnnotatedBatch]:
        return self._loader.load([Key(index) for index in part] for part in self._parts)


class _Targeted:
    """The preparation of images with boxes or masks."""

    def __init__(self, prepare: Prepare) -> None:
        self._prepare = prepare

    def view(self, image: Image, target: Any, name: str) -> tuple[Tensor, Target]:
        return self._prepare(image, target)

    def blank(self) -> tuple[Tensor, Target]:
        return torch.zeros(self._prepare.preprocessing.input_size[0], *self._prepare.size), {}

    def batch(
        self, views: Sequence[tuple[Tensor, Target]], indices: Tensor, unreadable: tuple[str, ...]
    ) -> AnnotatedBatch:
        images, targets = zip(*views, strict=True)
        return AnnotatedBatch(torch.stack(images), targets, indices, unreadable)
