"""Images with boxes or masks: their splits, and how they become views and batches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from PIL.Image import Image
from torch import Tensor

from hetdpt.adapters.preprocessing import Preprocessing
from hetdpt.data.views import Pictures, ViewBatch

Target = Mapping[str, Tensor]
"""The annotation of an image, by name: tensors only."""
AnnotatedBatch = ViewBatch[tuple[Target, ...]]


class AnnotatedSource(Pictures, Protocol):
    """One split of images with boxes or masks."""

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes, by label."""

    def facts(self) -> dict[str, Any]:
        """Return what identifies this split, as plain JSON."""


class AnnotatedView(ABC):
    """How an image and its annotation become a view; all randomness is torch's, numpy's and Python's own."""

    size: tuple[int, int]
    """Height and width of every view."""
    preprocessing: Preprocessing
    """How the model wants its images, except for their size."""

    @abstractmethod
    def __call__(self, image: Image, target: Any) -> tuple[Tensor, Target]:
        """Return the view (C, H, W), normalised, and its target."""

    def view(self, image: Image, target: Any, name: str) -> tuple[Tensor, Target]:
        return self(image, target)

    def blank(self) -> tuple[Tensor, Target]:
        return torch.zeros(self.preprocessing.input_size[0], *self.size), {}

    def batch(
        self, views: Sequence[tuple[Tensor, Target]], indices: Tensor, unreadable: tuple[str, ...]
    ) -> AnnotatedBatch:
        images, targets = zip(*views, strict=True)
        return AnnotatedBatch(torch.stack(images), targets, indices, unreadable)


@dataclass(frozen=True)
class AnnotatedData:
    """Images to train on and others to measure on; their classes mean the same."""

    name: str
    train: AnnotatedSource | None
    val: AnnotatedSource | None
    classes: tuple[str, ...]

    @property
    def facts(self) -> dict[str, Any]:
        """What must be the same when a run with this data is resumed, wherever it is stored, as plain JSON."""
        splits = {"train": self.train, "val": self.val}
        known = {name: split.facts() for name, split in splits.items() if split is not None}
        return {"data": {"classes": list(self.classes), **known}}
