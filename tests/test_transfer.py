"""Transfer: fresh heads, features in files, a probe that is scikit-learn's, and the study that compares models."""

from __future__ import annotations

import csv
import json
import os
import resource
import shutil
import signal
import subprocess
import time
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import test_cli
import test_training_cli
import timm
import torch
from families import named
from sklearn.linear_model import LogisticRegression
from test_cli import SCRIPT, Run
from torch import Tensor, nn
from torch.nn import functional as F

import hetdpt
from hetdpt.adapters.heads import logits_of, with_head_
from hetdpt.adapters.identity import fingerprint
from hetdpt.adapters.models import Base, build, num_classes_of
from hetdpt.adapters.preprocessing import PREPROCESSING, preprocessing_of
from hetdpt.core.errors import DataError, FileError, HetDPTError, MeasureError, ModelError
from hetdpt.core.modules import digest
from hetdpt.core.plan import Plan
from hetdpt.data.sources import Data, open_data
from hetdpt.data.streams import Stream
from hetdpt.data.subset import Subset
from hetdpt.flow.recipes import cifar100_transfer
from hetdpt.studies.features import CHUNK, compute_features, heads_in, pooled_features, with_classifier_
from hetdpt.studies.probe import STRENGTHS, choose_strength, fit_probe
from hetdpt.studies.transfer import TransferConfig, transfer_into

run = test_cli.run  # the fixture
PLAN = Plan(attention=(1,), activation=(2,), removal="calibrated")
QUICK = ("--data", "demo", "--workers", 0)
SMALL = {"per_class": 30, "training.epochs": 2, "training.batch_size": 50, "training.lr": 0.05}
KEYS = {
    "model", "attention", "activation", "removal", "top1", "low", "high", "images", "unreadable", "difference",
    "difference_low", "difference_high", "training_images", "macs", "params", "width", "device", "dtype", "batch",
    "seconds", "epochs", "strength", "saved",
}  # fmt: skip
HEADS = {
    "vit_tiny_patch16_224": 1,
    "deit_tiny_distilled_patch16_224": 2,
    "swin_tiny_patch4_window7_224": 1,
    "vit_base_patch16_siglip_224": 1,
    "hf ViTForImageClassification": 1,
    "hf DeiTForImageClassificationWithTeacher": 2,
    "hf SwinForImageClassification": 1,
}
SLOW = ("swin_tiny_patch4_window7_224", "vit_base_patch16_siglip_224", "hf SwinForImageClassification")
every_head = pytest.mark.parametrize(
    "label", [pytest.param(label, marks=pytest.mark.slow) if label in SLOW else label for label in HEADS]
)


def config(mode: Any = "probe", **changes: Any) -> TransferConfig:
    recovery = cifar100_transfer().config.with_settings({**SMALL, **changes.pop("settings", {})})
    return TransferConfig(**{"mode": mode, "recovery": recovery, "calibration": 32, **changes})


QUICKLY = config(settings={"per_class": None}, strengths=(0.1,))


@pytest.fixture(scope="module")
def data() -> Data:
    return open_data("demo")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with a model of three blocks for 7 classes, another one, and a plan."""
    folder = tmp_path_factory.mktemp("transfer")
    dense = hetdpt.load(test_training_cli.build(folder / "dense", num_classes=7))
    hetdpt.save(hetdpt.merge_(hetdpt.prune_(dense, Plan(attention=(0,), activation=(0,)))), folder / "pruned")
    (folder / "plan.json").write_text(PLAN.to_json())
    return folder


@pytest.fixture
def few(data: Data) -> Data:
    """Return 40 images to learn from and 20 to measure on."""
    train, val = (Subset(split, tuple(range(count))) for split, count in ((data.train, 40), (data.val, 20)))  # type: ignore[arg-type]
    return replace(data, train=train, val=val)


@pytest.fixture(scope="module")
def whole(home: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a study of probes that nobody disturbed."""
    out = tmp_path_factory.mktemp("study") / "whole"
    given = {name: hetdpt.load(home / name) for name in ("dense", "pruned")}
    list(transfer_into(out, given, "demo", config(), {"plan.json": PLAN}))
    return out


