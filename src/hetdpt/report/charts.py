"""The one chart layer: style, colours, marks and saving, for figure files and for the HTML page. No torch here.

A draw function gets a ``Chart`` and does not know where it will be shown. ``save`` writes a PNG or SVG file;
``page_figure`` gives pictures for the page, one for a desk and one for a phone, in which marks have hints and colours
follow the theme. No information is in colour alone. matplotlib is imported only when something is drawn.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from io import StringIO
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

from markupsafe import Markup

from hetdpt.core.errors import FileError

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg")
WIDE, NARROW = 820.0, 312.0  # width of a picture on a desk and on a phone, in pixels
HALF, SQUARE = 400.0, 500.0  # width of one of two pictures side by side, and of one with text beside it
NARROW_BELOW = 500.0

# colours of Okabe and Ito, which the colour-blind can distinguish
BLUE, SKY, ORANGE, YELLOW = "#0072B2", "#56B4E9", "#D55E00", "#E69F00"
GREEN, PINK, GREY, PLUM = "#009E73", "#CC79A7", "#999999", "#882255"
THEME = {
    "ink": "#000000", "soft": "#555555", "rule": "#DDDDDD", "paper": "#FFFFFF", "accent": BLUE, "orange": ORANGE,
    "green": GREEN,
}  # fmt: skip
"""Colours by name: on the page each is the variable of style.css of that name, light or dark."""
MARKED = {name: f"#0000{number:02x}" for number, name in enumerate(THEME, 1)}
"""Placeholders for them while the page's pictures are drawn: colours that no chart uses."""

STYLE: Any = {
    "axes.axisbelow": True, "axes.grid": True, "axes.grid.axis": "y", "axes.spines.right": False,
    "axes.spines.top": False, "axes.titlesize": "medium", "grid.linewidth": 0.6, "legend.columnspacing": 1.4,
    "legend.fontsize": "small", "legend.frameon": False, "text.parse_math": False,
}  # fmt: skip
ON_PAGE: Any = {"font.size": 12, "axes.labelsize": 12.5, "svg.fonttype": "none"}


@dataclass(frozen=True)
class Look:
    """How points, a line or boxes are drawn; a colour is a name of ``THEME`` or a code."""

    colour: str = "ink"
    marker: str = ""
    size: float = 6
    line: str = ""
    """The line style of matplotlib; empty for points without a line."""
    width: float = 1.2
    fill: str | None = None
    """The colour inside; ``colour`` by default."""
    alpha: float = 1.0
    order: int = 3
    """What has a higher one is drawn on top."""
    is_box: bool = False
    css: str = ""
    """Class of the marks on the page."""


ERROR = Look("ink", line="-", width=1.4)


@dataclass(frozen=True)
class Sign:
    """An entry of a legend on the page; one with a series is a button that shows and hides it."""

    label: str
    swatch: Markup
    series: str = ""


@dataclass(frozen=True)
class Marked:
    """Artists that the page treats as one: with a hint it is something to point at."""

    artists: tuple[Artist, ...]
    hint: str
    series: str
    css: str
    picks: str = ""


