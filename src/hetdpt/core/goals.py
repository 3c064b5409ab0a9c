"""The goals of pruning, a row each: how a goal is written, parsed, priced, met and reported. No torch here.

To add one, add a row to ``GOALS`` and a field to ``GoalFields``; if it needs a quantity that is not measured yet, add
that to ``Measures``, ``results.Price`` and ``measure_prices``. Commands, configs, allocation, the width search and the
report follow the table.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import ceil, floor, isfinite, log10
from numbers import Integral
from sys import float_info
from typing import Any, Literal

from hetdpt.core.errors import PlanError, PredictError

UNITS = {"G": 1e9, "M": 1e6, "k": 1e3}
NUMBER = re.compile(r"(\d+\.?\d*|\.\d+)(e[+-]?\d+)?\s*([kmg%]?)", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Measures:
    """What a pruned model costs, predicted or measured; None where that is not known."""

    layers: int | None = None
    """How many were removed."""
    macs: float | None = None
    params: float | None = None
    ms: float | None = None
    """Milliseconds of a batch."""
    speedup: float | None = None
    """Speedup over the dense model."""


@dataclass(frozen=True, kw_only=True)
class GoalFields:
    """The goals as settings: a config that has goals inherits from this. ``GOALS`` describes each."""

    layers: int | None = None
    speedup: float | None = None
    macs: float | str | None = None
    params: float | str | None = None

    @property
    def goals(self) -> dict[str, float | str]:
        """The goals that are set, as they were written."""
        given = {name: getattr(self, name) for name in GOALS}
        return {name: value for name, value in given.items() if value is not None}

    def amounts(self) -> dict[str, Amount]:
        """Return the goals that are set, parsed."""
        return {name: GOALS[name].parse(value) for name, value in self.goals.items()}


@dataclass(frozen=True)
class Amount:
    """A number, or a percentage of what the dense model has."""

    value: float
    is_share: bool = False

    def of(self, dense: float | None) -> float:
        """Return the number; a share is left as it is where ``dense`` is not known."""
        if not self.is_share or dense is None:
            return self.value
        return self.value * dense / 100

    def __str__(self) -> str:
        """The shortest text that is this amount to the last bit."""
        if self.is_share:
            return f"{_exact(self.value)}%"
        scaled = [_exact(self.value / size) + unit for unit, size in UNITS.items() if self._is_exact_in(size)]
        return min([_exact(self.value), *scaled], key=len)

    def _is_exact_in(self, size: float) -> bool:
        return self.value >= size and float(_exact(self.value / size)) * size == self.value


@dataclass(frozen=True, kw_only=True)
class Goal:
    """One kind of goal."""

    name: str
    """Setting, option (``--name``), keyword of ``allocate``, and the attribute of ``Measures`` that is compared."""
    metavar: str
    example: str
    help: str
    direction: Literal["exactly", "at least", "at most"]
    describe: Callable[[str], str]
    """Returns the goal in words, for an amount as text."""
    show: Callable[[float], str]
    """Returns a reached value in words."""
    is_count: bool = False
    """Whether it is a whole number, 0 included."""
    is_cost: bool = False
    """Whether the dense model has it too: it may be written with a unit (3G) or as a percentage of that (70%)."""

    @property
    def is_timed(self) -> bool:
        """Whether models have to run to tell whether it is met."""
        return self.name in ("ms", "speedup")

    @property
    def is_bound(self) -> bool:
        """Whether it bounds something, so that a narrower model can meet it too."""
        return self.direction != "exactly"

    @property
    def sign(self) -> str:
        return {"exactly": "=", "at least": ">=", "at most": "<="}[self.direction]

    @property
    def expected(self) -> str:
        """What may be written, in words."""
        if self.is_count:
            return f"a whole number of at least 0, such as {self.example}"
        share = ", or a percentage of the dense model such as 70%" if self.is_cost else ""
        return f"a number above 0, such as {self.example}{share}"

    def parse(self, value: str | float, name: str | None = None) -> Amount:
        """Return the amount that ``value`` means; ``PredictError`` if it is not one. ``name`` is used in the error.

        >>> GOALS["macs"].parse("3.2G"), GOALS["macs"].parse("70 %")
        (Amount(value=3200000000.0, is_share=False), Amount(value=70.0, is_share=True))
        """
        found = self._read(value) if isinstance(value, str) else Amount(value)
        if found is None or not self._accepts(found):
            raise PredictError(f"{name or self.name} is {value!r}; expected {self.expected}")
        return found

    def _read(self, text: str) -> Amount | None:
        found = NUMBER.fullmatch(text.strip())
        if found is None or (found[3] and not self.is_cost):
            return None
        number, unit = float(found[1] + (found[2] or "")), found[3].lower()
        if unit == "%":
            return Amount(number, is_share=True)
        scaled = number * {name.lower(): size for name, size in UNITS.items()}.get(unit, 1.0)
        return Amount(int(scaled) if self.is_count and scaled.is_integer() else scaled)

    def _accepts(self, amount: Amount) -> bool:
        value: Any = amount.value  # numpy's integers count too, which are no int
        if isinstance(value, bool) or (self.is_count and not isinstance(value, Integral)):
            return False
        if self.is_count:
            return bool(value >= 0)
        return 0 < amount.value <= (100 if amount.is_share else float_info.max)

    def format(self, value: float | str) -> str:
        """Return the shortest text that ``parse`` reads as it reads ``value``.

        >>> GOALS["macs"].format(3.2e9), GOALS["macs"].format(3219068928.0), GOALS["params"].format("70 %")
        ('3.2G', '3219068928', '70%')
        """
        return str(self.parse(value))

    def reached(self, found: Measures) -> float | None:
        """Return the quantity of ``found`` that is compared; None if it is not known."""
        value: float | None = getattr(found, self.name)
        return value

    def excess(self, reached: float, wanted: float) -> float:
        """Return the part by which ``reached`` misses ``wanted``; at most 0 if it meets it.

        >>> GOALS["macs"].excess(3e9, 2e9), GOALS["speedup"].excess(2.0, 1.5), GOALS["layers"].excess(7, 8)
        (0.5, -0.25, 0.125)
        """
        if self.direction == "exactly":
            return abs(reached - wanted) / max(wanted, 1)
        return wanted / reached - 1 if self.direction == "at least" else reached / wanted - 1

    def is_met(self, found: Measures, wanted: float, tolerance: float = 0.0) -> bool:
        """Whether ``found`` meets it, within a part of ``tolerance``; False if it is not known."""
        reached = self.reached(found)
        return reached is not None and self.excess(reached, wanted) <= tolerance

    def shortfall(self, reached: float, wanted: float) -> str:
        """Return by how much ``reached`` misses ``wanted``, in words.

        >>> GOALS["speedup"].shortfall(1.2, 1.5)
        'the goal was at least 1.5× faster, the result is a speedup of 1.2: missed by 20.0 %'
        """
        by = 100 * abs(reached / wanted - 1)
        goal, result = self.describe(short(wanted)), self.show(reached)
        return f"the goal was {goal}, the result is {result}: missed by {by:.1f} %"

    def attainable(self, reached: float) -> float:
        """Return ``reached``, rounded so that it meets the rounded number as a goal."""
        if self.direction == "exactly" or not isfinite(reached) or reached <= 0:
            return reached
        step = 10.0 ** (floor(log10(reached)) - 3)
        return (floor if self.direction == "at least" else ceil)(reached / step) * step


def _layers(count: str) -> str:
    return f"{'no' if count == '0' else count} layer{'' if count == '1' else 's'} removed"


def _cost(name: str, noun: str, example: str) -> Goal:
    return Goal(
        name=name,
        metavar="AMOUNT",
        example=example,
        help=f"Goal: at most this many {noun} left, such as {example} or 70%.",
        direction="at most",
        describe=lambda amount: f"at most {amount}{' of the' if amount.endswith('%') else ''} {noun}",
        show=lambda value: f"{short(value)} {noun}",
        is_cost=True,
    )


GOALS: Mapping[str, Goal] = {
    goal.name: goal
    for goal in (
        Goal(
            name="layers",
            metavar="N",
            example="8",
            help="Goal: remove this many layers.",
            direction="exactly",
            describe=_layers,
            show=lambda value: f"{value:.0f} layer{'' if value == 1 else 's'}",
            is_count=True,
        ),
        Goal(
            name="speedup",
            metavar="X",
            example="1.5",
            help="Goal: at least this many times faster on this device, such as 1.5.",
            direction="at least",
            describe=lambda amount: f"at least {amount}× faster",
            show=lambda value: f"a speedup of {value:.4g}",
        ),
        _cost("macs", "MACs", "3G"),
        _cost("params", "parameters", "16M"),
    )
}
BOUNDS = tuple(name for name, goal in GOALS.items() if goal.is_bound)
"""The goals that a narrower model can meet too."""


@dataclass(frozen=True)
class Wanted:
    """Goals in numbers, all of them to be met.

    >>> str(Wanted({"speedup": 1.5, "macs": 3.2e9}))
    'speedup >= 1.5 and macs <= 3.2G'
    """

    conditions: Mapping[str, float]
    """The number of each goal, by its name."""

    def __post_init__(self) -> None:
        given: dict[str, Any] = dict(self.conditions)
        if unknown := given.keys() - GOALS.keys():
            raise PredictError(f"{min(unknown)} is not a goal; expected {', '.join(GOALS)}")
        if not given:
            raise PredictError(f"no goal was given; expected {', '.join(GOALS)}, or several of them")
        for name, value in given.items():
            if isinstance(value, str):
                raise PredictError(f"{name} is {value!r}; expected a number, not text")
            GOALS[name].parse(value)
        object.__setattr__(self, "conditions", {name: given[name] for name in GOALS if name in given})

    def miss(self, found: Measures) -> float:
        """Return the sum of the parts by which ``found`` misses the goals; 0 if it meets all that are known."""
        reached = {name: GOALS[name].reached(found) for name in self.conditions}
        known = {name: value for name, value in reached.items() if value is not None}
        return sum(max(0.0, GOALS[name].excess(value, self.conditions[name])) for name, value in known.items())

    def missed(self, found: Measures) -> list[str]:
        """Return the names of the goals that ``found`` does not meet."""
        return [name for name, value in self.conditions.items() if not GOALS[name].is_met(found, value)]

    def __str__(self) -> str:
        return " and ".join(f"{name} {GOALS[name].sign} {short(value)}" for name, value in self.conditions.items())


def require_pruning(goals: Mapping[str, float | str]) -> None:
    """Raise unless ``goals``, as they were written, are goals that a dense model does not meet.

    >>> require_pruning({"speedup": 1})
    Traceback (most recent call last):
    hetdpt.core.errors.PlanError: the dense model already meets the goal speedup 1; set a harder one, such as 1.5
    """
    for name, value in goals.items():
        goal, amount = GOALS[name], GOALS[name].parse(value)
        if goal.is_met(Measures(layers=0, speedup=1.0), amount.value):
            text = f"the dense model already meets the goal {name} {amount}; set a harder one, such as {goal.example}"
            raise PlanError(text)


def describe(goals: Mapping[str, float | str]) -> str:
    """Return goals, as they were written, in words.

    >>> describe({"layers": 1}), describe({"speedup": 1.5, "macs": "70%"})
    ('1 layer removed', 'at least 1.5× faster, at most 70% of the MACs')
    """
    known = {name: value for name, value in goals.items() if name in GOALS}
    return ", ".join(GOALS[n].describe(v if isinstance(v, str) else short(v)) for n, v in known.items())


def show(found: Measures) -> str:
    """Return all quantities that can be a goal, rounded so that the text can be used as a goal that is met.

    >>> show(Measures(layers=8, macs=3219068928, params=16e6, speedup=1.43219))
    '8 layers, a speedup of 1.432, 3.22G MACs, 16M parameters'
    """
    reached = {goal: goal.reached(found) for goal in GOALS.values()}
    return ", ".join(
        goal.show(goal.attainable(value)) for goal, value in reached.items() if value is not None and isfinite(value)
    )


def short(value: float) -> str:
    """Return a number in four digits as it is written on the command line.

    >>> short(2.4e9), short(5.72e6), short(1.5), short(0.0)
    ('2.4G', '5.72M', '1.5', '0')
    """
    for unit, size in UNITS.items():
        if abs(value) >= size:
            return f"{value / size:.4g}{unit}"
    return f"{value:.4g}"


def _exact(value: float) -> str:
    return str(int(value)) if float(value).is_integer() and abs(value) < 1e15 else repr(float(value))
