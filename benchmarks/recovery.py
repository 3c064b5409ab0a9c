"""Recovery from few images: what the student should learn, and how far the recipe ``quick`` brings it.

    python benchmarks/recovery.py losses [--plans ...] [--losses ...] [--seeds 0] [--epochs 3]
    python benchmarks/recovery.py recipe [--plans ...] [--seeds 0] [--minutes 60] [--folder]
    python benchmarks/recovery.py order [--seeds 0] [--epochs 3]
    python benchmarks/recovery.py settings [--plans ...] [--settings ...] [--train-images N] [--seeds 0] [--epochs 3]
    python benchmarks/recovery.py cost [--runs 10]

``losses`` trains one student per plan, loss and seed on all training images, with the same views in the same order, and
scores it on the validation images after every epoch. ``recipe`` is the command ``hetdpt recover --recipe quick
--minutes M`` as a user gives it: the learning rate is found and the model to keep is chosen on training images that are
held out, and the validation images are used once. With ``--folder`` it gets the training images as a plain folder,
without labels. ``order`` removes layers all at once or in parts, each followed by its share of the epochs, on half of
the training images; what counts is the divergence from the dense model on images that are held out. ``settings``
compares by the same measure what else could be the default, for a number of training images; a cached teacher gets a
third more epochs, which take as long. ``cost`` times
updates in turns: logits alone, with hidden states, and both with a cached teacher.

The models are the ViT-Tiny of ``../shared/data`` with 3,000 images of ImageNet, and the DINOv2 ViT-S of ``tail.py``
with 2,000 of CIFAR-10. Minutes are those of training alone, on as many cores as there are threads (OMP_NUM_THREADS).
"""

from __future__ import annotations

import argparse
import json
import resource
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

# isort: off
import hetdpt  # before timm: cures torchvision where its operators do not load

# isort: on
from evidence import IMAGENET, RESULTS, VIT_TINY, VIT_TINY_WEIGHTS, Key, Recorder, require_real_data
from tail import CIFAR, fine_tuned, run, scores
from tail import WORK as TAIL_WORK
from torch import nn

from hetdpt.adapters.models import input_size_of
from hetdpt.adapters.preprocessing import preprocessing_of
from hetdpt.core.modules import clone
from hetdpt.core.plan import Plan
from hetdpt.data.fixed_batches import ImageBatches
from hetdpt.data.sources import open_data
from hetdpt.flow.recipes import quick
from hetdpt.measurement.agreement import measure_damage
from hetdpt.training.decide import first_images
from hetdpt.training.recover import RecoverConfig, recover, training_data

WORK = Path("runs/bench/recovery")
FITTED_ON = 256  # images
ONLY = 1000.0  # a weight of hidden states beside which logits do not count
LOSSES = {"logits": 0.0, "logits + 20 hidden": 20.0, "hidden": ONLY}
"""The weight of hidden states. For hidden states alone, the head and the norm before it are not trained."""


@dataclass(frozen=True)
class Case:
    """A plan, the dense model that it is for, its data, and the learning rate at which losses are compared."""

    dense: str
    plan: Plan
    lr: float


PATCHES_ONLY = ("constant", "calibrated-keep")
CASES = {
    "vit-tiny 4 layers": Case("vit-tiny", Plan(attention=(0,), activation=(5, 10, 11), removal="calibrated"), 1e-4),
    "vit-tiny 6 layers": Case(
        "vit-tiny", Plan(attention=(0,), activation=(3, 5, 9, 10, 11), removal="calibrated"), 1e-4
    ),
    "vit-tiny tail 3": Case("vit-tiny", Plan(tail=3), 1e-4),
    "vit-tiny tail 3 + 2": Case("vit-tiny", Plan(attention=(0,), activation=(3,), tail=3, removal=PATCHES_ONLY), 1e-4),
    "dinov2 tail 4": Case("dinov2", Plan(tail=4), 3e-5),
    "dinov2 tail 5": Case("dinov2", Plan(tail=5), 3e-5),
}


PARTS = {
    "vit-tiny 6 layers": (
        Plan(activation=(10, 11), removal="calibrated"),
        Plan(attention=(0,), activation=(5,), removal="calibrated"),
        Plan(activation=(3, 9), removal="calibrated"),
    ),
    "vit-tiny tail 3 + 2": (
        Plan(tail=3),
        Plan(attention=(0,), removal=PATCHES_ONLY),
        Plan(activation=(3,), removal=PATCHES_ONLY),
    ),
}
"""The plans of ``CASES`` part by part, those that do the least damage first."""


