"""A model of 1.1 billion parameters on this machine: time and memory of all that is done to it but training.

    python benchmarks/scale.py [--model vit_giant_patch14_dinov2] [--size 224] [--work runs/bench/scale]
                               [--out benchmarks/results/scale.json]

DINOv2-giant with random weights loses whole branches as in the paper's row of 15 layers (8 + 7). Its FFNs are gated and
have nothing to merge, so that 7 of the plain ones of ViT-giant, which is as large, are merged. Every step runs in a
process of its own, whose peak of memory is above what an imported hetdpt takes, with the model itself. Needs 15 GB of
disk in ``--work``, which is removed at the end, and 12 GB of memory.
"""

from __future__ import annotations

import argparse
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import torch
from evidence import RESULTS, Recorder
from pruning_tasks import Numbers, apart, peak, settled_peak

import hetdpt
from hetdpt.core.plan import Plan
from hetdpt.core.randomness import seeded
from hetdpt.export.saved import open_model
from hetdpt.measurement.costs import Costs

ATTENTION, ACTIVATION = tuple(range(0, 40, 5)), tuple(range(2, 37, 5))
PLAIN = "vit_giant_patch14_224"
BRANCHES = Plan(ATTENTION, ACTIVATION, ("skip", "drop"))


def weights_of(model: torch.nn.Module) -> int:
    return sum(tensor.nbytes for tensor in model.state_dict().values())


def timed(begun: float, before: int, **more: float) -> Numbers:
    return {"seconds": round(time.perf_counter() - begun, 2), "peak_bytes": peak() - before, **more}


def inspect(name: str, size: int, work: Path) -> Numbers:
    """Find its layers and count its costs, without weights."""
    before, begun = settled_peak(), time.perf_counter()
    model = open_model(name, is_empty=True, img_size=size)
    costs = Costs.of(model, (3, size, size))
    return timed(begun, before, params=costs.params, macs=costs.macs, sites=len(hetdpt.sites(model)))


def make(name: str, size: int, work: Path) -> Numbers:
    """Build it with random weights, and save it."""
    before, begun = settled_peak(), time.perf_counter()
    with seeded(0):
        model = open_model(name, img_size=size)
    built = time.perf_counter() - begun
    hetdpt.save(model, work / "dense")
    return timed(begun, before, built_seconds=round(built, 2))


def load(name: str, size: int, work: Path) -> Numbers:
    before, begun = settled_peak(), time.perf_counter()
    model = hetdpt.load(work / "dense")
    return timed(begun, before, weights=weights_of(model))


def save(name: str, size: int, work: Path) -> Numbers:
    model = hetdpt.load(work / "dense")
    shutil.rmtree(work / "again", ignore_errors=True)
    before, begun = settled_peak() - weights_of(model), time.perf_counter()
    hetdpt.save(model, work / "again")
    shutil.rmtree(work / "again")
    return timed(begun, before)


def gate(name: str, size: int, work: Path) -> Numbers:
    """Put gates on all layers, and take them off."""
    model = hetdpt.load(work / "dense")
    before, begun = settled_peak() - weights_of(model), time.perf_counter()
    hetdpt.gate_(model)
    hetdpt.restore_(model)
    return timed(begun, before)


def prune(name: str, size: int, work: Path) -> Numbers:
    """Take 8 + 7 branches out."""
    model = hetdpt.load(work / "dense")
    before, begun = settled_peak() - weights_of(model), time.perf_counter()
    hetdpt.merge_(hetdpt.prune_(model, BRANCHES))
    found = timed(begun, before)
    hetdpt.save(model, work / "pruned", overwrite=True)
    return found


def load_pruned(name: str, size: int, work: Path) -> Numbers:
    before, begun = settled_peak(), time.perf_counter()
    model = hetdpt.load(work / "pruned")
    return timed(begun, before, weights=weights_of(model))


def merge(name: str, size: int, work: Path) -> Numbers:
    """Merge the two layers of 7 FFNs without activation."""
    with seeded(0):
        model = hetdpt.prune_(open_model(PLAIN, img_size=size), Plan(activation=ACTIVATION))
    weights = weights_of(model)
    before, begun = settled_peak() - weights, time.perf_counter()
    hetdpt.merge_(model)
    return timed(begun, before, weights=weights)


STEPS: dict[str, Callable[[str, int, Path], Numbers]] = {
    "inspect": inspect,
    "build and save": make,
    "load": load,
    "save": save,
    "gate all layers and restore": gate,
    "prune 8 + 7 branches": prune,
    "load what is left": load_pruned,
    f"merge 7 FFNs of {PLAIN}": merge,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="vit_giant_patch14_dinov2")
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--work", type=Path, default=Path("runs/bench/scale"))
    parser.add_argument("--steps", nargs="+", default=list(STEPS), choices=STEPS)
    parser.add_argument("--out", type=Path, default=RESULTS / "scale.json")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    recorder = Recorder(options.out)
    for step in options.steps:
        found = apart(STEPS[step], options.model, options.size, options.work)
        recorder.add({"model": options.model, "step": step}, **found)
    shutil.rmtree(options.work)


if __name__ == "__main__":
    main()
