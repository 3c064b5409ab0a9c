"""Throughput and latency on the user's own device. Speedups are ratios of interleaved runs, never of two sessions."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from hetdpt.adapters.models import input_size_of
from hetdpt.core.errors import MeasureError
from hetdpt.core.gates import PatchMap
from hetdpt.core.host import processor
from hetdpt.core.modules import evaluating, random_images
from hetdpt.core.plan import Measurement, Plan, Removal, Site
from hetdpt.core.progress import StepProgress
from hetdpt.measurement.kept_blocks import able_to_stop, stopped_at, trimmed
from hetdpt.results import KEPT, Machine, Price, Prices, Ratio
from hetdpt.surgery.arrange import kept_of, with_all_tokens
from hetdpt.surgery.merge import merge_
from hetdpt.surgery.record import InputSize, require_record, survey_of
from hetdpt.surgery.remove import ready, removable, without

MIN_ROUNDS = 5
ENOUGH = 512  # tokens fill the kernels of a CPU; a GPU needs all
Part = tuple[str, int]
"""One of ``results.PARTS``, and a block."""
DENSE: Part = "dense", 0
WHOLE = "whole"  # a block as it is
Key = TypeVar("Key")


@dataclass(frozen=True)
class Rounds:
    """How often each call runs: ``warmup`` rounds untimed, then ``runs``, or fewer after ``seconds``."""

    runs: int
    warmup: int
    seconds: float | None = None
    settle: bool = False
    """Whether each call first runs once untimed: threads of another runtime keep spinning for a while after a call."""


@dataclass(frozen=True)
class ThroughputComparison:
    """Interleaved timings of several models; speedups are relative to the first one."""

    throughput: dict[str, Measurement]
    speedup: dict[str, Ratio]


@dataclass(frozen=True)
class Saving:
    """What removing one site saves."""

    site: Site
    saved: Measurement


@dataclass(frozen=True)
class LatencyTable:
    """Time of one batch, what removing each site saves, and the time by kind of layer (paper, Fig. 2b)."""

    dense: Measurement
    savings: list[Saving]
    """What each site saves, one at a time, of a model that is trimmed if it can be."""
    breakdown: dict[str, Measurement]
    prices: Prices
    """The times that those of plans are composed of; MACs and parameters are not counted."""
    variants: dict[Part, Measurement] = field(default_factory=dict)
    """What each variant that was asked for saves."""
    blocks: dict[int, Measurement] = field(default_factory=dict)
    """Time of each block that is one module."""


def measure_throughput(
    models: dict[str, nn.Module],
    input_size: InputSize | None = None,
    *,
    batch: int | None = None,
    runs: int = 100,
    warmup: int = 10,
    seconds: float | None = None,
    progress: StepProgress | None = None,
) -> ThroughputComparison:
    """Return images per second of each model, and how much faster than the first the others are.

    The models take turns on one fixed batch, on the device and in the dtype they are in. ``batch`` defaults to 256 on
    a GPU and 8 on a CPU. ``seconds`` ends the measurement early, but not before five rounds.
    """
    first = next(iter(models.values()), None)
    if first is None:
        raise MeasureError("measure_throughput needs at least one model, such as {'dense': model}")
    images = _images(first, input_size, batch)
    calls = {name: partial(model, images) for name, model in models.items()}
    with evaluating(*models.values()):
        times = _interleave(calls, images.device, Rounds(runs, warmup, seconds), progress)
    speeds = {name: len(images) / row for name, row in times.items()}
    baseline = next(iter(times.values()))
    return ThroughputComparison(
        {name: _measurement("throughput", speed, "img/s", images) for name, speed in speeds.items()},
        {name: _ratio(baseline / row) for name, row in times.items()},
    )


def latency_table(
    model: nn.Module,
    input_size: InputSize | None = None,
    *,
    batch: int | None = None,
    runs: int = 20,
    warmup: int = 3,
    removal: Removal = "plain",
    variants: Mapping[Part, nn.Module] | None = None,
    progress: StepProgress | None = None,
) -> LatencyTable:
    """Return what removing each site saves on this device, in milliseconds per batch, one site at a time.

    Every variant is the real pruned and merged block on the input it gets in the model, also where it computes only
    the tokens that the head reads. All variants of all blocks take turns, and a saving is the median difference within
    a round. Sites that ``removal`` cannot remove (gated FFNs under ``plain``) are left out. A pruned model keeps the
    removal it was pruned with. ``variants`` are other copies of the model; a name begins with the kind of layer that
    differs, in one block.
    """
    images = _images(model, input_size, batch)
    known = ready(model, removal, input_size)
    whole = with_all_tokens(known)
    with evaluating(model):
        blocks = _BlockTimes(whole, trimmed(whole), images, variants or {})
        calls: dict[Part, Callable[[], object]] = {DENSE: partial(whole, images), **blocks.calls()}
        times = _interleave(calls, images.device, Rounds(runs, warmup), progress)
        breakdown = _breakdown({"dense": model}, {"dense": _kinds(known)}, images, runs)["dense"]
    parts = blocks.saved(times)
    dense = _measurement("latency", 1e3 * times[DENSE], "ms", images)
    prices = _prices(dense, parts, whole)
    asked = {part: parts[part] for part in variants or {} if part in parts}
    return LatencyTable(
        dense, _savings(prices, parts, removable(whole)), breakdown, prices, asked, blocks.whole_blocks(times)
    )


def latency_breakdown(
    models: dict[str, nn.Module], input_size: InputSize | None = None, *, batch: int | None = None, runs: int = 20
) -> dict[str, dict[str, Measurement]]:
    """Return the time of one batch by kind of layer in each model, in milliseconds; the models take turns."""
    images = _images(next(iter(models.values())), input_size, batch)
    kinds = {name: _kinds(model) for name, model in models.items()}
    with evaluating(*models.values()):
        return _breakdown(models, kinds, images, runs)


def measure_hidden_sizes(
    model: nn.Module, path: str, sizes: Sequence[int], input_size: InputSize | None = None, *, batch: int | None = None
) -> dict[int, float]:
    """Return the milliseconds of two linear layers D -> h -> D for each h in ``sizes``, which take turns for a second.

    They get what the layer at ``path`` gets; on a CPU some of these tokens are enough. The time is that of the fastest
    round, which other processes disturb least.
    """
    images = _images(model, input_size, batch)
    with evaluating(model):
        [given] = _inputs_of(model, [path], images)[path][0]
    tokens = given.flatten(0, -2)  # (B N, D)
    tokens = tokens[:ENOUGH] if images.device.type == "cpu" else tokens
    like = {"device": tokens.device, "dtype": tokens.dtype}
    pairs = {
        h: nn.Sequential(nn.Linear(tokens.shape[1], h, **like), nn.Linear(h, tokens.shape[1], **like)) for h in sizes
    }
    calls = {h: partial(pair, tokens) for h, pair in pairs.items()}
    times = _interleave(calls, tokens.device, Rounds(runs=100, warmup=3, seconds=1.0))
    return {h: 1e3 * float(found.min()) for h, found in times.items()}


class _BlockTimes:
    """The blocks of a model, each alone, with and without its layers and patches, and what these variants save."""

    def __init__(self, whole: nn.Module, small: nn.Module, images: Tensor, variants: Mapping[Part, nn.Module]) -> None:
        self.whole, self.small, self.images, self.variants = whole, small, images, variants
        self.able = {path: block for block, path in able_to_stop(small).items()}
        self.owners: dict[str, list[Site]] = {path: [] for path in self.able}
        """The sites that the model's removal style can remove, by the module that contains their branch."""
        offered = removable(whole)
        for handle in survey_of(whole).handles:
            if handle.site in offered:
                self.owners.setdefault(handle.owner, []).append(handle.site)
        self.inputs = _inputs_of(whole, self.owners, images)
        self.before: dict[Part, Part] = {}
        """What each variant is compared with."""

    def calls(self) -> dict[Part, Callable[[], object]]:
        """Return the variants of all blocks as calls."""
        calls = dict[Part, Callable[[], object]]()
        for number, (owner, sites) in enumerate(self.owners.items()):
            models: dict[Part, nn.Module] = {(WHOLE, number): self.whole}
            models |= {(site.kind, site.block): merge_(without(self.whole, site)) for site in sites}
            layers = {(site.kind, site.block) for site in sites}
            models |= {part: model for part, model in self.variants.items() if (_kind_of(part), part[1]) in layers}
            self.before |= dict.fromkeys(models, (WHOLE, number))
            if owner in self.able:
                block = self.able[owner]
                stopped = {(name, block): model for name, model in stopped_at(self.small, block).items()}
                self.before |= {part: ("patches", block) if part[0] in KEPT else (WHOLE, number) for part in stopped}
                models |= stopped
            calls |= {part: self._call(model.eval(), owner) for part, model in models.items()}
        return calls

    def saved(self, times: Mapping[Part, np.ndarray]) -> dict[Part, Measurement]:
        """Return what each variant saves, given the seconds of the calls."""
        return {
            part: _measurement("saved", 1e3 * (times[before] - times[part]), "ms", self.images)
            for part, before in self.before.items()
            if part != before
        }

    def whole_blocks(self, times: Mapping[Part, np.ndarray]) -> dict[int, Measurement]:
        """Return the time of each block that is one module, given the seconds of the calls."""
        found = dict[int, list[int]]()
        for number, sites in enumerate(self.owners.values()):
            for block in {site.block for site in sites}:
                found.setdefault(block, []).append(number)
        return {
            block: _measurement("latency", 1e3 * times[WHOLE, numbers[0]], "ms", self.images)
            for block, numbers in found.items()
            if len(numbers) == 1
        }

    def _call(self, model: nn.Module, owner: str) -> Callable[[], object]:
        args, kwargs = self.inputs[owner]
        record = require_record(model)
        if record.is_trimmed:
            stop, kept = kept_of(record)
            if stop < self.able[owner]:  # it gets no patches
                args, kwargs = tree_map(lambda value: _first(value, kept), (args, kwargs))
        return partial(model.get_submodule(owner), *args, **kwargs)


