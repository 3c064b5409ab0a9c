"""A split as a list: labels that are known in advance, images that are read by index."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from PIL import Image

from hetdpt.core.errors import DataError, first_line


@dataclass(frozen=True)
class Listed:
    """A ``Source`` made of functions; labels outside the classes are refused.

    The functions are called in worker processes too, so they are methods or partials of functions, not lambdas.
    """

    classes: tuple[str, ...]
    labels: Sequence[int]
    read: Callable[[int], Image.Image]
    name_of: Callable[[int], str]

    def __post_init__(self) -> None:
        for index, label in enumerate(self.labels):
            if not isinstance(label, int) or not 0 <= label < len(self.classes):
                raise DataError(
                    f"{self.name_of(index)} has label {label!r} but there are {len(self.classes)} classes, "
                    f"so labels are 0-{len(self.classes) - 1}; is this split labelled?"
                )

    @property
    def num_classes(self) -> int:
        return len(self.classes)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        label = self.labels[index]
        with reading(self.name_of(index)):
            return self.read(index), label

    def targets(self) -> Sequence[int]:
        return self.labels


@contextmanager
def reading(name: str) -> Iterator[None]:
    """Turn any error inside into ``OSError``; ``name`` is what is read."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:  # on damaged files PIL also raises SyntaxError, DecompressionBombError and others
        raise OSError(f"{name} cannot be read: {first_line(error)}") from error


def decode(file: IO[bytes]) -> Image.Image:
    """Return the whole image in ``file``, which is closed.

    The pixels are in the order in which PIL reads them: an EXIF orientation is not applied, as in torchvision and timm.
    """
    with file, warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # PIL's, about metadata of cameras
        with Image.open(file) as image:
            image.load()
            return image


def read_item(reader: Any, index: int) -> Image.Image:
    """Return the image of an item of a timm ``reader``."""
    return decode(reader[index][0])


def decode_file(path: str) -> Image.Image:
    """Return the whole image in the file ``path``; ``OSError`` if that cannot be read."""
    with reading(path):
        return decode(Path(path).open("rb"))


def hint_of_turning(image: Image.Image, size: tuple[int, int]) -> str:
    """Return the likely reason if annotations have the ``size`` (width, height) of the rotated ``image``."""
    return " (the EXIF orientation of images is not applied)" if image.size == size[::-1] else ""
