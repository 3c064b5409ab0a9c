"""The prices of a model's layers, counted and timed on this device; and budgets split between its kinds of layers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

from torch import nn

from hetdpt.core.plan import KINDS, Removal, Site
from hetdpt.core.progress import StageProgress
from hetdpt.measurement.costs import Costs
from hetdpt.measurement.speed import latency_table
from hetdpt.results import Price, Prices
from hetdpt.selection.predictor.allocate import Allocation, allocate
from hetdpt.selection.predictor.polynomial import Row, fit_predictor
from hetdpt.surgery.merge import merge_
from hetdpt.surgery.record import InputSize, require_record
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
    latency: bool = True,
    progress: StageProgress | None = None,
) -> Prices:
    """Return the costs of ``model`` and what removing each of its layers saves, merged; timed if ``latency``.

    >>> import timm
    >>> model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, num_classes=10)
    >>> prices = measure_prices(model, latency=False)
    >>> len(prices.attention), prices.attention[0].params  # the attention, and the norm before it
    (2, 148608)
    """
    base = ready(model, removal, input_size)
    size, offered = require_record(base).survey.input_size, removable(base)
    dense, saved = Costs.of(base, size), dict[Site, Price]()
    for done, site in enumerate(offered, 1):
        left = Costs.of(merge_(without(base, site)), size)
        saved[site] = Price(dense.macs - left.macs, dense.params - left.params)
        if progress:
            progress("counting the costs of layers", done, len(offered))
    whole = Price(dense.macs, dense.params)
    measured = ""
    if latency:
        move = partial(progress, "timing layers") if progress else None
        table = latency_table(model, size, batch=batch, removal=removal, progress=move)
        times = {saving.site: saving.saved.value for saving in table.savings}
        saved = {site: Price(price.macs, price.params, times[site]) for site, price in saved.items()}
        whole = Price(dense.macs, dense.params, table.dense.value)
        measured = f"{table.dense.device}, {table.dense.dtype}, batch {table.dense.batch}"
    attention, activation = (tuple(p for site, p in saved.items() if site.kind == kind) for kind in KINDS)
    return Prices(whole, attention, activation, measured)
