"""What the stages of a run came to, as values; named as in their ``stage.json``. No torch here.

A stage may say more than is here; what a report does not show is passed over.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hetdpt.core.plan import Budget, Kind, Site
from hetdpt.core.tokens import Tokens
from hetdpt.measurement.prices import Prices


@dataclass(frozen=True)
class AccuracyResult:
    """Accuracy in percent, with its 95 % interval."""

    top1: float
    count: int
    low: float
    high: float


@dataclass(frozen=True)
class Analysis:
    """The dense model, and what it was measured on."""

    model: str
    device: str
    processor: str
    threads: int
    dtype: str
    blocks: int
    sites: tuple[Site, ...]
    accuracy: AccuracyResult
    params: float
    macs: float
    prices: Prices | None = None


@dataclass(frozen=True)
class Gone:
    """A layer that went for a sample, and its transfer entropy then."""

    kind: Kind
    block: int
    te: float | None = None


@dataclass(frozen=True)
class Taken:
    """A sample of accuracy: how many layers of each kind were gone, and which went last."""

    attention: int
    activation: int
    accuracy: float
    before: float | None = None
    chain: str = ""
    layers: tuple[Gone, ...] = ()

    @property
    def budget(self) -> Budget:
        return Budget(self.attention, self.activation)


@dataclass(frozen=True)
class Collection:
    samples: tuple[Taken, ...]
    measured_on: str = ""


@dataclass(frozen=True)
class Predicted:
    """What is predicted without so many layers of each kind; ``low`` to ``high`` is the 95 % interval."""

    attention: int
    activation: int
    predicted: float
    low: float
    high: float
    is_beyond: bool
    macs: float | None = None
    params: float | None = None
    speedup: float | None = None
    share: float = 0.0
    is_tied: bool = False
    measured: float | None = None

    @property
    def budget(self) -> Budget:
        return Budget(self.attention, self.activation)


@dataclass(frozen=True)
class FitResult:
    """The accuracy predictor MAP."""

    blocks: int
    degree: int
    mae: float
    rmse: float
    explained: float
    formula: str
    pruned_formula: str
    samples: tuple[Taken, ...]
    surface: tuple[Predicted, ...]
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class AllocationResult:
    """How many layers of each kind go, and what else would have met the goal."""

    wanted: dict[str, float]
    budget: Budget
    share: float
    table: tuple[Predicted, ...]
    frontier: tuple[Predicted, ...]
    warnings: tuple[str, ...] = ()

    @property
    def chosen(self) -> Predicted | None:
        """The row of the table that was taken."""
        return next((row for row in self.table if row.budget == self.budget), None)

    @property
    def tied(self) -> tuple[Predicted, ...]:
        """The others of the table that the best cannot be told from."""
        return tuple(row for row in self.table if row.is_tied and row.budget != self.budget)


@dataclass(frozen=True)
class Candidate:
    """So many layers of each kind gone, and width for the rest of the goal, after a brief fine-tuning."""

    attention: int
    activation: int
    predicted: float
    """The accuracy without these layers and with all its width."""
    ratios: dict[str, float]
    """Which part of each size goes."""
    macs: float
    params: float
    start: float
    """The accuracy before fine-tuning."""
    accuracy: float
    speedup: float

    @property
    def budget(self) -> Budget:
        return Budget(self.attention, self.activation)

    @property
    def layers(self) -> int:
        return self.attention + self.activation


@dataclass(frozen=True)
class Balance:
    """How much of the goal layers meet, and how much width."""

    target: dict[str, float]
    candidates: tuple[Candidate, ...]
    budget: Budget
    why: str
    measured_on: str
    images: int

    @property
    def chosen(self) -> int:
        """The place of the candidate that was taken."""
        return [one.budget for one in self.candidates].index(self.budget)


@dataclass(frozen=True)
class ChosenLayers:
    """Which layers go, by the numbers of their blocks."""

    attention: tuple[int, ...]
    activation: tuple[int, ...]
    removal: Any = None

    @property
    def budget(self) -> Budget:
        return Budget(len(self.attention), len(self.activation))

    @property
    def layers(self) -> int:
        return len(self.attention) + len(self.activation)


@dataclass(frozen=True)
class Pick:
    kind: Kind
    block: int
    score: float | None = None


@dataclass(frozen=True)
class Selection:
    method: str
    plan: ChosenLayers
    picks: tuple[Pick, ...] = ()
    """In the order in which they went."""


@dataclass(frozen=True)
class Narrowing:
    """Which part of each size went after the layers; costs are those of the merged model."""

    target: dict[str, float]
    ratios: dict[str, float]
    macs: float
    params: float
    tried: int
    speedup: float | None = None


@dataclass(frozen=True)
class EpochResult:
    """Number 0 is before training."""

    number: int
    loss: float | None = None
    last: float | None = None
    best: float | None = None
    ema: float | None = None


@dataclass(frozen=True)
class Recovery:
    epochs: tuple[EpochResult, ...]


@dataclass(frozen=True)
class Merge:
    merged: int
    difference: float


@dataclass(frozen=True)
class Side:
    """One of the two models that are compared."""

    accuracy: AccuracyResult
    params: float
    macs: float
    ms: float
    throughput: float


@dataclass(frozen=True)
class Speedup:
    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Measured:
    dense: Side
    pruned: Side
    speedup: Speedup
    device: str
    processor: str
    threads: int
    dtype: str
    batch: int
    breakdown: dict[str, dict[str, float]] = field(default_factory=dict)
    """Milliseconds of a batch by kind of layer, of ``dense`` and ``pruned``."""


@dataclass(frozen=True)
class Saved:
    model: str
    exports: dict[str, float] = field(default_factory=dict)
    """Files for other runtimes, each with the largest difference between the runtime and torch."""
    bytes: int | None = None


@dataclass(frozen=True)
class MethodRow:
    """Another method, with as many layers and the same fine-tuning."""

    method: str
    accuracy: float
    plan: ChosenLayers | None = None
    start: float | None = None
    params: float | None = None
    macs: float | None = None
    ms: float | None = None
    speedup: float | None = None
    low: float | None = None
    high: float | None = None
    note: str = ""


@dataclass(frozen=True)
class ComparisonResult:
    rows: tuple[MethodRow, ...]
    images: int


@dataclass(frozen=True)
class Results:
    """What each stage came to, by its name; None where it is not done, or not a part of the run."""

    analyse: Analysis | None = None
    collect: Collection | None = None
    fit: FitResult | None = None
    allocate: AllocationResult | None = None
    balance: Balance | None = None
    select: Selection | None = None
    narrow: Narrowing | None = None
    recover: Recovery | None = None
    merge: Merge | None = None
    reduce: Tokens | None = None
    measure: Measured | None = None
    save: Saved | None = None
    compare: ComparisonResult | None = None

    @property
    def budget(self) -> Budget | None:
        """How many layers of each kind go by the predictor, alone or with trials; None where nothing was predicted."""
        found = self.allocate or self.balance
        return found.budget if found else None


@dataclass(frozen=True)
class Next:
    """A budget to try where the goal was missed."""

    budget: Budget


@dataclass(frozen=True)
class GoalResult:
    """What was wanted of a run, and whether it is met by what was measured."""

    wanted: dict[str, Any]
    is_met: bool
    text: str
    next: Next | None = None


@dataclass(frozen=True)
class SummaryResult:
    """What the whole run came to, as far as no stage says it."""

    goal: GoalResult | None = None
    warnings: tuple[str, ...] = ()
    seconds: float | None = None
