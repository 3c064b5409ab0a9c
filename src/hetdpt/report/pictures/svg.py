"""Plain SVG as text: elements, scales, axes, marks. What is put in is escaped; knows nothing of runs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil, cos, floor, isfinite, log10, pi, sin

from markupsafe import Markup, escape

Value = str | float | None
LETTER = 6.4  # width of a letter of a label, about
NARROW_BELOW = 500  # of the width of a picture: then there is less room for words


def tag(name: str, *inside: str, **attributes: Value) -> Markup:
    """Return an element; underscores in names become hyphens, and what is None is left out.

    >>> tag("text", "a < b", class_="t", text_anchor="end", x=1.50)
    Markup('<text class="t" text-anchor="end" x="1.5">a &lt; b</text>')
    """
    given = {key: value for key, value in attributes.items() if value is not None}
    parts = [f' {key.rstrip("_").replace("_", "-")}="{escape(_spell(value))}"' for key, value in given.items()]
    content = Markup("").join(inside)
    return Markup(f"<{name}{''.join(parts)}>{content}</{name}>") if content else Markup(f"<{name}{''.join(parts)}/>")


def _spell(value: str | float) -> str:
    return value if isinstance(value, str) else f"{value:.2f}".rstrip("0").rstrip(".")


def drawing(width: float, height: float, label: str, *inside: str) -> Markup:
    """Return a whole picture; ``label`` says what it shows to those who cannot see it."""
    box = f"0 0 {_spell(width)} {_spell(height)}"
    return tag("svg", *inside, viewBox=box, role="group", aria_label=label, class_="picture")


def mark(hint: str, *inside: str, **attributes: Value) -> Markup:
    """Return something to point at: ``hint`` is told of it, its first line as a title."""
    return tag("g", tag("title", hint), *inside, **{"class_": "mark", "role": "img", **attributes})


def text(x: float, y: float, words: str, *classes: str, anchor: str | None = None) -> Markup:
    return tag("text", words, x=x, y=y, class_=" ".join(("t", *classes)), text_anchor=anchor)


def line(x1: float, y1: float, x2: float, y2: float, class_: str) -> Markup:
    return tag("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=class_)


def rectangle(x: float, y: float, width: float, height: float, class_: str, **attributes: Value) -> Markup:
    return tag("rect", x=x, y=y, width=max(width, 0), height=max(height, 0), class_=class_, **attributes)


def path(points: Iterable[tuple[float, float]], class_: str, is_closed: bool = False, **attributes: Value) -> Markup:
    """Return a line through ``points``."""
    steps = "L".join(f"{_spell(x)} {_spell(y)}" for x, y in points)
    return tag("path", d=f"M{steps}{'Z' * is_closed}", class_=class_, **attributes)


@dataclass(frozen=True)
class Scale:
    """Where numbers from ``low`` to ``high`` lie on the page."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)

    def clipped(self, value: float) -> float:
        """Return the same, but within the picture."""
        return self(min(max(value, self.low), self.high))

    @classmethod
    def around(cls, values: Iterable[float], start: float, end: float, margin: float = 0.08) -> Scale:
        """Return a scale on which ``values`` lie with some room around them."""
        found = [value for value in values if isfinite(value)] or [0.0, 1.0]
        span = max(found) - min(found) or 0.1 * abs(found[0]) or 1.0
        return cls(min(found) - margin * span, max(found) + margin * span, start, end)

    def ticks(self, most: int, is_whole: bool = False) -> list[float]:
        """Return round numbers on the scale, about ``most`` of them.

        >>> Scale(0.93, 1.61, 0, 1).ticks(5), Scale(-0.2, 5.2, 0, 1).ticks(4, is_whole=True)
        ([1.0, 1.2, 1.4, 1.6], [0.0, 2.0, 4.0])
        """
        rough = (self.high - self.low) / max(most, 1)
        power = 10.0 ** floor(log10(rough))
        step = next(power * by for by in (1, 2, 5, 10) if power * by >= rough * 0.999)
        step = max(step, 1.0) if is_whole else step
        first, last = ceil(self.low / step), floor(self.high / step + 1e-9)
        return [round(count * step, 10) for count in range(first, last + 1)]


