"""One process at work on the steps of a collection: it claims one, takes it, and writes what it came to."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hetdpt.adapters.preprocessing import preprocessing_of
from hetdpt.core.errors import FileError, PredictError, TrainError
from hetdpt.core.plan import Site
from hetdpt.data.fixed_batches import ImageBatches
from hetdpt.data.sources import Data
from hetdpt.export.saved import RECIPE, load, save
from hetdpt.flow.collection.tree import DENSE, LETTERS, SampleNode, chain_of
from hetdpt.measurement.accuracy import evaluate
from hetdpt.measurement.prices import PRICES_FILE
from hetdpt.measurement.speed import measure_throughput
from hetdpt.results import Prices
from hetdpt.selection.predictor.pricing import measure_prices
from hetdpt.selection.predictor.rows import SAMPLES_FILE, write_rows
from hetdpt.selection.predictor.samples import CHAINS, CollectConfig, EntropyPick, SampleStep, fine_tune, prune_next
from hetdpt.store.atomic import keep_json, kept, sealed, written
from hetdpt.store.checkpoints import CHECKPOINTS, Checkpoints
from hetdpt.store.metrics import EPOCH, METRICS, Metrics
from hetdpt.store.queue import Claim, work
from hetdpt.surgery.merge import merge_
from hetdpt.training.processes import start
from hetdpt.training.trainer import Progress

SAMPLES, RECHECK, STEPS, CLAIMS = "samples", "recheck", "steps", "claims"
START, LAST, PICKS = "start", "last", "picks.json"
TIMING_SECONDS = 10.0
StageProgress = Callable[[str, int, int], None]
"""Called with what is being done and (steps done, in all)."""


@dataclass(frozen=True)
class SampleDone:
    """A step that is done."""

    node: SampleNode
    step: SampleStep
    is_own: bool
    """Whether this process took it, now."""


@dataclass(frozen=True, kw_only=True)
class Workplace:
    """How this process works. Only two of these change the results: ``batch`` where speed is measured, and ``workers``
    where a stream of shards is trained on."""

    device: str | None = None
    workers: int = 0
    minutes: float = 10.0
    """Between two checkpoints."""
    batch: int | None = None
    """Images at once when layers are timed."""
    progress: StageProgress | None = None

    def stage(self, name: str) -> Callable[[int, int], None] | None:
        return partial(self.progress, name) if self.progress else None

    def watcher(self, name: str) -> Callable[[Progress], None]:
        """Return what is to be told of every update of a training."""
        return partial(_tell, self.stage(name))

    def wait(self, who: str) -> None:
        """Show that ``who`` is waited for."""
        if self.progress:
            self.progress(f"waiting for {who}", 0, 0)

    def require_alone(self, precision: str, work: str) -> None:
        """Raise ``TrainError`` where this process is one of a group that torchrun started; ``work`` is what is done."""
        if start(precision, self.device).num_processes > 1:
            raise TrainError(
                f"{work} by processes that do not know each other; start the same command several times, each with its "
                "own --device, instead of torchrun or accelerate"
            )


@dataclass(frozen=True)
class CollectionJob:
    """What there is to do in one directory, and with what."""

    directory: Path
    results: str
    """The folder for what steps came to."""
    model: nn.Module
    data: Data
    config: CollectConfig
    place: Workplace
    tree: dict[str, SampleNode]
    prices: Prices | None = None
    """Of the layers, where they are known already."""

    def work(self, wanted: Iterable[SampleNode]) -> Iterator[SampleDone]:
        """Take the steps of ``wanted`` that nobody works on, one after another, until all are done."""
        for found in work(self.directory / CLAIMS, wanted, self):
            yield SampleDone(*found)
        self._tidy()  # also what a kill after the last step has left

    def result(self, node: SampleNode) -> SampleStep | None:
        """Return what ``node`` came to if it is done."""
        file = self._file(node)
        is_done = file.is_file() and (node.parent is not None or (self.directory / PRICES_FILE).is_file())
        return _read_step(file) if is_done else None

    def can_begin(self, node: SampleNode) -> bool:
        if node.parent is None:
            return True
        return self._has_dense if node.parent == DENSE else self.result(self.tree[node.parent]) is not None

    def wait(self, who: str) -> None:
        self.place.wait(who)

    def take(self, node: SampleNode, claim: Claim) -> None:
        """Do what ``node`` is about, and write what it came to."""
        begun = time.monotonic()
        self._clear(node)
        if node.parent is None:
            accuracy = self._begin()
            step = SampleStep(node.kinds, (), accuracy, accuracy, time.monotonic() - begun)
        else:
            picks = self._prune(node)
            student, accuracies = self._fine_tune(node, claim)
            speedup = self._keep(node, student)
            step = SampleStep(node.kinds, picks, accuracies[0], accuracies[-1], time.monotonic() - begun, speedup)
        claim.require_held()
        keep_json(self._file(node), step.to_dict())
        self._tidy()

    def _clear(self, node: SampleNode) -> None:
        """Remove what a kill has left half written."""
        where, pattern = (self._folder(node), ".*") if node.parent else (self.directory, f".{DENSE}.*")
        for scratch in where.glob(pattern):
            shutil.rmtree(scratch, ignore_errors=True)

    def _begin(self) -> float:
        """Save the prices of the layers and the dense model, which others wait for, and return its accuracy."""
        place = self.place
        prices = self.prices or measure_prices(
            self.model, removal=self.config.removal, batch=place.batch, progress=place.progress
        )
        with written(self.directory / PRICES_FILE) as scratch:
            scratch.write_text(prices.to_json() + "\n", encoding="utf-8")
        if not self._has_dense:
            save(deepcopy(self.model).cpu(), self.directory / DENSE)
        return evaluate(self.model, self.data, workers=place.workers, progress=place.stage("evaluating")).top1

    def _prune(self, node: SampleNode) -> tuple[EntropyPick, ...]:
        """Save the model that ``node`` begins with, unless it is there, and return the layers it has lost."""
        start = self._folder(node) / START
        if not (start / PICKS).is_file():
            student, picks = self._model_after(node.parent), list[EntropyPick]()
            for number, kind in enumerate(node.new, 1):
                progress = self.place.stage(f"{node.key}: choosing {kind} {number}/{len(node.new)}")
                student, pick = prune_next(student, kind, self._images, self.config.removal, progress)
                picks.append(pick)
            save(
                deepcopy(student).cpu(),
                start,
                overwrite=True,
                notes={PICKS: json.dumps(sealed({"picks": [asdict(pick) for pick in picks]}))},
            )
        found = kept(start / PICKS, f"remove {start} to have it made again", _picks)
        assert found is not None
        return found

    def _fine_tune(self, node: SampleNode, claim: Claim) -> tuple[nn.Module, list[float]]:
        """Train the model that ``node`` begins with, and return it with its accuracies."""
        folder, place = self._folder(node), self.place
        student = load(folder / START).to(self._device)
        metrics = Metrics(folder / METRICS)
        keeper = Claimed(Checkpoints(folder / CHECKPOINTS, place.minutes), claim)
        epochs = fine_tune(
            student,
            self.model,
            self.data,
            self.config.recovery if self.config.fine_tunes else None,
            device=place.device,
            workers=place.workers,
            keeper=keeper,
            watch=place.watcher(f"{node.key}: fine-tuning"),
        )
        for number, accuracy in epochs:
            metrics.write(EPOCH, update=number, number=number, accuracy=accuracy)
        return student, [line["accuracy"] for line in metrics.read(EPOCH)]

    def _keep(self, node: SampleNode, student: nn.Module) -> float | None:
        """Save what a step came to, for those after it; of a split that is measured again, return the speedup."""
        if self.results == SAMPLES:
            save(student.cpu(), self._folder(node) / LAST, overwrite=True)
            return None
        models = {"dense": self.model, "pruned": merge_(student)}
        timing, batch = self.place.stage(f"{node.key}: timing"), self.place.batch
        return measure_throughput(models, batch=batch, seconds=TIMING_SECONDS, progress=timing).speedup["pruned"].value

    def _tidy(self) -> None:
        """Remove what no step needs any more, and write the table.

        The models at the ends of the chains stay, for more rounds, and that of ``a``, where the interleaved chain
        leaves the attention chain.
        """
        done = {node.key for node in self.tree.values() if self._file(node).is_file()}
        for node in (node for node in self.tree.values() if node.key in done):
            after = {other.key for other in self.tree.values() if other.parent == node.key}
            is_open = self.results == SAMPLES and (not after or node.key == LETTERS["attention"])
            for part in [START, CHECKPOINTS] if is_open or after - done else [""]:
                shutil.rmtree(self._folder(node) / part, ignore_errors=True)
        if self.results == SAMPLES:
            _write_table(self.directory)

    @property
    def _has_dense(self) -> bool:
        return (self.directory / DENSE / RECIPE).is_file()

    @property
    def _device(self) -> torch.device:
        return next(self.model.parameters()).device

    @cached_property
    def _images(self) -> ImageBatches:
        if self.data.train is None:
            raise PredictError("layers are chosen on training images; open the data with the split train")
        seed, wants = self.config.recovery.training.seed, preprocessing_of(self.model)
        return ImageBatches(self.data.train, wants, count=self.config.images, seed=seed, workers=self.place.workers)

    def _model_after(self, key: str | None) -> nn.Module:
        """Return the model that the step ``key`` came to."""
        if key in (None, DENSE):
            return self.model
        model, node = self._folder(self.tree[key]) / LAST, self.tree[key]
        if not model.is_dir():
            raise FileError(f"the model of the step {key} is gone; remove {self._file(node)} to take that step again")
        return load(model).to(self._device)

    def name(self, node: SampleNode) -> str:
        return f"{self.results}-{node.key}"

    def _folder(self, node: SampleNode) -> Path:
        return self.directory / STEPS / self.name(node)

    def _file(self, node: SampleNode) -> Path:
        return self.directory / self.results / f"{node.key}.json"


@dataclass(frozen=True)
class Claimed:
    """Keeps the states of a step that this process has claimed; it stops where another one has taken over."""

    checkpoints: Checkpoints
    claim: Claim

    def latest(self) -> dict[str, Any] | None:
        return self.checkpoints.latest()

    def is_due(self) -> bool:
        return self.checkpoints.is_due()

    def keep(self, state: dict[str, Any]) -> None:
        self.claim.require_held()
        self.checkpoints.keep(state)


def _picks(values: dict[str, Any]) -> tuple[EntropyPick, ...]:
    return tuple(EntropyPick.from_dict(pick) for pick in values["picks"])


def _read_step(file: Path) -> SampleStep:
    step = kept(file, "remove it to take that step again", SampleStep.from_dict)
    if step is None:
        raise FileError(f"{file} is missing; the same command again takes that step")
    return step


def _write_table(directory: Path) -> None:
    """Write all samples there are as a table, again if there are more by then: others write it too."""
    chains, written_ones = [DENSE, *CHAINS], set[Path]()
    while (files := set((directory / SAMPLES).glob("[!.]*.json"))) != written_ones:
        steps = sorted(map(_read_step, files), key=lambda step: (chains.index(chain_of(step.kinds)), len(step.kinds)))
        more: dict[str, list[object]] = {
            "before": [step.before for step in steps],
            "chain": [chain_of(step.kinds) for step in steps],
            "layers": [" ".join(_short(pick.site) for pick in step.picks) for step in steps],
            "te": [" ".join(f"{pick.te:.6g}" for pick in step.picks) for step in steps],
            "seconds": [round(step.seconds, 1) for step in steps],
        }
        write_rows(directory / SAMPLES_FILE, [step.sample for step in steps], more)
        written_ones = files


def _short(site: Site) -> str:
    return f"{LETTERS[site.kind]}{site.block}"


def _tell(progress: Callable[[int, int], None] | None, now: Progress) -> None:
    if progress:
        progress(now.update, now.updates)
