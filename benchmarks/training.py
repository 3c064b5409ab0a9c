"""Speed of training on this machine: our loop against a bare one, a merged student against the dense model, memory.

    python benchmarks/training.py [--updates 30] [--batch 8] [--out benchmarks/results/training.json]

Asks for: at least 0.97 of the images per second of a bare PyTorch loop on the same model, images and batch; a pruned,
merged student that trains faster than the dense model by at least 0.9 of the MAC ratio. Ratios of interleaved runs.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

# isort: off
import hetdpt  # before timm: cures torchvision where its operators do not load
import timm

# isort: on
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder

from hetdpt.adapters.preprocessing import preprocessing_of
from hetdpt.data.augmentation import Augmentation, evaluation_transform
from hetdpt.data.batches import TrainingBatches
from hetdpt.data.sources import open_data
from hetdpt.export.saved import versions
from hetdpt.training.config import TrainConfig
from hetdpt.training.objective import Objective
from hetdpt.training.processes import start
from hetdpt.training.trainer import Progress, Trainer

LOOP, STUDENT = 0.97, 0.9
MODEL, PLAN = "deit_small_distilled_patch16_224", "paper/deit_small-8"
STATES = ("dense", "pruned, two layers", "pruned, merged")
WARM_UP = 3


def model_in(state: str) -> nn.Module:
    """Return DeiT-S, dense or pruned by the paper's plan."""
    model = timm.create_model(MODEL, num_classes=10)
    if state != "dense":
        hetdpt.prune_(model, hetdpt.published_plan(PLAN))
    return hetdpt.merge_(model) if state == "pruned, merged" else model


def trainer_of(model: nn.Module, folder: Path, batch: int, watch: Callable[[Progress], None] | None = None) -> Trainer:
    config = TrainConfig(
        epochs=1, batch_size=batch, mixup=0.0, cutmix=0.0, smoothing=0.0, ema_decay=0.0, schedule="constant"
    )
    source = open_data(str(folder)).train
    batches = TrainingBatches(source, preprocessing_of(model), Augmentation.plain(), batch_size=batch)
    return Trainer(start(), Objective(model, config), batches, config, watch=watch)


def our_loop_against_a_bare_one(folder: Path, batch: int, updates: int) -> dict[str, Any]:
    """Return our images per second over those of a bare loop; both read, decode, transform and train in turns."""
    model = model_in("dense")
    bare = bare_loop(deepcopy(model), folder, batch)
    times: dict[str, list[float]] = {"ours": [], "bare": []}
    last = time.perf_counter()

    def watch(_: Progress) -> None:
        nonlocal last
        times["ours"].append(time.perf_counter() - last)
        begun = time.perf_counter()
        next(bare)
        last = time.perf_counter()
        times["bare"].append(last - begun)

    for _ in trainer_of(model, folder, batch, watch).epochs():
        last = time.perf_counter()
    kept = {name: values[WARM_UP : WARM_UP + updates] for name, values in times.items()}
    ratios = [theirs / ours for ours, theirs in zip(kept["ours"], kept["bare"], strict=True)]
    return {
        "what": "images per second of our loop over a bare loop",
        **{f"{name} img/s": round(batch / statistics.median(values), 2) for name, values in kept.items()},
        "ratio": round(statistics.median(ratios), 4),
        "quartiles": [round(value, 4) for value in statistics.quantiles(ratios, n=4)[::2]],
        "updates": len(ratios),
    }


def bare_loop(model: nn.Module, folder: Path, batch: int) -> Iterator[None]:
    """Train as a tutorial would, one update for each time it is asked."""
    images = ImageFolder(str(folder / "train"), evaluation_transform(preprocessing_of(model)))
    loader: DataLoader[tuple[Tensor, Tensor]] = DataLoader(images, batch, shuffle=True, drop_last=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, weight_decay=0.08)
    model.train()
    while True:
        for inputs, labels in loader:
            nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
            yield


