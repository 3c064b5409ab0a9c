"""The demonstration: the paper's DeiT-S plan taken through the whole way. Random weights, so no accuracy is claimed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hetdpt.adapters.models import create, input_size_of
from hetdpt.export.saved import load, save
from hetdpt.measurement.agreement import relative_difference
from hetdpt.measurement.costs import Costs
from hetdpt.measurement.speed import Comparison, Progress, measure_throughput
from hetdpt.modules import clone
from hetdpt.plan import Plan, Site
from hetdpt.published import published_plan
from hetdpt.randomness import seeded
from hetdpt.surgery import merge_, prune_, sites

MODEL, PLAN = "deit_small_distilled_patch16_224", "paper/deit_small-8"


@dataclass(frozen=True)
class Demonstration:
    """What the demonstration found."""

    sites: list[Site]
    plan: Plan
    dense: Costs
    pruned: Costs
    speed: Comparison
    merge_difference: float
    """Relative difference of outputs between two linear layers and one."""
    reload_difference: float
    directory: Path


def demonstrate(directory: Path, runs: int = 20, progress: Progress | None = None) -> Demonstration:
    """Prune DeiT-S by the paper's plan of eight layers, merge, measure, save to ``directory`` and load it again."""
    with seeded(0):
        dense = create(MODEL)
    plan = published_plan(PLAN)
    size = input_size_of(dense)
    pruned = prune_(clone(dense), plan)
    merged = merge_(clone(pruned))
    speed = measure_throughput({"dense": dense, "pruned": merged}, size, runs=runs, warmup=3, progress=progress)
    save(merged, directory, overwrite=True)
    return Demonstration(
        sites=sites(dense),
        plan=plan,
        dense=Costs.of(dense, size),
        pruned=Costs.of(merged, size),
        speed=speed,
        merge_difference=relative_difference(pruned, merged, size),
        reload_difference=relative_difference(merged, load(directory), size),
        directory=directory,
    )
