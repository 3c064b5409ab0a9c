"""What one step is given, and whose part of it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hetdpt.core.errors import DataError

NOTHING = -1
"""The index of padding, and the label where there is no image."""


@dataclass(frozen=True)
class Batch:
    """Views and labels for one step."""

    images: Tensor
    """(B, C, H, W), float32, normalised; zeros where there is no image."""
    targets: Tensor
    """(B,), int64; -1 where there is no image: padding, or unreadable in an evaluation."""
    indices: Tensor
    """(B,), int64: which image of the source was asked for; -1 for padding, and for all images of a stream."""
    unreadable: tuple[str, ...] = ()
    """The files that could not be read for this batch."""

    def pin_memory(self) -> Batch:
        """Return the batch in page-locked memory; the loader calls it where there is a CUDA device."""
        return Batch(self.images.pin_memory(), self.targets.pin_memory(), self.indices.pin_memory(), self.unreadable)

    def to(self, device: torch.device) -> Batch:
        """Return the batch with images and labels on ``device``."""
        return replace(self, images=self.images.to(device, non_blocking=True), targets=self.targets.to(device))


@dataclass(frozen=True)
class Share:
    """Which part of every batch is this process's: that of its rank among ``world`` processes."""

    rank: int = 0
    world: int = 1

    def __post_init__(self) -> None:
        assert 0 <= self.rank < self.world, self


def check_label(label: int, num_classes: int, name: str) -> None:
    """Refuse a label that is none of the classes; ``name`` says whose it is."""
    if not 0 <= label < num_classes:
        raise DataError(f"{name} has label {label} but there are {num_classes} classes, 0-{num_classes - 1}")
