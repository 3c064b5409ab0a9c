"""The paper's plans with tokens that nothing reads left out (``hetdpt.trim_``): what they cost, and how fast they are.

A part of ``paper.py``. Models have two heads, as those of the paper's pruned rows; a ratio is that of the dense model
to another, both counted in full. The dense model is a plan here too: one that removes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from evidence import Recorder, interval
from runtimes import RUNTIMES
from torch import nn

import hetdpt
from hetdpt.core.modules import random_images
from hetdpt.core.plan import Plan
from hetdpt.core.published import PREFIX, published_plans
from hetdpt.measurement.costs import Costs
from hetdpt.measurement.speed import Rounds, _interleave, _ratio

SIZE = (3, 224, 224)
DENSE = "dense"
SIZES = {"DeiT-S": "deit_small", "DeiT-B": "deit_base"}
TIMED = {
    "DeiT-S": (DENSE, "paper/deit_small-6", "paper/deit_small-8"),
    "DeiT-B": (
        *(DENSE, "paper/deit_base-6/attention-only", "paper/deit_base-8"),
        *("paper/deit_base-10", "paper/deit_base-10/te-static"),
    ),
}


class Subject(NamedTuple):
    """A model and what is removed from it."""

    model: str
    """DeiT-S or DeiT-B."""
    plan: str
    """The name of a published plan, or ``dense``."""

    @property
    def key(self) -> dict[str, Any]:
        return self._asdict()

    def build(self, is_trimmed: bool, is_empty: bool = True) -> nn.Module:
        """Return the model, pruned and merged; without values where ``is_empty``, else with random ones."""
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = hetdpt.create(f"{SIZES[self.model]}_distilled_patch16_224", is_empty=is_empty)
        if self.plan != DENSE:
            hetdpt.merge_(hetdpt.prune_(model, published_plans()[self.plan]))
        return (hetdpt.trim_(model) if is_trimmed else model).eval()


def subjects() -> list[Subject]:
    """Return the dense models and all plans that the paper publishes."""
    plans: dict[str, Plan] = published_plans()
    return [
        Subject(model, plan)
        for model, size in SIZES.items()
        for plan in (DENSE, *(name for name in plans if name.startswith(f"{PREFIX}{size}-")))
    ]


def count_trimmed(recorder: Recorder) -> None:
    """Count every plan before and after ``trim_`` that is not in the file yet; no model runs."""
    for one in subjects():
        if not recorder.has(**one.key):
            dense = Costs.of(Subject(one.model, DENSE).build(is_trimmed=False), SIZE).macs
            whole, trimmed = (Costs.of(one.build(is_trimmed), SIZE).macs for is_trimmed in (False, True))
            ratios = {"mac_ratio": round(dense / whole, 5), "trimmed_mac_ratio": round(dense / trimmed, 5)}
            recorder.add(one.key, macs=whole, trimmed_macs=trimmed, **ratios)


def time_trimmed(
    recorder: Recorder, runtime: str, batch: int, plans: Iterable[Subject], rounds: Rounds, folder: Path
) -> None:
    """Time plans of one model with and without ``trim_``, in turns with the dense model, and add a row for each.

    ``folder`` is for files of other runtimes, which are written once.
    """
    wanted = list(plans)
    if all(recorder.has(**one.key, runtime=runtime, batch=batch) for one in wanted):
        return
    named = {one.plan: one for one in (Subject(wanted[0].model, DENSE), *wanted)}
    models = {
        (name, is_trimmed): one.build(is_trimmed, is_empty=False)
        for name, one in named.items()
        for is_trimmed in (False, True)
    }
    macs = {name: Costs.of(model, SIZE).macs for name, model in models.items()}
    images = random_images(models[DENSE, False], SIZE, batch)
    calls = {}
    for (plan, is_trimmed), model in models.items():
        place = folder / wanted[0].model / plan / ("trimmed" if is_trimmed else "whole")
        place.mkdir(parents=True, exist_ok=True)
        run = RUNTIMES[runtime].prepare(model, tuple(images.shape), place)
        calls[plan, is_trimmed] = partial(run, images)
    times = _interleave(calls, images.device, replace(rounds, settle=runtime != "eager"))
    for one in wanted:
        recorder.add({**one.key, "runtime": runtime, "batch": batch}, **row_of(one.plan, times, macs))


def row_of(plan: str, times: Mapping[Any, Any], macs: Mapping[Any, int]) -> dict[str, Any]:
    """Return the speedup of a plan without and with ``trim_``, each with its share of the ratio of MACs."""
    row: dict[str, Any] = {}
    dense = DENSE, False
    for prefix, name in (("", (plan, False)), ("trimmed_", (plan, True))):
        ratio, speedup = macs[dense] / macs[name], interval(_ratio(times[dense] / times[name]))
        row |= {f"{prefix}mac_ratio": round(ratio, 5), f"{prefix}speedup": speedup}
        row[f"{prefix}efficiency"] = [round(value / ratio, 5) for value in speedup]
    row["gain"] = interval(_ratio(times[plan, False] / times[plan, True]))
    return {**row, "mac_gain": round(macs[plan, False] / macs[plan, True], 5), "rounds": len(times[dense])}
