"""Recovery (paper, stage 2): a pruned student learns from its dense teacher. The loop itself is training's."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing
from copy import deepcopy
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hetdpt.adapters.identity import fingerprint
from hetdpt.adapters.models import num_classes_of
from hetdpt.adapters.preprocessing import preprocessing_of
from hetdpt.core.errors import TrainError
from hetdpt.core.processes import process_count, rank
from hetdpt.core.progress import StageProgress
from hetdpt.data.augmentation import Augmentation
from hetdpt.data.batches import EvaluationBatches, TrainingBatches
from hetdpt.data.sources import Data, Source, check_classes, open_data
from hetdpt.data.streams import Stream
from hetdpt.data.subset import hold_out_fraction, require_part, subset
from hetdpt.data.views import Share
from hetdpt.store.config_diff import flat
from hetdpt.store.settings import changed
from hetdpt.surgery.merge import merge_
from hetdpt.surgery.record import survey_of
from hetdpt.surgery.tail import trim_if_possible_, trim_to_class_token_
from hetdpt.training.config import TrainConfig
from hetdpt.training.decide import DecidedKeeper, Decision, OpenTraining, first_images
from hetdpt.training.drop_paths import drop_paths
from hetdpt.training.evaluator import Evaluator
from hetdpt.training.objective import Distillation, Objective
from hetdpt.training.processes import Accelerator, start
from hetdpt.training.teacher_cache import Asking, TeacherCache
from hetdpt.training.trainer import Companion, Epoch, Keeper, Progress, Trainer
from hetdpt.training.trial import Attempt, evaluation_seconds


@dataclass(frozen=True, kw_only=True)
class RecoverConfig:
    """How a student is trained back to accuracy; the defaults are those of the paper's release (docs/training.md)."""

    training: TrainConfig = field(default_factory=TrainConfig)
    """The loop."""
    augmentation: Augmentation = field(default_factory=Augmentation)
    """What happens to training images."""
    distillation: Distillation = field(default_factory=Distillation)
    """What the teacher adds to the loss."""
    drop_path: float = 0.1
    """Probability of dropping the last block's branches for an image, growing from 0 at the first block."""
    train_merged: bool = False
    """Merge FFNs without activation before training, which is cheaper, instead of after it."""
    cache_teacher: bool = False
    """Run the teacher once for every fixed view instead of in every epoch, and keep its answers on disk."""
    fraction: float | None = None
    """Fraction of the training images to use."""
    per_class: int | None = None
    """Training images to use of each class."""
    hold_out: float = 0.0
    """Fraction of the training images, 500 at most, to hold out and measure epochs on; 0: on the validation images."""

    def __post_init__(self) -> None:
        require_part(self.fraction, self.per_class)
        if not 0 <= self.hold_out < 1:
            raise TrainError(f"hold_out is {self.hold_out}; expected a fraction of the training images below 1")
        if not 0 <= self.drop_path < 1:
            raise TrainError(f"drop_path is {self.drop_path}; expected a probability below 1")
        if self.cache_teacher and not (self.augmentation.views and not self.training.mixes):
            raise TrainError(
                "cache_teacher needs fixed views: set augmentation.views to how many an image has, and training.mixup "
                "and training.cutmix to 0, or leave out cache_teacher"
            )
        if self.cache_teacher and self.distillation.kind == "none":
            raise TrainError("cache_teacher has no effect without distillation; leave it out")

    def with_settings(self, settings: Mapping[str, Any]) -> RecoverConfig:
        """Return this config with some fields changed, named as in ``training.lr`` or ``drop_path``.

        >>> RecoverConfig().with_settings({"training.epochs": 2, "distillation.kind": "soft"}).training.epochs
        2
        """
        return changed(self, settings)


