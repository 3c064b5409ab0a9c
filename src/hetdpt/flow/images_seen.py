"""What identifies the images and the model that a result was made of. Decides nothing."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hetdpt.core.modules import bytes_of, checked, digest, require_more_than_once
from hetdpt.surgery.record import InputSize


@dataclass(frozen=True)
class ImagesSeen:
    """What identifies the images of some batches."""

    count: int
    size: InputSize
    checksum: str

    @classmethod
    def of(cls, batches: Iterable[Tensor], model: nn.Module) -> ImagesSeen:
        require_more_than_once(batches, "once for each layer")
        found, count, shape = hashlib.sha256(), 0, torch.Size()
        for images in checked(batches, model, "a removal in one shot"):
            found.update(bytes_of(images))
            count, shape = count + len(images), images.shape
        return cls(count, (shape[1], shape[2], shape[3]), found.hexdigest())

    def __str__(self) -> str:
        return f"{self.count} with checksum {self.checksum[:8]}"


def asked_of(model: nn.Module, seen: dict[str, ImagesSeen]) -> dict[str, Any]:
    """Return what decides a result beside settings, as plain JSON: the model, its device and the images."""
    weight = next(model.parameters())
    return {
        "model": digest(model),
        **{f"{name} images": str(images) for name, images in seen.items()},
        "device": str(weight.device),
        "dtype": str(weight.dtype).removeprefix("torch."),
    }
