"""The charts of a run, drawn into a ``Chart``; the one of the frontier is a figure file as well. No torch here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil, inf, isfinite

from hetdpt.core.format import (
    budget_text,
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
from hetdpt.core.plan import KINDS, Budget, Kind
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
)  # fmt: skip
from hetdpt.report.run import RunRecord
from hetdpt.report.tables import compared
from hetdpt.results import Candidate, ChosenLayer, CollectedSample, EpochResult, MeasureResult, Prices, Scores, Split

BEST = Look("accent", "o", css="best")
BEYOND = Look("accent", "o", fill="paper", css="beyond")
SAMPLE = Look("orange", "x", order=4, css="sample")
CHOSEN = Look("green", "o", 14, width=2, fill="none", order=5, css="chosen")
INTERVAL = Look("accent", line="-", width=4, alpha=0.25, order=1)
DENSE = Look("ink", "*", 11)
REACH = 1.6  # times as far as the samples; beyond, the polynomial is a guess and not drawn


def _height(width: float) -> float:
    """Return the height of a picture of accuracy by speedup."""
    return 0.82 * width if width < NARROW_BELOW else 0.48 * width


# The blocks of the model

KEPT = Look("accent", is_box=True, css="kept")
REMOVED = Look("soft", line="--", fill="none", is_box=True, css="removed")
FIXED = Look("rule", is_box=True)
STOPPED = Look("orange", is_box=True)
GAP, AROUND, WIDEST = 6.0, 54.0, 72.0  # pixels between two layers, around a row of blocks, and of the widest block

Key = tuple[Kind, int]
"""A kind of layer, and its block."""


def turns_of(record: RunRecord) -> dict[Key, ChosenLayer]:
    """Return the removed layers in their order; those whose turn is not known are last."""
    chosen = record.results.select
    if chosen is None:
        return {}
    picked: dict[Key, ChosenLayer] = {(pick.kind, pick.block): pick for pick in chosen.picks if pick.kind != "tail"}
    planned = {(kind, block): ChosenLayer(kind, block) for kind in KINDS for block in getattr(chosen.plan, kind)}
    both = picked | {key: layer for key, layer in planned.items() if key not in picked}
    return {key: layer for key, layer in both.items() if key in planned}


def blocks(record: RunRecord) -> PageFigure:
    """Return the blocks with the removed layers: an empty frame with its turn."""
    analysis, chosen = record.results.analyse, record.results.select
    assert analysis is not None
    paths, turns = {(site.kind, site.block): site.path for site in analysis.sites}, turns_of(record)
    stop = analysis.prices.stop(chosen.plan) if chosen else analysis.blocks

    def arrange(width: float) -> tuple[float, float, int, float]:
        """Return where the first block begins, the height of a layer, and the number of blocks in a row."""
        left, high = (72.0, 34.0) if width < NARROW_BELOW else (86.0, 40.0)
        rows = ceil(analysis.blocks * (high + 4) / (width - left))
        return left, high, ceil(analysis.blocks / rows), rows * (2 * high + AROUND) - 8

    def draw(chart: Chart) -> None:
        left, high, per_row, height = arrange(chart.width)
        column = min((chart.width - left) / per_row, WIDEST)
        chart.panel.set_axis_off()
        chart.panel.set(xlim=(0, chart.width), ylim=(height, 0))
        chart.sign("kept" if chosen else "removable", KEPT)
        if turns:
            chart.sign("removed, with its turn", REMOVED)
        if stop < analysis.blocks:
            chart.sign("patches are not updated", STOPPED)
        for block in range(analysis.blocks):
            row, place = divmod(block, per_row)
            x, top = left + place * column, row * (2 * high + AROUND) + 22
            chart.text(x + column / 2, top - 9, str(block), ha="center", color="soft")
            if not place:
                chart.text(0, top - 9, "block", color="soft")
            for kind, y in zip(KINDS, (top, top + high + GAP), strict=True):
                if not place:
                    chart.text(0, y + high / 2 + 4, kind)
                draw_layer(chart, (kind, block), (x + 3, y), (column - 6, high))
            if block >= stop:
                chart.box((x + 3, top + 2 * high + GAP + 5), (column - 6, 5), STOPPED)

    def draw_layer(chart: Chart, key: Key, corner: tuple[float, float], size: tuple[float, float]) -> None:
        look = FIXED if key not in paths else REMOVED if key in turns else KEPT
        parts = [chart.box(corner, size, look)]
        if look is REMOVED:
            turn, (x, y) = str([*turns].index(key) + 1), (corner[0] + size[0] / 2, corner[1] + size[1] / 2)
            apart = 3 * (len(turn) - 1)  # for a second digit
            parts.append(chart.text(x - 5 - apart, y + 5, turn, ha="center", fontsize=14))
            parts += chart.panel.plot([x + 8 + apart], [y], "x", color=chart.colour("orange"), markeredgewidth=2)
        chart.mark("\n".join(_about(record, key, paths.get(key), turns)), *parts, css=look.css)

    label = "blocks of the model, and the layers that can be removed"
    if chosen:
        removed = (f"{kind} of blocks {', '.join(map(str, getattr(chosen.plan, kind))) or 'none'}" for kind in KINDS)
        label = f"blocks of the model; {'removed: ' + '; '.join(removed) if turns else 'no layer is removed'}"
        label += f"; patches are not updated from block {stop} on" * (stop < analysis.blocks)
    return page_figure(PageChart(draw, label, lambda width: arrange(width)[3], (0, 0, 0, 0)))


def _about(record: RunRecord, key: Key, path: str | None, turns: dict[Key, ChosenLayer]) -> Iterator[str]:
    """Yield what is known of a layer, line by line."""
    yield f"block {key[1]}: {key[0]}"
    if path is None:
        yield "nothing that can be removed"
        return
    yield path
    if key in turns:
        yield f"removed, number {[*turns].index(key) + 1} of {len(turns)}"
        if (score := turns[key].score) is not None:
            yield f"score {number(score)}"
    else:
        yield "kept" if record.results.select else "can be removed"
    if (entropy := record.entropies.get(key)) is not None:
        yield f"transfer entropy {number(entropy)} where it was sampled"


# Predicted accuracy

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
    yield f"{budget_text(one.budget)} removed"
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
            return float(budget.layers)
        speedup = self.prices.speedup(budget)
        return inf if speedup is None else speedup

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
        axis, shown, final = self.axis, self.shown, self.final
        samples = [one for one in self.samples if isfinite(axis(one.budget))]
        chosen = [self.chosen] if self.chosen and isfinite(axis(self.chosen.budget)) else []
        drawn: list[Split | CollectedSample] = [*shown, *chosen, *samples]
        known = [(axis(one.budget), one.accuracy) for one in drawn]
        if final:  # with its interval, so that a small difference does not look like a large one
            x, scores = final.speedup.value if axis.is_timed else float(self.removed), final.pruned.accuracy
            known += [(x, scores.low), (x, scores.high)]
        chart.fit(*zip(*known, strict=True))
        chart.panel.locator_params(axis="x", integer=not axis.is_timed)
        if axis.is_timed and chart.is_page:
            chart.panel.xaxis.set_major_formatter("{x:g}×")
        self._draw_best(chart, shown)
        hints = [f"sample {split_text(one.budget)}\n{percent(one.accuracy)}" for one in samples]
        self._plot(chart, samples, SAMPLE, "samples", hints)
        for one in chosen:
            name = f"chosen: {split_text(one.budget)}"
            self._plot(chart, [one], CHOSEN, name, ["\n".join((name, *_predicted(one)))])
        if final:
            name, speed, look = "final model, measured", final.speedup, Look("ink", "D", 9, order=5, css="ink")
            hint = f"{name}\n{percent(scores.top1)} of {scores.count:,} images\nspeedup {times(speed.value)}\n"
            hint += f"95 % interval {interval(speed.low, speed.high)}"
            ends = (speed.low, speed.high) if axis.is_timed else None
            chart.point(x, scores.top1, look, hint, name, ends, (scores.low, scores.high))
            chart.sign(name, look, name)

    def _draw_best(self, chart: Chart, shown: Sequence[Split]) -> None:
        for one in shown:
            # no band: neighbours may be a sample, which is known well, and a mixed split, which is not
            if isfinite(one.high - one.low):
                chart.span((self.axis(one.budget),) * 2, (one.low, one.high), INTERVAL, "95 % intervals")
        for one, two in pairwise(shown):
            look = Look("accent", line="--" if one.is_beyond or two.is_beyond else "-", order=2)
            ends = (self.axis(one.budget), self.axis(two.budget)), (one.accuracy, two.accuracy)
            chart.mark("", chart.span(*ends, look), series="best predicted")
        for label, look in (("best predicted", BEST), ("best predicted, beyond the samples: a guess", BEYOND)):
            some = [one for one in shown if one.is_beyond == (look is BEYOND)]
            hints = ["\n".join((f"best predicted: {split_text(one.budget)}", *_predicted(one))) for one in some]
            if some:
                self._plot(chart, some, look, label, hints)

    def _plot(
        self, chart: Chart, some: Sequence[Split | CollectedSample], look: Look, label: str, hints: list[str]
    ) -> None:
        chart.plot([self.axis(one.budget) for one in some], [one.accuracy for one in some], look, label, hints)


def frontier(record: RunRecord) -> PageFigure:
    """Return the best predicted accuracy by speedup, with samples, the chosen split and the final model."""
    fit, allocation, chosen = record.results.fit, record.results.allocate, record.results.select
    assert fit is not None
    assert allocation is not None
    axis, removed = SpeedAxis(fit.prices), len(chosen.plan) if chosen else 0
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
    "mixed": (ORANGE, "*"),
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
            ends = row.speed.low, row.speed.high
            lines = [row.method, percent(row.accuracy), f"speedup {times(row.speed.speedup)}"]
            hint = "\n".join([*lines, f"95 % interval {interval(*ends)}"])
            chart.point(row.speed.speedup, row.accuracy, method_look(row.method), hint, row.method, ends)

    return page_figure(PageChart(draw, "accuracy by measured speedup, a point for each method", _height))


def runs(records: Sequence[RunRecord], names: Sequence[str]) -> PageFigure:
    """Return accuracy by measured speedup of several runs, each with a line from its dense model."""
    both = zip(names, records, strict=True)
    found = [(name, one.method, one.results.measure) for name, one in both if one.results.measure]

    def draw(chart: Chart) -> None:
        points = [(one.speedup.value, end) for _, _, one in found for end in _ends(one.pruned.accuracy)]
        chart.fit(*zip(*points, *((1.0, one.dense.accuracy.top1) for _, _, one in found), strict=True))
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
    look, ends = method_look(method), (speed.low, speed.high)
    chart.point(speed.value, pruned.top1, look, "\n".join(lines), name, ends, _ends(pruned))


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
    where = " of the validation images" if found.is_held_out else ""  # the curve is of the held-out images

    def picture(up: str, *names: str, level: float | None = None) -> PageChart:
        curves = {name: _known(found.epochs, name) for name in names}

        def draw(chart: Chart) -> None:
            values = [value for points in curves.values() for _, value in points]
            chart.fit([one.number for one in found.epochs], [*values, *([] if level is None else [level])])
            chart.panel.locator_params(axis="x", integer=True)
            chart.name("epoch", up)
            if level is not None:
                chart.level(level, f"dense {percent(level)}{where}", series="dense model")
                chart.sign("dense model", Look("ink", line="--"), "dense model")
            for name, points in curves.items():
                if points:
                    label, look = CURVES[name]
                    spell = (lambda value: f"loss {number(value)}") if name == "loss" else percent
                    hints = [f"epoch {epoch}\n{spell(value)}" for epoch, value in points]
                    chart.plot([epoch for epoch, _ in points], [value for _, value in points], look, label, hints)

        return PageChart(draw, f"{up} by epoch of the fine-tuning", lambda _: 240.0)

    pictures = [picture(f"{record.metric} [%]", "last", "ema", level=dense)]
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
                hint = f"{side}: {kind}\n{milliseconds(ms)}, {percent(100 * ms / (total or 1), 0)} of the batch"
                parts_ = [chart.box((begin, row - 0.35), (ms, 0.7), look)]
                if ms / longest * (chart.width - 138) > 7 * len(kind) + 12:
                    ink = "#ffffff" if look.fill == BLUE else "#111111"
                    parts_.append(chart.text(begin, row, kind, (7, -4), color=ink))
                chart.mark(hint, *parts_, series=kind)
                chart.sign(kind, look, kind)
                begin += ms
            chart.text(total, row, milliseconds(total), (8, -4), fontweight="bold")

    label = "milliseconds of a batch by kind of layer, dense and pruned; the same numbers are in the table"
    return page_figure(PageChart(draw, label, lambda _: 124.0, (62, 76, 0, 0)))
