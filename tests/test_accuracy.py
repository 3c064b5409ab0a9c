"""Accuracy: counts and losses against a loop by hand and a planted truth, and an interval that covers what it says."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from timm.data import create_transform, resolve_model_data_config
from torch import nn
from torch.nn import functional as F

import hetdpt
from hetdpt.adapters.preprocessing import preprocessing_of
from hetdpt.core.errors import DataError
from hetdpt.data.batches import EvaluationBatches
from hetdpt.data.sources import Data, open_data
from hetdpt.data.subset import Subset
from hetdpt.measurement.accuracy import evaluate, measure_accuracy, scores_of
from hetdpt.measurement.intervals import wilson_interval

SHARED = Path(__file__).parents[2] / "shared" / "data"


def tiny(classes: int = 10, **arguments: Any) -> nn.Module:
    """Return a small ViT for small images, the same at every call."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        sizes = {"img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": classes}
        model: nn.Module = timm.create_model("vit_tiny_patch16_224", **{**sizes, **arguments})
    return model.eval()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder of three classes with four validation images each."""
    pixels = np.random.default_rng(0).integers(0, 255, (24, 20, 24, 3), dtype=np.uint8)
    for number, image in enumerate(pixels):
        place = tmp_path / ("val" if number % 2 else "train") / f"class{number % 3}"
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(place / f"{number:02d}.png")
    return tmp_path


def counted(model: nn.Module, data: Data) -> tuple[float, float, float]:
    """Return top-1, top-5 and loss, image by image, with timm's own view of an image and nothing of ours."""
    transform = create_transform(**{**resolve_model_data_config(model), "input_size": (3, 16, 16)})
    first = fifth = loss = 0.0
    assert data.val is not None
    for index in range(len(data.val)):
        image, label = data.val[index]  # type: ignore[index]
        with torch.no_grad():
            scores = model(transform(image.convert("RGB"))[None])[0]
        place = int((scores > scores[label]).sum())  # classes that the model prefers to the right one
        first += place < 1
        fifth += place < 5
        loss -= float(F.log_softmax(scores.double(), 0)[label])
    count = len(data.val)
    return 100 * first / count, 100 * fifth / count, loss / count


def test_it_equals_a_loop_by_hand() -> None:
    model, data = tiny(), open_data("demo", splits=("val",))
    scores = evaluate(model, data, batch_size=50)  # 360 images: the last batch is not full
    top1, top5, loss = counted(model, data)
    assert (scores.top1, scores.top5, scores.count) == (pytest.approx(top1), pytest.approx(top5), 360)
    assert scores.loss == pytest.approx(loss, rel=1e-5)  # float32, summed in another order
    assert 0 < scores.top1 < scores.top5 < 100
    assert (scores.low, scores.high) == wilson_interval(round(top1 * 3.6), 360)
    assert hetdpt.evaluate is evaluate


def test_a_model_with_one_opinion_is_right_as_often_as_its_class_comes() -> None:
    """The head sees nothing and says the same of every image, so the scores follow from the labels alone."""
    model = tiny()
    opinion = torch.tensor([0.0, 9.0, 3.0, 7.0, 1.0, 8.0, 2.0, 6.0, 4.0, 5.0])
    model.head.weight.data.zero_()
    model.head.bias.data.copy_(opinion)
    data = open_data("demo", splits=("val",))
    labels = torch.tensor(data.val.targets())  # type: ignore[union-attr]
    scores = evaluate(model, data)
    five = torch.tensor([1, 5, 3, 7, 9])
    assert scores.top1 == pytest.approx(100 * (labels == 1).double().mean().item())
    assert scores.top5 == pytest.approx(100 * torch.isin(labels, five).double().mean().item())
    assert scores.loss == pytest.approx((opinion.logsumexp(0) - opinion[labels].mean()).item(), rel=1e-6)


