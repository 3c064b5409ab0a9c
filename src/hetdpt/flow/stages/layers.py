"""Which layers are removed, and the model without them: select, recover, merge, reduce tokens."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hetdpt.core.format import counted, fewer_tokens, percent
from hetdpt.core.goals import GOALS, show
from hetdpt.core.modules import clone
from hetdpt.core.plan import KINDS, Budget, Plan, Site, Tail
from hetdpt.core.tokens import read_tokens
from hetdpt.export.saved import load, save
from hetdpt.flow.config import RunConfig
from hetdpt.flow.execution import fitting_and_judging_images
from hetdpt.flow.mix import MixConfig, mix_into
from hetdpt.flow.resumable import recover_into, select_into
from hetdpt.flow.stages.budget import HOW, target_of
from hetdpt.flow.stages.stage import DATA, MODEL, RunContext, Stage, StageEstimate
from hetdpt.measurement.agreement import relative_difference
from hetdpt.reduce.tokens.reduce import reduce_tokens_
from hetdpt.results import (
    AllocateResult,
    AnalyseResult,
    BalanceResult,
    ChosenLayer,
    ChosenRound,
    FrontierPoint,
    MergeResult,
    RecoverResult,
    ReduceResult,
    SelectResult,
    from_json,
)
from hetdpt.selection.goal import RemovalTarget
from hetdpt.selection.importance import Picked
from hetdpt.store.atomic import write_text
from hetdpt.store.metrics import EPOCH, METRICS, Metrics
from hetdpt.store.run_directory import summary_of
from hetdpt.surgery.merge import merge_
from hetdpt.surgery.record import require_record
from hetdpt.surgery.tail import trim_if_possible_
from hetdpt.training.trainer import Epoch

if TYPE_CHECKING:
    from hetdpt.flow.stages.timing import Trials

PLAN_FILE, FOLDER, SEARCHED = "plan.json", "model", "search"  # that a stage leaves in its own directory
SEARCH = ("method", *HOW, "search", "candidates", "explores")
"""Settings that decide which layers a method chooses."""


class SelectStage(Stage[SelectResult]):
    """Choose the layers to remove (paper, stage 1 step 2)."""

    name, result = "select", SelectResult
    settings = (*SEARCH, "layers", "budget", "priced_goal", "has_free_tail", "mixed_moves")
    inputs = (MODEL, DATA, "analyse", "allocate", "balance")
    by_all = True

    def run(self, context: RunContext) -> SelectResult:
        config, picks, method = context.config, list[ChosenLayer](), context.config.chooser.name
        if config.is_mixed:
            return _mixed(context)
        budget, analysis = _budget(context), context.of(AnalyseResult)
        if budget in (0, Budget(0, 0)):  # width meets the whole goal
            return SelectResult(method, Plan(removal=config.removal, tail=context.tail))

        def watch(pick: Picked) -> None:
            picks.append(_chosen(pick, analysis.blocks))
            count = len([one for one in picks if one.kind != "tail"])
            what = f"layer {count} to remove" if isinstance(pick.move, Site) else "in place of a layer"
            context.note(f"{what}: {pick.move} (score {pick.score:.4g})")

        context.directory.mkdir(exist_ok=True)
        plan = select_into(
            context.directory / PLAN_FILE,
            context.base,
            context.data,
            budget,
            method,
            config.select_config,
            context.execution,
            overwrite=True,
            watch=watch,
        )
        if config.priced_goal:
            context.note(f"predicted: {show(analysis.prices.measures(plan))}")
        return SelectResult(method, plan, tuple(picks))

    def estimate(self, trials: Trials) -> StageEstimate:
        config = trials.config
        if config.is_mixed:
            rounds = trials.search_rounds
            text = f"about {counted(rounds, 'round')} by {config.chooser.name}, {config.images} training images"
            return StageEstimate(stage=self.name, text=text, seconds=trials.searching(rounds))
        if not trials.layers:
            return StageEstimate(stage=self.name, text="no layers: width meets the whole goal")
        seconds, training = trials.selection(config.chooser, trials.layers)
        how = f"a search of {training}" if training else f"{config.images} training images"
        about, tails = "about " if trials.is_guess else "", ", or tails," if config.has_free_tail else ""
        return StageEstimate(
            stage=self.name,
            text=f"{about}{trials.layers} layers{tails} by {config.chooser.name}, {how}",
            updates=training.updates if training else 0,
            seconds=seconds,
            most=training.checkpoints if training else 0,
        )


def _mixed(context: RunContext) -> SelectResult:
    """Return what is removed of all that can be, until the one goal is met."""
    context.require_single_process()
    config, analysis = context.config, context.of(AnalyseResult)
    [(goal, value)] = config.with_numbers(analysis.prices.dense).target.items()
    asked: dict[str, Any] = {"goal": goal, "value": value, "removal": config.removal, "moves": config.moves}
    seed = config.search.training.seed
    images = fitting_and_judging_images(context.model, context.data, config.images, seed, config.workers)
    place = context.directory
    place.mkdir(exist_ok=True)
    plan, picks, rounds = Plan(removal=config.removal), list[ChosenLayer](), list[ChosenRound]()
    for point, reached in mix_into(
        place / SEARCHED, context.model, *images, MixConfig(**asked, batch=config.batch), context.progress
    ):
        rounds.append(ChosenRound(point.moves, point.damage, reached))
        picks += _picks(plan, point, analysis.blocks)
        plan = point.plan
        at = GOALS[goal].show(reached)
        context.note(f"round {len(rounds)}: {', '.join(point.moves)}; damage {point.damage:.3g} at {at}")
    write_text(place / PLAN_FILE, f"{plan.to_json()}\n")
    return SelectResult(
        config.chooser.name, plan, tuple(picks), tuple(rounds), "speedup" if goal == "speedup" else "MACs"
    )


def _picks(before: Plan, point: FrontierPoint, blocks: int) -> Iterator[ChosenLayer]:
    """Yield the layers that a point removes beyond the plan ``before``, and a longer tail."""
    for kind in KINDS:
        for block in getattr(point.plan, kind):
            if block not in getattr(before, kind):
                yield ChosenLayer(kind, block, point.damage)
    if point.plan.tail > before.tail:
        yield ChosenLayer("tail", blocks - point.plan.tail, point.damage)


def _chosen(pick: Picked, blocks: int) -> ChosenLayer:
    move = pick.move
    if isinstance(move, Tail):
        return ChosenLayer("tail", blocks - move.length, pick.score)
    return ChosenLayer(move.kind, move.block, pick.score)


def _budget(context: RunContext) -> Budget | int | RemovalTarget:
    """Return how many layers to remove: of each kind where that is given or allocated, else in all, or for a goal."""
    config = context.config
    if config.budget is not None:
        return Budget(*config.budget)
    if config.priced_goal:
        return target_of(config, context.model, context.of(AnalyseResult).prices)
    if not config.is_split:
        return config.layers or 0
    return context.of(BalanceResult).budget if config.is_balanced else context.of(AllocateResult).budget


class RecoverStage(Stage[RecoverResult]):
    """Fine-tune the model without these layers; the student is saved, not merged yet."""

    name, result = "recover", RecoverResult
    settings = ("images", "recovery", "trim")
    inputs = (MODEL, DATA, "select", "narrow")
    by_all = True

    def run(self, context: RunContext) -> RecoverResult:
        config = context.config
        epochs = recover_into(
            context.directory,
            load(context.work_of("narrow") / FOLDER) if config.plus else deepcopy(context.model),
            context.model,
            context.data,
            config.recovery,
            context.execution,
            plan=None if config.plus else context.of(SelectResult).plan,
            calibration=config.images,
            merges=False,
            trims=config.trim,
            watch=context.execution.watcher("fine-tuning"),
        )
        for epoch in epochs:
            for note in epoch.notes if not epoch.number else ():
                context.note(note)
            context.note(_line(epoch), best=epoch.best)
        context.processes.wait_for_everyone()  # for the first to write its results
        rows = Metrics(context.directory / METRICS).read(EPOCH)
        found = {**summary_of(context.directory), "epochs": rows}
        return from_json(RecoverResult, found, context.directory / METRICS)

    def estimate(self, trials: Trials) -> StageEstimate:
        training, (images, measured_on) = trials.recovery, trials.epoch_images
        calibrated = Plan(removal=trials.config.removal).is_any_fitted and not trials.config.plus
        left = (training.models + calibrated) * trials.weights
        return StageEstimate(
            stage=self.name,
            text=f"{training}, measured on {measured_on} after each",
            updates=training.updates,
            evaluations=images * training.evaluations,
            seconds=trials.recovering(),
            left=left,
            most=left + training.checkpoints,
        )


def _line(epoch: Epoch) -> str:
    if not epoch.number:
        return f"before fine-tuning: {percent(epoch.last)}"
    return f"epoch {epoch.number} of {epoch.epochs}: loss {epoch.loss:.4f}, {percent(epoch.last)}"


class MergeStage(Stage[MergeResult]):
    """Merge the linear layers between which no activation is left (paper, Eq. 7)."""

    name, result = "merge", MergeResult
    settings = ("keep", "trim")
    inputs = ("recover",)

    def run(self, context: RunContext) -> MergeResult:
        student = load(context.work_of("recover") / context.config.kept).to(context.device)
        merged = merge_(clone(student))
        record = require_record(merged)
        difference = relative_difference(student, merged, record.survey.input_size)
        if context.config.trim:
            trim_if_possible_(merged)
        save(deepcopy(merged).cpu(), context.directory / FOLDER, overwrite=True)
        return MergeResult(len(record.merged), difference, replace(record.plan, fits=()), context.config.kept)

    def estimate(self, trials: Trials) -> StageEstimate:
        text = "linear layers without an activation between them become one"
        return StageEstimate(stage=self.name, text=text, seconds=2 * trials.saving, left=trials.weights)


class ReduceStage(Stage[ReduceResult]):
    """Let the blocks of the merged model reduce tokens."""

    name, result = "reduce", ReduceResult
    settings = ("tokens",)
    inputs = ("merge",)

    def is_needed(self, config: RunConfig) -> bool:
        return config.tokens is not None

    def run(self, context: RunContext) -> ReduceResult:
        tokens = read_tokens(context.config.tokens or "")
        model = reduce_tokens_(load(context.work_of("merge") / FOLDER), tokens)
        save(model, context.directory / FOLDER, overwrite=True)
        return ReduceResult(tokens)

    def estimate(self, trials: Trials) -> StageEstimate:
        text = fewer_tokens(read_tokens(trials.config.tokens or ""))
        return StageEstimate(stage=self.name, text=text, seconds=2 * trials.saving, left=trials.weights)
