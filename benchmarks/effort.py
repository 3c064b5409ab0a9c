"""What pruning costs: time in units of one dense training epoch, against naive ways, growth, and peaks of memory.

    python benchmarks/effort.py [stages naive growth memory] [--quick] [--redo] [--out benchmarks/results/effort.json]

``stages`` times every stage of hetdpt on ViT-Tiny, on the images of ``../shared/data`` where they are present, else on
noise. ``naive`` runs the scan, a fit, the gates, the recovery and the training loop against the same work done in a
naive way, in turns. ``growth`` measures time and memory against depth, width and the number of images, and fits the
exponents. ``memory`` has the peaks for DeiT-S. Weights are random: they make no difference to time and memory. Every
row is measured in a process of its own, forked from one that had only imported hetdpt, and is written when it is known:
a run that was killed goes on where it was. ``--quick`` takes fewer images and smaller sizes, and writes to
``results/quick/effort.json``.

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
SCAN, SAME, LOOP, GATES, STUDENT = 1 / 0.65, 1e-9, 0.97, 1 / 1.03, 0.9


@dataclass(frozen=True)
class Scale:
    """How much is measured."""

    model: dict[str, Any] = field(default_factory=dict)
    """Arguments of ViT-Tiny for ``stages`` and ``naive``."""
    batch: int = 32
    updates: int = 5
    few: int = 32
    """Images on which stages are timed, and then on ``some``; their time on ``images`` is extrapolated from both."""
    some: int = 64
    images: int = 256
    """To look at or to fit on, as hetdpt does by default; ``judge`` times as many others judge."""
    judge: float = 0.5
    epoch: int = 3000
    """Training images of an epoch, of which ``updates`` batches are measured."""
    validation: int = 1000
    scanned: int = 32
    """Images of the scan against full passes, and its rounds."""
    scans: int = 3
    fitted: tuple[int, ...] = (64, 256)
    large: str = DEIT
    """The larger model, its arguments and the plan by which it is pruned, ``spread_plan`` without one."""
    large_arguments: dict[str, Any] = field(default_factory=dict)
    plan: str | None = DEIT_PLAN
    large_batch: int = 8
    rounds: int = 10
    loops: int = 16
    """Updates of our loop against a bare one."""
    grown: dict[str, Any] = field(default_factory=lambda: {"img_size": 64})
    """Arguments of ViT-Tiny for ``growth``, beside depth and width."""
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
    few=4,
    some=8,
    scanned=8,
    scans=1,
    fitted=(16, 64),
    large=VIT_TINY,
    plan=None,
    rounds=3,
    loops=3,
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
    "search of one epoch": {"gates on all layers, fitted": 6, "search, one epoch of updates": 1},
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
    for name, stage in STAGES.items():
        key = {"part": "stages", "stage": name}
        if not bench.recorder.has(**key):
            values = time_stage(bench, stage)
            unit = values["seconds"] if name == UNIT else bench.row(part="stages", stage=UNIT)["seconds"]
            bench.add(key, epochs_of_dense=values["seconds"] / unit, **values, data=bench.images)
    for name, parts in COMPOSED.items():
        key = {"part": "stages", "stage": name}
        if not bench.recorder.has(**key):
            rows = {part: bench.row(part="stages", stage=part) for part in parts}
            sums = {
                unit: sum(times * rows[part][unit] for part, times in parts.items())
                for unit in ("seconds", "epochs_of_dense")
            }
            made_of = " + ".join(f"{times} x {part}" for part, times in parts.items())
            bench.add(key, **sums, made_of=made_of, data=bench.images)


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
    key, scale = {"part": "naive", "what": "scan"}, bench.scale
    if not bench.recorder.has(**key):
        setting = Setting(bench.folder, VIT_TINY, scale.model, scale.scanned, batch=16, is_noise=True)
        bench.add(key, **bench.do(compare_scans, setting, scale.scans), model=setting.model)


def _fits(bench: Bench) -> None:
    for images in bench.scale.fitted:
        key = {"part": "naive", "what": "fit", "images": images}
        if bench.recorder.has(**key):
            continue
        setting = Setting(bench.folder, VIT_TINY, bench.scale.model, images, batch=16, is_noise=True)
        (ours, line), (theirs, other) = (bench.do(memory_of_fit, way, setting) for way in ("ours", "naive"))
        more = {f"naive_{name}": value for name, value in theirs.items()}
        bench.add(key, **ours, **more, difference=apart_by(line, other), model=setting.model)


def _gates(bench: Bench) -> None:
    names = ("gated", "gated, exploring")
    _add_all(bench, "gates", names, lambda: bench.do(compare_gates, bench.large, bench.scale.rounds))


def _students(bench: Bench) -> None:
    plan = hetdpt.published_plan(bench.scale.plan) if bench.scale.plan else None
    teachers = ("two layers, teacher cached", "merged, teacher asked", "merged, teacher cached")
    names = ("two layers", "merged", *teachers)
    _add_all(bench, "training", names, lambda: bench.do(compare_students, bench.large, plan, bench.scale.rounds))


def _loops(bench: Bench) -> None:
    key, setting = {"part": "naive", "what": "loop"}, replace(bench.large, updates=bench.scale.loops)
    if not bench.recorder.has(**key):
        bench.add(key, **bench.do(compare_loops, setting), model=setting.model, data=bench.images)


def _add_all(bench: Bench, what: str, names: Iterable[str], compare: Callable[[], dict[str, dict[str, Any]]]) -> None:
    """Add a row for each of ``names``, which are measured together."""
    keys = {name: {"part": "naive", "what": what, "way": name} for name in names}
    if not all(bench.recorder.has(**key) for key in keys.values()):
        found = compare()
        for name, key in keys.items():
            bench.add(key, **found[name], model=bench.scale.large)


# growth

GROWING = ("survey", "entropy", "calibration", "merge", "save_and_load")
LOOKING = ("entropy", "calibration")
EXPECTED = {
    ("survey", "layers"): (1, 1),
    ("survey", "width"): (0, 2),
    ("entropy", "layers"): (2, 1),
    ("entropy", "width"): (2, 2),
    ("entropy", "images"): (1, 0),
    ("calibration", "layers"): (2, 1),
    ("calibration", "width"): (2, 2),
    ("calibration", "images"): (1, 0),
    ("merge", "layers"): (1, 1),
    ("merge", "width"): (3, 2),
    ("save_and_load", "layers"): (1, 1),
    ("save_and_load", "width"): (2, 2),
}
"""Exponents of time and of memory for large sizes: a scan runs half of the layers for each of 2 L sites, a calibration
of L / 2 layers half of them for each, a merge multiplies D x 4 D by 4 D x D; memory is the weights and, at most, sums
of D^2 for each layer, whatever the number of images."""


def growth(bench: Bench) -> None:
    """Measure time and memory against depth, width and the number of images, and fit the exponents."""
    for task in GROWING:
        for against, sizes in series(bench.scale, task).items():
            is_new = False
            rows = []
            for size in sizes:
                key = {"part": "growth", "task": task, **size}
                if not bench.recorder.has(**key):
                    is_new = True
                    bench.add(key, **grow(bench, task, **size))
                rows.append(bench.row(**key))
            _add_exponents(bench, task, against, [size[against] for size in sizes], rows, is_new)


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
    arguments = {**bench.scale.grown, "depth": layers, "embed_dim": width, "num_heads": max(width // 64, 1)}
    setting = Setting(bench.folder, VIT_TINY, arguments, images, batch=bench.scale.looked_at, is_noise=True)
    return bench.measure(task, setting, bench.scale.patience)


def _add_exponents(
    bench: Bench, task: str, against: str, sizes: list[int], rows: list[dict[str, Any]], is_new: bool
) -> None:
    key = {"part": "growth", "task": task, "against": against}
    if is_new or not bench.recorder.has(**key):
        expected = dict(zip(("seconds", "peak_bytes"), EXPECTED[task, against], strict=True))
        found = {name: [row[name] for row in rows] for name in expected}
        exponents = {f"exponent_of_{name}": exponent(sizes, found[name]) for name in expected if all(found[name])}
        bench.add(key, **exponents, **{f"expected_of_{name}": power for name, power in expected.items()})


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
        key = {"part": "memory", "task": task}
        if not bench.recorder.has(**key):
            found = bench.measure(task, setting, 0.0)
            bench.add(key, peak_bytes=found["peak_bytes"], model=setting.model, batch=setting.batch)


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
        row = results.find(part="naive", **key)
        if row is not None and row.values[name][0] < wanted and not is_quick:
            short.append(sentence.format(row.values[name][0], wanted))
    scan = results.find(part="naive", what="scan")
    if scan is not None and (gap := scan.values["largest_difference"]) > SAME:
        short.append(f"values of the scan are {gap:.1e} apart from those of full passes, not {SAME:.0e}")
    return short


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
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; all by default")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--redo", action="store_true", help="forget what the file holds")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if unknown := set(options.parts) - PARTS.keys():
        parser.error(f"there is no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    out = options.out or (RESULTS / "quick" if options.quick else RESULTS) / "effort.json"
    recorder = Recorder(out, redo=options.redo)
    with images_at_hand() as folder:
        for part in options.parts or PARTS:
            PARTS[part](Bench(recorder, QUICK if options.quick else FULL, folder))
    if short := unmet(Results.read(out), options.quick):
        sys.exit(f"below what is asked for: {'; '.join(short)}")


if __name__ == "__main__":
    main()
