"""The values that stages and studies return, and that the summary and the report read; one JSON round trip for all.

Each is a frozen dataclass of plain values. No torch here, and nothing is measured or drawn.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from math import inf, isfinite
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any, Literal, TypeVar

from pydantic import TypeAdapter, ValidationError

from hetdpt.core.errors import FileError, HetDPTError, PredictError, first_line
from hetdpt.core.format import (
    amount,
    budget_text,
    counted,
    estimate,
    fewer_tokens,
    machine,
    percent,
    split_text,
    times,
    widths,
)
from hetdpt.core.goals import Measures
from hetdpt.core.plan import KINDS, Budget, FewerTokens, Kind, Plan, Removal, Site, Tail
from hetdpt.core.tokens import Tokens
from hetdpt.store.atomic import CHECKSUM, parse_json, sealed
from hetdpt.store.stage_directory import OLDER, SUMMARY

T = TypeVar("T")


def to_json(value: Any) -> Any:
    """Return a dataclass as plain JSON.

    >>> to_json(Ratio(1.5, 1.4, 1.6))
    {'value': 1.5, 'low': 1.4, 'high': 1.6}
    """
    return json.loads(json.dumps(asdict(value)))  # tuples become lists, as they will be when read


def from_json(kind: type[T], values: Any, file: Path) -> T:
    """Return the value of type ``kind`` that ``to_json`` wrote; ``FileError`` where ``values`` are something else.

    Keys that ``kind`` does not have are ignored. ``file`` is where ``values`` were read.

    >>> from_json(Ratio, {"value": 1.5, "low": 1.4, "high": 1.6}, Path("stage.json"))
    Ratio(value=1.5, low=1.4, high=1.6)
    """
    try:
        found: T = TypeAdapter(kind).validate_python(values)
        return found
    except ValidationError as error:
        first = error.errors()[0]
        why = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    except HetDPTError as error:
        why = first_line(error)
    raise FileError(f"{file} {OLDER} ({why})")


# Values that several stages share


PRICES_FILE = "prices.json"  # of a directory of hetdpt collect
KEPT = ("kept attention", "kept activation")
PARTS = (*KINDS, "patches", *KEPT, "fitted", "unmerged")
"""What can be saved in a block; the last five where patches are not updated in it."""


@dataclass(frozen=True)
class Price:
    """The cost of a model, or the part of it that a removal saves."""

    macs: float
    params: float
    ms: float | None = None
    """Milliseconds of a batch; None if not measured."""

    def __add__(self, other: Price) -> Price:
        return self - other.times(-1)

    def __sub__(self, other: Price) -> Price:
        ms = None if self.ms is None or other.ms is None else self.ms - other.ms
        return Price(self.macs - other.macs, self.params - other.params, ms)

    def times(self, factor: float) -> Price:
        """Return the cost of so many."""
        return Price(self.macs * factor, self.params * factor, None if self.ms is None else self.ms * factor)

    @property
    def measures(self) -> Measures:
        """The cost as that of a dense model."""
        return Measures(layers=0, macs=self.macs, params=self.params, ms=self.ms, speedup=1.0)


@dataclass(frozen=True)
class KeptBlock:
    """What a block saves where patches are not updated: it computes the kept tokens alone, those that the head reads.

    Each saving is in addition to those above it.
    """

    patches: Price
    """By not updating patches; their keys and values are still computed."""
    attention: Price | None
    """By removing its attention; None if it cannot be removed."""
    activation: Price | None
    """By removing its activation; None if it cannot be removed."""
    fitted: Price | None
    """By keys and values from a fitted map of earlier patches: negative, as the map has parameters of its own.

    None if the block has no attention in the model that is priced.
    """
    unmerged: Price | None
    """By being the first of a tail without an attention: negative, if what replaces that cannot be merged there."""


KEPT_FIELDS = tuple(field.name for field in fields(KeptBlock))


@dataclass(frozen=True)
class Prices:
    """The cost of a dense model, and the parts that the cost of any plan is composed of.

    Savings do not add up: after the last attention that is left, and in a tail, patches are not updated, so that a
    layer there saves less, and the last attention nearly a whole block. MACs and parameters of ViTs are exact, up
    to a bias for each layer where there is LayerScale, and up to register tokens, which some blocks compute that are
    priced without them; times are predicted from those of single blocks.

    A budget is priced for the layers that would be removed: those first in ``order``, then others spread over the
    model (of 12 blocks: 0, 8, 4, 2, 10, ...).

    >>> prices = Prices(Price(10, 10, 8.0), (Price(2, 1, 1.0),) * 4, (Price(1, 1, 0.5),) * 4)
    >>> prices.of(Budget(2, 4)), prices.speedup(Plan(attention=(0, 3), activation=(0, 1, 2, 3)))
    (Price(macs=2, params=4, ms=4.0), 2.0)
    """

    dense: Price
    """Of the model as it is."""
    attention: tuple[Price | None, ...]
    """What removing the attention of each block saves while patches are updated; None if it cannot be removed."""
    activation: tuple[Price | None, ...]
    """The same for its activation."""
    measured: str = ""
    """The device, dtype and batch of the timings."""
    kept: tuple[KeptBlock | None, ...] = ()
    """Each block where patches are not updated; None where they must be. Empty if they must be in all."""
    order: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    """The blocks whose attention and activation would be removed, in this order, as far as that is known."""
    tail: int = 0
    """The tail that plans have at least; that of the plans which budgets stand for."""
    is_trimmed: bool = True
    """Whether models are trimmed where that is possible."""
    whole: Price | None = None
    """Of the model with patches updated in all blocks; None if the dense model is like that."""

    @classmethod
    def composed(cls, dense: Price, parts: Mapping[tuple[str, int], Price], blocks: int, **more: Any) -> Prices:
        """Return prices from what is saved by the names of ``PARTS`` and block; ``more`` are other fields.

        A block that can do without patches has a part "patches", and one with an attention a part "fitted".
        """
        columns = {name: tuple(parts.get((name, block)) for block in range(blocks)) for name in PARTS}
        rows = zip(*(columns[name] for name in PARTS[2:]), strict=True)
        kept = tuple(None if patches is None else KeptBlock(patches, *rest) for patches, *rest in rows)
        return cls(dense, columns["attention"], columns["activation"], kept=kept if any(kept) else (), **more)

    def of(self, removed: Budget | Plan) -> Price:
        """Return the cost of the model without these layers."""
        left = self.whole or self.dense
        for part in self._savings(removed if isinstance(removed, Plan) else self.plan_of(removed)):
            left = left - part
        return left

    def with_tail(self, tail: int) -> Prices:
        """Return the prices of plans with that tail, which remove layers before it."""
        end = len(self.attention) - tail
        before = {kind: tuple(p if b < end else None for b, p in enumerate(getattr(self, kind))) for kind in KINDS}
        return replace(self, tail=tail, attention=before["attention"], activation=before["activation"])

    def plan_of(self, budget: Budget) -> Plan:
        """Return the layers that would be removed for ``budget``."""
        counts = budget.attention, budget.activation
        attention, activation = (self._order(kind)[:count] for kind, count in zip(KINDS, counts, strict=True))
        return Plan(attention, activation, tail=self.tail)

    def speedup(self, removed: Budget | Plan) -> float | None:
        """Return the speedup without these layers, by the times of blocks; None if times were not measured."""
        left = self.of(removed).ms
        if left is None or self.dense.ms is None:
            return None
        return self.dense.ms / left if left > 0 else inf

    def measures(self, removed: Budget | Plan) -> Measures:
        """Return all that can be a goal, for the model without these layers."""
        left, layers = self.of(removed), removed.layers if isinstance(removed, Budget) else len(removed)
        speedup = self.speedup(removed)
        return Measures(layers=layers, macs=left.macs, params=left.params, ms=left.ms, speedup=speedup)

    def count(self, kind: Kind) -> int:
        """Return the number of removable layers of that kind."""
        return len(self._blocks(kind))

    def stop(self, plan: Plan) -> int:
        """Return the first block in which patches are not updated; the number of blocks if there is none."""
        able = [block for block, kept in enumerate(self.kept) if kept is not None]
        stop = len(self.kept) - max(plan.tail, self.tail)
        if self.is_trimmed:
            left = [b for b in able if self.kept[b].fitted and b not in plan.attention]  # type: ignore[union-attr]
            stop = min(stop, max(left, default=0))
        return max(stop, min(able, default=len(self.attention)))

    def _savings(self, plan: Plan) -> Iterator[Price]:
        stop, first = self.stop(plan), len(self.kept) - max(plan.tail, self.tail)
        for kind in KINDS:
            for block in getattr(plan, kind):
                part = getattr(self.kept[block], kind) if block >= stop else getattr(self, kind)[block]
                if part is None:
                    raise PredictError(f"the prices have no {kind} {block}, which the plan removes")
                yield part
        for block, kept in enumerate(self.kept[stop:], stop):
            assert kept is not None
            yield kept.patches
            if block > stop and kept.fitted is not None and block not in plan.attention:
                yield kept.fitted
            if block == first and block in plan.attention and kept.unmerged is not None:
                yield kept.unmerged

    def _order(self, kind: Kind) -> tuple[int, ...]:
        """Return the blocks with a removable layer of that kind, in the order of removal."""
        known, offered = self.order[KINDS.index(kind)], self._blocks(kind)
        bits = max(offered, default=0).bit_length()
        rest = sorted(offered, key=lambda block: f"{block:0{bits}b}"[::-1])
        return tuple(dict.fromkeys(block for block in (*known, *rest) if block in offered))

    def _blocks(self, kind: Kind) -> list[int]:
        return [block for block, price in enumerate(getattr(self, kind)) if price is not None]

    def to_json(self) -> str:
        return json.dumps(sealed(asdict(self)), indent=1)

    @classmethod
    def from_json(cls, text: str, name: str = "the prices") -> Prices:
        """Return the prices written in ``text``; ``PredictError`` if it holds none, or does not match its checksum."""
        try:
            values: dict[str, Any] = parse_json(text)
            seal = values.pop(CHECKSUM, None) if isinstance(values, dict) else None  # those written by hand have none
            if seal is not None and seal != sealed(values)[CHECKSUM]:
                raise ValueError("they are not what was written; without the checksum they are taken as they are")
            attention, activation = (tuple(map(_price_or_none, values[kind])) for kind in KINDS)
            found = cls(
                _price(values["dense"]),
                attention,
                activation,
                measured=str(values["measured"]),
                kept=tuple(map(_kept, _new(values, "kept"))),
                order=_order(_new(values, "order")),
                tail=int(_new(values, "tail")),
                is_trimmed=bool(_new(values, "is_trimmed")),
                whole=_price_or_none(_new(values, "whole")),
            )
            found._check()
            return found
        except (ValueError, TypeError, KeyError) as error:
            raise PredictError(f"{name} cannot be read ({error}); measure them again with --model") from None

    def _check(self) -> None:
        """Raise ``ValueError`` for prices that cannot be compared."""
        if min(self.dense.macs, self.dense.params, 1 if self.dense.ms is None else self.dense.ms) <= 0:
            raise ValueError("the dense model costs nothing")
        parts = (getattr(block, name) for block in self.kept if block for name in KEPT_FIELDS)
        every = [
            price for price in (self.dense, self.whole, *self.attention, *self.activation, *parts) if price is not None
        ]
        if len({price.ms is None for price in every}) > 1:
            raise ValueError("some have a time and some have none")
        if self.kept and {len(self.attention), len(self.activation)} != {len(self.kept)}:
            raise ValueError("they are of models with different numbers of blocks")


def _new(values: dict[str, Any], key: str) -> Any:
    """Return a value that prices of an older version do not have."""
    if key not in values:
        raise ValueError(f"they have no {key!r}, so an older version wrote them")
    return values[key]


def _price(values: Any) -> Price:
    price = Price(**values)
    numbers = price.macs, price.params, 0.0 if price.ms is None else price.ms
    if not all(type(number) in (int, float) and isfinite(number) for number in numbers):
        raise ValueError(f"{values} are no numbers")
    return price


def _price_or_none(values: Any) -> Price | None:
    return None if values is None else _price(values)


def _kept(values: Any) -> KeptBlock | None:
    if values is None:
        return None
    return KeptBlock(_price(values["patches"]), *(_price_or_none(values[name]) for name in KEPT_FIELDS[1:]))


def _order(values: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    attention, activation = (tuple(map(int, blocks)) for blocks in values)
    return attention, activation


@dataclass(frozen=True)
class Scores:
    """The accuracy of a model on some images, in percent."""

    top1: float
    top5: float
    loss: float
    """Mean cross-entropy."""
    count: int
    """Images that were read and counted, each once."""
    low: float
    """Lower end of the 95 % interval (Wilson) of ``top1``."""
    high: float
    """Its upper end."""
    unreadable: tuple[str, ...] = ()
    """Files that could not be read and were not counted."""


@dataclass(frozen=True)
class FrontierPoint:
    """A plan of a frontier, and what it costs."""

    plan: Plan
    damage: float
    """On images that fitted nothing: nats for a classifier, else the relative squared error of features."""
    cost: float
    """Milliseconds of a batch, by the times of single layers."""
    moves: tuple[str, ...] = ()
    """What was removed since the point before."""
    accuracy: Scores | None = None
    """Of the plan as ``hetdpt apply`` fits it, on validation images that decided nothing; None if not measured."""


@dataclass(frozen=True, kw_only=True)
class FrontierResult:
    """The least damage at every speed, from one search."""

    dense_ms: float
    """Milliseconds of a batch of the dense model."""
    measured: str
    """The device, dtype and batch of the timings."""
    points: tuple[FrontierPoint, ...]
    """From slow to fast."""
    images: dict[str, int]
    """To fit on and to ``judge`` damage."""
    dense_accuracy: Scores | None = None
    """Of the dense model on the same validation images; None if not measured."""

    def speedup(self, point: FrontierPoint) -> float:
        """Return how many times faster than the dense model a point is, by the times of single layers."""
        return self.dense_ms / point.cost

    def at(self, speedup: float) -> FrontierPoint | None:
        """Return the first point that is at least so much faster; None if there is none."""
        return next((point for point in self.points if self.speedup(point) >= speedup), None)


@dataclass(frozen=True)
class Machine:
    """A device and its name, that something was measured on."""

    device: str
    """cpu, cuda or mps."""
    processor: str
    threads: int
    """Threads of torch on a CPU."""


@dataclass(frozen=True)
class Ratio:
    """How many times faster, with the interval that holds 95 % of the bootstrap medians."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return estimate(times(self.value, 3, "x"), self.low, self.high, 3)