def _kind_of(part: Part) -> str:
    """Return the kind of layer that a variant changes, with which its name begins."""
    return part[0].partition(" ")[0]


def _first(value: Any, kept: int) -> Any:
    """Return the first tokens, if these are tokens (B, N, D)."""
    return value[:, :kept] if isinstance(value, Tensor) and value.ndim == 3 else value


def _prices(dense: Measurement, parts: Mapping[Part, Measurement], whole: nn.Module) -> Prices:
    record = require_record(whole)
    known = {part: Price(0, 0, saved.value) for part, saved in parts.items()}
    with_attention = [handle.site.block for handle in record.left if handle.site.kind == "attention"]
    # maps take as long as exact keys and values
    known |= {(name, block): Price(0, 0, 0.0) for name in ("fitted", "unmerged") for block in with_attention}
    measured = f"{dense.device}, {dense.dtype}, batch {dense.batch}"
    return Prices.composed(Price(0, 0, dense.value), known, record.survey.anatomy.blocks, measured=measured)


def _savings(prices: Prices, parts: Mapping[Part, Measurement], offered: Iterable[Site]) -> list[Saving]:
    """Return what each site saves by itself, in order of execution; its spread is that while patches are updated."""
    whole = prices.of(Plan()).ms or 0.0
    left = {site: prices.of(Plan().plus(site)).ms or 0.0 for site in offered}
    return [Saving(site, replace(parts[site.kind, site.block], value=whole - ms)) for site, ms in left.items()]


