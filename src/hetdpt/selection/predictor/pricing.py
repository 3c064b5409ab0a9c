"""The prices of a model's layers, counted and timed on this device; and budgets split between its kinds of layers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from hetdpt.core.plan import KINDS, Plan, Removal
from hetdpt.core.progress import StageProgress
from hetdpt.measurement.costs import Costs, count_params
from hetdpt.measurement.kept_blocks import able_to_stop, finished, stopped_at, trimmed, without_later
from hetdpt.measurement.speed import LatencyTable, latency_table
from hetdpt.results import KEPT_FIELDS, KeptBlock, Price, Prices
from hetdpt.selection.predictor.allocate import Allocation, allocate
from hetdpt.selection.predictor.polynomial import Row, fit_predictor
from hetdpt.surgery.arrange import with_all_tokens
from hetdpt.surgery.merge import merge_
from hetdpt.surgery.record import InputSize, layout_of, require_record
from hetdpt.surgery.remove import ready, removable, without


def split_layers(
    model: nn.Module, samples: Sequence[Row], layers: Iterable[int], removal: Removal
) -> dict[int, Allocation]:
    """Return how samples of accuracy split each number of ``layers`` between the kinds of removable layers."""
    base = ready(model, removal)
    blocks, offered = require_record(base).survey.anatomy.blocks, [site.kind for site in removable(base)]
    is_usual = all(offered.count(kind) == blocks for kind in KINDS)  # then allocate needs no prices
    prices = None if is_usual else measure_prices(base, removal=removal, latency=False)
    predictor = fit_predictor(samples, blocks)
    return {count: allocate(predictor, layers=count, prices=prices) for count in layers}


def measure_prices(
    model: nn.Module,
    *,
    removal: Removal = "plain",
    input_size: InputSize | None = None,
    batch: int | None = None,
    latency: bool | LatencyTable = True,
    trim: bool = True,
    progress: StageProgress | None = None,
) -> Prices:
    """Return the costs of ``model`` and all that those of its plans are composed of.

    They are timed if ``latency`` is True, or have the times of that table. Models are priced merged and, unless
    ``trim`` is False, trimmed where that is possible.

    >>> import timm
    >>> model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, num_classes=10)
    >>> prices = measure_prices(model, latency=False)
    >>> prices.attention[0].params  # the attention, and the norm before it
    148608
    """
    base = ready(model, removal, input_size)
    found, record = count_prices(base, progress), require_record(base)
    if latency is True:
        move = partial(progress, "timing layers") if progress else None
        latency = latency_table(base, record.survey.input_size, batch=batch, removal=removal, progress=move)
    if latency:
        found = _joined(found, latency.prices)
    given = replace(found, tail=record.plan.tail, is_trimmed=record.is_trimmed)
    is_whole = not (given.tail or given.is_trimmed)
    whole = None if is_whole else found.dense
    return replace(given, dense=given.of(Plan()), whole=whole, is_trimmed=trim or record.is_trimmed)


def count_prices(model: nn.Module, progress: StageProgress | None = None) -> Prices:
    """Return the prices of ``model`` (one that is ``ready``), counted on a copy without values."""
    small = trimmed(with_all_tokens(model)).to("meta")
    whole, parts = with_all_tokens(small), dict[tuple[str, int], Price]()
    offered, dense = removable(whole), _price(whole)
    for done, site in enumerate(offered, 1):
        parts[site.kind, site.block] = dense - _price(merge_(without(whole, site)))
        if progress:
            progress("counting the costs of layers", done, len(offered))
    alike = dict[Any, dict[str, Price]]()
    for block, path in able_to_stop(small).items():
        key = *(parts.get((kind, block)) for kind in KINDS), count_params(whole.get_submodule(path))
        if key not in alike:  # blocks whose layers cost the same are alike
            alike[key] = _kept_parts(small, whole, block, path)
        parts |= {(name, block): price for name, price in alike[key].items()}
    return Prices.composed(dense, parts, require_record(whole).survey.anatomy.blocks)


def _kept_parts(small: nn.Module, whole: nn.Module, block: int, path: str) -> dict[str, Price]:
    """Return what a block saves that does not update patches, by the names of parts."""
    costs = {name: _price(model, path) for name, model in stopped_at(small, block).items()}
    stopped = costs.pop("patches")
    saved = {"patches": _price(whole, path) - stopped, **{name: stopped - price for name, price in costs.items()}}
    return saved | {name: Price(0, -params) for name, params in _tail_params(small, block).items()}


def _tail_params(small: nn.Module, block: int) -> dict[str, int]:
    """Return the parameters that a tail adds in ``block``, by the names of parts.

    "fitted" are those of the map for its keys and values; the first block is never behind another one in a tail, so it
    gets those of the second. "unmerged" are those that its replaced attention keeps if a tail begins there.
    """
    record = require_record(small)
    blocks, attention = record.survey.anatomy.blocks, [site for site in removable(small) if site.kind == "attention"]
    has_tail = layout_of(record).read is not None and not record.plan.has_stream_gelu

    def added(plan: Plan, tail: int) -> int:
        long = replace(plan, tail=tail if has_tail else 0)
        return count_params(finished(small, long)) - count_params(finished(small, plan))

    found, last = dict[str, int](), max(block, min(1, blocks - 1))
    if any(handle.site.block == block and handle.site.kind == "attention" for handle in record.left):
        found["fitted"] = added(without_later(small, last), blocks - last + 1 if blocks > 1 else 0)
    for site in (site for site in attention if site.block == block):
        found["unmerged"] = added(without_later(small, block).plus(site), blocks - block)
    return found


def _price(model: nn.Module, path: str = "") -> Price:
    costs = Costs.of(model, require_record(model).survey.input_size, path)
    return Price(costs.macs, costs.params)


def _joined(counted: Prices, timed: Prices) -> Prices:
    """Return the same with times."""

    def join(one: Price | None, other: Price | None) -> Any:
        return None if one is None or other is None else replace(one, ms=other.ms)

    def kept(one: KeptBlock | None, other: KeptBlock | None) -> KeptBlock | None:
        if one is None or other is None:
            return None
        return replace(one, **{name: join(getattr(one, name), getattr(other, name)) for name in KEPT_FIELDS})

    attention, activation = (tuple(map(join, getattr(counted, kind), getattr(timed, kind))) for kind in KINDS)
    dense = replace(counted.dense, ms=timed.dense.ms)
    return Prices(dense, attention, activation, timed.measured, tuple(map(kept, counted.kept, timed.kept)))
