"""Throughput and latency on the user's own device. Speedups are ratios of interleaved runs, never of two sessions."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from hetdpt.adapters.models import evaluating, input_size_of
from hetdpt.adapters.trace import clone
from hetdpt.errors import MeasureError
from hetdpt.plan import Measurement, Plan, Site
from hetdpt.surgery import InputSize, merge_, prune_, record_of, sites, survey_of

Progress = Callable[[int, int], None]
"""Called with (rounds done, rounds in all)."""
MIN_ROUNDS = 5


@dataclass(frozen=True)
class Ratio:
    """How many times faster, with the interval that holds 95 % of the bootstrap medians."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f}x [{self.low:.3f}, {self.high:.3f}]"


@dataclass(frozen=True)
class Comparison:
    """Interleaved timings of several models; speedups are relative to the first one."""

    throughput: dict[str, Measurement]
    speedup: dict[str, Ratio]


@dataclass(frozen=True)
class Saving:
    """What the removal of one site saves."""

    site: Site
    saved: Measurement


@dataclass(frozen=True)
class LatencyTable:
    """Time of one batch, what each site's removal saves of it, and where it goes (paper, Fig. 2b)."""

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
    progress: Progress | None = None,
) -> Comparison:
    """Return images per second of each model, and how much faster than the first the others are.

    The models take turns on one fixed batch, on the device and in the dtype they are in. ``batch`` defaults to 256 on
    a GPU and 8 on a CPU. ``seconds`` ends the measurement early, but not before five rounds.
    """
    first = next(iter(models.values()), None)
    if first is None:
        raise MeasureError("measure_throughput needs at least one model, such as {'dense': model}")
    images = _images(first, input_size, batch)
    times = _interleave(models, images, runs, warmup, seconds, progress)
    speeds = {name: len(images) / row for name, row in times.items()}
    baseline = next(iter(times.values()))
    return Comparison(
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
    removal: str | tuple[str, str] = "plain",
    progress: Progress | None = None,
) -> LatencyTable:
    """Return what the removal of each site saves on this device, in milliseconds per batch, one site at a time.

    Every variant is the real pruned and merged model; all take turns, and a saving is the median difference to the
    dense run of the same round. Sites that ``removal`` cannot remove (gated FFNs under ``plain``) are left out.
    """
    images = _images(model, input_size, batch)
    variants = {site: _without(model, site, removal, input_size) for site in _removable(model, removal, input_size)}
    models = {"dense": model, **{site.path: variant for site, variant in variants.items()}}
    times = _interleave(models, images, runs, warmup, None, progress)
    savings = [
        Saving(site, _measurement("saved", 1e3 * (times["dense"] - times[site.path]), "ms", images))
        for site in variants
    ]
    dense = _measurement("latency", 1e3 * times["dense"], "ms", images)
    return LatencyTable(dense, savings, _breakdown(model, images, runs))


def _removable(model: nn.Module, removal: str | tuple[str, str], input_size: InputSize | None) -> list[Site]:
    style = Plan(removal=removal).styles[1]
    return [site for site in sites(model, input_size) if not site.is_gated or style == "drop"]


def _without(model: nn.Module, site: Site, removal: str | tuple[str, str], input_size: InputSize | None) -> nn.Module:
    record = record_of(model)
    removal = record.plan.removal if record else removal
    plan = Plan(**{site.kind: (site.block,)}, removal=removal)  # type: ignore[arg-type]
    return merge_(prune_(clone(model), plan, input_size))


def _images(model: nn.Module, input_size: InputSize | None, batch: int | None) -> Tensor:
    weight = next(model.parameters())
    if weight.is_meta:
        raise MeasureError("this model has no weights (its parameters are on the meta device); load them first")
    batch = batch or (256 if weight.device.type == "cuda" else 8)
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(batch, *(input_size or input_size_of(model)), generator=generator)
    return images.to(weight)


def synchronize(device: torch.device) -> None:
    """Wait until ``device`` has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


@torch.inference_mode()
def _interleave(
    models: dict[str, nn.Module],
    images: Tensor,
    runs: int,
    warmup: int,
    seconds: float | None,
    progress: Progress | None,
) -> dict[str, np.ndarray]:
    """Return the times in seconds of ``runs`` rounds, in each of which every model runs once, in turning order."""
    names = list(models)
    times: list[dict[str, float]] = []
    with ExitStack() as stack:
        for model in models.values():
            stack.enter_context(evaluating(model))
        deadline = float("inf")
        for turn in range(-warmup, max(runs, 1)):
            if turn == 0 and seconds is not None:
                deadline = time.perf_counter() + seconds
            if turn >= MIN_ROUNDS and time.perf_counter() > deadline:
                break
            shift = turn % len(names)
            round_times = {name: _time_once(models[name], images) for name in names[shift:] + names[:shift]}
            if turn >= 0:
                times.append(round_times)
            if progress:
                progress(turn + warmup + 1, runs + warmup)
    return {name: np.array([row[name] for row in times]) for name in names}


def _time_once(model: nn.Module, images: Tensor) -> float:
    synchronize(images.device)
    start = time.perf_counter()
    model(images)
    synchronize(images.device)
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
    """Return the kind of layer for the modules whose time the breakdown tells apart."""
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
def _breakdown(model: nn.Module, images: Tensor, runs: int) -> dict[str, Measurement]:
    """Return the time of one batch by kind of layer; what no kind claims is ``other``."""
    kinds = _kinds(model)
    rows: list[dict[str, float]] = []
    with evaluating(model):
        for _ in range(runs):
            spent = dict.fromkeys(kinds.values(), 0.0)
            with _timed(model, kinds, spent, images.device):
                total = _time_once(model, images)
            rows.append({**spent, "other": max(total - sum(spent.values()), 0.0)})
    return {kind: _measurement(kind, np.array([1e3 * r[kind] for r in rows]), "ms", images) for kind in rows[0]}


@contextmanager
def _timed(model: nn.Module, kinds: dict[str, str], spent: dict[str, float], device: torch.device) -> Iterator[None]:
    hooks = []
    for path, kind in kinds.items():
        module = model.get_submodule(path)
        started: list[float] = []

        def before(*_: object, started: list[float] = started) -> None:
            synchronize(device)
            started.append(time.perf_counter())

        def after(*_: object, started: list[float] = started, kind: str = kind) -> None:
            synchronize(device)
            spent[kind] += time.perf_counter() - started.pop()

        hooks += [module.register_forward_pre_hook(before), module.register_forward_hook(after)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
