"""Accuracy without training: one layer removed under every style, and several, against other ways to make it faster.

    python benchmarks/oneshot.py sites | counts | blocks [--images 256] [--judge 64]
    python benchmarks/oneshot.py tables  (what docs/oneshot.md shows of benchmarks/results/oneshot_*.json)

``sites`` removes each layer of the real ViT-Tiny by itself. ``counts`` removes 2, 4, 6 and 8 layers chosen by damage,
calibrated and plain, of both kinds and of attention alone. ``blocks`` replaces 1, 2, 3, 4 whole blocks by linear maps
(the idea of ReplaceMe and TOAST, written here as a baseline), and compares calibrated removal at equal MACs. All fit
on the same training images without labels, choose by the same damage on others, and are scored on the same 1,000
validation images; differences are paired (exact McNemar test). Needs ``../shared/data`` and says so where it is absent.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from scipy.stats import binomtest
from torch import Tensor, nn

import hetdpt
from hetdpt.adapters.preprocessing import preprocessing_of
from hetdpt.core.fold import Moments, fit_linear, new_layer
from hetdpt.core.modules import clone
from hetdpt.core.plan import Plan
from hetdpt.core.styles import STYLES as STYLE_ROWS
from hetdpt.data.batches import EvaluationBatches
from hetdpt.data.fixed_batches import ImageBatches
from hetdpt.data.sources import open_data
from hetdpt.export.saved import versions
from hetdpt.measurement.agreement import measure_damage
from hetdpt.selection.damage import choose
from hetdpt.surgery.calibrate import calibrate_, fit_sites, replaced
from hetdpt.surgery.merge import merge_
from hetdpt.surgery.prefix_cache import MEMORY, CachedVariants, Probe
from hetdpt.surgery.remove import ready, without

DATA = Path(__file__).parents[2] / "shared" / "data"
MODEL, SIZE = "vit_tiny_patch16_224", (3, 224, 224)
STYLES = {"attention": ("skip", "norm", "constant", "position", "linear"), "activation": ("identity", "calibrated")}
COUNTS = (2, 4, 6, 8)
BLOCKS = 4


class Bench:
    """The model, the images to fit on, others to judge damage on, and labelled ones to score on."""

    def __init__(self, images: int, judge: int) -> None:
        self.model = hetdpt.create(MODEL, weights=DATA / f"{MODEL}.safetensors")
        data, wants = open_data(str(DATA / "imagenet")), preprocessing_of(self.model)
        assert data.train is not None
        assert data.val is not None
        self.batches = list(ImageBatches(data.train, wants, count=images, workers=2))
        self.judge = list(ImageBatches(data.train, wants, count=judge, start=images, workers=2))
        self.val = [(batch.images, batch.targets) for batch in EvaluationBatches(data.val, wants, batch_size=50)]

    @torch.no_grad()
    def right(self, model: nn.Module) -> Tensor:
        """Return for each validation image whether ``model`` gets it right."""
        return torch.cat([model(images).argmax(1) == targets for images, targets in self.val])

    def macs(self, model: nn.Module) -> int:
        return hetdpt.count_macs(model, SIZE)

    def pruned(self, plan: Plan) -> nn.Module:
        copy = clone(self.model)
        return merge_(calibrate_(copy, plan, self.batches) if plan.fitted else hetdpt.prune_(copy, plan))


@torch.no_grad()
def by_site(bench: Bench) -> dict[str, Any]:
    """Return the accuracy after the removal of each layer alone, under every style."""
    base = ready(bench.model, "plain", SIZE)
    offered = hetdpt.sites(base)
    asked = {site: tuple(style for style in STYLES[site.kind] if STYLE_ROWS[style].fit) for site in offered}
    found = fit_sites(base, asked, bench.batches)
    variants = {
        (site, style): replaced(base, found[site, style]) if (site, style) in found else without(base, site, style)
        for site in offered
        for style in STYLES[site.kind]
    }
    scan = CachedVariants(base, variants, Probe(), bench.val[0][0], MEMORY)
    right = dict.fromkeys((None, *variants), 0)
    for number, (images, targets) in enumerate(bench.val, 1):
        for key, answers in scan.answers(images):
            right[key] += int((answers.argmax(1) == targets).sum())
        print(f"{number}/{len(bench.val)} batches", flush=True)
    total = sum(len(targets) for _, targets in bench.val)
    rows = [
        {
            "kind": site.kind,
            "block": site.block,
            "style": style,
            "accuracy": 100 * right[site, style] / total,
            "r2": found[site, style].fit.r2 if (site, style) in found else None,
        }
        for site, style in variants
    ]
    return {"dense": 100 * right[None] / total, "rows": rows}


WAYS: dict[str, tuple[Any, str | None]] = {
    "calibrated": ("calibrated", None),
    "plain": ("plain", None),
    "attention only, calibrated": ("calibrated", "attention"),
    "calibrated, linear attention": (("linear", "calibrated"), None),
}


class Rows:
    """Results as they come, each written at once in place of an earlier one of the same name."""

    def __init__(self, bench: Bench, out: Path, about: dict[str, Any]) -> None:
        self.bench, self.out, self.about = bench, out, about
        self.rows: list[dict[str, Any]] = json.loads(out.read_text())["rows"] if out.is_file() else []

    def add(self, way: str, count: int, model: nn.Module, rival: Tensor | None = None, **more: Any) -> Tensor:
        """Score ``model`` and return what it gets right; ``rival`` is what another one does."""
        bench, right = self.bench, self.bench.right(model)
        row = {
            "way": way,
            "count": count,
            "accuracy": 100 * right.float().mean().item(),
            "mac_ratio": bench.macs(bench.model) / bench.macs(model),
            "damage": measure_damage(bench.model, model, bench.judge),
            **(mcnemar(right, rival) if rival is not None else {}),
            **more,
        }
        self.rows = [old for old in self.rows if (old["way"], old["count"]) != (way, count)] + [row]
        self.out.write_text(json.dumps({**self.about, "rows": self.rows}, indent=1) + "\n")
        print(f"{way}, {count}: {row['accuracy']:.1f} %, {row['mac_ratio']:.3f}x fewer MACs", flush=True)
        return right


def by_count(bench: Bench, rows: Rows, ways: list[str]) -> None:
    """Score 2, 4, 6, 8 removals, chosen one after another."""
    offered = hetdpt.sites(bench.model, SIZE)
    for way in ways:
        removal, kind = WAYS[way]
        gains = {site: 1.0 for site in offered if kind in (None, site.kind)}
        begun, chosen = time.monotonic(), list[hetdpt.Site]()
        for choice in choose(bench.model, bench.batches, gains, max(COUNTS), judge=bench.judge, removal=removal):
            chosen.append(choice.move)
            if len(chosen) in COUNTS:
                plan = plan_of(chosen, removal)
                seconds = round(time.monotonic() - begun)
                rows.add(way, len(chosen), bench.pruned(plan), plan=str(plan), seconds=seconds)


def by_block(bench: Bench, rows: Rows) -> None:
    """Score whole blocks replaced, and calibrated removal with at most as many MACs."""
    known = ready(bench.model, "calibrated", SIZE)
    dense = bench.macs(bench.model)
    saved = {site: float(dense - bench.macs(merge_(without(known, site)))) for site in hetdpt.sites(known)}
    cheapest = choose(bench.model, bench.batches, saved, sum(saved.values()), judge=bench.judge)
    chosen = list[hetdpt.Site]()
    for way, find in {"blocks, one by one": single_blocks, "blocks, a run of them": runs_of_blocks}.items():
        for count, (blocks, model) in enumerate(find(bench), 1):
            theirs = rows.add(way, count, model, blocks=blocks)
            target = dense - bench.macs(model)
            while sum(saved[site] for site in chosen) < target:
                chosen.append(next(cheapest).move)
            enough = next(n for n in range(len(chosen) + 1) if sum(saved[site] for site in chosen[:n]) >= target)
            plan = plan_of(chosen[:enough], "calibrated")
            rows.add(f"calibrated, at the MACs of {count} {way}", enough, bench.pruned(plan), theirs, plan=str(plan))


def plan_of(sites: list[hetdpt.Site], removal: Any) -> Plan:
    kinds = [tuple(site.block for site in sites if site.kind == kind) for kind in ("attention", "activation")]
    return Plan(*kinds, removal=removal)


def mcnemar(ours: Tensor, theirs: Tensor) -> dict[str, Any]:
    """Return how many images one gets right and the other not, and the exact two-sided p value."""
    only_ours, only_theirs = int((ours & ~theirs).sum()), int((theirs & ~ours).sum())
    p = binomtest(only_ours, only_ours + only_theirs).pvalue if only_ours + only_theirs else 1.0
    return {"only_ours": only_ours, "only_theirs": only_theirs, "p": p}


class Block(nn.Module):
    """One linear map in place of blocks: x + W x + b."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(x)