@dataclass
class Chart:
    """One panel of a figure, and what the page has to know of it."""

    panel: Axes
    is_page: bool = False
    marks: list[Marked] = field(default_factory=list)
    signs: dict[str, Sign] = field(default_factory=dict)

    @property
    def width(self) -> float:
        """The width in pixels of the page."""
        figure: Any = self.panel.figure
        return float(figure.get_figwidth() * 72)

    def colour(self, name: str) -> str:
        return (MARKED if self.is_page else THEME).get(name, name)

    def name(self, across: str, up: str, title: str = "") -> None:
        """Name the axes; the title is for files alone, the page has headings."""
        self.panel.set_xlabel(across)
        self.panel.set_ylabel(up)
        if title and not self.is_page:
            self.panel.set_title(title)

    def fit(self, xs: Iterable[float], ys: Iterable[float]) -> None:
        """Set the limits such that all points have their place with some room around them."""
        for set_, values in ((self.panel.set_xlim, xs), (self.panel.set_ylim, ys)):
            found = [value for value in values if isfinite(value)] or [0.0, 1.0]
            span = max(found) - min(found) or 0.1 * abs(found[0]) or 1.0
            set_(min(found) - 0.06 * span, max(found) + 0.08 * span)

    def plot(
        self, xs: Sequence[float], ys: Sequence[float], look: Look, label: str = "", hints: Sequence[str] = ()
    ) -> None:
        """Draw points, and the line through them; the page has ``label`` as a series, and a hint for each point."""
        name: Any = {"label": label} if label else {}
        self.sign(label, look, label)
        if not self.is_page:
            self.panel.plot(xs, ys, **self._style(look), **name)
            return
        if look.line:
            line = self.panel.plot(xs, ys, **{**self._style(look), "marker": ""})
            self.mark("", *line, series=label)
        for x, y, hint in zip(xs, ys, hints or [""] * len(xs), strict=True) if look.marker else ():
            self.point(x, y, look, hint, label)

    def point(
        self,
        x: float,
        y: float,
        look: Look,
        hint: str = "",
        series: str = "",
        x_ends: tuple[float, float] | None = None,
        y_ends: tuple[float, float] | None = None,
        picks: str = "",
    ) -> None:
        """Draw one point, and its intervals as a cross of lines; on the page it is a button that ``picks`` a part."""
        drawn: list[Artist] = [self.span(x_ends, (y, y), ERROR)] if x_ends else []
        drawn += [self.span((x, x), y_ends, ERROR)] if y_ends else []
        drawn += self.panel.plot([x], [y], **{**self._style(look), "linestyle": "none"})
        if hint and self.is_page:  # a finger needs more than a small marker
            drawn += self.panel.plot([x], [y], marker="o", markersize=18, alpha=0, linestyle="none")
        self.mark(hint, *drawn, series=series, css=look.css, picks=picks)

    def span(self, x: tuple[float, float], y: tuple[float, float], look: Look, label: str = "") -> Artist:
        """Draw a line from corner to corner, as far as it is within the limits: an interval, or an error bar."""
        (left, right), (low, high) = self.panel.get_xlim(), self.panel.get_ylim()
        xs, ys = [min(max(one, left), right) for one in x], [min(max(one, low), high) for one in y]
        (line,) = self.panel.plot(xs, ys, **{**self._style(look), "linestyle": look.line or "-", "marker": ""})
        if label:
            line.set_label(f"_{label}" if label in self.signs else label)  # once in the legend
            self.sign(label, look, label)
            self.mark("", line, series=label)
        return line

    def box(self, corner: tuple[float, float], size: tuple[float, float], look: Look) -> Artist:
        """Draw a rectangle."""
        from matplotlib.patches import Rectangle

        edge: Any = {"edgecolor": self.colour(look.colour), "linewidth": look.width} if look.line else {"linewidth": 0}
        inside = self.colour(look.fill or look.colour)
        box = Rectangle(corner, *size, facecolor=inside, alpha=look.alpha, zorder=look.order, **edge)
        if look.line:
            box.set(linestyle=look.line)
        self.panel.add_artist(box)  # add_patch would look for new limits, which takes as long as drawing
        return box

    def level(self, value: float, text: str, dashes: str = "--", series: str = "") -> None:
        """Draw a line at one value, with text on it."""
        line = self.panel.axhline(value, color=self.colour("ink"), linewidth=1.0, linestyle=dashes, zorder=1)
        place: Any = {"xytext": (-3, 3), "textcoords": "offset points", "xycoords": self.panel.get_yaxis_transform()}
        words = self.panel.annotate(text, (1, value), ha="right", va="bottom", fontsize="small", zorder=1, **place)
        self.mark("", line, words, series=series)

    def text(self, x: float, y: float, text: str, shift: tuple[float, float] = (0, 0), **how: Any) -> Artist:
        """Write beside a point, ``shift`` pixels away."""
        how["color"] = self.colour(how.get("color", "ink"))
        text = re.sub(r"[\x00-\x1f\ufffe\uffff]", "\ufffd", text)  # which names of files may have, and SVG may not
        return self.panel.annotate(text, (x, y), shift, textcoords="offset points", zorder=6, **how)

    def say(self, text: str) -> None:
        """Write ``text`` in the middle of an empty panel."""
        self.panel.text(0.5, 0.5, text, transform=self.panel.transAxes, ha="center", va="center")

    def mark(self, hint: str, *artists: Artist, series: str = "", css: str = "", picks: str = "") -> None:
        """Make artists one mark with a ``hint``, its first line as title; they appear and disappear with ``series``."""
        self.marks.append(Marked(artists, hint, series, css, picks))

    def sign(self, label: str, look: Look, series: str = "") -> None:
        """Add an entry to the legend of the page."""
        if label and label not in self.signs:
            self.signs[label] = Sign(label, _swatch(look) if self.is_page else Markup(), series)

    def places(self, count: int, label: str) -> None:
        """Count blocks or epochs along the bottom."""
        self.panel.set_xticks(range(0, count, -(-count // 20)))
        self.panel.set_xlim(-0.6, count - 0.4)
        self.panel.set_xlabel(label)
        self.panel.tick_params(labelbottom=True)

    def logarithm(self) -> None:
        """Make the axis of values logarithmic, with plain numbers on it."""
        self.panel.set_yscale("log")
        self.panel.yaxis.set_major_formatter("{x:g}")

    def legend(self, columns: int, below: float = 0.08) -> None:
        """Put the legend below the panel; the page has signs instead."""
        if not self.is_page and self.panel.get_legend_handles_labels()[0]:
            self.panel.legend(loc="upper center", bbox_to_anchor=(0.5, -below), ncols=columns)

    def _style(self, look: Look) -> dict[str, Any]:
        colour = self.colour(look.colour)
        edge = 2.0 if look.marker == "x" else max(look.width, 1.0)
        return {
            "color": colour, "marker": look.marker, "markersize": look.size, "linestyle": look.line or "none",
            "linewidth": look.width, "markerfacecolor": self.colour(look.fill or look.colour),
            "markeredgecolor": colour, "markeredgewidth": edge, "alpha": look.alpha, "zorder": look.order,
        }  # fmt: skip


# Files


def require_figure(path: Path) -> None:
    """Raise ``FileError`` unless the name of ``path`` is that of a figure."""
    if path.suffix.lower() not in SUFFIXES:
        raise FileError(f"a figure is a file that ends in {' or '.join(SUFFIXES)}, but {path.name} does not")


def save(
    path: Path, draw: Callable[..., None], size: tuple[float, float] = (10, 6.5), shape: tuple[int, int] = (1, 1)
) -> None:
    """Write a figure of ``size`` inches, PNG or SVG by its name; ``draw`` gets ``shape`` (rows, columns) of charts."""

    def draw_charts(figure: Figure) -> None:
        figure.set_layout_engine("constrained")
        draw(*(Chart(panel) for panel in figure.subplots(*shape, squeeze=False).flat))

    save_figure(path, draw_charts, size)


def save_figure(path: Path, draw: Callable[[Figure], None], size: tuple[float, float], dpi: int = 150) -> None:
    """Write a figure that ``draw`` arranges by itself."""
    require_figure(path)
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({**STYLE, "grid.color": THEME["rule"]}):
        figure = Figure(figsize=size)
        draw(figure)
        figure.savefig(path, dpi=dpi, format=path.suffix[1:].lower())


# The page


@dataclass(frozen=True)
class PageChart:
    """A chart to be drawn for the page."""

    draw: Callable[[Chart], None]
    label: str
    """What it shows, for those who cannot see it."""
    height: Callable[[float], float]
    """Returns the height of the picture for its width, both in pixels."""
    margins: tuple[float, float, float, float] = (56, 14, 46, 12)
    """Left, right, bottom and top, in pixels."""


@dataclass(frozen=True)
class PageFigure:
    """Pictures beside each other, each for two widths, of which the page shows the one that fits; and the legend."""

    pictures: tuple[tuple[Markup, Markup], ...]
    signs: tuple[Sign, ...] = ()


def page_figure(*pictures: PageChart, wide: float = WIDE) -> PageFigure:
    """Return pictures for the page, drawn for both widths."""
    signs: dict[str, Sign] = {}
    drawn = tuple((_svg(one, wide, signs), _svg(one, NARROW, signs)) for one in pictures)
    return PageFigure(drawn, tuple(signs.values()))


def _svg(picture: PageChart, width: float, signs: dict[str, Sign]) -> Markup:
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    height, (left, right, bottom, top) = picture.height(width), picture.margins
    colours: Any = {f"{axis}tick.labelcolor": MARKED["soft"] for axis in "xy"} | {"grid.color": MARKED["rule"]}
    with rc_context({**STYLE, **ON_PAGE, **colours, "axes.edgecolor": MARKED["soft"]}):
        figure = Figure(figsize=(width / 72, height / 72), dpi=72)
        inside = left / width, bottom / height, 1 - (left + right) / width, 1 - (bottom + top) / height
        chart = Chart(figure.add_axes(inside), is_page=True, signs=signs)
        figure.patch.set_visible(False)
        chart.panel.patch.set_visible(False)
        picture.draw(chart)
        return _for_page(figure, chart.marks, role="group", **{"aria-label": picture.label, "class": "picture"})


@cache
def _swatch(look: Look) -> Markup:
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(ON_PAGE):
        figure = Figure(figsize=(18 / 72, 14 / 72))
        chart = Chart(figure.add_axes((0, 0, 1, 1)), is_page=True)
        figure.patch.set_visible(False)
        chart.panel.set_axis_off()
        chart.panel.set(xlim=(0, 18), ylim=(0, 14))
        if look.is_box:
            chart.mark("", chart.box((3, 1), (12, 12), look), css=look.css)
        else:
            ends = [0, 9, 18] if look.marker else [2, 16]
            style = {**chart._style(look), "markersize": min(look.size, 10), "markevery": [1] if look.marker else None}
            chart.mark("", *chart.panel.plot(ends, [7] * len(ends), **style), css=look.css)
        return _for_page(figure, chart.marks, **{"class": "swatch", "aria-hidden": "true"})


def _for_page(figure: Figure, marks: Sequence[Marked], **attributes: str) -> Markup:
    """Return a figure as SVG for the page: no ids, no styles, colours of the theme, marks with hints.

    The page's policy forbids styles in attributes, and ids of two pictures must not clash.
    """
    for number, mark in enumerate(marks):
        for artist in mark.artists:
            artist.set_gid(f"mark-{number}")
    text = StringIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # the browser has fonts for names in other scripts
        figure.savefig(text, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    root = ElementTree.fromstring(text.getvalue())
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
    shapes = {shape.get("id"): shape for shape in root.iter("path") if shape.get("id")}
    parts: Parts = {}
    clean = Element("svg", {"viewBox": root.get("viewBox", ""), **attributes})
    for child in root:
        _copy(child, clean, shapes, parts)
    _group(marks, parts, {child: parent for parent in clean.iter() for child in parent})
    return Markup(ElementTree.tostring(clean, encoding="unicode"))


Parts = dict[int, list[Element]]
"""Copies that belong to a mark, by its number."""


def _copy(element: Element, parent: Element, shapes: dict[str | None, Element], parts: Parts) -> None:
    """Add a clean copy of ``element`` to ``parent``; copies that belong to a mark are noted in ``parts``."""
    if element.tag in ("metadata", "defs"):
        return
    if element.tag == "g" and not (element.get("id") or "").startswith("mark-") and not element.get("transform"):
        for child in element:
            _copy(child, parent, shapes, parts)
        return
    given, inner = dict(element.attrib), element.tag
    if element.tag == "use":  # a marker is drawn where it is used
        shape = shapes[next(value for key, value in given.items() if key.endswith("href"))[1:]]
        place = f"translate({given.pop('x')} {given.pop('y')})"
        style = f"{shape.get('style', '')}; {given.get('style', '')}"
        given, inner = {"d": shape.get("d", ""), "transform": place, "style": style}, "path"
    copy = ElementTree.SubElement(parent, inner, _attributes(inner, given))
    copy.text = element.text if inner == "text" else None
    if (number := given.get("id", "")).startswith("mark-"):
        parts.setdefault(int(number.removeprefix("mark-")), []).append(copy)
    for child in element:
        _copy(child, copy, shapes, parts)


def _attributes(tag: str, given: dict[str, str]) -> dict[str, str]:
    """Return what is shown of an element: short numbers, and its style as attributes."""
    kept: dict[str, str] = {key: given[key] for key in ("d", "x", "y", "transform") if key in given}
    found: dict[str, str] = {key: re.sub(r"-?\d+\.\d+", _short, " ".join(value.split())) for key, value in kept.items()}
    for part in filter(str.strip, given.get("style", "").split(";")):
        name, _, value = (word.strip() for word in part.partition(":"))
        if name == "font" and (size := re.search(r"[\d.]+px", value)):
            name, value = "font-size", size[0]
        if name in ("fill", "stroke"):
            value = next((f"var(--{theme})" for theme, code in MARKED.items() if code == value), value)
        if not name.startswith("font-family"):
            found[name] = value
    if tag in ("text", "path"):
        found.setdefault("fill", "var(--ink)")  # which matplotlib leaves out where it is black
    return found | ({"class": "t"} if tag == "text" else {})


def _short(number: re.Match[str]) -> str:
    return f"{float(number[0]):.2f}".rstrip("0").rstrip(".")


def _group(marks: Sequence[Marked], parts: Parts, parents: dict[Element, Element]) -> None:
    """Wrap the copies of each mark, and all marks of a series, in groups of their own."""
    series: dict[str, Element] = {}
    for number, mark in enumerate(marks):
        found = parts.get(number, [])
        if not found:
            continue
        home = parents[found[-1]]
        group = Element("g", {"class": "mark", "role": "img"} if mark.hint else {})
        if mark.picks:
            group.set("role", "button")
            group.set("data-picks", mark.picks)
        if mark.css:
            group.set("class", f"{group.get('class', '')} {mark.css}".strip())
        if mark.hint:
            ElementTree.SubElement(group, "title").text = mark.hint
        home.insert(list(home).index(found[-1]), group)
        for one in found:
            parents[one].remove(one)
            group.append(one)
        if mark.series:
            if mark.series not in series:
                series[mark.series] = Element("g", {"data-series": mark.series})
                home.insert(list(home).index(group), series[mark.series])
            home.remove(group)
            series[mark.series].append(group)
