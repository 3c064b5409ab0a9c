"""How well a model and its pruned versions transfer to other labelled images, side by side (paper, Table 3).

A run directory that processes of one or several machines fill together:

run.json       the settings; models and plans may be added later
models/        a folder for each: the model before, its training or, until it is finished, its features; the model
               after, result.json
claims/        which process works on which task
results.json   all results in the directory; also as results.csv
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Collection, Iterator, Mapping
from copy import deepcopy
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from hetdpt.adapters.heads import with_head_
from hetdpt.adapters.identity import fingerprint
from hetdpt.adapters.models import input_size_of
from hetdpt.adapters.preprocessing import preprocessing_of
from hetdpt.core.errors import DataError, MeasureError, ModelError
from hetdpt.core.format import removal_text
from hetdpt.core.modules import clone, find_device
from hetdpt.core.plan import KINDS, Budget, Plan
from hetdpt.data.sources import Data, Source, open_data
from hetdpt.data.streams import Stream
from hetdpt.data.subset import Subset, hold_out, subset
from hetdpt.export.saved import RECIPE, load, require_savable, save
from hetdpt.flow.comparison.statistics import RIGHT, UNREAD, WRONG, Answers, difference_of
from hetdpt.flow.execution import Execution
from hetdpt.flow.recipes import cifar100_transfer
from hetdpt.flow.resumable import CALIBRATION, recover_into, remove_layers_
from hetdpt.measurement.accuracy import BATCH, evaluate
from hetdpt.measurement.costs import Costs
from hetdpt.measurement.intervals import wilson_interval
from hetdpt.results import Difference
from hetdpt.store.atomic import write_csv, write_json
from hetdpt.store.jobs import Finished, Guard, Task, read_result
from hetdpt.store.run_directory import share
from hetdpt.studies.features import Features, compute_features, heads_in, with_classifier_
from hetdpt.studies.probe import STRENGTHS, LinearProbe, choose_strength, fit_probe
from hetdpt.surgery.merge import merge_
from hetdpt.surgery.record import record_of
from hetdpt.surgery.remove import place_
from hetdpt.training.recover import RecoverConfig, recover

MODELS, RESULT, RESULTS, TABLE = "models", "result.json", "results.json", "results.csv"
START, FEATURES, PROBED, TRAINING, LAST = "start", "features", "model", "training", "last"
Mode = Literal["probe", "finetune"]
MODES = ("probe", "finetune")
SPLITS = {"train": "training", "val": "validation"}


@dataclass(frozen=True, kw_only=True)
class TransferConfig:
    """What is learned on the other images, and from how many of them."""

    mode: Mode
    """probe trains a linear classifier on unchanged features; finetune trains all weights and a new head."""
    recovery: RecoverConfig = field(default_factory=lambda: cifar100_transfer().config)
    """How all weights are trained. A probe uses only its seed and its part of the training images."""
    strengths: tuple[float, ...] = STRENGTHS
    """Of the penalty of a probe; held-out training images decide among them."""
    calibration: int = CALIBRATION
    """Training images on which the replacements of a plan are fitted."""
    batch_size: int = BATCH
    """Images at once where nothing is trained; it changes no number."""

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise MeasureError(f"mode is {self.mode!r}; choose from {', '.join(MODES)}")
        if self.mode == "finetune" and self.recovery.distillation.kind != "none":
            raise MeasureError(
                f"transfer has no teacher to distil from, but distillation is {self.recovery.distillation.kind!r}; "
                "set distillation.kind to none"
            )
        if not self.strengths or min(self.strengths) <= 0:
            raise MeasureError(
                f"strengths are {self.strengths}; one or more above 0 were expected, such as (0.1, 0.01)"
            )

    @property
    def seed(self) -> int:
        return self.recovery.training.seed

    @property
    def training(self) -> RecoverConfig:
        """How all weights are trained on the images that were chosen before."""
        return replace(self.recovery, fraction=None, per_class=None)


@dataclass(frozen=True)
class TransferCase:
    """A model, and the plan of the layers to remove from it first."""

    name: str
    model: nn.Module
    plan: Plan | None
    key: str
    """Its name among files and claims."""


@dataclass(frozen=True)
class Transferred:
    """The result of a case."""

    name: str
    removed: Budget
    """The layers that the model lacks: removed before, and by the plan."""
    removal: str | None
    """What the layers of the plan were replaced by; None without a plan."""
    answers: str
    """For each validation image whether the answer was right, as ``RIGHT``, ``WRONG`` and ``UNREAD``."""
    training_images: int
    macs: int
    """Of one image, merged, with the new head."""
    params: int
    width: int
    """Features that the head is given."""
    device: str
    dtype: str
    batch: int
    """Images per step of the training; of a probe, images at once where features were computed."""
    seconds: float
    """Since a process last started with it."""
    epochs: int | None = None
    """Of the training; None for a probe."""
    strength: float | None = None
    """Of the penalty of a probe."""

    @property
    def images(self) -> int:
        """Those that accuracy was measured on."""
        return len(self.answers) - self.answers.count(UNREAD)

    @property
    def top1(self) -> float:
        """In percent."""
        return 100 * self.answers.count(RIGHT) / self.images

    def row(self, difference: Difference | None, saved: str | None) -> dict[str, Any]:
        """Return it flat, as plain JSON.

        ``difference`` is to the first model, paired over images; ``saved`` where in the run directory the model is.
        """
        low, high = wilson_interval(self.answers.count(RIGHT), self.images)
        measured = asdict(self)
        for name in ("name", "removed", "removal", "answers"):
            del measured[name]
        return {
            "model": self.name,
            **asdict(self.removed),
            "removal": self.removal,
            "top1": self.top1,
            "low": low,
            "high": high,
            "images": self.images,
            "unreadable": len(self.answers) - self.images,
            "difference": difference.value if difference else None,
            "difference_low": difference.low if difference else None,
            "difference_high": difference.high if difference else None,
            **measured,
            "saved": saved,
        }


TransferDone = Finished[TransferCase, Transferred]


def transfer_into(
    directory: str | Path,
    models: Mapping[str, nn.Module],
    data: str | Data,
    config: TransferConfig,
    plans: Mapping[str, Plan] | None = None,
    execution: Execution | None = None,
) -> Iterator[TransferDone]:
    """Let each of ``models`` learn the classes of ``data``, and yield every result once it is on disk.

    The first is compared to all others, and is also taken once with each of ``plans``, whose replacements are fitted on
    training images of ``data``. Called again, it resumes where it was killed; other models beside the first, or other
    plans, are added to the results. Several processes may share one ``directory`` that all of them see: each takes the
    next task that no other works on.
    """
    directory, execution = Path(directory), execution or Execution()
    execution.require_alone(config.recovery.training.precision, "models are transferred")
    opened = _chosen(data if isinstance(data, Data) else open_data(data), config)
    cases = _cases(models, plans or {}, config)
    _require_learnable(models.values(), opened, config, execution.device)  # before anything is written
    share(directory, _asked(cases[0], opened, config))
    job = _TransferJob(directory, opened, config, execution)
    tasks = [job.task(case, f"{number} of {len(cases)}: {case.name}") for number, case in enumerate(cases, 1)]
    for done in execution.run(directory, tasks):
        shutil.rmtree(job.folder(done.subject) / FEATURES, ignore_errors=True)
        yield done
    _write(directory, config.mode, cases)


def _chosen(data: Data, config: TransferConfig) -> Data:
    """Return the data with the part of the training images to use; ``DataError`` if a split is missing."""
    for split in (data.train, data.val):
        if split is None:
            raise DataError("transfer needs images to learn from and others to measure on; open the data with both")
        if isinstance(split, Stream):
            raise DataError(
                "models are compared image by image, but images of a stream of shards have no numbers; give a folder, "
                "torch/NAME or hfds/NAME"
            )
    recovery = config.recovery
    if recovery.fraction is None and recovery.per_class is None:
        return data
    assert data.train is not None
    part = subset(data.train, fraction=recovery.fraction, per_class=recovery.per_class, seed=config.seed)
    return replace(data, train=part)


def held_out(data: Data) -> Tensor:
    """Return which training images (images,) decide how strong the penalty of a probe is: a fifth of each class."""
    held = hold_out(data)
    assert isinstance(held.train, Subset)
    assert isinstance(held.val, Subset)
    if not held.val.indices:
        raise DataError(
            "the strength of a probe is chosen on training images that are held out, but no class has more than one; "
            "give more images"
        )
    found = torch.zeros(len(held.train) + len(held.val), dtype=torch.bool)
    found[list(held.val.indices)] = True
    return found


def _cases(models: Mapping[str, nn.Module], plans: Mapping[str, Plan], config: TransferConfig) -> list[TransferCase]:
    """Return all cases, the first model first; a plan that does not fit raises."""
    if not models:
        raise MeasureError("no model was given; give one or more, such as {'dense': model}")
    digests = {name: fingerprint(model)[:12] for name, model in models.items()}
    if len(set(digests.values())) < len(models):
        raise MeasureError(f"{' and '.join(models)} are not all different models; give each once")
    name, model = next(iter(models.items()))
    cases = [TransferCase(name, model, None, digests[name])]
    for called, plan in plans.items():
        place_(clone(model), plan)
        how = json.dumps([json.loads(plan.to_json()), config.calibration if plan.needs_images else 0])
        key = f"{digests[name]}-{hashlib.sha256(how.encode()).hexdigest()[:12]}"
        cases.append(TransferCase(f"{name}, {called}", model, plan, key))
    cases += [TransferCase(other, models[other], None, digests[other]) for other in list(models)[1:]]
    if len({case.key for case in cases}) < len(cases):
        raise MeasureError(f"{' and '.join(plans)} are not all different plans; give each once")
    return cases


def _require_learnable(models: Collection[nn.Module], data: Data, config: TransferConfig, device: str | None) -> None:
    """Raise unless ``models`` can learn the classes of ``data`` as ``config`` says."""
    for model in models:
        preprocessing_of(model)
    students = list[nn.Module]()
    for model in models:
        try:
            students.append(with_head_(clone(model), data.num_classes, heads_in(model)))
        except ModelError:
            if config.mode == "finetune":  # while a probe of it is not saved
                raise
    for student in students:
        require_savable(student)
    if config.mode == "probe":
        held_out(data)
        return
    # the first epoch to be yielded is the model before training
    next(recover(deepcopy(students[0]), None, data, config.training, device=device, evaluates=False))


def _asked(first: TransferCase, data: Data, config: TransferConfig) -> dict[str, Any]:
    """Return all that decides a result, as plain JSON; which results there are does not.

    A user is told the first difference, so the part of the images comes before their number.
    """
    settings: dict[str, Any] = asdict(config.recovery)
    if config.mode == "probe":
        parts = {name: settings[name] for name in ("fraction", "per_class")}
        settings = {**parts, "seed": config.seed, "strengths": list(config.strengths)}
    return {"mode": config.mode, "config": settings, "model": first.key, **data.facts()}


@dataclass(frozen=True)
class _TransferJob:
    directory: Path
    data: Data
    config: TransferConfig
    execution: Execution

    def task(self, case: TransferCase, title: str) -> Task[TransferCase, Transferred]:
        make = partial(self._transfer, case, title)
        return Task.to_file(case.key, case, self.folder(case) / RESULT, Transferred, make)

    def folder(self, case: TransferCase) -> Path:
        return self.directory / MODELS / case.key

    def _transfer(self, case: TransferCase, title: str, guard: Guard) -> Transferred:
        self.folder(case).mkdir(parents=True, exist_ok=True)
        begun, model = time.monotonic(), self._begin(case)
        learn = self._probe if self.config.mode == "probe" else self._finetune
        return replace(learn(case, title, model, guard), seconds=time.monotonic() - begun)

    @cached_property
    def _device(self) -> torch.device:
        return find_device(self.execution.device)

    def _begin(self, case: TransferCase) -> nn.Module:
        """Return the model that a case starts with, on the device; replacements are fitted once, and then loaded."""
        plan, start = case.plan, self.folder(case) / START
        if plan is not None and plan.needs_images and (start / RECIPE).is_file():
            return load(start).to(self._device)
        model = deepcopy(case.model).to(self._device)
        if plan is None:
            return model
        images = self.config.calibration
        model = remove_layers_(model, plan, self.data, images, self.config.seed, self.execution.workers)
        if plan.needs_images:
            save(deepcopy(model).cpu(), start, overwrite=True)
        return model

    def _probe(self, case: TransferCase, title: str, model: nn.Module, guard: Guard) -> Transferred:
        model = merge_(model)
        train, val = (self._features(case, title, split, model, guard) for split in ("train", "val"))
        values, labels = train.values[train.is_read].to(self._device), train.labels[train.is_read].to(self._device)
        classes, stage = self.data.num_classes, self.execution.stage(f"{title}, choosing the penalty of the probe")
        is_held = held_out(self.data)[train.is_read].to(self._device)
        trials = choose_strength(values, labels, is_held, classes, self.config.strengths, stage)
        probe = fit_probe(values, labels, classes, trials[0].strength)
        self._keep(case, model, probe, guard)
        right = probe.logits(val.values).argmax(1).cpu() == val.labels
        marks = ((RIGHT if hit else WRONG) if read else UNREAD for hit, read in zip(right, val.is_read, strict=True))
        return replace(
            self._measured(case, model, "".join(marks), values.shape[1]),
            training_images=len(labels),
            batch=self.config.batch_size,
            strength=probe.strength,
        )

    def _features(self, case: TransferCase, title: str, split: str, model: nn.Module, guard: Guard) -> Features:
        return compute_features(
            self.folder(case) / FEATURES,
            split,
            model,
            self._images(split),
            batch_size=self.config.batch_size,
            workers=self.execution.workers,
            progress=self.execution.stage(f"{title}, computing features of {SPLITS[split]} images"),
            before_write=guard,
        )

    def _images(self, split: str) -> Source:
        images = self.data.train if split == "train" else self.data.val
        assert images is not None
        assert not isinstance(images, Stream)
        return images

    def _keep(self, case: TransferCase, model: nn.Module, probe: LinearProbe, guard: Guard) -> None:
        """Save ``model`` with the probe as its head; nothing where it can have none."""
        heads = heads_in(model)
        try:
            made = with_classifier_(deepcopy(model).cpu(), heads, probe.weight.cpu(), probe.bias.cpu())
        except ModelError:  # it has no place for a head
            return
        guard()
        save(made, self.folder(case) / PROBED, overwrite=True)

    def _finetune(self, case: TransferCase, title: str, model: nn.Module, guard: Guard) -> Transferred:
        heads, seed, execution = heads_in(model), self.config.seed, self.execution
        student, folder = with_head_(model, self.data.num_classes, heads, seed), self.folder(case) / TRAINING
        epochs = recover_into(
            folder,
            student,
            None,
            self.data,
            self.config.training,
            execution,
            watch=execution.watcher(f"{title}, fine-tuning"),
        )
        for _ in epochs:
            guard()
        last = load(folder / LAST).to(self._device)
        answers = Answers(self.data)
        evaluate(
            last,
            self.data,
            batch_size=self.config.batch_size,
            workers=execution.workers,
            progress=execution.stage(f"{title}, evaluating"),
            each=answers.add,
        )
        training = self.config.recovery.training
        width = sum(last.get_submodule(path).in_features for path in heads_in(last))  # type: ignore[misc]
        return replace(
            self._measured(case, last, answers.text or "", width),
            training_images=len(self._images("train")),
            batch=training.images_per_update(),
            epochs=training.epochs,
        )

    def _measured(self, case: TransferCase, model: nn.Module, answers: str, width: int) -> Transferred:
        """Return the costs of a merged ``model``, whether it has its new head or not, with the answers."""
        record, plan = record_of(case.model), case.plan or Plan()
        before = record.plan if record else Plan()  # the plan may name layers that were removed before
        removed = Budget(*(len({*getattr(before, kind), *getattr(plan, kind)}) for kind in KINDS))
        classes, size = self.data.num_classes, input_size_of(model)
        weight = next(model.parameters())
        body, heads = deepcopy(model), heads_in(model)
        if heads:
            with_head_(body, classes, heads)
        costs = Costs.of(body, size)
        layer = 0 if heads else width * classes  # of a model that has no head, beside it
        return Transferred(
            name=case.name,
            removed=removed,
            removal=removal_text(plan.removal) if case.plan else None,
            answers=answers,
            training_images=0,
            macs=costs.macs + layer,
            params=costs.params + layer + (0 if heads else classes),
            width=width,
            device=str(weight.device),
            dtype=str(weight.dtype).removeprefix("torch."),
            batch=0,
            seconds=0.0,
        )


def _write(directory: Path, mode: str, cases: list[TransferCase]) -> None:
    """Write all results, again if there are more by then: other processes write them too."""
    found: dict[str, Transferred] = {}
    while (now := _finished(directory)) != found:
        found = now
        values = _rows(directory, cases, found)
        write_json(directory / RESULTS, {"mode": mode, "rows": values})
        write_csv(directory / TABLE, list(values[0]), values)


def _finished(directory: Path) -> dict[str, Transferred]:
    return {file.parent.name: read_result(file, Transferred) for file in (directory / MODELS).glob(f"*/{RESULT}")}


def _rows(directory: Path, cases: list[TransferCase], found: Mapping[str, Transferred]) -> list[dict[str, Any]]:
    """Return a row for each result: ``cases`` by their present names, then the others in the order of theirs."""
    asked = {case.key: replace(found[case.key], name=case.name) for case in cases}
    others = sorted((one.name, key) for key, one in found.items() if key not in asked)
    first, rows = cases[0].key, list[dict[str, Any]]()
    for key, one in {**asked, **{key: found[key] for _, key in others}}.items():
        pair = one.answers, found[first].answers
        difference = difference_of([pair]) if key != first else None
        places = (f"{MODELS}/{key}/{place}" for place in (PROBED, f"{TRAINING}/{LAST}"))
        saved = next((place for place in places if (directory / place / RECIPE).is_file()), None)
        rows.append(one.row(difference, saved))
    return rows