def recover(
    student: nn.Module,
    teacher: nn.Module | None,
    data: str | Path | Data,
    config: RecoverConfig | None = None,
    *,
    device: str | None = None,
    workers: int = 0,
    keeper: Keeper | None = None,
    watch: Callable[[Progress], None] | None = None,
    companion: Companion | None = None,
    evaluates: bool = True,
    progress: StageProgress | None = None,
    cache: TeacherCache | None = None,
) -> Iterator[Epoch]:
    """Train ``student`` in place on ``data`` with the dense ``teacher``; yield an :class:`Epoch` before and after each.

    ``teacher`` may share weights with the student: it is copied. None trains on the labels alone, whatever
    ``config.distillation`` says. Weights of half precision are trained in float32. ``keeper`` keeps states to resume
    from, ``watch`` is called after every update, ``companion`` learns along with the weights. Without ``evaluates``,
    epochs have no accuracies; ``training_data`` says on which images they are measured. ``progress`` is called while a
    learning rate is found or an update is timed (``training.lr`` of None, ``training.minutes``). ``cache`` says
    where the answers of a cached teacher are kept; in a temporary directory if it does not.

    >>> import hetdpt, timm
    >>> dense = timm.create_model("vit_tiny_patch16_224", img_size=16, patch_size=4, depth=2, num_classes=10)
    >>> student = hetdpt.prune_(deepcopy(dense), hetdpt.Plan(attention=(1,)))
    >>> config = RecoverConfig(training=TrainConfig(epochs=1, batch_size=32), per_class=8)
    >>> [epoch.number for epoch in hetdpt.recover(student, dense, "demo", config)]
    [0, 1]
    """
    config = config or RecoverConfig()
    accelerator = start(config.training.precision, device)
    student.to(accelerator.device, torch.float32)
    if config.train_merged:
        merge_(student)
    opened = data if isinstance(data, Data) else open_data(str(data))
    taught = _teaching(student, teacher, config, accelerator)
    if not opened.is_labelled:
        require_no_labels(opened.name, taught[0])
    part, _ = training_data(opened, config)
    held = part.val if part.val is not opened.val else None
    decision = Decision(config.training.epochs)
    if config.training.is_open:
        if companion is not None:
            raise TrainError("a search for layers needs a number of epochs and a learning rate; give --epochs and --lr")
        keeper = DecidedKeeper(keeper)
        place: dict[str, Any] = {"device": device, "workers": workers, "evaluates": evaluates, "progress": progress}
        decision = keeper.decision or _decide(student, teacher, part, held, config, **place)
        keeper.decision = decision
        config = config.with_settings(decision.settings)
        if decision.images is not None and part.train is not None:
            part = replace(part, train=first_images(part.train, decision.images, config.training.seed))
        accelerator = start(config.training.precision, device)  # without what the trials have left in it
    batches, validation = _batches(student, part, config, accelerator, workers)
    objective = Objective(student, config.training, *taught)
    is_compared = held is not None and objective.teacher is not None
    evaluate = Evaluator(validation, objective.teacher_logits if is_compared else None)
    found = survey_of(student)  # before the weights are spread over processes
    with ExitStack() as opened_files:
        if config.cache_teacher and teacher is not None:
            asking = Asking(objective.teacher_answers, batches, config.augmentation.views)
            known_by = _cached_by(teacher, part, config, accelerator)
            answers = (cache or TeacherCache()).answers(asking, accelerator, known_by)
            objective.cached = opened_files.enter_context(answers)
        trainer = Trainer(
            accelerator,
            objective,
            batches,
            config.training,
            evaluate=evaluate if evaluates else None,
            keeper=keeper,
            watch=watch,
            companion=companion,
        )
        epochs = opened_files.enter_context(closing(trainer.epochs()))
        while True:
            with drop_paths(student, config.drop_path, found):  # not while the caller has the student
                epoch = next(epochs, None)
            if epoch is None:
                return
            names = tuple(sorted({*epoch.unreadable, *evaluate.unreadable}))
            yield replace(epoch, unreadable=names, lr_found=decision.lr, notes=decision.notes)


def attempt(
    student: nn.Module,
    teacher: nn.Module | None,
    data: Data,
    config: RecoverConfig,
    *,
    device: str | None = None,
    workers: int = 0,
    companion: Companion | None = None,
    updates: int | None = None,
) -> Attempt:
    """Return the training of ``student`` that ``recover`` would do, to try some updates of it, in place.

    ``data`` is that of ``training_data``. ``updates`` are all that it has. The teacher is asked in every update, also
    if ``config.cache_teacher``.
    """
    accelerator = start(config.training.precision, device)
    student.to(accelerator.device, torch.float32)
    if config.train_merged:
        merge_(student)
    batches, _ = _batches(student, data, config, accelerator, workers)
    objective = Objective(student, config.training, *_teaching(student, teacher, config, accelerator))
    more: dict[str, Any] = {"drop_path": config.drop_path, "companion": companion, "updates": updates}
    return Attempt(accelerator, objective, batches, config.training, **more)


def _decide(
    student: nn.Module,
    teacher: nn.Module | None,
    data: Data,
    held: Source | Stream | None,
    config: RecoverConfig,
    *,
    device: str | None,
    workers: int,
    evaluates: bool,
    progress: StageProgress | None,
) -> Decision:
    """Return what the settings leave open; updates of copies of the student are tried for it."""
    images, evaluated, share = data.train, data.val, Share(rank(), process_count())
    assert images is not None
    assert evaluated is not None

    def attempted(source: Source | Stream, training: TrainConfig, updates: int | None = None) -> Attempt:
        is_cached = config.cache_teacher and updates is None  # when timed, the answers of a cached teacher are at hand
        settings = replace(config, training=training, cache_teacher=False)
        place: dict[str, Any] = {"device": device, "workers": workers, "updates": updates}
        part = replace(data, train=source)
        return attempt(deepcopy(student), None if is_cached else teacher, part, settings, **place)

    def evaluation(source: Source | Stream) -> EvaluationBatches:
        size = config.training.batch_size
        return EvaluationBatches(source, preprocessing_of(student), batch_size=size, share=share, workers=workers)

    def seconds(model: nn.Module, source: Source | Stream) -> float:
        return len(source) / share.world * evaluation_seconds(model, evaluation(source))

    def evaluating() -> float:
        models = 2 if config.training.ema_decay else 1
        return models * seconds(student, evaluated) if evaluates else 0.0

    def beforehand() -> float:
        if not config.cache_teacher or teacher is None:
            return 0.0
        return config.augmentation.views * seconds(deepcopy(teacher).to(next(student.parameters())), images)

    return OpenTraining(
        config.training,
        images,
        attempted,
        evaluation,
        evaluating,
        beforehand,
        held=None if isinstance(held, Stream) else held,
        progress=progress,
    ).decide()