@dataclass(frozen=True)
class Split:
    """A number of layers of each kind, and the predictions for the model without them."""

    budget: Budget
    accuracy: float
    """Predicted, in percent."""
    low: float
    """The accuracy is between ``low`` and ``high`` with a chance of 95 %, if the polynomial is right."""
    high: float
    is_beyond: bool
    """Whether it is extrapolated: it is outside of the samples, or where they decide less than at any of them."""
    share: float = 0.0
    """Part of the bootstrap draws in which it is the best of its table."""
    is_tied: bool = False
    """Whether it cannot be told from the best: the interval of the difference contains 0."""
    macs: float | None = None
    params: float | None = None
    ms: float | None = None
    speedup: float | None = None
    measured: float | None = None
    """The accuracy in percent after a longer fine-tuning; None if it had none."""

    @property
    def layers(self) -> int:
        return self.budget.layers

    @property
    def measures(self) -> Measures:
        """All that can be a goal."""
        return Measures(layers=self.layers, macs=self.macs, params=self.params, ms=self.ms, speedup=self.speedup)

    def __str__(self) -> str:
        return budget_text(self.budget)


# The stages, in their order. As text each is one line, as ``hetdpt status`` shows it.


@dataclass(frozen=True, kw_only=True)
class AnalyseResult(Machine):
    """The dense model, and the machine it was measured on."""

    model: str
    dtype: str
    blocks: int
    input_size: tuple[int, int, int]
    classes: int
    sites: tuple[Site, ...]
    """The layers that can be removed."""
    accuracy: Scores
    params: int
    macs: int
    prices: Prices
    metric: str = "accuracy"
    """What accuracies of this run are: agreement with the dense model where images have no labels."""

    def __str__(self) -> str:
        return f"{percent(self.accuracy.top1)} of {self.accuracy.count} images, {self.blocks} blocks"


