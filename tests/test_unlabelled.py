"""Images without labels: which they are, that they are the same each time, and what cannot be used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_data import WANTED, picture, unclosed, write_folder, write_shards
from torch import Tensor

from hetdpt.core.errors import DataError
from hetdpt.data import fixed_batches
from hetdpt.data.fixed_batches import ImageBatches
from hetdpt.data.images import open_images
from hetdpt.data.sources import Source
from hetdpt.data.streams import Stream


def write(folder: Path, *names: str) -> Path:
    """Write a different image under each of ``names``."""
    for number, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        picture(number).save(folder / name)
    return folder


@pytest.fixture
def flat(tmp_path: Path) -> Path:
    return write(tmp_path / "flat", *(f"{number:02d}.png" for number in range(11)))


def names_of(source: Source | Stream) -> list[str]:
    assert not isinstance(source, Stream)
    return [source.name_of(index) for index in range(len(source))]


def batches_of(folder: Path | str, **options: Any) -> ImageBatches:
    return ImageBatches(open_images(str(folder)), WANTED, **{"batch_size": 4, **options})


def joined(batches: ImageBatches) -> Tensor:
    return torch.cat(list(batches))


def common(one: Tensor, other: Tensor) -> int:
    """Return how many images are in both."""
    return sum(bool((image == other).flatten(1).all(1).any()) for image in one)


# Which images


def test_a_flat_folder(flat: Path) -> None:
    (flat / "notes.txt").write_text("no image")
    source = open_images(str(flat))
    assert names_of(source) == [str(flat / f"{number:02d}.png") for number in range(11)]
    assert source.num_classes == 1


def test_folders_in_a_folder_are_gone_into_and_count_as_classes(tmp_path: Path) -> None:
    folder = write(tmp_path / "nested", "a/1.png", "a/2.JPG", "b/deep/3.webp", "4.png", ".hidden/5.png", "a/._1.png")
    (folder / "c").symlink_to(write(tmp_path / "elsewhere", "6.png"))
    source = open_images(str(folder))
    expected = ["4.png", "a/1.png", "a/2.JPG", "b/deep/3.webp", "c/6.png"]
    assert names_of(source) == [str(folder / name) for name in expected]
    assert source.num_classes == 4


def test_of_a_folder_with_train_only_that(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "Data")
    source = open_images("Data", root=tmp_path)
    assert len(source) == 15
    assert source.num_classes == 3
    assert all(name.startswith(str(folder / "train")) for name in names_of(source))


def test_labels_need_not_make_sense(tmp_path: Path) -> None:
    """For training, images beside class folders and classes that val has not are refused."""
    folder = write(tmp_path / "Data", "training/1.png", "training/cat/2.png", "val/dog/3.png")
    assert [Path(name).name for name in names_of(open_images(str(folder)))] == ["1.png", "2.png"]


def test_the_demo_set_is_the_demo_set_also_beside_a_folder_of_that_name(tmp_path: Path) -> None:
    write(tmp_path / "demo", "1.png")
    assert len(open_images("demo", root=tmp_path)) == len(open_images("demo")) == 1437


def test_what_has_no_images_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "empty"
    with pytest.raises(DataError, match=f"^there is no folder {folder}; data is a folder with train/ and val/"):
        open_images(str(folder))
    (folder / "inner").mkdir(parents=True)
    with pytest.raises(DataError, match=rf"^{folder} has no images; files that end in .jpg, .* were expected$"):
        open_images(str(folder))
    (folder / "train").mkdir()
    write(folder, "inner/1.png")
    with pytest.raises(DataError, match=f"^{folder}/train has no images; files that end in"):
        open_images(str(folder))


# Batches


def test_batches_are_images_prepared_for_the_model(flat: Path) -> None:
    batches = batches_of(flat, count=10)
    assert [tuple(images.shape) for images in batches] == [(4, 3, 16, 16), (4, 3, 16, 16), (2, 3, 16, 16)]
    assert len(batches) == 3
    assert all(images.dtype == torch.float32 for images in batches)
    assert common(joined(batches), joined(batches_of(flat, count=11))) == 10


def test_they_are_the_same_each_time_and_others_for_another_seed(flat: Path) -> None:
    batches = batches_of(flat, count=5)
    assert torch.equal(joined(batches), joined(batches))
    assert torch.equal(joined(batches), joined(batches_of(flat, count=5, workers=1, batch_size=2)))
    assert not torch.equal(joined(batches), joined(batches_of(flat, count=5, seed=1)))


def test_those_that_start_later_are_others(flat: Path) -> None:
    one, other = joined(batches_of(flat, count=6)), joined(batches_of(flat, count=9, start=6))
    assert (len(one), len(other)) == (6, 5)  # there are 11
    assert common(one, other) == 0
    assert common(torch.cat([one, other]), joined(batches_of(flat, count=11))) == 11


def test_classes_are_in_proportion(tmp_path: Path) -> None:
    folder = write(tmp_path / "nested", *(f"{'ab'[number % 2]}/{number}.png" for number in range(12)))
    source = open_images(str(folder))
    assert not isinstance(source, Stream)
    halves = [joined(ImageBatches(source, WANTED, count=6, start=start)) for start in (0, 6)]
    alone = [joined(batches_of(folder / name, count=6)) for name in "ab"]
    assert [[common(half, one) for one in alone] for half in halves] == [[3, 3], [3, 3]]


def test_small_sets_are_read_once_and_kept(flat: Path) -> None:
    batches = batches_of(flat, count=5)
    before = joined(batches)
    for file in flat.iterdir():
        file.unlink()
    assert torch.equal(joined(batches), before)


@pytest.mark.parametrize("workers", [0, 2])
def test_large_ones_are_read_again_also_when_left_in_the_middle(
    flat: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    kept = joined(batches_of(flat, count=10))
    monkeypatch.setattr(fixed_batches, "KEPT", 4 * 10 * 3 * 16 * 16 - 1)
    batches = batches_of(flat, count=10, workers=workers)
    next(iter(batches))
    assert torch.equal(joined(batches), kept)
    assert torch.equal(joined(batches), kept)
    for file in flat.iterdir():
        file.write_bytes(b"no image")
    with pytest.raises(DataError, match="^none of 10 images can be read, for example "):
        list(batches)


def test_an_unreadable_image_is_left_out(flat: Path) -> None:
    whole = joined(batches_of(flat, count=11))
    (flat / "03.png").write_bytes(b"no image")
    batches = batches_of(flat, count=11)
    assert [len(images) for images in batches] == [4, 4, 2]
    assert common(joined(batches), whole) == 10


def test_nothing_but_unreadable_images_are_refused(flat: Path) -> None:
    for file in flat.iterdir():
        file.write_bytes(b"no image")
    with pytest.raises(DataError, match=rf"^none of 3 images can be read, for example {flat}/\d\d.png; check the fil"):
        iter(batches_of(flat, count=3))


def test_too_few_images_are_refused(flat: Path) -> None:
    with pytest.raises(DataError, match="^at least 1 image is needed, not 0$"):
        batches_of(flat, count=0)
    with pytest.raises(DataError, match="^there are only 11 images; more than 11 are needed$"):
        batches_of(flat, count=1, start=11)


@unclosed
@pytest.mark.parametrize("workers", [0, 2])
def test_of_a_stream_the_first_ones_and_those_after_them(tmp_path: Path, workers: int) -> None:
    """Two workers fill up their last batches with blanks, which are no images and no steps on the way."""
    name = f"wds/{write_shards(tmp_path / 'Shards', train=[5, 5, 4, 6], validation=[3])}"
    whole = joined(batches_of(name, count=20, workers=workers))
    assert len(whole.unique(dim=0)) == 20
    for start, sizes in ((7, [4, 4, 4, 1]), (18, [2])):
        first = batches_of(name, count=start, workers=workers)
        rest = batches_of(name, count=99, start=start, workers=workers)
        assert [len(images) for images in rest] == sizes
        assert len(rest) == len(sizes)
        assert torch.equal(torch.cat([joined(first), joined(rest)]), whole)
