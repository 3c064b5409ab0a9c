"""Images with masks, a class for every pixel: their files, what the numbers in them mean, and their views."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from hetdpt.adapters.preprocessing import Preprocessing
from hetdpt.core.errors import DataError, first_line
from hetdpt.data.folders import EXTENSIONS, SPLITS
from hetdpt.data.listed import decode_file, hint_of_turning
from hetdpt.data.sources import check_splits
from hetdpt.data.views import in_mode, mode_of
from hetdpt.tasks import shapes
from hetdpt.tasks.annotated import AnnotatedData, AnnotatedSource, AnnotatedView, Target

IGNORED = 255
"""The value of pixels without a class: neither trained on nor scored."""
Mask = npt.NDArray[np.uint8]
"""(H, W): a class from 0 on, or ``IGNORED``."""
COLOUR = (("brightness", 0.125), ("contrast", 0.5), ("saturation", 0.5), ("hue", 0.05))
"""How much each may change: 32 of 255, half, half, and 18 of 360 degrees, as in SSD and usual for ADE20K."""
FIRST = {"annotations": 1, "masks": 0}
"""Folders of masks, and the number of class 0 in them: in ``annotations``, as in ADE20K, 0 is not a class."""
NAMES = ("objectInfo150.txt", "classes.txt")
"""Files with the names of the classes: the table of ADE20K, or one name on each line."""


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

    def __call__(self, image: Image.Image, target: Mask | None) -> tuple[Tensor, Target]:
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


def _scaled(image: Image.Image, target: Mask | None, size: tuple[int, int], scale: float) -> tuple[Any, Any]:
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


@dataclass(frozen=True)
class MaskFiles:
    """One split of a folder: images, each with its mask file."""

    classes: tuple[str, ...]
    images: tuple[str, ...]
    masks: tuple[str, ...]
    first: int
    """The number of class 0 in the files."""

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Image.Image, Mask]:
        image, file = decode_file(self.images[index]), self.masks[index]
        numbers = _numbers(file)
        if numbers.shape != image.size[::-1]:
            height, width = numbers.shape
            raise DataError(
                f"mask {file} has {width} x {height} pixels but its image has {image.width} x {image.height}; "
                f"a mask has a number for every pixel of its image{hint_of_turning(image, (width, height))}"
            )
        return image, self._mask(numbers, file)

    def name_of(self, index: int) -> str:
        return self.images[index]

    def facts(self) -> dict[str, Any]:
        names = "\n".join(Path(name).name for name in self.images)
        return {"images": len(self), "names": hashlib.sha256(names.encode()).hexdigest()}

    def _mask(self, numbers: npt.NDArray[np.int64], file: str) -> Mask:
        """Return the classes of the numbers in a file; ``DataError`` for a number that is not a class."""
        is_class = _is_class(numbers, self.first)
        last = len(self.classes) - 1 + self.first
        beyond = numbers[is_class & (numbers > last)]
        if len(beyond):
            nothing = f"0 or {IGNORED}" if self.first else f"{IGNORED}"
            raise DataError(
                f"mask {file} has the number {beyond[0]}, but the {len(self.classes)} classes are {self.first}-{last}, "
                f"and {nothing} for no class"
            )
        return np.where(is_class, numbers - self.first, IGNORED).astype(np.uint8)


def classes_of_pixels(_: int, drawing: shapes.Drawing) -> Mask:
    """Return the class of every pixel of a drawing; the background is class 0, and no pixel belongs to two objects."""
    classes = (drawing.masks * (drawing.labels + 1)[:, None, None]).sum(axis=0)
    return np.asarray(classes, dtype=np.uint8)


def open_masks(name: str, *, splits: tuple[str, ...] = ("train", "val")) -> AnnotatedData:
    """Return the splits of images with masks called ``name``: a folder, or ``shapes``, which is drawn.

    A folder has ``train/images`` and ``train/masks``, or ``images/train`` and ``masks/train``, and the same for
    ``val``; masks are PNG files with a class for every pixel, 255 for none. In a folder of masks called
    ``annotations``, as in ADE20K, classes start at 1 and 0 is no class. Images and masks directly in ``images`` and
    ``masks`` are used for both splits. The names of the classes are in ``objectInfo150.txt`` or ``classes.txt``;
    without such a file all masks are read once to count the classes.

    >>> data = open_masks("shapes")
    >>> len(data.train), len(data.val), data.classes
    (400, 100, ('background', 'rectangle', 'disc', 'triangle'))
    """
    check_splits(splits)
    opened = _drawn() if name == shapes.NAME else _in_folder(Path(name), splits)
    asked = {split: opened[split] for split in splits}
    return AnnotatedData(name, asked.get("train"), asked.get("val"), asked[splits[0]].classes)


def _drawn() -> dict[str, AnnotatedSource]:
    classes = ("background", *shapes.CLASSES)
    return {
        split: shapes.DrawnImages.of(split, shapes.SIDE_WITH_MASKS, classes, classes_of_pixels)
        for split in shapes.COUNTS
    }


def _in_folder(folder: Path, splits: tuple[str, ...]) -> dict[str, AnnotatedSource]:
    if not folder.is_dir():
        raise DataError(f"there is no folder {folder}; data is a folder of images and masks, or {shapes.NAME}")
    places = {split: place for split in SPLITS if (place := _place(folder, split))}
    for split in splits:
        if split not in places:
            raise DataError(_nothing(folder, split))
    if len({places[split] for split in splits}) < len(splits):
        warnings.warn(
            f"{folder} has no splits, so the scores are of the images that are trained on; make train and val to "
            "measure on others",
            stacklevel=3,
        )
    firsts = {place.first for place in places.values()}
    if len(firsts) > 1:
        raise DataError(f"{folder} has masks in one split and annotations in the other; use the same name for both")
    pairs = {split: place.pairs() for split, place in places.items()}
    first = firsts.pop()
    classes = _classes(folder, first, (mask for _, masks in pairs.values() for mask in masks))
    return {split: MaskFiles(classes, *files, first) for split, files in pairs.items()}


@dataclass(frozen=True)
class _Place:
    images: Path
    masks: Path
    first: int

    def pairs(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the images, by name, and the mask of each."""
        images = _images_in(self.images)
        if not images:
            raise DataError(f"{self.images} has no images; files that end in {', '.join(EXTENSIONS)} were expected")
        self._check_names(images)
        masks = [self.masks / f"{image.stem}.png" for image in images]
        missing = [mask for mask in masks if not mask.is_file()]
        if missing:
            raise DataError(
                f"{len(missing)} of {len(images)} images in {self.images} have no mask, for example {missing[0]}; "
                "a mask is a PNG file with the name of its image"
            )
        return tuple(map(str, images)), tuple(map(str, masks))

    def _check_names(self, images: list[Path]) -> None:
        """Raise ``DataError`` for images whose names differ only in their extension."""
        known: dict[str, str] = {}
        for image in images:
            other = known.setdefault(image.stem, image.name)
            if other != image.name:
                raise DataError(
                    f"{self.images} has {other} and {image.name}, which would share the mask {image.stem}.png; "
                    "rename one of them"
                )


