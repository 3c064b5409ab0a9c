"""What a run came to, in a few sentences and large numbers. No torch here."""

from __future__ import annotations

from dataclasses import dataclass

from hetdpt.core.format import (
    amount,
    change,
    counted,
    fewer_tokens,
    interval,
    layers,
    milliseconds,
    percent,
    split_text,
    times,
    width,
    widths,
)
from hetdpt.core.goals import describe
from hetdpt.core.tokens import Tokens
from hetdpt.report.run import RunRecord
from hetdpt.results import (
    AnalyseResult,
    BalanceResult,
    GoalResult,
    MeasureResult,
    MergeResult,
    NarrowResult,
    Ratio,
    SelectResult,
)

NAMED = 8  # splits in a sentence
FAR = 1.5  # times as long as a batch, the sum of its layers is in doubt


@dataclass(frozen=True)
class Tile:
    """One large number of the headline."""

    label: str
    value: str
    notes: tuple[str, ...]


def title(record: RunRecord) -> str:
    """Return what the run came to, in a sentence without its point."""
    measured = record.results.measure
    if not record.is_finished:
        return f"Not finished: next stage is {record.next_stage}"
    return f"{_speed(measured.speedup)}, {_loss(measured)}" if measured else "Finished, nothing was measured"


def _speed(found: Ratio) -> str:
    if found.low <= 1 <= found.high:
        return "No certain speedup"
    return f"{times(found.value)} {'faster' if found.value > 1 else 'the speed'}"


def _loss(measured: MeasureResult) -> str:
    points = measured.pruned.accuracy.top1 - measured.dense.accuracy.top1
    text = f"{abs(points):.2f}"
    if float(text) == 0:
        return "just as accurate"
    return f"{text} points {'more' if points > 0 else 'less'} accurate"


def difference(measured: MeasureResult) -> str:
    """Return what the change of accuracy is in images, so that nobody takes it for more."""
    count = measured.pruned.accuracy.count
    points = measured.pruned.accuracy.top1 - measured.dense.accuracy.top1
    images = round(abs(points) * count / 100)
    more = "more are right" if points > 0 else "fewer are right" if images else "as many are right"
    return f"Of {count:,} images, {f'{images:,} {more}' if images else more}."


def doubt(measured: MeasureResult) -> str:
    """Return why the breakdown is not to be relied on; empty where it is as long as a batch."""
    for side, whole in (("dense", measured.dense.ms), ("pruned", measured.pruned.ms)):
        total = sum(measured.breakdown.get(side, {}).values())
        if not whole / FAR < total < whole * FAR:
            return (
                f"layer by layer a batch of the {side} model took {milliseconds(total)}, but {milliseconds(whole)} "
                "as a whole; was the machine busy with something else?"
            )
    return ""


def lead(record: RunRecord) -> str:
    """Return what was done, in a sentence or two."""
    results = record.results
    text = f"The model {record.model} on the data {record.data}"
    if results.select is None:
        return f"{text}."
    text = f"{text} lost {_gone(results.select, results.analyse, results.narrow)}."
    return f"{text} {reduced(results.reduce.tokens)}" if results.reduce else text


def _gone(chosen: SelectResult, analysis: AnalyseResult | None, narrowing: NarrowResult | None) -> str:
    """Return which layers and how much width went."""
    budget = chosen.plan.budget
    gone, lost = layers(budget.attention, budget.activation), width(narrowing.ratios) if narrowing else ""
    if not len(chosen.plan):
        return f"{gone}, but {lost}" if lost else gone
    of = f" of {len(analysis.sites)} layers that can go" if analysis else ""
    return f"{gone}{of}, chosen by the method {chosen.method}{f', and {lost}' if lost else ''}"


