"""Confidence intervals of rates. No torch here."""

from __future__ import annotations

from math import sqrt

Z = 1.959964  # of a 95 % interval


def wilson_interval(right: float, count: float) -> tuple[float, float]:
    """Return the 95 % interval of a rate in percent (Wilson, 1927), which never leaves 0 to 100.

    >>> low, high = wilson_interval(0, 10)
    >>> (round(low, 1), round(high, 1))
    (0.0, 27.8)
    """
    rate, spread = right / count, Z * Z / count
    centre = (rate + spread / 2) / (1 + spread)
    half = Z / (1 + spread) * sqrt(rate * (1 - rate) / count + spread / (4 * count))
    low = 0.0 if right == 0 else centre - half
    high = 1.0 if right == count else centre + half
    return 100 * low, 100 * high