def rows_in(directory: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((directory / "results.json").read_text())["rows"]
    return rows


def untimed(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in row.items() if name not in ("seconds", "model")} for row in rows]


# fresh heads


@every_head
def test_a_fresh_head_is_all_that_changes_and_is_saved(label: str, tmp_path: Path) -> None:
    family = named(label)
    model = family.build()
    model = hetdpt.merge_(hetdpt.prune_(model, family.plan(hetdpt.sites(model, family.size)), family.size))
    heads, before = heads_in(model), deepcopy(model.state_dict())
    assert len(heads) == HEADS[label]
    one, other = (with_head_(deepcopy(model), 5, heads, seed) for seed in (0, 1))
    assert num_classes_of(one) == 5
    assert heads_in(one) == heads
    assert digest(with_head_(deepcopy(model), 5, heads, 0)) == digest(one) != digest(other)
    names = {f"{path}.{name}" for path in heads for name in ("weight", "bias")}
    assert {name for name, value in one.state_dict().items() if not _same(before[name], value)} == names
    with torch.no_grad():
        answer = logits_of(one(family.images()))
        assert answer.shape == (2, 5)
        loaded = hetdpt.load(hetdpt.save(one, tmp_path / "saved"))
        torch.testing.assert_close(logits_of(loaded(family.images())), answer, rtol=0, atol=0)


def _same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one, other)


def test_a_model_of_timm_without_a_head_gets_one(tmp_path: Path) -> None:
    bare = hetdpt.create("test_vit", num_classes=0)
    assert heads_in(bare) == ()
    made = with_head_(bare, 4, ())
    assert (num_classes_of(made), heads_in(made)) == (4, ("head",))
    assert made.head.weight.std().item() == pytest.approx(0.02, rel=0.2)  # type: ignore[union-attr]  # 256 draws
    assert num_classes_of(hetdpt.load(hetdpt.save(made, tmp_path / "saved"))) == 4


def test_a_tower_without_a_place_for_a_head_is_refused(data: Data, tmp_path: Path) -> None:
    model = named("hf CLIPVisionModel").build()
    text = "CLIPVisionModel has no head that could be replaced for other classes; give a classifier, such as"
    with pytest.raises(ModelError, match=text):
        list(transfer_into(tmp_path / "run", {"tower": model}, data, config("finetune")))
    assert not (tmp_path / "run").exists()


# features


@every_head
def test_features_are_what_the_head_is_given(label: str) -> None:
    """A linear layer on them is a head: two heads share it, and their mean is what it says."""
    family = named(label)
    model, images = family.build(), family.images()
    heads = heads_in(model)
    with torch.no_grad():
        values = pooled_features(model, heads, images)
        weight, bias = torch.randn(6, values.shape[1], generator=torch.Generator().manual_seed(2)), torch.arange(6.0)
        made = with_classifier_(model, heads, weight, bias)
        # the same products in another order
        torch.testing.assert_close(logits_of(made(images)), F.linear(values, weight, bias), rtol=1e-4, atol=1e-4)


def test_features_of_models_without_a_head() -> None:
    tower = named("hf CLIPVisionModel")
    model: Any = tower.build()
    with torch.no_grad():
        values = pooled_features(model, heads_in(model), tower.images())
        assert torch.equal(values, model(tower.images()).pooler_output)
    bare, images = hetdpt.create("test_vit", num_classes=0), torch.randn(2, 3, 160, 160)
    with torch.no_grad():
        assert torch.equal(pooled_features(bare, heads_in(bare), images), bare(images))
    bare.reset_classifier(0, global_pool="")  # type: ignore[operator]
    with pytest.raises(ModelError, match="has neither a head nor a pooled output"):
        pooled_features(bare, (), images)


