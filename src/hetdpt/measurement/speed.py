"""Throughput and latency on the user's own device. Speedups are ratios of interleaved runs, never of two sessions."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hetdpt.adapters.models import input_size_of
from hetdpt.core.errors import MeasureError
from hetdpt.core.host import processor
from hetdpt.core.modules import evaluating, random_images
from hetdpt.core.plan import Measurement, Removal, Site
from hetdpt.core.progress import StepProgress
from hetdpt.results import Machine, Ratio
from hetdpt.surgery.merge import merge_
from hetdpt.surgery.record import InputSize, survey_of
from hetdpt.surgery.remove import ready, removable, without

MIN_ROUNDS = 5


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
    breakdown: dict[str, Measurement]


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
    progress: StepProgress | None = None,
) -> LatencyTable:
    """Return what removing each site saves on this device, in milliseconds per batch, one site at a time.

    Every variant is the real pruned and merged block on the input it gets in the model. The variants of a block take
    turns with the block itself, and a saving is the median difference within a round. Sites that ``removal`` cannot
    remove (gated FFNs under ``plain``) are left out. A pruned model keeps the removal it was pruned with.
    """
    images = _images(model, input_size, batch)
    rounds = Rounds(runs, warmup)
    known = ready(model, removal, input_size)
    with evaluating(model):
        owners = _owners(known)
        inputs = _inputs_of(model, owners, images)
        whole = _interleave({"dense": partial(model, images)}, images.device, rounds)["dense"]
        savings: list[Saving] = []
        for done, (owner, offered) in enumerate(owners.items(), 1):
            savings += _savings(known, owner, offered, inputs[owner], images, rounds)
            if progress:
                progress(done, len(owners))
        breakdown = _breakdown({"dense": model}, {"dense": _kinds(known)}, images, runs)["dense"]
    return LatencyTable(_measurement("latency", 1e3 * whole, "ms", images), savings, breakdown)


def latency_breakdown(
    models: dict[str, nn.Module], input_size: InputSize | None = None, *, batch: int | None = None, runs: int = 20
) -> dict[str, dict[str, Measurement]]:
    """Return the time of one batch by kind of layer in each model, in milliseconds; the models take turns."""
    images = _images(next(iter(models.values())), input_size, batch)
    kinds = {name: _kinds(model) for name, model in models.items()}
    with evaluating(*models.values()):
        return _breakdown(models, kinds, images, runs)


def _savings(
    model: nn.Module, owner: str, offered: list[Site], given: tuple[Any, Any], images: Tensor, rounds: Rounds
) -> list[Saving]:
    """Return what each site saves of its block, all variants of the block taking turns."""
    blocks = {site.path: merge_(without(model, site)).get_submodule(owner) for site in offered}
    blocks["dense"] = model.get_submodule(owner)
    calls = {name: partial(block, *given[0], **given[1]) for name, block in blocks.items()}
    with evaluating(*blocks.values()):
        times = {name: 1e3 * row for name, row in _interleave(calls, images.device, rounds).items()}
    saved = {site: times["dense"] - times[site.path] for site in offered}
    return [Saving(site, _measurement("saved", row, "ms", images)) for site, row in saved.items()]


def _owners(model: nn.Module) -> dict[str, list[Site]]:
    """Return the sites that the model's removal style can remove, by the module that contains their branch."""
    offered, owners = removable(model), dict[str, list[Site]]()
    for handle in survey_of(model).handles:
        if handle.site in offered:
            owners.setdefault(handle.owner, []).append(handle.site)
    return owners


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
    calls: Mapping[str, Callable[[], object]],
    device: torch.device,
    rounds: Rounds,
    progress: StepProgress | None = None,
) -> dict[str, np.ndarray]:
    """Return the seconds of each call in each round; every call runs once per round, in an order that rotates."""
    names = list(calls)
    times: list[dict[str, float]] = []
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
    kinds: dict[str, str] = {}
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
