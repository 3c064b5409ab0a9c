"""A dry run: what a run will do, and about how long, from steps that were tried and timed (``trial``). It writes
nothing to the run directory.

Steps are tried on the dense model. Those of a run are on models with fewer layers, so that times and sizes come out
rather too large than too small.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from hetdpt.core.errors import TrainError
from hetdpt.core.format import counted, fewer_tokens
from hetdpt.core.goals import describe
from hetdpt.core.host import peak_memory
from hetdpt.core.plan import KINDS, Budget, Kind, Plan
from hetdpt.core.tokens import read_tokens
from hetdpt.data.sources import Data
from hetdpt.flow.collection.tree import DENSE, LETTERS, SampleNode, tree_of
from hetdpt.flow.comparison import work as compare_work
from hetdpt.flow.config import RunConfig
from hetdpt.flow.stages import trial
from hetdpt.flow.stages.budget import held_out, require_possible
from hetdpt.flow.stages.outcome import ROUNDS, TIMING_SECONDS
from hetdpt.flow.stages.trial import Training
from hetdpt.flow.stages.width import BY, depths_of
from hetdpt.flow.stages.width import TIMING_SECONDS as BALANCE_SECONDS
from hetdpt.measurement.costs import Costs
from hetdpt.measurement.machine import Machine
from hetdpt.reduce.width.search import SECONDS
from hetdpt.selection.entropy import require_offered
from hetdpt.selection.methods import Method, method_called
from hetdpt.selection.select import kinds_of
from hetdpt.store.checkpoints import KEPT
from hetdpt.surgery.record import require_record
from hetdpt.surgery.remove import ready, removable
from hetdpt.training.processes import start

TABLE, BREAKDOWN, WARMUP, RUNS = 112, 20, 10, 100  # batches: latency_table, latency_breakdown, measure_throughput
PART = 3  # where the goal is no number of layers, one in so many is taken to go
RATIOS, TIMED, SEARCH = 10, 20, 50  # ratios tried for a goal, for one that is a speedup; batches that time each
StageProgress = Callable[[str, int, int], None]
"""Called with what is being done and (steps done, in all)."""


@dataclass(frozen=True, kw_only=True)
class StageEstimate:
    """What one stage will do."""

    stage: str
    text: str
    """In words."""
    updates: int = 0
    """Of weights, in all its trainings."""
    evaluations: int = 0
    """Images evaluated; one that is so twice counts twice."""
    seconds: float | None = None
    """None for a moment, which is not worth a trial."""
    left: int = 0
    """Bytes on disk when it is done."""
    most: int = 0
    """Bytes on disk at most before that."""
    is_done: bool = False
    """Whether the run directory has it already."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What a run will do, and what that takes on this machine."""

    stages: tuple[StageEstimate, ...]
    device: str
    processor: str
    threads: int
    memory: int
    """Bytes in use at most while steps were tried."""
    memory_of: str
    """By whom."""
    layers: int
    """How many are taken to go."""
    is_guess: bool
    """Whether that is a guess, since the goal is another."""

    @property
    def seconds(self) -> float:
        """Of all that is left to do."""
        return sum(stage.seconds or 0.0 for stage in self.stages if not stage.is_done)

    @property
    def disk(self) -> int:
        """Bytes in the run directory at most."""
        left, most = 0, 0
        for stage in self.stages:
            most = max(most, left + stage.most)
            left += stage.left
        return max(most, left)

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain JSON."""
        return {**asdict(self), "seconds": self.seconds, "disk": self.disk}


def estimate(
    config: RunConfig,
    model: nn.Module,
    data: Data,
    progress: StageProgress | None = None,
    *,
    done: Collection[str] = (),
) -> Estimate:
    """Return what a run of ``config`` will do, stage by stage, and about how long on this device.

    ``model`` is moved to the device and otherwise left alone. ``done`` names stages that will not be done again. The
    trials take about as long as a dozen updates of the weights.

    >>> import hetdpt
    >>> from hetdpt.data.sources import open_data
    >>> config = RunConfig(
    ...     model="vit_tiny_patch16_224", data="demo", out="nowhere", layers=2, method="random", images=4
    ... )
    >>> found = estimate(config, hetdpt.create(config.model, img_size=32, num_classes=10), open_data("demo"))
    >>> {stage.stage: stage.updates for stage in found.stages if stage.updates}
    {'recover': 220}
    """
    processes = start(config.recovery.training.precision, config.device)
    if processes.num_processes > 1:
        raise TrainError("a dry run is of one process; leave torchrun or accelerate launch out")
    device = processes.device
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    forecast = _Forecast(config, model.to(device), data, progress)
    stages = tuple(replace(stage, is_done=stage.stage in done) for stage in forecast.stages())
    return Estimate(
        stages=stages,
        **asdict(Machine.of(device)),
        **_memory(device),
        layers=forecast.layers,
        is_guess=forecast.is_guess,
    )


def _memory(device: torch.device) -> dict[str, Any]:
    """Return how many bytes were in use at most, and by whom."""
    if device.type == "cuda":
        return {"memory": torch.cuda.max_memory_allocated(device), "memory_of": "tensors on the GPU"}
    whose = "this process with its libraries; processes that read images come on top"
    return {"memory": peak_memory(), "memory_of": whose}


class _Forecast:
    """What each stage will do; a step is tried when the first stage needs it."""

    def __init__(self, config: RunConfig, model: nn.Module, data: Data, progress: StageProgress | None) -> None:
        self.config, self.model, self.data, self.progress = config, model, data, progress
        base = ready(model, config.removal)
        self.blocks, self.sites = require_record(base).survey.anatomy.blocks, removable(base)
        kinds = [site.kind for site in self.sites]
        self.offered = Budget(kinds.count("attention"), kinds.count("activation"))
        self.is_guess = config.layers is None and config.budget is None
        asked = config.layers if config.budget is None else sum(config.budget)
        guess = max(self._depths) if config.is_balanced else max(len(kinds) // PART, 1)
        self.layers = guess if asked is None else asked
        require_possible(model, config, Costs.of(model, require_record(base).survey.input_size))
        self.weights = sum(tensor.nbytes for tensor in model.state_dict().values())
        for count in (self.layers, *self._depths):
            require_offered(self.sites, self._kinds(method_called(config.method), count))

    def stages(self) -> list[StageEstimate]:
        """Return the stages that the run has."""
        moments = {
            "fit": "how accuracy depends on the layers removed",
            "allocate": "how many layers of each kind go",
            "report": "summary.json, report.html, report.md, report.json",
        }
        work: dict[str, Callable[[], StageEstimate]] = {
            "analyse": self._analyse,
            "collect": self._collect,
            "balance": self._balance,
            "select": self._select,
            "narrow": self._narrow,
            "recover": self._recover,
            "merge": self._merge,
            "reduce": self._reduce,
            "measure": self._measure,
            "save": self._save,
            "compare": self._compare,
        }
        return [
            work[name]() if name in work else StageEstimate(stage=name, text=moments[name])
            for name in self.config.stages
        ]

    # the stages

    def _analyse(self) -> StageEstimate:
        count, sites = self._validation, len(self.sites)
        timing = TABLE * self._batch + sites * self._counting
        return StageEstimate(
            stage="analyse",
            text=f"the dense model on {count} images; {sites} layers counted and timed",
            evaluations=count,
            seconds=count * self._evaluation + timing,
        )

    def _collect(self) -> StageEstimate:
        nodes, training = self._nodes, self._collection
        count, each = _count(self._held), self._collection.evaluations
        evaluations = count * (1 + len(nodes) * each)  # the dense model is a sample too
        taken = sum(self._choice(kind) for node in nodes for kind in node.new)
        ends = len(nodes) - len({node.parent for node in nodes if node.parent != DENSE})
        models = 1 + ends + any(node.parent == LETTERS["attention"] for node in nodes)
        left = models * self.weights
        return StageEstimate(
            stage="collect",
            text=f"{1 + len(nodes)} samples, {_spell(training)} each, measured on {count} images held out",
            updates=len(nodes) * training.updates,
            evaluations=evaluations,
            seconds=taken + len(nodes) * (self._training(training) + 2 * self._saving) + evaluations * self._evaluation,
            left=left,
            most=left + 2 * self.weights + _checkpoints(training),
        )

    def _balance(self) -> StageEstimate:
        depths, training, count = self._depths, self._collection, _count(self._held)
        tried, models = ", ".join(map(str, depths)), 1 + _kept(training)
        evaluations, left = len(depths) * count * training.evaluations, len(depths) * models * self.weights
        made = sum(self._selection(method_called(BY), layers)[0] + self._narrowing(layers) for layers in depths)
        trained = len(depths) * (self._training(training) + models * self._saving) + evaluations * self._evaluation
        return StageEstimate(
            stage="balance",
            text=f"{tried} layers less and width, {_spell(training)} each, measured on {count} images held out",
            updates=len(depths) * training.updates,
            evaluations=evaluations,
            seconds=made + trained + self._timing(1 + len(depths), RUNS, BALANCE_SECONDS),
            left=left,
            most=left + _checkpoints(training),
        )

    def _select(self) -> StageEstimate:
        if not self.layers:
            return StageEstimate(stage="select", text="no layers: all of the goal is for width to meet")
        seconds, training = self._selection(method_called(self.config.method), self.layers)
        how = f"a search of {_spell(training)}" if training else f"{self.config.images} training images"
        about = "about " if self.is_guess else ""
        return StageEstimate(
            stage="select",
            text=f"{about}{self.layers} layers by {self.config.method}, {how}",
            updates=training.updates if training else 0,
            seconds=seconds,
            most=_checkpoints(training) if training else 0,
        )

    def _narrow(self) -> StageEstimate:
        config = self.config
        goals = {"macs": config.macs, "params": config.params, "speedup": config.speedup}
        goal = describe({name: value for name, value in goals.items() if value is not None})
        return StageEstimate(
            stage="narrow",
            text=f"width for the rest of the goal, {goal}: {config.images} training images",
            seconds=self._narrowing(self.layers) + self._saving,
            left=self.weights,
        )

    def _recover(self) -> StageEstimate:
        training, count = self._recovery, self._validation
        models = _kept(training) + (Plan(removal=self.config.removal).is_any_fitted and not self.config.plus)
        return StageEstimate(
            stage="recover",
            text=f"{_spell(training)}, measured on {count} images after each",
            updates=training.updates,
            evaluations=count * training.evaluations,
            seconds=self._recovering,
            left=models * self.weights,
            most=models * self.weights + _checkpoints(training),
        )

    def _merge(self) -> StageEstimate:
        text = "linear layers without an activation between them become one"
        return StageEstimate(stage="merge", text=text, seconds=2 * self._saving, left=self.weights)

    def _reduce(self) -> StageEstimate:
        text = fewer_tokens(read_tokens(self.config.tokens or ""))
        return StageEstimate(stage="reduce", text=text, seconds=2 * self._saving, left=self.weights)

    def _measure(self) -> StageEstimate:
        count = self._validation
        seconds = count * self._evaluation + self._timing(2, ROUNDS, TIMING_SECONDS) + 2 * BREAKDOWN * self._batch
        text = f"the pruned model on {count} images; both timed in turns"
        return StageEstimate(stage="measure", text=text, evaluations=count, seconds=seconds)

    def _save(self) -> StageEstimate:
        text, left = "the model", self.weights
        for row in self.config.exports:
            text, left = f"{text}, and as {row.title}", left + self.weights
        return StageEstimate(stage="save", text=text, seconds=2 * self._saving, left=left)

    def _compare(self) -> StageEstimate:
        methods = [method_called(name) for name in self.config.compare]
        methods = [method for method in methods if self.layers <= self._most(method)]
        chosen = [self._selection(method, self.layers) for method in methods]
        searches = [training for _, training in chosen if training]
        evaluations = self._validation * (1 + len(methods) * (self._recovery.evaluations + 1))
        again = self._validation * (1 + len(methods)) * self._evaluation
        return StageEstimate(
            stage="compare",
            text=f"{', '.join(method.name for method in methods)}: layers chosen, fine-tuned and measured as above",
            updates=sum(search.updates for search in searches) + len(methods) * self._recovery.updates,
            evaluations=evaluations,
            seconds=sum(seconds for seconds, _ in chosen)
            + len(methods) * self._recovering
            + again
            + self._timing(1 + len(methods), RUNS, compare_work.TIMING_SECONDS),
            most=max(map(_checkpoints, [*searches, self._recovery])) + 4 * self.weights,
        )

    # what they are made of

    @property
    def _depths(self) -> tuple[int, ...]:
        """The numbers of layers that are tried with width for the rest."""
        if not self.config.is_balanced:
            return ()
        return depths_of(self.config, len(self.sites))

    def _kinds(self, method: Method, layers: int) -> tuple[Kind | None, ...]:
        """Return of which kind each layer is that goes; where a predictor splits the budget, it is cut in half."""
        if not layers:
            return ()
        if method.split != "map":
            return kinds_of(method, layers)
        if self.config.budget is not None:
            return kinds_of(method, Budget(*self.config.budget))
        attention = min(max(layers // 2, layers - self.offered.activation), self.offered.attention)
        return kinds_of(method, Budget(attention, layers - attention))

    def _most(self, method: Method) -> int:
        """Return how many layers a method can take."""
        return len([site for site in self.sites if method.only in (None, site.kind)])

    def _selection(self, method: Method, layers: int) -> tuple[float, Training | None]:
        """Return how long a method takes to choose so many layers, and the training that is a part of it."""
        kinds = self._kinds(method, layers)
        if method.score == "random":
            return 0.0, None
        if method.score != "importance":
            return sum(self._choice(kind) for kind in kinds), None
        scans = (self.config.candidates == "te") + self.config.explores  # each as long as a choice among all
        return scans * self._choice(None) + len(kinds) * self._fit + self._training(self._search), self._search

    def _choice(self, kind: Kind | None) -> float:
        """Return the seconds in which a layer is chosen among all of ``kind``."""
        return self._choices[kind] if kind else sum(self._choices.values())

    def _training(self, training: Training) -> float:
        """Return the seconds of the updates, and of asking the teacher beforehand."""
        asked = training.images if training.asks else 0
        return training.updates * training.seconds + asked * self._evaluation

    def _timing(self, models: int, rounds: int, seconds: float) -> float:
        """Return how long so many models are timed in turns, ``rounds`` times or for ``seconds``."""
        turn = models * self._batch
        return WARMUP * turn + min(rounds * turn, seconds)

    def _calibration(self, layers: int) -> float:
        """Return the seconds in which the replacements of so many layers are fitted, one after another."""
        passes = layers * self.config.images if Plan(removal=self.config.removal).is_any_fitted else 0
        return passes * self._evaluation

    def _narrowing(self, layers: int) -> float:
        """Return the seconds in which a model without so many layers is made, and loses width."""
        search = RATIOS * self._counting
        if self.config.speedup is not None:
            search = TIMED * (self._counting + self._timing(2, SEARCH, SECONDS))
        return self._calibration(layers) + self._width + search

    @property
    def _recovering(self) -> float:
        """The seconds of calibration, fine-tuning and evaluation; what has lost width is calibrated already."""
        training = self._recovery
        calibration = 0.0 if self.config.plus else self._calibration(self.layers)
        images = self._validation * training.evaluations
        return calibration + self._training(training) + images * self._evaluation + 3 * self._saving

    @cached_property
    def _nodes(self) -> list[SampleNode]:
        tree = tree_of(self.config.collect_config.chains(self.blocks, self.offered, self.config.layers or 0))
        return [node for node in tree.values() if node.key != DENSE]

    @cached_property
    def _held(self) -> Data:
        return held_out(self.data)[0]

    @property
    def _validation(self) -> int:
        return _count(self.data)

    # trials

    def _tell(self, step: str) -> None:
        if self.progress:
            self.progress(f"trying {step}", 0, 0)

    @cached_property
    def _collection(self) -> Training:
        self._tell("the fine-tuning of a sample")
        return trial.try_training(self.model, self._held, self.config.collection, self.config)

    @cached_property
    def _recovery(self) -> Training:
        self._tell("the fine-tuning")
        return trial.try_training(self.model, self.data, self.config.recovery, self.config)

    @cached_property
    def _search(self) -> Training:
        self._tell("the search")
        kinds = next(
            self._kinds(method, self.layers)
            for method in map(method_called, (self.config.method, *self.config.compare))
            if method.score == "importance"
        )
        return trial.try_search(self.model, self.data, self.config, kinds, self.sites)

    @cached_property
    def _choices(self) -> dict[Kind, float]:
        found = {}
        for kind in KINDS:
            self._tell(f"the choice of an {kind} layer")
            has_some = any(site.kind == kind for site in self.sites)
            found[kind] = trial.try_choice(self.model, self.data, self.config, kind) if has_some else 0.0
        return found

    @cached_property
    def _fit(self) -> float:
        self._tell("a calibration")
        return trial.try_fit(self.model, self.data, self.config, self.sites)

    @cached_property
    def _width(self) -> float:
        self._tell("the loss of width")
        return trial.try_narrowing(self.model, self.data, self.config)

    @cached_property
    def _evaluation(self) -> float:
        self._tell("an evaluation")
        return trial.try_evaluation(self.model, self.data, self.config.workers)

    @cached_property
    def _batch(self) -> float:
        self._tell("a batch")
        return trial.try_batch(self.model, self.config.batch)

    @cached_property
    def _counting(self) -> float:
        return trial.try_count(self.model, self.config, self.sites[0])

    @cached_property
    def _saving(self) -> float:
        return trial.try_saving(self.model)


def _count(data: Data) -> int:
    """Return how many images there are to measure on."""
    return len(data.val) if data.val is not None else 0


def _kept(training: Training) -> int:
    """Return how many models a training leaves behind: best, last and, where there is one, the average."""
    return 3 if training.has_average else 2


def _checkpoints(training: Training) -> int:
    """Return the bytes of those that are kept, and of one more that is being written."""
    return (KEPT + 1) * training.state


def _spell(training: Training) -> str:
    epochs, updates = counted(training.epochs, "epoch"), counted(training.updates // training.epochs, "update")
    return f"{epochs} of {updates}"
