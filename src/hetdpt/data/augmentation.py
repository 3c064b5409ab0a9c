"""How an image becomes a view: the transforms of timm, for training and for evaluation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import Any

from PIL import Image
from torch import Tensor

from hetdpt.adapters.preprocessing import MOST_PIXELS, Preprocessing
from hetdpt.core.errors import DataError, first_line

Transform = Callable[[Image.Image], Tensor]


@dataclass(frozen=True, kw_only=True)
class Augmentation:
    """Random augmentation of a training image; the defaults are those of DeiT.

    >>> Augmentation.plain().is_plain
    True
    """

    auto_augment: str | None = "rand-m9-mstd0.5-inc1"
    """A policy of timm's RandAugment, AutoAugment or AugMix; None leaves it out."""
    color_jitter: float = 0.3
    """How much brightness, contrast and saturation may change; only without ``auto_augment``, as in timm."""
    erasing: float = 0.25
    """Probability that a rectangle is replaced by noise."""
    scale: tuple[float, float] = (0.08, 1.0)
    """Smallest and largest fraction of the image's area in the crop."""
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    """Smallest and largest aspect ratio (width over height) of the crop."""
    hflip: float = 0.5
    """Probability of a horizontal flip."""
    repeats: int = 3
    """How often an image is repeated in a row, each time as another view, with fewer images per epoch; 1 is once."""
    views: int = 0
    """Fixed views of each image, one per epoch in turn, so that a teacher's output for them can be cached; 0: a new
    random view in every epoch."""

    def __post_init__(self) -> None:
        for name in ("erasing", "hflip"):
            if not 0 <= getattr(self, name) <= 1:
                raise DataError(f"{name} is a probability from 0 to 1, not {getattr(self, name)}")
        if not 0 < self.scale[0] <= self.scale[1] <= 1:
            raise DataError(f"scale is two increasing fractions of the area, above 0 and at most 1, not {self.scale}")
        if not 0 < self.ratio[0] <= self.ratio[1]:
            raise DataError(f"ratio is two increasing numbers above 0, not {self.ratio}")
        if self.color_jitter < 0:
            raise DataError(f"color_jitter is at least 0, not {self.color_jitter}")
        if self.repeats < 1:
            raise DataError(f"repeats is at least 1, not {self.repeats}")
        if self.views < 0:
            raise DataError(f"views is at least 0, not {self.views}")
        if self.views and self.repeats > 1:
            raise DataError(f"fixed views repeated {self.repeats} times would be the same view; set repeats to 1")
        if self.views > 1 and self.is_plain:
            raise DataError(f"without augmentation all {self.views} views of an image are the same; set views to 1")

    @classmethod
    def plain(cls, *, views: int = 0) -> Augmentation:
        """Return the configuration without augmentation: the views of an evaluation."""
        whole = (1.0, 1.0)
        return cls(
            auto_augment=None, color_jitter=0, erasing=0, scale=whole, ratio=whole, hflip=0, repeats=1, views=views
        )  # fmt: skip

    @property
    def is_plain(self) -> bool:
        """Whether views are not random."""
        has_colour = bool(self.auto_augment or self.color_jitter or self.erasing)
        has_shape = (*self.scale, *self.ratio, self.hflip) != (1, 1, 1, 1, 0)
        return not has_colour and not has_shape


def training_transform(preprocessing: Preprocessing, augmentation: Augmentation) -> Transform:
    """Return the transform from an image to a random view (C, H, W); the evaluation's if views are not random."""
    if augmentation.is_plain:
        return evaluation_transform(preprocessing)
    from timm.data.transforms_factory import create_transform

    try:
        transform = create_transform(
            preprocessing.input_size,
            is_training=True,
            mean=preprocessing.mean,
            std=preprocessing.std,
            interpolation=preprocessing.interpolation,
            auto_augment=augmentation.auto_augment,
            color_jitter=augmentation.color_jitter,
            re_prob=augmentation.erasing,
            re_mode="pixel",
            scale=augmentation.scale,
            ratio=augmentation.ratio,
            hflip=augmentation.hflip,
        )
    except Exception as error:  # timm raises various classes on an unknown policy
        text = first_line(error)
        raise DataError(f"timm does not know the augmentation {augmentation.auto_augment!r}: {text}") from None
    return _posterizing(transform)


def evaluation_transform(preprocessing: Preprocessing) -> Transform:
    """Return the transform from an image to its one view (C, H, W), as the model expects it.

    It raises ``OSError`` for an image so thin that it would be resized to no pixels, or to more than ``MOST_PIXELS``.
    """
    from timm.data.transforms_factory import create_transform

    transform: Transform = create_transform(
        preprocessing.input_size,
        mean=preprocessing.mean,
        std=preprocessing.std,
        interpolation=preprocessing.interpolation,
        crop_pct=preprocessing.crop_pct,
        crop_mode=preprocessing.crop_mode,
    )
    return _Limited(transform, preprocessing)


@dataclass(frozen=True)
class _Limited:
    """An evaluation transform that refuses images that cannot be resized or would take too much memory."""

    transform: Transform
    preprocessing: Preprocessing

    def __call__(self, image: Image.Image) -> Tensor:
        height, width = self.preprocessing.resized_to
        scales = height / image.height, width / image.width
        if self.preprocessing.crop_mode != "squash":
            scale = max(scales) if self.preprocessing.crop_mode == "center" else min(scales)
            height, width = round(scale * image.height), round(scale * image.width)
        if not 0 < height * width <= MOST_PIXELS:
            raise OSError(
                f"{image.width} x {image.height} pixels would be resized to {width} x {height}; 1 to {MOST_PIXELS} "
                "pixels were expected"
            )
        return self.transform(image)


def _posterizing(transform: Any) -> Transform:
    """Make a timm transform able, in place, to posterize to 0 bits, as its strongest policies request."""
    from timm.data.auto_augment import posterize

    for step in transform.transforms:
        for op in chain(vars(step).get("ops", ()), *vars(step).get("policy", ())):
            if op.aug_fn is posterize:
                op.aug_fn = _posterize
    able: Transform = transform
    return able


def _posterize(image: Image.Image, bits: int, **rest: Any) -> Image.Image:
    """Return ``image`` with ``bits`` bits of each colour; black for 0, which Pillow 13 refuses to compute."""
    from timm.data.auto_augment import posterize

    kept: Image.Image = posterize(image, bits, **rest) if bits > 0 else Image.new(image.mode, image.size)
    return kept
