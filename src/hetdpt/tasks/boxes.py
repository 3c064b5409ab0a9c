"""Images with boxes around objects: COCO's format or drawn shapes, and their views on a canvas."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor

from hetdpt.adapters.preprocessing import Preprocessing
from hetdpt.core.errors import DataError, first_line
from hetdpt.data.folders import SPLITS
from hetdpt.data.listed import decode_file, hint_of_turning
from hetdpt.data.sources import check_same_classes, check_splits
from hetdpt.data.views import in_mode, mode_of
from hetdpt.store.atomic import parse_json
from hetdpt.tasks import shapes
from hetdpt.tasks.annotated import AnnotatedData, AnnotatedSource, AnnotatedView, Target

FILES = ("annotations/instances_{}*.json", "annotations/{}*.json", "{}/_annotations.coco.json", "{}*.json")
"""Where the annotations of a split may be, the most likely place first."""
PROBES = 20
"""The first images of a split, of which at least one must be in a folder for it to be used."""
SCALES = (0.6, 1.6)
"""Smallest and largest side of a training image on the canvas, relative to that in an evaluation."""
SMALLEST = 1.0
"""Pixels that a side of a box must have on the canvas to be trained on."""


def open_boxes(name: str, *, splits: tuple[str, ...] = ("train", "val")) -> AnnotatedData:
    """Return the splits of the data called ``name``; ``splits`` are ``train``, ``val`` or both.

    ``name`` is a folder in COCO's layout (``train2017/``, ``annotations/instances_train2017.json`` and the like), one
    file of annotations, which then is used for every split, or ``shapes``: drawn images that come with hetdpt.

    >>> data = open_boxes("shapes")
    >>> len(data.train), len(data.val), data.classes
    (400, 100, ('rectangle', 'disc', 'triangle'))
    """
    check_splits(splits)
    opened = {split: _open(name, split) for split in splits}
    check_same_classes(name, [split.classes for split in opened.values()])
    return AnnotatedData(name, opened.get("train"), opened.get("val"), opened[splits[0]].classes)


def _open(name: str, split: str) -> AnnotatedSource:
    path = Path(name)
    if name == shapes.NAME:
        return shapes.DrawnImages.of(split, shapes.SIDE_WITH_BOXES, shapes.CLASSES, _boxes_of)
    if path.is_dir():
        return CocoBoxes(*_found(path, split))
    if path.is_file():
        root = path.parent.parent if path.parent.name == "annotations" else path.parent
        content = _content(path)
        return CocoBoxes(path, content, _images_of(content, path, root, path.stem))
    raise DataError(f"{name} does not exist; give a folder in COCO's layout, a file of annotations or {shapes.NAME}")


class CocoBoxes:
    """A split in COCO's format. Labels are 0, 1, ... in the order of the category ids, which may have gaps."""

    def __init__(self, file: Path, content: dict[str, list[Any]], folder: Path) -> None:
        self._file, self._folder = file, folder
        categories = sorted(
            (_of(entry, "id", file, int), str(_of(entry, "name", file))) for entry in content["categories"]
        )
        self.category_ids: tuple[int, ...] = tuple(number for number, _ in categories)
        """The category id in the file of each label."""
        self.classes: tuple[str, ...] = tuple(_class_names(categories))
        """Their names; categories with the same name have their ids appended."""
        if len(set(self.category_ids)) < len(categories):
            raise DataError(f"{file} has two categories with the same id; every class needs its own")
        self._names = [str(_of(entry, "file_name", file)) for entry in content["images"]]
        side = int | float | None
        self._sizes = [tuple(_of(entry, key, file, side) for key in ("height", "width")) for entry in content["images"]]
        self._objects = _objects(content, self.category_ids, file)
        if not any(len(objects.boxes) for objects in self._objects):
            raise DataError(f"{file} has no boxes of its images; there is nothing to train on or to measure")

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, index: int) -> tuple[Image.Image, Objects]:
        path = self.name_of(index)
        image = decode_file(path)
        height, width = self._sizes[index]
        if height is not None and width is not None and (width, height) != image.size:
            raise DataError(
                f"{path} has {image.width} x {image.height} pixels but {self._file} says {width} x {height}; its boxes "
                f"would not fit{hint_of_turning(image, (width, height))}"
            )
        return image, self._objects[index]

    def name_of(self, index: int) -> str:
        return str(self._folder / self._names[index])

    def facts(self) -> dict[str, Any]:
        found = hashlib.sha256("\n".join(self._names).encode())
        for objects in self._objects:
            found.update(objects.boxes.tobytes() + objects.labels.tobytes() + objects.crowd.tobytes())
        boxes = sum(len(objects.boxes) for objects in self._objects)
        return {"images": len(self), "boxes": boxes, "checksum": found.hexdigest()}


def _boxes_of(index: int, drawing: shapes.Drawing) -> Objects:
    """Return the objects of a drawing, each with the box around its visible pixels."""
    boxes = np.array([_around(mask) for mask in drawing.masks], dtype=np.float64)
    areas = drawing.masks.sum(axis=(1, 2)).astype(np.float64)
    return Objects(index, boxes, drawing.labels, areas, np.zeros(len(boxes), dtype=np.bool_))