@pytest.mark.parametrize("size", [1, 7, 360, 1000])
def test_the_batch_size_and_the_workers_have_no_part_in_it(size: int) -> None:
    model = tiny()
    whole = evaluate(model, "demo", per_class=4)
    other = evaluate(model, "demo", per_class=4, batch_size=size, workers=size % 2)
    assert (other.top1, other.top5, other.count, other.low) == (whole.top1, whole.top5, 40, whole.low)
    assert other.loss == pytest.approx(whole.loss, rel=1e-6)


def test_fewer_classes_than_five(folder: Path) -> None:
    scores = evaluate(tiny(classes=3), folder)
    assert (scores.count, scores.top5) == (12, 100.0)
    assert scores.top1 in {100 * n / 12 for n in range(13)}
    top1, _, loss = counted(tiny(classes=3), open_data(str(folder), splits=("val",)))
    assert (scores.top1, scores.loss) == (pytest.approx(top1), pytest.approx(loss, rel=1e-5))


def test_parts_of_the_images() -> None:
    model = tiny()
    assert evaluate(model, "demo", fraction=0.1).count == 36
    assert evaluate(model, "demo", fraction=1).count == 360
    assert evaluate(model, "demo", fraction=0.0001).count == 1
    assert evaluate(model, "demo", per_class=2).count == 20
    assert evaluate(model, "demo", per_class=2) == evaluate(model, "demo", per_class=2)
    for fraction in (0.0, -0.5, 1.5, math.nan):
        with pytest.raises(DataError, match=f"above 0 and at most 1, not {fraction}"):
            evaluate(model, "demo", fraction=fraction)
    with pytest.raises(DataError, match=r"a fraction \(0.5\) or a count per class \(2\), not both"):
        evaluate(model, "demo", fraction=0.5, per_class=2)
    with pytest.raises(DataError, match="class 2 has only 35 images, fewer than 36 per class; use at most 35"):
        evaluate(model, "demo", per_class=36)


@pytest.mark.parametrize("workers", [0, 1])
def test_unreadable_images_are_named_and_not_counted(folder: Path, workers: int) -> None:
    whole = evaluate(tiny(classes=3), folder)
    bad = sorted((folder / "val" / "class1").iterdir())[:2]
    for file in bad:
        file.write_bytes(file.read_bytes()[:60])
    scores = evaluate(tiny(classes=3), folder, workers=workers)
    assert (scores.count, scores.unreadable) == (10, tuple(map(str, bad)))
    for file in bad:
        file.unlink()
    without = evaluate(tiny(classes=3), folder)
    assert (scores.top1, scores.low, scores.high) == (without.top1, without.low, without.high)
    assert scores.loss == pytest.approx(without.loss, rel=1e-6)
    assert scores.loss != pytest.approx(whole.loss, rel=1e-6)


def test_nothing_readable_is_an_error(folder: Path) -> None:
    files = sorted((folder / "val").rglob("*.png"))
    for file in files:
        file.write_bytes(b"no image")
    with pytest.raises(DataError, match=f"none of the images can be read, for example {files[0]}; check the files"):
        evaluate(tiny(classes=3), folder)


def test_classes_must_be_as_many() -> None:
    with pytest.raises(DataError, match="the data has 10 classes but the model's head has 12; build the model with"):
        evaluate(tiny(classes=12), "demo")


@pytest.mark.parametrize("is_training", [True, False])
def test_the_model_is_left_as_it_was(is_training: bool) -> None:
    model = tiny(drop_rate=0.5).train(is_training)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    scores = evaluate(model, "demo", per_class=2)
    assert scores == evaluate(model.eval(), "demo", per_class=2)  # nothing was dropped in the first one
    model.train(is_training)
    evaluate(model, "demo", per_class=1)
    assert model.training is is_training
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_progress_goes_from_the_first_batch_to_the_last() -> None:
    model, data = tiny(), open_data("demo", splits=("val",))
    assert data.val is not None
    batches = EvaluationBatches(data.val, preprocessing_of(model), batch_size=100)
    seen: list[tuple[int, int]] = []
    measure_accuracy(model, batches, lambda done, total: seen.append((done, total)))
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]


