"""A frontier as files: the table, a plan for each point, the figure and the page to pick a point on. No torch here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from shlex import join
from typing import Any

from hetdpt.core.format import counted, interval, milliseconds, percent, signed, times
from hetdpt.core.plan import KINDS, NARROWER, Plan, Site
from hetdpt.report.charts import HALF, WIDE, Chart, Look, PageChart, PageFigure, page_figure, save
from hetdpt.report.commands import Command
from hetdpt.report.headline import Tile
from hetdpt.report.page import fill
from hetdpt.report.run_charts import DENSE, INTERVAL
from hetdpt.report.tables import Table
from hetdpt.results import FrontierPoint, FrontierResult, Scores, to_json
from hetdpt.store.atomic import write_csv, write_text, written

PLANS, TABLE, FIGURE, PAGE = "plans", "frontier.csv", "frontier.png", "frontier.html"
COLUMNS = (
    *("speedup", "damage", "ms", "accuracy", "low", "high", "images"),
    *(*KINDS, "tail", *NARROWER, "tokens", "plan"),
)
POINT = Look("accent", "o", css="best")
LINE = Look("accent", line="-", order=2)
ACROSS = "speedup, by the times of single layers"
SHOWN_FIRST = 1.5  # the speedup of the point that is picked when the page is opened


@dataclass(frozen=True)
class Words:
    """How commands name the model and the images, as words of a command line."""

    model: tuple[str, ...] = ("MODEL",)
    apply_data: tuple[str, ...] = ("--data", "IMAGES")
    recover_data: tuple[str, ...] = ("--data", "DATA")


def plan_file(found: FrontierResult, number: int) -> str:
    """Return the file in the run directory that has the plan of a point."""
    return f"{PLANS}/{number + 1:02d}-{found.speedup(found.points[number]):.2f}x.json"


def write_table(directory: Path, found: FrontierResult) -> None:
    """Write the table, and the plan of each point to a file that ``--plan`` takes."""
    (directory / PLANS).mkdir(exist_ok=True)
    for number, point in enumerate(found.points):
        write_text(directory / plan_file(found, number), f"{point.plan.to_json()}\n")
    write_csv(directory / TABLE, COLUMNS, _rows(found))


def write_frontier(directory: Path, found: FrontierResult, words: Words | None = None) -> tuple[str, ...]:
    """Write the table, the plans, the figure and the page to ``directory``; return the names of these files.

    A frontier without points has neither figure nor page.
    """
    write_table(directory, found)
    if not found.points:
        return (TABLE,)
    with written(directory / FIGURE) as scratch:
        draw(found, scratch)
    write_text(directory / PAGE, render_frontier(directory, found, words or Words()))
    return PAGE, FIGURE, TABLE, PLANS


def values_of(found: FrontierResult) -> dict[str, Any]:
    """Return all of it as plain JSON, each point with its speedup and the file of its plan."""
    values: dict[str, Any] = to_json(found)
    for number, point in enumerate(found.points):
        values["points"][number] |= {"speedup": found.speedup(point), "file": plan_file(found, number)}
    return values


def _rows(found: FrontierResult) -> Iterator[dict[str, Any]]:
    for number, point in enumerate(found.points):
        plan, scores = point.plan, point.accuracy
        yield {
            "speedup": f"{found.speedup(point):.4f}",
            "damage": f"{point.damage:.5g}",
            "ms": f"{point.cost:.4g}",
            **(_cells(scores) if scores else {}),
            **{kind: " ".join(map(str, getattr(plan, kind))) for kind in KINDS},
            "tail": plan.tail,
            **{name: " ".join(f"{block}:{count}" for block, count in getattr(plan, name)) for name in NARROWER},
            "tokens": f"{plan.tokens.method}:{plan.tokens.r}" if plan.tokens else "",
            "plan": plan_file(found, number),
        }


def _cells(scores: Scores) -> dict[str, str]:
    accuracy = {name: f"{value:.2f}" for name, value in zip(("accuracy", "low", "high"), _ends(scores), strict=True)}
    return accuracy | {"images": str(scores.count)}


def _ends(scores: Scores) -> tuple[float, float, float]:
    return scores.top1, scores.low, scores.high


# The figure


def draw(found: FrontierResult, path: Path) -> None:
    """Write a figure, PNG or SVG by its name: damage by speedup and, where it is measured, accuracy."""

    def draw_all(damage: Chart, *accuracy: Chart) -> None:
        _draw_damage(damage, found)
        for chart in accuracy:
            _draw_accuracy(chart, found)
        for chart in (damage, *accuracy):
            chart.panel.set_xlabel(f"{ACROSS}\n({found.measured})")
            chart.legend(columns=2, below=0.16)

    save(path, draw_all, (12 if found.dense_accuracy else 8, 5), (1, 2 if found.dense_accuracy else 1))


def figure(found: FrontierResult) -> PageFigure:
    """Return the same for the page, where points are picked."""
    pictures = [_picture(found, _draw_damage, "damage")]
    if found.dense_accuracy:
        pictures.append(_picture(found, _draw_accuracy, "accuracy"))
    return page_figure(*pictures, wide=WIDE if len(pictures) == 1 else HALF)


def _picture(found: FrontierResult, draw_one: Callable[[Chart, FrontierResult], None], what: str) -> PageChart:
    label = f"{what} by speedup, a point for each plan; press one to see what was removed"
    return PageChart(
        lambda chart: draw_one(chart, found), label, lambda width: (0.48 if width == WIDE else 0.8) * width
    )


def _draw_damage(chart: Chart, found: FrontierResult) -> None:
    chart.fit([1.0, *map(found.speedup, found.points)], [0.0, *(point.damage for point in found.points)])
    _draw_points(chart, found, 0.0, [point.damage for point in found.points])
    chart.name("speedup", "damage", f"the least damage at every speed, on {found.images['judge']} images")


def _draw_accuracy(chart: Chart, found: FrontierResult) -> None:
    """Draw accuracies, each with its interval."""
    measured = [(found.speedup(point), _ends(point.accuracy)) for point in found.points if point.accuracy]
    assert found.dense_accuracy is not None
    measured.append((1.0, _ends(found.dense_accuracy)))
    chart.fit([x for x, _ in measured], [end for _, ends in measured for end in ends])
    for x, (_, low, high) in measured:
        chart.span((x, x), (low, high), INTERVAL, "95 % intervals")
    _draw_points(chart, found, found.dense_accuracy.top1, [top1 for _, (top1, *_) in measured[:-1]])
    title = f"accuracy without training, on {found.dense_accuracy.count:,} validation images"
    chart.name("speedup", "accuracy [%]", title)


def _draw_points(chart: Chart, found: FrontierResult, dense: float, values: list[float]) -> None:
    """Draw the dense model as a star, and the points with a line through them."""
    if chart.is_page:
        chart.panel.xaxis.set_major_formatter("{x:g}×")
    hint = "\n".join(("dense model", *_known(0.0, found.dense_accuracy)))
    chart.plot([1.0], [dense], DENSE, "dense model", [hint])
    speeds = [found.speedup(point) for point in found.points]
    chart.plot(speeds, values, LINE)
    for number, (x, y) in enumerate(zip(speeds, values, strict=True)):
        point = found.points[number]
        hint = "\n".join((_name(found, number), *_known(point.damage, point.accuracy)))
        chart.point(x, y, POINT, hint, picks=_key(number))
    chart.sign("point", POINT)


def _known(damage: float, scores: Scores | None) -> Iterator[str]:
    yield f"damage {damage:.4g}"
    if scores:
        yield f"accuracy {percent(scores.top1)} of {scores.count:,} images"
        yield f"95 % interval {interval(scores.low, scores.high)}"


def _name(found: FrontierResult, number: int) -> str:
    return f"{times(found.speedup(found.points[number]))}, point {number + 1} of {len(found.points)}"


def _key(number: int) -> str:
    return f"point-{number + 1:02d}"


# The page


def render_frontier(directory: Path, found: FrontierResult, words: Words) -> str:
    """Return the page: the figure and the table, both to pick a point in, and what is known of each point."""
    first = found.at(SHOWN_FIRST) or found.points[-1]
    last, dense = found.points[-1], found.dense_accuracy
    return fill(
        "frontier.html",
        title=f"{directory.resolve().name}: {counted(len(found.points), 'plan')}, up to {times(found.speedup(last))}",
        name=directory.resolve().name,
        found=found,
        fastest=times(found.speedup(last)),
        images=f"{dense.count:,}" if dense else "",
        drawing=figure(found),
        points=[_view(directory, found, number, words) for number in range(len(found.points))],
        first=_key(found.points.index(first)),
        table_of_points=_overview(found),
        data=values_of(found),
    )


def _overview(found: FrontierResult) -> Table:
    columns = ["point", "damage", *(["accuracy"] * bool(found.dense_accuracy)), "attention", "activation", "tail"]
    rows = []
    for point in found.points:
        plan = point.plan
        counts = len(plan.attention), len(plan.activation), plan.tail, plan.narrowed
        accuracy = [percent(point.accuracy.top1) if point.accuracy else "–"] * bool(found.dense_accuracy)
        cells = times(found.speedup(point)), f"{point.damage:.4g}", *accuracy, *(str(one or "–") for one in counts)
        rows.append((*cells, f"{plan.tokens.method} {plan.tokens.r}" if plan.tokens else "–"))
    picks = tuple(map(_key, range(len(rows))))
    return Table("all points", (*columns, "layers narrowed", "tokens"), rows, picks=picks)


def _view(directory: Path, found: FrontierResult, number: int, words: Words) -> dict[str, Any]:
    point = found.points[number]
    return {
        "key": _key(number),
        "name": _name(found, number),
        "slower": _key(number - 1) if number else "",
        "faster": _key(number + 1) if number + 1 < len(found.points) else "",
        "tiles": list(_tiles(found, point)),
        "removed": removed(point.plan),
        "notes": list(_notes(point.plan)),
        "moves": ", ".join(point.moves),
        "commands": commands(directory, found, number, words),
    }


def _tiles(found: FrontierResult, point: FrontierPoint) -> Iterator[Tile]:
    speed = f"{milliseconds(point.cost)} instead of {milliseconds(found.dense_ms)} a batch"
    yield Tile("speedup", times(found.speedup(point)), (speed,))
    yield Tile("damage", f"{point.damage:.3g}", (f"on {counted(found.images['judge'], 'image')}, before training",))
    if point.accuracy and found.dense_accuracy:
        change = signed(point.accuracy.top1 - found.dense_accuracy.top1)
        notes = (
            f"{change} points, before training",
            f"95 % interval {interval(point.accuracy.low, point.accuracy.high)}",
        )
        yield Tile("accuracy", percent(point.accuracy.top1), notes)


def removed(plan: Plan) -> Table:
    """Return the blocks that ``plan`` changes, and how.

    >>> removed(Plan(attention=(3,), removal=("linear", "calibrated"), features=((3, 64),), heads=((4, 2),))).rows
    [('3', 'removed: linear', '64 hidden features'), ('4', '2 heads', 'kept')]
    >>> removed(Plan(heads=((4, 2),), head_dims=((4, 48), (5, 56)))).rows
    [('4', '2 heads of 48 dimensions', 'kept'), ('5', 'heads of 56 dimensions', 'kept')]
    """
    ffns = {block: f"{count} hidden features" for block, count in plan.features}
    ffns |= {
        block: f"activation removed: {plan.style_of(Site('activation', block, '')).name}" for block in plan.activation
    }
    heads = {block: counted(count, "head") for block, count in plan.heads}
    dims = {block: f"{heads.get(block, 'heads')} of {counted(count, 'dimension')}" for block, count in plan.head_dims}
    attention = heads | dims
    attention |= {block: f"removed: {plan.style_of(Site('attention', block, '')).name}" for block in plan.attention}
    blocks = sorted({*ffns, *attention})
    rows = [(str(block), attention.get(block, "kept"), ffns.get(block, "kept")) for block in blocks]
    return Table("blocks that are changed", ("block", "attention", "FFN"), rows, words=(1, 2), is_small=True)


def _notes(plan: Plan) -> Iterator[str]:
    if plan.tail:
        yield f"Tail: patches are not updated in the last {counted(plan.tail, 'block')}."
    if plan.tokens:
        yield f"Tokens: {plan.tokens.method} with r = {plan.tokens.r} in every block that has attention."


def commands(directory: Path, found: FrontierResult, number: int, words: Words) -> list[Command]:
    """Return the commands that use the plan of a point.

    ``directory`` is as the user named it, so that they work where the search was started.
    """
    name = f"{found.speedup(found.points[number]):.2f}x"
    plan = ("--plan", str(directory / plan_file(found, number)))
    apply = ("hetdpt", "apply", *words.model, *plan, *words.apply_data, "--out", f"fast-{name}")
    recover = ("hetdpt", "recover", *words.model, *plan, *words.recover_data, "--out", f"recovered-{name}")
    return [
        Command("To save this model, without training", join(apply)),
        Command("To train it with the dense model as its teacher", join(recover)),
    ]
