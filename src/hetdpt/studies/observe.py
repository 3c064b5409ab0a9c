"""The two observations on one model, to files: a run directory that processes of one or several machines fill together.

run.json       what was asked for; all processes ask for the same
accuracy/      that of the model as it was given
gradients/     one file for each removal
layers/        one file for each layer and removal
steps/         checkpoints of what is not done
claims/        who works on what
results.json   all of it, with a summary; also as results.csv and results.png
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter
from torch import nn

from hetdpt.adapters.identity import fingerprint
from hetdpt.adapters.preprocessing import preprocessing_of
from hetdpt.core.errors import DataError, PlanError
from hetdpt.core.modules import clone, find_device
from hetdpt.core.plan import KINDS, REMOVALS, Plan, Site
from hetdpt.data.fixed_batches import ImageBatches
from hetdpt.data.sources import Data, open_data
from hetdpt.flow.collection.work import CLAIMS, STEPS, Claimed, Workplace
from hetdpt.measurement.accuracy import evaluate
from hetdpt.report.observation import draw, spell, write_csv
from hetdpt.store.atomic import keep_json, kept, write_json, written
from hetdpt.store.checkpoints import CHECKPOINTS, Checkpoints
from hetdpt.store.metrics import EPOCH, METRICS, Metrics
from hetdpt.store.queue import Claim, Job, work
from hetdpt.store.run_directory import share
from hetdpt.studies.heterogeneity import Asymmetry, Disparity, Observations, accuracies_without, gradient_disparity
from hetdpt.surgery.record import Removal
from hetdpt.surgery.remove import place_, removable
from hetdpt.training.recover import RecoverConfig

RESULTS, TABLE, FIGURE = "results.json", "results.csv", "results.png"
Part = Literal["accuracy", "gradients", "layers"]


@dataclass(frozen=True)
class DenseAccuracy:
    """The model as it was given."""

    accuracy: float
    """Percent."""


Result = DenseAccuracy | Disparity | Asymmetry
TYPES: dict[Part, Any] = {"accuracy": DenseAccuracy, "gradients": Disparity, "layers": Asymmetry}
"""What is in the files of each folder."""


@dataclass(frozen=True, kw_only=True)
class ObserveConfig:
    """What is observed, and how models are trained meanwhile."""

    recovery: RecoverConfig
    """The fine-tuning after each removal, such as that of the recipe ``brief``."""
    removals: tuple[Removal, ...] = ("plain", "calibrated")
    """What removed layers leave behind: each a name from ``plan.REMOVALS`` or (attention style, activation style)."""
    blocks: tuple[int, ...] | None = None
    """Those whose layers are removed, each alone: None for all, () for gradients only."""
    images: int = 256
    """Training images on which replacements are fitted."""
    gradient_epochs: int = 1
    """Of the training in which gradients are taken down; there it is as ``recovery``, but from the labels alone."""

    def __post_init__(self) -> None:
        if not self.removals or len(set(self.removals)) < len(self.removals):
            raise PlanError(f"removals are {self.removals}; one or more, each once, were expected, such as ('plain',)")
        for removal in self.removals:
            Plan(removal=removal)  # refuses what is none
        if self.images < 2:
            raise DataError(f"a fit is judged on images held out, so 2 images or more are needed, not {self.images}")
        _ = self.training  # refuses a number of epochs that cannot be

    @property
    def training(self) -> RecoverConfig:
        """How weights are trained while gradients are taken down."""
        return self.recovery.with_settings({"training.epochs": self.gradient_epochs})


@dataclass(frozen=True)
class ObserveTask:
    """Something to observe."""

    part: Part
    removal: Removal | None = None
    """None for the accuracy of the dense model."""
    site: Site | None = None
    """The layer that goes, of ``layers``."""

    @property
    def key(self) -> str:
        """``dense``, ``plain`` or ``plain-attention-3``."""
        if self.removal is None:
            return "dense"
        removal = spell(self.removal).replace(",", "-")
        return f"{removal}-{self.site.kind}-{self.site.block}" if self.site else removal


@dataclass(frozen=True)
class Observed:
    """Something that was observed."""

    task: ObserveTask
    result: Result
    """Accuracy in percent, or what belongs to the part."""
    is_own: bool
    """Whether this process did it, now."""


def observe_into(
    directory: str | Path, model: nn.Module, data: str | Data, config: ObserveConfig, place: Workplace | None = None
) -> Iterator[Observed]:
    """Measure both observations of the paper on ``model``, and yield every result once it is on disk.

    Called again it goes on where it was killed, also with other blocks or removals than before. Called by several
    processes, with one ``directory`` that all of them see, each takes what nobody works on; a process yields what the
    others did too, and returns when all is done. The results are of all that is in the directory then.
    """
    directory, place = Path(directory), place or Workplace()
    place.require_alone(config.recovery.training.precision, "a model is observed")
    opened = data if isinstance(data, Data) else open_data(data)
    tasks = _tasks(model, config)
    share(directory, _asked(model, opened, config, place.workers))
    job: Job[ObserveTask, Result] = _ObserveJob(directory, model.to(find_device(place.device)), opened, config, place)
    for found in work(directory / CLAIMS, tasks, job):
        yield Observed(*found)
    for task in tasks:
        _clear(directory, job.name(task))  # what a kill between a result and its end has left
    _write_results(directory)


def _tasks(model: nn.Module, config: ObserveConfig) -> list[ObserveTask]:
    """Return all there is to do; ``PlanError`` if a block is asked for that has nothing to remove."""
    offered: dict[Removal, list[Site]] = {}
    for removal in config.removals:
        offered[removal] = removable(place_(clone(model).eval(), Plan(removal=removal)))
        if not offered[removal]:
            raise PlanError(f"removal {removal!r} can remove no layer of this model; try 'calibrated'")
    blocks = sorted({site.block for sites in offered.values() for site in sites})
    for block in config.blocks or ():
        if block not in blocks:
            raise PlanError(
                f"layers can be removed from the blocks {', '.join(map(str, blocks))} of this model, but "
                f"block {block} was asked for; leave it out"
            )
    chosen = blocks if config.blocks is None else config.blocks
    layers = [(removal, site) for removal, sites in offered.items() for site in sites if site.block in chosen]
    tasks = [ObserveTask("gradients", removal) for removal in config.removals]
    if layers:
        tasks = [ObserveTask("accuracy"), *tasks]
    layers.sort(key=lambda pair: pair[1].block)  # so that what there is before the end is of both removals
    return tasks + [ObserveTask("layers", removal, site) for removal, site in layers]


def _asked(model: nn.Module, data: Data, config: ObserveConfig, workers: int) -> dict[str, Any]:
    """Return all that decides what a result is, as plain JSON; which results there are to be does not."""
    settings = asdict(config)
    del settings["removals"], settings["blocks"]
    return {"model": fingerprint(model), **data.facts(workers), "config": settings}


@dataclass(frozen=True)
class _ObserveJob:
    """What a process does in one directory, and with what."""

    directory: Path
    model: nn.Module
    data: Data
    config: ObserveConfig
    place: Workplace

    def name(self, task: ObserveTask) -> str:
        return f"{task.part}-{task.key}"

    def result(self, task: ObserveTask) -> Result | None:
        found: Result | None = read_measured(self._file(task), TYPES[task.part])
        return found

    def can_begin(self, task: ObserveTask) -> bool:
        return True

    def wait(self, who: str) -> None:
        self.place.wait(who)

    def take(self, task: ObserveTask, claim: Claim) -> None:
        """Do it, and write what came out."""
        found = self._observe(task, claim)
        claim.require_held()
        keep_json(self._file(task), asdict(found))
        _clear(self.directory, self.name(task))

    def _observe(self, task: ObserveTask, claim: Claim) -> Result:
        place, name = self.place, self.name(task)
        if task.removal is None:
            progress = place.stage("evaluating")
            return DenseAccuracy(evaluate(self.model, self.data, workers=place.workers, progress=progress).top1)
        keeper = Claimed(Checkpoints(self._folder(task) / CHECKPOINTS, place.minutes), claim)
        options: Any = {
            "device": place.device,
            "workers": place.workers,
            "keeper": keeper,
            "watch": place.watcher(name),
        }
        data, images = self.data, self._images
        if task.site is None:
            return gradient_disparity(self.model, data, self.config.training, task.removal, images, **options)
        self._folder(task).mkdir(parents=True, exist_ok=True)
        metrics = Metrics(self._folder(task) / METRICS)
        config = self.config.recovery
        for epoch, accuracy in accuracies_without(self.model, task.site, data, config, task.removal, images, **options):
            metrics.write(EPOCH, update=epoch, number=epoch, accuracy=accuracy)
        accuracies = tuple(line["accuracy"] for line in metrics.read(EPOCH))
        return Asymmetry(task.site, task.removal, accuracies)

    @cached_property
    def _images(self) -> ImageBatches:
        if self.data.train is None:
            raise DataError("layers are replaced by what fits training images; open the data with the split train")
        seed, wants = self.config.recovery.training.seed, preprocessing_of(self.model)
        return ImageBatches(self.data.train, wants, count=self.config.images, seed=seed, workers=self.place.workers)

    def _folder(self, task: ObserveTask) -> Path:
        return self.directory / STEPS / self.name(task)

    def _file(self, task: ObserveTask) -> Path:
        return self.directory / task.part / f"{task.key}.json"


def _clear(directory: Path, name: str) -> None:
    """Remove what is of no more use once the task of that name is done."""
    shutil.rmtree(directory / STEPS / name, ignore_errors=True)


def read_measured(file: Path, kind: Any) -> Any:
    """Return what was written of a measurement, as a value of that ``kind``; None where nothing was."""
    return kept(file, "remove it to measure it again", TypeAdapter(kind).validate_python)


def read_results(directory: Path) -> Observations:
    """Return all that was observed in ``directory``, the removals in order, layers by block."""
    found = {
        part: [read_measured(file, kind) for file in (directory / part).glob("[!.]*.json")]
        for part, kind in TYPES.items()
    }
    dense, disparities, asymmetries = found.values()
    disparities.sort(key=lambda row: _rank(row.removal))
    asymmetries.sort(key=lambda row: (_rank(row.removal), row.site.block, KINDS.index(row.site.kind)))
    return Observations(dense[0].accuracy if dense else None, tuple(disparities), tuple(asymmetries))


def _rank(removal: Removal) -> tuple[int, str]:
    names = list(REMOVALS)
    return names.index(removal) if isinstance(removal, str) else len(names), spell(removal)


def _write_results(directory: Path) -> None:
    """Write all that was observed, again if there is more by then: others write it too."""
    found = None
    while (now := read_results(directory)) != found:
        found = now
        write_json(directory / RESULTS, found.to_dict())
        with written(directory / TABLE) as scratch:
            write_csv(found, scratch)
        with written(directory / FIGURE) as scratch:
            draw(found, scratch)