def dense_of(name: str, dinov2: Path) -> tuple[nn.Module, Path]:
    """Return a dense model and the folder of its data."""
    if name == "dinov2":
        return fine_tuned(dinov2), CIFAR
    return hetdpt.create(VIT_TINY, weights=VIT_TINY_WEIGHTS), IMAGENET


def key_of(name: str) -> Key:
    """Return the part of a key that names a case."""
    model, plan = name.split(" ", 1)
    return {"model": model, "plan": plan}


class Bench:
    """Starts from which students are trained, made once and kept in ``work``."""

    def __init__(self, work: Path, dinov2: Path) -> None:
        self.work, self.dinov2 = work, dinov2

    def dense(self, name: str) -> Path:
        """Return the directory of a dense model."""
        directory = self.work / name
        if not directory.is_dir():
            hetdpt.save(dense_of(name, self.dinov2)[0], directory)
        return directory

    def start(self, name: str) -> Path:
        """Return the directory of the calibrated student of a case."""
        directory = self.work / name.replace(" ", "_")
        if not directory.is_dir():
            case = CASES[name]
            dense, data = dense_of(case.dense, self.dinov2)
            images = open_data(str(data)).train
            assert images is not None
            batches = ImageBatches(images, preprocessing_of(dense), count=FITTED_ON)
            hetdpt.save(hetdpt.calibrate_(clone(dense), case.plan, batches), directory)
        return directory

    def folder(self, data: Path) -> Path:
        """Return a folder with the training images of ``data`` and nothing that tells their classes."""
        folder = self.work / f"{data.name}_images"
        folder.mkdir(parents=True, exist_ok=True)
        for file in sorted((data / "train").rglob("*.*")):
            link = folder / f"{file.parent.name}_{file.name}"
            if not link.exists():
                link.symlink_to(file)
        return folder


def config_of(case: Case, loss: str, seed: int, epochs: int, precision: str) -> RecoverConfig:
    """Return ``quick`` with a fixed learning rate and number of epochs, on all training images."""
    settings = {
        "training.epochs": epochs,
        "training.lr": case.lr,
        "training.seed": seed,
        "training.precision": precision,
        "distillation.hidden": LOSSES[loss],
        "hold_out": 0.0,
    }
    return quick().config.with_settings(settings)


def compare_losses(recorder: Recorder, bench: Bench, options: argparse.Namespace) -> None:
    """Add the rows of ``losses`` that are not there yet."""
    for name in options.plans:
        for seed in options.seeds:
            for loss in options.losses:
                key = {"part": "losses", **key_of(name), "loss": loss, "seed": seed, "epochs": options.epochs}
                if not recorder.has(**key):
                    config = config_of(CASES[name], loss, seed, options.epochs, options.precision)
                    recorder.add(key, **trained(bench, name, config, is_head_fixed=LOSSES[loss] == ONLY))


def trained(bench: Bench, name: str, config: RecoverConfig, *, is_head_fixed: bool) -> dict[str, Any]:
    """Train the student of a case; return its accuracy after every epoch, and what it gets right in the end."""
    dense, data = dense_of(CASES[name].dense, bench.dinov2)
    student = hetdpt.load(bench.start(name))
    ratio = hetdpt.count_macs(dense, input_size_of(dense)) / hetdpt.count_macs(student, input_size_of(student))
    if is_head_fixed:
        for one in ("norm", "fc_norm", "head"):
            student.get_submodule(one).requires_grad_(False)
    seconds, curve = 0.0, []
    for epoch in recover(student, dense, str(data), config, device="cpu"):
        seconds += epoch.seconds
        curve.append([round(seconds / 60, 2), epoch.last])
    return {"mac_ratio": round(ratio, 5), "curve": curve, **scores(student.eval(), str(data))}


def follow_recipe(recorder: Recorder, bench: Bench, options: argparse.Namespace) -> None:
    """Run ``hetdpt recover`` for every case that has no row yet."""
    for name in options.plans:
        for seed in options.seeds:
            key = {
                "part": "recipe",
                **key_of(name),
                "seed": seed,
                "minutes": options.minutes,
                "labels": not options.folder,
            }
            if not recorder.has(**key):
                recorder.add(key, **recovered(bench, name, seed, options))


