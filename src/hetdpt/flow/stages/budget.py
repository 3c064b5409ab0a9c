"""How many layers of each kind are removed: analyse the dense model, sample accuracy, fit, split the budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from math import isfinite
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hetdpt.core.errors import PlanError
from hetdpt.core.format import budget_text, counted, percent
from hetdpt.core.goals import BOUNDS, GOALS, Measures, Wanted, short
from hetdpt.core.modules import clone
from hetdpt.core.plan import KINDS, Budget, Move, Plan, Sample, Tail
from hetdpt.core.processes import broadcast_
from hetdpt.core.tokens import read_tokens
from hetdpt.data.sources import Data
from hetdpt.data.streams import Stream
from hetdpt.data.subset import hold_out
from hetdpt.flow.collection.collect import collect_into, read_samples
from hetdpt.flow.collection.tree import DENSE, tree_of
from hetdpt.flow.config import RunConfig
from hetdpt.flow.execution import fitting_and_judging_images
from hetdpt.flow.stages.stage import DATA, MODEL, SAMPLES, RunContext, Stage, StageEstimate
from hetdpt.flow.unlabelled import note_on
from hetdpt.measurement.accuracy import evaluate
from hetdpt.measurement.costs import Costs
from hetdpt.measurement.speed import machine_of
from hetdpt.reduce.tokens.reduce import reduce_tokens_
from hetdpt.reduce.width.narrow import narrow_to
from hetdpt.reduce.width.search import MOST
from hetdpt.results import (
    AllocateResult,
    AnalyseResult,
    CollectedSample,
    CollectResult,
    FitResult,
    Price,
    Prices,
    SampledLayer,
    Split,
)
from hetdpt.selection.damage import damage_of_each, tail_among
from hetdpt.selection.goal import RemovalTarget, longest_tail
from hetdpt.selection.predictor.allocate import allocate, best_splits, surface
from hetdpt.selection.predictor.polynomial import Predictor, Row, fit_predictor
from hetdpt.selection.predictor.pricing import measure_prices
from hetdpt.selection.predictor.rows import LETTERS, order_of, read_order, samples_file
from hetdpt.surgery.record import require_record, survey_of
from hetdpt.surgery.remove import place_, ready, removable
from hetdpt.surgery.tail import trim_if_possible_

if TYPE_CHECKING:
    from hetdpt.flow.stages.timing import Trials

HOW = ("removal", "images", "tail", "tail_goal")
"""Settings of every stage that removes layers."""
TABLE = 124  # batches in which measure_prices times the layers
BESIDES = 8  # counts of blocks without patches


class AnalyseStage(Stage[AnalyseResult]):
    """Measure the dense model: its removable layers, accuracy, MACs, and the price of each layer."""

    name, result = "analyse", AnalyseResult
    settings = (*HOW, "batch", "device", "trim")
    inputs = (MODEL, DATA)
    by_all = True

    def run(self, context: RunContext) -> AnalyseResult:
        config, model, data = context.config, context.model, context.data
        place_(clone(model), Plan(removal=config.removal, tail=config.tail or 0))  # refuses an impossible tail
        base = ready(model, config.removal)
        survey, weight = require_record(base).survey, next(model.parameters())
        costs = Costs.of(model, survey.input_size)
        require_possible(model, config, costs)
        if not data.is_labelled:
            context.note(note_on(data))
        scores = evaluate(model, data, workers=config.workers, progress=context.part("evaluating the dense model"))
        context.note(f"dense model: {percent(scores.top1)} of {scores.count} images", best=scores.top1)
        if config.trim and (why_not := trim_if_possible_(clone(base))):
            context.note(why_not)
        prices = measure_prices(
            model, removal=config.removal, batch=config.batch, trim=config.trim, progress=context.progress
        )
        prices = prices.with_tail(free_tail(context, prices) if config.tail_goal else config.tail or 0)
        if not config.priced_goal:
            _require_reach(config, prices)
        elif not config.is_mixed:
            target_of(config, model, prices)  # refuses one that is out of reach
        return AnalyseResult(
            model=config.model,
            **asdict(machine_of(weight.device)),
            dtype=str(weight.dtype).removeprefix("torch."),
            blocks=survey.anatomy.blocks,
            input_size=survey.input_size,
            classes=data.num_classes,
            sites=tuple(removable(base)),
            accuracy=scores,
            params=costs.params,
            macs=costs.macs,
            prices=prices,
            metric=data.metric,
        )

    def estimate(self, trials: Trials) -> StageEstimate:
        images, sites = trials.images, len(trials.sites)
        timing = TABLE * trials.batch + (sites + BESIDES) * trials.counting
        timing += sum(trials.choices.values()) if trials.config.tail_goal else 0.0
        return StageEstimate(
            stage=self.name,
            text=f"the dense model on {images} images; {sites} layers counted and timed",
            evaluations=images,
            seconds=images * trials.evaluation + timing,
        )


def free_tail(context: RunContext, prices: Prices) -> int:
    """Return the length of the tail that does less damage than the layers it saves, as far as the goal needs it."""
    config, model, data = context.config, context.model, context.data
    longest = longest_tail(ready(model, config.removal))
    if not longest or data.train is None:
        context.note("no tail: the output depends on patches, or there are no images to fit it on")
        return 0
    seed = config.recovery.training.seed
    images, judge = fitting_and_judging_images(model, data, config.images, seed, config.workers)
    moves: list[Move] = [*removable(ready(model, config.removal)), *map(Tail, range(2, longest + 1))]
    damages = damage_of_each(
        model, images, moves, judge=judge, removal=config.removal, progress=context.part("comparing tails and layers")
    )
    target = config.with_numbers(prices.dense).target
    wanted = Wanted({name: target[name] for name in config.tail_goal})
    tail = tail_among(damages, lambda plan: _cost(prices, plan), lambda plan: not wanted.missed(prices.measures(plan)))
    tail = int(broadcast_(torch.tensor(tail, device=context.device)).item())  # the same in all processes
    context.note(f"tail: {counted(tail, 'block')}, by the damage of tails and of layers for what they save")
    return tail


def target_of(config: RunConfig, model: nn.Module, prices: Prices) -> RemovalTarget:
    """Return how much layers, and a tail if it may be chosen, have to save for the one goal of ``config``."""
    base = ready(model, config.removal)
    sites = [site for site in removable(base) if getattr(prices, site.kind)[site.block] is not None]  # before a tail
    longest = longest_tail(base) if config.has_free_tail else 0
    return RemovalTarget.priced(config.with_numbers(prices.dense).target, sites, prices, longest)


def _cost(prices: Prices, plan: Plan) -> float:
    left = prices.of(plan)
    return left.macs if left.ms is None else left.ms


def require_possible(model: nn.Module, config: RunConfig, dense: Costs) -> None:
    """Raise, before hours are spent on it, if ``model`` cannot lose width or tokens, or not so much."""
    if config.tokens is not None:
        reduce_tokens_(clone(model), read_tokens(config.tokens))
    if not config.plus:
        return
    found = narrow_to(model, ratio=MOST, config=replace(config.width, importance="l2", refits=False))
    least = Measures(macs=found.macs, params=found.params)
    wanted = Wanted(config.with_numbers(Price(dense.macs, dense.params)).target)
    for name in wanted.missed(least):
        if not GOALS[name].is_timed:
            raise _out_of_reach(name, wanted, least, f"with {percent(100 * (1 - MOST), 0)} of its width")


def _require_reach(config: RunConfig, prices: Prices) -> None:
    """Raise ``PlanError`` for a goal that is missed even without any layer, before hours are spent on it."""
    offered, wanted = Budget(*(prices.count(kind) for kind in KINDS)), config.with_numbers(prices.dense).wanted
    least = prices.measures(offered)
    layers, to_remove = offered.layers, wanted.conditions.get("layers", 0)
    if to_remove > layers:
        raise PlanError(f"the goal is {to_remove} layers removed, but this model has {layers} that can be removed")
    if config.plus:
        if config.budget is not None:
            _require_room(Budget(*config.budget), prices, config)
        return
    for name in wanted.missed(least):
        if GOALS[name].is_bound:
            raise _out_of_reach(name, wanted, least, f"without any of its {layers} removable layers")


def _out_of_reach(name: str, wanted: Wanted, least: Measures, when: str) -> PlanError:
    goal, reached = GOALS[name], GOALS[name].reached(least)
    shown = goal.show(reached) if reached is not None else "no known value"
    return PlanError(
        f"the goal '{goal.describe(short(wanted.conditions[name]))}' is out of reach: {when} the model would have "
        f"{shown}; set an easier goal"
    )


def _require_room(budget: Budget, prices: Prices, config: RunConfig) -> None:
    """Raise ``PlanError`` if removing the layers of ``budget`` meets the goal, so that nothing is left to width."""
    if is_met(budget, prices, config.with_numbers(prices.dense).target):
        raise PlanError(
            f"removing {budget_text(budget)} layers meets the goal, so nothing "
            "is left to width; leave out --plus, or give fewer layers or a higher goal"
        )


def is_met(budget: Budget, prices: Prices, target: dict[str, float]) -> bool:
    """Whether layers alone are expected to meet the one condition of ``target``."""
    [(name, value)] = target.items()
    return GOALS[name].is_met(prices.measures(budget), value)


class CollectStage(Stage[CollectResult]):
    """Sample accuracy after brief fine-tunings, measured on training images that are held out (paper, Algorithm 1)."""

    name, result = "collect", CollectResult
    settings = (*HOW, "rounds", "sampled_layers", "collection")
    inputs = (MODEL, DATA)

    def is_needed(self, config: RunConfig) -> bool:
        return config.is_sampled

    def run(self, context: RunContext) -> CollectResult:
        context.require_single_process()
        config, samples = context.config, list[CollectedSample]()
        held, measured_on = held_out(context.data)
        steps = collect_into(
            context.directory,
            context.base,
            held,
            config.collect_config,
            context.execution,
            prices=context.of(AnalyseResult).prices,
            layers=config.sampled_layers or 0,
        )
        for done in steps:
            step = done.result
            sample = CollectedSample(
                budget=step.budget,
                accuracy=step.accuracy,
                before=step.before,
                chain=done.subject.chain,
                layers=tuple(SampledLayer(pick.site.kind, pick.site.block, pick.te) for pick in step.picks),
                seconds=step.seconds,
            )
            samples.append(sample)
            worse = ", that of before the fine-tuning, which made it worse" if step.is_start else ""
            context.note(f"sample {len(samples)} with {done.subject}: {percent(step.accuracy)}{worse}")
        return CollectResult(tuple(samples), measured_on)

    def estimate(self, trials: Trials) -> StageEstimate:
        config, training, images = trials.config, trials.collection, trials.held_images
        tree = tree_of(config.collect_config.chains(trials.blocks, trials.offered, config.layers or 0))
        nodes = [node for node in tree.values() if node.key != DENSE]
        evaluations = images * (1 + len(nodes) * training.evaluations)  # the dense model is a sample too
        chosen = sum(trials.choice(kind) for node in nodes for kind in node.new)
        trained = len(nodes) * (trials.updating(training) + 2 * trials.saving)
        ends = len(nodes) - len({node.parent for node in nodes if node.parent != DENSE})
        models = 1 + ends + any(node.parent == LETTERS["attention"] for node in nodes)
        left = models * trials.weights
        return StageEstimate(
            stage=self.name,
            text=f"{1 + len(nodes)} samples, {training} each, measured on {images} images held out",
            updates=len(nodes) * training.updates,
            evaluations=evaluations,
            seconds=chosen + trained + evaluations * trials.evaluation,
            left=left,
            most=left + 2 * trials.weights + training.checkpoints,
        )


def held_out(data: Data) -> tuple[Data, str]:
    """Return the data with images to measure samples on, and which those are; a stream has none to hold out."""
    if isinstance(data.train, Stream):
        return data, "the validation images, as none of a stream can be held out"
    held = hold_out(data)
    assert held.val is not None
    return held, f"{len(held.val)} training images that were held out"


class FitStage(Stage[FitResult]):
    """Fit the predictor of accuracy by layers removed (paper, Algorithm 2), and predict every split."""

    name, result = "fit", FitResult
    inputs = (MODEL, "analyse", "collect", SAMPLES)

    def is_needed(self, config: RunConfig) -> bool:
        return config.is_split

    def run(self, context: RunContext) -> FitResult:
        found = predictor_of(context)
        prices = replace(context.of(AnalyseResult).prices, order=_order(context))
        names = {field.name for field in fields(FitResult)} - {"tried", "samples", "surface", "prices"}
        points = zip(found.points, found.accuracies, strict=True)
        return FitResult(
            **{name: getattr(found, name) for name in names},
            tried=tuple(asdict(row) for row in found.tried),
            samples=tuple(CollectedSample(budget=_budget(ratios, found), accuracy=value) for ratios, value in points),
            surface=_finite(surface(found, prices)),
            prices=prices,
        )

    def estimate(self, trials: Trials) -> StageEstimate:
        return StageEstimate(stage=self.name, text="how accuracy depends on the layers removed")


def _budget(ratios: tuple[float, float], predictor: Predictor) -> Budget:
    return Budget(*(round((1 - ratio) * predictor.blocks) for ratio in ratios))


def _finite(splits: Sequence[Split]) -> tuple[Split, ...]:
    """Return the splits without infinite speedups, which JSON does not have."""
    return tuple(one if isfinite(one.speedup or 0.0) else replace(one, speedup=None) for one in splits)


class AllocateStage(Stage[AllocateResult]):
    """Split the budget between attention and activation layers (paper, Algorithm 3)."""

    name, result = "allocate", AllocateResult
    settings = ("layers", *BOUNDS, "plus")
    inputs = ("analyse", "fit")

    def is_needed(self, config: RunConfig) -> bool:
        return config.is_split and not config.is_balanced

    def run(self, context: RunContext) -> AllocateResult:
        config, predictor, prices = context.config, predictor_of(context), context.of(FitResult).prices
        wanted: dict[str, Any] = dict(config.with_numbers(prices.dense).wanted.conditions)
        if config.plus:
            wanted = {"layers": config.layers}  # the rest of the goal is met by width
        allocation = allocate(predictor, prices=prices, **wanted)
        best = allocation.best
        if config.plus:
            _require_room(best.budget, prices, config)
        share = f"the best split in {percent(100 * best.share, 0)} of bootstrap draws"
        context.note(f"{best} layers to remove: predicted {percent(best.accuracy)}, {share}")
        return AllocateResult(
            wanted=dict(allocation.wanted.conditions),
            budget=best.budget,
            share=best.share,
            speedup=best.speedup,
            table=_finite(allocation.table),
            frontier=_finite(best_splits(predictor, prices)),
            warnings=allocation.warnings,
        )

    def estimate(self, trials: Trials) -> StageEstimate:
        return StageEstimate(stage=self.name, text="how many layers of each kind to remove")


def predictor_of(context: RunContext) -> Predictor:
    """Return the predictor that is fitted to the samples of the run."""
    return fit_predictor(samples_of(context), context.of(AnalyseResult).blocks)


def _order(context: RunContext) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the blocks of the layers in the order in which samples were taken without them, for each kind."""
    if context.config.samples is not None:
        return read_order(samples_file(context.config.samples))
    samples = sorted(context.of(CollectResult).samples, key=lambda sample: sample.budget.layers)
    return order_of((sample.chain, layer.kind, layer.block) for sample in samples for layer in sample.layers)


def samples_of(context: RunContext) -> Sequence[Row]:
    """Return the samples of the run: those that were given, or those that were collected."""
    if context.config.samples is not None:
        return read_samples(context.config.samples, survey_of(context.model).anatomy.blocks)
    return [Sample(sample.budget, sample.accuracy) for sample in context.of(CollectResult).samples]
