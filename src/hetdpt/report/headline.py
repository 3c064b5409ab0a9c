"""The outcome of a run in a few sentences and large numbers. No torch here."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from hetdpt.core.format import (
    amount,
    change,
    counted,
    fewer_tokens,
    interval,
    layers,
    listed,
    milliseconds,
    percent,
    split_text,
    times,
    width,
    widths,
)
from hetdpt.core.goals import describe
from hetdpt.core.plan import Plan, Tail
from hetdpt.core.styles import CLASS_TOKEN_KEEPS
from hetdpt.core.tokens import Tokens
from hetdpt.report.run import RunRecord
from hetdpt.results import (
    AnalyseResult,
    BalanceResult,
    GoalResult,
    MeasureResult,
    MergeResult,
    ModelFigures,
    NarrowResult,
    Ratio,
    Results,
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
    """Return the outcome of the run, in a sentence without its full stop."""
    measured = record.results.measure
    if not record.is_finished:
        return f"Not finished: next stage is {record.next_stage}"
    if measured is None:
        return "Finished, nothing was measured"
    return f"{_speed(measured.speedup)}, {_loss(measured) if record.is_labelled else _agreement(measured)}"


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


def _agreement(measured: MeasureResult) -> str:
    return f"{percent(measured.pruned.accuracy.top1)} agreement with the dense model"


def difference(record: RunRecord) -> str:
    """Return the change of accuracy in images, which shows how coarse it is."""
    measured = record.results.measure
    assert measured is not None
    count = measured.pruned.accuracy.count
    points = measured.pruned.accuracy.top1 - measured.dense.accuracy.top1
    images = round(abs(points) * count / 100)
    if not record.is_labelled:
        return f"Of {count:,} images, {images:,} get another class than from the dense model."
    more = f"{images:,} {'more' if points > 0 else 'fewer'}" if images else "as many"
    return f"Of {count:,} images, {more} are right."


def doubt(measured: MeasureResult) -> str:
    """Return why the breakdown is in doubt; empty if it adds up to about the time of a batch."""
    for side, whole in (("dense", measured.dense.ms), ("pruned", measured.pruned.ms)):
        total = sum(measured.breakdown.get(side, {}).values())
        if not whole / FAR < total < whole * FAR:
            return (
                f"the layers of the {side} model took {milliseconds(total)} for a batch, but the whole model "
                f"{milliseconds(whole)}; was the machine busy with something else?"
            )
    return ""


def lead(record: RunRecord) -> str:
    """Return what was done, in a sentence or two."""
    results = record.results
    text = f"The model is {record.model}, the data {record.data}."
    if not record.is_labelled:
        text += " No labels were used: every accuracy here is agreement with the dense model."
    if results.select is None:
        return text
    text = f"{text} Removed: {_removed(results.select, results.analyse, results.narrow)}."
    return f"{text} {reduced(results.reduce.tokens)}" if results.reduce else text


def _removed(chosen: SelectResult, analysis: AnalyseResult | None, narrowing: NarrowResult | None) -> str:
    """Return how many layers and how much width were removed, and the tail."""
    plan, budget = chosen.plan, chosen.plan.budget
    beside = [f"a {Tail(plan.tail)}"] if plan.tail else []
    beside += [f"{counted(plan.narrowed, 'layer')} narrowed"] if plan.narrowed else []
    beside += [fewer_tokens(plan.tokens)] if plan.tokens else []
    tail = f", with {', '.join(beside)}" if beside else ""
    removed, narrower = layers(budget.attention, budget.activation), width(narrowing.ratios) if narrowing else ""
    if not len(chosen.plan):
        return f"{removed}, but {narrower}" if narrower else f"{removed}{tail}"
    of = f" of {len(analysis.sites)} removable layers" if analysis else ""
    return f"{removed}{of}, chosen by the method {chosen.method}{f', and {narrower}' if narrower else ''}{tail}"


def tiles(record: RunRecord) -> list[Tile]:
    """Return the large numbers that are known so far."""
    measured, analysis = record.results.measure, record.results.analyse
    if measured is None:
        return [_dense_tile(analysis)] if analysis else []
    dense, pruned, speed = measured.dense, measured.pruned, measured.speedup
    kept = 100 * pruned.accuracy.top1 / dense.accuracy.top1 if dense.accuracy.top1 else None
    known = f"{percent(dense.accuracy.top1)} before", f"{percent(kept, 1)} of it kept"
    return [
        Tile("accuracy", percent(pruned.accuracy.top1), known) if record.is_labelled else _agreement_tile(pruned),
        Tile("measured speedup", times(speed.value), ("95 % interval", interval(speed.low, speed.high))),
        Tile("MACs", change(dense.macs, pruned.macs), _costs(dense.macs, pruned.macs)),
        Tile("parameters", change(dense.params, pruned.params), _costs(dense.params, pruned.params)),
    ]


def _agreement_tile(pruned: ModelFigures) -> Tile:
    scores = pruned.accuracy
    about = "with the dense model; no labels", f"95 % interval {interval(scores.low, scores.high)}"
    return Tile("agreement", percent(scores.top1), about)


def _costs(before: float, after: float) -> tuple[str, str]:
    return f"{amount(before)} before", f"{amount(after)} left"


def _dense_tile(found: AnalyseResult) -> Tile:
    scores = found.accuracy
    return Tile("dense accuracy", percent(scores.top1), ("95 % interval", interval(scores.low, scores.high)))


def goal_line(goal: GoalResult, results: Results) -> str:
    """Return whether the goal was met and, if not, by how much it was missed; and whether training did not help."""
    text = f"Goal met: {describe(goal.wanted)}" if goal.is_met else f"Goal missed: {goal.text}"
    warning = results.recover.warning(results.merge.kept) if results.recover and results.merge else ""
    return f"{text}. Warning: {warning}" if warning else text


def merged(found: MergeResult) -> str:
    """Return how many FFNs were merged.

    >>> merged(MergeResult(0, 0.0)), merged(MergeResult(1, 0.0)), merged(MergeResult(5, 0.0))
    ('No FFN became one linear layer.', '1 FFN became one linear layer.', '5 FFNs became one linear layer each.')
    """
    count = counted(found.merged, "FFN") if found.merged else "No FFN"
    return f"{count} became one linear layer{' each' * (found.merged > 1)}."


def stopped(plan: Plan, analysis: AnalyseResult) -> list[str]:
    """Return from which block on patches are not updated, as a sentence, if there is one."""
    stop, last = analysis.prices.stop(plan), analysis.blocks - 1
    if stop > last:
        return []
    how = "a fitted tail" if plan.tail > 1 else "which changes no answer"
    where = f"blocks {stop} to {last}" if stop < last else f"block {last}"
    return [f"In {where} only the class token is updated, patches are not ({how})."]


def narrower(plan: Plan) -> list[str]:
    """Return how many layers are narrower, and how tokens are reduced, a sentence each.

    >>> narrower(Plan(features=((0, 64), (3, 32)))), narrower(Plan())
    (['2 layers have fewer hidden features or heads.'], [])
    """
    count = plan.narrowed
    has = "have" if count > 1 else "has"
    found = [f"{counted(count, 'layer')} {has} fewer hidden features or heads."] if count else []
    return found + ([reduced(plan.tokens)] if plan.tokens else [])


def kept(plan: Plan) -> list[str]:
    """Return that the class token keeps FFNs, as a sentence, if it does.

    >>> kept(Plan(activation=(1,))), len(kept(Plan(activation=(1,), removal=("skip", "identity-keep"))))
    ([], 1)
    """
    return [CLASS_TOKEN_KEEPS] if plan.activation and plan.class_token == "keep" else []


def trained(record: RunRecord) -> str:
    """Return how long the fine-tuning was; empty if it is not done yet."""
    chosen, recovery = record.results.select, record.results.recover
    if recovery is None:
        return ""
    removed = ["the layers"] if chosen is None or len(chosen.plan) else []
    removed += ["width"] if record.results.narrow or (chosen and chosen.plan.narrower) else []
    after = f"After the removal of {' and '.join(removed)}, the" if removed else "The"
    text = f"{after} model was fine-tuned for {counted(len(recovery.epochs) - 1, 'epoch')}."
    return " ".join([text, *(f"{note[0].upper()}{note[1:]}." for note in recovery.notes)])


def balanced(found: BalanceResult) -> str:
    """Return which numbers of layers were tried before width, and why one was chosen."""
    tried, chosen = listed(one.layers for one in found.candidates), layers(*asdict(found.budget).values())
    return (
        f"Width meets the rest of the goal, {describe(found.target)}. Tried with {tried} layers removed. Chosen: "
        f"{chosen}, since {found.why}. Accuracies are of {found.measured_on}; one image is "
        f"{100 / found.images:.2f} points."
    )


def reduced(found: Tokens) -> str:
    """Return how tokens are reduced."""
    return f"Tokens are reduced: {fewer_tokens(found)}."


def narrowed(found: NarrowResult) -> str:
    """Return which part of each size was removed, and what is left."""
    left = f"{amount(found.macs)} MACs and {amount(found.params)} parameters"
    speed = f", {times(found.speedup)} faster than the dense model" if found.speedup is not None else ""
    return (
        f"Parts of its sizes removed: {widths(found.ratios)}, found in {counted(found.tried, 'trial')} for "
        f"{describe(found.target)}; merged, the model has {left}{speed}."
    )


def confidence(record: RunRecord) -> list[str]:
    """Return how sure the split is, a sentence each."""
    found = record.results.allocate
    if found is None:
        return []
    chosen, tied = found.chosen, found.tied
    sentences = [f"{layers(found.budget.attention, found.budget.activation)} to remove."]
    if chosen is not None:
        sentences.append(
            f"Predicted {percent(chosen.accuracy)} after a brief fine-tuning like that of the samples, 95 % interval "
            f"{interval(chosen.low, chosen.high)}."
        )
    splits = counted(len(found.table), "split")
    sentences.append(f"The best of {splits} in {percent(100 * found.share, 0)} of the bootstrap draws.")
    if tied:
        names = ", ".join(split_text(row.budget) for row in tied[:NAMED])
        more = f" and {len(tied) - NAMED} more" if len(tied) > NAMED else ""
        sentences.append(f"By the intervals of the polynomial it cannot be told from {names}{more}.")
    return sentences
