"""The paper's tables, counted and timed here: what its models cost, and how fast they are on this machine.

    python benchmarks/paper.py costs [--quick] [--out benchmarks/results/paper_costs.json]
    python benchmarks/paper.py speed [--quick] [--runs 30] [--batch 8] [--groups NAME ...] [--out FILE]
    python benchmarks/paper.py trim [--quick] [--runs 30] [--seconds S] [--batches 8] [--groups DeiT-S DeiT-B]
                                    [--runtimes eager "ONNX Runtime" OpenVINO] [--plans NAME ...] [--out FILE]

``costs`` counts parameters and MACs of every dense and pruned model of the paper that we know, in every way in which
its row can be read (``paper_models.py``); then it writes beside them, to paper_claims.json, what follows for the
paper's own figures (``paper_claims.py``). It is exact and the same everywhere; no model runs. Values:

    macs                                   linear layers, convolutions and both attention products
    macs_without_products                  the same without the products
    torch_pruning_macs                     by the counter that the paper names, on timm's classes
    torch_pruning_macs_without_products    by the same counter if the class of the attention is one it does not know

``speed`` times the models of a group in turns, with random weights; a speedup is the median ratio to the dense model
within a round, efficiency that over the ratio of MACs (all of them counted). Of DINOv2-giant one block is timed, and
the whole put together from that.

``trim`` counts every plan that the paper publishes before and after ``hetdpt.trim_``, and times some of them both ways
(``paper_trim.py``). ``--quick`` counts DeiT and the giant alone and leaves the claims out; it times
DeiT-S and, without ``trim``, the block.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

# isort: off
import hetdpt  # before timm: cures torchvision where its operators do not load
import timm

# isort: on
import torch
from evidence import RESULTS, Key, Recorder, Results, interval
from paper_claims import claims
from paper_models import GIANT, WHOLE_BRANCHES, Subject, subjects
from paper_trim import TIMED as TIMED_TRIMMED
from paper_trim import Subject as TrimmedSubject
from paper_trim import count_trimmed, time_trimmed
from runtimes import RUNTIMES
from timm.models.swin_transformer import WindowAttention
from timm.models.vision_transformer import Attention
from torch import nn
from torch_pruning.utils import op_counter

from hetdpt.core.plan import Plan
from hetdpt.measurement.costs import Costs
from hetdpt.measurement.speed import Rounds, _interleave, _ratio

GROUPS = ("DeiT-S", "DeiT-B", "DeiT-B-KD", "Swin-S", "Swin-B", "DINOv2-giant")
QUICK_GROUPS = ("DeiT-S", "DINOv2-giant")
QUICK_COSTS = ("DeiT-S", "DeiT-B", "DINOv2-giant")
QUICK_RUNS = 5
WARMUP = 3
# Of a row that can be read in several ways this one is timed; the paper's pruned costs are those of two heads.
TIMED = ("two heads", "layers chosen by us", "published ratios", "products left out", "timm")
TOKENS, WIDTH = 257, 1536  # of the giant at 224 px
GIANT_PLANS = {
    "block": Plan(),
    "no attention": Plan(attention=(0,), removal=WHOLE_BRANCHES),
    "no FFN": Plan(activation=(0,), removal=WHOLE_BRANCHES),
    "neither": Plan(attention=(0,), activation=(0,), removal=WHOLE_BRANCHES),
}
GIANT_ROWS = {  # blocks, attention layers gone, FFNs gone
    "one block without attention": (1, 1, 0),
    "one block without FFN": (1, 0, 1),
    "NOSE (12 layers)": (40, 12, 0),
    "HetDPT (15 layers)": (40, 8, 7),
}


def count(recorder: Recorder, is_quick: bool) -> None:
    """Count every model that is not in the file yet."""
    groups = QUICK_COSTS if is_quick else (None,)
    for subject in (one for group in groups for one in subjects(group)):
        if recorder.has(**subject.key):
            continue
        model = subject.build()
        costs = Costs.of(model, subject.input_size)
        recorder.add(
            subject.key,
            params=costs.params,
            macs=costs.macs,
            macs_without_products=costs.macs_without_attention_products,
            torch_pruning_macs=torch_pruning_macs(model, subject, is_class_known=True),
            torch_pruning_macs_without_products=torch_pruning_macs(model, subject, is_class_known=False),
        )


def torch_pruning_macs(model: nn.Module, subject: Subject, *, is_class_known: bool) -> int:
    """Return the MACs by Torch-Pruning's counter, which the paper names.

    It adds the attention products for the attention of timm's ViT and Swin, told by the class; of any other class of
    attention, a subclass too, it counts the linear layers alone. Norms, biases and activations count a little as well.
    """
    unknown = {} if is_class_known else {Attention, WindowAttention}
    kept = {kind: hook for kind, hook in op_counter.MODULES_MAPPING.items() if kind not in unknown}
    with patch.dict(op_counter.MODULES_MAPPING, kept, clear=True):
        images = torch.zeros(1, *subject.input_size, device="meta")
        return int(op_counter.count_ops_and_params(model, images)[0])


def record_claims(costs: Path) -> None:
    """Write what follows from the costs for the paper's figures, beside them."""
    recorder = Recorder(costs.with_name("paper_claims.json"), forget=True)
    for key, values in claims(Results.read(costs)):
        recorder.add(key, **values)


