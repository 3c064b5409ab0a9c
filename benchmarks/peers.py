"""Other ways to make the real ViT-Tiny faster, at equal MACs, on the same images and after the same fine-tuning.

    python benchmarks/peers.py [one-shot] [recover] [speed] [--targets 0.84 0.76] [--seeds 0 1]
                               [--epochs 1] [--images 1000] [--peers NAME ...]

``one-shot`` scores every peer at every target, a part of the dense model's MACs, on 1,000 validation images.
``recover`` trains each again, all with the same settings (recipe ``brief``), and scores what that gives. ``speed``
times all of a target in turns. Several processes may be started with the same command: they share what is to be done. A
kill loses what was under way. Needs ``../shared/data`` and says so where it is absent.

What is counted in layers, blocks or tokens has the number that is nearest to the target.
"""

from __future__ import annotations

import argparse
import json
import re
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import oneshot
import torch
import torch_pruning as tp
from evidence import IMAGENET, RESULTS, Key, Recorder, Results, interval, require_real_data
from oneshot import SIZE, plan_of, single_blocks, with_blocks
from torch import Tensor, nn
from torch.nn import functional as F

import hetdpt
from hetdpt.adapters.preprocessing import preprocessing_of
from hetdpt.core.modules import clone
from hetdpt.data.fixed_batches import LabelledBatches
from hetdpt.data.sources import open_data
from hetdpt.flow.recipes import recipe
from hetdpt.measurement.agreement import measure_damage
from hetdpt.measurement.intervals import wilson_interval
from hetdpt.selection.damage import choose
from hetdpt.store.jobs import Guard, Task, run_tasks
from hetdpt.surgery.calibrate import calibrate_
from hetdpt.surgery.merge import merge_
from hetdpt.surgery.remove import ready, without

WORK = Path("runs/bench/peers")
PARTS = ("one-shot", "recover", "speed")
LINEAR = ("linear", "calibrated")
COARSE = 0.04  # of the dense MACs: half of a block
BATCH = 8  # images at once where time is measured
Made = dict[str, Any]
"""What a peer has chosen, as JSON; the student follows from it."""


