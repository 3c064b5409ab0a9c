"""Images without labels: which they are, that they are the same each time, and what cannot be used."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import test_cli
import torch
from test_cli import Run
from test_data import WANTED, picture, unclosed, write_folder, write_shards
from test_training import SHORT
from test_training_cli import build_trained
from torch import Tensor

import hetdpt
from hetdpt.core.errors import DataError, TrainError
from hetdpt.data import fixed_batches
from hetdpt.data.fixed_batches import ImageBatches
from hetdpt.data.images import is_unlabelled, open_images
from hetdpt.data.sources import Source, open_data
from hetdpt.data.streams import Stream
from hetdpt.flow import oneshot
from hetdpt.flow.unlabelled import labelled_by, note_on, open_any
from hetdpt.results import RunSummary
from hetdpt.store.run_directory import summary_of
from hetdpt.surgery.record import require_record
from hetdpt.training.recover import recover

run = test_cli.run  # the fixture


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


# As data that the dense model labels


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with a dense model and a folder ``photos`` of 60 images without labels."""
    folder = build_trained(tmp_path_factory.mktemp("unlabelled"), SHORT)
    demo = open_data("demo").train
    assert demo is not None
    assert not isinstance(demo, Stream)
    for number in range(60):
        place = folder / "photos" / ("a" if number % 2 else "b/deep")
        place.mkdir(parents=True, exist_ok=True)
        demo[number][0].save(place / f"{number:02d}.png")
    return folder


@pytest.mark.parametrize(
    ("files", "is_one"),
    [
        (["1.png"], True),
        (["cat/1.png", "dog/2.png"], True),
        (["train/1.png"], True),
        (["train/1.png", "val/cat/2.png"], True),
        (["train/cat/1.png", "val/cat/2.png"], False),
        (["train/1.png", "train/cat/2.png"], False),  # a stray image does not take the labels from the others
        (["val/cat/2.png"], False),
        (["notes.txt"], False),
    ],
)
def test_which_folders_have_no_labels(tmp_path: Path, files: list[str], is_one: bool) -> None:
    write(tmp_path / "Data", *(file for file in files if file.endswith("png")))
    (tmp_path / "Data" / "notes.txt").parent.mkdir(exist_ok=True)
    (tmp_path / "Data" / "notes.txt").write_text("no image")
    assert is_unlabelled("Data", tmp_path) is is_one
    assert is_unlabelled(str(tmp_path / "Data")) is is_one


def test_other_data_has_labels() -> None:
    assert not any(is_unlabelled(name) for name in ("demo", "torch/cifar100", "wds/Shards", "nowhere", ""))


def test_labels_are_what_the_dense_model_predicts(home: Path, tmp_path: Path) -> None:
    photos = tmp_path / "photos"
    shutil.copytree(home / "photos", photos)
    (photos / "damaged.png").write_bytes(b"no image")
    dense, steps = hetdpt.load(home / "dense"), list[tuple[int, int]]()
    data = open_any(str(photos), dense, progress=lambda *step: steps.append(step))
    assert steps == [(1, 1)]
    assert data.train is not None
    assert data.val is not None
    assert (len(data.train), len(data.val), data.num_classes) == (54, 6, 10)
    assert data.metric == "agreement with the dense model"
    assert not data.is_labelled
    assert set(names_of(data.train)).isdisjoint(names_of(data.val))
    assert hetdpt.evaluate(dense, data).top1 == 100
    assert hetdpt.evaluate(dense, replace(data, val=data.train)).top1 == 100
    assert "60 images of " in note_on(data)
    assert "agreement with the dense model" in note_on(data)
    other = labelled_by(hetdpt.load(home / "raw"), open_images(str(photos)), str(photos))
    assert names_of(other.val) == names_of(data.val)  # type: ignore[arg-type]
    assert other.identity == data.identity


def test_no_label_counts_in_the_loss(home: Path) -> None:
    dense = hetdpt.load(home / "dense")
    data, student = open_any(str(home / "photos"), dense), hetdpt.load(home / "raw")
    with pytest.raises(TrainError, match="labels have a weight of 0.1 in the loss, but .* has none; set dist"):
        next(iter(recover(student, dense, data, SHORT)))
    with pytest.raises(TrainError, match="training without a teacher needs labels, but .* has none; give a"):
        next(iter(recover(student, None, data, SHORT)))


BRIEF = ("--epochs", 1, "--batch-size", 8, "--lr", 1e-4, "--workers", 0)


