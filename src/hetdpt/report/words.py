"""Numbers, and small things in words, the same on a page, in Markdown and in hints. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import Any

from hetdpt.core.plan import Budget
from hetdpt.core.tokens import Tokens
from hetdpt.report.results import Analysis, Measured

NONE = "–"  # where there is no number
UNITS = ((1e9, " G"), (1e6, " M"), (1e3, " k"))
SIZES = {"embedding": "embedding", "hidden": "hidden", "heads": "heads", "head_dims": "head dims"}
"""What the sizes are called whose parts go with width."""


def percent(value: float | None, digits: int = 2) -> str:
    """Return a percentage.

    >>> percent(97.2), percent(None)
    ('97.20 %', '–')
    """
    return NONE if value is None or not isfinite(value) else f"{value:.{digits}f} %"


def signed(value: float, digits: int = 2) -> str:
    """Return a difference with its sign, which for nothing is none.

    >>> signed(-0.834), signed(0.2), signed(-0.001)
    ('−0.83', '+0.20', '0.00')
    """
    text = f"{abs(value):.{digits}f}"
    sign = "" if float(text) == 0 else "+" if value > 0 else "−"
    return sign + text


def times(value: float | None) -> str:
    """Return a factor.

    >>> times(1.4321)
    '1.43×'
    """
    return NONE if value is None or not isfinite(value) else f"{value:.2f}×"


def amount(value: float | None) -> str:
    """Return a large number as one says it.

    >>> amount(3219068928), amount(41e6), amount(610000), amount(12)
    ('3.22 G', '41.0 M', '610 k', '12.0')
    """
    if value is None or not isfinite(value):
        return NONE
    for size, unit in UNITS:
        if abs(value) >= size:
            return _three(value / size) + unit
    return _three(value)


def _three(value: float) -> str:
    return f"{value:#.3g}".rstrip(".")


def milliseconds(value: float) -> str:
    """Return a time of a batch.

    >>> milliseconds(1.3), milliseconds(812.44)
    ('1.30 ms', '812.4 ms')
    """
    return f"{value:.2f} ms" if value < 100 else f"{value:.1f} ms"


def number(value: float | None) -> str:
    """Return three digits of a number.

    >>> number(12.3456), number(1234.5), number(0.0001)
    ('12.3', '1,234', '0.0001')
    """
    if value is None or not isfinite(value):
        return NONE
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def change(before: float, after: float) -> str:
    """Return by which part something changed.

    >>> change(200, 150)
    '−25 %'
    """
    return f"{signed(100 * (after / before - 1), 0)} %" if before else NONE


def interval(low: float | None, high: float | None) -> str:
    """Return where something lies.

    >>> interval(1.4, 1.456), interval(0, None)
    ('1.40 – 1.46', '–')
    """
    if low is None or high is None or not isfinite(high - low):
        return NONE
    return f"{low:.2f} – {high:.2f}"


def duration(seconds: float) -> str:
    """Return how long something took.

    >>> duration(4.13), duration(75), duration(7265)
    ('4.1 s', '1 min 15 s', '2 h 1 min')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def layers(attention: int, activation: int) -> str:
    """Return how many layers of each kind there are, in words.

    >>> layers(3, 1), layers(0, 2)
    ('3 attention layers and 1 activation', '2 activations')
    """
    counts = {"attention layer": attention, "activation": activation}
    return " and ".join(counted(count, noun) for noun, count in counts.items() if count) or "no layers"


def widths(ratios: Mapping[str, float]) -> str:
    """Return which part of each size went.

    >>> widths({"embedding": 0.312, "hidden": 0.312, "heads": 0.0, "head_dims": 0.156})
    'embedding 31 %, hidden 31 %, heads 0 %, head dims 16 %'
    """
    return ", ".join(f"{said} {percent(100 * ratios[name], 0)}" for name, said in SIZES.items() if name in ratios)


def width(ratios: Mapping[str, float]) -> str:
    """Return how much of its width a model has lost: that of its embedding or, where that stays, inside its blocks.

    >>> width({"embedding": 0.31, "heads": 0.5}), width({"embedding": 0.0, "heads": 0.5}), width({"heads": 0.0})
    ('31 % of its width', 'up to 50 % of the width inside its blocks', 'none of its width')
    """
    if embedding := ratios.get("embedding"):
        return f"{percent(100 * embedding, 0)} of its width"
    most = max(ratios.values(), default=0.0)
    return f"up to {percent(100 * most, 0)} of the width inside its blocks" if most else "none of its width"


def fewer(tokens: Tokens) -> str:
    """Return how tokens are reduced.

    >>> fewer(Tokens("tome", 8)), fewer(Tokens("gtp", 1, "decreasing"))
    ('8 tokens fewer after each attention (tome)', '1 token fewer after each attention (gtp, decreasing)')
    """
    schedule = "" if tokens.schedule == "constant" else f", {tokens.schedule}"
    return f"{counted(tokens.r, 'token')} fewer after each attention ({tokens.method}{schedule})"


def short(budget: Budget) -> str:
    """Return a split as the pictures call it.

    >>> short(Budget(4, 2))
    '4+2'
    """
    return f"{budget.attention}+{budget.activation}"


def counted(count: int, noun: str) -> str:
    """Return a number of things.

    >>> counted(1, "split"), counted(3, "split")
    ('1 split', '3 splits')
    """
    return f"{count} {noun}{'' if count == 1 else 's'}"


def place(found: Measured | Analysis) -> str:
    """Return what numbers were measured on."""
    threads = f", {counted(found.threads, 'thread')}" if found.device == "cpu" else ""
    text = f"{found.device} ({found.processor}{threads}), {found.dtype}"
    return f"{text}, batch {found.batch}" if isinstance(found, Measured) else text


def wanted(goals: dict[str, Any]) -> str:
    """Return a goal in words.

    >>> wanted({"layers": 8}), wanted({"layers": 0}), wanted({"speedup": 1.5, "macs": "70%"})
    ('8 layers go', 'no layers go', 'at least 1.5× faster, at most 70% of the MACs')
    """
    known = {
        "layers": lambda value: f"{counted(int(value), 'layer') if value else 'no layers'} go{'es' * (value == 1)}",
        "speedup": lambda value: f"at least {value:g}× faster",
        "macs": lambda value: f"at most {_part(value)} MACs",
        "params": lambda value: f"at most {_part(value)} parameters",
    }
    return ", ".join(known[name](value) for name, value in goals.items() if name in known)


def _part(value: float | str) -> str:
    return f"{value} of the" if isinstance(value, str) else amount(value)
