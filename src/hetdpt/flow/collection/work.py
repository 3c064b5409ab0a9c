"""The steps of a collection as tasks: remove a layer, fine-tune, evaluate, and keep the model for later steps."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterable, Iterator
from copy import deepcopy
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path

import torch
from torch import nn

from hetdpt.core.errors import FileError
from hetdpt.core.plan import Site
from hetdpt.data.fixed_batches import ImageBatches
from hetdpt.data.sources import Data
from hetdpt.export.saved import RECIPE, load, save
from hetdpt.flow.collection.tree import DENSE, SampleNode, chain_of
from hetdpt.flow.execution import Execution, accuracies
from hetdpt.measurement.accuracy import evaluate
from hetdpt.measurement.speed import measure_throughput
from hetdpt.results import PRICES_FILE, Prices
from hetdpt.selection.predictor.pricing import measure_prices
from hetdpt.selection.predictor.rows import LETTERS, SAMPLES_FILE, write_rows
from hetdpt.selection.predictor.samples import CHAINS, CollectConfig, EntropyPick, SampleStep, fine_tune, prune_next
from hetdpt.store.atomic import find_sealed_json, sealed, write_text
from hetdpt.store.checkpoints import CHECKPOINTS
from hetdpt.store.jobs import Finished, Guard, Task, read_result
from hetdpt.surgery.merge import merge_
from hetdpt.surgery.tail import trim_if_possible_

SAMPLES, RECHECK, STEPS = "samples", "recheck", "steps"
START, LAST, PICKS = "start", "last", "picks.json"
TIMING_SECONDS = 10.0
SampleDone = Finished[SampleNode, SampleStep]


@dataclass(frozen=True)
class CollectionJob:
    """The steps of one directory, and what they are done with."""

    directory: Path
    results: str
    """The folder for the results of steps."""
    model: nn.Module
    data: Data
    config: CollectConfig
    execution: Execution
    tree: dict[str, SampleNode]
    prices: Prices | None = None
    """Of the layers, if they are known already."""

    def run(self, wanted: Iterable[SampleNode]) -> Iterator[SampleDone]:
        """Do the steps ``wanted`` together with all processes that share the directory, and yield every result."""
        nodes = list(wanted)
        tasks = [self._task(node, f"sample {number} of {len(nodes)}") for number, node in enumerate(nodes, 1)]
        for done in self.execution.run(self.directory, tasks):
            if done.is_own:
                self._tidy()
            yield done
        self._tidy()  # also what a kill after the last step has left

    def _task(self, node: SampleNode, number: str) -> Task[SampleNode, SampleStep]:
        is_root, title = node.parent is None, f"{number}: {node}"
        prices = self.directory / PRICES_FILE
        return Task.to_file(
            self._name(node),
            node,
            self._file(node),
            SampleStep,
            partial(self._take_dense if is_root else self._take, node, title),
            needs=(self._name(self.tree[node.parent]),) if node.parent and self.results == SAMPLES else (),
            is_complete=lambda _: not is_root or prices.is_file(),
        )

    def _take_dense(self, node: SampleNode, title: str, guard: Guard) -> SampleStep:
        begun, execution = time.monotonic(), self.execution
        self._clear(self.directory, f".{DENSE}.*")
        prices = self.prices or measure_prices(
            self.model, removal=self.config.removal, batch=execution.batch, progress=execution.progress
        )
        write_text(self.directory / PRICES_FILE, prices.to_json() + "\n")
        if not (self.directory / DENSE / RECIPE).is_file():
            save(deepcopy(self.model).cpu(), self.directory / DENSE)
        progress = execution.stage(f"{title}, evaluating")
        accuracy = evaluate(self.model, self.data, workers=execution.workers, progress=progress).top1
        return SampleStep(node.kinds, (), accuracy, accuracy, time.monotonic() - begun)

    def _take(self, node: SampleNode, title: str, guard: Guard) -> SampleStep:
        begun = time.monotonic()
        self._clear(self._folder(node), ".*")
        picks = self._prune(node, title)
        student, found = self._fine_tune(node, title, guard)
        before, after = found[0], found[-1]
        is_start, speedup = after < before, None
        if is_start:
            student = load(self._folder(node) / START).to(self._device)
        if self.results == SAMPLES:
            save(student.cpu(), self._folder(node) / LAST, overwrite=True)
        else:
            trim_if_possible_(merge_(student))
            models, timing = {"dense": self.model, "pruned": student}, self.execution.stage(f"{title}, timing")
            timed = measure_throughput(models, batch=self.execution.batch, seconds=TIMING_SECONDS, progress=timing)
            speedup = timed.speedup["pruned"].value
        seconds = time.monotonic() - begun
        return SampleStep(node.kinds, picks, before, max(before, after), seconds, speedup, is_start)

    def _clear(self, where: Path, pattern: str) -> None:
        """Remove what a kill has left half written."""
        for scratch in where.glob(pattern):
            shutil.rmtree(scratch, ignore_errors=True)

    def _prune(self, node: SampleNode, title: str) -> tuple[EntropyPick, ...]:
        """Save the model that ``node`` starts with, unless it exists, and return the layers removed from it."""
        start = self._folder(node) / START
        if not (start / PICKS).is_file():
            student, picks = self._model_after(node.parent), list[EntropyPick]()
            for number, kind in enumerate(node.new, 1):
                many = f" ({number} of {len(node.new)})" if len(node.new) > 1 else ""
                progress = self.execution.stage(f"{title}, choosing the next {kind} layer{many}")
                student, pick = prune_next(student, kind, self._images, self.config.removal, progress)
                picks.append(pick)
            notes = {PICKS: json.dumps(sealed({"picks": [asdict(pick) for pick in picks]}))}
            save(deepcopy(student).cpu(), start, overwrite=True, notes=notes)
        found = find_sealed_json(start / PICKS, f"remove {start} to have it made again")
        assert found is not None
        return tuple(EntropyPick(Site(**pick["site"]), pick["te"]) for pick in found["picks"])

    def _fine_tune(self, node: SampleNode, title: str, guard: Guard) -> tuple[nn.Module, tuple[float, ...]]:
        folder, execution = self._folder(node), self.execution
        student = load(folder / START).to(self._device)
        epochs = fine_tune(
            student,
            self.model,
            self.data,
            self.config.recovery if self.config.fine_tunes else None,
            device=execution.device,
            workers=execution.workers,
            keeper=execution.checkpoints(folder, guard),
            watch=execution.watcher(f"{title}, fine-tuning"),
        )
        return student, accuracies(folder, epochs)

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
    def _device(self) -> torch.device:
        return next(self.model.parameters()).device

    @cached_property
    def _images(self) -> ImageBatches:
        return self.execution.images(self.model, self.data, self.config.images, self.config.recovery.training.seed)

    def _model_after(self, key: str | None) -> nn.Module:
        if key in (None, DENSE):
            return self.model
        model, node = self._folder(self.tree[key]) / LAST, self.tree[key]
        if not model.is_dir():
            raise FileError(f"the model {model} is missing; remove {self._file(node)} to take that step again")
        return load(model).to(self._device)

    def _name(self, node: SampleNode) -> str:
        return f"{self.results}-{node.key}"

    def _folder(self, node: SampleNode) -> Path:
        return self.directory / STEPS / self._name(node)

    def _file(self, node: SampleNode) -> Path:
        return self.directory / self.results / f"{node.key}.json"


def _write_table(directory: Path) -> None:
    """Write all samples as a table, again if there are more by then: other processes write it too."""
    chains, written_ones = [DENSE, *CHAINS], set[Path]()
    while (files := set((directory / SAMPLES).glob("[!.]*.json"))) != written_ones:
        found: list[SampleStep | None] = [read_result(file, SampleStep) for file in files]
        steps = sorted(filter(None, found), key=lambda step: (chains.index(chain_of(step.kinds)), len(step.kinds)))
        more: dict[str, list[object]] = {
            "before": [step.before for step in steps],
            "chain": [chain_of(step.kinds) for step in steps],
            "layers": [" ".join(f"{LETTERS[pick.site.kind]}{pick.site.block}" for pick in s.picks) for s in steps],
            "te": [" ".join(f"{pick.te:.6g}" for pick in step.picks) for step in steps],
            "seconds": [round(step.seconds, 1) for step in steps],
        }
        write_rows(directory / SAMPLES_FILE, [step.sample for step in steps], more)
        written_ones = files
