"""The two observations of the paper on one model, in a run directory that several processes may fill together.

run.json       the settings, the same for all processes
accuracy/      the accuracy of the dense model
gradients/     one file for each removal
layers/        one file for each layer and removal
steps/         checkpoints of unfinished tasks
claims/        which process works on which task
results.json   all results, with a summary; also as results.csv and results.png
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

from torch import nn

from hetdpt.adapters.identity import fingerprint
from hetdpt.core.errors import DataError, PlanError
from hetdpt.core.format import removal_text
from hetdpt.core.modules import clone, find_device
from hetdpt.core.plan import KINDS, Plan, Removal, Site
from hetdpt.core.styles import PRESETS
from hetdpt.data.fixed_batches import ImageBatches
from hetdpt.data.sources import Data, open_data
from hetdpt.flow.collection.work import STEPS
from hetdpt.flow.execution import Execution, accuracies
from hetdpt.measurement.accuracy import evaluate
from hetdpt.report.observation import COLUMNS, csv_rows, draw
from hetdpt.results import Asymmetry, Disparity, Observations
from hetdpt.store.atomic import write_csv, write_json, written
from hetdpt.store.jobs import Finished, Guard, Task, read_result
from hetdpt.store.run_directory import share
from hetdpt.studies.heterogeneity import accuracies_without, gradient_disparity
from hetdpt.surgery.remove import place_, removable
from hetdpt.training.recover import RecoverConfig

RESULTS, TABLE, FIGURE = "results.json", "results.csv", "results.png"
Part = Literal["accuracy", "gradients", "layers"]


@dataclass(frozen=True)
class DenseAccuracy:
    """The accuracy of the dense model."""

    accuracy: float
    """Percent."""


TYPES: dict[Part, Any] = {"accuracy": DenseAccuracy, "gradients": Disparity, "layers": Asymmetry}
"""The type of the results in each folder."""


@dataclass(frozen=True, kw_only=True)
class ObserveConfig:
    """What is observed, and how models are trained for it."""

    recovery: RecoverConfig
    """The fine-tuning after each removal, such as that of the recipe ``brief``."""
    removals: tuple[Removal, ...] = ("plain", "calibrated")
    """What removed layers leave behind: each a name from ``styles.PRESETS`` or (attention style, activation style)."""
    blocks: tuple[int, ...] | None = None
    """Blocks whose layers are removed, one layer at a time, such as 0,3,6; all by default. () for gradients only."""
    images: int = 256
    """Training images to fit replacements on."""
    gradient_epochs: int = 1
    """Epochs of the training in which gradients are recorded, which learns from the labels alone."""

    def __post_init__(self) -> None:
        if not self.removals or len(set(self.removals)) < len(self.removals):
            raise PlanError(f"removals are {self.removals}; one or more, each once, were expected, such as ('plain',)")
        for removal in self.removals:
            Plan(removal=removal)  # raises if there is no such removal
        if self.images < 2:
            raise DataError(f"a fit is judged on images held out, so 2 images or more are needed, not {self.images}")
        _ = self.training  # raises if the number of epochs is impossible

    @property
    def training(self) -> RecoverConfig:
        """How weights are trained while gradients are recorded."""
        return self.recovery.with_settings({"training.epochs": self.gradient_epochs})


@dataclass(frozen=True)
class Observable:
    """Something to observe."""

    part: Part
    removal: Removal | None = None
    """None for the accuracy of the dense model."""
    site: Site | None = None
    """The layer removed, for ``layers``."""

    @property
    def key(self) -> str:
        """``dense``, ``plain`` or ``plain-attention-3``."""
        if self.removal is None:
            return "dense"
        removal = removal_text(self.removal).replace(",", "-")
        return f"{removal}-{self.site.kind}-{self.site.block}" if self.site else removal

    @property
    def name(self) -> str:
        """Its name among claims and checkpoints."""
        return f"{self.part}-{self.key}"

    def __str__(self) -> str:
        if self.removal is None:
            return "dense model"
        if self.site is None:
            return f"gradients, {removal_text(self.removal)} removal"
        return f"{self.site.kind} of block {self.site.block} removed ({removal_text(self.removal)})"


Observed = Finished[Observable, DenseAccuracy | Disparity | Asymmetry]


def observe_into(
    directory: str | Path,
    model: nn.Module,
    data: str | Data,
    config: ObserveConfig,
    execution: Execution | None = None,
) -> Iterator[Observed]:
    """Measure both observations of the paper on ``model``, and yield every result once it is on disk.

    Called again, it resumes where it was killed, also with other blocks or removals than before. Several processes may
    share one ``directory`` that all of them see: each takes the next task that no other works on, yields the results of
    all, and returns when all tasks are finished. ``results.json`` then has all results in the directory.
    """
    directory, execution = Path(directory), execution or Execution()
    execution.require_alone(config.recovery.training.precision, "a model is observed")
    opened = data if isinstance(data, Data) else open_data(data)
    wanted = _observables(model, config)
    share(directory, _asked(model, opened, config, execution.workers))
    job = _ObserveJob(directory, model.to(find_device(execution.device)), opened, config, execution)
    tasks = [job.task(one, f"{number} of {len(wanted)}: {one}") for number, one in enumerate(wanted, 1)]
    for done in execution.run(directory, tasks):
        shutil.rmtree(job.folder(done.subject), ignore_errors=True)  # checkpoints of no more use
        yield done
    _write_results(directory)


def _observables(model: nn.Module, config: ObserveConfig) -> list[Observable]:
    """Return everything to observe; ``PlanError`` if nothing can be removed from a block in the config."""
    offered: dict[Removal, list[Site]] = {}
    for removal in config.removals:
        offered[removal] = removable(place_(clone(model).eval(), Plan(removal=removal)))
        if not offered[removal]:
            raise PlanError(f"removal {removal!r} can remove no layer of this model; try 'calibrated'")
    blocks = sorted({site.block for sites in offered.values() for site in sites})
    for block in config.blocks or ():
        if block not in blocks:
            raise PlanError(
                f"layers can be removed from the blocks {', '.join(map(str, blocks))} of this model, but got "
                f"block {block}; leave it out"
            )
    chosen = blocks if config.blocks is None else config.blocks
    layers = [(removal, site) for removal, sites in offered.items() for site in sites if site.block in chosen]
    layers.sort(key=lambda pair: pair[1].block)  # so that the results before the end are of both removals
    dense = [Observable("accuracy")] if layers else []
    gradients = [Observable("gradients", removal) for removal in config.removals]
    return [*dense, *gradients, *(Observable("layers", removal, site) for removal, site in layers)]


def _asked(model: nn.Module, data: Data, config: ObserveConfig, workers: int) -> dict[str, Any]:
    """Return all that decides a result, as plain JSON; which results there are does not."""
    settings = asdict(config)
    del settings["removals"], settings["blocks"]
    return {"model": fingerprint(model), **data.facts(workers), "config": settings}


@dataclass(frozen=True)
class _ObserveJob:
    directory: Path
    model: nn.Module
    data: Data
    config: ObserveConfig
    execution: Execution

    def task(self, one: Observable, title: str) -> Task[Observable, Any]:
        file = self.directory / one.part / f"{one.key}.json"
        make = {"accuracy": self._evaluate, "gradients": self._gradients, "layers": self._without}[one.part]
        return Task.to_file(one.name, one, file, TYPES[one.part], partial(make, one, title))

    def folder(self, one: Observable) -> Path:
        return self.directory / STEPS / one.name

    def _evaluate(self, one: Observable, title: str, guard: Guard) -> DenseAccuracy:
        progress = self.execution.stage(f"{title}, evaluating")
        return DenseAccuracy(evaluate(self.model, self.data, workers=self.execution.workers, progress=progress).top1)

    def _gradients(self, one: Observable, title: str, guard: Guard) -> Disparity:
        assert one.removal is not None
        options, config = self._options(one, f"{title}, training", guard), self.config.training
        return gradient_disparity(self.model, self.data, config, one.removal, self._images, **options)

    def _without(self, one: Observable, title: str, guard: Guard) -> Asymmetry:
        assert one.removal is not None
        assert one.site is not None
        options, config = self._options(one, f"{title}, fine-tuning", guard), self.config.recovery
        epochs = accuracies_without(self.model, one.site, self.data, config, one.removal, self._images, **options)
        return Asymmetry(one.site, one.removal, accuracies(self.folder(one), epochs))

    def _options(self, one: Observable, title: str, guard: Guard) -> Any:
        execution = self.execution
        return {
            "device": execution.device,
            "workers": execution.workers,
            "keeper": execution.checkpoints(self.folder(one), guard),
            "watch": execution.watcher(title),
        }

    @cached_property
    def _images(self) -> ImageBatches:
        return self.execution.images(self.model, self.data, self.config.images, self.config.recovery.training.seed)


def read_results(directory: Path) -> Observations:
    """Return all that was observed in ``directory``, the removals in order, layers by block."""
    found = {
        part: [read_result(file, kind) for file in (directory / part).glob("[!.]*.json")]
        for part, kind in TYPES.items()
    }
    dense, disparities, asymmetries = found.values()
    disparities.sort(key=lambda row: _rank(row.removal))
    asymmetries.sort(key=lambda row: (_rank(row.removal), row.site.block, KINDS.index(row.site.kind)))
    return Observations(dense[0].accuracy if dense else None, tuple(disparities), tuple(asymmetries))


def _rank(removal: Removal) -> tuple[int, str]:
    names = list(PRESETS)
    return names.index(removal) if isinstance(removal, str) else len(names), removal_text(removal)


def _write_results(directory: Path) -> None:
    """Write all results, again if there are more by then: other processes write them too."""
    found = None
    while (now := read_results(directory)) != found:
        found = now
        write_json(directory / RESULTS, found.to_dict())
        write_csv(directory / TABLE, COLUMNS, csv_rows(found))
        with written(directory / FIGURE) as scratch:
            draw(found, scratch)
