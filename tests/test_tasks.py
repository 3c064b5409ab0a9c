"""Detection and segmentation, row by row: made of any backbone, trained in the one loop, saved, killed and resumed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import test_cli
import timm
import torch
from PIL import Image
from test_cli import Run
from torch import nn

import hetdpt
from hetdpt.adapters.preprocessing import preprocessing_of
from hetdpt.cli.tasks import LearnOptions
from hetdpt.core.errors import DataError, FileError, TrainError
from hetdpt.data.batches import OrderedBatches, RandomBatches
from hetdpt.data.views import Loading, Share
from hetdpt.surgery.record import require_record
from hetdpt.tasks.annotated import AnnotatedData
from hetdpt.tasks.learning import LearnConfig, build, learn, score
from hetdpt.tasks.model import TaskModel
from hetdpt.tasks.run import learn_into
from hetdpt.tasks.saved import load_task, save_task
from hetdpt.tasks.shapes import Drawing, draw
from hetdpt.tasks.table import TASKS

run = test_cli.run  # the fixture

SIDE = 32
COUNTS = {"train": 8, "val": 4}
SIZES = {"img_size": 16, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 3}
PLAN = hetdpt.Plan(attention=(1,), activation=(0,), removal="calibrated")
HEADS: dict[str, dict[str, Any]] = {
    "detection": {
        "width": 16, "heads": 2, "points": 2, "hidden": 16, "encoder_layers": 1, "decoder_layers": 2,
        "further_maps": 0, "queries": 8, "extra_queries": 12, "repeats": 2,
    },
    "segmentation": {"width": 8, "pool_scales": (1, 2), "auxiliary_width": 8},
}  # fmt: skip
LOOP = {"training.epochs": 2, "training.batch_size": 4, "training.lr": 0.01, "training.lr_batch": None}


def backbone(**changes: Any) -> nn.Module:
    """Return a small ViT, the same at every call."""
    sizes = {**SIZES, **changes}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model: nn.Module = timm.create_model("vit_tiny_patch16_224", **sizes)
    vars(model)["_hetdpt_base"] = hetdpt.Base("timm", "vit_tiny_patch16_224", sizes)
    return model.eval()


def config(task: str, **changes: Any) -> LearnConfig:
    head = {f"head.{name}": value for name, value in HEADS[task].items()}
    loop = LOOP if task == "segmentation" else {**LOOP, "training.lr": 0.001}
    return LearnConfig.of(task).with_settings({**head, **loop, "size": (SIDE, SIDE), "pyramid": 16, **changes})


def write_boxes(folder: Path) -> None:
    """Write drawings with the boxes in them, as COCO does."""
    names = ("rectangle", "disc", "triangle")
    for seed, (split, count) in enumerate(COUNTS.items()):
        (folder / split).mkdir(parents=True)
        images, boxes = [], []
        for number in range(count):
            drawing = draw(seed, number, SIDE)
            Image.fromarray(drawing.image).save(folder / split / f"{number}.png")
            images.append({"id": number, "file_name": f"{number}.png", "height": SIDE, "width": SIDE})
            for mask, label in zip(drawing.masks, drawing.labels, strict=True):
                rows, columns = np.nonzero(mask)
                box = [columns.min(), rows.min(), np.ptp(columns) + 1, np.ptp(rows) + 1]
                boxes.append({"id": len(boxes) + 1, "image_id": number, "category_id": int(label) + 1,
                              "bbox": [int(side) for side in box], "area": int(mask.sum()), "iscrowd": 0})  # fmt: skip
        categories = [{"id": number, "name": name} for number, name in enumerate(names, 1)]
        (folder / "annotations").mkdir(exist_ok=True)
        content = {"images": images, "annotations": boxes, "categories": categories}
        (folder / "annotations" / f"instances_{split}.json").write_text(json.dumps(content))


def write_masks(folder: Path) -> None:
    """Write drawings with a class for every pixel."""
    for seed, (split, count) in enumerate(COUNTS.items()):
        for kind in ("images", "masks"):
            (folder / split / kind).mkdir(parents=True)
        for number in range(count):
            drawing = draw(seed, number, SIDE)
            classes = (drawing.masks * (drawing.labels + 1)[:, None, None]).sum(axis=0).astype(np.uint8)
            Image.fromarray(drawing.image).save(folder / split / "images" / f"{number}.png")
            Image.fromarray(classes).save(folder / split / "masks" / f"{number}.png")
    (folder / "classes.txt").write_text("background\nrectangle\ndisc\ntriangle\n")


WRITERS = {"detection": write_boxes, "segmentation": write_masks}
COMMANDS = {"detection": "detect", "segmentation": "segment"}


@dataclass(frozen=True)
class Place:
    """A task, its data on disk, and a saved backbone."""

    task: str
    data: Path
    model: Path
    plan: Path

    def open(self) -> AnnotatedData:
        return TASKS[self.task].open(str(self.data))

    @property
    def command(self) -> str:
        return COMMANDS[self.task]

    def train(self, out: Path, *options: Any) -> tuple[Any, ...]:
        """Return the command that does what ``config`` says."""
        settings = {f"head.{name}": value for name, value in HEADS[self.task].items()} | {"pyramid": 16}
        given = [part for name, value in settings.items() for part in ("--set", f"{name}={_json(value)}")]
        loop = ("--epochs", 2, "--batch-size", 4, "--lr", config(self.task).training.lr, "--size", SIDE)
        where = (self.command, "train", self.model, "--data", self.data, "--out", out)
        return (*where, *loop, *given, "--workers", 0, "--device", "cpu", *options)


def _json(value: Any) -> str:
    return json.dumps(list(value) if isinstance(value, tuple) else value)


@pytest.fixture(scope="module", params=TASKS)
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Place:
    folder = tmp_path_factory.mktemp(request.param)
    WRITERS[request.param](folder / "data")
    hetdpt.save(backbone(), folder / "model")
    (folder / "plan.json").write_text(PLAN.to_json())
    return Place(request.param, folder / "data", folder / "model", folder / "plan.json")


@pytest.fixture(scope="module")
def whole(place: Place, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a training with a plan that nobody disturbed."""
    out = tmp_path_factory.mktemp("whole") / "run"
    for _ in learn_into(out, backbone(), place.open(), config(place.task), plan=PLAN, device="cpu"):
        pass
    return out


