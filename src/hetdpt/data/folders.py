"""A folder of images: one folder per split, in it one per class."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from hetdpt.core.errors import DataError
from hetdpt.data.listed import Listed, read_item
from hetdpt.data.table import FORMS

SPLITS = {"train": ("train", "training"), "val": ("val", "validation", "valid", "eval", "test")}
"""What a split may be called, the best name first."""
EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
"""What counts as an image, as in torchvision; by default timm would skip all but the first three."""


def choose_split(found: list[str], split: str, where: str) -> str:
    """Return the best of the names ``found`` for ``split``; ``DataError`` if there is none.

    >>> choose_split(["train", "test", "validation"], "val", "the data")
    'validation'
    """
    for name in SPLITS[split]:
        if name in found:
            return name
    shown = ", ".join(found[:5]) + (", ..." if len(found) > 5 else "")
    raise DataError(f"{where} has no {split} split: looked for {', '.join(SPLITS[split])}, found {shown or 'nothing'}")


def open_folder(name: str, split: str, root: Path | None, download: bool) -> Listed:
    """Return a split of the folder ``name``, with timm's order of classes and files."""
    from timm.data.readers.reader_factory import create_reader

    folder = (root or Path()) / name
    if not folder.is_dir():
        raise DataError(f"there is no folder {folder}; data is {FORMS}")
    found = _folders_in(folder)
    place = folder / choose_split(found, split, str(folder))
    others = [name for other in SPLITS if other != split for name in SPLITS[other] if name in found]
    for other in others[:1]:
        _check_same_folders(place, folder / other)
    try:
        reader = create_reader("", root=str(place), input_key=";".join(EXTENSIONS))
    except RuntimeError:
        raise DataError(
            f"{place} has no images; a folder for each class was expected, with files that end in "
            f"{', '.join(EXTENSIONS)}"
        ) from None
    if "" in reader.class_to_idx:
        raise DataError(f"{place} has images outside its class folders, for example {_image_in(place, reader)}")
    _check_no_class_is_empty(place, set(reader.class_to_idx))
    labels = [label for _, label in reader.samples]
    return Listed(tuple(reader.class_to_idx), labels, partial(read_item, reader), partial(_name, reader))


def _folders_in(folder: Path) -> list[str]:
    return sorted(inner.name for inner in folder.iterdir() if inner.is_dir() and not inner.name.startswith("."))


def _check_same_folders(place: Path, other: Path) -> None:
    """Refuse splits with different classes, even if only one is read: a label is an index into their list."""
    mine, others = set(_folders_in(place)), set(_folders_in(other))
    different = sorted(mine ^ others)
    if mine and others and different:  # one without class folders is refused when it is read
        has, lacks = (place, other) if different[0] in mine else (other, place)
        raise DataError(
            f"{has} has a class folder {different[0]} but {lacks} does not; labels must mean the same in both"
        )


def _check_no_class_is_empty(place: Path, classes: set[str]) -> None:
    inner = _folders_in(place)
    is_flat = classes <= set(inner)
    if is_flat and (empty := sorted(set(inner) - classes)):
        raise DataError(f"class folder {place / empty[0]} has no images; add some or remove the folder")


def _image_in(place: Path, reader: Any) -> str:
    return next(Path(name).name for name, label in reader.samples if label == reader.class_to_idx[""])


def _name(reader: Any, index: int) -> str:
    name: str = reader.filename(index, absolute=True)
    return name
