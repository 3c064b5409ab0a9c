"""The frontier of a model: accuracy at equal speed of all kinds of moves together, and of each kind alone.

    python benchmarks/frontier.py search [--models ...] [--kinds ...] [--images 256] [--judge 128]
    python benchmarks/frontier.py speed [--models ...] [--runs 30]
    python benchmarks/frontier.py recover [--models ...] [--speedups 1.5] [--minutes 30]
    python benchmarks/frontier.py growth

``search`` runs ``hetdpt.frontier_into`` on training images without labels, with all kinds of moves (``mixed``) or a
single one. For each speedup it takes the first point that has it by the times of layers, applies its plan as ``hetdpt
apply`` does, without any training, and scores the model on all validation images, which decided nothing. ``speed``
times these models in turns with the dense one. ``recover`` is ``hetdpt recover --recipe quick --minutes M`` of a point.
``growth`` measures the CPU time of a search and the memory of its process for ViTs of other depths and widths with
random weights, and for more images.

The models are the ViT-Tiny of ``../shared/data`` on ImageNet, the DINOv2 ViT-S of ``tail.py`` on CIFAR-10, the model
that comes with hetdpt, and a ViT whose head averages the tokens, trained here on the digits of the demo: there no
token can be left out, so that it has no tails.
"""

from __future__ import annotations

import argparse
import json
import resource
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from time import process_time
from typing import Any

# isort: off
import hetdpt  # before timm: cures torchvision where its operators do not load

# isort: on
import torch
from evidence import IMAGENET, RESULTS, VIT_TINY, VIT_TINY_WEIGHTS, Key, Recorder, interval, require_real_data
from tail import CIFAR, fine_tuned, run, scores
from tail import WORK as TAIL_WORK
from torch import nn

from hetdpt.adapters.models import input_size_of
from hetdpt.adapters.preprocessing import preprocessing_of
from hetdpt.core.modules import clone
from hetdpt.data.fixed_batches import ImageBatches
from hetdpt.data.sources import open_data
from hetdpt.flow.frontier import FrontierConfig, frontier_into
from hetdpt.reduce.apply import apply_
from hetdpt.selection.frontier import FrontierSearch
from hetdpt.selection.move_prices import measure_move_prices
from hetdpt.selection.moves import MOVES
from hetdpt.surgery.merge import merge_
from hetdpt.surgery.tail import trim_if_possible_
from hetdpt.training.config import TrainConfig
from hetdpt.training.recover import RecoverConfig, recover

WORK = Path("runs/bench/frontier")
BATCH = 8
KINDS = ("mixed", *MOVES)
DENSE = "dense"


@dataclass(frozen=True)
class Case:
    """A dense model, its data, and the speedups of the table."""

    dense: Callable[[], nn.Module]
    data: str
    speedups: tuple[float, ...] = (1.1, 1.2, 1.3, 1.4, 1.5, 1.75, 2.0)


def cases(work: Path, dinov2: Path) -> dict[str, Case]:
    """Return all models by name."""
    return {
        "vit-tiny": Case(lambda: hetdpt.create(VIT_TINY, weights=VIT_TINY_WEIGHTS), str(IMAGENET)),
        "dinov2": Case(lambda: fine_tuned(dinov2), str(CIFAR), (1.2, 1.4, 1.6, 2.0)),
        "demo": Case(lambda: hetdpt.create("demo"), "demo", (1.2, 1.5, 2.0)),
        "mean-pooled": Case(lambda: mean_pooled(work / "mean_pooled_dense"), "demo", (1.2, 1.5, 2.0)),
    }


def mean_pooled(directory: Path) -> nn.Module:
    """Return a ViT of the digits whose head averages the tokens, from ``directory``; it is trained if not there."""
    if not directory.is_dir():
        import timm

        size = {"img_size": 32, "patch_size": 4, "embed_dim": 96, "depth": 8, "num_heads": 3, "num_classes": 10}
        model = timm.create_model("vit_tiny_patch16_224", global_pool="avg", class_token=False, **size)
        loop = TrainConfig(epochs=20, batch_size=32, lr=1e-3, lr_batch=None, mixup=0, cutmix=0, ema_decay=0)
        config = RecoverConfig(training=loop, augmentation=hetdpt.Augmentation.plain())
        for epoch in recover(model, None, "demo", config, device="cpu"):
            print(f"training a mean-pooled ViT: epoch {epoch.number}, {epoch.last:.1f} %", flush=True)
        hetdpt.save(model.eval(), directory)
    return hetdpt.load(directory)


