"""Images that are drawn: rectangles, discs and triangles on a background."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

NAME = "shapes"
"""The name of such data."""
COUNTS = {"train": 400, "val": 100}
"""Images of each split; the seed of a split is its index here."""
SIDE_WITH_BOXES, SIDE_WITH_MASKS = 128, 64
"""Pixels of a side. They differ because the figures in the docs used these."""
CLASSES = ("rectangle", "disc", "triangle")
MOST = 4
"""Objects in an image; there is always one."""
TRIES = 20
"""Attempts to place an object so that most of the others stays visible."""

Mask = npt.NDArray[np.bool_]
Points = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Drawing:
    """An image and the objects in it."""

    image: npt.NDArray[np.uint8]
    """(H, W, 3)."""
    masks: Mask
    """(n, H, W): the visible pixels of each object; no pixel belongs to two."""
    labels: npt.NDArray[np.int64]
    """(n,): which of ``CLASSES`` each object is."""


@dataclass(frozen=True)
class DrawnImages:
    """A split of drawn images, each with what ``annotate`` makes of its number and its drawing."""

    seed: int
    count: int
    side: int
    classes: tuple[str, ...]
    annotate: Callable[[int, Drawing], Any]

    @classmethod
    def of(
        cls, split: str, side: int, classes: tuple[str, ...], annotate: Callable[[int, Drawing], Any]
    ) -> DrawnImages:
        return cls([*COUNTS].index(split), COUNTS[split], side, classes, annotate)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Image.Image, Any]:
        drawing = draw(self.seed, index, self.side)
        return Image.fromarray(drawing.image), self.annotate(index, drawing)

    def name_of(self, index: int) -> str:
        return f"drawing {index} of seed {self.seed}"

    def facts(self) -> dict[str, Any]:
        return {"images": self.count, "seed": self.seed, "side": self.side}


def draw(seed: int, index: int, size: int) -> Drawing:
    """Return drawing number ``index`` of ``seed``, of ``size`` x ``size`` pixels; always the same one.

    Only the shape identifies the class of a pixel: colours and textures are random for each object. Size and position
    of the objects are relative to the image, so the same index gives the same picture at every size, up to rounding.

    >>> drawing = draw(seed=0, index=0, size=32)
    >>> drawing.image.shape, drawing.masks.shape[1:], int(drawing.masks.sum(axis=0).max())
    ((32, 32, 3), (32, 32), 1)
    """
    chance = np.random.default_rng((seed, index))
    steps = (np.arange(size) + 0.5) / size
    points = np.stack(np.meshgrid(steps, steps), axis=-1)  # (H, W, 2): x and y of each pixel, 0..1
    image = _texture(points, chance)
    masks: list[Mask] = []
    labels: list[int] = []
    for _ in range(int(chance.integers(1, MOST + 1))):
        label, texture = int(chance.integers(len(CLASSES))), _texture(points, chance)
        found = _place(label, points, masks, chance)
        if found is None:
            continue
        masks = [mask & ~found for mask in masks] + [found]
        labels.append(label)
        image = np.where(found[..., None], texture, image)
    pixels = np.clip(image + chance.normal(0, 6, image.shape), 0, 255).astype(np.uint8)
    return Drawing(pixels, np.stack(masks), np.array(labels, dtype=np.int64))


def _place(label: int, points: Points, others: list[Mask], chance: np.random.Generator) -> Mask | None:
    """Return the pixels of a new object that hides at most a third of any other; None if no position is found."""
    areas = [mask.sum() for mask in others]
    for _ in range(TRIES):
        found = _inside(label, points, chance)
        if found.any() and all(3 * (mask & found).sum() <= area for mask, area in zip(others, areas, strict=True)):
            return found
    return None


def _inside(label: int, points: Points, chance: np.random.Generator) -> Mask:
    """Return the pixels of an object of random size, position and rotation, with about the same area for each class."""
    radius, angle = chance.uniform(0.14, 0.26), chance.uniform(0, 2 * np.pi)
    away = points - chance.uniform(radius, 1 - radius, size=2)
    turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    along = away @ turn / radius  # (H, W, 2), in radii from the middle
    if CLASSES[label] == "disc":
        return np.asarray((along**2).sum(axis=-1) <= 0.81)
    if CLASSES[label] == "rectangle":
        long = chance.uniform(0.8, 1.0)
        return np.asarray((np.abs(along) <= (long, 0.64 / long)).all(axis=-1))
    normals = np.array([[np.cos(side), np.sin(side)] for side in 2 * np.pi * np.arange(3) / 3])
    return np.asarray((along @ normals.T <= 0.64).all(axis=-1))


def _texture(points: Points, chance: np.random.Generator) -> npt.NDArray[np.float64]:
    """Return stripes of two random colours (H, W, 3): of any direction, width and contrast."""
    angle, turns = chance.uniform(0, np.pi), chance.uniform(2, 8)
    wave = np.sin(2 * np.pi * turns * (points @ np.array([np.cos(angle), np.sin(angle)])))
    base, other = chance.uniform(0, 255, size=(2, 3))
    return np.asarray(base + chance.uniform(0, 0.5) * (wave[..., None] > 0) * (other - base))
