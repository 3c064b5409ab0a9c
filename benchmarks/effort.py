"""What pruning costs: time in units of one dense training epoch, against naive ways, growth, and peaks of memory.

    python benchmarks/effort.py [stages naive growth memory] [--quick] [--redo] [--out benchmarks/results/effort.json]

``stages`` times every stage of hetdpt on ViT-Tiny, on the images of ``../shared/data`` where they are present, else on
noise. ``naive`` runs the scan, a fit, the gates, the recovery and the training loop against the same work done in a
naive way, in turns. ``growth`` measures time and memory against depth, width and the number of images, and fits the
exponents. ``memory`` has the peaks for DeiT-S. Weights are random: they make no difference to time and memory. Every
row is measured in a process of its own, forked from one that had only imported hetdpt, and is written when it is known:
a run that was killed goes on where it was. ``--quick`` takes fewer images and smaller sizes, and writes to
``runs/bench/quick/effort.json``; its rows have other keys, since other sizes are other measurements.

Asks for: the scan at least 1/0.65 times faster than full passes, with the same values to 1e-9; of the speed of a bare
loop at least 0.97; a gated training step at most 3 % longer; a merged student faster by at least 0.9 of the MAC ratio.
A quick run asks for the same values only.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from evidence import IMAGENET, RESULTS, VIT_TINY, Key, Recorder, Results
from naive_ways import apart_by, compare_gates, compare_loops, compare_scans, compare_students, memory_of_fit
from PIL import Image
from pruning_tasks import Numbers, Setting, apart, measure, save_to, stretched

import hetdpt

DEIT, DEIT_PLAN = "deit_small_distilled_patch16_224", "paper/deit_small-8"
QUICK_RESULTS = Path("runs/bench/quick")
SCAN, SAME, LOOP, GATES, STUDENT = 1 / 0.65, 1e-9, 0.97, 1 / 1.03, 0.9


@dataclass(frozen=True)
class Scale:
    """How much is measured."""

    model: dict[str, Any] = field(default_factory=dict)
    """Arguments of ViT-Tiny for ``stages`` and ``naive``."""
    batch: int = 32
    updates: int = 5
    few: int = 8
    """Images on which stages are timed, and then on ``some``; their time on ``images`` is extrapolated from both."""
    some: int = 48
    images: int = 256
    """To look at or to fit on, as hetdpt does by default; ``judge`` times as many others judge."""
    judge: float = 0.5
    epoch: int = 3000
    """Training images of an epoch, of which ``updates`` batches are measured."""
    validation: int = 1000
    left_out: tuple[str, ...] = ()
    """Stages that are not timed."""
    scanned: int = 64
    """Images of the scan against full passes, and its rounds."""
    scans: int = 3
    fitted: tuple[int, ...] = (64, 256)
    large: str = DEIT
    """The larger model, its arguments and the plan by which it is pruned, ``spread_plan`` without one."""
    large_arguments: dict[str, Any] = field(default_factory=dict)
    plan: str | None = DEIT_PLAN
    large_batch: int = 8
    rounds: int = 8
    loops: int = 16
    """Updates of our loop against a bare one."""
    pixels: int = 64
    """Sides of the images of ``growth``."""
    layers: tuple[int, ...] = (12, 24, 40)
    widths: tuple[int, ...] = (192, 384, 768)
    counts: tuple[int, ...] = (64, 128, 256)
    looked_at: int = 32
    """Images of ``growth``, where they are not what grows."""
    patience: float = 1.0
    """Seconds of repeats of what is short."""


FULL = Scale()
QUICK = Scale(
    batch=16,
    updates=2,
    few=2,
    some=8,
    left_out=(
        "scan: every site under every style",
        "scan: damage of every site",
        "choice of 6 layers by damage",
    ),
    scanned=8,
    scans=1,
    fitted=(16, 64),
    large=VIT_TINY,
    plan=None,
    rounds=3,
    loops=3,
    pixels=32,
    layers=(6, 12),
    widths=(96, 192),
    counts=(32, 64),
    looked_at=16,
    patience=0.0,
)


@dataclass(frozen=True)
class Bench:
    """Where rows go, how much is measured, and on which images."""

    recorder: Recorder
    scale: Scale
    folder: str
    is_apart: bool = True
    """Whether each row is measured in a process of its own."""

    @property
    def images(self) -> str:
        """What the images are."""
        return "ImageNet" if self.folder == str(IMAGENET) else "noise"

    @property
    def tiny(self) -> Setting:
        scale = self.scale
        return Setting(self.folder, VIT_TINY, scale.model, batch=scale.batch, updates=scale.updates)

    @property
    def large(self) -> Setting:
        scale, batch = self.scale, self.scale.large_batch
        return Setting(self.folder, scale.large, scale.large_arguments, 2 * batch, batch, batch, is_noise=True)

    @property
    def large_key(self) -> Key:
        return {"model": self.scale.large, "batch": self.scale.large_batch}

    def do(self, function: Any, *arguments: Any) -> Any:
        """Return what ``function`` returns, from a process of its own."""
        return apart(function, *arguments) if self.is_apart else function(*arguments)

    def measure(self, task: str, setting: Setting, patience: float) -> Numbers:
        """Return the time and the memory of a task, from a process of its own."""
        with TemporaryDirectory() as scratch:
            if task == "load":
                setting = replace(setting, saved=str(Path(scratch) / "model"))
                self.do(save_to, setting, setting.saved)
            found: Numbers = self.do(measure, task, setting, patience)
        return found

    def add(self, key: Key, **values: Any) -> None:
        """Write a row, its numbers to five digits."""
        self.recorder.add(key, **{name: rounded(value) for name, value in values.items()})

    def row(self, **key: Any) -> dict[str, Any]:
        """Return the values of a row that is there."""
        row = Results.read(self.recorder.file).find(**key)
        assert row is not None, f"{key} is measured before"
        return row.values


def rounded(value: Any) -> Any:
    """Return numbers to five digits, each of a list; the rest as it is.

    >>> rounded([0.123456789, 12]), rounded("ImageNet")
    ([0.12346, 12], 'ImageNet')
    """
    if isinstance(value, list):
        return [rounded(one) for one in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


# stages

UNIT = "dense training epoch"


@dataclass(frozen=True)
class Stage:
    """What is timed: a task, and on what it is done."""

    task: str
    on: str
    """updates: on an epoch of training images; epoch: those without training; images: on some of them; validation: on
    validation images; nothing: on no images."""


STAGES = {
    UNIT: Stage("dense_update", "updates"),
    "survey: find the sites": Stage("survey", "nothing"),
    "transfer entropy of every site": Stage("entropy", "images"),
    "calibration of 6 layers": Stage("calibration", "images"),
    "scan: every site under every style": Stage("every_style", "images"),
    "scan: damage of every site": Stage("damages", "images"),
    "choice of 6 layers by damage": Stage("choice", "images"),
    "choice of one more layer, as in collect": Stage("next_layer", "images"),
    "gates on all layers, fitted": Stage("gates", "images"),
    "search, one epoch of updates": Stage("search_update", "updates"),
    "recovery epoch": Stage("recovery_update", "updates"),
    "recovery epoch, merged": Stage("merged_recovery_update", "updates"),
    "recovery epoch, merged, teacher cached": Stage("cached_recovery_update", "updates"),
    "asking the teacher once": Stage("asking", "epoch"),
    "evaluation": Stage("evaluation", "validation"),
    "merge": Stage("merge", "nothing"),
    "save": Stage("save", "nothing"),
    "load": Stage("load", "nothing"),
}
COMPOSED = {
    "search of one epoch": {
        "scan: damage of every site": 1,
        "gates on all layers, fitted": 6,
        "search, one epoch of updates": 1,
    },
    "one sample of collect": {
        "choice of one more layer, as in collect": 1,
        "recovery epoch, merged": 1,
        "evaluation": 2,
    },
    "one-shot removal of 6 layers": {
        "choice of 6 layers by damage": 1,
        "calibration of 6 layers": 1,
        "merge": 1,
        "save": 1,
    },
    "search of two epochs and recovery of five": {
        "scan: damage of every site": 1,
        "gates on all layers, fitted": 6,
        "search, one epoch of updates": 2,
        "calibration of 6 layers": 1,
        "recovery epoch, merged": 5,
        "evaluation": 6,
        "merge": 1,
        "save": 1,
    },
}
"""Made of the stages above, so many times each; the replacements at gates are fitted again after a removal."""


def stages(bench: Bench) -> None:
    """Time every stage, in seconds and in units of one dense training epoch."""
    timed = {name: stage for name, stage in STAGES.items() if name not in bench.scale.left_out}
    for name, stage in timed.items():
        key = stage_key(bench, name)
        if not bench.recorder.has(**key):
            values = time_stage(bench, stage)
            unit = values["seconds"] if name == UNIT else bench.row(**stage_key(bench, UNIT))["seconds"]
            bench.add(key, epochs_of_dense=values["seconds"] / unit, **values)
    for name, parts in COMPOSED.items():
        key = stage_key(bench, name)
        if parts.keys() <= timed.keys() and not bench.recorder.has(**key):
            rows = {part: bench.row(**stage_key(bench, part)) for part in parts}
            sums = {
                unit: sum(times * rows[part][unit] for part, times in parts.items())
                for unit in ("seconds", "epochs_of_dense")
            }
            bench.add(key, **sums, made_of=" + ".join(f"{times} x {part}" for part, times in parts.items()))


def stage_key(bench: Bench, name: str) -> Key:
    """Return the key of a stage; the unit of all of them is that of the same batch and the same images."""
    return {"part": "stages", "stage": name, "batch": bench.scale.batch, "data": bench.images}


def time_stage(bench: Bench, stage: Stage) -> dict[str, Any]:
    """Return the seconds of a stage on the images it is meant for, and on how many they were measured."""
    scale, setting = bench.scale, bench.tiny
    if stage.on == "nothing":
        return {"seconds": bench.measure(stage.task, setting, scale.patience)["seconds"]}
    if stage.on == "updates":
        measured = scale.updates * scale.batch
        seconds = bench.measure(stage.task, setting, 0.0)["seconds"] * scale.epoch / measured
        return {"seconds": seconds, "images": scale.epoch, "images_measured": measured}
    images = {"epoch": scale.epoch, "images": scale.images, "validation": scale.validation}[stage.on]
    found = bench.do(stretched, stage.task, replace(setting, images=images), scale.few, scale.some, scale.judge)
    return {**found, "images": images, "images_measured": scale.some}


# against naive ways


def naive(bench: Bench) -> None:
    """Compare with the same work done in a naive way."""
    for compare in (_scans, _fits, _gates, _students, _loops):
        compare(bench)


def _scans(bench: Bench) -> None:
    scale = bench.scale
    setting = Setting(bench.folder, VIT_TINY, scale.model, scale.scanned, batch=16, is_noise=True)
    key = {"part": "naive", "what": "scan", "model": setting.model, "images": setting.images}
    if not bench.recorder.has(**key):
        bench.add(key, **bench.do(compare_scans, setting, scale.scans))


def _fits(bench: Bench) -> None:
    for images in bench.scale.fitted:
        setting = Setting(bench.folder, VIT_TINY, bench.scale.model, images, batch=16, is_noise=True)
        key = {"part": "naive", "what": "fit", "model": setting.model, "images": images}
        if bench.recorder.has(**key):
            continue
        (ours, line), (theirs, other) = (bench.do(memory_of_fit, way, setting) for way in ("ours", "naive"))
        more = {f"naive_{name}": value for name, value in theirs.items()}
        bench.add(key, **ours, **more, difference=apart_by(line, other))


def _gates(bench: Bench) -> None:
    names = ("gated", "gated, exploring")
    _add_all(bench, "gates", names, lambda: bench.do(compare_gates, bench.large, bench.scale.rounds))


def _students(bench: Bench) -> None:
    plan = hetdpt.published_plan(bench.scale.plan) if bench.scale.plan else None
    teachers = ("two layers, teacher cached", "merged, teacher asked", "merged, teacher cached")
    names = ("two layers", "merged", *teachers)
    _add_all(bench, "training", names, lambda: bench.do(compare_students, bench.large, plan, bench.scale.rounds))


def _loops(bench: Bench) -> None:
    key = {"part": "naive", "what": "loop", **bench.large_key, "data": bench.images}
    if not bench.recorder.has(**key):
        bench.add(key, **bench.do(compare_loops, replace(bench.large, updates=bench.scale.loops)))


def _add_all(bench: Bench, what: str, names: Iterable[str], compare: Callable[[], dict[str, dict[str, Any]]]) -> None:
    """Add a row for each of ``names``, which are measured together."""
    keys = {name: {"part": "naive", "what": what, "way": name, **bench.large_key} for name in names}
    if not all(bench.recorder.has(**key) for key in keys.values()):
        found = compare()
        for name, key in keys.items():
            bench.add(key, **found[name])


# growth

GROWING = ("survey", "entropy", "calibration", "merge", "save_and_load")
LOOKING = ("entropy", "calibration")
EXPECTED = {
    "survey": {"layers": (1, 1), "width": (0, 2)},
    "entropy": {"layers": (2, 1), "width": (2, 2), "images": (1, 0)},
    "calibration": {"layers": (2, 1), "width": (2, 2), "images": (1, 0)},
    "merge": {"layers": (1, 1), "width": (3, 2)},
    "save_and_load": {"layers": (1, 1), "width": (2, 2)},
}
"""Exponents of time and of memory for large sizes: a scan runs half of the layers for each of 2 L sites, a calibration
of L / 2 layers half of them for each, a merge multiplies D x 4 D by 4 D x D; memory is the weights and, at most, sums
of D^2 for each layer, whatever the number of images."""


def growth(bench: Bench) -> None:
    """Measure time and memory against depth, width and the number of images, and fit the exponents."""
    for task in GROWING:
        common = {"part": "growth", "task": task, "pixels": bench.scale.pixels}
        for against, sizes in series(bench.scale, task).items():
            new = [size for size in sizes if not bench.recorder.has(**common, **size)]
            for size in new:
                bench.add({**common, **size}, **grow(bench, task, **size))
            key = {**common, **sizes[0], "against": against}
            key.pop(against)
            if new or not bench.recorder.has(**key):
                rows = {size[against]: bench.row(**common, **size) for size in sizes}
                bench.add(key, **exponents(rows, *EXPECTED[task][against]))


def series(scale: Scale, task: str) -> dict[str, list[dict[str, int]]]:
    """Return what grows, and the sizes of all models and images in turn."""
    middle = {"layers": min(scale.layers, key=lambda layers: abs(layers - 12)), "width": scale.widths[0]}
    looked_at = {"images": scale.looked_at} if task in LOOKING else {}
    found = {
        "layers": [{**middle, **looked_at, "layers": layers} for layers in scale.layers],
        "width": [{**middle, **looked_at, "width": width} for width in scale.widths],
    }
    if looked_at:
        found["images"] = [{**middle, "images": images} for images in scale.counts]
    return found


def grow(bench: Bench, task: str, *, layers: int, width: int, images: int = 0) -> Numbers:
    """Return time and memory of a task for one size."""
    arguments = {"img_size": bench.scale.pixels, "depth": layers, "embed_dim": width, "num_heads": max(width // 64, 1)}
    setting = Setting(bench.folder, VIT_TINY, arguments, images, batch=bench.scale.looked_at, is_noise=True)
    return bench.measure(task, setting, bench.scale.patience)


def exponents(rows: dict[int, dict[str, Any]], time: int, memory: int) -> dict[str, Any]:
    """Return the exponents of what was measured, by size, and those that were expected of time and memory."""
    found: dict[str, Any] = {"expected_of_seconds": time, "expected_of_peak_bytes": memory}
    for name in ("seconds", "peak_bytes"):
        numbers = [row[name] for row in rows.values()]
        if all(numbers):
            found[f"exponent_of_{name}"] = exponent(rows, numbers)
    return {**found, "sizes": ", ".join(map(str, rows))}


def exponent(sizes: Iterable[float], numbers: Iterable[float]) -> float:
    """Return p of the power law c size^p closest to ``numbers`` in logarithms.

    >>> round(exponent([12, 24, 40], [3 * size**2 for size in (12, 24, 40)]), 6)
    2.0
    """
    x, y = (np.log(np.array([*values], dtype=float)) for values in (sizes, numbers))
    return float(np.polyfit(x, y, 1)[0])


# memory

PEAKS = (
    "entropy",
    "calibration",
    "dense_update",
    "pruned_update",
    "merged_update",
    "search_update",
    "recovery_update",
    "merge",
    "save",
    "load",
)


def memory(bench: Bench) -> None:
    """Measure the peaks of memory for DeiT-S."""
    setting = bench.large
    for task in PEAKS:
        key = {"part": "memory", "task": task, **bench.large_key}
        if not bench.recorder.has(**key):
            bench.add(key, peak_bytes=bench.measure(task, setting, 0.0)["peak_bytes"])


# the command


ASKED: dict[str, tuple[dict[str, str], str, float]] = {
    "the scan is {:.2f} times faster than full passes, not {:.2f}": ({"what": "scan"}, "speedup", SCAN),
    "our loop has {:.3f} of the speed of a bare one, not {:.3f}": ({"what": "loop"}, "efficiency", LOOP),
    "gates leave {:.3f} of the speed, not {:.3f}": ({"what": "gates", "way": "gated"}, "efficiency", GATES),
    "merging has {:.3f} of the MAC ratio, not {:.3f}": ({"what": "training", "way": "merged"}, "efficiency", STUDENT),
}


def unmet(results: Results, is_quick: bool) -> list[str]:
    """Return in words what is below what is asked for."""
    short = []
    for sentence, (key, name, wanted) in ASKED.items():
        found = [row.values[name][0] for row in results.where(part="naive", **key)]
        short += [sentence.format(value, wanted) for value in found if value < wanted and not is_quick]
    gaps = [row.values["largest_difference"] for row in results.where(part="naive", what="scan")]
    sentence = "values of the scan are {:.1e} apart from those of full passes, not {:.0e}"
    return short + [sentence.format(gap, SAME) for gap in gaps if gap > SAME]


@contextmanager
def images_at_hand(count: int = 400) -> Iterator[str]:
    """Give the folder of the real images; where they are absent, one of noise in JPEG files, as slow to read."""
    if IMAGENET.is_dir():
        yield str(IMAGENET)
        return
    with TemporaryDirectory() as scratch:
        write_images(Path(scratch), count)
        yield scratch


def write_images(folder: Path, count: int, size: tuple[int, int] = (340, 256), classes: int = 10) -> None:
    """Write ``count`` training images of smooth noise and a tenth as many to validate on."""
    generator = np.random.default_rng(0)
    for split, images in {"train": count, "val": max(count // 10, classes)}.items():
        for number in range(images):
            home = folder / split / str(number % classes)
            home.mkdir(parents=True, exist_ok=True)
            noise = generator.integers(0, 256, (32, 32, 3), dtype=np.uint8)
            Image.fromarray(noise).resize(size, Image.Resampling.BICUBIC).save(home / f"{number}.jpg", quality=88)


PARTS = {"stages": stages, "naive": naive, "growth": growth, "memory": memory}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"parts to run: {', '.join(PARTS)}; all by default")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--redo", action="store_true", help="repeat measurements that already have results")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if unknown := set(options.parts) - PARTS.keys():
        parser.error(f"unknown part {', '.join(sorted(unknown))}; the parts are {', '.join(PARTS)}")
    out = options.out or (QUICK_RESULTS if options.quick else RESULTS) / "effort.json"
    recorder = Recorder(out, redo=options.redo)
    with images_at_hand() as folder:
        for part in options.parts or PARTS:
            PARTS[part](Bench(recorder, QUICK if options.quick else FULL, folder))
    if short := unmet(Results.read(out), options.quick):
        sys.exit(f"below what is asked for: {'; '.join(short)}")


if __name__ == "__main__":
    main()
