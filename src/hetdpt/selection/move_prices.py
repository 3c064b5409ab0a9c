"""What plans cost that are made of all kinds of moves: counted, and timed on this device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

from torch import nn

from hetdpt.core.modules import clone
from hetdpt.core.plan import FewerFeatures, Plan, Removal, Styled
from hetdpt.core.progress import StageProgress
from hetdpt.measurement.costs import Costs
from hetdpt.measurement.speed import Part, latency_table
from hetdpt.reduce.width.features import cut_features_, feature_counts
from hetdpt.results import Price, Prices
from hetdpt.selection.moves import MOVES
from hetdpt.selection.predictor.pricing import measure_prices
from hetdpt.surgery.arrange import with_all_tokens
from hetdpt.surgery.merge import merge_
from hetdpt.surgery.record import InputSize, require_record
from hetdpt.surgery.remove import ready, without

FEATURES = "activation features"  # the name of the variant with half of the features


@dataclass(frozen=True)
class MovePrices:
    """The costs of layers and tails, and beside them those of styles and of hidden features."""

    layers: Prices
    styles: tuple[tuple[str, int, str, Price], ...] = ()
    """(kind, block, style, what it saves), for styles other than that of ``layers``."""
    features: tuple[tuple[int, int, Price], ...] = ()
    """(block, how many hidden features it has, what one of them costs)."""

    @property
    def dense(self) -> Price:
        """Of the model as it is."""
        return self.layers.dense

    def of(self, plan: Plan) -> Price:
        """Return the cost of the model that ``plan`` leaves."""
        stop = self.layers.stop(plan) if self.layers.kept else len(self.layers.attention)
        left = self.layers.of(replace(plan, features=(), site_styles=()))
        known = {row[:3]: row[3] for row in self.styles}
        for kind, block, style in plan.site_styles:
            saved, usual = known.get((kind, block, style)), getattr(self.layers, kind)[block]
            if block < stop and saved is not None and usual is not None:
                left = left - (saved - usual)
        sizes = {block: (count, price) for block, count, price in self.features}
        for block, count in plan.features:
            first, price = sizes.get(block, (count, Price(0, 0, 0.0)))
            fewer = price.times(first - count)
            left = left - (fewer if block < stop else Price(0.0, fewer.params, 0.0))
        return left

    def ms(self, plan: Plan | None = None) -> float:
        """Return the milliseconds of a batch of the model that ``plan`` leaves; without one of the dense model."""
        found = self.dense.ms if plan is None else self.of(plan).ms
        assert found is not None, "times were measured"
        return found


def measure_move_prices(
    model: nn.Module,
    *,
    removal: Removal = "calibrated",
    input_size: InputSize | None = None,
    batch: int | None = None,
    progress: StageProgress | None = None,
) -> MovePrices:
    """Return the costs of ``model`` and of all its plans, timed on its device."""
    base = ready(model, removal, input_size)
    whole, size = with_all_tokens(base), require_record(base).survey.input_size
    models = _variants(whole)
    saved = {part: _price(whole, size) - _price(one, size) for part, one in models.items()}
    tell = partial(progress, "timing layers") if progress else None
    table = latency_table(base, size, batch=batch, removal=removal, variants=models, progress=tell)
    layers = measure_prices(model, removal=removal, input_size=size, latency=table, progress=progress)
    timed = {part: replace(saved[part], ms=time.value) for part, time in table.variants.items()}
    styles, features = list[tuple[str, int, str, Price]](), list[tuple[int, int, Price]]()
    counts = feature_counts(whole)
    for (name, block), price in timed.items():
        if name == FEATURES:
            features.append((block, counts[block], price.times(1 / (counts[block] // 2))))
        else:
            kind, style = name.split(" ")
            styles.append((kind, block, style, price))
    return MovePrices(layers, tuple(styles), tuple(features))


def _variants(whole: nn.Module) -> Mapping[Part, nn.Module]:
    """Return copies of a model with each style that is not its own, and with half of the features of each block."""
    own, found = require_record(whole).plan, dict[Part, nn.Module]()
    for move in (move for kind in ("attention", "activation") for move in MOVES[kind].offers(whole, whole)):
        assert isinstance(move, Styled)
        if own.style_of(move.site).name != move.style:
            part = f"{move.site.kind} {move.style}", move.site.block
            found[part] = merge_(without(whole, move.site, move.style))
    for block, count in feature_counts(whole).items():
        found[FEATURES, block] = cut_features_(clone(whole), FewerFeatures(block, count - count // 2))
    return found


def _price(model: nn.Module, size: InputSize) -> Price:
    costs = Costs.of(model, size)
    return Price(costs.macs, costs.params)