def test_features_are_taken_once_in_files(models: dict[str, nn.Module], data: Data, tmp_path: Path) -> None:
    seen: list[int] = []
    dense = models["dense"]
    assert data.val is not None
    assert not isinstance(data.val, Stream)
    first = compute_features(tmp_path / "one", "val", dense, data.val, batch_size=100)
    assert [file.name for file in sorted((tmp_path / "one").iterdir())] == [f"val-{n:05d}.safetensors" for n in (0, 1)]
    assert first.labels.tolist() == list(data.val.targets())
    assert first.values.shape == (360, 32)
    dense.register_forward_pre_hook(lambda _, given: seen.append(len(given[0])))
    (tmp_path / "one" / "val-00001.safetensors").unlink()
    again = compute_features(tmp_path / "one", "val", dense, data.val, batch_size=50)
    assert seen[0] == 1  # to find its head
    assert sum(seen[1:]) == 360 - CHUNK
    torch.testing.assert_close(again.values, first.values, rtol=1e-4, atol=1e-5)  # batches of another size
    seen.clear()
    compute_features(tmp_path / "one", "val", dense, data.val, batch_size=50)
    assert seen == []
    damaged = tmp_path / "one" / "val-00000.safetensors"
    whole = damaged.read_bytes()
    for content in (whole[:-9], b"", whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:]):
        damaged.write_bytes(content)
        with pytest.raises(FileError, match=r"val-00000.safetensors is damaged .* remove it to have it made again"):
            compute_features(tmp_path / "one", "val", dense, data.val, batch_size=50)


def test_features_that_a_disk_does_not_take(models: dict[str, nn.Module], data: Data, tmp_path: Path) -> None:
    assert data.val is not None
    few, limits = Subset(data.val, tuple(range(4))), resource.getrlimit(resource.RLIMIT_FSIZE)  # type: ignore[arg-type]
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, limits[1]))  # bytes, of any file
    try:
        with pytest.raises(FileError, match=r"val-00000.safetensors cannot be written \(.*\); is the disk full\?"):
            compute_features(tmp_path / "full", "val", models["dense"], few, batch_size=4)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list((tmp_path / "full").iterdir()) == []
    assert compute_features(tmp_path / "full", "val", models["dense"], few, batch_size=4).values.shape == (4, 32)


class Torn(Subset):
    """Images of which every third cannot be read."""

    def __getitem__(self, index: int) -> Any:
        if index % 3 == 0:
            raise OSError("torn")
        return super().__getitem__(index)


def test_what_cannot_be_read_does_not_count(models: dict[str, nn.Module], data: Data, tmp_path: Path) -> None:
    assert data.val is not None
    torn = Torn(data.val, tuple(range(9)))  # type: ignore[arg-type]
    found = compute_features(tmp_path / "torn", "val", models["dense"], torn, batch_size=4)
    assert (~found.is_read).nonzero().flatten().tolist() == [0, 3, 6]
    assert not found.values[~found.is_read].any()
    only = Torn(data.val, (0,))  # type: ignore[arg-type]
    with pytest.raises(DataError, match="none of the 1 images can be read"):
        compute_features(tmp_path / "none", "val", models["dense"], only, batch_size=4)
    few = replace(data, val=Torn(data.val, tuple(range(30))))  # type: ignore[arg-type]
    [done] = transfer_into(tmp_path / "run", {"dense": models["dense"]}, few, config(settings={"per_class": 3}))
    assert done.result.answers[::3] == "-" * 10
    assert (done.result.images, done.result.training_images) == (20, 30)
    assert rows_in(tmp_path / "run")[0]["unreadable"] == 10


# the probe


@pytest.fixture(scope="module")
def numbers() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return features (300, 20) of four classes that overlap, their labels, and others of both; one never changes."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(500) % 4
    centres = torch.randn(4, 20, generator=generator)
    values = 3 + (centres[labels] + 1.5 * torch.randn(500, 20, generator=generator)) * torch.logspace(-2, 2, 20)
    values[:, 7] = 0.1
    return values[:300], labels[:300], values[300:], labels[300:]


