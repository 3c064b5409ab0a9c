"""Training images that are held out: which they are, that nothing is trained on them, and that they decide."""

from __future__ import annotations

from collections import Counter
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_data import write_shards
from test_training import PLAIN, SHORT, tiny, weights
from test_training_cli import build, build_trained

import hetdpt
from hetdpt.core.errors import DataError, TrainError
from hetdpt.core.plan import Plan
from hetdpt.data.batches import TrainingBatches
from hetdpt.data.fixed_batches import ImageBatches
from hetdpt.data.sources import Data, open_data
from hetdpt.data.streams import Stream
from hetdpt.data.subset import MOST_HELD_OUT, Subset, hold_out_fraction, subset
from hetdpt.flow.resumable import recover_into
from hetdpt.measurement.agreement import measure_damage
from hetdpt.store.run_directory import summary_of
from hetdpt.training import recover as recovery
from hetdpt.training.recover import recover, training_data

HELD = replace(SHORT, hold_out=0.25, per_class=8)


def names_of(split: Any) -> set[str]:
    assert not isinstance(split, Stream)
    return {split.name_of(index) for index in range(len(split))}


def some(count: int) -> Data:
    demo = open_data("demo")
    assert not isinstance(demo.train, Stream)
    assert demo.train is not None
    return replace(demo, train=Subset(demo.train, tuple(range(count))))


@pytest.mark.parametrize(
    ("count", "fraction", "held"),
    [(1437, 0.1, 144), (1437, 0.5, MOST_HELD_OUT), (10, 0.01, 1), (10, 0.999, 9), (2, 0.5, 1)],
)
def test_a_fraction_some_at_least_and_never_all(count: int, fraction: float, held: int) -> None:
    data = some(count)
    found = hold_out_fraction(data, fraction)
    assert found.train is not None
    assert found.val is not None
    assert (len(found.train), len(found.val)) == (count - held, held)
    assert names_of(found.train) | names_of(found.val) == names_of(data.train)


def test_classes_are_in_proportion_and_the_seed_decides() -> None:
    demo = open_data("demo")
    found = [hold_out_fraction(demo, 0.1, seed).val for seed in (0, 0, 1)]
    assert names_of(found[0]) == names_of(found[1]) != names_of(found[2])
    sizes, held = (Counter(split.targets()) for split in (demo.train, found[0]))  # type: ignore[union-attr]
    assert all(abs(held[label] - sizes[label] / 10) <= 1 for label in sizes)


def test_replacements_are_fitted_on_other_images() -> None:
    demo, wants = open_data("demo"), hetdpt.adapters.preprocessing.preprocessing_of(tiny())
    held = hold_out_fraction(demo, 0.1).val
    assert held is not None
    fitted = torch.cat(list(ImageBatches(demo.train, wants, count=256)))  # type: ignore[arg-type]
    measured = torch.cat(list(ImageBatches(held, wants, count=len(held))))
    assert not any(bool((fitted == image).flatten(1).all(1).any()) for image in measured)


def test_no_held_out_image_is_in_a_training_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = list[Any]()

    class Watched(TrainingBatches):
        def __init__(self, source: Any, *arguments: Any, **options: Any) -> None:
            super().__init__(source, *arguments, **options)
            seen.append(source)

    monkeypatch.setattr(recovery, "TrainingBatches", Watched)
    list(recover(tiny(), None, "demo", HELD))
    data, words = training_data(open_data("demo"), HELD)
    assert words == "20 training images that were held out"
    assert data.val is not None
    [trained] = seen
    assert (len(trained), len(data.val)) == (60, 20)
    assert names_of(trained).isdisjoint(names_of(data.val))
    used = subset(open_data("demo").train, per_class=8)  # type: ignore[arg-type]
    assert names_of(trained) | names_of(data.val) == names_of(used)


def test_epochs_are_measured_on_them_and_no_validation_image_is_needed() -> None:
    only = open_data("demo", splits=("train",))
    student = tiny()
    epochs = [(epoch.last, epoch.best) for epoch in recover(student, None, only, HELD)]
    measured = training_data(only, HELD)[0]
    assert epochs[0][0] == hetdpt.evaluate(tiny(), measured).top1
    assert epochs[-1][0] == hetdpt.evaluate(student, measured).top1
    with pytest.raises(TrainError, match="needs the splits train and val"):
        list(recover(tiny(), None, only, SHORT))


