"""The steps of a run, tried and timed: a few updates of each training, a choice on a few images, a batch.

They are tried by the very functions that a run calls, on the dense model. Those of a run are on models with fewer
layers, so times and sizes are estimated too high rather than too low. Nothing is written but to a temporary folder.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import closing
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property, partial
from math import ceil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import Tensor, nn

from hetdpt.adapters.preprocessing import preprocessing_of
from hetdpt.core.errors import DataError
from hetdpt.core.format import counted, duration
from hetdpt.core.goals import GOALS
from hetdpt.core.plan import KINDS, Budget, Kind, Plan
from hetdpt.core.progress import StageProgress
from hetdpt.data.batches import EvaluationBatches
from hetdpt.data.fixed_batches import ImageBatches, LabelledBatches
from hetdpt.data.sources import Data
from hetdpt.export.saved import load, save
from hetdpt.flow.config import RunConfig
from hetdpt.flow.execution import fitting_images
from hetdpt.flow.mix import TIMING_SECONDS
from hetdpt.flow.stages.budget import held_out, require_possible
from hetdpt.flow.stages.width import depths_of
from hetdpt.measurement.accuracy import BATCH
from hetdpt.measurement.costs import Costs
from hetdpt.measurement.speed import measure_throughput, synchronize
from hetdpt.reduce.width.narrow import narrow_to
from hetdpt.reduce.width.search import SECONDS
from hetdpt.results import Price
from hetdpt.selection.entropy import require_offered
from hetdpt.selection.frontier import MEASURED, SHARE, FrontierSearch
from hetdpt.selection.importance import ImportanceSearch
from hetdpt.selection.methods import Method, method_called
from hetdpt.selection.moves import offered
from hetdpt.selection.predictor.samples import prune_next
from hetdpt.selection.select import kinds_of
from hetdpt.store.checkpoints import KEPT
from hetdpt.surgery.calibrate import gate_fitted_
from hetdpt.surgery.merge import merge_
from hetdpt.surgery.record import require_record
from hetdpt.surgery.remove import ready, removable, without
from hetdpt.surgery.tail import trim_to_class_token_
from hetdpt.training.decide import SPARE, fitting, probe_updates
from hetdpt.training.rate import MOST
from hetdpt.training.recover import RecoverConfig, attempt, training_data
from hetdpt.training.trainer import Companion
from hetdpt.training.trial import PATIENCE, bytes_in, evaluation_seconds

SOME_RATE = 1e-5  # for a trial of a training whose rate is found
FEW, MORE, MANY = 4, 16, 64  # images
RATIO = 0.3  # of the width, in a trial
SMALL = 1 << 28  # bytes of a model that is saved for a trial; what a larger one takes is little beside its training
WARMUP, RUNS = 10, 100  # batches of measure_throughput
PART = 3  # if the goal is not a number of layers, one in this many is assumed to be removed
TIMED_LAYERS, TURNS = 250, 100  # batches in which measure_move_prices times layers, and the model at the end
RATIOS, TIMED, SEARCH = 10, 20, 50  # ratios tried for a goal, for one that is a speedup; batches that time each


@dataclass(frozen=True)
class TrainingTrial:
    """What a training consists of, after a few updates of it."""

    epochs: int
    updates: int
    """In all."""
    seconds: float
    """Of each update, with reading its images."""
    images: int
    """Of an epoch."""
    state: int
    """Bytes of a checkpoint."""
    asks: int
    """How often the teacher is evaluated on every image before the training begins: once for each fixed view, or 0."""
    has_average: bool
    """Whether there is a moving average of the weights."""
    evaluations: int
    """Of all validation images."""
    minutes: float | None = None
    """That it takes in all, if that is what was asked for."""
    probe: int = 0
    """Updates at most before it, to find the learning rate."""

    @property
    def models(self) -> int:
        """How many models it leaves behind: best, last and, if there is one, the average."""
        return 3 if self.has_average else 2

    @property
    def checkpoints(self) -> int:
        """Bytes of the checkpoints that are kept, and of one more that is being written."""
        return (KEPT + 1) * self.state

    def __str__(self) -> str:
        length = f"{counted(self.epochs, 'epoch')} of {counted(self.updates // self.epochs, 'update')}"
        if self.minutes is not None:
            length = f"{duration(60 * self.minutes)}, about {length}"
        return f"{length} after up to {self.probe} to find the learning rate" if self.probe else length


def _rough_cost(plan: Plan) -> float:
    """Return a cost of ``plan`` by which every move saves something, for a trial of a search."""
    changed = len(plan) + plan.tail + len(plan.narrower) + (plan.tokens.r if plan.tokens else 0)
    return float(MANY - changed)


class Trials:
    """What estimates are made of: how many layers will be removed, and single steps, each tried when first needed."""

    def __init__(self, config: RunConfig, model: nn.Module, data: Data, progress: StageProgress | None = None) -> None:
        self.config, self.model, self.data, self.progress = config, model, data, progress
        base = ready(model, config.removal)
        self.blocks, self.sites = require_record(base).survey.anatomy.blocks, removable(base)
        kinds = [site.kind for site in self.sites]
        self.offered = Budget(kinds.count("attention"), kinds.count("activation"))
        self.is_guess = config.layers is None and config.budget is None and not config.is_mixed
        asked = config.layers if config.budget is None else sum(config.budget)
        guess = max(self.depths) if config.is_balanced else max(len(kinds) // PART, 1)
        self.layers = guess if asked is None else asked
        self.weights = sum(tensor.nbytes for tensor in model.state_dict().values())
        """Bytes of a model."""

    def require_possible(self) -> None:
        """Raise where the run would end in an error, as far as that can be known beforehand."""
        size = require_record(ready(self.model, self.config.removal)).survey.input_size
        require_possible(self.model, self.config, Costs.of(self.model, size))
        for count in (self.layers, *self.depths) if self.config.chooser.takes_budget else ():
            require_offered(self.sites, self._kinds(self.config.chooser, count))

    @property
    def depths(self) -> tuple[int, ...]:
        """The numbers of layers that are tried with width for the rest of the goal."""
        return depths_of(self.config, len(self.sites)) if self.config.is_balanced else ()

    @cached_property
    def held(self) -> Data:
        """The data with training images held out to measure samples on."""
        return held_out(self.data)[0]

    @property
    def images(self) -> int:
        """Images to measure the final model on."""
        return len(self.data.val) if self.data.val is not None else 0

    @cached_property
    def epoch_images(self) -> tuple[int, str]:
        """Images to measure the epochs of the fine-tuning on, and which those are."""
        data, words = training_data(self.data, self.config.recovery)
        return len(data.val or ()), words

    @property
    def held_images(self) -> int:
        """Images to measure samples on."""
        return len(self.held.val) if self.held.val is not None else 0

    def most(self, method: Method) -> int:
        """Return how many layers a method can remove."""
        return len([site for site in self.sites if method.only in (None, site.kind)])

    # Seconds, from the steps below

    def selection(self, method: Method, layers: int) -> tuple[float, TrainingTrial | None]:
        """Return how long a method takes to choose ``layers`` layers, and the training that is a part of it."""
        kinds = self._kinds(method, layers)
        if method.score == "random":
            return 0.0, None
        if method.score != "importance":
            return sum(self.choice(kind) for kind in kinds), None
        scans = (self.config.candidates == "te") + self.config.explores  # each as long as a choice among all
        return scans * self.choice(None) + len(kinds) * self.fit + self.updating(self.search), self.search

    @property
    def search_rounds(self) -> int:
        """The rounds in which a search over everything that can be removed meets the goal, if each saves its share."""
        wanted = self.config.with_numbers(self.dense_price).target
        left = 1 / wanted["speedup"] if "speedup" in wanted else wanted["macs"] / self.dense_price.macs
        return max(ceil((1 - left) / SHARE), 1)

    def searching(self, rounds: int) -> float:
        """Return the seconds of so many rounds, of layers timed, and of the model that they make, made and timed."""
        others = min(MEASURED / max(self.search_moves, 1), 1)
        made = self._calibration(len(self.sites) // PART) + self.timing(2, TURNS, TIMING_SECONDS)
        timing = TIMED_LAYERS * self.batch + len(self.sites) * self.counting
        return timing + self.first_round * (1 + (rounds - 1) * others) + made

    def choice(self, kind: Kind | None) -> float:
        """Return the seconds in which a layer is chosen among all of ``kind``."""
        return self.choices[kind] if kind else sum(self.choices.values())

    def updating(self, training: TrainingTrial) -> float:
        """Return the seconds of all updates, and of evaluating the teacher beforehand."""
        asked = training.images * training.asks
        return (training.updates + training.probe) * training.seconds + asked * self.evaluation

    def timing(self, models: int, rounds: int, seconds: float) -> float:
        """Return how long ``models`` models are timed in turns, ``rounds`` times or for ``seconds``."""
        turn = models * self.batch
        return WARMUP * turn + min(rounds * turn, seconds)

    def narrowing(self, layers: int) -> float:
        """Return the seconds in which a model without ``layers`` layers is made and narrowed."""
        search = RATIOS * self.counting
        if any(GOALS[name].is_timed for name in self.config.goals):
            search = TIMED * (self.counting + self.timing(2, SEARCH, SECONDS))
        return self._calibration(layers) + self.width + search

    def recovering(self) -> float:
        """Return the seconds of calibration, fine-tuning and evaluation; a narrowed model is calibrated already."""
        training = self.recovery
        calibration = 0.0 if self.config.plus else self._calibration(self.layers)
        seconds = self.updating(training) + self.epoch_images[0] * training.evaluations * self.evaluation
        if training.minutes is not None:
            seconds = 60 * training.minutes
        return calibration + seconds + 3 * self.saving

    def _calibration(self, layers: int) -> float:
        """Return the seconds in which the replacements of ``layers`` layers are fitted, one after another."""
        passes = layers * self.config.images if Plan(removal=self.config.removal).is_any_fitted else 0
        return passes * self.evaluation

    def _kinds(self, method: Method, layers: int) -> tuple[Kind | None, ...]:
        if not layers:
            return ()
        if method.split != "map":
            return kinds_of(method, layers)
        if self.config.budget is not None:
            return kinds_of(method, Budget(*self.config.budget))
        attention = min(max(layers // 2, layers - self.offered.activation), self.offered.attention)
        return kinds_of(method, Budget(attention, layers - attention))

    # Steps

    @cached_property
    def collection(self) -> TrainingTrial:
        self._tell("the fine-tuning of a sample")
        return self.training(self.config.collection, self.held)

    @cached_property
    def recovery(self) -> TrainingTrial:
        self._tell("the fine-tuning")
        return self.training(self.config.recovery, self.data)

    @cached_property
    def search(self) -> TrainingTrial:
        self._tell("the search")
        methods = (self.config.chooser, *map(method_called, self.config.compare))
        kinds = next(self._kinds(method, self.layers) for method in methods if method.score == "importance")
        student = deepcopy(self.model)
        settings = self.config.search.with_settings({"training.ema_decay": 0.0, "train_merged": False})
        gate_fitted_(student, Plan(removal=self.config.removal), self._images(FEW), sites=self.sites)
        search = ImportanceSearch(student, kinds, explores=self.config.explores, seed=settings.training.seed)
        return self.training(settings, self.data, student, search)

    @cached_property
    def choices(self) -> dict[Kind, float]:
        """The seconds in which one more layer of each kind is chosen, and replaced."""
        found = dict.fromkeys(KINDS, 0.0)
        for kind in {site.kind: None for site in self.sites}:
            self._tell(f"the choice of an {kind} layer")
            found[kind] = self.on_all_images(partial(prune_next, self.model, kind, removal=self.config.removal))
        return found

    @cached_property
    def dense_price(self) -> Price:
        """The MACs and parameters of the dense model."""
        costs = Costs.of(self.model, require_record(ready(self.model, self.config.removal)).survey.input_size)
        return Price(costs.macs, costs.params)

    @property
    def search_moves(self) -> int:
        """How many moves the first round of a search measures."""
        dense = trim_to_class_token_(ready(self.model, self.config.removal))
        return len(offered(dense, dense, self.config.moves))

    @cached_property
    def first_round(self) -> float:
        """The seconds of the first round of a search over everything that can be removed, which measures all moves."""
        self._tell("a round of the search")

        def search(images: ImageBatches) -> None:
            kinds, removal = self.config.moves, self.config.removal
            next(FrontierSearch(self.model, images, images, _rough_cost, removal=removal, kinds=kinds).rounds(), None)

        return self.on_all_images(search)

    @cached_property
    def fit(self) -> float:
        """The seconds in which the replacements of all layers are fitted, each as if it were the only one."""
        plan = Plan(removal=self.config.removal)
        if not plan.is_any_fitted:
            return 0.0
        self._tell("a calibration")

        def fit(images: Iterable[Tensor]) -> None:
            gate_fitted_(deepcopy(self.model), plan, images, sites=self.sites)

        return self.on_all_images(fit)

    @cached_property
    def width(self) -> float:
        """The seconds in which a part of the width is removed, without the search for how much."""
        self._tell("the removal of width")

        def narrow(images: ImageBatches) -> None:
            wants, count = preprocessing_of(self.model), images.count
            batches = LabelledBatches(self.data.train, wants, count=count, workers=self.config.workers)
            narrow_to(self.model, ratio=RATIO, config=self.config.width, batches=batches)

        return self.on_all_images(narrow)

    @cached_property
    def evaluation(self) -> float:
        """The seconds in which one image is read and evaluated."""
        self._tell("an evaluation")
        if self.data.val is None:
            raise DataError("accuracy is measured on the split val; open the data with it")
        wants, workers = preprocessing_of(self.model), self.config.workers
        batches = EvaluationBatches(self.data.val, wants, batch_size=BATCH, workers=workers)
        return evaluation_seconds(self.model, batches)

    @cached_property
    def batch(self) -> float:
        """The seconds of a batch when speed is measured."""
        self._tell("a batch")
        found = measure_throughput({"dense": self.model}, batch=self.config.batch, runs=20, warmup=1, seconds=1.0)
        rate = found.throughput["dense"]
        return rate.batch / rate.value

    @cached_property
    def counting(self) -> float:
        """The seconds in which the costs without one layer are counted."""
        base = ready(self.model, self.config.removal)
        size, site = require_record(base).survey.input_size, self.sites[0]
        return min(self._seconds(lambda: Costs.of(merge_(without(base, site)), size)) for _ in range(2))

    @cached_property
    def saving(self) -> float:
        """The seconds in which a model is saved and loaded; 0 for one that is too large to try."""
        if self.weights > SMALL:
            return 0.0
        copy = deepcopy(self.model).cpu()
        with TemporaryDirectory() as folder:
            return self._seconds(lambda: load(save(copy, Path(folder) / "model")))

    def training(
        self,
        settings: RecoverConfig,
        data: Data,
        student: nn.Module | None = None,
        companion: Companion | None = None,
    ) -> TrainingTrial:
        """Return what a training consists of, after a few updates of ``student`` or a copy of the dense model.

        The dense model is the teacher.
        """
        training, has_average = settings.training, bool(settings.training.ema_decay)
        fixed = {"cache_teacher": False, "training.lr": training.lr or SOME_RATE, "training.minutes": None}
        teacher = None if settings.cache_teacher else self.model  # its answers are then at hand
        place: dict[str, Any] = {"device": self.config.device, "workers": self.config.workers, "companion": companion}
        part, _ = training_data(data, settings)
        tried = attempt(student or deepcopy(self.model), teacher, part, settings.with_settings(fixed), **place)
        with closing(tried):
            seconds, state = tried.seconds(), bytes_in(tried.trainer.state())
        epochs, steps = training.epochs, tried.trainer.steps
        probe = MOST * probe_updates(training, steps, seconds) if training.lr is None else 0
        if training.minutes is not None:
            evaluation = (1 + has_average) * len(part.val or ()) * self.evaluation
            left = SPARE * 60 * training.minutes - probe * seconds
            epochs, steps = fitting(left, steps=steps, update=seconds, evaluation=evaluation)
        return TrainingTrial(
            epochs=epochs,
            updates=epochs * steps,
            seconds=seconds,
            images=steps * training.images_per_update(),
            state=state,
            asks=settings.augmentation.views if settings.cache_teacher else 0,
            has_average=has_average,
            evaluations=(1 + epochs) * (1 + has_average),
            minutes=training.minutes,
            probe=probe,
        )

    def on_all_images(self, call: Callable[[ImageBatches], object]) -> float:
        """Return the seconds of ``call`` on all images that a run gives it, from those on a few and on some more."""
        few = self._images(FEW)
        first = self._seconds(partial(call, few))
        some = self._images(MANY if first < PATIENCE else MORE)
        whole = self._batches(self.config.images).count
        if some.count == few.count:
            return first
        second = self._seconds(partial(call, some))
        each = max(second - first, 0.0) / (some.count - few.count)
        return second + each * (whole - some.count)

    def _images(self, count: int) -> ImageBatches:
        """Return ``count`` training images, or as many as a run uses, already read."""
        images = self._batches(min(count, self.config.images))
        for _ in images:
            pass
        return images

    def _batches(self, count: int) -> ImageBatches:
        return fitting_images(self.model, self.data, count, workers=self.config.workers)

    def _seconds(self, call: Callable[[], object]) -> float:
        begun = time.perf_counter()
        call()
        synchronize(next(self.model.parameters()).device)
        return time.perf_counter() - begun

    def _tell(self, step: str) -> None:
        if self.progress:
            self.progress(f"trying {step}", 0, 0)