@pytest.mark.parametrize("strength", STRENGTHS)
def test_a_probe_is_the_logistic_regression_of_scikit_learn(
    strength: float, numbers: tuple[Tensor, Tensor, Tensor, Tensor]
) -> None:
    values, labels, others, truth = numbers
    mean, deviation = values.double().mean(0), values.double().std(0, correction=0)
    deviation[7] = 1
    probe = fit_probe(values, labels, 4, strength)
    known = LogisticRegression(C=1 / (strength * len(values)), tol=1e-12, max_iter=10_000)
    known.fit(((values - mean) / deviation).numpy(), labels.numpy())

    def loss(weight: Tensor, bias: Tensor) -> float:
        logits = (values - mean) / deviation @ weight.T + bias
        return (F.cross_entropy(logits, labels) + strength / 2 * weight.square().sum()).item()

    ours = loss(probe.weight * deviation, probe.bias + probe.weight @ mean)
    # each stops where the gradient is 1e-7 or less, which is |gradient|^2 / (2 strength) above the least loss
    assert ours - loss(torch.tensor(known.coef_), torch.tensor(known.intercept_)) < 84 * 1e-14 / (2 * strength)
    predicted = probe.logits(others).argmax(1)
    expected = torch.tensor(known.predict(((others - mean) / deviation).numpy()))
    assert torch.equal(predicted, expected)
    assert (predicted == truth).double().mean() > 0.5
    assert not probe.weight[:, 7].any()


