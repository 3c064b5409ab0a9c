"""Run directories as ``hetdpt run`` leaves them, made of plausible numbers in a moment."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from hetdpt.core.plan import KINDS, Budget, Plan, Sample
from hetdpt.core.tokens import Tokens
from hetdpt.flow import pipeline
from hetdpt.report.prediction import summary
from hetdpt.results import FrontierPoint, FrontierResult, Price, Prices, RunSummary, Scores, from_json
from hetdpt.selection.predictor.allocate import allocate, best_splits, surface
from hetdpt.selection.predictor.polynomial import fit_predictor
from hetdpt.store.stage_directory import CONFIG, FLOW, SUMMARY, StageRecord, stage_directory

STAGES = tuple(stage.name for stage in pipeline.FLOW)
BLOCKS = 12
PLAN: dict[str, Any] = {"attention": [2, 5, 9], "activation": [1, 4, 6, 7, 10], "removal": "calibrated"}
VERSIONS = {"hetdpt": "0.1.0", "python": "3.11.4", "torch": "2.13.0", "timm": "1.0.30"}
USUAL = tuple(name for name in STAGES if name not in ("balance", "narrow", "reduce"))
"""The stages of a run that takes no width and no tokens."""
PLUS: dict[str, Any] = {"plus": True, "layers": None, "macs": 32_000_000, "tokens": "tome:8", "compare": []}
"""What a run is asked for that takes all of them."""
RATIOS = {"embedding": 0.312, "hidden": 0.312, "heads": 0.312, "head_dims": 0.156}
MACHINE = {"device": "cpu", "processor": "Intel(R) Xeon(R)", "threads": 2}


EVIL = """</script><script>alert("x")</script><img src=x onerror='y'> & | `z` <!--"""


def build_run(directory: Path, last: str = STAGES[-1], is_finished: bool = True, **changes: Any) -> Path:
    """Make a run directory as ``hetdpt run`` leaves it, with stages up to ``last``; ``changes`` are of its config."""
    config = {
        "model": "demo", "data": "demo", "out": str(directory), "layers": 8, "method": "hetdpt",
        "compare": ["attention-only", "random"], "removal": "calibrated", "images": 256, "samples": None,
        "recovery": {"training": {"epochs": 5, "lr": 0.0005}}, "device": None, **changes,
    }  # fmt: skip
    directory.mkdir(parents=True)
    (directory / CONFIG).write_text(yaml.safe_dump(config, sort_keys=False))
    results = stage_results(config)
    write_flow(directory, [name for name in results if not (name == "collect" and config["samples"])])
    for name in STAGES[: STAGES.index(last) + 1]:
        if name in results:
            write_stage(directory, name, results[name])
    if is_finished:
        (directory / SUMMARY).write_text(json.dumps(summary_of(config)))
    return directory


def write_flow(run: Path, needed: Collection[str]) -> None:
    (run / FLOW).write_text(json.dumps({name: name in needed for name in STAGES}))


def write_stage(run: Path, name: str, result: dict[str, Any] | None, **versions: str) -> None:
    asked = {"settings": {"model": "demo"}, "inputs": {}}
    seconds = 2.0 + 7.5 * STAGES.index(name)
    folder = stage_directory(run, name)
    StageRecord(name, folder, asked, "2026-11-16T12:00:00+00:00", seconds, VERSIONS | versions, result).write()


def stage_results(config: dict[str, Any]) -> dict[str, Any]:
    """Return what every stage came to."""
    sites = [
        {"kind": kind, "block": block, "path": f"blocks.{block}.{'attn' if kind == 'attention' else 'mlp.act'}"}
        for block in range(BLOCKS)
        for kind in KINDS
    ]
    found: dict[str, Any] = {
        "analyse": {
            "model": config["model"], **MACHINE, "dtype": "float32", "blocks": BLOCKS, "sites": sites,
            "input_size": [3, 24, 24], "classes": 10,
            "accuracy": scores(98.06), "params": 610_000, "macs": 41_000_000, "prices": asdict(prices()),
        },
        "select": selected(config),
        "recover": recovered(),
        "merge": {"merged": 0 if config["layers"] == 0 else 5, "difference": 1e-6},
        "measure": measured(),
        "save": {"model": "model", "exports": {}, "bytes": 1_900_000},
        "report": {"files": {}},
    }  # fmt: skip
    if config["method"] == "hetdpt" and config["layers"] != 0:
        found |= predicted()
    if config.get("plus"):
        found["narrow"] = narrowed(config)
    if config.get("plus") and config["layers"] is None:
        del found["allocate"]
        found["balance"] = balanced(config)
    if config.get("tokens"):
        found["reduce"] = {"tokens": asdict(Tokens("tome", 8))}
    if config["compare"]:
        found["compare"] = {"rows": [compared(name) for name in config["compare"]], "images": 360}
    return found


def selected(config: dict[str, Any]) -> dict[str, Any]:
    if config["layers"] == 0:
        return {"method": config["method"], "plan": {**PLAN, "attention": [], "activation": []}, "picks": []}
    return {"method": config["method"], "plan": PLAN, "picks": picks()}


def narrowed(config: dict[str, Any]) -> dict[str, Any]:
    target = {"macs": config["macs"]}
    return {"target": target, "ratios": RATIOS, "macs": 31_850_000, "params": 497_000, "speedup": None, "tried": 9}


def balanced(config: dict[str, Any]) -> dict[str, Any]:
    """Return three numbers of layers that were tried with width for the rest."""
    costs = {"macs": 31_850_000, "params": 497_000}
    rows = [
        {
            "budget": asdict(Budget(attention, activation)), "predicted": accuracy_without(attention, activation),
            "ratios": {**RATIOS, "embedding": 0.5 - layers / 40}, **costs, "start": 60.0 + layers,
            "accuracy": 92.0 + layers / 4, "speedup": 1.3 + layers / 25,
        }
        for attention, activation in ((0, 0), (2, 2), (3, 5))
        for layers in (attention + activation,)
    ]  # fmt: skip
    return {
        "target": {"macs": config["macs"]}, "candidates": rows, "budget": {"attention": 3, "activation": 5},
        "why": "with 8 layers removed it is the most accurate", "measured_on": "287 training images that were held out",
        "images": 287,
    }  # fmt: skip


def scores(top1: float) -> dict[str, Any]:
    spread = 1.2
    return {"top1": top1, "top5": 99.7, "loss": 0.1, "count": 360, "low": top1 - spread, "high": top1 + spread / 2}


def prices() -> Prices:
    one, two = Price(1_050_000, 9_300, 0.105), Price(1_200_000, 17_000, 0.16)
    return Prices(Price(41_000_000, 610_000, 4.1), (one,) * BLOCKS, (two,) * BLOCKS, "cpu, float32, batch 8")


def accuracy_without(attention: int, activation: int) -> float:
    """Return a plausible accuracy: nothing is lost at first, then more and more."""
    wiggle = 0.12 * math.sin(7 * attention + 3 * activation)
    return 97.9 - 0.045 * attention**2 - 0.06 * activation**2 - 0.025 * attention * activation + wiggle


def samples() -> list[dict[str, Any]]:
    """Return three chains: attention alone, activation alone, both in turns."""
    chains = {
        "attention": [(count, 0) for count in range(1, 7)],
        "activation": [(0, count) for count in range(1, 7)],
        "interleaved": [((count + 1) // 2, count // 2) for count in range(2, 9)],
    }
    start = {"budget": asdict(Budget(0, 0)), "before": None, "accuracy": 97.9, "chain": "", "layers": [], "seconds": 0}
    return [start] + [sample(chain, *budget) for chain, budgets in chains.items() for budget in budgets]


def sample(chain: str, attention: int, activation: int) -> dict[str, Any]:
    kind = "attention" if chain == "attention" or (chain == "interleaved" and attention > activation) else "activation"
    block = (5 * (attention + activation) + 2) % BLOCKS
    value = accuracy_without(attention, activation)
    layer = {"kind": kind, "block": block, "te": 0.03 * (attention + activation)}
    return {
        "budget": asdict(Budget(attention, activation)), "before": value - 6, "accuracy": value, "chain": chain,
        "layers": [layer], "seconds": 4.1,
    }  # fmt: skip


@cache
def predicted() -> dict[str, Any]:
    rows = samples()
    predictor = fit_predictor([Sample(Budget(**row["budget"]), row["accuracy"]) for row in rows], BLOCKS)
    allocation = allocate(predictor, layers=8, prices=prices())
    known = summary(predictor, (), allocation, prices())
    points = [{name: row[name] for name in ("budget", "accuracy")} for row in rows]
    cells = [asdict(split) for split in surface(predictor, prices())]
    return {
        "collect": {"samples": rows, "measured_on": "287 training images that were held out"},
        "fit": {
            "blocks": BLOCKS,
            **known["fit"],
            "samples": points,
            "surface": cells,
            "prices": asdict(prices()),
            "warnings": known["warnings"],
        },
        "allocate": {
            "wanted": known["wanted"],
            "budget": asdict(Budget(3, 5)),
            "share": 0.41,
            "speedup": 1.4,
            "table": [asdict(split) for split in allocation.table],
            "frontier": [asdict(split) for split in best_splits(predictor, prices())],
            "warnings": known["warnings"],
        },
    }


def picks() -> list[dict[str, Any]]:
    order = [("activation", 4), ("attention", 9), ("activation", 7), ("activation", 1)]
    order += [("attention", 5), ("activation", 10), ("activation", 6), ("attention", 2)]
    return [{"kind": kind, "block": block, "score": 0.0123 * turn} for turn, (kind, block) in enumerate(order, 1)]


def recovered() -> dict[str, Any]:
    scores = {"start": 90.0, "last": 97.2, "best": 97.2, "ema": 96.8, "best_epoch": 5}
    return {"epochs": epochs(), **scores, "seconds": 30.0, "images_per_second": 500.0, "unreadable": []}


def epochs() -> list[dict[str, Any]]:
    values = [90.0, 95.6, 96.4, 97.2, 97.0, 97.2]
    return [
        {
            "number": number, "epochs": 5, "loss": None if not number else 0.9 / number, "last": value, "best": value,
            "ema": None if not number else value - 0.4, "lr": 5e-4, "seconds": 6.0,
        }
        for number, value in enumerate(values)
    ]  # fmt: skip


def measured() -> dict[str, Any]:
    sides = {
        "dense": {"accuracy": scores(98.06), "params": 610_000, "macs": 41_000_000, "ms": 4.12, "throughput": 1941.0},
        "pruned": {"accuracy": scores(97.22), "params": 497_000, "macs": 31_850_000, "ms": 2.88, "throughput": 2777.0},
    }
    breakdown = {
        "dense": {"attention": 1.62, "FFN linear": 1.30, "activation": 0.42, "norm": 0.34, "other": 0.44},
        "pruned": {"attention": 1.21, "FFN linear": 0.85, "activation": 0.24, "norm": 0.28, "other": 0.30},
    }
    speedup = {"value": 1.43, "low": 1.40, "high": 1.46}
    return {**sides, "speedup": speedup, **MACHINE, "dtype": "float32", "batch": 8, "breakdown": breakdown}


def compared(method: str) -> dict[str, Any]:
    number = len(method)
    return {
        "layers": 8, "method": method, "seed": 0, "plan": {**PLAN, "attention": [0, 1, 2]}, "start": 80.0,
        "accuracy": 92.0 + number / 6, "seconds": 1.0, "speed": {
            "speedup": 1.2 + number / 100, "low": 1.2, "high": 1.4, "macs": 33_000_000, "params": 520_000, "ms": 3.0,
        },
    }  # fmt: skip


def run_summary(**changes: Any) -> RunSummary:
    """Return the summary of a run with a goal of 8 layers."""
    return from_json(RunSummary, {**summary_of({"method": "hetdpt"}), **changes}, Path(SUMMARY))


def summary_of(config: dict[str, Any]) -> dict[str, Any]:
    wanted = {"macs": config["macs"]} if config.get("plus") else {"layers": 8}
    return {
        "dense_accuracy": 98.06, "pruned_accuracy": 97.22, "speedup": 1.43, "speedup_low": 1.40, "speedup_high": 1.46,
        "macs": 31_850_000, "params": 497_000, "dense_macs": 41_000_000, "dense_params": 610_000,
        "ms": 2.88, "dense_ms": 4.12, "budget": {"attention": 3, "activation": 5}, **MACHINE, "dtype": "float32",
        "batch": 8, "model": config.get("model", "demo"), "data": config.get("data", "demo"),
        "plan": PLAN, "method": config["method"], "images": 360, "seconds": 320.0,
        "ratios": RATIOS if config.get("plus") else None, "tokens": config.get("tokens"),
        "goal": {"wanted": wanted, "is_met": True, "text": "met", "next": None},
        "warnings": ["the samples were measured on few images"],
    }  # fmt: skip


def change_stage(run: Path, name: str, **values: Any) -> None:
    """Write another result of a stage."""
    result = StageRecord.read(stage_directory(run, name)).result
    write_stage(run, name, {**(result or {}), **values})


def frontier(is_labelled: bool = True, words: str = "") -> FrontierResult:
    """Return a frontier of four points, with accuracy where it ``is_labelled``; ``words`` are where text may be."""
    start: dict[str, Any] = {"removal": "calibrated"}
    plans = [
        Plan(attention=(3,), **start),
        Plan(attention=(3, 5), activation=(4,), site_styles=(("attention", 5, "linear"),), **start),
        Plan(attention=(3, 5), activation=(4,), features=((0, 320), (7, 64)), tail=3, **start),
        Plan(attention=(3, 5), activation=(4,), features=((0, 320),), tail=3, tokens=Tokens("tome", 8), **start),
    ]

    def points() -> Iterator[FrontierPoint]:
        for number, plan in enumerate(plans, 1):
            accuracy = from_json(Scores, scores(98 - number**2), Path("frontier")) if is_labelled else None
            yield FrontierPoint(plan, 0.01 * number**2, 12.0 / (1 + 0.2 * number), (f"move {number}{words}",), accuracy)

    dense = from_json(Scores, scores(98.0), Path("frontier")) if is_labelled else None
    images = {"fit": 256, "judge": 128}
    return FrontierResult(
        dense_ms=12.0, measured=f"cpu{words}", points=tuple(points()), images=images, dense_accuracy=dense
    )