def test_a_start_that_training_makes_worse_stays_the_best(tmp_path: Path) -> None:
    training = replace(PLAIN, epochs=6)
    learned = replace(SHORT, training=training, per_class=None, fraction=0.15)
    dense = hetdpt.load(build_trained(tmp_path, learned) / "dense")
    harmful = replace(HELD, training=replace(PLAIN, lr=1.0, schedule="constant", clip_grad=1.0))
    epochs = list(recover_into(tmp_path / "run", deepcopy(dense), dense, "demo", harmful))
    assert epochs[0].last is not None
    assert epochs[0].last > max(epoch.last or 0 for epoch in epochs[1:])
    summary = summary_of(tmp_path / "run")
    assert summary["best_epoch"] == 0
    assert summary["best"] == summary["start"] == epochs[0].last
    assert torch.equal(weights(hetdpt.load(tmp_path / "run" / "best")), weights(dense))
    assert summary["measured_on"] == "20 training images that were held out"
    assert summary["metric"] == "accuracy"
    assert summary["validation"]["top1"] == hetdpt.evaluate(dense, "demo").top1
    assert summary["validation"]["count"] == 360


@pytest.mark.parametrize("is_cached", [False, True])
def test_the_best_epoch_is_nearest_to_the_teacher(is_cached: bool) -> None:
    """Accuracies of 20 images are as coarse as 5 points; the divergence tells epochs apart."""
    views = replace(SHORT.augmentation, views=1)
    slow = replace(PLAIN, lr=1e-4, epochs=3)
    config = replace(HELD, training=slow, augmentation=views, cache_teacher=is_cached)
    teacher, student = tiny(seed=1), tiny()
    data = training_data(open_data("demo"), config)[0]
    wants = hetdpt.adapters.preprocessing.preprocessing_of(student)
    images = list(ImageBatches(data.val, wants, count=20))  # type: ignore[arg-type]
    found = list[float]()
    for epoch in recover(student, teacher, "demo", config):
        measured = measure_damage(teacher, epoch.student, images)
        assert epoch.divergence == pytest.approx(measured, rel=1e-5)  # the teacher is trimmed, which rounds differently
        found.append(measured)
        assert epoch.is_best == (measured == min(found))
    assert found[-1] < found[0]


def test_epochs_without_teacher_or_held_out_images_are_compared_by_accuracy() -> None:
    for teacher, config in ((None, HELD), (tiny(seed=1), SHORT)):
        assert all(epoch.divergence is None for epoch in recover(tiny(), teacher, "demo", config))


def test_with_nothing_held_out_the_summary_names_the_validation_images(tmp_path: Path) -> None:
    dense, plan = hetdpt.load(build(tmp_path / "dense")), Plan(attention=(1,))
    for _ in recover_into(tmp_path / "run", deepcopy(dense), dense, "demo", SHORT, plan=plan):
        pass
    summary = summary_of(tmp_path / "run")
    assert summary["measured_on"] == "360 validation images"
    assert "validation" not in summary  # they were measured on already


def test_the_average_is_measured_on_them_too() -> None:
    config = replace(HELD, training=replace(PLAIN, ema_decay=0.5))
    epochs = list(recover(tiny(), None, "demo", config))
    assert epochs[-1].average is not None
    assert epochs[-1].ema == hetdpt.evaluate(epochs[-1].average, training_data(open_data("demo"), config)[0]).top1


def test_of_a_stream_none_can_be_held_out(tmp_path: Path) -> None:
    data = open_data(f"wds/{write_shards(tmp_path / 'Shards', train=[5, 5], validation=[3])}")
    found, words = training_data(data, replace(HELD, per_class=None))
    assert (found, words) == (data, "3 validation images, as none of a stream can be held out")
    with pytest.raises(DataError, match="can be held out if they have indices, which those of a stream do not have"):
        hold_out_fraction(data, 0.1)


def test_what_cannot_be_held_out() -> None:
    with pytest.raises(DataError, match="one training image cannot be both held out and trained on"):
        hold_out_fraction(some(1), 0.1)
    for fraction in (-0.1, 1.0):
        with pytest.raises(TrainError, match=f"hold_out is {fraction}; expected a fraction of the training images bel"):
            replace(HELD, hold_out=fraction)