def test_a_start_leads_to_the_same_place(numbers: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
    values, labels, others, _ = numbers
    far = fit_probe(values, labels, 4, 0.1)
    one, other = fit_probe(values, labels, 4, 0.05), fit_probe(values, labels, 4, 0.05, far.weight)
    assert other.steps < one.steps
    torch.testing.assert_close(one.logits(others), other.logits(others), rtol=0, atol=1e-4)  # gradient / strength


@pytest.mark.parametrize("factor", [1e-8, 1e8])
def test_the_scale_of_features_changes_no_answer(numbers: tuple[Tensor, Tensor, Tensor, Tensor], factor: float) -> None:
    values, labels, *_ = numbers
    usual, scaled = fit_probe(values, labels, 4, 0.01), fit_probe(factor * values, labels, 4, 0.01)
    answers = usual.logits(values).argmax(1)
    assert len(answers.unique()) > 1
    assert torch.equal(scaled.logits(factor * values).argmax(1), answers)


def test_images_held_out_decide_how_strong_the_penalty_is(numbers: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
    """Pure chance as further features: with no penalty worth the name they are learnt by heart."""
    values, labels, _, _ = numbers
    noise = torch.randn(300, 200, generator=torch.Generator().manual_seed(1))
    is_held = torch.arange(300) % 5 == 0
    trials = choose_strength(torch.cat([values, noise], 1), labels, is_held, 4)
    assert {trial.strength for trial in trials} == set(STRENGTHS)
    assert list(trials) == sorted(trials, key=lambda trial: (-trial.accuracy, trial.loss))
    assert trials[0].strength >= 0.1
    assert min(trials, key=lambda trial: trial.loss).strength >= 0.1
    for nothing in (torch.zeros(300, dtype=torch.bool), torch.ones(300, dtype=torch.bool)):
        with pytest.raises(MeasureError, match="some images must be held out and some not"):
            choose_strength(values, labels, nothing, 4)
    with pytest.raises(MeasureError, match="features are not finite"):
        fit_probe(values / 0, labels, 4, 1.0)


# the study


def test_a_study_of_probes_is_what_its_saved_models_are(whole: Path, data: Data) -> None:
    dense, plan, pruned = rows = rows_in(whole)
    assert all(set(row) == KEYS for row in rows)
    assert [row["model"] for row in rows] == ["dense", "dense, plan.json", "pruned"]
    assert [(row["attention"], row["activation"]) for row in rows] == [(0, 0), (1, 1), (1, 1)]
    assert [row["removal"] for row in rows] == [None, "calibrated", None]
    assert dense["macs"] > plan["macs"]
    answers = {}
    for row in rows:
        model = hetdpt.load(whole / row["saved"])
        assert num_classes_of(model) == 10
        hits: dict[int, bool] = {}
        scores = hetdpt.evaluate(
            model, data, each=lambda at, right, to=hits: to.update(zip(at.tolist(), right.tolist(), strict=True))
        )
        assert (scores.top1, scores.low, scores.high) == (row["top1"], row["low"], row["high"])
        assert row["params"] == hetdpt.count_params(model)
        assert row["macs"] == hetdpt.count_macs(model, (3, 16, 16))
        assert (row["width"], row["training_images"], row["images"]) == (32, 300, 360)
        assert row["strength"] in STRENGTHS
        answers[row["model"]] = hits
    assert dense["top1"] > 40  # of ten classes, on features of random weights
    assert dense["difference"] is None
    gap = sum(answers["pruned"][index] - answers["dense"][index] for index in range(360)) / 3.6
    assert pruned["difference"] == pytest.approx(gap)
    assert pruned["difference_low"] <= gap <= pruned["difference_high"]
    with (whole / "results.csv").open(newline="") as file:
        assert [float(row["top1"]) for row in csv.DictReader(file)] == [row["top1"] for row in rows]


def test_fine_tuning_starts_with_a_fresh_head_and_trains_all_weights(
    models: dict[str, nn.Module], few: Data, tmp_path: Path
) -> None:
    chosen, dense = (
        config(
            "finetune", settings={"per_class": None, "fraction": 0.5, "training.batch_size": 10, "training.seed": 3}
        ),
        models["dense"],
    )
    before = digest(dense)
    heads = [fingerprint(with_head_(deepcopy(dense), 10, ("head",), seed)) for seed in (3, 0)]
    list(transfer_into(tmp_path / "run", {"dense": dense}, few, chosen, {"plan.json": PLAN}))
    assert digest(dense) == before, "the model that was given stays as it is"
    begun = tmp_path / "run" / Path(rows_in(tmp_path / "run")[0]["saved"]).parent / "run.json"
    assert json.loads(begun.read_text())["student"] == heads[0] != heads[1], "the seed decides the head"
    for row in rows_in(tmp_path / "run"):
        assert set(row) == KEYS
        assert (row["epochs"], row["batch"], row["training_images"], row["strength"]) == (2, 10, 20, None)
        model = hetdpt.load(tmp_path / "run" / row["saved"])
        assert hetdpt.evaluate(model, few).top1 == row["top1"]
        assert row["params"] == hetdpt.count_params(model)
        run = tmp_path / "run" / Path(row["saved"]).parent
        asked = json.loads((run / "run.json").read_text())
        assert (asked["teacher"], asked["distillation.kind"], asked["data"]["images"]) == (None, "none", [20, 20])
        assert json.loads((run / "summary.json").read_text())["last"] == row["top1"]
    trained = hetdpt.load(tmp_path / "run" / rows_in(tmp_path / "run")[0]["saved"]).state_dict()
    still = [name for name, value in dense.state_dict().items() if torch.equal(trained[name], value)]
    assert still == []
    assert rows_in(tmp_path / "run")[1]["macs"] < rows_in(tmp_path / "run")[0]["macs"]


def test_more_is_added_and_nothing_is_done_again(whole: Path, models: dict[str, nn.Module], tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "run")
    plain = {"plan.json": PLAN, "plain.json": replace(PLAN, removal="plain")}
    done = list(transfer_into(tmp_path / "run", {"dense": models["dense"]}, "demo", config(), plain))
    assert [(one.subject.name, one.is_own) for one in done if one.is_own] == [("dense, plain.json", True)]
    found, (dense, plan, pruned) = rows_in(tmp_path / "run"), rows_in(whole)
    assert untimed(found[:2]) == untimed([dense, plan])
    assert [row["removal"] for row in found] == [None, "calibrated", "plain", None]
    assert found[3] == pruned, "what was asked for before is still told of"
    assert not any(one.is_own for one in transfer_into(tmp_path / "run", {"new": models["dense"]}, "demo", config()))
    again = rows_in(tmp_path / "run")
    assert [row["model"] for row in again] == ["new", "dense, plain.json", "dense, plan.json", "pruned"]
    assert [row["saved"] for row in again] == [found[index]["saved"] for index in (0, 2, 1, 3)]


def test_processes_with_different_plans_leave_all_rows(models: dict[str, nn.Module], few: Data, tmp_path: Path) -> None:
    """The second does all it was asked for while the first is at work."""
    given = {"dense": models["dense"]}
    first = transfer_into(tmp_path / "run", given, few, QUICKLY, {"one": Plan(attention=(1,))})
    next(first)
    list(transfer_into(tmp_path / "run", given, few, QUICKLY, {"two": Plan(attention=(2,))}))
    list(first)
    assert [row["model"] for row in rows_in(tmp_path / "run")] == ["dense", "dense, one", "dense, two"]
    with (tmp_path / "run" / "results.csv").open(newline="") as file:
        assert [row["model"] for row in csv.DictReader(file)] == ["dense", "dense, one", "dense, two"]


@pytest.mark.parametrize("mode", ["probe", "finetune"])
def test_what_cannot_be_saved_is_refused_before_any_work(mode: str, few: Data, tmp_path: Path) -> None:
    sizes: Any = {"img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 7}
    unknown = timm.create_model("vit_tiny_patch16_224", **sizes)
    with pytest.raises(ModelError, match=r"this model cannot be saved: .*; pass base=hetdpt.Base"):
        list(transfer_into(tmp_path / "run", {"unknown": unknown}, few, replace(QUICKLY, mode=mode)))  # type: ignore[arg-type]
    assert not (tmp_path / "run").exists()


def test_a_tower_is_probed_and_not_saved(few: Data, tmp_path: Path) -> None:
    tower = {"tower": named("hf CLIPVisionModel").build()}
    list(transfer_into(tmp_path / "run", tower, few, QUICKLY))
    [row] = rows_in(tmp_path / "run")
    assert row["saved"] is None
    assert row["strength"] == 0.1


def test_a_layer_that_is_gone_already_counts_once(models: dict[str, nn.Module], few: Data, tmp_path: Path) -> None:
    more = Plan(attention=(0, 1), activation=(2,))
    list(transfer_into(tmp_path / "run", {"pruned": models["pruned"]}, few, QUICKLY, {"more": more}))
    rows = rows_in(tmp_path / "run")
    assert [(row["attention"], row["activation"]) for row in rows] == [(1, 1), (2, 2)]


def test_models_that_differ_in_the_size_of_images_alone_are_two(few: Data, tmp_path: Path) -> None:
    layers = {"window_size": 2, "embed_dim": 16, "depths": [1, 2], "num_heads": [1, 2], "num_classes": 7}
    swins: dict[str, nn.Module] = {}
    for size in (32, 64):
        torch.manual_seed(0)
        swins[f"at {size}"] = build(Base("timm", "swin_tiny_patch4_window7_224", {**layers, "img_size": size}))
    assert len({digest(model) for model in swins.values()}) == 1, "nothing in a module tells them apart"
    assert len({fingerprint(model) for model in swins.values()}) == 2
    list(transfer_into(tmp_path / "run", swins, few, QUICKLY))
    small, large = rows_in(tmp_path / "run")
    assert large["macs"] > 3 * small["macs"]
    assert json.loads((tmp_path / "run" / "run.json").read_text())["model"] == fingerprint(swins["at 32"])[:12]
    with pytest.raises(FileError, match="was started with model ="):
        list(transfer_into(tmp_path / "run", {"large": swins["at 64"]}, few, QUICKLY))


def test_a_fingerprint_knows_the_preprocessing_and_lives_in_files(models: dict[str, nn.Module], tmp_path: Path) -> None:
    dense, before = models["dense"], fingerprint(models["dense"])
    hetdpt.save(dense, tmp_path / "copy")
    assert fingerprint(hetdpt.load(tmp_path / "copy")) == before
    vars(dense)[PREPROCESSING] = replace(preprocessing_of(dense), mean=(0.1, 0.2, 0.3))
    assert fingerprint(dense) != before
    assert len({fingerprint(nn.Linear(2, 2)) for _ in range(2)}) == 2, "also of what says nothing of images"


def test_something_else_is_not_mixed_in(whole: Path, models: dict[str, nn.Module]) -> None:
    before = (whole / "results.json").read_text()
    with pytest.raises(FileError, match=r"was started with config.seed = 0, not 1"):
        list(transfer_into(whole, models, "demo", config(settings={"training.seed": 1})))
    with pytest.raises(FileError, match='was started with mode = "probe", not "finetune"'):
        list(transfer_into(whole, models, "demo", config("finetune")))
    with pytest.raises(FileError, match=r"was started with config.per_class = 30, not 20"):
        list(transfer_into(whole, models, "demo", config(settings={"per_class": 20})))
    with pytest.raises(FileError, match="was started with model ="):
        list(transfer_into(whole, {"pruned": models["pruned"]}, "demo", config()))
    assert (whole / "results.json").read_text() == before


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["probe", "finetune"])
def test_killed_it_comes_to_the_same(mode: str, home: Path, whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    training = ("--epochs", 2, "--batch-size", 50, "--lr", 0.05, "--checkpoint-minutes", 0) * (mode == "finetune")
    command = (
        *("transfer", home / "dense", "--mode", mode, "--plan", home / "plan.json", "--calibration-images", 32),
        *("--per-class", 30, "--out", out, *QUICK, *training),
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    process = subprocess.Popen([str(SCRIPT), *map(str, command), "--quiet"], env=environment, stdout=subprocess.DEVNULL)
    deadline, kept = time.monotonic() + 120, "features/[!.]*" if mode == "probe" else "training/checkpoints/[!.]*"
    while not list(out.glob(f"models/*/{kept}")):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (out / "results.json").exists()
    given = {"dense": hetdpt.load(home / "dense")}
    list(transfer_into(out, given, "demo", config(mode), {"plan.json": PLAN}))
    if mode == "probe":
        assert list(out.glob("models/*/features")) == []  # of what is done
        assert untimed(rows_in(out)) == untimed(rows_in(whole)[:2])
    else:
        list(transfer_into(tmp_path / "whole", given, "demo", config(mode), {"plan.json": PLAN}))
        assert untimed(rows_in(out)) == untimed(rows_in(tmp_path / "whole"))


# the command


def test_lines_a_table_and_json(run: Run, home: Path, whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "run")
    command = (
        *("transfer", home / "dense", "--mode", "probe", "--plan", home / "plan.json", "--beside", home / "pruned"),
        *("--calibration-images", 32, "--per-class", 30, "--out", tmp_path / "run", *QUICK),
    )
    result, found = run(*command), rows_in(whole)
    assert (result.code, result.err) == (0, "")
    lines = result.out.splitlines()
    done = "MACs (done before, or by another process)"
    assert lines[0].startswith(f"{home / 'dense'}: {found[0]['top1']:.2f} % of 360 images, ")
    assert all(line.endswith(done) for line in lines[:3])
    assert "probe on demo" in lines[3]
    assert "1 attention layer and 1 activation, calibrated" in result.out
    assert lines[-5] == "cpu, float32, batch 64; 300 training images, accuracy on 360"
    saved = [tmp_path / "run" / row["saved"] for row in found]
    assert [Path(line.rpartition(": saved to ")[2]) for line in lines[-4:-1]] == saved
    assert all((place / "model.safetensors").is_file() for place in saved)
    assert lines[-1] == f"written to {tmp_path / 'run'}: results.json, results.csv"
    values = run(*command, "--json").values
    assert (values["directory"], values["mode"]) == (str(tmp_path / "run"), "probe")
    assert untimed(values["rows"]) == untimed(found)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--mode", "guess"), "mode is 'guess'; choose from probe, finetune"),
        (
            ("--mode", "probe", "--lr", "0.1", "--clip-grad", "1", "--set", "drop_path=0.1"),
            "a probe trains no weights of the model, but --clip-grad, --lr, --set was given; leave it out, or give "
            "--mode finetune",
        ),
        (
            ("--mode", "probe", "--removal", "plain"),
            "--removal says what replaces the layers of a plan; add --plan, or leave it out",
        ),
        (
            ("--mode", "probe", "--plan", "PLAN", "--plan", "PLAN"),
            "the plans PLAN, PLAN: each plan can be compared only once",
        ),
        (("--mode", "probe", "--beside", "demo"), "demo and demo: each model can be compared only once"),
        (
            ("--mode", "finetune", "--per-class", "3", "--device", "cpu"),
            "30 images do not fill a batch of 384; use a batch size of at most 30",
        ),
        (
            ("--mode", "probe", "--per-class", "1"),
            "the strength of a probe is chosen on training images that are held out, but no class has more than one; "
            "give more images",
        ),
        (("--mode", "probe", "--fraction", "7"), "a fraction of the images is above 0 and at most 1, not 7.0"),
    ],
)
def test_bad_options(options: tuple[str, ...], text: str, run: Run, home: Path, tmp_path: Path) -> None:
    plan = str(home / "plan.json")
    given = [plan if option == "PLAN" else option for option in options]
    run("transfer", "demo", *given, *QUICK, "--out", tmp_path / "run").is_refused(text.replace("PLAN", plan))


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"training.batch_size": 64}, "40 images do not fill a batch of 64; use a batch size of at most 40"),
        ({"training.optimizer": "nosuch"}, "timm has no optimizer 'nosuch'"),
        ({"training.accumulate": 9}, "one epoch has 4 batches but an update takes 9"),
    ],
)
def test_a_training_that_cannot_begin_leaves_nothing_behind(
    settings: dict[str, Any], text: str, models: dict[str, nn.Module], few: Data, tmp_path: Path
) -> None:
    chosen = config("finetune", settings={"per_class": None, "training.batch_size": 10, **settings})
    before = digest(models["dense"])
    with pytest.raises(HetDPTError, match=text):
        list(transfer_into(tmp_path / "run", models, few, chosen))
    assert digest(models["dense"]) == before
    assert not (tmp_path / "run").exists()


def test_models_and_data_that_cannot_be_compared(models: dict[str, nn.Module], data: Data, tmp_path: Path) -> None:
    stream = Stream(tmp_path, "train", data.train.classes, ("a.tar",), (4,))  # type: ignore[union-attr]
    for given, wrong, error, text in (
        ({}, data, MeasureError, "no model was given"),
        ({"one": models["dense"], "two": models["dense"]}, data, MeasureError, "are not all different models"),
        (models, replace(data, train=stream), DataError, "images of a stream of shards have no numbers"),
        (models, replace(data, train=None), DataError, "open the data with both"),
    ):
        with pytest.raises(error, match=text):
            list(transfer_into(tmp_path / "run", given, wrong, config()))
    with pytest.raises(MeasureError, match="are not all different plans"):
        list(transfer_into(tmp_path / "run", models, data, config(), {"a": PLAN, "b": PLAN}))
    with pytest.raises(MeasureError, match="strengths are"):
        config(strengths=())
    with pytest.raises(MeasureError, match="transfer has no teacher to distil from, but distillation is 'hard'"):
        config("finetune", settings={"distillation.kind": "hard"})
    assert not (tmp_path / "run").exists()