def _around(mask: npt.NDArray[np.bool_]) -> tuple[int, int, int, int]:
    """Return left, top, width and height of the box around the pixels of a mask (H, W)."""
    rows, columns = (np.flatnonzero(mask.any(axis=axis)) for axis in (1, 0))
    return columns[0], rows[0], columns[-1] + 1 - columns[0], rows[-1] + 1 - rows[0]


def _found(folder: Path, split: str) -> tuple[Path, dict[str, list[Any]], Path]:
    """Return the annotation file of a split, its content, and the folder of its images."""
    files = [
        (file, name)
        for name in SPLITS[split]
        for pattern in FILES
        for file in sorted(folder.glob(pattern.format(name)))
        if file.is_file()
    ]
    if not files:
        looked = ", ".join(pattern.format(SPLITS[split][0]) for pattern in FILES)
        raise DataError(
            f"{folder} has no annotations of {split}: looked for {looked}, also with "
            f"{', '.join(SPLITS[split][1:])} in place of {SPLITS[split][0]}"
        )
    file, name = files[0]
    content = _content(file)
    return file, content, _images_of(content, file, folder, name)


def _images_of(content: dict[str, list[Any]], file: Path, root: Path, name: str) -> Path:
    own = file.stem.removeprefix("instances_")
    inner = (own, f"images/{own}", name, f"images/{name}", "images", ".")
    places = [*dict.fromkeys([*(root / place for place in inner), file.parent])]
    names = [str(_of(entry, "file_name", file)) for entry in content["images"][:PROBES]]
    for place in places:
        if any((place / one).is_file() for one in names):
            return place
    raise DataError(
        f"{file} lists the image {names[0] if names else 'nothing'}, which is in none of {', '.join(map(str, places))}"
    )


def _content(file: Path) -> dict[str, list[Any]]:
    try:
        content = parse_json(file.read_bytes())
    except OSError as error:
        raise DataError(f"{file} cannot be read: {first_line(error)}") from None
    except ValueError as error:
        raise DataError(
            f"{file} is not JSON: {first_line(error)}; annotations in COCO's format were expected"
        ) from None
    for key in ("images", "annotations", "categories"):
        entries = content.get(key) if isinstance(content, dict) else None
        if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
            raise DataError(f"{file} has no list of {key}; COCO's format has images, annotations and categories")
        if not entries:
            raise DataError(f"{file} has an empty list of {key}; there is nothing to train on or to measure")
    found: dict[str, list[Any]] = content
    return found


def _of(entry: dict[str, Any], key: str, file: Path, kind: Any = int | str) -> Any:
    if not isinstance(entry.get(key), kind):
        raise DataError(f"{file} has the entry {_short(entry)}, in which {key!r} is not as in COCO's format")
    return entry.get(key)


def _class_names(categories: Sequence[tuple[int, str]]) -> Iterator[str]:
    """Yield the names of categories; where several have the same name, with their ids, so that all differ."""
    counts = Counter(name for _, name in categories)
    for number, name in categories:
        yield name if counts[name] == 1 else f"{name} (id {number})"


def _short(entry: Any) -> str:
    text = repr(entry)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _objects(content: dict[str, list[Any]], category_ids: Sequence[int], file: Path) -> list[Objects]:
    """Return the objects of each image, without empty boxes and boxes of images that are not listed."""
    rows: dict[Any, list[tuple[list[float], int, float, bool]]] = {
        _of(entry, "id", file): [] for entry in content["images"]
    }
    if len(rows) < len(content["images"]):
        raise DataError(f"{file} has two images with the same id; every image needs its own")
    labels = {number: label for label, number in enumerate(category_ids)}
    for entry in content["annotations"]:
        image, category = _of(entry, "image_id", file), _of(entry, "category_id", file)
        if category not in labels:
            raise DataError(
                f"{file} has a box of category {category!r}, but its categories are {_short(list(category_ids))}; add "
                "the category to the file, or remove the box"
            )
        box = _box(entry, file)
        if image in rows and box[2] > 0 and box[3] > 0:
            area = _area(entry, file)
            area = box[2] * box[3] if area is None else area
            rows[image].append((box, labels[category], area, bool(entry.get("iscrowd", 0))))
    return [*_as_arrays(rows.values())]


def _box(entry: dict[str, Any], file: Path) -> list[float]:
    box = entry.get("bbox")
    numbers = [_number(one) for one in box] if isinstance(box, list) else []
    found = [one for one in numbers if one is not None]
    if len(numbers) != 4 or len(found) != 4:
        raise DataError(f"{file} has the box {_short(box)}; left, top, width and height in pixels were expected")
    return found


def _area(entry: dict[str, Any], file: Path) -> float | None:
    area = entry.get("area")
    number = _number(area)
    if area is not None and number is None:
        raise DataError(f"{file} has a box whose area is {_short(area)}; pixels were expected, or no area")
    return number


def _number(value: Any) -> float | None:
    """Return ``value`` if it is a number that a float can hold; JSON has integers of any length."""
    try:
        number = float(value) if isinstance(value, int | float) else math.nan
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _as_arrays(rows: Any) -> Iterator[Objects]:
    for number, found in enumerate(rows):
        boxes, labels, areas, crowd = zip(*found, strict=True) if found else ((), (), (), ())
        yield Objects(
            number,
            np.array(boxes, dtype=np.float64).reshape(-1, 4),
            np.array(labels, dtype=np.int64),
            np.array(areas, dtype=np.float64),
            np.array(crowd, dtype=np.bool_),
        )


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