@pytest.mark.parametrize("workers", [0, 1])
def test_each_image_is_told_of(folder: Path, workers: int) -> None:
    model, found = tiny(classes=3), dict[int, bool]()
    bad = sorted((folder / "val" / "class1").iterdir())[0]
    bad.write_bytes(bad.read_bytes()[:60])

    def each(indices: torch.Tensor, is_right: torch.Tensor) -> None:
        found.update(zip(indices.tolist(), is_right.tolist(), strict=True))

    scores = evaluate(model, folder, batch_size=4, workers=workers, each=each)
    data = open_data(str(folder), splits=("val",)).val
    assert data is not None
    readable = [index for index in range(len(data)) if data.name_of(index) != str(bad)]
    assert sorted(found) == readable
    assert scores.top1 == 100 * sum(found.values()) / len(readable)
    wants = preprocessing_of(model)
    for index in readable:
        (batch,) = EvaluationBatches(Subset(data, (index,)), wants, batch_size=1)
        assert found[index] == (model(batch.images).argmax().item() == batch.targets.item())


# The interval.


@pytest.mark.parametrize(
    ("right", "count", "low", "high"),
    [  # Newcombe, Statistics in Medicine 17 (1998), table I, method 3
        (81, 263, 25.53, 36.62),
        (15, 148, 6.24, 16.05),
        (0, 20, 0.0, 16.11),
        (1, 29, 0.61, 17.18),
    ],
)
def test_the_interval_is_the_printed_one(right: int, count: int, low: float, high: float) -> None:
    assert wilson_interval(right, count) == pytest.approx((low, high), abs=0.005)  # two decimals are printed
    mirrored = wilson_interval(count - right, count)
    assert mirrored == pytest.approx((100 - high, 100 - low), abs=0.005)


@pytest.mark.parametrize("count", [1, 2, 10, 1000, 50_000])
def test_the_interval_holds_the_rate_and_stays_within_bounds(count: int) -> None:
    for right in {0, 1, count // 3, count - 1, count}:
        low, high = wilson_interval(right, count)
        assert 0 <= low <= 100 * right / count + 1e-9
        assert 100 * right / count - 1e-9 <= high <= 100
        assert 0 < high - low < 100


@pytest.mark.parametrize(("rate", "count"), [(0.724, 1000), (0.5, 360), (0.9, 200), (0.1, 100)])
def test_the_interval_covers_the_truth_in_95_of_100_cases(rate: float, count: int) -> None:
    draws = np.random.default_rng(0).binomial(count, rate, 5000)
    bounds = np.array([wilson_interval(int(right), count) for right in draws]) / 100
    covered = 100 * np.mean((bounds[:, 0] <= rate) & (rate <= bounds[:, 1]))
    assert abs(covered - 95) < 2  # 5,000 draws: three standard errors are 0.9, the rest is that counts are whole


def test_scores_of_sums() -> None:
    scores = scores_of(torch.tensor([3.0, 4.0, 10.0, 5.0], dtype=torch.float64), ("a.png",))
    assert (scores.top1, scores.top5, scores.loss, scores.count) == (60.0, 80.0, 2.0, 5)
    assert scores.unreadable == ("a.png",)
    assert (scores.low, scores.high) == wilson_interval(3, 5)


@pytest.mark.slow
@pytest.mark.skipif(not SHARED.is_dir(), reason="the ImageNet sample of ../shared/data is not on this machine")
def test_a_real_model_on_real_images() -> None:
    """A pretrained ViT-Tiny has 72.4 % on these 1,000 images, by timm's own transform (../shared/data/README.md)."""
    model = hetdpt.create("vit_tiny_patch16_224", weights=SHARED / "vit_tiny_patch16_224.safetensors")
    scores = hetdpt.evaluate(model, SHARED / "imagenet")
    assert scores.count == 1000
    assert scores.top1 == pytest.approx(72.4, abs=0.2)
