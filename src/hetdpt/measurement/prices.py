"""What layers cost, so that a split of a budget has its MACs, parameters and speed. No torch here."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from math import inf, isfinite
from typing import Any

from hetdpt.core.errors import PredictError
from hetdpt.core.plan import KINDS, Budget, Kind
from hetdpt.store.atomic import CHECKSUM, parse_json, sealed

PRICES_FILE = "prices.json"  # of a directory of hetdpt collect
UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9}
AMOUNT = re.compile(r"(\d+\.?\d*|\.\d+)(e[+-]?\d+)?\s*([kmg%]?)", re.IGNORECASE)


@dataclass(frozen=True)
class Price:
    """What a model costs, or what one layer less saves of it."""

    macs: float
    params: float
    ms: float | None = None
    """Milliseconds of a batch; None where nobody has measured."""


@dataclass(frozen=True)
class Prices:
    """The dense model, and what the removal of each of its layers saves, one at a time.

    A split says how many layers of a kind go, not which. So a layer counts as the mean of its kind: exact where all
    blocks are alike, as in a ViT; an expectation where stages differ, as in Swin.

    >>> prices = Prices(Price(10, 10, 8.0), (Price(2, 1, 1.0),) * 4, (Price(1, 1, 0.5),) * 4)
    >>> prices.of(Budget(2, 4)), prices.speedup(Budget(2, 4))
    (Price(macs=2.0, params=4.0, ms=4.0), 2.0)
    """

    dense: Price
    attention: tuple[Price, ...]
    activation: tuple[Price, ...]
    measured: str = ""
    """On which device, in which dtype and batch the milliseconds were measured."""

    def of(self, budget: Budget) -> Price:
        """Return what is left of the dense model once the layers of ``budget`` are gone."""
        ms = None
        if self.dense.ms is not None:
            ms = self.dense.ms - self._saved(budget, "ms")
        macs, params = self.dense.macs - self._saved(budget, "macs"), self.dense.params - self._saved(budget, "params")
        return Price(macs, params, ms)

    def speedup(self, budget: Budget) -> float | None:
        """Return how many times faster it then is by the time of each layer; None where nobody has measured."""
        left = self.of(budget).ms
        if left is None or self.dense.ms is None:
            return None
        return self.dense.ms / left if left > 0 else inf

    def count(self, kind: Kind) -> int:
        """Return how many layers of that kind can go."""
        return len(self._of_kind(kind))

    def _saved(self, budget: Budget, what: str) -> float:
        total = 0.0
        for kind, count in zip(KINDS, (budget.attention, budget.activation), strict=True):
            if count:
                values = [getattr(price, what) for price in self._of_kind(kind)]
                total += count * sum(values) / len(values)
        return total

    def _of_kind(self, kind: Kind) -> tuple[Price, ...]:
        return self.attention if kind == "attention" else self.activation

    def to_json(self) -> str:
        return json.dumps(sealed(asdict(self)), indent=1)

    @classmethod
    def from_json(cls, text: str, name: str = "the prices") -> Prices:
        """Return the prices written in ``text``; ``PredictError`` if they are none, or others than their checksum."""
        try:
            values: dict[str, Any] = parse_json(text)
            seal = values.pop(CHECKSUM, None) if isinstance(values, dict) else None  # those written by hand have none
            if seal is not None and seal != sealed(values)[CHECKSUM]:
                raise ValueError("they are not what was written; without the checksum they are taken as they are")
            kinds = {kind: tuple(_price(price) for price in values[kind]) for kind in KINDS}
            found = cls(_price(values["dense"]), **kinds, measured=str(values["measured"]))
            if min(found.dense.macs, found.dense.params, 1 if found.dense.ms is None else found.dense.ms) <= 0:
                raise ValueError("the dense model costs nothing")
            if len({price.ms is None for price in (found.dense, *found.attention, *found.activation)}) > 1:
                raise ValueError("some have a time and some have none")
            return found
        except (ValueError, TypeError, KeyError) as error:
            raise PredictError(f"{name} cannot be read ({error}); measure them again with --model") from None


def _price(values: Any) -> Price:
    price = Price(**values)
    numbers = price.macs, price.params, 0.0 if price.ms is None else price.ms
    if not all(type(number) in (int, float) and isfinite(number) for number in numbers):
        raise ValueError(f"{values} are no numbers")
    return price


@dataclass(frozen=True)
class Amount:
    """A number, or a part of what the dense model has."""

    value: float
    is_part: bool = False

    def of(self, dense: float | None) -> float:
        """Return the number; ``allocate`` says what is missing where there is no ``dense``."""
        if not self.is_part or dense is None:
            return self.value
        return self.value * dense / 100


def read_amount(name: str, value: str | float) -> Amount:
    """Return the amount that ``value`` says; ``name`` is what an error calls it.

    >>> read_amount("macs", "3.2G"), read_amount("macs", "70 %")
    (Amount(value=3200000000.0, is_part=False), Amount(value=70.0, is_part=True))
    """
    if not isinstance(value, str):
        return Amount(value)
    found = AMOUNT.fullmatch(value.strip())
    if found is None:
        raise PredictError(
            f"{name} is {value!r}; a number such as 3.2G, 16M or 3200000, or a part of the dense model such as 70%, "
            "was expected"
        )
    number, unit = float(found[1] + (found[2] or "")), found[3].lower()
    return Amount(number, is_part=True) if unit == "%" else Amount(number * UNITS[unit])