@torch.inference_mode()
def _inputs_of(model: nn.Module, paths: Iterable[str], images: Tensor) -> dict[str, tuple[Any, Any]]:
    """Return the positional and keyword arguments that the modules at ``paths`` get in one forward pass."""
    inputs: dict[str, tuple[Any, Any]] = {}
    with ExitStack() as stack:
        for path in paths:

            def keep(_: nn.Module, args: Any, kwargs: Any, path: str = path) -> None:
                inputs[path] = args, kwargs

            stack.enter_context(model.get_submodule(path).register_forward_pre_hook(keep, with_kwargs=True))
        model(images)
    return inputs


def _images(model: nn.Module, input_size: InputSize | None, batch: int | None) -> Tensor:
    weight = next(model.parameters())
    if weight.is_meta:
        raise MeasureError("this model has no weights (its parameters are on the meta device); load them first")
    return random_images(model, input_size or input_size_of(model), batch or (8 if weight.is_cpu else 256))


def machine_of(device: torch.device) -> Machine:
    """Return the machine that ``device`` is part of.

    >>> machine_of(torch.device("cpu")).device
    'cpu'
    """
    is_gpu = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if is_gpu else processor()
    return Machine(device.type, name, torch.get_num_threads())


def synchronize(device: torch.device) -> None:
    """Wait until ``device`` has finished."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


@torch.inference_mode()
def _interleave(
    calls: Mapping[Key, Callable[[], object]],
    device: torch.device,
    rounds: Rounds,
    progress: StepProgress | None = None,
) -> dict[Key, np.ndarray]:
    """Return the seconds of each call in each round; every call runs once per round, in an order that rotates."""
    names = list(calls)
    times: list[dict[Key, float]] = []
    deadline = float("inf")
    for turn in range(-rounds.warmup, max(rounds.runs, 1)):
        if turn == 0 and rounds.seconds is not None:
            deadline = time.perf_counter() + rounds.seconds
        if turn >= MIN_ROUNDS and time.perf_counter() > deadline:
            break
        shift = turn % len(names)
        row = {name: _time_once(calls[name], device, rounds.settle) for name in names[shift:] + names[:shift]}
        if turn >= 0:
            times.append(row)
        if progress:
            progress(turn + rounds.warmup + 1, rounds.runs + rounds.warmup)
    return {name: np.array([row[name] for row in times]) for name in names}


def _time_once(call: Callable[[], object], device: torch.device, settle: bool = False) -> float:
    if settle:
        call()
    synchronize(device)
    start = time.perf_counter()
    call()
    synchronize(device)
    return time.perf_counter() - start


def _measurement(name: str, values: np.ndarray, unit: str, images: Tensor) -> Measurement:
    low, middle, high = np.percentile(values, (25, 50, 75))
    device = images.device.type
    dtype = str(images.dtype).removeprefix("torch.")
    return Measurement(name, float(middle), unit, device, dtype, len(images), float(high - low) / 2, len(values))


def _ratio(ratios: np.ndarray, draws: int = 1000) -> Ratio:
    """Return the median of ``ratios`` with a 95 % bootstrap interval over rounds."""
    generator = np.random.default_rng(0)
    medians = np.median(generator.choice(ratios, (draws, len(ratios))), axis=1)
    low, high = np.percentile(medians, (2.5, 97.5))
    return Ratio(float(np.median(ratios)), float(low), float(high))


def _kinds(model: nn.Module) -> dict[str, str]:
    """Return the kind of layer of the modules that the breakdown distinguishes, by path."""
    kinds = {path: "FFN linear" for path, module in model.named_modules() if isinstance(module, PatchMap)}
    found = survey_of(model)
    for handle in found.handles:
        if handle.ffn:
            kinds |= {handle.ffn.first: "FFN linear", handle.ffn.second: "FFN linear"}
            kinds[handle.ffn.activation] = "activation"
        else:
            kinds[handle.site.path] = "attention" if handle.site.kind == "attention" else "gated FFN"
    for path, module in model.named_modules():
        is_part = any(path.startswith(f"{other}.") for other in kinds)
        if "Norm" in type(module).__name__ and not is_part:
            kinds[path] = "norm"
    return kinds


@torch.inference_mode()
def _breakdown(
    models: dict[str, nn.Module], kinds: dict[str, dict[str, str]], images: Tensor, runs: int
) -> dict[str, dict[str, Measurement]]:
    """Return the time of one batch by kind of layer, for models that take turns; the rest is ``other``."""
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in models}
    for name, model in [pair for _ in range(runs) for pair in models.items()]:
        spent = dict.fromkeys(kinds[name].values(), 0.0)
        with _timed(model, kinds[name], spent, images.device):
            total = _time_once(partial(model, images), images.device)
        rows[name].append({**spent, "other": max(total - sum(spent.values()), 0.0)})
    return {
        name: {kind: _measurement(kind, np.array([1e3 * row[kind] for row in some]), "ms", images) for kind in some[0]}
        for name, some in rows.items()
    }


@contextmanager
def _timed(model: nn.Module, kinds: dict[str, str], spent: dict[str, float], device: torch.device) -> Iterator[None]:
    with ExitStack() as stack:
        for path, kind in kinds.items():
            module = model.get_submodule(path)
            started: list[float] = []

            def before(*_: object, started: list[float] = started) -> None:
                synchronize(device)
                started.append(time.perf_counter())

            def after(*_: object, started: list[float] = started, kind: str = kind) -> None:
                synchronize(device)
                spent[kind] += time.perf_counter() - started.pop()

            stack.enter_context(module.register_forward_pre_hook(before))
            stack.enter_context(module.register_forward_hook(after))
        yield
