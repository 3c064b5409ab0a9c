"""The data room: where images come from, which ones, and that a view depends on nothing but what it should."""

from __future__ import annotations

import io
import json
import pickle
import random
import struct
import sys
from collections import Counter
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from hetdpt.adapters.preprocessing import Preprocessing
from hetdpt.core.errors import DataError
from hetdpt.core.randomness import seeded
from hetdpt.data.augmentation import Augmentation, evaluation_transform, training_transform
from hetdpt.data.batches import EvaluationBatches, TrainingBatches
from hetdpt.data.images import prepared
from hetdpt.data.sources import Source, check_classes, open_data
from hetdpt.data.streams import Stream
from hetdpt.data.subset import balanced_order, subset
from hetdpt.data.views import Batch, Share, in_mode

HALF = (0.5, 0.5, 0.5)
WANTED = Preprocessing(input_size=(3, 16, 16), mean=HALF, std=HALF, crop_pct=0.9)
ONCE = Augmentation(repeats=1)


def picture(number: int, side: int = 20) -> Image.Image:
    pixels = np.random.RandomState(number).randint(0, 256, (side, side + 4, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def write_folder(folder: Path, *, per_class: int = 5, classes: Iterable[str] = ("cat", "dog", "owl")) -> Path:
    """Write real JPEG and PNG files: train/ with ``per_class`` images of each class, val/ with 3."""
    number = 0
    for split, count in (("train", per_class), ("val", 3)):
        for name in classes:
            (folder / split / name).mkdir(parents=True)
            for place in range(count):
                number += 1
                picture(number).save(folder / split / name / f"{place}.{'png' if place % 2 else 'jpg'}")
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "Data")


@pytest.fixture
def train(folder: Path) -> Source:
    return listed(open_data(str(folder)).train)


def listed(source: Source | Stream | None) -> Source:
    assert source is not None
    assert not isinstance(source, Stream)
    return source


@dataclass
class Plain:
    """A source of one-coloured images, to see which ones came."""

    labels: list[int]
    num_classes: int = 3

    @property
    def classes(self) -> tuple[str, ...]:
        return tuple(str(number) for number in range(self.num_classes))

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        return Image.new("RGB", (8, 8), (index % 256, 0, 0)), self.labels[index]

    def targets(self) -> list[int]:
        return self.labels

    def name_of(self, index: int) -> str:
        return f"image {index}"


def assert_same(one: Iterable[Batch], other: Iterable[Batch]) -> None:
    """Assert that batches are bit-equal."""
    for a, b in zip(one, other, strict=True):
        assert torch.equal(a.images, b.images)
        assert torch.equal(a.targets, b.targets)
        assert torch.equal(a.indices, b.indices)
        assert a.unreadable == b.unreadable


def interleaved(parts: list[Batch]) -> Batch:
    """Return what one process would have seen of the batches of all ranks."""

    def weave(name: str) -> torch.Tensor:
        return torch.stack([getattr(part, name) for part in parts], 1).flatten(0, 1)

    return Batch(weave("images"), weave("targets"), weave("indices"))


# Randomness


def test_seeded_gives_the_same_numbers_and_the_generators_back() -> None:
    def draw() -> tuple[float, ...]:
        return random.random(), random.gauss(0, 1), np.random.randn(), torch.randn(()).item(), torch.rand(()).item()

    random.gauss(0, 1), np.random.randn()  # each keeps a second number for the next call
    before = random.getstate(), pickle.dumps(np.random.get_state()), torch.get_rng_state()
    with seeded(1, 2):
        first = draw()
    with seeded(1, 2):
        assert draw() == first
        with seeded(3):
            draw()
    with seeded(2, 1):
        assert not set(draw()) & set(first)
    after = random.getstate(), pickle.dumps(np.random.get_state()), torch.get_rng_state()
    assert before[:2] == after[:2]
    assert torch.equal(before[2], after[2])


def test_seeded_tells_a_zero_from_nothing_and_survives_an_error() -> None:
    state = torch.get_rng_state()
    with seeded(1):
        one = torch.rand(())
    with seeded(1, 0):
        assert torch.rand(()) != one
    with pytest.raises(ZeroDivisionError), seeded(1):
        raise ZeroDivisionError
    assert torch.equal(torch.get_rng_state(), state)


# Where images come from


def test_a_folder_has_its_splits_with_labels_in_the_order_of_the_names(folder: Path) -> None:
    data = open_data(str(folder))
    train, val = listed(data.train), listed(data.val)
    assert (len(train), len(val), data.num_classes) == (15, 9, 3)
    assert train.classes == ("cat", "dog", "owl")
    assert list(train.targets()) == [0] * 5 + [1] * 5 + [2] * 5
    image, label = train[6]
    assert (image.size, label) == ((24, 20), 1)
    assert train.name_of(6) == str(folder / "train" / "dog" / "1.png")
    assert np.array_equal(np.asarray(image), np.asarray(Image.open(train.name_of(6)).convert("RGB")))


@pytest.mark.parametrize("name", ["validation", "valid", "eval", "test"])
def test_val_may_have_another_name_and_the_best_one_is_taken(folder: Path, name: str) -> None:
    (folder / "val").rename(folder / name)
    assert len(listed(open_data(str(folder), splits=("val",)).val)) == 9
    (folder / "train").rename(folder / "val")
    (folder / "val" / "cat" / "0.jpg").unlink()
    assert len(listed(open_data(str(folder), splits=("val",)).val)) == 14


def test_only_what_is_asked_for_must_be_there(folder: Path) -> None:
    (folder / "val").rename(folder / "holdout")
    assert open_data(str(folder), splits=("train",)).val is None
    text = "Data has no val split: looked for val, validation, valid, eval, test, found holdout, train$"
    with pytest.raises(DataError, match=text):
        open_data(str(folder))
    with pytest.raises(DataError, match="splits are train and val, not test"):
        open_data(str(folder), splits=("test",))


def test_a_relative_folder_counts_from_the_root(folder: Path) -> None:
    assert open_data("Data", root=folder.parent).num_classes == 3


@pytest.mark.parametrize("splits", [("train", "val"), ("val",), ("train",)])
def test_splits_with_different_classes_are_refused(folder: Path, splits: tuple[str, ...]) -> None:
    (folder / "val" / "cat").rename(folder / "val" / "cow")
    text = "train has a class folder cat but .*val does not; labels must mean the same in both"
    with pytest.raises(DataError, match=text):
        open_data(str(folder), splits=splits)


def test_an_unlabelled_test_folder_is_no_obstacle(folder: Path) -> None:
    (folder / "test").mkdir()
    picture(0).save(folder / "test" / "0.png")
    assert len(listed(open_data(str(folder)).val)) == 9


def test_folders_without_sense_are_refused_in_a_sentence(folder: Path) -> None:
    with pytest.raises(DataError, match="^there is no folder .*nowhere; data is a folder with train/ and val/"):
        open_data(str(folder / "nowhere"))
    with pytest.raises(DataError, match="^there is no folder ftp/x; .* torch/NAME, hfds/NAME, wds/FOLDER or demo$"):
        open_data("ftp/x")
    with pytest.raises(DataError, match="train has no train split: .* found cat, dog, owl$"):
        open_data(str(folder / "train"))
    for image in (folder / "val" / "owl").iterdir():
        image.unlink()
    (folder / "val" / ".checkpoints").mkdir()
    with pytest.raises(DataError, match="^class folder .*owl has no images; add some or remove the folder$"):
        open_data(str(folder), splits=("val",))
    picture(0).save(folder / "val" / "stray.png")
    with pytest.raises(DataError, match="val has images outside its class folders, for example stray.png"):
        open_data(str(folder), splits=("val",))


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "train" / "cat").mkdir(parents=True)
    with pytest.raises(
        DataError, match="train has no images; a folder for each class was expected, with files that end in .jpg, "
    ):
        open_data(str(tmp_path), splits=("train",))
    with pytest.raises(DataError, match="looked for val, .* found train$"):
        open_data(str(tmp_path), splits=("val",))


