"""Speed of the paper's plans on this machine, and what gates cost in training; all ratios of interleaved runs.

    python benchmarks/inference.py [--runs 30] [--batch 8] [--out benchmarks/results/inference.json]

Asks for: measured speedup at least 95 % of the MAC ratio; a gated training step at most 3 % longer than an ungated one.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import Any

# isort: off
import hetdpt  # before timm: cures torchvision where its operators do not load
import timm

# isort: on
import torch
from torch import nn

from hetdpt.export.saved import versions
from hetdpt.measurement.costs import Costs
from hetdpt.measurement.speed import synchronize

EFFICIENCY, GATE_COST = 0.95, 1.03
GATES = "gated / plain training step"
PLANS = {
    "paper/deit_small-6": "deit_small_distilled_patch16_224",
    "paper/deit_small-8": "deit_small_distilled_patch16_224",
    "paper/deit_base-8": "deit_base_distilled_patch16_224",
    "paper/deit_base-10": "deit_base_distilled_patch16_224",
}


def speed_of_plan(name: str, batch: int, runs: int) -> dict[str, Any]:
    """Return dense and pruned throughput of one plan, its speedup, and how much of the MAC ratio that is."""
    dense = timm.create_model(PLANS[name]).eval()
    pruned = hetdpt.merge_(hetdpt.prune_(timm.create_model(PLANS[name]).eval(), hetdpt.published_plan(name)))
    result = hetdpt.measure_throughput({"dense": dense, "pruned": pruned}, batch=batch, runs=runs, warmup=3)
    costs = [Costs.of(model, (3, 224, 224)) for model in (dense, pruned)]
    ratio, speedup = costs[0].macs / costs[1].macs, result.speedup["pruned"]
    return {
        "plan": name,
        "dense img/s": round(result.throughput["dense"].value, 2),
        "pruned img/s": round(result.throughput["pruned"].value, 2),
        "speedup": [round(value, 4) for value in (speedup.value, speedup.low, speedup.high)],
        "mac_ratio": round(ratio, 4),
        "efficiency": round(speedup.value / ratio, 4),
    }


def cost_of_gates(batch: int, runs: int) -> dict[str, Any]:
    """Return the time of a gated training step over that of an ungated one, DeiT-S, forward, backward and SGD."""
    models = {"plain": timm.create_model("deit_small_patch16_224")}
    models["gated"] = hetdpt.gate_(timm.create_model("deit_small_patch16_224"))
    steps = {name: _training_step(model.train(), batch) for name, model in models.items()}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(-2, runs):
        names = list(steps)[:: 1 if turn % 2 else -1]
        for name in names:
            synchronize(torch.device("cpu"))
            start = time.perf_counter()
            steps[name]()
            if turn >= 0:
                times[name].append(time.perf_counter() - start)
    ratios = [gated / plain for gated, plain in zip(times["gated"], times["plain"], strict=True)]
    return {GATES: round(statistics.median(ratios), 4), "batch": batch, "runs": runs}


def _training_step(model: nn.Module, batch: int):  # type: ignore[no-untyped-def]
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    images, labels = torch.randn(batch, 3, 224, 224), torch.randint(0, 1000, (batch,))

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=30)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/inference.json"))
    options = parser.parse_args()
    rows = []
    for name in PLANS:
        rows.append(speed_of_plan(name, options.batch, options.runs))
        print(rows[-1], flush=True)
    gates = cost_of_gates(options.batch, options.runs)
    print(gates)
    device = f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads, float32"
    command = f"python benchmarks/inference.py --runs {options.runs} --batch {options.batch}"
    found = {
        "command": command,
        "device": device,
        "batch": options.batch,
        "versions": versions(),
        "plans": rows,
        "gates": gates,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(found, indent=1) + "\n")
    short = [row["plan"] for row in rows if row["efficiency"] < EFFICIENCY]
    if short or gates[GATES] > GATE_COST:
        sys.exit(f"below what is asked for: {short or ''} {GATES} {gates[GATES]}")


if __name__ == "__main__":
    main()