@dataclass(frozen=True)
class SampledLayer:
    """A layer removed for a sample, and its transfer entropy at that time."""

    kind: Kind
    block: int
    te: float | None = None


@dataclass(frozen=True, kw_only=True)
class CollectedSample:
    """The accuracy without so many layers of each kind, after a brief fine-tuning."""

    budget: Budget
    accuracy: float
    before: float | None = None
    """The accuracy before that fine-tuning."""
    chain: str = ""
    layers: tuple[SampledLayer, ...] = ()
    """The layers removed last."""
    seconds: float = 0.0


@dataclass(frozen=True)
class CollectResult:
    """Samples of accuracy."""

    samples: tuple[CollectedSample, ...]
    measured_on: str
    """Which images."""

    def __str__(self) -> str:
        return counted(len(self.samples), "sample")


@dataclass(frozen=True, kw_only=True)
class FitResult:
    """The accuracy predictor MAP (paper, Algorithm 2): a polynomial fitted to the samples."""

    blocks: int
    degree: int
    mae: float
    """Mean absolute error on samples left out, two at a time."""
    rmse: float
    explained: float
    formula: str
    coefficients: dict[str, float]
    pruned_formula: str
    """The polynomial in fractions removed instead of fractions kept."""
    pruned_coefficients: dict[str, float]
    tried: tuple[dict[str, Any], ...]
    """The error of each degree."""
    samples: tuple[CollectedSample, ...]
    surface: tuple[Split, ...]
    """Predictions for every split."""
    prices: Prices
    """Those of the dense model, with the order in which layers were removed for the samples."""
    warnings: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"degree {self.degree}, wrong by {self.mae:.2f} points on average"