class Bench(oneshot.Bench):
    """The model and the images, with what was found out about it before."""

    def __init__(self, results: Results, images: int, judge: int, scored: int) -> None:
        super().__init__(images, judge)
        self.val = self.val[: -(-scored // len(self.val[0][0]))]
        self.data, self.images, self.results = open_data(str(IMAGENET)), images, results

    @cached_property
    def dense_macs(self) -> int:
        return self.macs(self.model)

    @cached_property
    def labelled(self) -> list[tuple[Tensor, Tensor]]:
        """The images that others fit on, with labels."""
        return list(LabelledBatches(self.data.train, preprocessing_of(self.model), count=self.images))

    def order(self, of: str) -> list[Any]:
        """Return an order that was found before."""
        row = self.results.find(part="order", of=of)
        assert row, f"the order of {of} is not there yet"
        found: list[Any] = json.loads(row.values["order"])
        return found

    def with_gradients(self) -> nn.Module:
        """Return a copy of the model that holds the gradients of the labelled images' loss."""
        copy = deepcopy(self.model).requires_grad_(True)
        for images, labels in self.labelled:
            F.cross_entropy(copy(images), labels, reduction="sum").backward()
        return copy


Build = Callable[[Bench, Made], nn.Module]


def nearest(bench: Bench, target: float, candidates: Iterable[Made], build: Build) -> Made:
    """Return the candidate whose MACs are nearest to ``target``; each has fewer than the one before."""
    distances = list[tuple[float, Made]]()
    for made in candidates:
        macs = bench.macs(build(bench, made))
        distances.append((abs(macs - target), made))
        if macs <= target:
            break
    miss, best = min(distances, key=lambda pair: pair[0])
    if miss > COARSE * bench.dense_macs:
        raise ValueError(
            f"what was chosen does not come down to {target / bench.dense_macs:.0%} of the MACs; remove its order from "
            "the results and give all targets together"
        )
    return best


# Orders: what is chosen one after another, once for all targets


def order_of_layers(bench: Bench, removal: Any, most: float) -> list[Any]:
    """Return layers, least damage for the MACs saved first, until the part ``most`` of all MACs is saved."""
    known = ready(bench.model, removal, SIZE)
    saved = {site: float(bench.dense_macs - bench.macs(merge_(without(known, site)))) for site in hetdpt.sites(known)}
    chosen = choose(bench.model, bench.batches, saved, most * bench.dense_macs, judge=bench.judge, removal=removal)
    return [[choice.move.kind, choice.move.block] for choice in chosen]


def order_of_linear_blocks(bench: Bench, most: float) -> list[Any]:
    """Return which blocks are replaced where 1, 2, ... are."""
    return [blocks for blocks, _ in single_blocks(bench)]


@torch.no_grad()
def order_of_influence(bench: Bench, most: float) -> list[Any]:
    """Return the blocks by influence, least first: 1 - the mean cosine of what a token is before and after it."""
    sums = dict.fromkeys(range(len(bench.model.blocks)), 0.0)

    def look(number: int, _: nn.Module, args: Any, output: Tensor) -> None:
        sums[number] += float((1 - F.cosine_similarity(args[0], output, dim=-1)).mean(1).sum())

    hooks = [block.register_forward_hook(partial(look, number)) for number, block in enumerate(bench.model.blocks)]
    for images in bench.batches:
        bench.model(images)
    for hook in hooks:
        hook.remove()
    return sorted(sums, key=sums.__getitem__)


ORDERS: dict[str, Callable[[Bench, float], list[Any]]] = {
    "layers": lambda bench, most: order_of_layers(bench, LINEAR, most),
    "layers, constants": lambda bench, most: order_of_layers(bench, "calibrated", most),
    "linear blocks": order_of_linear_blocks,
    "influence": order_of_influence,
}


# Depth


def some_layers(bench: Bench, target: float, order: str, removal: Any) -> Made:
    """Return the first layers of ``order``, as many as bring the MACs nearest to ``target``."""
    layers = bench.order(order)
    return nearest(
        bench, target, [{"layers": layers[:n], "removal": removal} for n in range(1, len(layers) + 1)], shallow
    )


def shallow(bench: Bench, made: Made) -> nn.Module:
    """Return the model without the layers, not fitted: the costs are right, the answers are not."""
    copy = ready(bench.model, made["removal"], SIZE)
    for kind, block in made["layers"]:
        site = next(site for site in hetdpt.sites(copy) if (site.kind, site.block) == (kind, block))
        copy = without(copy, site)
    return merge_(copy)


def without_layers(bench: Bench, made: Made) -> nn.Module:
    return merge_(calibrated(bench, made))


def calibrated(bench: Bench, made: Made) -> nn.Module:
    """Return the model without the layers, replaced by what fits them, not merged yet."""
    removal = made["removal"] if isinstance(made["removal"], str) else tuple(made["removal"])
    found = {(site.kind, site.block): site for site in hetdpt.sites(bench.model, SIZE)}
    plan = plan_of([found[kind, block] for kind, block in made["layers"]], removal)
    return calibrate_(clone(bench.model), plan, bench.batches)


# Depth and something else


def with_layers(bench: Bench, target: float, rest: Callable[[Bench, float, Made], Made], build: Build) -> Made:
    """Return layers, at least one, and what has to go besides: the mixture that does the least damage."""
    layers = bench.order("layers")
    mixtures = list[Made]()
    for count in range(1, len(layers) + 1):
        made = {"layers": layers[:count], "removal": LINEAR}
        if bench.macs(shallow(bench, made)) <= target:
            break
        mixtures.append({**made, **rest(bench, target, made)})
    return min(mixtures, key=lambda made: measure_damage(bench.model, build(bench, made), bench.judge))


# Width


def width_for(bench: Bench, target: float, made: Made) -> Made:
    return {"macs": target}


def narrowed(bench: Bench, made: Made) -> nn.Module:
    return merge_(hetdpt.narrow_to(calibrated(bench, made), macs=made["macs"], batches=bench.labelled).model)


def ratio_for(bench: Bench, target: float, heads: bool) -> Made:
    """Return the part of the width that has to go, to a 256th, at the hands of Torch-Pruning."""
    low, high, given = 0.0, 1.0, bench.with_gradients()
    for _ in range(8):
        middle = (low + high) / 2
        low, high = (low, middle) if bench.macs(cut(given, middle, heads)) <= target else (middle, high)
    return {"ratio": high, "heads": heads}


def torch_pruned(bench: Bench, made: Made) -> nn.Module:
    return cut(bench.with_gradients(), made["ratio"], made["heads"])


def cut(given: nn.Module, ratio: float, heads: bool) -> nn.Module:
    """Return a copy of ``given``, whose gradients are there, without that part of its width.

    As in the package's example for timm's ViT with --bottleneck and --global_pruning: hidden features and, with
    ``heads``, dimensions of heads go, the stream stays. Like is compared with like (isomorphic), its newest ranking.
    """
    copy = deepcopy(given)
    for mine, theirs in zip(copy.parameters(), given.parameters(), strict=True):
        mine.grad = theirs.grad
    blocks = list(copy.blocks)
    stays = [
        copy.patch_embed.proj,
        copy.head,
        *(layer for block in blocks for layer in (block.attn.proj, block.mlp.fc2)),
    ]
    num_heads = {block.attn.qkv: block.attn.num_heads for block in blocks}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it will not prune cls_token and pos_embed, as the stream stays
        pruner = tp.pruner.BasePruner(
            copy, torch.zeros(1, *SIZE), tp.importance.GroupTaylorImportance(), global_pruning=True, isomorphic=True,
            pruning_ratio=ratio, num_heads=num_heads, in_channel_groups={}, out_channel_groups={},
            ignored_layers=[*stays, *(() if heads else (block.attn for block in blocks))],
        )  # fmt: skip
        pruner.step()
    for block in blocks:
        keep_temperature_(block.attn)
    copy.zero_grad()
    return copy.eval()


@torch.no_grad()
def keep_temperature_(attention: nn.Module) -> None:
    """Tell an attention its new sizes; attention divides by the root of its dimensions, which are fewer now."""
    before, width = attention.head_dim, attention.qkv.out_features // 3
    attention.head_dim, attention.attn_dim = width // attention.num_heads, width
    for parameter in attention.qkv.parameters():
        parameter[:width] *= (attention.head_dim / before) ** 0.5


# Tokens


def tokens_for(bench: Bench, target: float, made: Made | None = None) -> Made:
    """Return how many tokens merge in each block, of the dense model or of one that has lost layers."""
    model = shallow(bench, made) if made else bench.model
    return nearest(bench, target, [{"r": r} for r in range(1, 33)], lambda _, made: merging(clone(model), made))


def merging(model: nn.Module, made: Made) -> nn.Module:
    return hetdpt.reduce_tokens_(model, hetdpt.Tokens("tome", made["r"]))


def shallow_and_merging(bench: Bench, made: Made) -> nn.Module:
    return merging(without_layers(bench, made), made)


# Whole blocks


def some_blocks(bench: Bench, target: float, made_of: Callable[[int], list[int]], build: Build, most: int) -> Made:
    return nearest(bench, target, [{"blocks": made_of(count)} for count in range(1, most + 1)], build)


def last_blocks(bench: Bench, count: int) -> list[int]:
    return [*range(len(bench.model.blocks))][-count:]


def without_blocks(bench: Bench, made: Made) -> nn.Module:
    copy = clone(bench.model)
    copy.blocks = nn.Sequential(*(block for number, block in enumerate(copy.blocks) if number not in made["blocks"]))
    return copy


def with_linear_blocks(bench: Bench, made: Made) -> nn.Module:
    return with_blocks(bench, [(block, block) for block in made["blocks"]])


@dataclass(frozen=True)
class Peer:
    """A way to make a model faster."""

    name: str
    what: str
    choose: Callable[[Bench, float], Made]
    """From the MACs to be had."""
    build: Build
    order: str | None = None
    """The one of ``ORDERS`` that has to be there before."""


PEERS = (
    Peer("hetdpt", "layers by damage for MACs saved, each replaced by what fits it: a constant or a linear map",
         lambda bench, target: some_layers(bench, target, "layers, constants", "calibrated"), without_layers,
         "layers, constants"),
    Peer("hetdpt, linear", "as hetdpt, a linear map in the place of an attention layer",
         lambda bench, target: some_layers(bench, target, "layers", LINEAR), without_layers, "layers"),
    Peer("hetdpt+", "some layers, the rest by width, refitted; how many, damage decides",
         lambda bench, target: with_layers(bench, target, width_for, narrowed), narrowed, "layers"),
    Peer("hetdpt + ToMe", "some layers, the rest by merging tokens; how many, damage decides",
         lambda bench, target: with_layers(bench, target, tokens_for, shallow_and_merging), shallow_and_merging,
         "layers"),
    Peer("Torch-Pruning", "hidden features and dimensions of heads, by isomorphic Taylor (torch-pruning)",
         partial(ratio_for, heads=True), torch_pruned),
    Peer("Torch-Pruning, hidden", "hidden features alone, by isomorphic Taylor (torch-pruning)",
         partial(ratio_for, heads=False), torch_pruned),
    Peer("block drop", "whole blocks of the least influence (ShortGPT)",
         lambda bench, target: some_blocks(
             bench, target, lambda n: sorted(bench.order("influence")[:n]), without_blocks, 6),
         without_blocks, "influence"),
    Peer("block linear", "whole blocks replaced by fitted linear maps (ReplaceMe)",
         lambda bench, target: some_blocks(
             bench, target, lambda n: bench.order("linear blocks")[n - 1], with_linear_blocks, oneshot.BLOCKS),
         with_linear_blocks, "linear blocks"),
    Peer("ToMe", "alike tokens merge in every block (ToMe)", tokens_for,
         lambda bench, made: merging(clone(bench.model), made)),
    Peer("truncate", "the first blocks, then norm and head (early exit)",
         lambda bench, target: some_blocks(
             bench, target, lambda n: last_blocks(bench, n), without_blocks, 6),
         without_blocks),
)  # fmt: skip
BY_NAME = {peer.name: peer for peer in PEERS}


class Job:
    """The rows that are to be, as tasks that processes share."""

    def __init__(self, recorder: Recorder, options: argparse.Namespace) -> None:
        self.recorder, self.options, self._bench = recorder, options, None

    @property
    def bench(self) -> Bench:
        """What all tasks need, with the rows there are now."""
        if self._bench is None:
            self._bench = Bench(self.results, self.options.calibrate, self.options.judge, self.options.scored)
        self._bench.results = self.results
        return self._bench

    @property
    def results(self) -> Results:
        return Results.read(self.recorder.file)

    def tasks(self) -> Iterator[Task[Key, Any]]:
        for key in self.keys():
            read, run = partial(self.result, key), partial(self.take, key)
            yield Task(self.name(key), key, read, run, tuple(self.name(need) for need in self.needs(key)))

    def keys(self) -> Iterator[Key]:
        """Yield the keys of rows: what others need first, and seed after seed."""
        peers, targets = [BY_NAME[name] for name in self.options.peers], self.options.targets
        for order in dict.fromkeys(peer.order for peer in peers if peer.order):
            yield {"part": "order", "of": order}
        yield {"part": "one-shot", "peer": "dense", "target": 1.0}
        each = [{"peer": peer.name, "target": target} for target in targets for peer in peers]
        yield from ({"part": "one-shot", **one} for one in each)
        if "recover" in self.options.parts:
            yield from ({"part": "recovered", **one, "seed": seed} for seed in self.options.seeds for one in each)

    def name(self, task: Key) -> str:
        return re.sub(
            "[^A-Za-z0-9]+", lambda match: "plus" * ("+" in match[0]) + "-", "-".join(map(str, task.values()))
        )

    def result(self, task: Key) -> Any:
        return self.results.find(**task)

    def needs(self, task: Key) -> Iterator[Key]:
        """Yield the keys of the rows that a task reads."""
        if task["part"] == "one-shot":
            order = BY_NAME[task["peer"]].order if task["peer"] in BY_NAME else None
            if order is not None:
                yield {"part": "order", "of": order}
        elif task["part"] == "recovered":
            yield {"part": "one-shot", "peer": task["peer"], "target": task["target"]}

    def take(self, task: Key, guard: Guard) -> None:
        begun = time.monotonic()
        print(f"{time.strftime('%H:%M:%S')} starts: {self.name(task)}", flush=True)
        made = {"order": self.order, "one-shot": self.score, "recovered": self.recover}[task["part"]](task)
        guard()
        self.recorder.add(task, **made, seconds=round(time.monotonic() - begun, 1))

    def order(self, task: Key) -> Made:
        most = 1 - min(self.options.targets)
        return {"order": json.dumps(ORDERS[task["of"]](self.bench, most))}

    def score(self, task: Key) -> Made:
        """Return what a student is made of, what it costs and what it gets right."""
        bench = self.bench
        if task["peer"] == "dense":
            return scores(bench, bench.model)
        peer = BY_NAME[task["peer"]]
        made = peer.choose(bench, task["target"] * bench.dense_macs)
        return {"what": peer.what, "made": json.dumps(made), **scores(bench, peer.build(bench, made))}

    def student(self, task: Key) -> nn.Module:
        """Return the student that was scored, built again, with weights of its own: they may be trained."""
        row = self.results.find(part="one-shot", peer=task["peer"], target=task["target"])
        assert row
        return deepcopy(BY_NAME[task["peer"]].build(self.bench, json.loads(row.values["made"])))

    def recover(self, task: Key) -> Made:
        """Return what a student gets right after the fine-tuning that all have."""
        bench, options, student = self.bench, self.options, self.student(task)
        assert bench.data.train is not None
        settings = {
            "training.epochs": options.epochs,
            "training.seed": task["seed"],
            "fraction": min(1.0, options.images / len(bench.data.train)),
        }
        config = recipe("brief").config.with_settings(settings)
        for _ in hetdpt.recover(student, bench.model, bench.data, config, evaluates=False):
            pass
        return {**scores(bench, student.eval()), "epochs": options.epochs, "images": options.images}


def scores(bench: Bench, model: nn.Module) -> Made:
    right = bench.right(model)
    hits, count = int(right.sum()), len(right)
    return {
        "accuracy": [round(value, 3) for value in (100 * hits / count, *wilson_interval(hits, count))],
        "macs": bench.macs(model),
        "macs_ratio": round(bench.macs(model) / bench.dense_macs, 5),
        "params": hetdpt.count_params(model),
        "right": "".join(str(int(one)) for one in right),
    }


def measure_speed(job: Job) -> None:
    """Write how much faster than the dense model the students of each target are, timed in turns."""
    for target in job.options.targets:
        keys = {name: {"part": "speed", "peer": name, "target": target, "batch": BATCH} for name in job.options.peers}
        if all(job.recorder.has(**key) for key in keys.values()):
            continue
        students = {name: job.student(key) for name, key in keys.items()}
        found = hetdpt.measure_throughput({"dense": job.bench.model, **students}, SIZE, batch=BATCH)
        for name, key in keys.items():
            job.recorder.add(key, speedup=interval(found.speedup[name]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=["one-shot", "recover"], metavar=" | ".join(PARTS))
    parser.add_argument("--targets", nargs="+", type=float, default=[0.84, 0.76])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--peers", nargs="+", default=list(BY_NAME), choices=BY_NAME)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--images", type=int, default=1000, help="images to fine-tune on")
    parser.add_argument("--calibrate", type=int, default=256, help="images to fit and to rank on")
    parser.add_argument("--judge", type=int, default=64, help="images that damage is measured on")
    parser.add_argument("--scored", type=int, default=1000, help="validation images")
    parser.add_argument("--out", type=Path, default=RESULTS / "peers.json")
    parser.add_argument("--work", type=Path, default=WORK, help="directory in which processes lock their tasks")
    options = parser.parse_args()
    require_real_data()
    job = Job(Recorder(options.out), options)
    if {"one-shot", "recover"} & {*options.parts}:
        for _ in run_tasks(options.work, job.tasks(), lambda _: time.sleep(10)):
            pass
    if "speed" in options.parts:
        measure_speed(job)


if __name__ == "__main__":
    main()
