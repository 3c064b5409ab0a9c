"""Datasets of other libraries: torchvision's and HuggingFace's, as timm reads them, and the digits of scikit-learn."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from hetdpt.core.errors import DataError, first_line
from hetdpt.data.folders import choose_split
from hetdpt.data.listed import Listed, read_item
from hetdpt.data.subset import balanced_order

CACHE = Path("~/.cache/hetdpt/data")
"""Where torchvision's datasets are if no root is given."""


def open_torch(name: str, split: str, root: Path | None, download: bool) -> Listed:
    """Return a split of the torchvision dataset ``name``, by timm's name of it: cifar100, mnist, imagenet, ..."""
    from timm.data.dataset_factory import create_dataset

    place = (root or CACHE).expanduser()
    timm_split = "train" if split == "train" else "validation"
    try:
        dataset = create_dataset(f"torch/{name}", root=str(place), split=timm_split, download=download)
    except Exception as error:  # torchvision has no exception class for missing data or failed downloads
        hint = "" if download else " (allow the download, or give the root that contains it)"
        raise DataError(f"torch/{name} cannot be opened in {place}: {first_line(error)}{hint}") from None
    classes: Any = getattr(dataset, "classes", None)
    labels = np.asarray(getattr(dataset, "targets", ())).tolist()
    if not labels or not classes or not isinstance(labels[0], int):
        raise DataError(f"torch/{name} does not have one class per image; use a folder of its images instead")
    names = tuple(", ".join(words) if isinstance(words, tuple) else str(words) for words in classes)
    return Listed(names, labels, partial(_read_torch, dataset), f"image {{}} of torch/{name} {split}".format)


def open_hfds(name: str, split: str, root: Path | None, download: bool) -> Listed:
    """Return a split of the HuggingFace dataset ``name``, a hub name or a folder; ``root`` is its cache."""
    try:
        import datasets
    except ImportError:
        raise DataError(f"hfds/{name} needs the package datasets; pip install hetdpt[data]") from None
    from timm.data.readers.reader_hfds import ReaderHfds  # create_reader would lowercase the name

    cache = str(root) if root else None
    try:
        chosen = choose_split(datasets.get_dataset_split_names(name), split, f"hfds/{name}")
        features = datasets.load_dataset(name, split=chosen, cache_dir=cache).features
        image, label = _column(name, features, "image", "Image"), _column(name, features, "label", "ClassLabel")
        reader = ReaderHfds(name, root=cache, split=chosen, input_key=image, target_key=label)
    except DataError:
        raise
    except Exception as error:  # datasets, huggingface_hub, httpx and pyarrow have many classes
        raise DataError(f"hfds/{name} cannot be opened: {first_line(error)}") from None
    labels = list(reader.dataset[label])
    name_of = partial(_name_hfds, reader, f"hfds/{name} {chosen}")
    return Listed(tuple(features[label].names), labels, partial(read_item, reader), name_of)


def _column(name: str, features: dict[str, Any], usual: str, kind: str) -> str:
    """Return the column of type ``kind``: the one with the usual name, or the only one."""
    found = [column for column, feature in features.items() if type(feature).__name__ == kind]
    if usual in found:
        return usual
    if len(found) != 1:
        raise DataError(
            f"hfds/{name} does not have exactly one column of type {kind} for its {usual}s; its columns are "
            f"{', '.join(f'{column} ({type(feature).__name__})' for column, feature in features.items())}"
        )
    return found[0]


def _read_torch(dataset: Any, index: int) -> Image.Image:
    image: Image.Image = dataset[index][0]
    return image


def _name_hfds(reader: Any, where: str, index: int) -> str:
    return reader.filename(index) or f"image {index} of {where}"


def open_digits(name: str, split: str, root: Path | None, download: bool) -> Listed:
    """Return four fifths of each digit (``train``) or the rest (``val``), always the same ones."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    labels: list[int] = digits.target.tolist()
    order = balanced_order(labels, seed=0)
    held_out = round(len(labels) / 5) + 1  # 360 of 1,797: scikit-learn rounds up as well
    chosen = sorted(order[:held_out] if split == "val" else order[held_out:])
    pixels = np.round(digits.images[chosen] * (255 / 16)).astype(np.uint8)  # (N, 8, 8), of 0..16
    names = tuple(str(name) for name in digits.target_names)
    name_of = f"digit {{}} of demo {split}".format
    return Listed(names, [labels[index] for index in chosen], partial(_image, pixels), name_of)


def _image(pixels: npt.NDArray[np.uint8], index: int) -> Image.Image:
    return Image.fromarray(pixels[index]).convert("RGB")