def test_the_demo_set_has_all_digits_in_both_splits_and_no_image_twice() -> None:
    data = open_data("demo")
    train, val = listed(data.train), listed(data.val)
    assert (len(train), len(val), data.num_classes) == (1437, 360, 10)
    assert max(Counter(val.targets()).values()) - min(Counter(val.targets()).values()) <= 2
    image, label = val[0]
    assert (image.mode, image.size, label) == ("RGB", (8, 8), val.targets()[0])
    assert max(np.asarray(val[index][0]).max() for index in range(9)) == 255
    seen = [np.asarray(source[index][0]).tobytes() for source in (train, val) for index in range(len(source))]
    assert len(set(seen)) == 1797


def test_datasets_of_torchvision(tmp_path: Path) -> None:
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for split, count in (("train", 6), ("t10k", 4)):
        pixels = np.arange(count * 784, dtype=np.uint32).astype(np.uint8)
        header = struct.pack(">IIII", 0x803, count, 28, 28)
        (raw / f"{split}-images-idx3-ubyte").write_bytes(header + pixels.tobytes())
        (raw / f"{split}-labels-idx1-ubyte").write_bytes(struct.pack(">II", 0x801, count) + bytes(range(count)))
    data = open_data("torch/mnist", root=tmp_path)
    train, val = listed(data.train), listed(data.val)
    assert (len(train), len(val), data.num_classes) == (6, 4, 10)
    assert list(val.targets()) == [0, 1, 2, 3]
    assert val.classes[3] == "3 - three"
    assert val.name_of(2) == "image 2 of torch/mnist val"
    assert next(iter(EvaluationBatches(val, WANTED, batch_size=4))).images.shape == (4, 3, 16, 16)