@dataclass(frozen=True, kw_only=True)
class AllocateResult:
    """How many layers of each kind are removed, and which other splits would have met the goal."""

    wanted: dict[str, float]
    budget: Budget
    share: float
    speedup: float | None
    table: tuple[Split, ...]
    frontier: tuple[Split, ...]
    warnings: tuple[str, ...] = ()

    @property
    def chosen(self) -> Split | None:
        """The row of the table that was chosen."""
        return next((row for row in self.table if row.budget == self.budget), None)

    @property
    def tied(self) -> tuple[Split, ...]:
        """The other rows of the table that the best cannot be told from."""
        return tuple(row for row in self.table if row.is_tied and row.budget != self.budget)

    def __str__(self) -> str:
        return budget_text(self.budget)


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """So many layers of each kind removed, and width for the rest of the goal, after a brief fine-tuning."""

    budget: Budget
    predicted: float
    """The accuracy without these layers and with all its width."""
    ratios: dict[str, float]
    """Which part of each size is removed."""
    macs: float
    params: float
    start: float
    """The accuracy before fine-tuning."""
    accuracy: float
    speedup: float

    @property
    def layers(self) -> int:
        return self.budget.layers


@dataclass(frozen=True, kw_only=True)
class BalanceResult:
    """How much of the goal is met by removing layers, and how much by removing width."""

    target: dict[str, float]
    candidates: tuple[Candidate, ...]
    budget: Budget
    why: str
    measured_on: str
    images: int

    @property
    def chosen(self) -> int:
        """The index of the chosen candidate."""
        return [one.budget for one in self.candidates].index(self.budget)

    def __str__(self) -> str:
        return f"{budget_text(self.budget)}, then width: {percent(self.candidates[self.chosen].accuracy)}"