def test_recover_without_labels(run: Run, home: Path, tmp_path: Path) -> None:
    (home / "plan.json").write_text(hetdpt.Plan(attention=(1,)).to_json())
    command = ("recover", home / "dense", "--plan", home / "plan.json", "--data", home / "photos", *BRIEF)
    result = run(*command, "--set", "hold_out=0.2", "--out", tmp_path / "run")
    assert result.code == 0, result.err
    assert f"60 images of {home / 'photos'}, no labels are used: accuracy is agreement with the dense" in result.out
    assert "agreement with the dense model of 11 training images that were held out: start" in result.out
    assert "agreement with the dense model of 6 validation images: best" in result.out
    assert summary_of(tmp_path / "run")["metric"] == "agreement with the dense model"
    again = run(*command, "--set", "hold_out=0.2", "--out", tmp_path / "run")
    assert "is already done" in again.out
    refused = run(*command, "--alpha", 0.5, "--out", tmp_path / "other")
    refused.is_refused(
        f"labels have a weight of 0.5 in the loss, but {home / 'photos'} has none; set distillation.alpha to 1 "
        "(--alpha 1)"
    )


def test_train_needs_labels(run: Run, home: Path, tmp_path: Path) -> None:
    refused = run("train", home / "dense", "--data", home / "photos", *BRIEF, "--out", tmp_path / "run")
    refused.is_refused(
        f"{home / 'photos'} has images without labels, which only hetdpt run, recover and oneshot can use; give "
        "a folder with train/ and val/, each with a folder per class"
    )


@pytest.mark.slow
def test_a_run_without_labels(run: Run, home: Path, tmp_path: Path) -> None:
    command = ("run", home / "dense", "--data", home / "photos", "--layers", 1, "--method", "random", "--images", 8)
    result = run(*command, *BRIEF, "--out", tmp_path / "run")
    assert result.code == 0, result.err
    assert "no labels are used: accuracy is agreement with the dense model" in result.err
    assert "% agreement with the dense model" in result.out
    summary = RunSummary.read(tmp_path / "run")
    assert summary.metric == "agreement with the dense model"
    assert summary.dense_accuracy == 100
    for name in ("report.md", "report.html"):
        text = (tmp_path / "run" / name).read_text()
        assert "every accuracy here is agreement with the dense model" in text
        assert "accurate" not in text.replace("data-accurate", "")
    assert "recovery:" in (tmp_path / "run" / "config.yaml").read_text()
    refused = run(*command, *BRIEF, "--set", "recovery.distillation.alpha=0.5", "--out", tmp_path / "other")
    refused.is_refused_like(
        r"labels have a weight of 0\.5 .* has none; set recovery.distillation.alpha to 1 \(--alpha 1\)"
    )


SHOT = ("--layers", 1, "--kind", "attention", "--images", 8, "--judge-images", 8, "--batch-size", 8)


def test_oneshot_and_recovery(run: Run, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oneshot, "TIMING_SECONDS", 0.1)
    command = ("oneshot", home / "dense", "--data", home / "photos", *SHOT, "--out", tmp_path / "out")
    training = ("--recover", "--epochs", 2, "--set", "training.batch_size=8")
    real = oneshot.recover_into

    def killed(*arguments: Any, **options: Any) -> Iterator[Any]:
        yield next(real(*arguments, **options))
        raise DataError("stopped")

    monkeypatch.setattr(oneshot, "recover_into", killed)
    assert run(*command, *training).err == "error: stopped\n"
    assert not (tmp_path / "out").exists()
    monkeypatch.setattr(oneshot, "recover_into", real)
    other = run(*command, *training, "--layers", 2)
    assert other.code == 2
    assert "was started with layers = 1, not 2" in other.err
    result = run(*command, *training)
    assert result.code == 0, result.err
    assert f"resuming {tmp_path / 'out.recovery'}" in result.out
    assert "agreement with the dense model" in result.out
    assert not (tmp_path / "out.recovery").exists()
    written = json.loads((tmp_path / "out" / "oneshot.json").read_text())
    recovery, model = written["recovery"], hetdpt.load(tmp_path / "out")
    data = open_any(str(home / "photos"), hetdpt.load(home / "dense"))
    assert recovery["agreement_after"] == hetdpt.evaluate(model, data).top1
    assert (recovery["images"], recovery["trained_on"], recovery["epochs"]) == (6, 54, 2)
    assert recovery["measured_on"] == "5 training images that were held out"
    assert recovery["damage_before"] > 0
    record = require_record(model)
    assert record.is_trimmed
    assert record.plan.attention
    run(*command, "--epochs", 2, "--overwrite").is_refused(
        "--epochs, --minutes and --set are settings of a training; add --recover"
    )