def tiles(record: RunRecord) -> list[Tile]:
    """Return the large numbers, as far as they are known."""
    measured, analysis = record.results.measure, record.results.analyse
    if measured is None:
        return [_dense_tile(analysis)] if analysis else []
    dense, pruned, speed = measured.dense, measured.pruned, measured.speedup
    kept = 100 * pruned.accuracy.top1 / dense.accuracy.top1 if dense.accuracy.top1 else None
    known = f"{percent(dense.accuracy.top1)} before", f"{percent(kept, 1)} of it kept"
    return [
        Tile("accuracy", percent(pruned.accuracy.top1), known),
        Tile("measured speedup", times(speed.value), ("95 % interval", interval(speed.low, speed.high))),
        Tile("MACs", change(dense.macs, pruned.macs), _costs(dense.macs, pruned.macs)),
        Tile("parameters", change(dense.params, pruned.params), _costs(dense.params, pruned.params)),
    ]


def _costs(before: float, after: float) -> tuple[str, str]:
    return f"{amount(before)} before", f"{amount(after)} left"


def _dense_tile(found: AnalyseResult) -> Tile:
    scores = found.accuracy
    return Tile("dense accuracy", percent(scores.top1), ("95 % interval", interval(scores.low, scores.high)))


def goal_line(goal: GoalResult) -> str:
    """Return whether the goal was met and, if not, by how much it was missed."""
    return f"Goal met: {describe(goal.wanted)}" if goal.is_met else f"Goal missed: {goal.text}"


def merged(found: MergeResult) -> str:
    """Return what became of the FFNs whose activation went.

    >>> merged(MergeResult(0, 0.0)), merged(MergeResult(1, 0.0)), merged(MergeResult(5, 0.0))
    ('No FFN became one linear layer.', '1 FFN became one linear layer.', '5 FFNs became one linear layer each.')
    """
    count = counted(found.merged, "FFN") if found.merged else "No FFN"
    return f"{count} became one linear layer{' each' * (found.merged > 1)}."


def trained(record: RunRecord) -> str:
    """Return how long the fine-tuning was; empty where there is none yet."""
    chosen, recovery = record.results.select, record.results.recover
    if recovery is None:
        return ""
    gone = ["the layers"] if chosen is None or len(chosen.plan) else []
    gone += ["width"] if record.results.narrow else []
    return f"After {' and '.join(gone)} went, the rest was trained for {counted(len(recovery.epochs) - 1, 'epoch')}."


def balanced(found: BalanceResult) -> str:
    """Return how it was found how many layers go before width does, and why so many."""
    *others, last = (str(one.layers) for one in found.candidates)
    tried = f"{', '.join(others)} and {last}" if others else last
    taken = layers(found.budget.attention, found.budget.activation)
    return (
        f"What layers leave of the goal, {describe(found.target)}, is for width to meet. It was tried with {tried} "
        f"layers less. What goes is {taken}, since {found.why}. Accuracies are of {found.measured_on}, of which one is "
        f"{100 / found.images:.2f} points."
    )


def reduced(found: Tokens) -> str:
    """Return how many tokens go."""
    return f"Tokens are reduced: {fewer_tokens(found)}."


def narrowed(found: NarrowResult) -> str:
    """Return which part of each size went, and what is left."""
    left = f"{amount(found.macs)} MACs and {amount(found.params)} parameters"
    speed = f", {times(found.speedup)} faster than the dense model" if found.speedup is not None else ""
    return (
        f"Of its sizes these parts went: {widths(found.ratios)}. They were found in "
        f"{counted(found.tried, 'trial')}, for {describe(found.target)}; merged, it has {left}{speed}."
    )


def confidence(record: RunRecord) -> list[str]:
    """Return how sure the split is, a sentence each."""
    found = record.results.allocate
    if found is None:
        return []
    chosen, tied = found.chosen, found.tied
    said = [f"{layers(found.budget.attention, found.budget.activation)} go."]
    if chosen is not None:
        said.append(
            f"Predicted {percent(chosen.accuracy)} after a brief fine-tuning, as samples are, 95 % interval "
            f"{interval(chosen.low, chosen.high)}."
        )
    splits = counted(len(found.table), "split")
    said.append(f"The best of {splits} in {percent(100 * found.share, 0)} of the draws of samples.")
    if tied:
        names = ", ".join(split_text(row.budget) for row in tied[:NAMED])
        more = f" and {len(tied) - NAMED} more" if len(tied) > NAMED else ""
        said.append(f"By the intervals of the polynomial it cannot be told from {names}{more}.")
    return said
