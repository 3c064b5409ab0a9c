"""What plans cost that are made of all kinds of moves: counted, and timed on this device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

from torch import nn

from hetdpt.core.errors import ModelError
from hetdpt.core.modules import clone
from hetdpt.core.plan import KINDS, FewerDims, FewerFeatures, FewerHeads, Narrower, Plan, Removal, Styled
from hetdpt.core.progress import StageProgress, StepProgress
from hetdpt.core.styles import STYLES
from hetdpt.core.tokens import Tokens
from hetdpt.measurement.costs import Costs
from hetdpt.measurement.kept_blocks import trimmed
from hetdpt.measurement.speed import LatencyTable, Part, latency_table, measure_hidden_sizes, measure_throughput
from hetdpt.reduce.tokens.reduce import reduce_tokens_
from hetdpt.reduce.width.inner import cut_branch_, dim_counts, feature_counts, head_counts
from hetdpt.results import Price, Prices
from hetdpt.selection.moves import MOVES, STEP, sizes_to_time, step_of
from hetdpt.selection.predictor.pricing import measure_prices
from hetdpt.surgery.arrange import with_all_tokens
from hetdpt.surgery.merge import merge_
from hetdpt.surgery.record import InputSize, layout_of, require_record
from hetdpt.surgery.remove import ready, without

FEATURES = "activation features"  # the name of the variant with half of the features
HEADS = "attention heads"  # with half of the heads
DIMS = "attention head_dims"  # with half of the dimensions of each
TIMED_PART = 24  # of the tokens, merged in every block when the time that matching takes is measured
NOTHING = Price(0.0, 0.0, 0.0)


@dataclass(frozen=True)
class BlockPrice:
    """What one block costs whose tokens may be reduced."""

    attention: Price
    """Of its attention branch."""
    ffn: Price
    """Of the rest."""
    products: float
    """The part of the attention branch that grows with the square of the number of tokens."""


@dataclass(frozen=True)
class TokenPrices:
    """What tokens cost, in a model whose blocks can reduce them."""

    tokens: int
    protected: int
    blocks: tuple[BlockPrice, ...]
    matching: float = 0.0
    """Milliseconds that a block spends on finding and merging tokens."""

    def counts(self, plan: Plan, stop: int) -> list[int]:
        """Return how many tokens each block gets and, last, how many the last one returns."""
        assert plan.tokens is not None
        left, found = [b for b in range(len(self.blocks)) if b not in plan.attention], [self.tokens]
        amounts = dict(zip(left, plan.tokens.amounts(len(left)), strict=True))
        for block in range(len(self.blocks)):
            merged = amounts.get(block, 0) if block < stop else 0
            found.append(found[-1] - min(merged, (found[-1] - self.protected) // 2))
        return found

    def merging(self, plan: Plan, stop: int) -> int:
        """Return how many blocks merge tokens."""
        return sum(one != other for one, other in pairwise(self.counts(plan, stop)))


@dataclass(frozen=True)
class Fewer:
    """What a narrower branch saves in a block that updates all tokens."""

    saved: Price
    part: float
    """Which part of them is removed."""


def _fewer(priced: Iterable[tuple[int, int, Price]], left: Iterable[tuple[int, int]], block: int) -> Fewer | None:
    """Return what is saved in ``block``, of which so many features or heads are ``left``; None if all are."""
    sizes, counts = {one: (count, price) for one, count, price in priced}, dict(left)
    if block not in counts or block not in sizes:
        return None
    count, price = sizes[block]
    removed = count - counts[block]
    return Fewer(price.times(removed), removed / count)


@dataclass(frozen=True)
class MovePrices:
    """The costs of layers and tails, and beside them those of styles, narrower branches and tokens."""

    layers: Prices
    styles: tuple[tuple[str, int, str, Price], ...] = ()
    """(kind, block, style, what it saves), for styles other than that of ``layers``."""
    features: tuple[tuple[int, int, Price], ...] = ()
    """(block, how many hidden features it has, what one of them costs)."""
    heads: tuple[tuple[int, int, Price], ...] = ()
    """(block, how many heads it has, what one of them costs)."""
    head_dims: tuple[tuple[int, int, Price], ...] = ()
    """(block, how many dimensions its heads have, what one of each costs)."""
    tokens: TokenPrices | None = None
    """None if tokens cannot be reduced."""
    step: int = STEP
    """The step of the sizes of FFNs: the smallest whose multiples are as fast as those of larger ones."""

    @property
    def dense(self) -> Price:
        """Of the model as it is."""
        return self.layers.dense

    def of(self, plan: Plan) -> Price:
        """Return the cost of the model that ``plan`` leaves."""
        left = self.layers.of(replace(plan.without_narrower(), site_styles=(), tokens=None))
        for block in {*(block for _, block, _ in plan.site_styles), *(move.block for move in plan.narrower)}:
            attention, ffn = self._saved_beside(plan, block)
            left = left - attention - ffn
        return left if plan.tokens is None else left - self._saved_by_tokens(plan)

    def stop(self, plan: Plan) -> int:
        """Return the first block in which patches are not updated."""
        return self.layers.stop(plan) if self.layers.kept else len(self.layers.attention)

    def _saved_beside(self, plan: Plan, block: int) -> tuple[Price, Price]:
        """Return what the styles, heads and features of a block save in attention and FFN, beside ``layers``."""
        saved, is_before = {"attention": NOTHING, "activation": NOTHING}, block < self.stop(plan)
        known = {row[:3]: row[3] for row in self.styles}
        for kind, _, style in (row for row in plan.site_styles if row[1] == block):
            own, usual = known.get((kind, block, style)), getattr(self.layers, kind)[block]
            if is_before and own is not None and usual is not None:
                saved[kind] = own - usual
        if fewer := _fewer(self.features, plan.features, block):
            saved["activation"] = fewer.saved if is_before else Price(0.0, fewer.saved.params, 0.0)
        if fewer := self._fewer_in_attention(plan, block):
            saved["attention"] = fewer.saved if is_before else self._saved_by_heads(plan, block, fewer)
        return saved["attention"], saved["activation"]

    def _fewer_in_attention(self, plan: Plan, block: int) -> Fewer | None:
        """Return what is saved by fewer heads, and by fewer dimensions of those that are left."""
        heads, dims = _fewer(self.heads, plan.heads, block), _fewer(self.head_dims, plan.head_dims, block)
        if heads is None or dims is None:
            return heads or dims
        left = 1 - heads.part
        return Fewer(heads.saved + dims.saved.times(left), 1 - left * (1 - dims.part))

    def _saved_by_heads(self, plan: Plan, block: int, fewer: Fewer) -> Price:
        """Return what fewer or smaller heads save in a block where patches are not updated."""
        kept = self.layers.kept[block]
        assert kept is not None
        whole = (kept.attention or NOTHING).times(fewer.part)
        is_mapped = block > self.stop(plan) and kept.fitted is not None
        in_map = kept.fitted.times(fewer.part) if is_mapped and kept.fitted else NOTHING
        return Price(whole.macs, fewer.saved.params - in_map.params, whole.ms)

    def _saved_by_tokens(self, plan: Plan) -> Price:
        """Return what reducing tokens saves of the rest of ``plan``; parameters are not saved."""
        assert self.tokens is not None
        stop, saved = self.stop(plan), NOTHING
        counts = [count / self.tokens.tokens for count in self.tokens.counts(plan, stop)]
        for block, price in enumerate(self.tokens.blocks):
            attention, ffn = self._left(plan, block, price, stop)
            products = price.products if block < stop and block not in plan.attention else 0.0
            linear, squared = 1 - counts[block], 1 - counts[block] ** 2
            saved = saved + attention.times((1 - products) * linear + products * squared)
            saved = saved + ffn.times(1 - counts[block + 1])
        matching = self.tokens.merging(plan, stop) * self.tokens.matching
        return Price(saved.macs, 0.0, None if saved.ms is None else saved.ms - matching)

    def _left(self, plan: Plan, block: int, price: BlockPrice, stop: int) -> tuple[Price, Price]:
        """Return what is left of the attention and of the FFN of a block, of all tokens."""
        if block >= stop:  # keys and values are all that is computed of patches
            kept = self.layers.kept[block]
            assert kept is not None
            is_read = block not in plan.attention
            left = price.attention + price.ffn - kept.patches - self._saved_beside(plan, block)[0]
            return left if is_read else NOTHING, NOTHING
        attention, ffn = self._saved_beside(plan, block)
        if block in plan.attention:
            attention = attention + (self.layers.attention[block] or NOTHING)
        if block in plan.activation:
            ffn = ffn + (self.layers.activation[block] or NOTHING)
        return price.attention - attention, price.ffn - ffn

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
    styles, one_of = list[tuple[str, int, str, Price]](), dict[str, list[tuple[int, int, Price]]]()
    counts = {name: found for name, _, found in _narrower(whole)}
    for (name, block), price in timed.items():
        if name in counts:
            count = counts[name][block]
            one_of.setdefault(name, []).append((block, count, price.times(1 / (count // 2))))
        else:
            kind, style = name.split(" ")
            styles.append((kind, block, style, price))
    features, heads, dims = (tuple(one_of.get(name, ())) for name in (FEATURES, HEADS, DIMS))
    found = MovePrices(layers, tuple(styles), features, heads, dims, step=_measure_step(whole, size, batch))
    return _with_tokens(found, whole, size, table, batch, progress)


def _measure_step(whole: nn.Module, size: InputSize, batch: int | None) -> int:
    """Return the step of the sizes of FFNs, timed on the widest one."""
    counts = feature_counts(whole)
    if not counts:
        return STEP
    block = max(counts, key=lambda one: counts[one])
    ffn = next(h.ffn for h in require_record(whole).left if h.ffn and h.site.block == block)
    sizes = sizes_to_time(counts[block])
    times = measure_hidden_sizes(whole, ffn.first, [*sizes.values()], size, batch=batch)
    return step_of({step: times[hidden] / hidden for step, hidden in sizes.items()})


def _variants(whole: nn.Module) -> Mapping[Part, nn.Module]:
    """Return copies of a model with each style that is not its own, and with half the width of a branch."""
    own, found = require_record(whole).plan, dict[Part, nn.Module]()
    for move in (move for kind in KINDS for move in MOVES[kind].offers(whole, whole, STEP)):
        assert isinstance(move, Styled)
        if not _cost_alike(own.style_of(move.site).name, move.style):
            part = f"{move.site.kind} {move.style}", move.site.block
            found[part] = merge_(without(whole, move.site, move.style))
    for name, fewer, counts in _narrower(whole):
        for block, count in counts.items():
            if count > 1:
                found[name, block] = cut_branch_(clone(whole), fewer(block, count - count // 2))
    return found


def _narrower(whole: nn.Module) -> tuple[tuple[str, type[Narrower], dict[int, int]], ...]:
    """Return the name of each variant that has a branch of half its width, with its move and all counts by block."""
    return (
        (FEATURES, FewerFeatures, feature_counts(whole)),
        (HEADS, FewerHeads, head_counts(whole)),
        (DIMS, FewerDims, dim_counts(whole)),
    )


def _cost_alike(one: str, other: str) -> bool:
    """Whether two styles cost the same, but for parameters."""
    return len({STYLES[name].costs_like or name for name in (one, other)}) == 1


def _with_tokens(
    found: MovePrices,
    whole: nn.Module,
    size: InputSize,
    table: LatencyTable,
    batch: int | None,
    progress: StageProgress | None,
) -> MovePrices:
    """Return the prices with those of tokens, if the model can reduce them."""
    handles = require_record(whole).attentions
    if not handles or table.blocks.keys() != handles.keys() or None in found.layers.attention:
        return found
    small = trimmed(whole)
    try:
        layout = layout_of(require_record(reduce_tokens_(clone(small), Tokens("tome", 1))))
    except ModelError:
        return found
    blocks = list[BlockPrice]()
    for block, handle in sorted(handles.items()):
        costs, attention = Costs.of(whole, size, handle.owner), found.layers.attention[block]
        assert attention is not None
        all_of_it = Price(costs.macs, costs.params, table.blocks[block].value)
        products = costs.macs - costs.macs_without_attention_products
        blocks.append(BlockPrice(attention, all_of_it - attention, products / max(attention.macs, 1.0)))
    found = replace(found, tokens=(tokens := TokenPrices(layout.tokens, layout.protected, tuple(blocks))))
    tell = partial(progress, "timing the merging of tokens") if progress else None
    return replace(found, tokens=replace(tokens, matching=_matching(found, whole, small, size, batch, tell)))


def _matching(
    found: MovePrices, whole: nn.Module, small: nn.Module, size: InputSize, batch: int | None, tell: StepProgress | None
) -> float:
    """Return the time that matching takes in a block: what a model that merges tokens takes beyond its other costs."""
    assert found.tokens is not None
    tokens = Tokens("tome", max(found.tokens.tokens // TIMED_PART, 1))
    plan = Plan(removal=require_record(whole).plan.removal, tokens=tokens)
    models = {"dense": whole, "reduced": reduce_tokens_(clone(small), tokens)}
    speedup = measure_throughput(models, size, batch=batch, runs=20, warmup=3, progress=tell).speedup["reduced"].value
    more = found.ms() / speedup - found.ms(plan)
    return max(more / max(found.tokens.merging(plan, found.stop(plan)), 1), 0.0)


def _price(model: nn.Module, size: InputSize) -> Price:
    costs = Costs.of(model, size)
    return Price(costs.macs, costs.params)