def recovered(bench: Bench, name: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Run ``hetdpt recover`` for one case; return its accuracies, its learning rate, and how it got there."""
    case = CASES[name]
    data = dense_of(case.dense, bench.dinov2)[1]
    labels = "folder" if options.folder else "labels"
    out = bench.work / f"{name.replace(' ', '_')}_{labels}_{options.minutes:g}_{seed}"
    arguments = ["--teacher", str(bench.dense(case.dense)), "--recipe", "quick", "--seed", str(seed)]
    arguments += ["--data", str(bench.folder(data) if options.folder else data), "--precision", options.precision]
    run("recover", str(bench.start(name)), *arguments, "--minutes", f"{options.minutes:g}", "--out", str(out))
    summary = json.loads((out / "summary.json").read_text())
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    epochs = [line for line in lines if line["kind"] == "epoch"]
    kept = {
        name: summary[name] for name in ("start", "best", "best_epoch", "epochs", "lr_found", "measured_on", "notes")
    }
    seconds = sum(line["seconds"] for line in epochs)
    held = [round(line["last"], 2) for line in epochs]
    found = scores(hetdpt.load(out / "best"), str(data))
    return {**kept, "minutes": round(seconds / 60, 1), "held_out": held, **found}


def compare_orders(recorder: Recorder, bench: Bench, options: argparse.Namespace) -> None:
    """Add the rows of ``order`` that are not there yet."""
    for name in (plan for plan in options.plans if plan in PARTS):
        for seed in options.seeds:
            for is_progressive in (False, True):
                plans = PARTS[name] if is_progressive else (CASES[name].plan,)
                key = {"part": "order", **key_of(name), "parts": len(plans), "seed": seed, "epochs": options.epochs}
                if not recorder.has(**key):
                    recorder.add(key, divergence=removed_in_parts(bench, name, plans, seed, options))


def removed_in_parts(
    bench: Bench, name: str, plans: tuple[Plan, ...], seed: int, options: argparse.Namespace
) -> list[float]:
    """Remove one plan after another, with an equal share of the epochs after each; return all divergences."""
    case = CASES[name]
    dense, data = dense_of(case.dense, bench.dinov2)
    found, student = list[float](), clone(dense)
    epochs = {"hold_out": 0.1, "fraction": 0.5, "training.epochs": options.epochs // len(plans)}
    config = config_of(case, "hidden", seed, options.epochs, options.precision).with_settings(epochs)
    images = training_data(open_data(str(data)), config)[0].train
    assert images is not None
    for plan in plans:
        hetdpt.calibrate_(student, plan, ImageBatches(images, preprocessing_of(dense), count=FITTED_ON))
        found += [
            round(epoch.divergence or 0.0, 4) for epoch in recover(student, dense, str(data), config, device="cpu")
        ]
    return found


SETTINGS: dict[str, dict[str, Any]] = {
    "new views": {},
    "4 fixed views, cached teacher": {"augmentation.views": 4, "cache_teacher": True},
    "half of the batches mixed": {"training.mixup": 0.8, "training.mix_prob": 0.5},
    "moving average": {"training.ema_decay": 0.99, "training.ema_warmup": True},
    "last four blocks alone": {},
}
"""Other defaults that ``quick`` could have; the last trains blocks 8 to 11, where the tails begin, and what follows."""


def compare_settings(recorder: Recorder, bench: Bench, options: argparse.Namespace) -> None:
    """Add the rows of ``settings`` that are not there yet."""
    for name in options.plans:
        for seed in options.seeds:
            for setting in options.settings:
                key = {"part": "settings", **key_of(name), "setting": setting, "seed": seed, "epochs": options.epochs}
                key["train_images"] = options.train_images
                if not recorder.has(**key):
                    recorder.add(key, **trained_with(bench, name, setting, seed, options))


def trained_with(bench: Bench, name: str, setting: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Train with a setting; return minutes and the divergence from the dense model on held-out images so far."""
    dense, data = dense_of(CASES[name].dense, bench.dinov2)
    epochs = options.epochs * 4 // 3 if "cached" in setting else options.epochs
    config = config_of(CASES[name], "hidden", seed, epochs, options.precision)
    config = config.with_settings({"hold_out": 0.1, **SETTINGS[setting]})
    opened = open_data(str(data))
    assert opened.train is not None
    if options.train_images:
        opened = replace(opened, train=first_images(opened.train, options.train_images, 0))
    student = hetdpt.load(bench.start(name))
    if setting == "last four blocks alone":
        for parameter, values in student.named_parameters():
            values.requires_grad_(not parameter.startswith(("cls_token", "pos_embed", "patch_embed", *EARLY)))
    curve, minutes = list[list[float]](), 0.0
    for epoch in recover(student, dense, opened, config, device="cpu"):
        minutes += epoch.seconds / 60
        curve.append([round(minutes, 2), round(epoch.divergence or 0.0, 4)])
    found: dict[str, Any] = {"curve": curve, "epochs_done": epochs}
    if epoch.average is not None:
        held = training_data(opened, config)[0].val
        assert held is not None
        images = ImageBatches(held, preprocessing_of(dense), count=len(held))
        found["averaged"] = round(measure_damage(dense, epoch.average.eval(), images), 4)
    return found


EARLY = tuple(f"blocks.{block}." for block in range(8))
WAYS: dict[str, dict[str, Any]] = {
    "logits": {"distillation.hidden": 0.0},
    "logits + hidden": {},
    "logits + hidden, cached": {"cache_teacher": True, "augmentation.views": 1},
}


def epoch_cost(way: str, work: Path, dinov2: Path, precision: str, images: int) -> tuple[float, float]:
    """Return the seconds of an epoch on some images, and the gigabytes that the process had at most."""
    name = "vit-tiny tail 3 + 2"
    dense, data = dense_of(CASES[name].dense, dinov2)
    config = config_of(CASES[name], "logits + 20 hidden", 0, 1, precision).with_settings(WAYS[way])
    opened = open_data(str(data))
    assert opened.train is not None
    opened = replace(opened, train=first_images(opened.train, images, 0))
    student = hetdpt.load(Bench(work, dinov2).start(name))
    *_, epoch = recover(student, dense, opened, config, device="cpu", evaluates=False)
    return epoch.seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6


def measure_cost(recorder: Recorder, bench: Bench, options: argparse.Namespace) -> None:
    """Time an epoch in each way, in turns, each in a process of its own; add a row for each."""
    found: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    bench.start("vit-tiny tail 3 + 2")
    for _ in range(options.runs):
        for way, measured in found.items():
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
                place = (bench.work, bench.dinov2, options.precision, options.images)
                measured.append(pool.submit(epoch_cost, way, *place).result())
    for way, measured in found.items():
        seconds = [one[0] for one in measured]
        ratios = [mine / theirs[0] for mine, theirs in zip(seconds, found["logits"], strict=True)]
        spread = [round(value, 3) for value in (median(ratios), min(ratios), max(ratios))]
        values = {"of_logits": spread, "seconds": round(median(seconds), 2), "gigabytes": round(max(measured)[1], 2)}
        recorder.add({"part": "cost", "way": way, "images": options.images}, **values, runs=options.runs)


MEASUREMENTS = {
    "losses": compare_losses,
    "recipe": follow_recipe,
    "order": compare_orders,
    "settings": compare_settings,
    "cost": measure_cost,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=list(MEASUREMENTS))
    parser.add_argument("--plans", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--losses", nargs="+", default=list(LOSSES), choices=list(LOSSES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS), choices=list(SETTINGS))
    parser.add_argument("--train-images", type=int, help="of settings; all by default")
    parser.add_argument("--epochs", type=int, default=3, help="of losses, order and settings")
    parser.add_argument("--minutes", type=float, default=60.0, help="of recipe")
    parser.add_argument("--folder", action="store_true", help="recipe: give images without labels")
    parser.add_argument("--runs", type=int, default=5, help="of cost")
    parser.add_argument("--images", type=int, default=320, help="of an epoch whose cost is measured")
    parser.add_argument("--precision", default="bfloat16")
    parser.add_argument("--dinov2", type=Path, default=TAIL_WORK / "dinov2_cifar", help="directory of that model")
    parser.add_argument("--work", type=Path, default=WORK)
    parser.add_argument("--redo", action="store_true", help="repeat measurements that already have results")
    parser.add_argument("--out", type=Path, default=RESULTS / "recovery.json")
    options = parser.parse_args()
    require_real_data()
    recorder, bench = (
        Recorder(options.out, dtype=options.precision, redo=options.redo),
        Bench(options.work, options.dinov2),
    )
    MEASUREMENTS[options.part](recorder, bench, options)


if __name__ == "__main__":
    main()