def test_datasets_of_torchvision_that_are_not_there(tmp_path: Path) -> None:
    text = "torch/cifar100 cannot be opened in .*: Dataset not found .* \\(allow the download, or give the root"
    with pytest.raises(DataError, match=text):
        open_data("torch/cifar100", root=tmp_path)
    with pytest.raises(DataError, match="torch/cats cannot be opened in .*: Unknown torchvision dataset cats"):
        open_data("torch/cats", root=tmp_path)


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A cache for datasets, which asks the hub about nothing."""
    import datasets

    datasets.disable_progress_bars()
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    return tmp_path / "cache"


def test_datasets_of_huggingface_from_a_folder(folder: Path, offline: Path) -> None:
    data = open_data(f"hfds/{folder}", root=offline)
    train, plain = listed(data.train), listed(open_data(str(folder)).train)
    assert train.classes == plain.classes
    assert list(train.targets()) == list(plain.targets())
    assert train.name_of(6) == plain.name_of(6)
    assert np.array_equal(np.asarray(train[6][0]), np.asarray(plain[6][0]))


def parquet(folder: Path, labels: Any, column: str = "fine_label") -> str:
    import datasets

    kind = datasets.ClassLabel(names=["no", "yes"]) if isinstance(labels[0], int) else datasets.Value("string")
    features = datasets.Features({"img": datasets.Image(), column: kind})
    rows = {"img": [picture(number) for number in range(len(labels))], column: labels}
    folder.mkdir()
    datasets.Dataset.from_dict(rows, features=features).to_parquet(folder / "test-0.parquet")
    return f"hfds/{folder}"


def test_datasets_of_huggingface_as_parquet_with_other_columns(tmp_path: Path, offline: Path) -> None:
    name = parquet(tmp_path / "Set", [0, 1, 1])
    val = listed(open_data(name, splits=("val",), root=offline).val)
    assert (len(val), val.classes, list(val.targets())) == (3, ("no", "yes"), [0, 1, 1])
    assert np.array_equal(np.asarray(val[2][0]), np.asarray(picture(2)))
    assert val.name_of(2) == f"image 2 of {name} test"
    with pytest.raises(DataError, match="has no train split: looked for train, training, found test"):
        open_data(name, root=offline)


def test_datasets_of_huggingface_that_cannot_be_used(tmp_path: Path, offline: Path) -> None:
    name = parquet(tmp_path / "words", ["a", "b"])
    text = "does not have exactly one column of type ClassLabel for its labels; its columns are img .Image., fine"
    with pytest.raises(DataError, match=text):
        open_data(name, splits=("val",), root=offline)
    name = parquet(tmp_path / "unlabelled", [-1, -1])
    with pytest.raises(DataError, match="has label -1 but there are 2 classes, so labels are 0-1; is this split"):
        open_data(name, splits=("val",), root=offline)
    with pytest.raises(DataError, match="^hfds/nowhere/nothing cannot be opened: "):
        open_data("hfds/nowhere/nothing", root=offline)


@pytest.mark.parametrize(("name", "package"), [("hfds/x", "datasets"), ("wds/x", "webdataset")])
def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, name: str, package: str) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(DataError, match=f"{name} needs the package {package}; pip install hetdpt.data."):
        open_data(name)


# Which images


@given(st.lists(st.integers(0, 3), min_size=4, max_size=40), st.integers(0, 9), st.floats(0.01, 1), st.floats(0.01, 1))
def test_a_fraction_holds_the_smaller_ones(labels: list[int], seed: int, one: float, other: float) -> None:
    source = Plain(labels, 4)
    small, large = (subset(source, fraction=part, seed=seed) for part in sorted((one, other)))
    names = [{part.name_of(index) for index in range(len(part))} for part in (small, large)]
    assert names[0] <= names[1]
    assert len(names[0]) == len(small) == max(1, int(np.ceil(min(one, other) * len(labels))))
    assert [small[index][1] for index in range(len(small))] == list(small.targets())


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(0, 9))
def test_every_beginning_of_a_balanced_order_has_the_classes_in_proportion(labels: list[int], seed: int) -> None:
    order = balanced_order(labels, seed)
    assert sorted(order) == list(range(len(labels)))
    sizes, classes = Counter(labels), len(set(labels))
    for length in range(len(labels)):
        counts = Counter(labels[index] for index in order[:length])
        for label, size in sizes.items():
            assert abs(counts[label] - length * size / len(labels)) <= classes


def test_a_subset_per_class_and_by_seed() -> None:
    source = Plain([0] * 5 + [1] * 9 + [2] * 7)
    few = subset(source, per_class=2, seed=1)
    assert Counter(few.targets()) == {0: 2, 1: 2, 2: 2}

    def names(seed: int) -> list[str]:
        part = subset(source, per_class=2, seed=seed)
        return [part.name_of(index) for index in range(len(part))]

    assert names(1) == names(1) != names(2)
    assert set(names(1)) <= {source.name_of(index) for index in range(len(source))}
    assert len(subset(source)) == 21
    assert few.classes == source.classes


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"fraction": 0.0}, "above 0 and at most 1, not 0.0"),
        ({"fraction": 1.5}, "above 0 and at most 1, not 1.5"),
        ({"fraction": 0.5, "per_class": 2}, "a fraction .0.5. or a count per class .2., not both"),
        ({"per_class": 0}, "at least 1 image per class, not 0"),
        ({"per_class": 3}, "class 1 has only 2 images, fewer than 3 per class; use at most 2"),
        ({"seed": -1}, "a seed is from 0 to 4294967295, not -1"),
    ],
)
def test_subsets_that_cannot_be_are_refused(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(DataError, match=text):
        subset(Plain([0, 0, 0, 1, 1], 2), **arguments)


# Views


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"erasing": 1.5}, "erasing is a probability from 0 to 1, not 1.5"),
        ({"hflip": -0.1}, "hflip is a probability"),
        ({"scale": (0.5, 0.1)}, "scale is two increasing fractions of the area"),
        ({"ratio": (2.0, 1.0)}, "ratio is two increasing numbers"),
        ({"color_jitter": -1}, "color_jitter is at least 0"),
        ({"repeats": 0}, "repeats is at least 1, not 0"),
        ({"views": 1}, "fixed views repeated 3 times would be the same view; set repeats to 1"),
    ],
)
def test_augmentations_that_contradict_themselves_are_refused(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(DataError, match=text):
        Augmentation(**arguments)


@pytest.mark.parametrize("policy", ["rand-q9", "nonsense"])
def test_an_unknown_policy_is_refused(policy: str) -> None:
    with pytest.raises(DataError, match=f"timm does not know the augmentation '{policy}'"):
        training_transform(WANTED, Augmentation(auto_augment=policy))


@pytest.mark.parametrize("policy", ["rand-m10-inc1", "rand-m10-n9-inc1", "original", "v0", "augmix-m10"])
def test_the_strongest_policies_work_with_this_pillow(policy: str) -> None:
    transform = training_transform(WANTED, Augmentation(auto_augment=policy))
    for number in range(60):
        with seeded(number):
            assert transform(picture(number)).shape == (3, 16, 16)


def test_no_augmentation_is_the_evaluation() -> None:
    assert Augmentation.plain().is_plain
    assert not Augmentation(auto_augment=None, color_jitter=0, erasing=0, scale=(1, 1), ratio=(1, 1)).is_plain
    source = Plain([0, 1, 2, 0])
    batch = next(TrainingBatches(source, WANTED, Augmentation.plain(), batch_size=4).epoch(0))
    whole = next(iter(EvaluationBatches(source, WANTED, batch_size=4)))
    assert torch.equal(batch.images, whole.images[batch.indices])


@pytest.mark.parametrize("policy", ["rand-m9-mstd0.5-inc1", "original", "augmix-m3", "3a", None])
def test_grey_models_get_grey_images(policy: str | None) -> None:
    wanted = Preprocessing(input_size=(1, 16, 16), mean=(0.5,), std=(0.5,))
    source = Plain([0] * 32)
    batch = next(TrainingBatches(source, wanted, Augmentation(auto_augment=policy), batch_size=32).epoch(0))
    assert batch.images.shape == (32, 1, 16, 16)
    assert next(iter(EvaluationBatches(source, wanted, batch_size=2))).images.shape == (2, 1, 16, 16)


TONES = np.tile(np.arange(0, 240, 20, dtype=np.uint8), (12, 1))


@pytest.mark.parametrize("mode", ["L", "RGB"])
@pytest.mark.parametrize("kind", ["PNG", "TIFF", "PPM"])
def test_grey_of_16_bits_is_scaled_to_8(mode: str, kind: str) -> None:
    """PIL reads it as I;16, or as I in PPM, and would make everything above 255 white."""
    file = io.BytesIO()
    Image.fromarray(TONES.astype(np.uint16) * 257).save(file, kind)
    with Image.open(file) as image:
        seen = in_mode(image, mode)
    assert seen.mode == mode
    assert (np.asarray(seen) == np.asarray(Image.fromarray(TONES).convert(mode))).all()


def test_what_is_in_the_mode_already_is_not_copied_and_colours_are_pil_s() -> None:
    image = picture(0)
    assert in_mode(image, "RGB") is image
    assert (np.asarray(in_mode(image, "L")) == np.asarray(image.convert("L"))).all()


def test_evaluation_is_timms_for_the_model(train: Source) -> None:
    import timm
    from timm.data import create_transform, resolve_model_data_config

    model = timm.create_model("vit_tiny_patch16_224", img_size=32)
    config = {**resolve_model_data_config(model), "input_size": (3, 32, 32)}
    wanted = Preprocessing(input_size=(3, 32, 32), mean=HALF, std=HALF, crop_pct=0.9)
    image = train[0][0].convert("RGB")
    assert torch.equal(create_transform(**config)(image), evaluation_transform(wanted)(image))


# Training batches


@pytest.mark.parametrize("augmentation", [Augmentation(), ONCE, Augmentation(repeats=1, views=1)])
def test_workers_have_no_part_in_a_view(train: Source, augmentation: Augmentation) -> None:
    alone = TrainingBatches(train, WANTED, augmentation, batch_size=4, seed=3)
    helped = TrainingBatches(train, WANTED, augmentation, batch_size=4, seed=3, workers=2)
    for epoch in (1, 0):
        assert_same(alone.epoch(epoch), helped.epoch(epoch))
    first = next(helped.epoch(2))  # left in the middle
    assert_same(alone.epoch(1, 1), helped.epoch(1, 1))
    assert_same([next(alone.epoch(2))], [first])


def test_an_epoch_begun_in_the_middle_is_the_tail_of_the_whole(train: Source) -> None:
    batches = TrainingBatches(train, WANTED, Augmentation(), batch_size=2)
    whole = list(batches.epoch(5))
    assert len(whole) == len(batches) == 7
    for start in (0, 3, 6, 7):
        assert_same(whole[start:], batches.epoch(5, start))


@pytest.mark.parametrize("repeats", [1, 3])
@pytest.mark.parametrize(("world", "size"), [(2, 3), (3, 2), (7, 1)])
def test_many_processes_see_together_what_one_sees(train: Source, world: int, size: int, repeats: int) -> None:
    augmentation = Augmentation(repeats=repeats)
    one = TrainingBatches(train, WANTED, augmentation, batch_size=world * size, seed=1)
    many = [
        TrainingBatches(train, WANTED, augmentation, batch_size=size, seed=1, share=Share(rank, world))
        for rank in range(world)
    ]
    assert {len(batches) for batches in many} == {len(one)}
    for whole, *parts in zip(one.epoch(2), *(batches.epoch(2) for batches in many), strict=True):
        assert_same([whole], [interleaved(parts)])


def test_an_epoch_shows_every_image_once_or_fewer_of_them_repeatedly() -> None:
    source = Plain([0] * 30)

    def shown(repeats: int, epoch: int, seed: int = 0) -> list[int]:
        batches = TrainingBatches(source, WANTED, Augmentation(repeats=repeats), batch_size=5, seed=seed)
        return torch.cat([batch.indices for batch in batches.epoch(epoch)]).tolist()

    assert sorted(shown(1, 0)) == list(range(30))
    assert set(Counter(shown(3, 0)).values()) == {3}
    assert len(shown(3, 0)) == 30
    assert len({tuple(shown(1, epoch, seed)) for epoch in range(3) for seed in range(3)}) == 9


def test_views_differ_by_epoch_seed_and_repeat_unless_fixed(train: Source) -> None:
    def views(augmentation: Augmentation, epoch: int, seed: int = 0) -> dict[int, list[bytes]]:
        found: dict[int, list[bytes]] = {}
        for batch in TrainingBatches(train, WANTED, augmentation, batch_size=5, seed=seed).epoch(epoch):
            for index, image in zip(batch.indices.tolist(), batch.images, strict=True):
                found.setdefault(index, []).append(image.numpy().tobytes())
        return found

    assert all(len(set(same)) == 3 for same in views(Augmentation(), 0).values())
    fixed = Augmentation(repeats=1, views=1)
    for augmentation, epochs_agree in ((ONCE, False), (fixed, True)):
        one, other = views(augmentation, 0), views(augmentation, 1)
        assert len(one) == 15
        assert all((one[index] == other[index]) == epochs_agree for index in one)
        assert all(one[index] != view for index, view in views(augmentation, 0, seed=1).items())


@pytest.mark.parametrize("world", [1, 2, 4])
def test_fixed_views_in_order_are_those_of_the_epochs(train: Source, world: int) -> None:
    fixed = Augmentation(repeats=1, views=1)
    seen = {}
    for batch in TrainingBatches(train, WANTED, fixed, batch_size=3, seed=4).epoch(8):
        seen.update(zip(batch.indices.tolist(), batch.images, strict=True))
    shares = [TrainingBatches(train, WANTED, fixed, batch_size=3, seed=4, share=Share(r, world)) for r in range(world)]
    ordered = [list(batches.in_order()) for batches in shares]
    assert len({len(batches) for batches in ordered}) == 1
    indices = [index for batches in ordered for batch in batches for index in batch.indices.tolist()]
    assert sorted(index for index in indices if index >= 0) == list(range(15))
    for batch in (batch for batches in ordered for batch in batches):
        for index, target, image in zip(batch.indices.tolist(), batch.targets.tolist(), batch.images, strict=True):
            assert torch.equal(image, seen[index] if index >= 0 else torch.zeros(3, 16, 16))
            assert target == (train.targets()[index] if index >= 0 else -1)
    with pytest.raises(DataError, match="only fixed views can be read in order; set views"):
        TrainingBatches(train, WANTED, ONCE, batch_size=3).in_order()


def test_the_global_generators_are_left_alone(train: Source) -> None:
    before = random.getstate(), pickle.dumps(np.random.get_state()), torch.get_rng_state()
    list(TrainingBatches(train, WANTED, Augmentation(), batch_size=3).epoch(0))
    list(EvaluationBatches(train, WANTED, batch_size=3))
    list(EvaluationBatches(train, WANTED, batch_size=3, workers=1))
    assert (random.getstate(), pickle.dumps(np.random.get_state())) == before[:2]
    assert torch.equal(torch.get_rng_state(), before[2])


def test_batches_that_cannot_be_are_refused(train: Source) -> None:
    with pytest.raises(DataError, match="^15 images do not fill a batch of 16; use a batch size of at most 15$"):
        TrainingBatches(train, WANTED, ONCE, batch_size=16)
    text = "^15 images do not fill a batch of 8 on each of 2 processes; use a batch size of at most 7$"
    with pytest.raises(DataError, match=text):
        TrainingBatches(train, WANTED, ONCE, batch_size=8, share=Share(0, 2))
    with pytest.raises(DataError, match="use at most 15 processes$"):
        TrainingBatches(train, WANTED, ONCE, batch_size=1, share=Share(0, 20))
    with pytest.raises(DataError, match="a batch has at least 1 image, not 0"):
        EvaluationBatches(train, WANTED, batch_size=0)
    with pytest.raises(DataError, match="workers and seed are at least 0, not 0 and -1"):
        TrainingBatches(train, WANTED, ONCE, batch_size=1, seed=-1)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_label_outside_the_classes_is_refused_in_a_sentence(workers: int) -> None:
    batches = EvaluationBatches(Plain([0, 1, 3]), WANTED, batch_size=1, workers=workers)
    with pytest.raises(DataError, match="^image 2 has label 3 but there are 3 classes, 0-2$"):
        list(batches)


# Evaluation batches


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize(("count", "size"), [(1, 4), (7, 2), (12, 4), (13, 5)])
def test_evaluation_counts_every_image_once(count: int, size: int, world: int) -> None:
    source = Plain([index % 3 for index in range(count)])
    shares = [EvaluationBatches(source, WANTED, batch_size=size, share=Share(rank, world)) for rank in range(world)]
    batches = [list(share) for share in shares]
    assert [len(share) for share in shares] == [len(part) for part in batches]
    sizes = [[len(batch.targets) for batch in part] for part in batches]
    assert all(part == sizes[0] for part in sizes)
    found = [pair for part in batches for batch in part for pair in zip(batch.indices, batch.targets, strict=True)]
    real = sorted((int(index), int(target)) for index, target in found if target >= 0)
    assert real == [(index, index % 3) for index in range(count)]
    assert all(int(index) == -1 for index, target in found if target < 0)
    assert len(found) - count < world  # no more padding than needed


def test_evaluation_is_the_same_with_workers(train: Source) -> None:
    helped = EvaluationBatches(train, WANTED, batch_size=4, workers=2)
    for _ in range(2):
        assert_same(EvaluationBatches(train, WANTED, batch_size=4), helped)


# Unreadable files


def damaged(kind: str) -> bytes:
    whole = {}
    for form in ("JPEG", "PNG"):
        file = io.BytesIO()
        picture(0, side=60).save(file, form)
        whole[form] = file.getvalue()
    header = whole["PNG"][16:24]
    return {
        "empty": b"",
        "garbage": b"this is not an image" * 9,
        "truncated jpeg": whole["JPEG"][: len(whole["JPEG"]) // 2],
        "truncated png": whole["PNG"][: len(whole["PNG"]) // 2],
        "broken png chunk": whole["PNG"][:60] + b"\0" * 30 + whole["PNG"][90:],
        "png of a wrong sum": whole["PNG"].replace(header, struct.pack(">II", 61, 60)),
        "bomb": b"P6 30000 30000 255\n" + bytes(99),
    }[kind]


KINDS = ("empty", "garbage", "truncated jpeg", "truncated png", "broken png chunk", "png of a wrong sum", "bomb")


@pytest.mark.parametrize("kind", KINDS)
def test_an_unreadable_image_is_named_and_not_counted_in_evaluation(folder: Path, kind: str) -> None:
    bad = folder / "val" / "dog" / "0.jpg"
    bad.write_bytes(damaged(kind))
    (batch,) = EvaluationBatches(listed(open_data(str(folder)).val), WANTED, batch_size=16)
    assert batch.unreadable == (str(bad),)
    assert batch.targets.tolist() == [0, 0, 0, -1, 1, 1, 2, 2, 2]
    assert batch.indices.tolist() == list(range(9))
    assert not batch.images[3].any()
    assert all(batch.images[place].any() for place in range(9) if place != 3)


@pytest.mark.parametrize("size", [(1, 200_000), (200_000, 1)], ids=["thin", "flat"])
@pytest.mark.parametrize("crop_mode", ["center", "border", "squash"])
def test_an_image_too_thin_to_be_resized_is_unreadable(folder: Path, size: tuple[int, int], crop_mode: str) -> None:
    """Resizing its shorter side to 17 pixels would make 58 million of 200,000, its longer one none."""
    thin = folder / "val" / "dog" / "0.jpg"
    Image.new("RGB", size).save(thin, "PNG")
    wanted, unreadable = replace(WANTED, crop_mode=crop_mode), () if crop_mode == "squash" else (str(thin),)
    source = listed(open_data(str(folder)).val)
    (batch,) = EvaluationBatches(source, wanted, batch_size=16)
    assert batch.unreadable == unreadable
    (batch,) = TrainingBatches(source, wanted, Augmentation.plain(), batch_size=9).epoch(0)
    assert batch.unreadable == unreadable
    with pytest.raises(DataError, match="200000.* would be resized to ") if unreadable else nullcontext():
        prepared([thin], wanted)


@pytest.mark.parametrize("crop_mode", ["center", "squash", "border"])
def test_a_preprocessing_that_asks_for_too_much_reads_no_image(folder: Path, crop_mode: str) -> None:
    wanted = replace(WANTED, crop_mode=crop_mode, crop_pct=1e-3)  # as a saved model may say
    (batch,) = EvaluationBatches(listed(open_data(str(folder)).val), wanted, batch_size=16)
    assert len(batch.unreadable) == 9


@pytest.mark.parametrize("workers", [0, 2])
def test_in_training_the_next_readable_image_takes_its_place(folder: Path, workers: int) -> None:
    bad = [folder / "train" / "cat" / "4.jpg", folder / "train" / "dog" / "0.jpg"]
    for path in bad:
        path.write_bytes(damaged("garbage"))
    bad[1].unlink()
    bad[1].symlink_to("nowhere")
    source = listed(open_data(str(folder), splits=("train",)).train)
    batches = TrainingBatches(source, WANTED, Augmentation.plain(), batch_size=5, workers=workers)
    shown = {}
    names: list[str] = []
    for batch in batches.epoch(0):
        names += batch.unreadable
        shown.update({int(i): (int(t), v) for i, t, v in zip(batch.indices, batch.targets, batch.images, strict=True)})
    assert sorted(shown) == list(range(15))
    assert sorted(names) == sorted([str(bad[0]), str(bad[1]), str(bad[1])])
    for index in (4, 5):  # both give way to image 6
        assert shown[index][0] == 1
        assert torch.equal(shown[index][1], shown[6][1])


@pytest.mark.parametrize("workers", [0, 1])
def test_training_stops_when_nothing_can_be_read(folder: Path, workers: int) -> None:
    source = listed(open_data(str(folder), splits=("train",)).train)
    for path in (folder / "train").rglob("*.*"):
        path.write_bytes(b"")
    batches = TrainingBatches(source, WANTED, ONCE, batch_size=5, workers=workers)
    with pytest.raises(DataError, match=r"^/.*train/.*g cannot be read, nor can the 14 images after it$"):
        list(batches.epoch(0))


def test_classes_of_data_and_model_must_be_as_many() -> None:
    check_classes(10, 10)
    text = "^the data has 10 classes but the model's head has 1000; build the model with --num-classes 10 or give the"
    with pytest.raises(DataError, match=text):
        check_classes(10, 1000)


# Streams of shards. webdataset leaves its files to the garbage collector, which pytest reports.


def write_shards(folder: Path, **shards: list[int]) -> Path:
    """Write shards of so many images for each split, whose label and colour say which image it is."""
    import webdataset

    folder.mkdir()
    info: dict[str, Any] = {"num_classes": 100, "splits": {}}
    for split, lengths in shards.items():
        names = [f"{split}-{shard}.tar" for shard in range(len(lengths))]
        numbers = iter(range(sum(lengths)))
        for name, length in zip(names, lengths, strict=True):
            with webdataset.TarWriter(str(folder / name)) as tar:
                for number in islice(numbers, length):
                    file = io.BytesIO()
                    Image.new("RGB", (20, 20), (number, 9, 9)).save(file, "PNG")
                    tar.write({"__key__": f"{split}{number}", "png": file.getvalue(), "cls": str(number)})
        facts = {"name": split, "num_samples": sum(lengths), "filenames": names, "shard_lengths": lengths}
        info["splits"][split] = facts
    (folder / "_info.json").write_text(json.dumps(info))
    return folder


@pytest.fixture
def shards(tmp_path: Path) -> str:
    return f"wds/{write_shards(tmp_path / 'Shards', train=[5, 5, 4, 6], validation=[3, 4, 2])}"


def stream(source: Source | Stream | None) -> Stream:
    assert isinstance(source, Stream)
    return source


unclosed = pytest.mark.filterwarnings(
    "ignore:Exception ignored in. <_io.FileIO.*tar:pytest.PytestUnraisableExceptionWarning"
)


@unclosed
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_evaluation_of_a_stream_counts_every_image_once(shards: str, world: int, workers: int) -> None:
    val = stream(open_data(shards).val)
    parts = [
        EvaluationBatches(val, WANTED, batch_size=2, share=Share(rank, world), workers=workers) for rank in range(world)
    ]
    batches = [list(part) for part in parts]
    assert {len(part) for part in batches} == {len(part) for part in parts}
    assert len({len(part) for part in batches}) == 1
    found = [label for part in batches for batch in part for label in batch.targets.tolist()]
    assert sorted(label for label in found if label >= 0) == list(range(9))
    assert all(batch.images.shape == (2, 3, 16, 16) for part in batches for batch in part)


@unclosed
@pytest.mark.parametrize("workers", [0, 2])
def test_training_on_a_stream_is_repeatable_and_can_begin_in_the_middle(shards: str, workers: int) -> None:
    train = stream(open_data(shards).train)
    batches = TrainingBatches(train, WANTED, ONCE, batch_size=5, seed=1, workers=workers)
    whole = list(batches.epoch(3))
    assert len(whole) == len(batches) == 4
    again = TrainingBatches(train, WANTED, ONCE, batch_size=5, seed=1, workers=workers)
    list(again.epoch(0))
    assert_same(whole, again.epoch(3))
    assert_same(whole[2:], again.epoch(3, 2))
    other = torch.cat([batch.targets for batch in again.epoch(4)])
    assert not torch.equal(other, torch.cat([batch.targets for batch in whole]))


@unclosed
def test_processes_share_the_shards_of_a_stream(shards: str) -> None:
    train = stream(open_data(shards).train)
    parts = [TrainingBatches(train, WANTED, ONCE, batch_size=5, share=Share(rank, 2)) for rank in range(2)]
    seen = [torch.cat([batch.targets for batch in part.epoch(0)]).tolist() for part in parts]
    assert [len(labels) for labels in seen] == [10, 10]
    assert not set(seen[0]) & set(seen[1])
    with pytest.raises(DataError, match="5 processes need as many shards, but there are 4"):
        TrainingBatches(train, WANTED, ONCE, batch_size=1, share=Share(0, 5))


@unclosed
def test_an_unreadable_image_of_a_stream_is_counted(shards: str) -> None:
    folder = Path(shards.removeprefix("wds/"))
    shard = folder / "validation-1.tar"
    shard.write_bytes(shard.read_bytes().replace(b"IHDR", b"XXXX", 1))
    batches = list(EvaluationBatches(stream(open_data(shards).val), WANTED, batch_size=4))
    assert sum(int((batch.targets >= 0).sum()) for batch in batches) == 8
    assert batches[-1].unreadable == (f"{folder} validation, unreadable 1 of process 0",)


@unclosed
def test_a_thin_image_of_a_stream_is_counted_as_unreadable(shards: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hetdpt.data.augmentation.MOST_PIXELS", 17 * 17 - 1)  # all of them are too thin then
    batches = list(EvaluationBatches(stream(open_data(shards).val), WANTED, batch_size=4))
    assert all((batch.targets == -1).all() for batch in batches)
    assert len(batches[-1].unreadable) == 9


@unclosed
def test_grey_of_16_bits_is_seen_in_folders_single_files_and_shards(tmp_path: Path) -> None:
    import webdataset

    seen: list[list[torch.Tensor]] = []
    for name, pixels in (("8", TONES), ("16", TONES.astype(np.uint16) * 257)):
        folder = write_folder(tmp_path / name, per_class=1)
        file = folder / "val/cat/1.png"
        Image.fromarray(pixels).save(file)
        shards = write_shards(tmp_path / f"shards{name}", val=[1])
        with webdataset.TarWriter(str(shards / "val-0.tar")) as tar:
            tar.write({"__key__": "0", "png": file.read_bytes(), "cls": "0"})
        val = listed(open_data(str(folder)).val)
        [batch, *_] = EvaluationBatches(val, WANTED, batch_size=2)
        [streamed] = EvaluationBatches(stream(open_data(f"wds/{shards}", splits=("val",)).val), WANTED, batch_size=1)
        seen.append([batch.images[1], prepared([file], WANTED)[0], streamed.images[0]])
    assert val.name_of(1) == str(file)
    for eight, sixteen in zip(*seen, strict=True):
        assert torch.equal(eight, sixteen)
    assert len(seen[1][0].unique()) > 2  # not all white


@unclosed
def test_streams_that_cannot_be_used_are_refused(shards: str) -> None:
    folder = Path(shards.removeprefix("wds/"))
    train = stream(open_data(shards).train)
    with pytest.raises(DataError, match="a stream of shards has no subset"):
        subset(train, fraction=0.5)
    with pytest.raises(DataError, match="a stream of shards has neither repeats nor fixed views"):
        TrainingBatches(train, WANTED, Augmentation(), batch_size=2)
    info = json.loads((folder / "_info.json").read_text())
    (folder / "_info.json").write_text(json.dumps({**info, "num_classes": 4}))
    with pytest.raises(DataError, match="^an image of the stream has label 4 but there are 4 classes"):
        list(EvaluationBatches(stream(open_data(shards).val), WANTED, batch_size=2, workers=1))
    (folder / "train-2.tar").unlink()
    with pytest.raises(DataError, match="lists 1 shards that do not exist, for example train-2.tar"):
        open_data(shards)
    for text, message in (
        ("{}", "has no splits"),
        ("{", "is not JSON"),
        ('{"splits": {"train": {}}}', "is incomplete; expected num_classes and, in each split, filenames and"),
    ):
        (folder / "_info.json").write_text(text)
        with pytest.raises(DataError, match=message):
            open_data(shards)
    (folder / "_info.json").unlink()
    with pytest.raises(DataError, match="_info.json, which describes the shards, does not exist"):
        open_data(shards)
