"""Amounts as people write them, such as 3.2G or 70%. No torch here."""

from __future__ import annotations

import re
from dataclasses import dataclass

from hetdpt.core.errors import PredictError

PRICES_FILE = "prices.json"  # of a directory of hetdpt collect
UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9}
AMOUNT = re.compile(r"(\d+\.?\d*|\.\d+)(e[+-]?\d+)?\s*([kmg%]?)", re.IGNORECASE)


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
