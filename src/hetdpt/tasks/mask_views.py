"""Views of images with masks on a canvas, random or not. Reads no file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL.Image import Image
from torch import Tensor
from torch.nn import functional as F

from hetdpt.adapters.preprocessing import Preprocessing
from hetdpt.core.errors import DataError
from hetdpt.data.views import in_mode, mode_of
from hetdpt.tasks.annotated import AnnotatedView, Target

IGNORED = 255
"""The value of pixels without a class: neither trained on nor scored."""
Mask = npt.NDArray[np.uint8]
"""(H, W): a class from 0 on, or ``IGNORED``."""
COLOUR = (("brightness", 0.125), ("contrast", 0.5), ("saturation", 0.5), ("hue", 0.05))
"""How much each may change: 32 of 255, half, half, and 18 of 360 degrees, as in SSD and usual for ADE20K."""


@dataclass(frozen=True, kw_only=True)
class MaskAugmentation:
    """Random augmentation of a training image with a mask; the defaults are usual for ADE20K."""

    scale: tuple[float, float] = (0.5, 2.0)
    """Smallest and largest size of the image, relative to the size at which it just fits on the canvas."""
    hflip: float = 0.5
    """Probability of a horizontal flip."""
    distortion: float = 0.5
    """Probability of each change of brightness, contrast, saturation and hue."""

    def __post_init__(self) -> None:
        for name in ("hflip", "distortion"):
            if not 0 <= getattr(self, name) <= 1:
                raise DataError(f"{name} is a probability from 0 to 1, not {getattr(self, name)}")
        if not 0 < self.scale[0] <= self.scale[1]:
            raise DataError(f"scale is two increasing numbers above 0, not {self.scale}")


class MaskView(AnnotatedView):
    """Places an image and its mask on a canvas; pixels outside the image are ignored.

    For training it is a random crop of the image at a random scale, randomly flipped and distorted, and the target is
    ``mask`` (H, W), uint8. For evaluation it is the whole image, as large as fits, in the upper left corner, and the
    target has three more entries: ``size`` and ``inside`` (2,), height and width of the image in the file and on the
    canvas, and ``original`` (h, w), the mask in the file. An image without a mask has neither ``mask`` nor
    ``original``.
    """

    def __init__(
        self,
        size: tuple[int, int],
        preprocessing: Preprocessing,
        is_training: bool,
        augmentation: MaskAugmentation | None = None,
    ) -> None:
        from torchvision.transforms import v2

        self.size, self.preprocessing = size, preprocessing
        chosen = (augmentation or MaskAugmentation()) if is_training else None
        self._scale = chosen.scale if chosen else None
        chance = _chance(size, preprocessing, chosen) if chosen else []
        self._transform = v2.Compose(
            [*chance, v2.ToDtype(torch.float32, scale=True), v2.Normalize(preprocessing.mean, preprocessing.std)]
        )

    def __call__(self, image: Image, target: Mask | None) -> tuple[Tensor, Target]:
        image = in_mode(image, mode_of(self.preprocessing))
        if self._scale is None:  # for evaluation: nothing is random
            picture, mask = _scaled(image, target, self.size, 1.0)
            return self._whole(self._transform(picture), mask, (image.height, image.width), target)
        scale = float(torch.empty(()).uniform_(*self._scale))
        view, mask = self._transform(*_scaled(image, target, self.size, scale))
        return _plain(view), {"mask": _plain(mask)}

    def _whole(self, view: Any, mask: Any, size: tuple[int, int], original: Mask | None) -> tuple[Tensor, Target]:
        height, width = view.shape[1:]
        around = (0, self.size[1] - width, 0, self.size[0] - height)  # left, right, top, bottom
        target = {"size": torch.tensor(size), "inside": torch.tensor([height, width])}
        if original is not None:
            target["mask"] = F.pad(_plain(mask), around, value=IGNORED)
            target["original"] = torch.from_numpy(original)
        return F.pad(_plain(view), around), target


def _chance(size: tuple[int, int], preprocessing: Preprocessing, augmentation: MaskAugmentation) -> list[Any]:
    """Return the random transforms of an image and its mask; the border around the image has the mean colour."""
    from torchvision import tv_tensors
    from torchvision.transforms import v2

    mean = [round(255 * value) for value in preprocessing.mean]
    return [
        v2.RandomCrop(size, pad_if_needed=True, fill={tv_tensors.Image: mean, tv_tensors.Mask: IGNORED}),
        v2.RandomHorizontalFlip(augmentation.hflip),
        *(v2.RandomApply([v2.ColorJitter(**{name: most})], augmentation.distortion) for name, most in COLOUR),
    ]


def _scaled(image: Image, target: Mask | None, size: tuple[int, int], scale: float) -> tuple[Any, Any]:
    """Return image (C, h, w) and mask (h, w) at ``scale`` times the size that just fits on the canvas."""
    from torchvision import tv_tensors
    from torchvision.transforms.v2 import functional

    ratio = scale * min(size[0] / image.height, size[1] / image.width)
    new = [max(1, round(image.height * ratio)), max(1, round(image.width * ratio))]
    mask = None if target is None else functional.resize(tv_tensors.Mask(torch.from_numpy(target)), new)
    return functional.resize(functional.to_image(image), new, antialias=True), mask


def _plain(tensor: Any) -> Tensor:
    """Return a tv_tensor of torchvision as a plain tensor."""
    plain: Tensor = tensor.as_subclass(Tensor)
    return plain
