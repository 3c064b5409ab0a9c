"""Images without labels: those of any folder, of a split ``train``, or single files prepared for a model."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from PIL.Image import Image
from torch import Tensor

from hetdpt.adapters.preprocessing import Preprocessing
from hetdpt.core.errors import DataError, first_line
from hetdpt.data.augmentation import evaluation_transform
from hetdpt.data.folders import EXTENSIONS, SPLITS
from hetdpt.data.listed import Listed, decode
from hetdpt.data.sources import Source, open_data
from hetdpt.data.streams import Stream
from hetdpt.data.table import source_of
from hetdpt.data.views import in_mode, mode_of


def open_images(name: str, *, root: Path | None = None, download: bool = False) -> Source | Stream:
    """Return the images of the data called ``name``: those of its split ``train`` or, for a folder, all images in it.

    For the names see ``open_data``. Folders inside a folder count as classes, but need not: neither must they be the
    same in all splits, nor must there be any.
    """
    folder = (root or Path()) / name
    if source_of(name).prefix or not folder.is_dir():
        split = open_data(name, splits=("train",), root=root, download=download).train
        assert split is not None
        return split
    files = images_in(folder)
    folders = [str(Path(file).parent) for file in files]
    classes = sorted(set(folders))
    numbers = {inner: number for number, inner in enumerate(classes)}
    return Listed(tuple(classes), [numbers[inner] for inner in folders], partial(_read, files), files.__getitem__)


def is_unlabelled(name: str, root: Path | None = None) -> bool:
    """Whether the data called ``name`` is a folder of images without labels.

    Such a folder has neither of the splits ``train`` and ``val``, or its ``train`` has images and no folders in it.
    """
    folder = (root or Path()) / name
    if not name or source_of(name).prefix or not folder.is_dir():
        return False
    if (train := _split_in(folder, "train")) is None:
        return _split_in(folder, "val") is None and next(_images_below(folder), None) is not None
    inner = [one for one in train.iterdir() if not one.name.startswith(".")]
    return any(is_image(one.name) for one in inner) and not any(one.is_dir() for one in inner)


def is_image(file: str) -> bool:
    """Whether a file of this name is taken for an image."""
    return file.lower().endswith(EXTENSIONS) and not file.startswith(".")


def _split_in(folder: Path, split: str) -> Path | None:
    return next((folder / name for name in SPLITS[split] if (folder / name).is_dir()), None)


def images_in(folder: Path) -> list[str]:
    """Return the images in ``folder``, or in its split ``train`` if it has one, by name; ``DataError`` without any."""
    place = _split_in(folder, "train") or folder
    files = sorted(_images_below(place))
    if not files:
        raise DataError(f"{place} has no images; files that end in {', '.join(EXTENSIONS)} were expected")
    return files


def _images_below(folder: Path) -> Iterator[str]:
    """Yield the images in ``folder`` and its subfolders, links included; hidden ones are skipped."""
    for place, folders, files in os.walk(folder, followlinks=True):
        folders[:] = [inner for inner in folders if not inner.startswith(".")]
        for file in files:
            if is_image(file):
                yield str(Path(place) / file)


def _read(files: list[str], index: int) -> Image:
    return decode(Path(files[index]).open("rb"))


def picture_files(names: Sequence[str | Path], first: int) -> list[Path]:
    """Return the files called ``names``; of a folder among them the ``first`` ones, by name."""
    if not names:
        raise DataError("no image was given; give one or more files or folders of images")
    files: list[Path] = []
    for name in map(Path, names):
        files += map(Path, images_in(name.absolute())[:first]) if name.is_dir() else [name]
    return files


def prepared(files: Sequence[Path], preprocessing: Preprocessing) -> Tensor:
    """Return the images in ``files`` as the model expects them, (B, C, H, W)."""
    transform, mode = evaluation_transform(preprocessing), mode_of(preprocessing)
    views = []
    for file in files:
        try:
            views.append(transform(in_mode(decode(file.open("rb")), mode)))
        except FileNotFoundError:
            raise DataError(f"{file} does not exist; give an image or a folder of images") from None
        except Exception as error:  # PIL raises many classes on files that are not images
            raise DataError(f"{file} cannot be read as an image: {first_line(error)}") from None
    return torch.stack(views)


def as_seen(images: Tensor, preprocessing: Preprocessing) -> Any:
    """Return a model's input (B, C, H, W) as an array of pictures (B, H, W, C) with values from 0 to 1."""
    mean, std = (images.new_tensor(each).view(-1, 1, 1) for each in (preprocessing.mean, preprocessing.std))
    return (images * std + mean).clamp(0, 1).permute(0, 2, 3, 1).numpy(force=True)