def key_of(model: str, kinds: str, speedup: float) -> Key:
    return {"model": model, "kinds": kinds, "speedup": speedup}


class Bench:
    """Where searches and models are kept, and the images that they see."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.work, self.counts = options.work, (options.images, options.judge)
        self.cases = cases(options.work, options.dinov2)

    def place(self, model: str, kinds: str, speedup: float) -> Path:
        """Return the directory of the model of a point."""
        return self.work / model / kinds / f"{speedup:g}"

    def images(self, model: str, dense: nn.Module) -> tuple[ImageBatches, ImageBatches]:
        """Return training images to fit on, and others to judge by."""
        train = open_data(self.cases[model].data).train
        assert train is not None
        wants, (fit, judge) = preprocessing_of(dense), self.counts
        return ImageBatches(train, wants, count=fit), ImageBatches(train, wants, count=judge, start=fit)


def search(recorder: Recorder, bench: Bench, options: argparse.Namespace) -> None:
    """Search the frontier of every model by each kind, and score its points."""
    for model in options.models:
        case = bench.cases[model]
        dense = case.dense().eval()
        if not recorder.has(model=model, kinds=DENSE):
            recorder.add({"model": model, "kinds": DENSE}, **scores(dense, case.data))
        for kinds in options.kinds:
            missing = [one for one in case.speedups if not recorder.has(**key_of(model, kinds, one))]
            if missing:
                find_points(recorder, bench, model, kinds, dense)


def find_points(recorder: Recorder, bench: Bench, model: str, kinds: str, dense: nn.Module) -> None:
    """Add a row for each speedup that a frontier reaches."""
    case = bench.cases[model]
    fit, judge = bench.images(model, dense)
    config = FrontierConfig(speedup=max(case.speedups) * 1.01, moves=tuple(MOVES) if kinds == "mixed" else (kinds,))
    found = frontier_into(bench.work / model / kinds / "search", dense, fit, judge, config, watch=said, progress=None)
    size = input_size_of(dense)
    for wanted in case.speedups:
        point = next((one for one in found.points if found.speedup(one) >= wanted), None)
        if point is None or recorder.has(**key_of(model, kinds, wanted)):
            continue
        student = merge_(apply_(clone(dense), point.plan, fit)).eval()
        trim_if_possible_(student)
        hetdpt.save(student, bench.place(model, kinds, wanted), overwrite=True)
        ratio = hetdpt.count_macs(dense, size) / hetdpt.count_macs(student, size)
        recorder.add(
            key_of(model, kinds, wanted),
            by_layers=round(found.speedup(point), 4),
            damage=round(point.damage, 5),
            mac_ratio=round(ratio, 5),
            images=found.images,
            plan=json.dumps(short(point.plan)),
            **{name: value for name, value in scores(student, case.data).items() if name != "images"},
        )


def short(plan: hetdpt.Plan) -> dict[str, Any]:
    """Return what a plan does, without what it does not."""
    values = json.loads(plan.to_json())
    return {name: value for name, value in values.items() if value and name not in ("removal", "anatomy", "fits")}


def said(point: Any, speedup: float) -> None:
    print(f"  {speedup:.3f}x, damage {point.damage:.4f}: {', '.join(point.moves)}", flush=True)


def time_points(recorder: Recorder, bench: Bench, options: argparse.Namespace) -> None:
    """Time the models of all kinds for a speedup in turns with the dense one."""
    for model in options.models:
        dense = bench.cases[model].dense().eval()
        for wanted in bench.cases[model].speedups:
            there = {kinds: bench.place(model, kinds, wanted) for kinds in options.kinds}
            models = {kinds: hetdpt.load(place).eval() for kinds, place in there.items() if place.is_dir()}
            missing = [kinds for kinds in models if not recorder.has(**key_of(model, kinds, wanted), batch=BATCH)]
            if missing:
                found = hetdpt.measure_throughput({DENSE: dense, **models}, batch=BATCH, runs=options.runs, warmup=3)
                for kinds in models:
                    values = {"measured": interval(found.speedup[kinds]), "runs": options.runs}
                    recorder.add({**key_of(model, kinds, wanted), "batch": BATCH}, **values)


def recover_points(recorder: Recorder, bench: Bench, options: argparse.Namespace) -> None:
    """Recover the points of some speedups as a user would."""
    for model in options.models:
        dense = bench.work / model / DENSE
        if not dense.is_dir():
            hetdpt.save(bench.cases[model].dense(), dense)
        for wanted in options.speedups:
            for kinds in options.kinds:
                key = {**key_of(model, kinds, wanted), "minutes": options.minutes}
                if bench.place(model, kinds, wanted).is_dir() and not recorder.has(**key):
                    recorder.add(key, **recovered(bench, model, kinds, wanted, dense, options))


def recovered(
    bench: Bench, model: str, kinds: str, wanted: float, dense: Path, options: argparse.Namespace
) -> dict[str, Any]:
    """Run ``hetdpt recover`` for one point; return its accuracy and how it got there."""
    place, data = bench.place(model, kinds, wanted), bench.cases[model].data
    out = place.with_name(f"{place.name}_recovered_{options.minutes:g}")
    how = ("--recipe", "quick", "--precision", options.precision, "--minutes", f"{options.minutes:g}")
    run("recover", str(place), "--teacher", str(dense), "--data", data, *how, "--out", str(out))
    summary = json.loads((out / "summary.json").read_text())
    kept = {name: summary[name] for name in ("start", "best", "best_epoch", "epochs", "lr_found")}
    return {**kept, "seconds": round(summary["seconds"]), **scores(hetdpt.load(out / "best"), data)}


SIZES = ((6, 192, 64), (12, 192, 64), (24, 192, 64), (12, 96, 64), (12, 384, 64), (12, 192, 256))
"""(depth, width, images to fit on), with half as many images to judge by."""
ROUNDS = 4  # of a search whose growth is measured


def measure_growth(recorder: Recorder, bench: Bench, options: argparse.Namespace) -> None:
    """Add a row for each size, measured in a process of its own."""
    for depth, width, images in SIZES:
        key = {"part": "growth", "depth": depth, "width": width, "images": images}
        if not recorder.has(**key):
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
                recorder.add(key, **pool.submit(cost_of_rounds, depth, width, images).result())


def cost_of_rounds(depth: int, width: int, images: int) -> dict[str, float]:
    """Return the CPU seconds of the first round of a search and of each of the next ones, and the memory in GB."""
    import timm

    size = {"img_size": 112, "embed_dim": width, "depth": depth, "num_heads": width // 32, "num_classes": 10}
    model = timm.create_model("vit_tiny_patch16_224", **size).eval()
    draw = torch.Generator().manual_seed(0)
    fit, judge = (
        [torch.randn(16, 3, 112, 112, generator=draw) for _ in range(count // 16)] for count in (images, images // 2)
    )
    prices = measure_move_prices(model, batch=1)
    search = FrontierSearch(model, fit, judge, lambda plan: prices.of(plan).macs)
    before, seconds = process_time(), list[float]()
    for _ in islice(search.rounds(), ROUNDS):
        seconds.append(process_time() - before)
        before = process_time()
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    return {"first": round(seconds[0], 1), "later": round(median(seconds[1:]), 1), "gigabytes": round(memory, 2)}


MEASUREMENTS = {"search": search, "speed": time_points, "recover": recover_points, "growth": measure_growth}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=list(MEASUREMENTS))
    models = ("vit-tiny", "dinov2", "demo", "mean-pooled")
    parser.add_argument("--models", nargs="+", default=list(models), choices=models)
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--images", type=int, default=256, help="to fit on")
    parser.add_argument("--judge", type=int, default=128, help="to judge damage by")
    parser.add_argument("--runs", type=int, default=30, help="of speed")
    parser.add_argument("--speedups", nargs="+", type=float, default=[1.25, 1.5, 2.0], help="of recover")
    parser.add_argument("--minutes", type=float, default=30.0, help="of recover")
    parser.add_argument("--precision", default="bfloat16", help="of recover")
    parser.add_argument("--dinov2", type=Path, default=TAIL_WORK / "dinov2_cifar", help="directory of that model")
    parser.add_argument("--work", type=Path, default=WORK)
    parser.add_argument("--redo", action="store_true", help="repeat measurements that already have results")
    parser.add_argument("--out", type=Path, default=RESULTS / "frontier.json")
    options = parser.parse_args()
    require_real_data()
    MEASUREMENTS[options.part](Recorder(options.out, redo=options.redo), Bench(options), options)


if __name__ == "__main__":
    main()
