"""Numbers and short phrases as text: the same in reports, on the command line and in rendered documentation.

Standard library only. How a chart looks or a table is laid out does not belong here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from math import isfinite
from typing import TYPE_CHECKING, Protocol, TypeGuard

if TYPE_CHECKING:
    from hetdpt.core.plan import Budget
    from hetdpt.core.tokens import Tokens

NONE = "–"  # stands for a number that is not known
UNITS = ((1e9, " G"), (1e6, " M"), (1e3, " k"))
SIZES = {"embedding": "embedding", "hidden": "hidden", "heads": "heads", "head_dims": "head dims"}
"""The sizes of a model that width pruning reduces, and what tables call them."""


class Measured(Protocol):
    """A result that knows what it was measured on."""

    @property
    def device(self) -> str: ...
    @property
    def processor(self) -> str: ...
    @property
    def threads(self) -> int: ...
    @property
    def dtype(self) -> str: ...


# Numbers


def percent(value: float | None, digits: int = 2) -> str:
    """Return a percentage.

    >>> percent(97.2), percent(None)
    ('97.20 %', '–')
    """
    return f"{value:.{digits}f} %" if _is_known(value) else NONE


def signed(value: float, digits: int = 2) -> str:
    """Return a difference with its sign; a difference that is rounded to 0 has none.

    >>> signed(-0.834), signed(0.2), signed(-0.001)
    ('−0.83', '+0.20', '0.00')
    """
    text = f"{abs(value):.{digits}f}"
    sign = "" if float(text) == 0 else "+" if value > 0 else "−"
    return sign + text


def times(value: float | None, digits: int = 2, sign: str = "×") -> str:
    """Return a factor.

    >>> times(1.4321), times(1.4321, 3, "x")
    ('1.43×', '1.432x')
    """
    return f"{value:.{digits}f}{sign}" if _is_known(value) else NONE


def amount(value: float | None, decimals: int | None = None) -> str:
    """Return a large number with a unit, in three digits or with so many ``decimals``.

    >>> amount(3219068928), amount(41e6), amount(610000), amount(12), amount(17563828224, 2), amount(999.7e6)
    ('3.22 G', '41.0 M', '610 k', '12.0', '17.56 G', '1.00 G')
    """
    if not _is_known(value):
        return NONE
    least = 0.9995 if decimals is None else 1.0  # of a unit: in three digits, more is rounded to 1
    size, unit = next(((size, unit) for size, unit in UNITS if abs(value) >= least * size), (1.0, ""))
    return (f"{value / size:#.3g}".rstrip(".") if decimals is None else f"{value / size:.{decimals}f}") + unit


def milliseconds(value: float) -> str:
    """Return the time of a batch.

    >>> milliseconds(1.3), milliseconds(812.44)
    ('1.30 ms', '812.4 ms')
    """
    return f"{value:.2f} ms" if value < 100 else f"{value:.1f} ms"


def number(value: float | None) -> str:
    """Return a number in three digits.

    >>> number(12.3456), number(1234.5), number(0.0001), number(999.7)
    ('12.3', '1,234', '0.0001', '1,000')
    """
    if not _is_known(value):
        return NONE
    return f"{value:,.0f}" if abs(value) >= 999.5 else f"{value:.3g}"


def change(before: float, after: float) -> str:
    """Return a relative change in percent.

    >>> change(200, 150)
    '−25 %'
    """
    return f"{signed(100 * (after / before - 1), 0)} %" if before else NONE


def interval(low: float | None, high: float | None, digits: int = 2) -> str:
    """Return the two ends of an interval.

    >>> interval(1.4, 1.456), interval(0, None)
    ('1.40 – 1.46', '–')
    """
    return f"{low:.{digits}f} – {high:.{digits}f}" if _is_known(low) and _is_known(high) else NONE


def estimate(value: str, low: float, high: float, spell: int | Callable[[float], str] = 1) -> str:
    """Return a value that is already text, with its interval in so many digits or spelled by a function.

    >>> estimate(percent(97.5), 95.3, 98.7), estimate(signed(-0.5), -1.25, 0.25, signed)
    ('97.50 % [95.3, 98.7]', '−0.50 [−1.25, +0.25]')
    """
    ends = [f"{end:.{spell}f}" if isinstance(spell, int) else spell(end) for end in (low, high)]
    return f"{value} [{', '.join(ends)}]"


def duration(seconds: float) -> str:
    """Return a time span.

    >>> duration(4.13), duration(75), duration(7265)
    ('4.1 s', '1 min 15 s', '2 h 1 min')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def _is_known(value: float | None) -> TypeGuard[float]:
    return value is not None and isfinite(value)


