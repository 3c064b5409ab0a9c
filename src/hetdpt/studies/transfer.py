"""How well a model and its pruned sisters transfer to other labelled images, side by side (paper, Table 3).

A run directory that processes of one or several machines fill together:

run.json       what was asked for; more models and plans may come later
models/        a folder for each: what it began as, its training or, until it is done, its features; the model it came
               to, result.json
claims/        who works on what
results.json   all that is done, whoever asked for it; also as results.csv
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Collection, Iterator, Mapping
from copy import deepcopy
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from hetdpt.adapters.heads import with_head_
from hetdpt.adapters.identity import fingerprint
from hetdpt.adapters.models import input_size_of
from hetdpt.adapters.preprocessing import preprocessing_of
from hetdpt.core.errors import DataError, MeasureError, ModelError
from hetdpt.core.modules import clone, find_device
from hetdpt.core.plan import KINDS, Budget, Plan
from hetdpt.data.sources import Data, Source, open_data
from hetdpt.data.streams import Stream
from hetdpt.data.subset import Subset, hold_out, subset
from hetdpt.export.saved import RECIPE, load, require_savable, save
from hetdpt.flow.collection.work import CLAIMS, Workplace
from hetdpt.flow.comparison.rows import RIGHT, UNREAD, WRONG, Difference, difference_of
from hetdpt.flow.recipes import cifar100_transfer
from hetdpt.flow.resumable import CALIBRATION, pruned, recover_into
from hetdpt.measurement.accuracy import BATCH, evaluate
from hetdpt.measurement.costs import Costs
from hetdpt.measurement.intervals import wilson_interval
from hetdpt.report.observation import spell
from hetdpt.report.tokens import write_csv
from hetdpt.store.atomic import keep_json, write_json, written
from hetdpt.store.queue import Claim, Job, work
from hetdpt.store.run_directory import share
from hetdpt.studies.features import Features, heads_in, take_features, with_classifier_
from hetdpt.studies.observe import read_measured
from hetdpt.studies.probe import STRENGTHS, LinearProbe, choose_strength, fit_probe
from hetdpt.surgery.merge import merge_
from hetdpt.surgery.record import record_of
from hetdpt.surgery.remove import place_
from hetdpt.training.recover import RecoverConfig, recover

MODELS, RESULT, RESULTS, TABLE = "models", "result.json", "results.json", "results.csv"
START, FEATURES, PROBED, TRAINING, LAST = "start", "features", "model", "training", "last"
Mode = Literal["probe", "finetune"]
MODES = ("probe", "finetune")


@dataclass(frozen=True, kw_only=True)
class TransferConfig:
    """What is learnt on the other images, and from how many of them."""

    mode: Mode
    """``probe``: a linear classifier on features that stay as they are; ``finetune``: all weights and a fresh head."""
    recovery: RecoverConfig = field(default_factory=lambda: cifar100_transfer().config)
    """How all weights are trained. A probe takes its seed and its part of the training images alone."""
    strengths: tuple[float, ...] = STRENGTHS
    """Of the penalty of a probe: those among which images that are held out decide."""
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
    """A model, and the plan by which it first loses layers."""

    name: str
    model: nn.Module
    plan: Plan | None
    key: str
    """Its name among files and claims."""


@dataclass(frozen=True)
class Outcome:
    """What a case came to."""

    answers: str
    """Of each validation image whether it was right, as ``RIGHT``, ``WRONG`` and ``UNREAD``."""
    training_images: int
    macs: int
    """Of one image, merged, with the new head."""
    params: int
    width: int
    """Features that the head is given."""
    device: str
    dtype: str
    batch: int
    """Images per step of the training; of a probe, images at once where features were taken."""
    seconds: float
    """Since a process last began with it."""
    epochs: int | None = None
    """Of the training; None for a probe."""
    strength: float | None = None
    """Of the penalty of a probe."""

    @property
    def right(self) -> int:
        return self.answers.count(RIGHT)

    @property
    def images(self) -> int:
        """Those that accuracy was measured on."""
        return len(self.answers) - self.answers.count(UNREAD)

    @property
    def top1(self) -> float:
        """In percent."""
        return 100 * self.right / self.images


@dataclass(frozen=True)
class Entry:
    """What is written of a case that is done."""

    name: str
    removed: Budget
    """The layers that the model has lost, before and by the plan."""
    removal: str | None
    """What the layers of the plan left behind; None where there is no plan."""
    outcome: Outcome


@dataclass(frozen=True)
class TransferRow:
    """All that is known of a case."""

    entry: Entry
    difference: Difference | None
    """To the first model, paired over images; None for itself."""
    saved: str | None
    """Where in the run directory the model lies that it came to; None where a probe is no head of it."""

    def to_dict(self) -> dict[str, Any]:
        """Return it flat, as plain JSON."""
        entry, outcome, gap = self.entry, self.entry.outcome, self.difference
        low, high = wilson_interval(outcome.right, outcome.images)
        measured = asdict(outcome)
        del measured["answers"]
        return {
            "model": entry.name,
            **asdict(entry.removed),
            "removal": entry.removal,
            "top1": outcome.top1,
            "low": low,
            "high": high,
            "images": outcome.images,
            "unreadable": len(outcome.answers) - outcome.images,
            "difference": gap.value if gap else None,
            "difference_low": gap.low if gap else None,
            "difference_high": gap.high if gap else None,
            **measured,
            "saved": self.saved,
        }


@dataclass(frozen=True)
class TransferDone:
    """A case that is done."""

    case: TransferCase
    result: Outcome
    is_own: bool
    """Whether this process did it, now."""


def transfer_into(
    directory: str | Path,
    models: Mapping[str, nn.Module],
    data: str | Data,
    config: TransferConfig,
    plans: Mapping[str, Plan] | None = None,
    place: Workplace | None = None,
) -> Iterator[TransferDone]:
    """Let each of ``models`` learn the classes of ``data``, and yield what it came to once that is on disk.

    The first is compared to all others, and is also taken once with each of ``plans``, whose replacements are fitted on
    training images of ``data``. Called again it goes on where it was killed; with other models beside the first, or
    other plans, it does those that are new. Called by several processes, with one ``directory`` that all of them see,
    each takes what nobody works on. The results are of all that is done in the directory then.
    """
    directory, place = Path(directory), place or Workplace()
    place.require_alone(config.recovery.training.precision, "models are transferred")
    opened = _chosen(data if isinstance(data, Data) else open_data(data), config)
    cases = _cases(models, plans or {}, config)
    _require_learnable(models.values(), opened, config, place.device)  # before anything is written
    share(directory, _asked(cases[0], opened, config))
    job: Job[TransferCase, Outcome] = _TransferJob(directory, opened, config, place)
    for found in work(directory / CLAIMS, cases, job):
        yield TransferDone(*found)
    _write(directory, config.mode, cases)


def _chosen(data: Data, config: TransferConfig) -> Data:
    """Return the data with the training images that are asked for; ``DataError`` where it has not what is needed."""
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
    """Return all there is to do, the first model first; a plan that does not fit is refused."""
    if not models:
        raise MeasureError("there is no model to transfer; give one or more, such as {'dense': model}")
    digests = {name: fingerprint(model)[:12] for name, model in models.items()}
    if len(set(digests.values())) < len(models):
        raise MeasureError(f"{' and '.join(models)} are not all different models; give each once")
    name, model = next(iter(models.items()))
    cases = [TransferCase(name, model, None, digests[name])]
    for called, plan in plans.items():
        place_(clone(model), plan)
        how = json.dumps([json.loads(plan.to_json()), config.calibration if plan.fitted else 0])
        key = f"{digests[name]}-{hashlib.sha256(how.encode()).hexdigest()[:12]}"
        cases.append(TransferCase(f"{name}, {called}", model, plan, key))
    cases += [TransferCase(other, models[other], None, digests[other]) for other in list(models)[1:]]
    if len({case.key for case in cases}) < len(cases):
        raise MeasureError(f"{' and '.join(plans)} are not all different plans; give each once")
    return cases


def _require_learnable(models: Collection[nn.Module], data: Data, config: TransferConfig, device: str | None) -> None:
    """Raise what there is to say against letting ``models`` learn the classes of ``data`` as ``config`` says."""
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
    # the first thing to come is the model before training
    next(recover(deepcopy(students[0]), None, data, config.training, device=device, evaluates=False))


def _asked(first: TransferCase, data: Data, config: TransferConfig) -> dict[str, Any]:
    """Return all that decides what a result is, as plain JSON; which results there are to be does not.

    What differs first is what a user is told, so that a part of the images comes before how many they are.
    """
    settings: dict[str, Any] = asdict(config.recovery)
    if config.mode == "probe":
        parts = {name: settings[name] for name in ("fraction", "per_class")}
        settings = {**parts, "seed": config.seed, "strengths": list(config.strengths)}
    return {"mode": config.mode, "config": settings, "model": first.key, **data.facts()}


@dataclass(frozen=True)
class _TransferJob:
    """What a process does in one directory, and with what."""

    directory: Path
    data: Data
    config: TransferConfig
    place: Workplace

    def name(self, case: TransferCase) -> str:
        return case.key

    def result(self, case: TransferCase) -> Outcome | None:
        found: Entry | None = read_measured(self._folder(case) / RESULT, Entry)
        return found.outcome if found else None

    def can_begin(self, case: TransferCase) -> bool:
        return True

    def wait(self, who: str) -> None:
        self.place.wait(who)

    def take(self, case: TransferCase, claim: Claim) -> None:
        """Do it, and write what came out."""
        folder = self._folder(case)
        folder.mkdir(parents=True, exist_ok=True)
        begun, model = time.monotonic(), self._begin(case)
        learn = self._probe if self.config.mode == "probe" else self._finetune
        outcome = learn(case, model, claim)
        claim.require_held()
        entry = _entry(case, replace(outcome, seconds=time.monotonic() - begun))
        keep_json(folder / RESULT, asdict(entry))
        shutil.rmtree(folder / FEATURES, ignore_errors=True)

    def _folder(self, case: TransferCase) -> Path:
        return self.directory / MODELS / case.key

    @cached_property
    def _device(self) -> torch.device:
        return find_device(self.place.device)

    def _begin(self, case: TransferCase) -> nn.Module:
        """Return the model that a case begins with, on the device; replacements are fitted once, and then loaded."""
        plan, start = case.plan, self._folder(case) / START
        if plan is not None and plan.fitted and (start / RECIPE).is_file():
            return load(start).to(self._device)
        model = deepcopy(case.model).to(self._device)
        if plan is None:
            return model
        images = self.config.calibration
        model = pruned(model, plan, self.data, images, self.config.seed, self.place.workers)
        if plan.fitted:
            save(deepcopy(model).cpu(), start, overwrite=True)
        return model

    def _probe(self, case: TransferCase, model: nn.Module, claim: Claim) -> Outcome:
        """Fit a probe to the features of the training images, and save the model with it as its head."""
        model = merge_(model)
        train, val = (self._features(case, split, model, claim) for split in ("train", "val"))
        values, labels = train.values[train.is_read].to(self._device), train.labels[train.is_read].to(self._device)
        classes, stage = self.data.num_classes, self.place.stage(f"{case.name}: choosing the strength of the probe")
        is_held = held_out(self.data)[train.is_read].to(self._device)
        trials = choose_strength(values, labels, is_held, classes, self.config.strengths, stage)
        probe = fit_probe(values, labels, classes, trials[0].strength)
        self._keep(case, model, probe, claim)
        right = probe.logits(val.values).argmax(1).cpu() == val.labels
        marks = ((RIGHT if hit else WRONG) if read else UNREAD for hit, read in zip(right, val.is_read, strict=True))
        return replace(
            self._outcome(model, "".join(marks), values.shape[1]),
            training_images=len(labels),
            batch=self.config.batch_size,
            strength=probe.strength,
        )

    def _features(self, case: TransferCase, split: str, model: nn.Module, claim: Claim) -> Features:
        return take_features(
            self._folder(case) / FEATURES,
            split,
            model,
            self._images(split),
            batch_size=self.config.batch_size,
            workers=self.place.workers,
            progress=self.place.stage(f"{case.name}: features of {split}"),
            before_write=claim.require_held,
        )

    def _images(self, split: str) -> Source:
        images = self.data.train if split == "train" else self.data.val
        assert images is not None
        assert not isinstance(images, Stream)
        return images

    def _keep(self, case: TransferCase, model: nn.Module, probe: LinearProbe, claim: Claim) -> None:
        """Save ``model`` with the probe as its head; nothing where it can have none."""
        heads = heads_in(model)
        try:
            made = with_classifier_(deepcopy(model).cpu(), heads, probe.weight.cpu(), probe.bias.cpu())
        except ModelError:  # of what it has no place for
            return
        claim.require_held()
        save(made, self._folder(case) / PROBED, overwrite=True)

    def _finetune(self, case: TransferCase, model: nn.Module, claim: Claim) -> Outcome:
        """Train all weights with a fresh head, and measure the model of the last epoch."""
        heads, seed, place = heads_in(model), self.config.seed, self.place
        student, folder = with_head_(model, self.data.num_classes, heads, seed), self._folder(case) / TRAINING
        epochs = recover_into(
            folder,
            student,
            None,
            self.data,
            self.config.training,
            device=place.device,
            workers=place.workers,
            minutes=place.minutes,
            watch=place.watcher(f"{case.name}: fine-tuning"),
        )
        for _ in epochs:
            claim.require_held()
        last = load(folder / LAST).to(self._device)
        marks = [UNREAD] * len(self._images("val"))

        def add(indices: Tensor, is_right: Tensor) -> None:
            for index, hit in zip(indices.tolist(), is_right.tolist(), strict=True):
                marks[index] = RIGHT if hit else WRONG

        evaluate(
            last,
            self.data,
            batch_size=self.config.batch_size,
            workers=place.workers,
            progress=place.stage(f"{case.name}: evaluating"),
            each=add,
        )
        training = self.config.recovery.training
        width = sum(last.get_submodule(path).in_features for path in heads_in(last))  # type: ignore[misc]
        return replace(
            self._outcome(last, "".join(marks), width),
            training_images=len(self._images("train")),
            batch=training.images_per_update(),
            epochs=training.epochs,
        )

    def _outcome(self, model: nn.Module, answers: str, width: int) -> Outcome:
        """Return what is known of a merged ``model``, whether it has its new head or not."""
        classes, size = self.data.num_classes, input_size_of(model)
        weight = next(model.parameters())
        body, heads = deepcopy(model), heads_in(model)
        if heads:
            with_head_(body, classes, heads)
        costs = Costs.of(body, size)
        layer = 0 if heads else width * classes  # of a model that has no head, beside it
        return Outcome(
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


def _entry(case: TransferCase, outcome: Outcome) -> Entry:
    """Return what is to be written; a plan may name layers that the model has lost already."""
    record = record_of(case.model)
    before, own = record.plan if record else Plan(), case.plan or Plan()
    attention, activation = (len({*getattr(before, kind), *getattr(own, kind)}) for kind in KINDS)
    return Entry(case.name, Budget(attention, activation), spell(own.removal) if case.plan else None, outcome)


def _write(directory: Path, mode: str, cases: list[TransferCase]) -> None:
    """Write all that is done, again if there is more by then: others write it too."""
    found: dict[str, Entry] = {}
    while (now := _entries(directory)) != found:
        found = now
        values = [row.to_dict() for row in _rows(directory, cases, found)]
        write_json(directory / RESULTS, {"mode": mode, "rows": values})
        with written(directory / TABLE) as scratch:
            write_csv(values, scratch)


def _entries(directory: Path) -> dict[str, Entry]:
    """Return what is done, by the name of its folder."""
    return {file.parent.name: read_measured(file, Entry) for file in (directory / MODELS).glob(f"*/{RESULT}")}


def _rows(directory: Path, cases: list[TransferCase], found: Mapping[str, Entry]) -> list[TransferRow]:
    """Return a row for each that is done: ``cases`` as they are called now, then the others by name."""
    asked = {case.key: replace(found[case.key], name=case.name) for case in cases}
    others = sorted((entry.name, key) for key, entry in found.items() if key not in asked)
    first, rows = cases[0].key, list[TransferRow]()
    for key, entry in {**asked, **{key: found[key] for _, key in others}}.items():
        pair = entry.outcome.answers, found[first].outcome.answers
        difference = difference_of([pair]) if key != first else None
        places = (f"{MODELS}/{key}/{place}" for place in (PROBED, f"{TRAINING}/{LAST}"))
        saved = next((place for place in places if (directory / place / RECIPE).is_file()), None)
        rows.append(TransferRow(entry, difference, saved))
    return rows