@dataclass(frozen=True)
class ChosenLayer:
    """A layer to remove; the method chose those of lower scores first."""

    kind: Kind | Literal["tail"]
    """``tail``: in place of a layer, patches are not updated from that block on."""
    block: int
    score: float | None = None


@dataclass(frozen=True)
class ChosenRound:
    """What one round of a search removed."""

    moves: tuple[str, ...]
    """In words."""
    damage: float
    """Of the model without all that was removed so far."""
    reached: float
    """Its speedup, or its MACs if these are the goal, by the costs of single layers."""


@dataclass(frozen=True)
class SelectResult:
    """Which layers are removed, and what else."""

    method: str
    plan: Plan
    picks: tuple[ChosenLayer, ...] = ()
    """The layers, and the tails beside them, in the order in which they were chosen."""
    rounds: tuple[ChosenRound, ...] = ()
    """All that was removed, if that is more than layers."""
    quantity: Literal["speedup", "MACs"] = "speedup"
    """What ``rounds`` have reached."""

    def __str__(self) -> str:
        blocks = {kind: getattr(self.plan, kind) for kind in KINDS}
        parts = [f"{kind} {' '.join(map(str, of))}" for kind, of in blocks.items() if of]
        parts += [str(Tail(self.plan.tail))] if self.plan.tail else []
        parts += [f"{counted(self.plan.narrowed, 'layer')} narrowed"] if self.plan.narrowed else []
        parts += [str(FewerTokens(self.plan.tokens))] if self.plan.tokens else []
        return ", ".join(parts) or "no layers"


@dataclass(frozen=True, kw_only=True)
class NarrowResult:
    """Which part of each size is removed after the layers; costs are those of the merged model."""

    target: dict[str, float]
    ratios: dict[str, float]
    macs: float
    params: float
    tried: int
    speedup: float | None = None

    def __str__(self) -> str:
        return f"less {widths(self.ratios)}; {amount(self.macs)} MACs, {amount(self.params)} parameters"


@dataclass(frozen=True, kw_only=True)
class EpochResult:
    """One epoch of the fine-tuning, accuracies in percent; number 0 is before training."""

    number: int
    epochs: int
    loss: float | None = None
    last: float | None = None
    """Accuracy of the weights after this epoch."""
    divergence: float | None = None
    """Mean KL divergence of the answers from the dense model's on images that were held out, in nats."""
    best: float | None = None
    """Accuracy of the best epoch so far."""
    ema: float | None = None
    """Accuracy of the moving average of the weights."""
    lr: float | None = None
    seconds: float | None = None


def unhelpful(
    *,
    start: float | None,
    last: float | None,
    best_epoch: int,
    kept: str,
    divergence: Sequence[float] | None = None,
) -> str:
    """Return a warning if the model of a training that is ``kept`` is no better than it was before; else an empty text.

    ``divergence`` is that from the teacher before and after it, where epochs are compared by it.

    >>> unhelpful(start=59.9, last=51.3, best_epoch=0, kept="best")
    'training did not help: 59.90 % before, 51.30 % after it; the model from before training is kept'
    """
    if start is None or last is None:
        return ""
    numbers = f"{percent(start)} before, {percent(last)} after it"
    if divergence is not None:
        numbers += f" (KL to the teacher {divergence[0]:.3g} and {divergence[1]:.3g})"
    if kept == "best" and best_epoch == 0:
        return f"training did not help: {numbers}; the model from before training is kept"
    if kept == "last" and last < start:
        return f"training made the model worse: {numbers}; --keep best keeps the better one"
    return ""


