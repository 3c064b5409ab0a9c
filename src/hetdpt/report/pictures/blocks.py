"""The blocks of a model, with the layers that went."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil

from markupsafe import Markup

from hetdpt.core.format import number
from hetdpt.core.plan import KINDS, Kind, Site
from hetdpt.report.pictures.svg import NARROW_BELOW, cross, drawing, mark, rectangle, text
from hetdpt.report.run import RunRecord
from hetdpt.results import ChosenLayer

Key = tuple[Kind, int]
"""A kind of layer, and its block."""
GAP, LINE, MOST = 6.0, 54.0, 72.0  # between two layers, around a row of blocks, the widest block


@dataclass(frozen=True)
class Turn:
    """When a layer went, counted from 1, and why."""

    number: int
    pick: ChosenLayer


def blocks(record: RunRecord, width: float) -> Markup:
    """Return the blocks in rows, attention above and activation below; what went is an empty frame with its turn."""
    analysis = record.results.analyse
    assert analysis is not None
    left, least, high = (66.0, 38.0, 34.0) if width < NARROW_BELOW else (86.0, 44.0, 40.0)
    rows = ceil(analysis.blocks * least / (width - left))
    per_row = ceil(analysis.blocks / rows)
    column, step = min((width - left) / per_row, MOST), 2 * high + LINE
    sites, turns = {(site.kind, site.block): site for site in analysis.sites}, turns_of(record)
    parts: list[Markup] = []
    for block in range(analysis.blocks):
        row, place = divmod(block, per_row)
        x, top = left + place * column, row * step + 22
        if not place:
            parts += _names(top, high)
        parts.append(text(x + column / 2, top - 9, str(block), anchor="middle"))
        for y, kind in _rows(top, high):
            hint = _hint(record, (kind, block), sites.get((kind, block)), turns)
            box = x + 3, y, column - 6, high
            parts.append(_layer(hint, box, (kind, block) in sites, turns.get((kind, block))))
    return drawing(width, rows * step - 8, _label(record), *parts)


def _rows(top: float, high: float) -> Iterator[tuple[float, Kind]]:
    for row, kind in enumerate(KINDS):
        yield top + row * (high + GAP), kind


def _names(top: float, high: float) -> Iterator[Markup]:
    yield text(0, top - 9, "block")
    for y, kind in _rows(top, high):
        yield text(0, y + high / 2 + 4, kind, "name")


def _layer(hint: str, box: tuple[float, float, float, float], can_go: bool, turn: Turn | None) -> Markup:
    x, y, wide, high = box
    if not can_go or turn is None:
        return mark(hint, rectangle(*box, "kept" if can_go else "none", rx=5))
    middle = x + wide / 2, y + high / 2
    apart = 3 * (len(str(turn.number)) - 1)  # so that the cross does not lie on the second digit
    count = text(middle[0] - 5 - apart, middle[1] + 5, str(turn.number), "turn", anchor="middle")
    return mark(hint, rectangle(*box, "gone", rx=5), count, cross(middle[0] + 8 + apart, middle[1], "crossed", 3.2))


def _hint(record: RunRecord, key: Key, site: Site | None, turns: dict[Key, Turn]) -> str:
    """Return what is known of a layer."""
    kind, block = key
    if site is None:
        return f"block {block}: {kind}\nnothing that can go"
    lines = [f"block {block}: {kind}", site.path]
    if (turn := turns.get(key)) is not None:
        lines.append(f"went, number {turn.number} of {len(turns)}")
        lines += [f"score {number(turn.pick.score)}"] if turn.pick.score is not None else []
    else:
        lines.append("stays" if record.results.select else "can go")
    if (entropy := record.entropies.get(key)) is not None:
        lines.append(f"transfer entropy {number(entropy)} where it was sampled")
    return "\n".join(lines)


def turns_of(record: RunRecord) -> dict[Key, Turn]:
    """Return the layers that went, in their order; those of which no turn is known come last."""
    chosen = record.results.select
    if chosen is None:
        return {}
    picked = {(pick.kind, pick.block): pick for pick in chosen.picks}
    planned: list[Key] = [(kind, block) for kind in KINDS for block in getattr(chosen.plan, kind)]
    ordered = [key for key in picked if key in planned] + [key for key in planned if key not in picked]
    return {key: Turn(count, picked.get(key, ChosenLayer(*key))) for count, key in enumerate(ordered, 1)}


def _label(record: RunRecord) -> str:
    chosen = record.results.select
    if chosen is None:
        return "blocks of the model, and the layers that can go"
    if not len(chosen.plan):
        return "blocks of the model; no layer is gone"
    gone = (f"{kind} of blocks {', '.join(map(str, getattr(chosen.plan, kind))) or 'none'}" for kind in KINDS)
    return f"blocks of the model; gone: {'; '.join(gone)}"