# Phrases


def counted(count: int, noun: str) -> str:
    """Return a number of things.

    >>> counted(1, "split"), counted(3, "split")
    ('1 split', '3 splits')
    """
    return f"{count} {noun}{'' if count == 1 else 's'}"


def listed(items: Iterable[object]) -> str:
    """Return items as a list in a sentence.

    >>> listed([0, 4, 8]), listed(["one"])
    ('0, 4 and 8', 'one')
    """
    *others, last = map(str, items)
    return f"{', '.join(others)} and {last}" if others else last


def sides(size: Iterable[int]) -> str:
    """Return the sides of an image, such as height and width.

    >>> sides((224, 224))
    '224 x 224'
    """
    return " x ".join(map(str, size))


def layers(attention: int, activation: int) -> str:
    """Return the number of layers of each kind.

    >>> layers(3, 1), layers(0, 2)
    ('3 attention layers and 1 activation', '2 activations')
    """
    counts = {"attention layer": attention, "activation": activation}
    return " and ".join(counted(count, noun) for noun, count in counts.items() if count) or "no layers"


def split_text(budget: Budget) -> str:
    """Return the numbers of attention and activation layers that a budget removes, as charts write them.

    >>> from hetdpt.core.plan import Budget
    >>> split_text(Budget(4, 2))
    '4+2'
    """
    return f"{budget.attention}+{budget.activation}"


def budget_text(budget: Budget) -> str:
    """Return a budget in words.

    >>> from hetdpt.core.plan import Budget
    >>> budget_text(Budget(4, 2))
    '4 attention + 2 activation'
    """
    return f"{budget.attention} attention + {budget.activation} activation"


def removal_text(removal: str | tuple[str, str]) -> str:
    """Return a removal as it is written on the command line.

    >>> removal_text("plain"), removal_text(("linear", "calibrated"))
    ('plain', 'linear,calibrated')
    """
    return removal if isinstance(removal, str) else ",".join(removal)


def widths(ratios: Mapping[str, float]) -> str:
    """Return the removed part of each size.

    >>> widths({"embedding": 0.312, "hidden": 0.312, "heads": 0.0, "head_dims": 0.156})
    'embedding 31 %, hidden 31 %, heads 0 %, head dims 16 %'
    """
    return ", ".join(f"{said} {percent(100 * ratios[name], 0)}" for name, said in SIZES.items() if name in ratios)


def width(ratios: Mapping[str, float]) -> str:
    """Return the removed part of the width: of the embedding or, where that is kept, inside the blocks.

    >>> width({"embedding": 0.31, "heads": 0.5}), width({"embedding": 0.0, "heads": 0.5}), width({"heads": 0.0})
    ('31 % of its width', 'up to 50 % of the width inside its blocks', 'none of its width')
    """
    if embedding := ratios.get("embedding"):
        return f"{percent(100 * embedding, 0)} of its width"
    most = max(ratios.values(), default=0.0)
    return f"up to {percent(100 * most, 0)} of the width inside its blocks" if most else "none of its width"


def fewer_tokens(tokens: Tokens) -> str:
    """Return how tokens are reduced.

    >>> from hetdpt.core.tokens import Tokens
    >>> fewer_tokens(Tokens("tome", 8)), fewer_tokens(Tokens("gtp", 1, "decreasing"))
    ('8 tokens fewer after each attention (tome)', '1 token fewer after each attention (gtp, decreasing)')
    """
    schedule = "" if tokens.schedule == "constant" else f", {tokens.schedule}"
    return f"{counted(tokens.r, 'token')} fewer after each attention ({tokens.method}{schedule})"


def machine(found: Measured, batch: int | None = None) -> str:
    """Return the device, processor and dtype of a measurement, and its batch size."""
    threads = f", {counted(found.threads, 'thread')}" if found.device == "cpu" else ""
    text = f"{found.device} ({found.processor}{threads}), {found.dtype}"
    return text if batch is None else f"{text}, batch {batch}"