@dataclass(frozen=True, kw_only=True)
class RecoverResult:
    """The fine-tuning, epoch by epoch."""

    epochs: tuple[EpochResult, ...]
    start: float
    """Accuracy in percent before it, as those below."""
    last: float
    best: float
    ema: float | None
    best_epoch: int
    seconds: float
    images_per_second: float
    unreadable: tuple[str, ...] = ()
    """Files that could not be read."""
    measured_on: str = "validation images"
    """Which images the accuracies are of."""
    lr_found: float | None = None
    """Peak learning rate, if it was found and not given."""
    notes: tuple[str, ...] = ()
    """What was found about it and the number of epochs beforehand, in words."""
    divergence: tuple[float, float] | None = None
    """From the teacher, before and after it, where the best epoch is chosen by that."""

    @property
    def is_held_out(self) -> bool:
        """Whether these are training images that were held out."""
        return "training" in self.measured_on

    def warning(self, kept: str) -> str:
        """Return what to say if training did not help, and the model called ``kept`` was kept; empty if it helped.

        >>> found = RecoverResult(
        ...     epochs=(), start=59.9, last=51.3, best=59.9, ema=None, best_epoch=0, seconds=1.0, images_per_second=1.0
        ... )
        >>> found.warning("last")
        'training made the model worse: 59.90 % before, 51.30 % after it; --keep best keeps the better one'
        """
        numbers: Any = {name: getattr(self, name) for name in ("start", "last", "best_epoch", "divergence")}
        return unhelpful(**numbers, kept=kept)

    def __str__(self) -> str:
        after = f"{percent(self.last)} after {counted(self.epochs[-1].number, 'epoch')}"
        return f"{percent(self.start)} before, {after}, best {percent(self.best)}"


@dataclass(frozen=True)
class MergeResult:
    """How many pairs of linear layers became one, and by how much that changed the outputs."""

    merged: int
    difference: float
    plan: Plan = field(default_factory=Plan)
    kept: Literal["last", "best", "ema"] = "last"
    """Which model of the fine-tuning it is."""

    def __str__(self) -> str:
        return f"{counted(self.merged, 'FFN')} merged"


@dataclass(frozen=True)
class ReduceResult:
    """How the blocks of the merged model reduce tokens."""

    tokens: Tokens

    def __str__(self) -> str:
        return fewer_tokens(self.tokens)


@dataclass(frozen=True, kw_only=True)
class ModelFigures:
    """What was measured of one model."""

    accuracy: Scores
    params: int
    macs: int
    ms: float
    """Milliseconds of one batch."""
    throughput: float
    """Images per second."""


@dataclass(frozen=True, kw_only=True)
class MeasureResult(Machine):
    """The dense and the pruned model, timed in turns on one machine."""

    dense: ModelFigures
    pruned: ModelFigures
    speedup: Ratio
    dtype: str
    batch: int
    breakdown: dict[str, dict[str, float]] = field(default_factory=dict)
    """Milliseconds of a batch by kind of layer, of ``dense`` and ``pruned``."""

    def __str__(self) -> str:
        accuracy, speedup = percent(self.pruned.accuracy.top1), times(self.speedup.value)
        return f"{accuracy}, {speedup} ({machine(self, self.batch)})"


@dataclass(frozen=True, kw_only=True)
class SaveResult:
    """Where the model is that the user ships, relative to the run directory."""

    model: str
    exports: dict[str, float] = field(default_factory=dict)
    """Files for other runtimes, each with the largest difference between its outputs and those of PyTorch."""
    bytes: int = 0
    files: dict[str, str | None] = field(default_factory=dict)
    """What was written to the run directory: a checksum, or None for a folder."""

    def __str__(self) -> str:
        return ", ".join((self.model, *self.exports))


@dataclass(frozen=True)
class PlanSpeed:
    """The speed and the costs of a merged model."""

    speedup: float
    """Speedup over the dense model, from interleaved runs."""
    low: float
    """Lower end of its 95 % interval over rounds."""
    high: float
    macs: int
    """MACs of one image."""
    params: int
    ms: float | None = None
    """Milliseconds of one batch, timed in turns with the others."""


@dataclass(frozen=True)
class ComparisonRow:
    """The result of one method, for one number of layers and one seed."""

    layers: int
    method: str
    seed: int
    plan: Plan
    start: float
    """Accuracy in percent before the fine-tuning."""
    accuracy: float
    """Accuracy in percent of the merged model after its last epoch."""
    seconds: float
    """Time of the choice, since the last restart; sampling accuracy for its split is not included."""
    speed: PlanSpeed

    @property
    def split(self) -> str:
        """As attention+activation.

        >>> speed = PlanSpeed(1.2, 1.1, 1.3, 10, 10)
        >>> ComparisonRow(3, "hetdpt", 0, Plan(attention=(1,), activation=(0, 2)), 70.0, 75.0, 1.5, speed).split
        '1+2'
        """
        return split_text(self.plan.budget)


@dataclass(frozen=True, kw_only=True)
class CompareResult:
    """The other methods."""

    rows: tuple[ComparisonRow, ...]
    images: int
    measured: str = ""
    """The device, dtype and batch of the timings."""
    warnings: tuple[str, ...] = ()

    def __str__(self) -> str:
        return ", ".join(f"{row.method} {percent(row.accuracy)}" for row in self.rows)


