"""The demo set: the handwritten digits that come with scikit-learn, 1,797 images of 8 x 8 pixels in 10 classes."""

from __future__ import annotations

from functools import partial

import numpy as np
import numpy.typing as npt
from PIL import Image

from hetdpt.data.listed import Listed
from hetdpt.data.subset import balanced_order

VAL_FRACTION = 0.2


def open_digits(split: str) -> Listed:
    """Return four fifths of each digit (``train``), or the others (``val``); always the same ones."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    labels: list[int] = digits.target.tolist()
    order = balanced_order(labels, seed=0)
    held_out = round(VAL_FRACTION * len(labels)) + 1  # 360 of 1,797: scikit-learn rounds up as well
    chosen = sorted(order[:held_out] if split == "val" else order[held_out:])
    pixels = np.round(digits.images[chosen] * (255 / 16)).astype(np.uint8)  # (N, 8, 8), of 0..16
    names = tuple(str(name) for name in digits.target_names)
    name_of = f"digit {{}} of demo {split}".format
    return Listed(names, [labels[index] for index in chosen], partial(_image, pixels), name_of)


def _image(pixels: npt.NDArray[np.uint8], index: int) -> Image.Image:
    return Image.fromarray(pixels[index]).convert("RGB")