def _place(folder: Path, split: str) -> _Place | None:
    inside = [(f"{name}/", "") for name in SPLITS[split]]
    below = [("", f"/{name}") for name in SPLITS[split]]
    for before, after in (*inside, *below, ("", "")):
        images = folder / f"{before}images{after}"
        if not images.is_dir() or not (before or after or _images_in(images)):
            continue
        for kind, first in FIRST.items():
            masks = folder / f"{before}{kind}{after}"
            if masks.is_dir():
                return _Place(images, masks, first)
        raise DataError(f"{images} has no masks: looked for {folder / f'{before}masks{after}'} and annotations")
    return None


def _nothing(folder: Path, split: str) -> str:
    found = sorted(inner.name for inner in folder.iterdir() if inner.is_dir())
    looked = [path for name in SPLITS[split] for path in (f"{name}/images", f"images/{name}")]
    shown = ", ".join(found[:5]) or "no folder"
    return f"{folder} has no images of split {split}: looked for {', '.join(looked)}, found {shown}"


def _images_in(folder: Path) -> list[Path]:
    return sorted(file for file in folder.iterdir() if file.suffix.lower() in EXTENSIONS and file.name[0] != ".")


def _classes(folder: Path, first: int, masks: Iterable[str]) -> tuple[str, ...]:
    """Return the names of the classes, from a file if there is one, otherwise the numbers in the masks."""
    file = next((folder / name for name in NAMES if (folder / name).is_file()), None)
    classes = _names(file) if file else tuple(str(number) for number in range(first, _highest(masks, first) + 1))
    where = f"the lines of {file}" if file else f"the masks of {folder}"
    if not 2 <= len(classes) < IGNORED:
        hint = f"; masks of two classes contain {first} and {first + 1}" if len(classes) < 2 else ""
        raise DataError(f"expected 2-{IGNORED - 1} classes, but {where} have {len(classes)}{hint}")
    twice = [name for place, name in enumerate(classes) if name in classes[:place]]
    if twice:
        raise DataError(f"{where} have the class {twice[0]!r} twice; give every class its own name")
    return classes


def _names(file: Path) -> tuple[str, ...]:
    """Return the name on each line; for the table of ADE20K, the first synonym in the last column."""
    try:
        lines = [line for line in file.read_text(encoding="utf-8-sig").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"the names of classes in {file} cannot be read: {first_line(error)}") from None
    if file.name == NAMES[0]:
        return tuple(line.split("\t")[-1].split(",")[0].strip() for line in lines[1:])
    return tuple(line.strip() for line in lines)


def _highest(masks: Iterable[str], first: int) -> int:
    """Return the highest class number in any of the files; one below the first if there is none."""
    highest = first - 1
    for file in masks:
        try:
            numbers = _numbers(file)
        except OSError:
            continue  # reported when it is used
        highest = max(highest, int(numbers[_is_class(numbers, first)].max(initial=highest)))
    return highest


def _is_class(numbers: npt.NDArray[np.int64], first: int) -> npt.NDArray[np.bool_]:
    return np.asarray((numbers >= first) & (numbers != IGNORED))


def _numbers(file: str) -> npt.NDArray[np.int64]:
    """Return the number of every pixel (H, W); for a PNG with a palette, the index into it, not the colour."""
    mask = decode_file(file)
    if len(mask.getbands()) != 1 or mask.mode == "F":
        raise DataError(
            f"mask {file} is a picture of mode {mask.mode}, but expected a PNG with one number for each pixel, grey or "
            "with a palette; convert its colours to class numbers"
        )
    return np.asarray(mask).astype(np.int64)