@dataclass(frozen=True)
class ReportResult:
    """The reports in the run directory, with their checksums."""

    files: dict[str, str | None]


@dataclass(frozen=True)
class Results:
    """The result of each stage by its name; None if it is not done, or not part of the run."""

    analyse: AnalyseResult | None = None
    collect: CollectResult | None = None
    fit: FitResult | None = None
    allocate: AllocateResult | None = None
    balance: BalanceResult | None = None
    select: SelectResult | None = None
    narrow: NarrowResult | None = None
    recover: RecoverResult | None = None
    merge: MergeResult | None = None
    reduce: ReduceResult | None = None
    measure: MeasureResult | None = None
    save: SaveResult | None = None
    compare: CompareResult | None = None

    @property
    def budget(self) -> Budget | None:
        """How many layers of each kind are removed by the predictor, alone or with trials; None without a predictor."""
        found = self.allocate or self.balance
        return found.budget if found else None


# The whole run


@dataclass(frozen=True)
class NextBudget:
    """A budget to try where the goal was missed."""

    budget: Budget


@dataclass(frozen=True)
class GoalResult:
    """The goal of a run, and whether the measured model meets it."""

    wanted: dict[str, Any]
    is_met: bool
    text: str
    next: NextBudget | None = None


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """The outcome of a run, as in ``summary.json``; accuracies in percent of the validation images.

    Where images have no labels, ``metric`` says what they are instead.
    """

    dense_accuracy: float
    pruned_accuracy: float
    speedup: float
    """Measured speedup, dense and pruned timed in turns."""
    speedup_low: float
    """Lower end of its 95 % interval over rounds."""
    speedup_high: float
    macs: int
    params: int
    dense_macs: int
    dense_params: int
    ms: float
    """Milliseconds of one batch."""
    dense_ms: float
    plan: Plan
    budget: Budget
    ratios: dict[str, float] | None
    """Which part of each size was removed; None if width was left alone."""
    tokens: str | None
    """How tokens are reduced; None if they are not."""
    method: str
    device: str
    processor: str
    threads: int
    dtype: str
    batch: int
    images: int
    """Number of validation images."""
    goal: GoalResult
    warnings: tuple[str, ...]
    seconds: float
    """Time of all stages."""
    model: str
    data: str
    metric: str = "accuracy"

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain JSON."""
        values: dict[str, Any] = to_json(self)
        return values

    @classmethod
    def read(cls, directory: Path) -> RunSummary:
        """Return the summary of a finished run; ``FileError`` if it has no summary."""
        file = directory / SUMMARY
        try:
            values = parse_json(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise FileError(f"{file} cannot be read ({first_line(error)}); hetdpt run writes it") from None
        return from_json(cls, values, file)


# Studies


DERIVED = ("splits", "accuracy", "spread")  # of a summary, in JSON for those who read it


@dataclass(frozen=True)
class DenseModel:
    """The dense model."""

    accuracy: float
    images: int
    """Number of images that accuracies are measured on."""
    macs: int
    params: int
    throughput: float
    """Images per second."""


@dataclass(frozen=True)
class Difference:
    """By how many points of accuracy a method is better than another, on the same images and seeds."""

    value: float
    low: float
    """Lower end of the interval that holds 95 % of the bootstrap means, over images and seeds."""
    high: float


@dataclass(frozen=True)
class MethodSummary:
    """The results of one method for one number of layers, over all seeds."""

    layers: int
    method: str
    plans: tuple[Plan, ...]
    """The plans of all seeds, each once."""
    seeds: tuple[int, ...]
    accuracies: tuple[float, ...]
    """One for each seed."""
    difference: Difference | None
    """Difference to the first method; None for that method, and where images have no index (a stream of shards)."""
    start: float
    """Mean accuracy before the fine-tuning."""
    speedup: float
    """Mean over seeds."""
    macs: float
    """Mean fraction of the dense model's MACs."""
    seconds: float
    """Mean time of the choice."""

    @property
    def splits(self) -> tuple[str, ...]:
        """The splits of the plans, each once, as attention+activation."""
        return tuple(dict.fromkeys(split_text(plan.budget) for plan in self.plans))

    @property
    def accuracy(self) -> float:
        """Mean over seeds."""
        return fmean(self.accuracies)

    @property
    def spread(self) -> float | None:
        """Standard deviation over seeds; None for a single one."""
        return stdev(self.accuracies) if len(self.accuracies) > 1 else None