def single_blocks(bench: Bench) -> Iterator[tuple[list[int], nn.Module]]:
    """Yield 1, 2, ... blocks replaced by a map each, chosen greedily by damage and fitted again in order."""
    chosen: list[int] = []
    for _ in range(BLOCKS):
        left = [block for block in range(len(bench.model.blocks)) if block not in chosen]
        current = with_blocks(bench, [(block, block) for block in sorted(chosen)])
        tried = {block: with_blocks(bench, [(block, block)], current) for block in left}
        best = min(left, key=lambda block: measure_damage(bench.model, tried[block], bench.judge))
        chosen.append(best)
        yield sorted(chosen), with_blocks(bench, [(block, block) for block in sorted(chosen)])


def runs_of_blocks(bench: Bench) -> Iterator[tuple[list[int], nn.Module]]:
    """Yield 1, 2, ... consecutive blocks replaced by a single map, the run with the least damage."""
    depth = len(bench.model.blocks)
    for length in range(1, BLOCKS + 1):
        tried = {first: with_blocks(bench, [(first, first + length - 1)]) for first in range(depth + 1 - length)}
        damages = {first: measure_damage(bench.model, model, bench.judge) for first, model in tried.items()}
        first = min(damages, key=damages.__getitem__)
        yield [*range(first, first + length)], tried[first]


