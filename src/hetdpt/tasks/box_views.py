"""Views of images with boxes on a canvas, random or not. Reads no file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor

from hetdpt.adapters.preprocessing import Preprocessing
from hetdpt.data.views import in_mode, mode_of
from hetdpt.tasks.annotated import AnnotatedView, Target

SCALES = (0.6, 1.6)
"""Smallest and largest side of a training image on the canvas, relative to that in an evaluation."""
SMALLEST = 1.0
"""Pixels that a side of a box must have on the canvas to be trained on."""


@dataclass(frozen=True)
class Objects:
    """The objects in one image, in pixels of the image file."""

    number: int
    """Which image of the split it is."""
    boxes: npt.NDArray[np.float64]
    """(n, 4): left, top, width and height."""
    labels: npt.NDArray[np.int64]
    """(n,)."""
    areas: npt.NDArray[np.float64]
    """(n,): the area of the object itself, by which COCO classifies it as small, medium or large."""
    crowd: npt.NDArray[np.bool_]
    """(n,): whether the box is around many objects; such boxes are not trained on."""


@dataclass(frozen=True)
class BoxView(AnnotatedView):
    """Puts an image and its boxes on a canvas: scaled, at its upper left, the rest zeros.

    In training the scale, the crop (if the image is larger than the canvas) and a horizontal flip are random; colours
    stay. In an evaluation the longer side, relative to the canvas, fills it.

    A target has ``boxes`` (n, 4), centre, width and height relative to the canvas, ``labels`` (n,), and ``valid`` (2,),
    the height and width of the image relative to the canvas. In an evaluation it also has the content of the file:
    ``image`` (its number), ``size`` (2,), height and width in pixels, and ``truth_boxes``, ``truth_labels``,
    ``truth_areas``, ``truth_crowd``, as in :class:`Objects`.
    """

    size: tuple[int, int]
    preprocessing: Preprocessing
    is_training: bool
    scales: tuple[float, float] = SCALES

    def __call__(self, image: Image.Image, target: Objects) -> tuple[Tensor, Target]:
        seen = _PlacedImage.of(in_mode(image, mode_of(self.preprocessing)), target)
        scale = min(self.size[0] / image.height, self.size[1] / image.width)
        if self.is_training:
            seen = seen.flipped() if torch.rand(()) < 0.5 else seen
            low, high = self.scales
            scale *= low + (high - low) * float(torch.rand(()))
        seen = seen.scaled(scale, self.preprocessing.interpolation).cropped(self.size)
        view, found = seen.on_canvas(self.size, self.preprocessing)
        return view, found if self.is_training else found | _truth(image, target)


@dataclass(frozen=True)
class _PlacedImage:
    """An image that is being placed on the canvas, and its boxes to train on."""

    image: Image.Image
    boxes: Any
    """A ``tv_tensors.BoundingBoxes``: corners in pixels."""
    labels: Tensor

    @classmethod
    def of(cls, image: Image.Image, objects: Objects) -> _PlacedImage:
        from torchvision.transforms.v2 import functional as F
        from torchvision.tv_tensors import BoundingBoxes

        single = ~objects.crowd
        corners = objects.boxes[single]
        corners = np.concatenate([corners[:, :2], corners[:, :2] + corners[:, 2:]], axis=1)
        found: Any = BoundingBoxes(
            torch.from_numpy(corners).float(), format="XYXY", canvas_size=(image.height, image.width)
        )
        return cls(image, F.clamp_bounding_boxes(found), torch.from_numpy(objects.labels[single]))

    def flipped(self) -> _PlacedImage:
        from torchvision.transforms.v2 import functional as F

        return _PlacedImage(F.horizontal_flip(self.image), F.horizontal_flip(self.boxes), self.labels)

    def scaled(self, scale: float, interpolation: str) -> _PlacedImage:
        from torchvision.transforms import InterpolationMode
        from torchvision.transforms.v2 import functional as F

        size = [max(1, round(scale * side)) for side in (self.image.height, self.image.width)]
        image = F.resize(self.image, size, InterpolationMode(interpolation))
        return _PlacedImage(image, F.resize(self.boxes, size), self.labels)

    def cropped(self, canvas: tuple[int, int]) -> _PlacedImage:
        """Return a random crop of the size of the canvas, where the image is larger."""
        from torchvision.transforms.v2 import functional as F

        height, width = min(canvas[0], self.image.height), min(canvas[1], self.image.width)
        room = self.image.height - height, self.image.width - width
        top, left = (int(torch.randint(side + 1, ())) if side else 0 for side in room)
        where = (top, left, height, width)
        return _PlacedImage(F.crop(self.image, *where), F.crop(self.boxes, *where), self.labels)

    def on_canvas(self, canvas: tuple[int, int], preprocessing: Preprocessing) -> tuple[Tensor, dict[str, Tensor]]:
        from torchvision.transforms.v2 import functional as F

        boxes, is_kept = F.sanitize_bounding_boxes(self.boxes, min_size=SMALLEST)
        pixels = F.to_dtype(F.pil_to_tensor(self.image), torch.float32, scale=True)
        pixels = F.normalize(pixels, list(preprocessing.mean), list(preprocessing.std))
        height, width = self.image.height, self.image.width
        view = F.pad(pixels, [0, 0, canvas[1] - width, canvas[0] - height])
        middles = F.convert_bounding_box_format(boxes, new_format="CXCYWH").as_subclass(Tensor)
        target = {
            "boxes": middles / middles.new_tensor([canvas[1], canvas[0], canvas[1], canvas[0]]),
            "labels": self.labels[is_kept],
            "valid": torch.tensor([height / canvas[0], width / canvas[1]]),
        }
        return view, target


def _truth(image: Image.Image, objects: Objects) -> dict[str, Tensor]:
    return {
        "image": torch.tensor(objects.number),
        "size": torch.tensor([image.height, image.width]),
        "truth_boxes": torch.from_numpy(objects.boxes),
        "truth_labels": torch.from_numpy(objects.labels),
        "truth_areas": torch.from_numpy(objects.areas),
        "truth_crowd": torch.from_numpy(objects.crowd),
    }