@dataclass(frozen=True)
class MethodComparison:
    """All results of a comparison."""

    first: str
    """The method that the others are compared to."""
    measured: str
    """The device, dtype and batch of the timings."""
    dense: DenseModel
    rows: tuple[ComparisonRow, ...]
    summaries: tuple[MethodSummary, ...]
    warnings: tuple[str, ...]

    @property
    def methods(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(summary.method for summary in self.summaries))

    def of(self, method: str) -> list[MethodSummary]:
        """Return the summaries of ``method``, fewer layers first."""
        return [summary for summary in self.summaries if summary.method == method]

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain JSON, derived numbers included."""
        values = asdict(self)
        for row, known in zip(values["rows"], self.rows, strict=True):
            row["split"] = known.split
        for summary, found in zip(values["summaries"], self.summaries, strict=True):
            summary |= {name: getattr(found, name) for name in DERIVED}
        return values


@dataclass(frozen=True)
class Gradient:
    """The gradient of the importance of one layer: a number for each epoch, the mean over its updates.

    g = <d loss / d y, f(x) - r(x)> for a layer f and its replacement r (paper, Eq. 6).
    """

    site: Site
    magnitudes: tuple[float, ...]
    """Means of |g|, by epoch."""
    means: tuple[float, ...]
    """Means of g, by epoch; below 0 where the layer lowers the loss."""

    @property
    def magnitude(self) -> float:
        """Mean of |g| over all updates."""
        return fmean(self.magnitudes)

    @property
    def mean(self) -> float:
        """Mean of g over all updates."""
        return fmean(self.means)


@dataclass(frozen=True)
class Disparity:
    """The gradients of all layers under one removal."""

    removal: Removal
    layers: tuple[Gradient, ...]
    updates: int
    """Updates of the weights in each epoch."""
    batch: int
    """Images of each update; with more of them there is less noise in the gradients."""

    @property
    def epochs(self) -> int:
        return len(self.layers[0].magnitudes) if self.layers else 0

    def magnitude(self, kind: Kind, epoch: int | None = None) -> float | None:
        """Return the median over blocks of the mean |g|, of one epoch (the first is 0) or of all; None without any."""
        of = [layer for layer in self.layers if layer.site.kind == kind]
        return median(row.magnitude if epoch is None else row.magnitudes[epoch] for row in of) if of else None

    def ratio(self, epoch: int | None = None) -> float | None:
        """Return how many times larger gradients of activations are than those of attention; None without either."""
        attention, activation = (self.magnitude(kind, epoch) for kind in KINDS)
        return activation / attention if attention and activation is not None else None


@dataclass(frozen=True)
class Asymmetry:
    """The accuracy of a model without one layer."""

    site: Site
    removal: Removal
    accuracies: tuple[float, ...]
    """Accuracies in percent: right after the removal, then after each epoch of fine-tuning."""


@dataclass(frozen=True)
class Observations:
    """Both observations on one model."""

    dense: float | None
    """Accuracy of the dense model in percent; None where no layer is removed."""
    disparities: tuple[Disparity, ...]
    asymmetries: tuple[Asymmetry, ...]

    @property
    def removals(self) -> tuple[Removal, ...]:
        found = [row.removal for row in self.disparities] + [row.removal for row in self.asymmetries]
        return tuple(dict.fromkeys(found))

    @property
    def epochs(self) -> int:
        """Epochs of fine-tuning; 0 without any."""
        return max((len(row.accuracies) - 1 for row in self.asymmetries), default=0)

    def disparity(self, removal: Removal) -> Disparity | None:
        return next((row for row in self.disparities if row.removal == removal), None)

    def of(self, removal: Removal, kind: Kind) -> tuple[Asymmetry, ...]:
        """Return the layers of one kind, by block."""
        rows = [row for row in self.asymmetries if row.removal == removal and row.site.kind == kind]
        return tuple(sorted(rows, key=lambda row: row.site.block))

    def medians(self, removal: Removal, kind: Kind) -> tuple[float, ...]:
        """Return the median over blocks of the accuracies: right after the removal, then after each epoch."""
        return tuple(map(median, zip(*(row.accuracies for row in self.of(removal, kind)), strict=True)))

    def drops(self, removal: Removal, kind: Kind) -> tuple[float, ...]:
        """Return how far the medians are below the dense accuracy, in points; () where that is not known."""
        return () if self.dense is None else tuple(self.dense - each for each in self.medians(removal, kind))

    def summary(self, removal: Removal) -> dict[str, Any]:
        """Return the figures of both observations under one removal, as plain JSON."""
        found = self.disparity(removal)
        return {
            "removal": removal,
            "gradients": {kind: found.magnitude(kind) if found else None for kind in KINDS},
            "ratio": found.ratio() if found else None,
            "ratios": [found.ratio(epoch) for epoch in range(found.epochs)] if found else [],
            "drops": {kind: self.drops(removal, kind) for kind in KINDS},
        }

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain JSON, with a summary for each removal."""
        return {**asdict(self), "summary": [self.summary(removal) for removal in self.removals]}
