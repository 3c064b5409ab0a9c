"""Single images by the names of their files, prepared for a model; and what they look like to it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hetdpt.adapters.preprocessing import Preprocessing
from hetdpt.core.errors import DataError, first_line
from hetdpt.data.augmentation import evaluation_transform
from hetdpt.data.listed import decode
from hetdpt.data.unlabelled import images_in
from hetdpt.data.views import in_mode, mode_of


def picture_files(names: Sequence[str | Path], first: int) -> list[Path]:
    """Return the files called ``names``; of a folder among them the ``first`` ones, by name."""
    if not names:
        raise DataError("no image was given; give one or more files or folders of images")
    files: list[Path] = []
    for name in map(Path, names):
        files += map(Path, images_in(name.absolute())[:first]) if name.is_dir() else [name]
    return files


def prepared(files: Sequence[Path], preprocessing: Preprocessing) -> Tensor:
    """Return the images in ``files`` as a model wants them, (B, C, H, W)."""
    transform, mode = evaluation_transform(preprocessing), mode_of(preprocessing)
    views = []
    for file in files:
        try:
            views.append(transform(in_mode(decode(file.open("rb")), mode)))
        except FileNotFoundError:
            raise DataError(f"{file} is not there; an image, or a folder of images, was expected") from None
        except Exception as error:  # PIL raises many classes on what is no image
            raise DataError(f"{file} cannot be read as an image: {first_line(error)}") from None
    return torch.stack(views)


def as_seen(images: Tensor, preprocessing: Preprocessing) -> Any:
    """Return what a model is given, (B, C, H, W), as pictures (B, H, W, C) of numbers from 0 to 1, as an array."""
    mean, std = (images.new_tensor(each).view(-1, 1, 1) for each in (preprocessing.mean, preprocessing.std))
    return (images * std + mean).clamp(0, 1).permute(0, 2, 3, 1).numpy(force=True)