def answers(model: TaskModel) -> list[torch.Tensor]:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        images = torch.randn(2, 3, SIDE, SIDE)
    with torch.no_grad():
        answer = model.eval()(images)
    return list(answer) if isinstance(answer, tuple) else [answer]


def are_equal(one: TaskModel, other: TaskModel) -> bool:
    return all(torch.equal(a, b) for a, b in zip(answers(one), answers(other), strict=True))


def numbers_in(directory: Path) -> list[dict[str, Any]]:
    """Return what a run wrote of its epochs, times and checksums left out."""
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    times = ("seconds", "images_per_second", "checksum")
    return [{name: value for name, value in line.items() if name not in times} for line in lines]


# What every row promises.


def test_the_loss_is_finite_and_reaches_every_weight(place: Place) -> None:
    data, settings = place.open(), config(place.task)
    model = build(backbone(), data, settings)
    view = TASKS[place.task].view(model.size, preprocessing_of(model.backbone.model), True)
    assert data.train is not None
    batch = next(RandomBatches(data.train, view, Loading(batch_size=4)).epoch(0))
    loss = model.train()(batch.images, batch.targets)
    loss.backward()
    assert loss.shape == ()
    assert loss.isfinite()
    idle = [name for name, weight in model.named_parameters() if weight.grad is None]
    head = {"backbone.model.head.weight", "backbone.model.head.bias"}  # of classes, which no map goes through
    assert set(idle) <= head
    assert min(weight.grad.abs().max() for name, weight in model.named_parameters() if "blocks.0" in name) > 0


def test_a_pruned_backbone_is_merged_and_no_longer_dense(place: Place) -> None:
    data, settings = place.open(), config(place.task)
    dense, pruned = build(backbone(), data, settings), build(backbone(), data, settings, plan=PLAN)
    assert require_record(pruned.backbone.model).merged == (0,)
    assert not are_equal(dense, pruned)
    own = [{name: value for name, value in model.state_dict().items() if not name.startswith("backbone.model.")}
           for model in (dense, pruned)]  # fmt: skip
    assert all(torch.equal(own[0][name], own[1][name]) for name in own[0])  # the head begins the same


