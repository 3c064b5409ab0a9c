"""Relevance maps as a figure, and conclusions from them as sentences. Draws what it is given; no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetdpt.core.format import percent
from hetdpt.report.charts import save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

RED = "#D00000"
COLUMNS = 8
# in inches: width of a panel, space between panels, above a panel, above an image's panels, and for the legend
SIDE, GAP, TITLE, HEAD, LEGEND = 1.4, 0.05, 0.2, 0.3, 0.3
TIE = 5e-4  # smaller differences are called a tie
Map = Any
"""An array (rows, columns)."""


@dataclass(frozen=True)
class Layer:
    """The attention of one block, and whether it is removed."""

    block: int
    is_removed: bool
    """Whether it is removed by the plan, or already missing in the model."""
    loses_activation: bool


@dataclass(frozen=True)
class Picture:
    """One image and its maps."""

    title: str
    image: Any
    """An array (H, W, C) of numbers from 0 to 1, as the model saw it."""
    wholes: tuple[tuple[str, Map], ...]
    """Maps of whole models, each with its title."""
    maps: tuple[Map | None, ...]
    """The map of each layer; None for a removed one."""


def draw(pictures: Sequence[Picture], layers: Sequence[Layer], path: Path, dpi: int = 110) -> None:
    """Write a figure, PNG or SVG by its name: for each image itself, whole models, then every block.

    Each map has its own scale, from its lowest to its highest value: colours of two maps cannot be compared.
    """
    panels = 1 + len(pictures[0].wholes) + len(layers)
    rows = -(-panels // COLUMNS)
    columns = -(-panels // rows)
    height, width = pictures[0].image.shape[:2]
    side = SIDE * height / width
    block = HEAD + rows * (TITLE + side + GAP)
    wide, tall = columns * (SIDE + GAP) + GAP, len(pictures) * block + LEGEND

    def draw_all(figure: Figure) -> None:  # places are computed: a layout engine takes seconds for each image
        for number, picture in enumerate(pictures):
            top = tall - number * block
            figure.text(GAP / wide, (top - HEAD / 2) / tall, picture.title, fontsize="medium", va="center")
            places = []
            for panel in range(panels):
                row, column = divmod(panel, columns)
                left, bottom = GAP + column * (SIDE + GAP), top - HEAD - row * (TITLE + side + GAP) - TITLE - side
                places.append(figure.add_axes((left / wide, bottom / tall, SIDE / wide, side / tall)))
                places[-1].set_axis_off()
            _draw_picture(places, picture, layers)
        figure.text(GAP / wide, LEGEND / 2 / tall, _legend(layers), fontsize="small", va="center")

    save_figure(path, draw_all, (wide, tall), dpi)


def _draw_picture(places: list[Axes], picture: Picture, layers: Sequence[Layer]) -> None:
    _show(places[0], picture.image, None, "image")
    for place, (title, whole) in zip(places[1:], picture.wholes, strict=False):
        _show(place, picture.image, whole, title)
    after = places[1 + len(picture.wholes) :]
    for place, layer, values in zip(after, layers, picture.maps, strict=False):
        _show(place, picture.image, values, f"block {layer.block}", is_missing=values is None)
        if layer.is_removed:
            _frame(place)
        if layer.loses_activation:
            place.plot(0.93, 0.93, marker="v", color=RED, markeredgecolor="white", transform=place.transAxes)


def _show(place: Axes, image: Any, values: Map | None, title: str, *, is_missing: bool = False) -> None:
    """Draw an image, in grey under its map if it has one, or "removed" instead of a missing map."""
    place.set_title(title, fontsize="small", y=1.0, pad=2)  # with a y nothing is searched
    height, width = image.shape[:2]
    box: Any = {"extent": (0, width, height, 0)}
    if is_missing:
        place.imshow([[1.0]], cmap="gray", vmin=0, vmax=1, **box)
        place.text(width / 2, height / 2, "removed", ha="center", va="center", fontsize="small", color=RED)
        return
    grey = image.mean(2)
    if values is None and image.shape[2] == 3:
        place.imshow(image, **box)
    else:
        place.imshow(grey, cmap="gray", vmin=0, vmax=1, **box)
    if values is not None:
        place.imshow(values, cmap="turbo", alpha=0.55, interpolation="bilinear", **box)
    place.set_xlim(0, width)
    place.set_ylim(height, 0)


def _frame(place: Axes) -> None:
    place.set_axis_on()
    place.set_xticks([])
    place.set_yticks([])
    for spine in place.spines.values():
        spine.set(edgecolor=RED, linewidth=3)


def _legend(layers: Sequence[Layer]) -> str:
    parts = ["red: most relevant, blue: least, each map on its own scale"]
    if any(layer.is_removed for layer in layers):
        parts.append("red frame: attention removed")
    if any(layer.loses_activation for layer in layers):
        parts.append("red triangle: activation removed")
    return "; ".join(parts)


def class_words(one: Mapping[str, Any]) -> str:
    """Return the class that the maps of an image explain; ``one`` is of ``images`` in the record.

    >>> class_words({"class": 281, "class_name": "tabby, tabby cat"})
    '281 (tabby)'
    """
    return f"{one['class']}{_called(one['class_name'])}"


def answer_words(one: Mapping[str, Any]) -> str:
    """Return the most probable class of an image, or of ``pruned`` in it, and its probability.

    >>> answer_words({"answer": 4, "answer_name": None, "answer_probability": 0.625})
    '4 0.62'
    """
    return f"{one['answer']}{_called(one['answer_name'])} {one['answer_probability']:.2f}"


def _called(name: str | None) -> str:
    return f" ({name.partition(',')[0]})" if name else ""


def title(one: Mapping[str, Any]) -> str:
    """Return the title above the maps of an image."""
    text = f"{Path(one['file']).name}: relevance for class {class_words(one)}, probability {one['probability']:.2f}"
    if one["answer"] != one["class"]:
        text += f" (answer: {answer_words(one)})"
    return text + (f"; pruned: {answer_words(one['pruned'])}" if one["pruned"] else "")


def verdict(measure: str, found: Mapping[str, Any], images: int) -> str:
    """Return a sentence that says whether removed layers are more like their neighbours than kept ones."""
    difference, low, high = found["difference"], found["low"], found["high"]
    is_known = low is not None
    is_tie = abs(difference) < TIE or (is_known and low <= 0 <= high)
    how = "neither more nor less" if is_tie else "more" if difference > 0 else "less"
    first = "" if is_known else "too few images to be sure; in these, "
    interval = f", 95 % over {images} images {low:+.3f} to {high:+.3f}" if is_known else ""
    return (
        f"{measure}: {first}removed layers are {how} like their neighbours than kept ones: "
        f"{found['removed']:.3f} against {found['kept']:.3f} ({difference:+.3f}{interval}); "
        f"{percent(100 * found['as_alike'], 0)} of all choices of as many layers are at least as similar to theirs"
    )
