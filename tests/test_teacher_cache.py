"""Answers of a teacher on disk: equal to asking it, stated before they are written, used again or asked again."""

from __future__ import annotations

import os
import shutil
import tempfile
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_training import PLAIN, SHORT, Memory, numbers, tiny, weights
from torch import Tensor, nn

import hetdpt
from hetdpt.core.errors import FileError, TrainError
from hetdpt.core.plan import Plan
from hetdpt.data.augmentation import Augmentation
from hetdpt.flow.execution import Execution
from hetdpt.flow.resumable import recover_into
from hetdpt.store.arrays import FILLED, ArrayFiles
from hetdpt.surgery.remove import prune_
from hetdpt.surgery.tail import trim_
from hetdpt.training.objective import Distillation, Objective
from hetdpt.training.recover import RecoverConfig, recover
from hetdpt.training.teacher_cache import TeacherCache

HIDDEN = replace(
    SHORT,
    training=replace(PLAIN, epochs=3),
    augmentation=Augmentation(repeats=1, views=2, auto_augment=None, erasing=0),
    distillation=Distillation(kind="soft", alpha=1.0, hidden=5.0),
)
CACHED = replace(HIDDEN, cache_teacher=True)
IMAGES, VIEWS, CLASSES, WIDTH = 40, 2, 10, 32
PLAN = Plan(attention=(2,))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return how many images the teacher is asked about at a time."""
    found: list[int] = []
    ask = Objective.teacher_logits

    def count(self: Objective, images: Tensor) -> Tensor:
        found.append(len(images))
        return ask(self, images)

    monkeypatch.setattr(Objective, "teacher_logits", count)
    return found


def train(config: RecoverConfig, cache: TeacherCache | None = None, **more: Any) -> tuple[nn.Module, list[Any]]:
    """Train a student whose blocks 1 and 2 compute the class token alone."""
    dense = tiny()
    student = trim_(prune_(deepcopy(dense), PLAN))
    return student, list(recover(student, dense, "demo", config, cache=cache, **more))


# The same as asking.


@pytest.mark.parametrize("views", [1, 2])
@pytest.mark.parametrize("hidden", [0.0, 5.0])
def test_cached_and_asked_agree_on_fixed_views(hidden: float, views: int, monkeypatch: pytest.MonkeyPatch) -> None:
    config = HIDDEN.with_settings({"augmentation.views": views, "distillation.hidden": hidden})
    asked = train(config)
    runs: list[int] = []
    call = Objective.__call__

    def watched(self: Objective, batch: Any) -> Tensor:
        assert self.teacher is not None
        hook = self.teacher.register_forward_hook(lambda *_: runs.append(1))
        loss = call(self, batch)
        hook.remove()
        return loss

    monkeypatch.setattr(Objective, "__call__", watched)
    cached = train(replace(config, cache_teacher=True))
    assert not runs, "no update asks the teacher"
    for one, other in zip(asked[1][1:], cached[1][1:], strict=True):
        assert one.loss == pytest.approx(other.loss, rel=1e-3)  # float16 has three digits, and Adam enlarges rounding
    first = asked[1][1].loss, cached[1][1].loss
    assert first[0] == pytest.approx(first[1], rel=2e-4)
    torch.testing.assert_close(weights(asked[0]), weights(cached[0]), rtol=1e-2, atol=1e-3)


def test_one_loss_is_that_of_the_teacher_up_to_float16() -> None:
    """The loss without training between: half a unit of float16 in each target."""
    losses: dict[bool, list[float]] = {}
    for is_cached in (False, True):
        still = HIDDEN.with_settings({"training.lr": 1e-12, "training.epochs": 2, "training.weight_decay": 0.0})
        losses[is_cached] = [e.loss for e in train(replace(still, cache_teacher=is_cached))[1][1:]]
    assert losses[False] == pytest.approx(losses[True], rel=0, abs=1e-5)  # 5 times cosines that differ by about 1e-6
    assert losses[False][0] != losses[False][1], "the second epoch has other views"


# Files.


def test_what_is_written_is_stated_and_no_more_than_the_student_computes(tmp_path: Path, asked: list[int]) -> None:
    said: list[str] = []
    seen: list[tuple[str, int, int]] = []
    place = tmp_path / "teacher"
    train(CACHED, TeacherCache(place, said.append, lambda *now: seen.append(now)))
    arrays = {file.stem: np.load(file, mmap_mode="r") for file in place.glob("*.npy")}
    every = VIEWS, IMAGES
    assert {name: (array.shape, str(array.dtype)) for name, array in arrays.items()} == {
        "logits": ((*every, CLASSES), "float32"),
        "block-000": ((*every, 17, WIDTH), "float16"),
        "block-001": ((*every, 1, WIDTH), "float16"),
        "block-002": ((*every, 1, WIDTH), "float16"),
    }
    size = sum(array.nbytes for array in arrays.values())
    assert said == [f"caching the teacher: 40 images x 2 views, {size / 1e3:.0f} kB in {place}"]
    assert seen == [("caching the teacher, view", done, 80) for done in (16, 32, 40, 56, 72, 80)]
    assert sum(asked) == 1 + IMAGES * VIEWS
    assert all(array.any() for array in arrays.values())


def test_files_are_used_again_and_those_of_another_identity_are_not(tmp_path: Path, asked: list[int]) -> None:
    cache = TeacherCache(tmp_path / "teacher")
    keeper = Memory()
    whole, expected = train(CACHED, cache, keeper=keeper)
    asked.clear()
    again, found = train(CACHED, cache, keeper=Memory(keeper.states[:3]))
    assert asked == [1], "the shape of an answer is looked at"
    assert torch.equal(weights(whole), weights(again))
    assert numbers(found) == numbers(expected)[-len(found) :]
    for other in ({"training.seed": 1}, {"augmentation.views": 3}, {"augmentation.hflip": 0.0}, {"per_class": 3}):
        asked.clear()
        train(CACHED.with_settings({**other, "training.epochs": 1}), cache)
        assert len(asked) > 1, other
    asked.clear()
    student, teacher = trim_(prune_(tiny(), PLAN)), tiny(seed=1)
    list(recover(student, teacher, "demo", CACHED, cache=cache))
    assert len(asked) > 1, "another teacher"


def test_a_cache_that_was_not_finished_is_made_again(tmp_path: Path, asked: list[int]) -> None:
    place = tmp_path / "teacher"

    def stop(text: str, done: int, total: int) -> None:
        if done >= 48:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(CACHED, TeacherCache(place, progress=stop))
    assert not (place / FILLED).exists()
    assert (place / "logits.npy").exists()
    asked.clear()
    found = train(CACHED, TeacherCache(place))
    assert sum(asked) == 1 + IMAGES * VIEWS
    assert torch.equal(weights(found[0]), weights(train(CACHED)[0]))


def test_without_a_directory_nothing_is_left(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    epochs = recover(trim_(prune_(tiny(), PLAN)), tiny(), "demo", CACHED)
    next(epochs)
    assert len(list(tmp_path.glob("hetdpt-teacher-*/*.npy"))) == 4
    for _ in epochs:
        pass
    assert not list(tmp_path.iterdir())
    epochs = recover(trim_(prune_(tiny(), PLAN)), tiny(), "demo", CACHED)
    next(epochs)
    epochs.close()  # type: ignore[attr-defined]
    assert not list(tmp_path.iterdir()), "nor where the training is given up"


def test_a_run_keeps_them_while_it_can_be_resumed(tmp_path: Path) -> None:
    out, said = tmp_path / "run", list[str]()
    epochs = recover_into(out, prune_(tiny(), PLAN), tiny(), "demo", CACHED, Execution(note=said.append), merges=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hetdpt.flow.resumable.save", lambda *_, **__: None)
        next(epochs)
        assert (out / "teacher" / FILLED).is_file()
        assert said == [line for line in said if line.startswith("caching the teacher: 40 images x 2 views, ")] != []
        epochs.close()  # type: ignore[attr-defined]
        assert (out / "teacher" / FILLED).is_file()
        said.clear()
        list(recover_into(out, prune_(tiny(), PLAN), tiny(), "demo", CACHED, Execution(note=said.append), merges=False))
    assert not said, "what is there is used"
    assert not (out / "teacher").exists()
    assert (out / "summary.json").is_file()


def test_too_little_space_is_refused_in_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type("Usage", (), {"free": 12_345})()
    monkeypatch.setattr(shutil, "disk_usage", lambda place: usage)
    said: list[str] = []
    text = r"^[0-9.]+ kB are needed in .*teacher but only 12.3 kB are free; use fewer images or views, or leave out"
    with pytest.raises(FileError, match=text):
        train(CACHED, TeacherCache(tmp_path / "teacher", said.append))
    assert not (tmp_path / "teacher").exists()
    assert not said


# The arrays.


def files(place: Path, **identity: Any) -> ArrayFiles:
    return ArrayFiles(place / "arrays", {"one": ("float16", (2, 3)), "two": ("float32", (4,))}, identity)


def test_arrays_are_there_once_they_are_sealed(tmp_path: Path) -> None:
    made = files(tmp_path, seed=1)
    assert made.size == 2 * 3 * 2 + 4 * 4
    assert not made.is_filled
    made.create()
    opened = made.open(writes=True)
    opened["one"][1] = 5
    opened["one"].flush()  # type: ignore[attr-defined]
    assert not made.is_filled
    made.seal()
    assert made.is_filled
    assert made.open()["one"].tolist() == [[0, 0, 0], [5, 5, 5]]
    assert not files(tmp_path, seed=2).is_filled
    (made.directory / FILLED).write_text("{")
    assert not made.is_filled, "damaged"
    made.remove()
    assert not made.directory.exists()


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="space cannot be reserved here")
def test_a_disk_that_fills_is_told_when_the_files_are_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(FileError, match="one.npy cannot be written: No space left on device; free some space"):
        files(tmp_path).create()


# What is refused.


@pytest.mark.parametrize(
    "changes",
    [{"augmentation.views": 0}, {"training.mixup": 0.8}, {"training.cutmix": 0.5, "training.mix_prob": 0.5}],
)
def test_a_cache_needs_fixed_views_that_are_not_mixed(changes: dict[str, Any]) -> None:
    with pytest.raises(TrainError, match="cache_teacher needs fixed views: set augmentation.views to how many"):
        CACHED.with_settings(changes)


def test_batches_that_are_never_mixed_can_be_cached() -> None:
    assert CACHED.with_settings({"training.mixup": 0.8, "training.mix_prob": 0.0}).cache_teacher
    with pytest.raises(TrainError, match="mix_prob is 1.5; it must be between 0 and 1"):
        CACHED.with_settings({"training.mix_prob": 1.5})


def test_the_old_name_of_the_setting_leads_to_the_new_one() -> None:
    with pytest.raises(TrainError, match="unknown setting augmentation.fixed_views; did you mean augmentation.views?"):
        hetdpt.RecoverConfig().with_settings({"augmentation.fixed_views": True})