@torch.no_grad()
def with_blocks(bench: Bench, spans: list[tuple[int, int]], model: nn.Module | None = None) -> nn.Module:
    """Return a copy of the model with each span of blocks replaced by one map, fitted in order."""
    student = clone(model or bench.model)
    width = student.embed_dim
    for first, last in spans:
        folds = [Moments(width, width) for _ in range(4)]
        for number, images in enumerate(bench.batches):
            ends: dict[str, Tensor] = {}
            hooks = [
                student.blocks[first].register_forward_pre_hook(partial(keep_input, ends)),  # type: ignore[union-attr,index]
                student.blocks[last].register_forward_hook(partial(keep_output, ends)),  # type: ignore[union-attr,index]
            ]
            student(images)
            for hook in hooks:
                hook.remove()
            x, y = ends["x"].flatten(0, 1), (ends["y"] - ends["x"]).flatten(0, 1)
            folds[number % 4].add(x, y, 1 / y.double().norm(dim=1).clamp(min=1e-3))
        fit = fit_linear(folds)
        layer = new_layer(fit.weight, fit.bias, student.blocks[first].mlp.fc1.weight)  # type: ignore[union-attr,index]
        student.set_submodule(f"blocks.{first}", Block(layer))
        for block in range(first + 1, last + 1):
            student.set_submodule(f"blocks.{block}", nn.Identity())
    return student.eval()


def keep_input(ends: dict[str, Tensor], _: nn.Module, args: Any) -> None:
    ends["x"] = args[0]


def keep_output(ends: dict[str, Tensor], _: nn.Module, args: Any, output: Tensor) -> None:
    ends["y"] = output


def print_tables() -> None:
    """Print both results as the tables of docs/oneshot.md."""
    sites = json.loads(Path("benchmarks/results/oneshot_sites.json").read_text())
    cells = {(row["kind"], row["block"], row["style"]): f"{row['accuracy']:.1f}" for row in sites["rows"]}
    styles = [(kind, style) for kind, names in STYLES.items() for style in names]
    print("| block |", " | ".join(f"{kind} {style}" for kind, style in styles), "|")
    print("|---" * (len(styles) + 1) + "|")
    for block in range(12):
        print(f"| {block} |", " | ".join(cells[kind, block, style] for kind, style in styles), "|")
    print()
    for part in ("counts", "blocks"):
        for row in json.loads(Path(f"benchmarks/results/oneshot_{part}.json").read_text())["rows"]:
            paired = f"{row['only_ours']} : {row['only_theirs']}, p = {row['p']:.1g}" if "p" in row else ""
            print(f"| {row['way']} | {row['count']} | {row['mac_ratio']:.3f}x | {row['accuracy']:.1f} | {paired} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("sites", "counts", "blocks", "tables"))
    parser.add_argument("--images", type=int, default=256)
    parser.add_argument("--judge", type=int, default=64)
    parser.add_argument("--ways", nargs="*", default=list(WAYS), choices=WAYS)
    options = parser.parse_args()
    if options.part == "tables":
        return print_tables()
    if not DATA.is_dir():
        sys.exit(f"{DATA} is absent; this benchmark needs the real ViT-Tiny and its images")
    out = Path(f"benchmarks/results/oneshot_{options.part}.json")
    about = {
        "command": f"python benchmarks/oneshot.py {options.part} --images {options.images} --judge {options.judge}",
        "device": f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads, float32",
        "versions": versions(),
    }
    bench = Bench(options.images, options.judge)
    if options.part == "sites":
        out.write_text(json.dumps({**about, **by_site(bench)}, indent=1) + "\n")
    elif options.part == "counts":
        by_count(bench, Rows(bench, out, about), options.ways)
    else:
        by_block(bench, Rows(bench, out, about))


if __name__ == "__main__":
    main()