def training_data(data: Data, config: RecoverConfig) -> tuple[Data, str]:
    """Return the images to train on and, as ``val``, those to measure epochs on; and the latter in words.

    Of a stream of shards none can be held out: its epochs are measured on the validation images.
    """
    images = data.train
    if images is not None and (config.fraction is not None or config.per_class is not None):
        images = subset(images, fraction=config.fraction, per_class=config.per_class, seed=config.training.seed)
        data = replace(data, train=images)
    is_held = config.hold_out > 0 and images is not None and not isinstance(images, Stream)
    if is_held:
        data = hold_out_fraction(data, config.hold_out, config.training.seed)
    if data.train is None or data.val is None:
        raise TrainError("training needs the splits train and val; open the data with both")
    count = len(data.val)
    if is_held:
        return data, f"{count} training images that were held out"
    why = ", as none of a stream can be held out" if config.hold_out else ""
    return data, f"{count} validation images{why}"


def require_no_labels(data: str, distillation: Distillation, where: str = "") -> None:
    """Raise ``TrainError`` if labels count in the loss, which ``data`` has not; ``where`` begins names of settings."""
    if not distillation.needs_labels:
        return
    if distillation.kind == "none":
        raise TrainError(
            f"training without a teacher needs labels, but {data} has none; give a folder with train/ and val/, "
            f"each with a folder per class, or set {where}distillation.kind to soft and give the teacher"
        )
    raise TrainError(
        f"labels have a weight of {1 - distillation.alpha:.2g} in the loss, but {data} has none; set "
        f"{where}distillation.alpha to 1 (--alpha 1)"
    )


def _batches(
    student: nn.Module, data: Data, config: RecoverConfig, accelerator: Accelerator, workers: int
) -> tuple[TrainingBatches, EvaluationBatches]:
    check_classes(data.num_classes, num_classes_of(student))
    assert data.train is not None
    assert data.val is not None
    wants = preprocessing_of(student)
    size, share = config.training.batch_size, Share(accelerator.process_index, accelerator.num_processes)
    training = TrainingBatches(
        data.train,
        wants,
        config.augmentation,
        batch_size=size,
        seed=config.training.seed,
        share=share,
        workers=workers,
    )
    return training, EvaluationBatches(data.val, wants, batch_size=size, share=share, workers=workers)


def _teaching(
    student: nn.Module, teacher: nn.Module | None, config: RecoverConfig, accelerator: Accelerator
) -> tuple[Distillation, nn.Module | None]:
    """Return how to distil, and a copy of the teacher, checked against the student."""
    if teacher is None or config.distillation.kind == "none":
        return Distillation(kind="none"), None
    pair = num_classes_of(student), num_classes_of(teacher)
    if pair[0] != pair[1]:
        raise TrainError(
            f"the student has {pair[0]} classes but the teacher has {pair[1]}; use the model that was pruned as teacher"
        )
    sizes = preprocessing_of(student).input_size, preprocessing_of(teacher).input_size
    if sizes[0] != sizes[1]:
        raise TrainError(f"the student takes images of {sizes[0]} but the teacher of {sizes[1]}; they must be the same")
    copy = deepcopy(teacher).to(accelerator.device, torch.float32)
    if config.distillation.hidden:
        trim_to_class_token_(copy)  # not to the mean of its tokens: its last stream is read
    else:
        trim_if_possible_(copy)  # only its logits are read
    return config.distillation, copy


def _cached_by(teacher: nn.Module, data: Data, config: RecoverConfig, accelerator: Accelerator) -> dict[str, Any]:
    """Return what decides the answers of a teacher to the views of images, and a little more, as plain JSON."""
    settings = {name: value for name, value in flat(asdict(config)).items() if not name.startswith("training.")}
    known = {"teacher": fingerprint(teacher), **data.facts(), **settings, "seed": config.training.seed}
    plain: dict[str, Any] = json.loads(json.dumps({**known, "precision": accelerator.mixed_precision}))
    return plain
