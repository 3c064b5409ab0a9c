"""The charts of a run, drawn into a ``Chart``; the one of the frontier is a figure file as well. No torch here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil, isfinite

from hetdpt.core.format import (
    interval,
    layers,
    machine,
    milliseconds,
    number,
    percent,
    split_text,
    times,
    widths,
)
from hetdpt.core.plan import KINDS, Budget, Kind, Site
from hetdpt.report.charts import (
    BLUE,
    GREEN,
    GREY,
    HALF,
    NARROW_BELOW,
    ORANGE,
    PINK,
    PLUM,
    SKY,
    SQUARE,
    YELLOW,
    Chart,
    Look,
    PageChart,
    PageFigure,
    page_figure,
)
from hetdpt.report.run import RunRecord
from hetdpt.report.tables import compared
from hetdpt.results import Candidate, ChosenLayer, CollectedSample, EpochResult, MeasureResult, Prices, Scores, Split

BEST = Look("accent", "o", css="best")
BEYOND = Look("accent", "o", fill="paper", css="beyond")
SAMPLE = Look("orange", "x", order=4, css="sample")
CHOSEN = Look("green", "o", 14, width=2, fill="none", order=5, css="chosen")
INTERVAL = Look("accent", line="-", width=4, alpha=0.25, order=1)
DENSE = Look("ink", "*", 11)
ERROR = Look("ink", line="-", width=1.4, order=3)
REACH = 1.6  # times as far as the samples; beyond, the polynomial is a guess and not drawn


def _height(width: float) -> float:
    """Return the height of a picture of accuracy by speedup."""
    return 0.82 * width if width < NARROW_BELOW else 0.48 * width


# The blocks of the model

KEPT = Look("accent", is_box=True, css="kept")
REMOVED = Look("soft", line="--", fill="none", is_box=True, css="removed")
FIXED = Look("rule", is_box=True)
GAP, AROUND, WIDEST = 6.0, 54.0, 72.0  # pixels between two layers, around a row of blocks, and of the widest block

Key = tuple[Kind, int]
"""A kind of layer, and its block."""


@dataclass(frozen=True)
class Turn:
    """When a layer was removed, counted from 1, and why."""

    number: int
    pick: ChosenLayer


def turns_of(record: RunRecord) -> dict[Key, Turn]:
    """Return the removed layers in their order; those whose turn is not known are last."""
    chosen = record.results.select
    if chosen is None:
        return {}
    picked = {(pick.kind, pick.block): pick for pick in chosen.picks}
    planned: list[Key] = [(kind, block) for kind in KINDS for block in getattr(chosen.plan, kind)]
    ordered = [key for key in picked if key in planned] + [key for key in planned if key not in picked]
    return {key: Turn(count, picked.get(key, ChosenLayer(*key))) for count, key in enumerate(ordered, 1)}


@dataclass(frozen=True)
class _Rows:
    """How blocks are arranged in a picture: attention above activation, in as many rows as the width needs."""

    blocks: int
    width: float

    @property
    def left(self) -> float:
        return 72.0 if self.width < NARROW_BELOW else 86.0

    @property
    def high(self) -> float:
        return 34.0 if self.width < NARROW_BELOW else 40.0

    @property
    def count(self) -> int:
        return ceil(self.blocks * (self.high + 4) / (self.width - self.left))

    @property
    def per_row(self) -> int:
        return ceil(self.blocks / self.count)

    @property
    def column(self) -> float:
        return min((self.width - self.left) / self.per_row, WIDEST)

    @property
    def height(self) -> float:
        return self.count * (2 * self.high + AROUND) - 8

    def corner(self, kind: Kind, block: int) -> tuple[float, float]:
        row, place = divmod(block, self.per_row)
        top = row * (2 * self.high + AROUND) + 22
        return self.left + place * self.column, top + KINDS.index(kind) * (self.high + GAP)


def blocks(record: RunRecord) -> PageFigure:
    """Return the blocks with the removed layers: an empty frame with its turn."""
    analysis, chosen = record.results.analyse, record.results.select
    assert analysis is not None
    sites, turns = {(site.kind, site.block): site for site in analysis.sites}, turns_of(record)

    def draw(chart: Chart) -> None:
        rows = _Rows(analysis.blocks, chart.width)
        chart.panel.set_axis_off()
        chart.panel.set(xlim=(0, chart.width), ylim=(rows.height, 0))
        chart.sign("kept" if chosen else "removable", KEPT)
        if turns:
            chart.sign("removed, with its turn", REMOVED)
        for block in range(analysis.blocks):
            x, top = rows.corner("attention", block)
            if not block % rows.per_row:
                chart.text(0, top - 9, "block", color="soft")
                for kind in KINDS:
                    chart.text(0, rows.corner(kind, block)[1] + rows.high / 2 + 4, kind)
            chart.text(x + rows.column / 2, top - 9, str(block), ha="center", color="soft")
            for kind in KINDS:
                key = (kind, block)
                _draw_layer(chart, rows, key, key in sites, turns.get(key), _about(record, key, sites.get(key), turns))

    label = "blocks of the model, and the layers that can be removed"
    if chosen:
        removed = (f"{kind} of blocks {', '.join(map(str, getattr(chosen.plan, kind))) or 'none'}" for kind in KINDS)
        label = f"blocks of the model; {'removed: ' + '; '.join(removed) if turns else 'no layer is removed'}"
    return page_figure(PageChart(draw, label, lambda width: _Rows(analysis.blocks, width).height, (0, 0, 0, 0)))


def _draw_layer(chart: Chart, rows: _Rows, key: Key, is_removable: bool, turn: Turn | None, hint: str) -> None:
    (x, y), wide, high = rows.corner(*key), rows.column - 6, rows.high
    look = FIXED if not is_removable else REMOVED if turn else KEPT
    parts = [chart.box((x + 3, y), (wide, high), look)]
    if turn and is_removable:
        middle, apart = (x + 3 + wide / 2, y + high / 2), 3 * (len(str(turn.number)) - 1)  # for a second digit
        parts.append(chart.text(middle[0] - 5 - apart, middle[1] + 5, str(turn.number), ha="center", fontsize=14))
        parts += chart.panel.plot(
            [middle[0] + 8 + apart], [middle[1]], "x", color=chart.colour("orange"), markeredgewidth=2
        )
    chart.mark(hint, *parts, css=look.css)


def _about(record: RunRecord, key: Key, site: Site | None, turns: dict[Key, Turn]) -> str:
    """Return what is known of a layer."""
    kind, block = key
    if site is None:
        return f"block {block}: {kind}\nnothing that can be removed"
    lines = [f"block {block}: {kind}", site.path]
    if (turn := turns.get(key)) is not None:
        lines.append(f"removed, number {turn.number} of {len(turns)}")
        lines += [f"score {number(turn.pick.score)}"] if turn.pick.score is not None else []
    else:
        lines.append("kept" if record.results.select else "can be removed")
    if (entropy := record.entropies.get(key)) is not None:
        lines.append(f"transfer entropy {number(entropy)} where it was sampled")
    return "\n".join(lines)


# Split accuracy

TIED = Look("green", line="--", fill="none", order=4, is_box=True, css="tied")
HATCHED = Look("rule", fill="none", is_box=True, css="hatched")
FAINT, FULL = 0.08, 0.92  # opacity of the lowest and the highest accuracy


def surface(record: RunRecord) -> PageFigure:
    """Return predicted accuracy by layers removed, with samples, the chosen split and those it is tied with."""
    fit = record.results.fit
    assert fit is not None
    across, up = (1 + max(getattr(cell.budget, kind) for cell in fit.surface) for kind in KINDS)
    values = [cell.accuracy for cell in fit.surface if not cell.is_beyond] + [one.accuracy for one in fit.samples]
    low, high = min(values), max(values)  # what is extrapolated does not stretch the scale

    def draw(chart: Chart) -> None:
        chart.panel.set(xlim=(-0.5, across - 0.5), ylim=(-0.5, up - 0.5), aspect="equal", anchor="SW")
        chart.panel.grid(visible=False)
        chart.panel.locator_params(integer=True)
        chart.name("attention layers removed", "activations removed")
        for cell in fit.surface:
            part = (min(max(cell.accuracy, low), high) - low) / ((high - low) or 1)
            look = Look("accent", alpha=FAINT + (FULL - FAINT) * part)
            corner, size = (cell.budget.attention - 0.47, cell.budget.activation - 0.47), (0.94, 0.94)
            parts = [chart.box(corner, size, look)]
            parts += [chart.box(corner, size, HATCHED)] if cell.is_beyond else []
            chart.mark("\n".join(_about_split(cell, record)), *parts, css="heat hatched" if cell.is_beyond else "heat")
        _mark_splits(chart, record)
        for text, alpha in ((f"{percent(low, 1)} or less", FAINT), (percent(high, 1), FULL)):
            chart.sign(text, Look("accent", alpha=alpha, is_box=True))
        chart.sign("beyond the samples: a guess", HATCHED)

    label = "predicted accuracy by the number of attention and activation layers removed; more colour is higher"
    return page_figure(PageChart(draw, label, lambda width: width * up / max(across, up)), wide=SQUARE)


def _mark_splits(chart: Chart, record: RunRecord) -> None:
    """Draw the samples, the chosen split and those it is tied with over the surface."""
    fit, allocation, budget = record.results.fit, record.results.allocate, record.results.budget
    for row in allocation.tied if allocation else ():
        corner = row.budget.attention - 0.4, row.budget.activation - 0.4
        chart.mark("", chart.box(corner, (0.8, 0.8), TIED), css=TIED.css)
        chart.sign("the best cannot be told from it", TIED)
    if budget:
        chart.plot([budget.attention], [budget.activation], CHOSEN)
        chart.sign("chosen split", CHOSEN)
    for one in fit.samples if fit else ():
        chart.point(one.budget.attention, one.budget.activation, SAMPLE)
        chart.sign("sample", SAMPLE)


def _about_split(one: Split, record: RunRecord) -> Iterator[str]:
    results = record.results
    yield f"{one.budget.attention} attention + {one.budget.activation} activation removed"
    yield from _predicted(one)
    for sample in results.fit.samples if results.fit else ():
        if sample.budget == one.budget:
            yield f"sampled: {percent(sample.accuracy)}"
    if results.budget == one.budget:
        yield "chosen"
    elif any(row.budget == one.budget for row in (results.allocate.tied if results.allocate else ())):
        yield "the best cannot be told from it"


def _predicted(one: Split) -> Iterator[str]:
    yield f"predicted {percent(one.accuracy)}"
    yield f"95 % interval {interval(one.low, one.high)}"
    if one.speedup is not None:
        yield f"predicted speedup {times(one.speedup)}"
    if one.is_beyond:
        yield "beyond the samples: a guess"


# Accuracy by speedup: splits


@dataclass(frozen=True)
class SpeedAxis:
    """Where a budget is along the bottom: at its predicted speedup or, if nothing is timed, its number of layers."""

    prices: Prices | None

    @property
    def is_timed(self) -> bool:
        return self.prices is not None and self.prices.dense.ms is not None

    @property
    def label(self) -> str:
        return "predicted speedup" if self.is_timed else "layers removed"

    def __call__(self, budget: Budget) -> float:
        if self.prices is None or not self.is_timed:
            return float(budget.attention + budget.activation)
        speedup = self.prices.speedup(budget)
        return float("inf") if speedup is None else speedup

    def far(self, samples: Sequence[CollectedSample], chosen: Budget | None) -> float:
        """Return how far the chart reaches: to the chosen split, and to ``REACH`` times the samples."""
        start = self(Budget(0, 0))
        found = [place for one in samples if isfinite(place := self(one.budget))]
        far = start + REACH * (max(found, default=start) - start)
        return max(far, self(chosen)) if chosen and isfinite(self(chosen)) else far


@dataclass(frozen=True)
class Frontier:
    """The best predicted splits, with the samples, the chosen split and the final model."""

    best: Sequence[Split]
    samples: Sequence[CollectedSample]
    axis: SpeedAxis
    chosen: Split | None = None
    final: MeasureResult | None = None
    removed: int = 0
    """Layers of the final model."""

    @property
    def shown(self) -> list[Split]:
        """The splits in reach."""
        far = self.axis.far(self.samples, self.chosen.budget if self.chosen else None)
        return [one for one in self.best if self.axis(one.budget) <= far]

    def draw(self, chart: Chart) -> None:
        axis, shown = self.axis, self.shown
        samples = [one for one in self.samples if isfinite(axis(one.budget))]
        chosen = self.chosen if self.chosen and isfinite(axis(self.chosen.budget)) else None
        known = [(axis(one.budget), one.accuracy) for one in (*shown, *([chosen] if chosen else []))]
        known += [(axis(one.budget), one.accuracy) for one in samples]
        known += [*self._final_corners()]
        chart.fit(*zip(*known, strict=True))
        chart.panel.locator_params(axis="x", integer=not axis.is_timed)
        if axis.is_timed and chart.is_page:
            chart.panel.xaxis.set_major_formatter("{x:g}×")
        self._draw_best(chart, shown)
        places, values = [axis(one.budget) for one in samples], [one.accuracy for one in samples]
        hints = [f"sample {split_text(one.budget)}\n{percent(one.accuracy)}" for one in samples]
        chart.plot(places, values, SAMPLE, "samples", hints)
        if chosen:
            name = split_text(chosen.budget)
            hint = "\n".join((f"chosen: {name}", *_predicted(chosen)))
            chart.plot([axis(chosen.budget)], [chosen.accuracy], CHOSEN, f"chosen: {name}", [hint])
        self._draw_final(chart)

    def _draw_best(self, chart: Chart, shown: Sequence[Split]) -> None:
        axis = self.axis
        for one in shown:
            # no band: neighbours may be a sample, which is known well, and a mixed split, which is not
            if isfinite(one.high - one.low):
                chart.span((axis(one.budget),) * 2, (one.low, one.high), INTERVAL, "95 % intervals")
        for one, two in pairwise(shown):
            look = Look("accent", line="--" if one.is_beyond or two.is_beyond else "-", order=2)
            ends = (axis(one.budget), axis(two.budget)), (one.accuracy, two.accuracy)
            chart.mark("", chart.span(*ends, look), series="best predicted")
        for label, look in (("best predicted", BEST), ("best predicted, beyond the samples: a guess", BEYOND)):
            some = [one for one in shown if one.is_beyond == (look is BEYOND)]
            hints = ["\n".join((f"best predicted: {split_text(one.budget)}", *_predicted(one))) for one in some]
            if some:
                chart.plot([axis(one.budget) for one in some], [one.accuracy for one in some], look, label, hints)

    def _final_corners(self) -> Iterator[tuple[float, float]]:
        """Give the interval of the final model, so that a small difference does not look like a large one."""
        if self.final:
            scores = self.final.pruned.accuracy
            yield from ((self._final_x(self.final), scores.low), (self._final_x(self.final), scores.high))

    def _final_x(self, final: MeasureResult) -> float:
        return final.speedup.value if self.axis.is_timed else float(self.removed)

    def _draw_final(self, chart: Chart) -> None:
        if self.final is None:
            return
        scores, speed = self.final.pruned.accuracy, self.final.speedup
        hint = (
            f"final model, measured\n{percent(scores.top1)} of {scores.count:,} images\nspeedup {times(speed.value)}\n"
            f"95 % interval {interval(speed.low, speed.high)}"
        )
        ends = (speed.low, speed.high) if self.axis.is_timed else None
        look = Look("ink", "D", 9, order=5, css="ink")
        at, name = (self._final_x(self.final), scores.top1), "final model, measured"
        _draw_measured(chart, at, look, hint, name, ends, scores)
        chart.sign(name, look, name)


def _draw_measured(
    chart: Chart,
    at: tuple[float, float],
    look: Look,
    hint: str,
    series: str,
    speed: tuple[float | None, float | None] | None,
    scores: Scores | None,
) -> None:
    """Draw a measured model with its 95 % intervals, as a cross of lines."""
    bars = []
    if speed and speed[0] is not None and speed[1] is not None:
        bars.append(chart.span((speed[0], speed[1]), (at[1], at[1]), ERROR))
    if scores:
        bars.append(chart.span((at[0], at[0]), (scores.low, scores.high), ERROR))
    chart.point(*at, look, hint, series, *bars)


def frontier(record: RunRecord) -> PageFigure:
    """Return the best predicted accuracy by speedup, with samples, the chosen split and the final model."""
    fit, allocation, chosen = record.results.fit, record.results.allocate, record.results.select
    assert fit is not None
    assert allocation is not None
    prices = record.results.analyse.prices if record.results.analyse else None
    axis, removed = SpeedAxis(prices), len(chosen.plan) if chosen else 0
    final = record.results.measure if chosen else None
    found = Frontier(allocation.frontier, fit.samples, axis, allocation.chosen, final, removed)

    def draw(chart: Chart) -> None:
        found.draw(chart)
        chart.name(axis.label, "accuracy [%]")

    label = "accuracy by speedup: best predicted splits, samples, the chosen split, and the final model as measured"
    return page_figure(PageChart(draw, label, _height))


# Accuracy by speedup: methods and runs

METHODS = {
    "hetdpt": (ORANGE, "o"),
    "map+te": (YELLOW, "s"),
    "map+greedy": (PLUM, "d"),
    "te-static": (BLUE, "^"),
    "importance-only": (GREEN, "D"),
    "attention-only": (SKY, "v"),
    "activation-only": (PINK, "P"),
    "random": (GREY, "X"),
    "calibrated-greedy": ("ink", "h"),
}


def method_look(method: str) -> Look:
    """Return the colour and marker of a method, the same in every chart."""
    colour, marker = METHODS.get(method, ("ink", "."))
    return Look(colour, marker, 8)


def _speeds(chart: Chart) -> None:
    chart.name("measured speedup", "accuracy [%]")
    chart.panel.xaxis.set_major_formatter("{x:g}×")


def methods(record: RunRecord) -> PageFigure:
    """Return accuracy by measured speedup of the compared methods and of the dense model."""
    measured = record.results.measure
    assert measured is not None
    rows = compared(record)
    dense = measured.dense.accuracy

    def draw(chart: Chart) -> None:
        chart.fit([1.0, *(row.speed.speedup for row in rows)], [dense.top1, *(row.accuracy for row in rows)])
        _speeds(chart)
        chart.plot([1.0], [dense.top1], DENSE, "dense", [f"dense\n{percent(dense.top1)} of {dense.count:,} images"])
        for row in rows:
            chart.sign(row.method, method_look(row.method), row.method)
        for row in reversed(rows):  # the method of the run is on top
            at, ends = (row.speed.speedup, row.accuracy), (row.speed.low, row.speed.high)
            lines = [row.method, percent(row.accuracy), f"speedup {times(row.speed.speedup)}"]
            lines.append(f"95 % interval {interval(*ends)}")
            _draw_measured(chart, at, method_look(row.method), "\n".join(lines), row.method, ends, None)

    return page_figure(PageChart(draw, "accuracy by measured speedup, a point for each method", _height))


def runs(records: Sequence[RunRecord], names: Sequence[str]) -> PageFigure:
    """Return accuracy by measured speedup of several runs, each with a line from its dense model."""
    both = zip(names, records, strict=True)
    found = [(name, one.method, one.results.measure) for name, one in both if one.results.measure]

    def draw(chart: Chart) -> None:
        ends = [(one.speedup.value, end) for _, _, one in found for end in _ends(one.pruned.accuracy)]
        chart.fit(*zip(*ends, *((1.0, one.dense.accuracy.top1) for _, _, one in found), strict=True))
        _speeds(chart)
        taken: list[tuple[float, float]] = []
        for name, method, one in found:
            chart.sign(name, method_look(method), name)
            _draw_run(chart, name, method, one, _free_height(chart, one, taken))

    return page_figure(PageChart(draw, "accuracy by measured speedup, a point for each run", _height))


def _ends(scores: Scores) -> tuple[float, float]:
    return scores.low, scores.high


def _free_height(chart: Chart, one: MeasureResult, taken: list[tuple[float, float]]) -> float:
    """Return how many pixels above its point the name of a run is written, so that no name covers another."""
    x, y = chart.panel.transData.transform((one.speedup.value, one.pruned.accuracy.top1))
    shift = 9.0
    while any(abs(x - other[0]) < 90 and abs(y + shift - other[1]) < 14 for other in taken):
        shift += 14
    taken.append((x, y + shift))
    return shift


def _draw_run(chart: Chart, name: str, method: str, one: MeasureResult, shift: float) -> None:
    dense, pruned, speed = one.dense.accuracy, one.pruned.accuracy, one.speedup
    way = Look("soft", line=":", order=1)
    chart.mark("", chart.span((1.0, speed.value), (dense.top1, pruned.top1), way), series=name)
    chart.point(1.0, dense.top1, DENSE, series=name)
    lines = (
        name,
        f"{percent(pruned.top1)}, {percent(dense.top1)} before",
        f"speedup {times(speed.value)}",
        machine(one, one.batch),
    )
    is_right = speed.value > sum(chart.panel.get_xlim()) / 2
    side = {"shift": (-11, shift), "ha": "right"} if is_right else {"shift": (11, shift)}
    chart.mark("", chart.text(speed.value, pruned.top1, name, **side), series=name)
    ends = speed.low, speed.high
    _draw_measured(chart, (speed.value, pruned.top1), method_look(method), "\n".join(lines), name, ends, pruned)


# Layers and width, fine-tuning, time


def layers_and_width(record: RunRecord) -> PageFigure:
    """Return accuracy and speedup by the number of layers that were tried with width for the rest."""
    found = record.results.balance
    assert found is not None
    tried = sorted(found.candidates, key=lambda one: one.layers)

    def picture(name: str, up: str) -> PageChart:
        def draw(chart: Chart) -> None:
            places, values = [one.layers for one in tried], [getattr(one, name) for one in tried]
            chart.fit(places, values)
            chart.panel.locator_params(axis="x", integer=True)
            chart.name("layers removed", up)
            hints = [_about_candidate(one, one.budget == found.budget) for one in tried]
            chart.plot(places, values, Look("accent", "o", line="-", css="best"), hints=hints)
            chosen = found.candidates[found.chosen]
            chart.point(chosen.layers, getattr(chosen, name), CHOSEN)
            chart.sign("tried, after brief fine-tuning", BEST)
            chart.sign("chosen", CHOSEN)

        return PageChart(draw, f"{name} by the number of layers removed before width", lambda _: 240.0)

    return page_figure(picture("accuracy", "accuracy [%]"), picture("speedup", "measured speedup [×]"), wide=HALF)


def _about_candidate(one: Candidate, is_chosen: bool) -> str:
    lines = [
        f"{layers(one.budget.attention, one.budget.activation)} removed",
        f"{percent(one.accuracy)}, {percent(one.start)} before fine-tuning",
        f"speedup {times(one.speedup)}",
        f"width removed: {widths(one.ratios)}",
        f"predicted {percent(one.predicted)} with all its width",
    ]
    return "\n".join(lines + ["chosen"] * is_chosen)


CURVES = {
    "last": ("as trained", Look("accent", "o", line="-", width=2)),
    "ema": ("moving average", Look("orange", "s", line="-", width=2)),
    "loss": ("training loss", Look("green", "D", line="-", width=2)),
}
"""What is known of an epoch, what to call it, and how it is drawn."""


def recovery(record: RunRecord) -> PageFigure:
    """Return accuracy and loss by epoch."""
    found, analysis = record.results.recover, record.results.analyse
    assert found is not None
    dense = analysis.accuracy.top1 if analysis else None

    def picture(up: str, *names: str, level: float | None = None) -> PageChart:
        curves = {name: _known(found.epochs, name) for name in names}

        def draw(chart: Chart) -> None:
            values = [value for points in curves.values() for _, value in points]
            chart.fit([one.number for one in found.epochs], [*values, *([] if level is None else [level])])
            chart.panel.locator_params(axis="x", integer=True)
            chart.name("epoch", up)
            if level is not None:
                chart.level(level, f"dense {percent(level)}", series="dense model")
                chart.sign("dense model", Look("ink", line="--"), "dense model")
            for name, points in curves.items():
                if points:
                    label, look = CURVES[name]
                    spell = (lambda value: f"loss {number(value)}") if name == "loss" else percent
                    hints = [f"epoch {epoch}\n{spell(value)}" for epoch, value in points]
                    chart.plot([epoch for epoch, _ in points], [value for _, value in points], look, label, hints)

        return PageChart(draw, f"{up} by epoch of the fine-tuning", lambda _: 240.0)

    pictures = [picture("accuracy [%]", "last", "ema", level=dense)]
    pictures += [picture("training loss", "loss")] if _known(found.epochs, "loss") else []
    return page_figure(*pictures, wide=HALF)


def _known(epochs: Sequence[EpochResult], name: str) -> list[tuple[int, float]]:
    """Return the finite values by epoch; a training that diverges has others."""
    values = [(one.number, getattr(one, name)) for one in epochs]
    return [(epoch, value) for epoch, value in values if value is not None and isfinite(value)]


PARTS = {"attention": BLUE, "FFN linear": SKY, "activation": YELLOW, "norm": GREEN, "other": GREY}
"""Kinds of layers that have a colour of their own."""


def latency(record: RunRecord) -> PageFigure:
    """Return two bars, dense and pruned: the milliseconds of a batch by kind of layer."""
    measured = record.results.measure
    assert measured is not None
    sides = {name: measured.breakdown.get(name, {}) for name in ("dense", "pruned")}

    def draw(chart: Chart) -> None:
        longest = max(sum(parts.values()) for parts in sides.values()) or 1.0
        chart.panel.set_axis_off()
        chart.panel.set(xlim=(0, longest), ylim=(1.4, -0.5))
        for row, (side, parts) in enumerate(sides.items()):
            total, begin = sum(parts.values()), 0.0
            chart.text(0, row, side, (-58, -4))
            for kind, ms in parts.items():
                look = Look("paper", line="-", fill=PARTS.get(kind, PINK), is_box=True)
                said = f"{side}: {kind}\n{milliseconds(ms)}, {percent(100 * ms / (total or 1), 0)} of the batch"
                parts_ = [chart.box((begin, row - 0.35), (ms, 0.7), look)]
                if ms / longest * (chart.width - 138) > 7 * len(kind) + 12:
                    ink = "#ffffff" if look.fill == BLUE else "#111111"
                    parts_.append(chart.text(begin, row, kind, (7, -4), color=ink))
                chart.mark(said, *parts_, series=kind)
                chart.sign(kind, look, kind)
                begin += ms
            chart.text(total, row, milliseconds(total), (8, -4), fontweight="bold")

    label = "milliseconds of a batch by kind of layer, dense and pruned; the same numbers are in the table"
    return page_figure(PageChart(draw, label, lambda _: 124.0, (62, 76, 0, 0)))