def student_against_dense(folder: Path, batch: int, updates: int) -> dict[str, Any]:
    """Return how much faster the merged student's updates are than the dense model's, and the MAC ratio."""
    models = {state: model_in(state) for state in STATES}
    trainers = {state: trainer_of(model, folder, batch) for state, model in models.items()}
    batches = [next(trainers["dense"].batches.epoch(0))]
    times: dict[str, list[float]] = {state: [] for state in models}
    for turn in range(-WARM_UP, updates):
        for state in list(models)[:: 1 if turn % 2 else -1]:
            begun = time.perf_counter()
            trainers[state].update(batches)
            if turn >= 0:
                times[state].append(time.perf_counter() - begun)
    macs = {state: hetdpt.count_macs(model.eval(), (3, 224, 224)) for state, model in models.items()}
    rows = {}
    for state in STATES[1:]:
        ratios = [dense / own for dense, own in zip(times["dense"], times[state], strict=True)]
        speedup, ratio = statistics.median(ratios), macs["dense"] / macs[state]
        rows[state] = {
            "speedup": round(speedup, 4),
            "quartiles": [round(value, 4) for value in statistics.quantiles(ratios, n=4)[::2]],
            "mac_ratio": round(ratio, 4),
            "efficiency": round(speedup / ratio, 4),
        }
    speeds = {f"{state} img/s": round(batch / statistics.median(values), 2) for state, values in times.items()}
    return {"what": "training updates, dense over pruned", **speeds, **rows}


def peak_memory(folder: Path, batch: int) -> dict[str, Any]:
    """Return the peak resident memory of three updates, each state of the model in a process of its own."""
    rows = {}
    for state in STATES:
        command = [sys.executable, __file__, "--memory-of", state, "--batch", str(batch), "--images", str(folder)]
        rows[state] = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return {"what": "peak resident memory of training, MiB", **rows}


def memory_of(state: str, folder: Path, batch: int) -> dict[str, int]:
    trainer = trainer_of(model_in(state), folder, batch)
    before = peak()
    batches = trainer.batches.epoch(0)
    for _ in range(3):
        trainer.update([next(batches)])
    return {"in all": peak(), "of it training": peak() - before}


def peak() -> int:
    """Return the largest resident memory of this process so far, in MiB; Linux starts it anew for a new program."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) // 1024


def write_images(folder: Path, count: int) -> None:
    """Write JPEG images of noise, so that reading them costs what reading photographs does."""
    generator = torch.Generator().manual_seed(0)
    for split in ("train", "val"):
        for number in range(count if split == "train" else 10):
            home = folder / split / str(number % 10)
            home.mkdir(parents=True, exist_ok=True)
            noise = torch.rand(1, 3, 32, 32, generator=generator)
            pixels = nn.functional.interpolate(noise, size=(256, 340), mode="bicubic").clamp(0, 1)[0]
            Image.fromarray((pixels * 255).byte().permute(1, 2, 0).numpy()).save(home / f"{number}.jpg", quality=88)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=30)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/training.json"))
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
    parser.add_argument("--images", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.memory_of:
        print(json.dumps(memory_of(options.memory_of, options.images, options.batch)))
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_images(folder, options.batch * (options.updates + WARM_UP))
        rows = [our_loop_against_a_bare_one(folder, options.batch, options.updates)]
        print(rows[-1], flush=True)
        rows.append(student_against_dense(folder, options.batch, options.updates))
        print(rows[-1], flush=True)
        rows.append(peak_memory(folder, options.batch))
        print(rows[-1], flush=True)
    found = {
        "command": f"python benchmarks/training.py --updates {options.updates} --batch {options.batch}",
        "device": f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads, float32",
        "model": MODEL,
        "plan": PLAN,
        "batch": options.batch,
        "versions": versions(),
        "rows": rows,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(found, indent=1) + "\n")
    efficiency = rows[1]["pruned, merged"]["efficiency"]
    if rows[0]["ratio"] < LOOP or efficiency < STUDENT:
        sys.exit(f"below what is asked for: loop {rows[0]['ratio']} of {LOOP}, student {efficiency} of {STUDENT}")


if __name__ == "__main__":
    main()
