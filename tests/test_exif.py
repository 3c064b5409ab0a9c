"""The EXIF orientation of an image: not applied by any reader, as timm and torchvision's ``ImageFolder`` have it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from PIL import Image
from test_data import WANTED, listed, offline, stream, unclosed  # noqa: F401 - a fixture
from torchvision.datasets.folder import default_loader

from hetdpt.core.errors import DataError
from hetdpt.data.augmentation import evaluation_transform
from hetdpt.data.images import open_images, prepared
from hetdpt.data.listed import decode_file
from hetdpt.data.sources import open_data
from hetdpt.tasks.boxes import open_boxes
from hetdpt.tasks.masks import open_masks

ORIENTATION, TURNED = 0x0112, 6  # by 90 degrees


@pytest.fixture
def turned(tmp_path: Path) -> Path:
    """Return a folder whose images, 40 x 20 pixels with a white right half, are to be shown upright by their EXIF."""
    for place in ("train/cat", "train/dog", "val/cat", "val/dog"):
        write(tmp_path / "folder" / place / "a.jpg")
    return tmp_path / "folder"


def write(file: Path, size: tuple[int, int] = (40, 20)) -> Path:
    image = Image.new("RGB", size)
    image.paste("white", (size[0] // 2, 0, *size))
    exif = Image.Exif()
    exif[ORIENTATION] = TURNED
    file.parent.mkdir(parents=True, exist_ok=True)
    image.save(file, exif=exif)
    return file


def pixels(image: Image.Image) -> npt.NDArray[np.uint8]:
    return np.asarray(image.convert("RGB"))


def of_folder(folder: Path) -> Image.Image:
    return listed(open_data(str(folder)).val)[0][0]


def of_files(folder: Path) -> Image.Image:
    return listed(open_images(str(folder)))[0][0]


def of_huggingface(folder: Path) -> Image.Image:
    return listed(open_data(f"hfds/{folder}", root=folder.parent / "cache").val)[0][0]


def of_parquet(folder: Path) -> Image.Image:
    import datasets

    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["cat"])})
    rows = {"image": [{"bytes": (folder / "val/cat/a.jpg").read_bytes(), "path": None}], "label": [0]}
    (folder.parent / "parquet").mkdir()
    datasets.Dataset.from_dict(rows, features=features).to_parquet(folder.parent / "parquet" / "test-0.parquet")
    data = open_data(f"hfds/{folder.parent / 'parquet'}", splits=("val",), root=folder.parent / "cache")
    return listed(data.val)[0][0]


def of_shards(folder: Path) -> Image.Image:
    import webdataset

    with webdataset.TarWriter(str(folder / "val-0.tar")) as tar:
        tar.write({"__key__": "0", "jpg": (folder / "val/cat/a.jpg").read_bytes(), "cls": "0"})
    facts = {"name": "val", "num_samples": 1, "filenames": ["val-0.tar"], "shard_lengths": [1]}
    (folder / "_info.json").write_text(json.dumps({"num_classes": 1, "splits": {"val": facts}}))
    [(image, _)] = stream(open_data(f"wds/{folder}", splits=("val",)).val).evaluation_images("RGB", 0, 1)
    assert isinstance(image, Image.Image)
    return image


def of_boxes(folder: Path) -> Image.Image:
    content = {
        "images": [{"id": 1, "file_name": "a.jpg", "width": 40, "height": 20}],
        "categories": [{"id": 1, "name": "cat"}],
        "annotations": [{"id": 1, "image_id": 1, "category_id": 1, "bbox": [20, 0, 20, 20]}],
    }
    file = folder / "val/cat/boxes.json"
    file.write_text(json.dumps(content))
    source = open_boxes(str(file), splits=("val",)).val
    assert source is not None
    return source[0][0]


def of_masks(folder: Path) -> Image.Image:
    (folder / "masked/val/masks").mkdir(parents=True)
    (folder / "masked/val/images").mkdir()
    shutil.copy(folder / "val/cat/a.jpg", folder / "masked/val/images")
    mask = np.arange(40) // 20 * np.ones((20, 1))
    Image.fromarray(mask.astype(np.uint8)).save(folder / "masked/val/masks/a.png")
    source = open_masks(str(folder / "masked"), splits=("val",)).val
    assert source is not None
    return source[0][0]


@unclosed
@pytest.mark.parametrize(
    "reader",
    [of_folder, of_files, of_huggingface, of_parquet, of_shards, of_boxes, of_masks],
    ids=lambda each: each.__name__,
)
@pytest.mark.usefixtures("offline")
def test_no_reader_turns_an_image(reader: Callable[[Path], Image.Image], turned: Path) -> None:
    image, theirs = reader(turned), default_loader(str(turned / "val/cat/a.jpg"))
    assert image.size == theirs.size == (40, 20)
    assert np.array_equal(pixels(image), pixels(theirs))
    assert pixels(image)[:, 25:].min() > 200 > 50 > pixels(image)[:, :15].max()  # white on the right


def test_neither_does_the_reader_of_single_pictures(turned: Path) -> None:
    file = turned / "val/cat/a.jpg"
    assert torch.equal(prepared([file], WANTED)[0], evaluation_transform(WANTED)(default_loader(str(file))))


@pytest.mark.parametrize("suffix", [".jpg", ".png", ".webp", ".tif"])
def test_every_format_is_read_as_by_torchvision(tmp_path: Path, suffix: str) -> None:
    file = write(tmp_path / f"a{suffix}")
    assert np.array_equal(pixels(decode_file(str(file))), pixels(default_loader(str(file))))


@pytest.mark.parametrize(
    ("reader", "sentence"),
    [
        (of_boxes, r"a\.jpg has 20 x 40 pixels but .*\.json says 40 x 20; its boxes would not fit"),
        (
            of_masks,
            r"a\.png has 40 x 20 pixels but its image has 20 x 40; a mask .* for every pixel of its image",
        ),
    ],
)
def test_annotations_of_the_turned_image_are_told_what_is_wrong(
    reader: Callable[[Path], Image.Image], sentence: str, turned: Path
) -> None:
    write(turned / "val/cat/a.jpg", (20, 40))
    with pytest.raises(DataError, match=rf"{sentence} \(the EXIF orientation of images is not applied\)$"):
        reader(turned)
    write(turned / "val/cat/a.jpg", (20, 30))
    shutil.rmtree(turned / "masked", ignore_errors=True)
    with pytest.raises(DataError, match=f"{sentence}$".replace("20 x 40", "20 x 30")):
        reader(turned)
