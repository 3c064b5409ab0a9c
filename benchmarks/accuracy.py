"""Methods against each other: each of METHODS that removes a number of layers, with the same fine-tuning.

    python benchmarks/accuracy.py vit-tiny | demo [--removal calibrated,plain] [--layers 8,6,4,2] [--methods all]
                                  [--seeds 3] [--out benchmarks/results/accuracy.json]

``vit-tiny`` is the real one of ``../shared/data``, with a short recovery and 1,000 validation images of ImageNet;
``demo`` the model that was trained from scratch on the embedded images, with a longer one. It is ``hetdpt
compare`` in directories under runs/: it goes on after a kill, and several processes may be started to share it. Where
such a directory is gone, methods whose rows are all in the results are left out.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from evidence import IMAGENET, OLD_QUICK, RESULTS, VIT_TINY, VIT_TINY_WEIGHTS, Recorder, Results, require_real_data
from torch import nn

import hetdpt
from hetdpt.cli.options import read_samples
from hetdpt.core.plan import Budget
from hetdpt.export.saved import open_model
from hetdpt.flow.comparison.compare import CompareConfig, compare_into
from hetdpt.flow.comparison.work import Cell, Chosen, Trained
from hetdpt.flow.demo import demo_config
from hetdpt.flow.execution import Execution
from hetdpt.flow.recipes import recipe
from hetdpt.selection.methods import BY_LAYERS
from hetdpt.selection.predictor.samples import CollectConfig, SampleStep
from hetdpt.selection.select import SelectConfig
from hetdpt.training.recover import RecoverConfig

RUNS = Path("runs/bench")
LEVELS = (8, 6, 4, 2)  # the largest first: those of the greedy methods begin with it


@dataclass(frozen=True)
class Case:
    """A model with its data, and how long things are trained."""

    model: Callable[[], nn.Module]
    data: str
    layers: tuple[int, ...]
    images: int
    """To choose layers and fit replacements on."""
    recovery: RecoverConfig
    search: RecoverConfig
    collection: RecoverConfig | None
    """None where samples are given."""
    samples: Path | None = None


def vit_tiny() -> Case:
    """Return the real ViT-Tiny with a short recovery: one epoch of one image of each class."""
    require_real_data()
    return Case(
        model=lambda: open_model(VIT_TINY, weights=VIT_TINY_WEIGHTS),
        data=str(IMAGENET),
        layers=LEVELS,
        images=64,
        recovery=recipe("brief").config.with_settings({"per_class": 1}),
        search=recipe("search").config.with_settings({"training.epochs": 1, "per_class": 1}),
        collection=None,
        samples=RESULTS / "vit_tiny_samples.csv",
    )


def demo() -> Case:
    """Return the model that comes with hetdpt, with the search of its demo and a recovery of twelve epochs."""
    settings = demo_config(RUNS)
    longer = {"training.epochs": 12, "training.lr": 5e-4, "augmentation.scale": settings.recovery.augmentation.scale}
    return Case(
        model=lambda: open_model("demo"),
        data="demo",
        layers=(14, 11, 8, 4),
        images=64,
        recovery=settings.recovery.with_settings({**OLD_QUICK, **longer}),
        search=settings.search,
        collection=settings.collection,
    )


CASES: dict[str, Callable[[], Case]] = {"vit-tiny": vit_tiny, "demo": demo}


def config_of(case: Case, removal: str, options: argparse.Namespace) -> CompareConfig:
    """Return what is compared under one kind of removal."""
    chosen = BY_LAYERS if options.methods == "all" else tuple(options.methods.split(","))
    collection = case.collection and CollectConfig(
        recovery=case.collection, removal=removal, images=case.images, rounds=(8, 8, 7)
    )
    return CompareConfig(
        layers=tuple(map(int, options.layers.split(","))) if options.layers else case.layers,
        methods=chosen,
        seeds=options.seeds,
        selection=SelectConfig(search=case.search, removal=removal, images=case.images),
        recovery=case.recovery,
        collection=collection,
    )


def left_of(
    config: CompareConfig, model: nn.Module, key: Callable[[Cell], dict[str, Any]], recorder: Recorder
) -> CompareConfig | None:
    """Return ``config`` with the layers and methods that lack a row; None where there is none to be had."""
    kinds = Counter(site.kind for site in hetdpt.sites(model))
    known = Results.read(recorder.file)
    cells = [
        cell
        for cell in config.cells(Budget(kinds["attention"], kinds["activation"]))
        if known.find(**key(cell)) is None
    ]
    layers, methods = {cell.layers for cell in cells}, {cell.method for cell in cells}
    if not cells:
        return None
    return replace(
        config,
        layers=tuple(count for count in config.layers if count in layers),
        methods=tuple(method for method in config.methods if method in methods),
    )


def compare(name: str, removal: str, recorder: Recorder, options: argparse.Namespace) -> None:
    """Fill the directory of one comparison, and the results with every model that is trained."""
    case = CASES[name]()
    model = case.model()
    config = left_of(config_of(case, removal, options), model, partial(key_of, name, removal), recorder)
    if config is None:
        return
    samples = read_samples(case.samples, model) if case.samples else None
    plans: dict[Cell | None, Chosen] = {}
    directory, place = options.work / f"accuracy-{name}-{removal}", Execution(batch=8)
    for done in compare_into(directory, model, case.data, config, place, samples=samples):
        cell, outcome = done.subject, done.result
        if isinstance(outcome, SampleStep):
            continue
        if isinstance(outcome, Chosen):
            plans[cell] = outcome
        elif isinstance(outcome, Trained) and not recorder.has(**key_of(name, removal, cell)):
            recorder.add(key_of(name, removal, cell), **values_of(outcome, plans.get(cell)))


def key_of(case: str, removal: str, cell: Cell | None) -> dict[str, Any]:
    """Return what a row is about; the dense model has no cell."""
    named = asdict(cell) if cell else {"layers": 0, "method": "dense", "seed": 0}
    return {"case": case, "removal": removal, **named}


def values_of(trained: Trained, chosen: Chosen | None) -> dict[str, Any]:
    """Return what a model came to: accuracy before and after the fine-tuning, and which images it gets right."""
    values = {"accuracy": trained.accuracy, "images": trained.images, "right": trained.right}
    if chosen is not None:
        values |= {"attention": list(chosen.plan.attention), "activation": list(chosen.plan.activation)}
        values |= {"start_accuracy": trained.start, "choice_seconds": round(chosen.seconds)}
    return values


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", choices=CASES)
    parser.add_argument("--removal", default="calibrated,plain")
    parser.add_argument("--layers")
    parser.add_argument("--methods", default="all")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--work", type=Path, default=RUNS, help="directory of the comparisons' run directories")
    parser.add_argument("--out", type=Path, default=RESULTS / "accuracy.json")
    options = parser.parse_args()
    recorder = Recorder(options.out)
    for removal in options.removal.split(","):
        compare(options.case, removal, recorder, options)


if __name__ == "__main__":
    main()