@dataclass(frozen=True)
class Frame:
    """A plot: its scales, and what its axes say."""

    width: float
    height: float
    x: Scale
    y: Scale
    across: str
    up: str
    unit: str
    """Of the numbers along the bottom."""
    is_whole: bool
    """Whether those are whole numbers only."""

    def axes(self) -> Markup:
        """Return grid, numbers and names of the axes."""
        parts = []
        for value in self.y.ticks(5):
            parts.append(line(self.x.start, self.y(value), self.x.end, self.y(value), "grid"))
            parts.append(text(self.x.start - 8, self.y(value) + 4, f"{value:g}", anchor="end"))
        for value in self.x.ticks(round((self.x.end - self.x.start) / (45 if self.is_whole else 78)), self.is_whole):
            parts.append(line(self.x(value), self.y.start, self.x(value), self.y.start + 5, "axis"))
            parts.append(text(self.x(value), self.y.start + 19, f"{value:g}{self.unit}", anchor="middle"))
        parts.append(line(self.x.start, self.y.start, self.x.end, self.y.start, "axis"))
        parts.append(text(self.x.end, self.y.start + 38, self.across, "name", anchor="end"))
        parts.append(text(0, self.y.end - 14, self.up, "name"))
        return Markup("").join(parts)

    def at(self, x: float, y: float) -> tuple[float, float]:
        """Return where a point lies."""
        return self.x(x), self.y(y)


def frame(
    width: float,
    height: float,
    xs: Iterable[float],
    ys: Iterable[float],
    across: str,
    up: str,
    unit: str = "",
    is_whole: bool = False,
) -> Frame:
    """Return a plot in which all of ``xs`` and ``ys`` have their place."""
    sides, heights = Scale.around(xs, 48, width - 20, 0.04), Scale.around(ys, height - 46, 30)
    return Frame(width, height, sides, heights, across, up, unit, is_whole)


def cross(x: float, y: float, class_: str, size: float = 4.5) -> Markup:
    lines = f"M{_spell(x - size)} {_spell(y - size)}l{2 * size} {2 * size}m0 {-2 * size}l{-2 * size} {2 * size}"
    return tag("path", d=lines, class_=class_)


def circle(x: float, y: float, radius: float, class_: str, **attributes: Value) -> Markup:
    return tag("circle", cx=x, cy=y, r=radius, class_=class_, **attributes)


def ring(x: float, y: float, radius: float) -> Markup:
    """Return the sign of what was chosen."""
    return tag("g", circle(x, y, radius, "halo"), circle(x, y, radius, "chosen"))


SIDES = {"o": 0, "s": 4, "^": 3, "D": 4, "v": 3, "P": 12, "X": 12, "h": 6, "*": 10, ".": 0}
TURNS = {"s": 0.125, "D": 0.0, "^": 0.0, "v": 0.5, "P": 0.0, "X": 0.125, "h": 0.0, "*": 0.0}


def shape(name: str, x: float, y: float, size: float, class_: str, **attributes: Value) -> Markup:
    """Return a marker by the letter that matplotlib has for it, so that pictures of one thing look alike."""
    if not SIDES[name]:
        return circle(x, y, size * (1.0 if name == "o" else 0.6), class_, **attributes)
    points = [_corner(name, number) for number in range(SIDES[name])]
    return path([(x + size * a, y + size * b) for a, b in points], class_, is_closed=True, **attributes)


def _corner(name: str, number: int) -> tuple[float, float]:
    sides, turn = SIDES[name], TURNS[name]
    radius = 1.25
    if name == "*" and number % 2:
        radius = 0.55
    if name in "PX":  # a cross with arms: two outer corners, then an inner one
        arm, angle = 0.42, number // 3 * 0.25
        corner = ((-arm, -1.25), (arm, -1.25), (arm, -arm))[number % 3]
        return _turned(*corner, angle + turn)
    return _turned(0, -radius, number / sides + turn)


def _turned(x: float, y: float, turn: float) -> tuple[float, float]:
    """Return a point turned clockwise by a part of a full turn."""
    angle = 2 * pi * turn
    return x * cos(angle) - y * sin(angle), x * sin(angle) + y * cos(angle)
