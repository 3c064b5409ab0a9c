"""The same work done in a naive way, and how long or how much memory either takes; ``effort.py`` writes the results.

Every comparison is of interleaved runs and looks at what comes out too, where that has to be the same.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from evidence import interval
from pruning_tasks import Call, Numbers, Setting, peak, searched, settled_peak, spread_plan, trainer_of
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder

import hetdpt
from hetdpt.adapters.models import input_size_of
from hetdpt.adapters.preprocessing import preprocessing_of
from hetdpt.core.fold import Moments, exact, fit_linear
from hetdpt.core.modules import clone
from hetdpt.core.plan import Plan, Site
from hetdpt.data.augmentation import Augmentation, evaluation_transform
from hetdpt.measurement.speed import Rounds, _interleave, _ratio
from hetdpt.selection.entropy import Spread
from hetdpt.surgery.calibrate import FLOOR, FOLDS, fit_sites
from hetdpt.surgery.remove import ready
from hetdpt.training.config import TrainConfig
from hetdpt.training.recover import RecoverConfig
from hetdpt.training.trainer import Progress, Trainer

CPU = torch.device("cpu")
WARM_UP = 2
Values = dict[str, Any]
Line = tuple[Tensor, Tensor]
"""W and b of a linear layer."""


def in_turns(calls: Mapping[str, Call], rounds: int, warmup: int = 0) -> dict[str, Any]:
    """Return the seconds of each call in each round, an array for each; they may train."""

    def free(call: Call) -> object:
        with torch.inference_mode(False):
            return call()

    return _interleave({name: partial(free, call) for name, call in calls.items()}, CPU, Rounds(rounds, warmup))


# the scan for transfer entropy


@torch.no_grad()
def full_passes(model: nn.Module, batches: Iterable[Tensor]) -> dict[Site, float]:
    """Return what ``transfer_entropy`` does, with a pruned model for each site and nothing shared between them."""
    known = hetdpt.prune_(clone(model), hetdpt.Plan(), input_size_of(model))
    variants: dict[Site | None, nn.Module] = {None: known}
    for site in hetdpt.sites(known):
        variants[site] = hetdpt.prune_(clone(known), hetdpt.Plan(**{site.kind: (site.block,)}))
    entropies = {}
    for site, variant in variants.items():
        spread = Spread()
        for images in batches:
            spread.add(variant(images))
        entropies[site] = spread.entropy
    dense = entropies.pop(None)
    return {site: abs(dense - entropy) for site, entropy in entropies.items() if site is not None}


def compare_scans(setting: Setting, rounds: int) -> Values:
    """Return how many times faster the scan is than a full pass for each site, and how far their values are apart."""
    model = setting.network()
    batches = list(setting.batches(model))
    found: dict[str, dict[Site, float]] = {}

    def run(name: str, way: Callable[..., dict[Site, float]]) -> None:
        found[name] = way(model, batches)

    calls = {"ours": partial(run, "ours", hetdpt.transfer_entropy), "naive": partial(run, "naive", full_passes)}
    times = in_turns(calls, rounds)
    return {
        "speedup": interval(_ratio(times["naive"] / times["ours"])),
        "seconds": statistics.median(times["ours"]),
        "naive_seconds": statistics.median(times["naive"]),
        "largest_difference": largest_difference(found["ours"], found["naive"]),
        "sites": len(found["ours"]),
        "rounds": rounds,
    }


def largest_difference(ours: Mapping[Site, float], naive: Mapping[Site, float]) -> float:
    """Return by how much a value differs at most, relative to the naive one.

    >>> site = Site("attention", 0, "blocks.0.attn")
    >>> largest_difference({site: 3.0}, {site: 4.0})
    0.25
    """
    if ours.keys() != naive.keys():
        raise ValueError(f"the scan has {len(ours)} sites, the full passes have {len(naive)}")
    return max(abs(value - ours[site]) / max(abs(value), 1e-300) for site, value in naive.items())


# the fit of a replacement


def fit_in_a_stream(model: nn.Module, site: Site, batches: Iterable[Tensor]) -> Line:
    """Return the map that replaces an FFN, as hetdpt fits it."""
    [fitted] = fit_sites(ready(model, "calibrated"), {site: ("calibrated",)}, batches).values()
    weight, bias = fitted.values
    return weight, bias


@torch.no_grad()
def fit_from_all(model: nn.Module, site: Site, batches: Iterable[Tensor]) -> Line:
    """Return the same map, from the inputs and outputs of all tokens kept until the last image has been seen."""
    kept: list[tuple[Tensor, Tensor]] = []
    ffn = model.get_submodule(site.path.rpartition(".")[0])
    hook = ffn.register_forward_hook(lambda _, args, output: kept.append((args[0], output)))
    for images in batches:
        model(images)
    hook.remove()
    x, y = (torch.cat([pair[side] for pair in kept]) for side in (0, 1))  # (images, tokens, D)
    size = exact(y).norm(dim=-1)
    weight = size.clamp(min=FLOOR * size[0].median().item()).reciprocal()
    folds = [Moments(x.shape[-1], y.shape[-1]) for _ in range(FOLDS)]
    for number, fold in enumerate(folds):
        x_part, y_part, w_part = (values[number::FOLDS].flatten(0, 1) for values in (x, y, weight))
        fold.add(x_part, y_part, w_part)
    line = fit_linear(folds)
    return line.weight, line.bias


FITS = {"ours": fit_in_a_stream, "naive": fit_from_all}


def memory_of_fit(way: str, setting: Setting) -> tuple[Numbers, Line]:
    """Return the seconds and the peak of memory of one fit, and the map; to be measured in a process of its own."""
    before = settled_peak()
    model = setting.network()
    sites = [site for site in hetdpt.sites(model) if site.kind == "activation"]
    begun = time.perf_counter()
    line = FITS[way](model, sites[len(sites) // 2], setting.batches(model))
    return {"seconds": time.perf_counter() - begun, "peak_bytes": peak() - before}, line


def apart_by(one: Line, other: Line) -> float:
    """Return || W - W' || / || W' ||, the biases as one more column."""
    mine, theirs = (torch.cat([weight, bias[:, None]], 1) for weight, bias in (one, other))
    return ((mine - theirs).norm() / theirs.norm()).item()


# training


def on_one_batch(trainer: Trainer) -> Call:
    """Return a call that changes the weights by one batch, the same each time, which is read before."""
    batch = next(trainer.batches.epoch(0))

    def update() -> None:
        if trainer.companion is not None:
            trainer.companion.before_update(0, 1 << 30)
        trainer.update([batch])

    return update


def compare_gates(setting: Setting, rounds: int) -> dict[str, Values]:
    """Return how much of the speed of plain training is left with gates on all layers, without and with exploring."""
    trainers = {"plain": trainer_of(setting, setting.network())}
    for name, explores in {"gated": False, "gated, exploring": True}.items():
        student, search = searched(setting, explores)
        trainers[name] = trainer_of(setting, student, companion=search)
    times = in_turns({name: on_one_batch(trainer) for name, trainer in trainers.items()}, rounds, WARM_UP)
    plain = times.pop("plain")
    return {
        name: {
            "efficiency": interval(_ratio(plain / row)),
            "milliseconds": 1e3 * statistics.median(row),
            "plain_milliseconds": 1e3 * statistics.median(plain),
            "rounds": rounds,
        }
        for name, row in times.items()
    }


def compare_students(setting: Setting, plan: Plan | None, rounds: int) -> dict[str, Values]:
    """Return how much faster the updates of pruned models are than those of the dense one, and of what comes with it.

    Without a teacher against the dense model, with the part of the MAC ratio that this is; with one against the way in
    which two layers stay two and the teacher is asked every time.
    """
    models = {name: pruned(setting, plan, name) for name in ("dense", "two layers", "merged")}
    macs = {name: hetdpt.count_macs(model, input_size_of(model)) for name, model in models.items()}
    trainers = {name: trainer_of(setting, model) for name, model in models.items()}
    for name in ("two layers", "merged"):
        for is_cached in (False, True):
            way = f"{name}, teacher {'cached' if is_cached else 'asked'}"
            student = pruned(setting, plan, name)
            trainers[way] = trainer_of(setting, student, setting.network(), is_cached=is_cached)
    times = in_turns({name: on_one_batch(trainer) for name, trainer in trainers.items()}, rounds, WARM_UP)
    found: dict[str, Values] = {}
    for name, row in times.items():
        against = "two layers, teacher asked" if "teacher" in name else "dense"
        speedup = interval(_ratio(times[against] / row))
        found[name] = {"speedup": speedup, "against": against, "throughput": setting.batch / statistics.median(row)}
        if name in macs:
            ratio = macs["dense"] / macs[name]
            found[name] |= {"mac_ratio": ratio, "efficiency": [value / ratio for value in speedup]}
        found[name] |= {"rounds": rounds}
    return {name: row for name, row in found.items() if name != row["against"]}


def pruned(setting: Setting, plan: Plan | None, name: str) -> nn.Module:
    """Return the model called ``name``: dense, pruned to two layers, or merged; by ``spread_plan`` without a plan."""
    model = setting.network()
    if name != "dense":
        hetdpt.prune_(model, plan or spread_plan(model))
    return hetdpt.merge_(model) if name == "merged" else model


def compare_loops(setting: Setting) -> Values:
    """Return how much of the speed of a bare loop ours has; both read, decode, transform and train in turns."""
    model = setting.network()
    bare = bare_loop(deepcopy(model), setting)
    times: dict[str, list[float]] = {"ours": [], "bare": []}
    last = time.perf_counter()

    def watch(_: Progress) -> None:
        nonlocal last
        times["ours"].append(time.perf_counter() - last)
        begun = time.perf_counter()
        next(bare)
        last = time.perf_counter()
        times["bare"].append(last - begun)
        if len(times["bare"]) == WARM_UP + setting.updates:
            raise EnoughError

    with suppress(EnoughError):
        for _ in trainer_of(setting, model, config=plain_settings(setting), watch=watch).epochs():
            last = time.perf_counter()
    ours, theirs = (np.array(times[name][WARM_UP:]) for name in ("ours", "bare"))
    return {
        "efficiency": interval(_ratio(theirs / ours)),
        "throughput": setting.batch / statistics.median(ours),
        "bare_throughput": setting.batch / statistics.median(theirs),
        "rounds": len(ours),
    }


class EnoughError(Exception):
    """Ends a training of which enough is known."""


def plain_settings(setting: Setting) -> RecoverConfig:
    """Return what a bare loop does: AdamW at a constant rate on views in which chance has no part."""
    training = TrainConfig(
        epochs=1, batch_size=setting.batch, mixup=0.0, cutmix=0.0, smoothing=0.0, ema_decay=0.0, schedule="constant"
    )
    return RecoverConfig(training=training, augmentation=Augmentation.plain())


def bare_loop(model: nn.Module, setting: Setting) -> Iterator[None]:
    """Train as a tutorial would, one update for each time it is asked."""
    images = ImageFolder(str(Path(setting.folder, "train")), evaluation_transform(preprocessing_of(model)))
    loader: DataLoader[tuple[Tensor, Tensor]] = DataLoader(images, setting.batch, shuffle=True, drop_last=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, weight_decay=0.08)
    model.train()
    while True:
        for inputs, labels in loader:
            nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
            yield
