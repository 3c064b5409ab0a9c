"""Layers, width, or both: three runs that end at the same MACs after the same fine-tuning, timed in turns.

    python benchmarks/equal_macs.py MODEL --data FOLDER --macs 84% --out DIRECTORY [--weights FILE] [--samples CSV]
                                    [--depths 0,2,4] [--set recovery.training.epochs=2 ...]

A run is a directory of its own in DIRECTORY, and goes on after a kill. What they come to is in equal_macs.json.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from evidence import OLD_QUICK

import hetdpt
from hetdpt.cli.options import read_settings
from hetdpt.export.saved import open_model
from hetdpt.flow.stages.stage import Event
from hetdpt.measurement.speed import machine_of
from hetdpt.results import RunSummary

RECOVERY = {f"recovery.{name}": value for name, value in OLD_QUICK.items()}
WAYS: dict[str, dict[str, Any]] = {
    "depth": {"method": "hetdpt"},
    "width": {"plus": True, "layers": 0, "samples": None},
    "depth + width": {"plus": True},
}


def runs(options: argparse.Namespace) -> dict[str, RunSummary]:
    """Return what each way came to."""
    given = {
        "model": options.model, "data": options.data, "weights": options.weights, "macs": options.macs,
        "samples": options.samples, "batch": options.batch,
    }  # fmt: skip
    ways = {name: dict(changes) for name, changes in WAYS.items()}
    if options.depths:
        ways["depth + width"]["depths"] = tuple(map(int, options.depths.split(",")))
    found = {}
    for way, changes in ways.items():
        settings = {**given, **RECOVERY, **read_settings(options.set), **changes, "out": folder_of(way, options.out)}
        named = {name: value for name, value in settings.items() if value is not None}
        summary = hetdpt.run(hetdpt.RunConfig.resolve(changes=named), watch=partial(tell, way))
        assert summary is not None
        found[way] = summary
    return found


def folder_of(way: str, out: Path) -> Path:
    return out / way.replace(" + ", "-and-")


def tell(way: str, event: Event) -> None:
    if event.kind == "note":
        print(f"{way}, {event.stage}: {event.text}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--data", required=True)
    parser.add_argument("--macs", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--weights")
    parser.add_argument("--samples")
    parser.add_argument("--depths")
    parser.add_argument("--batch", type=int)
    parser.add_argument("--set", action="append")
    options = parser.parse_args()
    found = runs(options)
    models = {"dense": open_model(options.model, weights=options.weights).eval()}
    models |= {way: hetdpt.load(folder_of(way, options.out) / "model") for way in found}
    speed = hetdpt.measure_throughput(models, batch=options.batch)
    names = ("pruned_accuracy", "images", "macs", "params", "budget", "ratios")
    rows = [
        {"way": way, **{name: one.to_dict()[name] for name in names}, "speedup": asdict(speed.speedup[way])}
        for way, one in found.items()
    ]
    first, device = next(iter(found.values())), next(models["dense"].parameters()).device
    values = {
        "command": shlex.join(["python", *sys.argv]),
        **asdict(machine_of(device)),
        "dtype": first.dtype,
        "batch": first.batch,
        "dense": {"accuracy": first.dense_accuracy, "macs": first.dense_macs, "params": first.dense_params},
        "rows": rows,
    }
    (options.out / "equal_macs.json").write_text(json.dumps(values, indent=1))
    print(json.dumps(values, indent=1))


if __name__ == "__main__":
    main()