def test_saved_and_loaded_it_answers_bit_for_bit_the_same(place: Place, tmp_path: Path) -> None:
    model = build(backbone(), place.open(), config(place.task), plan=PLAN)
    loaded = load_task(save_task(model, tmp_path / "saved"))
    assert are_equal(model, loaded)
    assert (loaded.classes, loaded.config, loaded.size) == (model.classes, model.config, (SIDE, SIDE))
    assert require_record(loaded.backbone.model).plan == require_record(model.backbone.model).plan


@pytest.mark.parametrize("file", ["task.json", "head.safetensors", "backbone/model.safetensors"])
def test_a_damaged_file_is_refused_by_name(place: Place, whole: Path, tmp_path: Path, file: str) -> None:
    shutil.copytree(whole / "last", tmp_path / "model")
    content = bytearray((tmp_path / "model" / file).read_bytes())
    content[-20] ^= 1
    (tmp_path / "model" / file).write_bytes(content)
    with pytest.raises(FileError, match=Path(file).name):
        load_task(tmp_path / "model")


def test_a_training_writes_its_models_and_scores(place: Place, whole: Path) -> None:
    summary = json.loads((whole / "summary.json").read_text())
    epochs = [line for line in numbers_in(whole) if line["kind"] == "epoch"]
    assert [line["number"] for line in epochs] == [0, 1, 2]
    assert epochs[2]["loss"] < epochs[1]["loss"]
    best = epochs[summary["best_epoch"]]
    assert summary["scores"] == best["scores"]
    assert summary["best"] == best["last"] == max(line["last"] for line in epochs)
    found = score(load_task(whole / "best"), place.open(), device="cpu")
    assert found.score == pytest.approx(summary["best"], abs=1e-4)  # other batches, other rounding