def timed(group: str) -> Iterator[Subject]:
    """Yield the models of a group that are timed, the dense one first."""
    for subject in subjects(group):
        if subject.variant in TIMED and _is_ours(subject):
            yield subject


def _is_ours(subject: Subject) -> bool:
    """Whether the row is the dense model of its group, or pruned by layers or width; not another dense model."""
    is_first = "Dense" in subject.row or subject.row == subject.group
    return is_first or (bool(subject.plan.attention or subject.width) and subject.row != "HetDPT--KD")


def time_group(recorder: Recorder, group: str, batch: int, runs: int) -> None:
    """Time the models of a group in turns and write a row for each but the dense one."""
    if group == "DINOv2-giant":
        return time_giant(recorder, batch, runs)
    rows = list(timed(group))
    size = rows[0].input_size
    models = {one.row: one.build(is_empty=False) for one in rows}
    macs = {name: Costs.of(model, size).macs for name, model in models.items()}
    found = hetdpt.measure_throughput(models, size, batch=batch, runs=runs, warmup=WARMUP)
    speeds = {name: round(one.value, 3) for name, one in found.throughput.items()}
    dense, *pruned = models
    for name in pruned:
        more = {"throughput": speeds[name], "dense_throughput": speeds[dense], "runs": runs}
        key = {"group": group, "row": name, "batch": batch}
        _add(recorder, key, interval(found.speedup[name]), macs[dense] / macs[name], **more)
    return None


@torch.inference_mode()
def time_giant(recorder: Recorder, batch: int, runs: int) -> None:
    """Time one block of DINOv2-giant with and without its branches, and put the paper's models together from that.

    A model of 40 blocks that has lost a attention layers and f FFNs takes the time of 40 blocks less what a and f save.
    Patches, the last norm and the head are left out.
    """
    models = {name: giant_of_one_block(plan) for name, plan in GIANT_PLANS.items()}
    tokens = torch.randn(batch, TOKENS, WIDTH)
    calls = {name: partial(model.get_submodule("blocks.0"), tokens) for name, model in models.items()}
    times = _interleave(calls, tokens.device, Rounds(runs, WARMUP))
    macs = {name: Costs.of(model, (3, 224, 224)).macs for name, model in models.items()}
    alone = {name: count - macs["neither"] for name, count in macs.items()}  # without patches and head
    for row, (blocks, attention, ffns) in GIANT_ROWS.items():
        speedup = interval(_ratio(blocks * times["block"] / _left(times, blocks, attention, ffns)))
        ratio = blocks * alone["block"] / _left(alone, blocks, attention, ffns)
        _add(recorder, {"group": "DINOv2-giant", "row": row, "batch": batch}, speedup, ratio, runs=runs)


def _left(of: Mapping[str, Any], blocks: int, attention: int, ffns: int) -> Any:
    """Return what is left of the time or the MACs of so many blocks without so many branches of either kind."""
    whole = of["block"]
    return blocks * whole - attention * (whole - of["no attention"]) - ffns * (whole - of["no FFN"])


def giant_of_one_block(plan: Plan) -> nn.Module:
    """Return DINOv2-giant with random weights and one block, from which ``plan`` takes branches."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = timm.create_model(GIANT, img_size=224, num_classes=100, depth=1)
    return hetdpt.merge_(hetdpt.prune_(model, plan)).eval()


def _add(recorder: Recorder, key: Key, speedup: list[float], ratio: float, **more: float) -> None:
    efficiency = [round(value / ratio, 5) for value in speedup]
    recorder.add(key, speedup=speedup, mac_ratio=round(ratio, 5), efficiency=efficiency, **more)


def trim(recorder: Recorder, options: argparse.Namespace, rounds: Rounds) -> None:
    """Count the paper's plans with and without ``trim_``, and time those that were asked for."""
    count_trimmed(recorder)
    groups = options.groups or (["DeiT-S"] if options.quick else TIMED_TRIMMED)
    with TemporaryDirectory() as scratch:
        for group, runtime, batch in product(groups, options.runtimes, options.batches or [options.batch]):
            plans = [plan for plan in TIMED_TRIMMED.get(group, ()) if plan in (options.plans or (plan,))]
            chosen = [TrimmedSubject(group, plan) for plan in plans]
            if chosen:
                time_trimmed(recorder, runtime, batch, chosen, rounds, Path(scratch))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("costs", "speed", "trim"))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--runs", type=int, default=30)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--groups", nargs="+", choices=GROUPS)
    parser.add_argument("--runtimes", nargs="+", default=["eager"], choices=list(RUNTIMES), help="of trim")
    parser.add_argument("--batches", nargs="+", type=int, help="of trim, in place of --batch")
    parser.add_argument("--plans", nargs="+", help="of trim; all that are timed if none is given")
    parser.add_argument("--seconds", type=float, help="of trim: time limit of a measurement, but at least 5 rounds")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    out = options.out or RESULTS / f"paper_{options.part}.json"
    recorder = Recorder(out)
    if options.part == "costs":
        count(recorder, options.quick)
        return None if options.quick else record_claims(out)
    runs = min(options.runs, QUICK_RUNS) if options.quick else options.runs
    if options.part == "trim":
        return trim(recorder, options, Rounds(runs, WARMUP, options.seconds))
    for group in options.groups or (QUICK_GROUPS if options.quick else GROUPS):
        if not Results.read(out).where(group=group, batch=options.batch):
            time_group(recorder, group, options.batch, runs)
    return None


if __name__ == "__main__":
    main()
