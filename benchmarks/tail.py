"""Patches that stop early: what a tail of T blocks costs in accuracy with no training, and how fast it is.

    python benchmarks/tail.py accuracy | speed [--cases vit-tiny dinov2] [--images 256] [--dinov2 DIR] [--runs 30]
    python benchmarks/tail.py oneshot [--label after] [--speedups 1.1 1.2 1.3 1.4 1.5] [--work DIR] [--commit ID]
    python benchmarks/tail.py oneshot-speed [--work DIR] [--before DIR] [--runs 30]

``accuracy`` fits the maps of every tail on training images without labels and scores the model on all validation
images; T = 0 is the dense model. ``speed`` times tails against the dense model, all in turns; weights are random.

``vit-tiny`` is the real one of ``../shared/data``; ``dinov2`` the DINOv2 ViT-S that lies there, fine-tuned on its
CIFAR-10 at 98 px. Unless ``--dinov2`` is a directory that ``hetdpt.save`` wrote, it is made there by the commands
``hetdpt transfer --mode probe`` and ``hetdpt train --epochs 4 --lr 3e-5``, a quarter of an hour.

``oneshot`` runs ``hetdpt oneshot --speedup S`` on ViT-Tiny with 256 images and scores the model that it saved. A model
that is in ``--work`` already is only scored: under another ``--label``, those that an earlier version made.
``oneshot-speed`` times them in turns, beside those of ``--before``.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# isort: off
import hetdpt  # before timm: cures torchvision where its operators do not load

# isort: on
import torch
from evidence import (
    IMAGENET,
    OLD_QUICK,
    RESULTS,
    SHARED,
    VIT_TINY,
    VIT_TINY_WEIGHTS,
    Key,
    Recorder,
    interval,
    require_real_data,
    settings,
)
from torch import nn

from hetdpt.adapters.models import input_size_of
from hetdpt.adapters.preprocessing import preprocessing_of
from hetdpt.core.modules import clone, random_images
from hetdpt.core.plan import Plan
from hetdpt.data.fixed_batches import ImageBatches
from hetdpt.data.sources import open_data
from hetdpt.flow.comparison.statistics import Answers
from hetdpt.measurement.accuracy import evaluate
from hetdpt.surgery.record import require_record

WORK = Path("runs/bench/tail")
DINOV2, PIXELS, PATCHES = "vit_small_patch14_dinov2", 98, (7, 7)
CIFAR = SHARED / "cifar10"
SPEEDUPS = ("1.1", "1.2", "1.3", "1.4", "1.5")
BATCH, WARMUP = 8, 3


@dataclass(frozen=True)
class Case:
    """A model that was trained, the same with random weights, its data, and the tails that are measured."""

    trained: Callable[[], nn.Module]
    random: Callable[[], nn.Module]
    data: str
    tails: tuple[int, ...]


def cases(dinov2: Path) -> dict[str, Case]:
    """Return all cases; ``dinov2`` is the directory of the second one."""
    return {
        "vit-tiny": Case(
            lambda: hetdpt.create(VIT_TINY, weights=VIT_TINY_WEIGHTS),
            lambda: hetdpt.create(VIT_TINY),
            str(IMAGENET),
            (1, 2, 3, 4, 5, 6),
        ),
        "dinov2": Case(
            lambda: fine_tuned(dinov2),
            lambda: hetdpt.create(DINOV2, img_size=PIXELS, num_classes=10),
            str(CIFAR),
            (1, 2, 3, 4, 5, 6),
        ),
    }


def fine_tuned(directory: Path) -> nn.Module:
    """Return the DINOv2 ViT-S of CIFAR-10 from ``directory``; it is made there first if that does not exist."""
    if not directory.is_dir():
        work = directory.parent
        work.mkdir(parents=True, exist_ok=True)
        weights, data = write_weights(work / "dinov2_s_98.safetensors"), ("--data", str(CIFAR))
        probe = ("transfer", DINOV2, "--img-size", str(PIXELS), "--weights", str(weights), "--mode", "probe")
        run(*probe, *data, "--out", str(work / "dinov2_probe"))
        [probed] = (work / "dinov2_probe" / "models").glob("*/model")
        alone = {name: value for name, value in OLD_QUICK.items() if not name.startswith("distillation.")}
        loop = settings("", {**alone, "training.epochs": 4, "training.lr": 3e-5})
        run("train", str(probed), *data, *loop, "--out", str(work / "dinov2_train"))
        hetdpt.save(hetdpt.load(work / "dinov2_train" / "last"), directory)
    return hetdpt.load(directory)


def write_weights(file: Path) -> Path:
    """Write the weights of the DINOv2 ViT-S as float32, with the position embedding of 49 patches."""
    from safetensors.torch import load_file, save_file
    from timm.layers import resample_abs_pos_embed

    weights = {name: value.float() for name, value in load_file(SHARED / f"{DINOV2}_fp16.safetensors").items()}
    found = resample_abs_pos_embed(weights["pos_embed"], new_size=list(PATCHES), num_prefix_tokens=1)
    save_file({**weights, "pos_embed": found.contiguous()}, file)
    return file


def run(*arguments: str) -> None:
    """Run a command of hetdpt."""
    subprocess.run([sys.executable, "-m", "hetdpt", *arguments, "--workers", "0", "--device", "cpu"], check=True)


def with_tail(model: nn.Module, tail: int, batches: Any) -> nn.Module:
    """Return a copy of ``model`` with a tail, fitted on ``batches``; without one, the model itself."""
    return hetdpt.calibrate_(clone(model), Plan(tail=tail), batches).eval() if tail else model


def score_tails(recorder: Recorder, name: str, case: Case, images: int) -> None:
    """Add the rows of one case that are not there yet: the dense model, and every tail."""
    tails = [tail for tail in (0, *case.tails) if not recorder.has(model=name, tail=tail)]
    if not tails:
        return
    model, data = case.trained(), open_data(case.data)
    assert data.train is not None
    batches = ImageBatches(data.train, preprocessing_of(model), count=images)
    size = input_size_of(model)
    for tail in tails:
        found = with_tail(model, tail, batches)
        fits = {str(fit.block): round(fit.r2, 4) for fit in require_record(found).plan.fits} if tail > 1 else {}
        ratio = round(hetdpt.count_macs(model, size) / hetdpt.count_macs(found, size), 5)
        recorder.add(
            {"model": name, "tail": tail}, mac_ratio=ratio, fitted_on=images, r2=fits, **scores(found, case.data)
        )


def scores(model: nn.Module, data: str) -> dict[str, Any]:
    """Return the accuracy on all validation images, and which of them the model gets right."""
    opened = open_data(data, splits=("val",))
    answers = Answers(opened)
    found = evaluate(model, opened, each=answers.add)
    return {"accuracy": found.top1, "images": found.count, "right": answers.text}


def time_tails(recorder: Recorder, name: str, case: Case, runs: int) -> None:
    """Time the tails of one case, in turns with the dense model, unless all rows are there."""
    if all(recorder.has(model=name, tail=tail, batch=BATCH) for tail in case.tails):
        return
    with torch.random.fork_rng():
        torch.manual_seed(0)
        dense = case.random()
        few = [random_images(dense, input_size_of(dense), 4)]
        models = {tail: with_tail(dense, tail, few) for tail in (0, *case.tails)}
    time_models(recorder, {tail: {"model": name, "tail": tail} for tail in case.tails}, models, runs)


def time_models(recorder: Recorder, keys: Mapping[Any, Key], models: Mapping[Any, nn.Module], runs: int) -> None:
    """Add a row of speed for every model of ``keys``; the first of ``models`` is the dense one."""
    named = {str(key): model for key, model in models.items()}
    macs = {name: hetdpt.count_macs(model, input_size_of(model)) for name, model in named.items()}
    found = hetdpt.measure_throughput(named, batch=BATCH, runs=runs, warmup=WARMUP)
    first = next(iter(named))
    for one, key in keys.items():
        ratio, speedup = macs[first] / macs[str(one)], interval(found.speedup[str(one)])
        efficiency = [round(value / ratio, 5) for value in speedup]
        values = {"speedup": speedup, "mac_ratio": round(ratio, 5), "efficiency": efficiency, "runs": runs}
        recorder.add({**key, "batch": BATCH}, **values)


def saved_at(work: Path, speedup: str) -> Path:
    """Return the directory of what ``hetdpt oneshot --speedup`` saves."""
    return work / f"vit_tiny_oneshot_{speedup}"


def key_of(label: str, speedup: str) -> Key:
    return {"oneshot": label, "speedup": float(speedup)}


def score_oneshots(recorder: Recorder, label: str, speedups: list[str], work: Path, commit: str | None) -> None:
    """Run ``hetdpt oneshot`` for every speedup that has no directory yet, and add the rows that are not there."""
    for speedup in speedups:
        if recorder.has(**key_of(label, speedup)):
            continue
        directory = saved_at(work, speedup)
        if not (directory / "oneshot.json").is_file():
            model = (VIT_TINY, "--weights", str(VIT_TINY_WEIGHTS), "--data", str(IMAGENET / "train"))
            asked = ("--images", "256", "--speedup", speedup, "--seed", "0", "--out", str(directory))
            run("oneshot", *model, *asked)
        recorder.add(
            key_of(label, speedup),
            **described(json.loads((directory / "oneshot.json").read_text())),
            commit=commit or recorder.session["commit"],
            **scores(hetdpt.load(directory), str(IMAGENET)),
        )


def described(found: dict[str, Any]) -> dict[str, Any]:
    """Return what ``oneshot.json`` says of a model, in short."""
    plan, costs, speed = found["plan"], found["costs"], found["speed"]["speedup"]["pruned"]
    return {
        "attention": plan["attention"],
        "activation": plan["activation"],
        "tail": plan.get("tail", 0),
        "mac_ratio": round(costs["dense"]["macs"] / costs["pruned"]["macs"], 5),
        "speedup": [round(speed[end], 5) for end in ("value", "low", "high")],
        "damage": round(found["damage"], 5),
        "seconds": round(found["seconds"]),
    }


def time_oneshots(recorder: Recorder, works: Mapping[str, Path], runs: int) -> None:
    """Time all models that ``hetdpt oneshot`` saved, of all labels, in turns with the dense model."""
    models: dict[Any, nn.Module] = {"dense": hetdpt.create(VIT_TINY, weights=VIT_TINY_WEIGHTS)}
    keys: dict[Any, Key] = {}
    for label, work in works.items():
        for speedup in SPEEDUPS:
            if (saved_at(work, speedup) / "oneshot.json").is_file():
                keys[label, speedup] = key_of(label, speedup)
                models[label, speedup] = hetdpt.load(saved_at(work, speedup)).eval()
    if any(not recorder.has(**key, batch=BATCH) for key in keys.values()):
        time_models(recorder, keys, models, runs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("accuracy", "speed", "oneshot", "oneshot-speed"))
    parser.add_argument("--cases", nargs="+", default=["vit-tiny", "dinov2"], choices=("vit-tiny", "dinov2"))
    parser.add_argument("--images", type=int, default=256, help="images to fit tails on")
    parser.add_argument("--dinov2", type=Path, default=WORK / "dinov2_cifar", help="directory of the second model")
    parser.add_argument("--runs", type=int, default=30)
    parser.add_argument("--label", default="after", help="what to call the models that oneshot makes")
    parser.add_argument("--commit", help="the commit that made them, if not this one")
    parser.add_argument("--speedups", nargs="+", default=list(SPEEDUPS), choices=SPEEDUPS)
    parser.add_argument("--work", type=Path, default=WORK, help="directory of what oneshot saves")
    parser.add_argument("--before", type=Path, help="that of an earlier version, timed beside it")
    parser.add_argument("--redo", action="store_true", help="repeat measurements that already have results")
    parser.add_argument("--out", type=Path, default=RESULTS / "tail.json")
    options = parser.parse_args()
    if options.part != "speed":
        require_real_data()
    recorder, chosen = Recorder(options.out, redo=options.redo), cases(options.dinov2)
    if options.part == "oneshot":
        score_oneshots(recorder, options.label, options.speedups, options.work, options.commit)
    elif options.part == "oneshot-speed":
        works = {"before": options.before} if options.before else {}
        time_oneshots(recorder, {**works, options.label: options.work}, options.runs)
    for name in options.cases:
        if options.part == "accuracy":
            score_tails(recorder, name, chosen[name], options.images)
        elif options.part == "speed":
            time_tails(recorder, name, chosen[name], options.runs)


if __name__ == "__main__":
    main()