def test_of_equals_the_latest_trained_epoch_is_best(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scores that stay at 0, as those of a short training may: what is kept as best has learned something.

    It is stopped and goes on in its second epoch, which is as good as the first.
    """
    row, data = TASKS[place.task], place.open()
    measure = row.measure
    fields = {"detection": "ap", "segmentation": "miou"}
    monkeypatch.setitem(
        TASKS, place.task, replace(row, measure=lambda *args: replace(measure(*args), **{fields[place.task]: 0.0}))
    )
    found: list[bool] = []
    for _ in range(2):
        epochs = learn_into(tmp_path / "run", backbone(), data, config(place.task), device="cpu", minutes=0.0)
        with closing(epochs):
            for one in epochs:
                found.append(one.epoch.is_best)
                if one.epoch.number == 1 and len(found) == 2:
                    break
    assert found == [True, True, True, True]  # epochs 0 and 1, and from the last checkpoint on 1 and 2
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["best_epoch"] == 2
    start, best, last = (load_task(tmp_path / "run" / name) for name in ("start", "best", "last"))
    assert not are_equal(best, start)
    assert are_equal(best, last)


def test_removal_is_calibrated_by_as_many_processes_as_read_images(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    monkeypatch.setattr(
        "hetdpt.tasks.run.build", lambda *args, **options: seen.append(options) or build(*args, **options)
    )
    watched = learn_into(tmp_path / "run", backbone(), place.open(), config(place.task), plan=PLAN, workers=1)
    next(watched)
    watched.close()
    assert seen[-1]["workers"] == 1


def test_called_again_it_does_nothing_and_other_settings_are_refused(place: Place, whole: Path) -> None:
    before = {file: file.stat().st_mtime_ns for file in whole.rglob("*") if file.is_file()}
    settings = config(place.task)
    assert list(learn_into(whole, backbone(), place.open(), settings, plan=PLAN, device="cpu")) == []
    assert {file: file.stat().st_mtime_ns for file in whole.rglob("*") if file.is_file()} == before
    with pytest.raises(
        FileError,
        match=r"was started with calibration = 256, not null; give the same to resume, or another directory",
    ):
        list(learn_into(whole, backbone(), place.open(), settings, device="cpu"))


def test_stopped_in_an_epoch_it_goes_on_bit_for_bit(place: Place, whole: Path, tmp_path: Path) -> None:
    """A checkpoint after every update, and a stop where the second epoch has one update behind it."""

    class StopError(Exception):
        pass

    def stop(now: Any) -> None:
        if now.update == 4:
            raise StopError

    settings: dict[str, Any] = {"plan": PLAN, "device": "cpu", "minutes": 0.0}
    with pytest.raises(StopError):
        for _ in learn_into(tmp_path / "run", backbone(), place.open(), config(place.task), watch=stop, **settings):
            pass
    again = list(learn_into(tmp_path / "run", backbone(), place.open(), config(place.task), **settings))
    assert [learned.epoch.number for learned in again] == [2]
    assert numbers_in(tmp_path / "run") == numbers_in(whole)
    assert are_equal(load_task(tmp_path / "run" / "last"), load_task(whole / "last"))


def test_begun_with_something_else_before_its_first_checkpoint_it_begins_anew(place: Place, tmp_path: Path) -> None:
    """A batch larger than the data is refused when what training begins with is saved already."""
    wrong = config(place.task, **{"training.batch_size": 100, "pyramid": 24})
    with pytest.raises(DataError, match="8 images do not fill a batch of 100; use a batch size of at most 8"):
        list(learn_into(tmp_path / "run", backbone(embed_dim=48), place.open(), wrong, device="cpu"))
    right = config(place.task, **{"training.epochs": 1})
    list(learn_into(tmp_path / "run", backbone(), place.open(), right, plan=PLAN, device="cpu"))
    model = load_task(tmp_path / "run" / "last").backbone
    assert model.channels[-1] == 16
    assert (require_record(model.model).plan.attention, require_record(model.model).plan.activation) == ((1,), (0,))


@pytest.mark.slow
def test_killed_it_comes_to_the_same(place: Place, whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    command = place.train(out, "--plan", place.plan, "--checkpoint-minutes", 0, "--quiet")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    line = [sys.executable, "-m", "hetdpt", *map(str, command)]
    kills = 0
    while not (out / "summary.json").is_file():
        files = set(out.glob("checkpoints/0*.pt"))
        process = subprocess.Popen(line, env=environment, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + 240
        while process.poll() is None and set(out.glob("checkpoints/0*.pt")) <= files:
            assert time.monotonic() < deadline
            time.sleep(0.002)
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            kills += 1
        process.wait()
        assert kills < 12
    assert kills >= 2
    assert numbers_in(out) == numbers_in(whole)
    assert are_equal(load_task(out / "last"), load_task(whole / "last"))


@pytest.mark.slow
def test_two_processes_measure_the_model_that_is_saved(place: Place, tmp_path: Path) -> None:
    """Batch norms of the two have seen other images: without an exchange each would measure a model of its own."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = place.train(tmp_path / "run", "--plan", place.plan, "--batch-size", 2, "--quiet")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run(
        [*launch, "-m", "hetdpt", *map(str, command)], env=environment, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    alone = score(load_task(tmp_path / "run" / "last"), place.open(), device="cpu")
    assert alone.score == pytest.approx(summary["last"], abs=1e-4)  # other batches, other rounding


def one_bright_square(seed: int, number: int, side: int) -> Drawing:
    """Return a drawing that is learned in a minute: a white square somewhere on black."""
    chance = np.random.default_rng([seed, number])
    length = int(chance.integers(side // 3, side // 2))
    left, top = chance.integers(0, side - length, 2)
    mask = np.zeros((1, side, side), dtype=bool)
    mask[0, top : top + length, left : left + length] = True
    return Drawing(np.repeat(mask[0, :, :, None], 3, axis=2) * np.uint8(255), mask, np.zeros(1, dtype=np.int64))


BY_HEART: dict[str, dict[str, Any]] = {
    "detection": {"head.width": 32, "training.lr": 0.002, "training.clip_grad": 1.0, "training.epochs": 20},
    "segmentation": {"training.lr": 0.003, "training.optimizer": "adamw", "training.epochs": 6},
}
CHANCE = {"detection": 5.0, "segmentation": 45.0}
"""What no untrained model is above: boxes anywhere; background everywhere, which is 3/4 to 8/9 of the pixels."""


@pytest.mark.slow
@pytest.mark.parametrize("plan", [None, PLAN], ids=["dense", "pruned"])
@pytest.mark.parametrize("task", TASKS)
def test_the_metric_rises_above_that_of_the_untrained_model(
    task: str, plan: hetdpt.Plan | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "draw", one_bright_square)
    monkeypatch.setitem(COUNTS, "train", 32)
    WRITERS[task](tmp_path / "data")
    loop = {"training.batch_size": 2, "training.backbone_lr": 1.0, "training.schedule": "cosine"}
    settings = config(task, **loop, **BY_HEART[task])
    data = TASKS[task].open(str(tmp_path / "data"))
    data = replace(data, val=data.train)  # by heart: that it learns is the question, not how much of it is general
    learned = list(learn_into(tmp_path / "run", backbone(), data, settings, plan=plan, device="cpu"))
    start, *epochs = [one.epoch for one in learned]
    assert start.last is not None
    assert start.last < CHANCE[task]
    assert epochs[-1].last > CHANCE[task] + 10
    assert epochs[-1].loss < 0.7 * epochs[0].loss


# The loop.


def test_two_processes_see_what_one_with_twice_the_batch_sees(place: Place) -> None:
    data = place.open()
    assert data.train is not None
    assert data.val is not None
    wants = preprocessing_of(backbone())
    view = TASKS[place.task].view((SIDE, SIDE), wants, True)
    one = next(RandomBatches(data.train, view, Loading(batch_size=4, seed=1)).epoch(2))
    halves = [
        next(RandomBatches(data.train, view, Loading(batch_size=2, seed=1, share=Share(rank, 2))).epoch(2))
        for rank in range(2)
    ]
    for number in range(4):
        half = halves[number % 2]
        assert torch.equal(half.images[number // 2], one.images[number])
        target = half.targets[number // 2]
        assert all(torch.equal(target[name], one.targets[number][name]) for name in target)
    plain = TASKS[place.task].view((SIDE, SIDE), wants, False)
    shares = [OrderedBatches(data.val, plain, Loading(batch_size=3, share=Share(rank, 3))) for rank in range(3)]
    batches = [list(share) for share in shares]
    assert [[batch.indices.tolist() for batch in part] for part in batches] == [[[0, 3]], [[1, -1]], [[2, -1]]]
    assert batches[1][0].targets[1] == {}
    assert not batches[1][0].images[1].any()


def test_an_unreadable_image_is_replaced_in_training_and_left_out_of_the_scores(place: Place, tmp_path: Path) -> None:
    shutil.copytree(place.data, tmp_path / "data")
    for split in COUNTS:
        next(
            file for file in sorted((tmp_path / "data" / split).rglob("1.png")) if "masks" not in str(file)
        ).write_bytes(b"no image")
    data = TASKS[place.task].open(str(tmp_path / "data"))
    settings = config(place.task, **{"training.epochs": 1})
    *_, last = learn(build(backbone(), data, settings), data, settings, device="cpu")
    assert [Path(name).name for name in last.epoch.unreadable] == ["1.png", "1.png"]
    assert last.epoch.loss is not None


def test_other_classes_than_those_it_was_made_for_are_refused(place: Place, whole: Path) -> None:
    model = load_task(whole / "last")
    data = replace(place.open(), classes=("cat", "dog"))
    with pytest.raises(DataError, match=r"was built for \d classes \(.*\), but .* has 2 classes \(cat, dog\); give"):
        score(model, data, device="cpu")


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"training.smoothing": 0.5}, "mixup, cutmix and smoothing apply to labels, not to boxes or masks"),
        ({"size": (0, 32)}, r"the canvas is \(0, 32\); a height and a width above 0 were expected"),
        ({"pyramid": 0}, "the pyramid has 0 channels; 1 or more were expected"),
        ({"head.widht": 8}, "unknown setting head.widht; did you mean head.width"),
        ({"head.width": "wide"}, "head.width is 'wide', but a whole number was expected"),
    ],
)
def test_settings_that_cannot_be_are_refused(place: Place, settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(TrainError, match=sentence):
        LearnConfig.of(place.task).with_settings(settings)


def test_detection_divides_the_rate_by_ten_for_the_last_epoch_of_however_many() -> None:
    paper = LearnConfig.of("detection")
    for epochs, expected in ((1, 1), (2, 1), (12, 11), (50, 49)):
        assert paper.with_settings({"training.epochs": epochs}).training.decay_epochs == expected
        options = {"model": "demo", "data": "shapes", "out": Path("run"), "epochs": epochs}
        config = LearnOptions(**options, changes=["training.weight_decay=0.1"]).config("detection")
        assert config.training.decay_epochs == expected
    given = LearnOptions(**{**options, "epochs": 50}, changes=["training.decay_epochs=40"]).config("detection")
    assert given.training.decay_epochs == 40
    assert given.with_settings({"training.epochs": 60}).training.decay_epochs == 40  # once given, it stays
    segmentation = LearnConfig.of("segmentation")
    changed = segmentation.with_settings({"training.epochs": 50}).training
    assert changed.decay_epochs == segmentation.training.decay_epochs


def test_the_rate_of_the_last_epoch_is_a_tenth(place: Place) -> None:
    data, settings = place.open(), config(place.task, **{"training.epochs": 4, "training.schedule": "step"})
    settings = settings.with_settings({"training.decay_epochs": 3.0})
    rates = [one.epoch.lr for one in learn(build(backbone(), data, settings), data, settings, device="cpu")]
    first = settings.training.lr
    assert rates[1:] == pytest.approx([first, first, first, first / 10])


def test_there_is_no_other_task() -> None:
    with pytest.raises(TrainError, match="the tasks are detection and segmentation, not 'depth'"):
        LearnConfig.of("depth")


# From the command line.


def test_the_command_trains_and_measures(place: Place, whole: Path, tmp_path: Path, run: Run) -> None:
    done = run(*place.train(tmp_path / "run", "--plan", place.plan, "--quiet"))
    metric = TASKS[place.task].metric
    assert f"before training: {metric} " in done.out
    assert f"saved to {tmp_path / 'run'}: last, best" in done.out
    assert numbers_in(tmp_path / "run") == numbers_in(whole)
    where = ("--data", place.data, "--device", "cpu", "--workers", 0)
    found = json.loads(run(place.command, "eval", tmp_path / "run", *where, "--json").out)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert found["directory"] == str(tmp_path / "run" / "best")
    numbers = {name: value for name, value in summary["scores"].items() if isinstance(value, float)}
    assert {name: found[name] for name in numbers} == pytest.approx(numbers, abs=1e-4)
    assert "is already done" in run(*place.train(tmp_path / "run", "--plan", place.plan)).out


@pytest.mark.parametrize(
    "missing", [("transformers",), ("torchmetrics",), ("pycocotools",), ("transformers", "pycocotools")]
)
def test_without_the_extra_nothing_begins(
    place: Place, whole: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch, missing: tuple[str, ...]
) -> None:
    for name in missing:
        monkeypatch.setitem(sys.modules, name, None)  # as if it were not installed
    for command in (place.train(tmp_path / "run"), (place.command, "eval", whole, "--data", place.data)):
        result = run(*command)
        packages = f"package{'s' if len(missing) > 1 else ''} {' and '.join(missing)}"
        assert (result.code, result.out) == (2, "")
        assert f'{place.task} needs the {packages}; pip install "hetdpt[downstream]"' in result.err
        assert result.err.count("\n") == 1, result.err
    assert not (tmp_path / "run").exists()


def test_bad_input_is_one_sentence(place: Place, whole: Path, tmp_path: Path, run: Run) -> None:
    other = next(task for task in TASKS if task != place.task)
    cases: list[tuple[tuple[Any, ...], str]] = [
        (place.train(tmp_path / "a", "--size", "wide"), "--size takes a side, or height and width"),
        (
            place.train(tmp_path / "a", "--removal", "plain"),
            "--removal says what replaces the layers of a plan",
        ),
        (place.train(tmp_path / "a", "--data", tmp_path / "nowhere"), "nowhere"),
        (place.train(tmp_path / "a", "--size", 30), "30"),
        ((place.command, "eval", tmp_path, "--data", place.data), "has no trained model (task.json)"),
        ((COMMANDS[other], "eval", whole, "--data", place.data), f"is a model for {place.task}, not for {other}"),
    ]
    for command, sentence in cases:
        result = run(*command)
        assert result.code == 2, command
        assert sentence in result.err
        assert result.err.count("\n") == 1, result.err
    assert not (tmp_path / "a").exists()
