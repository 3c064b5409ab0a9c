"""The losses that training minimises: cross-entropy, with or without a teacher, by the formulas of ``timm.task``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from timm.data import Mixup
from timm.data.mixup import mixup_target
from timm.loss import LabelSmoothingCrossEntropy, SoftTargetCrossEntropy
from timm.task import ClassificationTask, TokenDistillationTask
from timm.task.token_distillation import TokenDistillationTeacher
from torch import Tensor, nn

from hetdpt.adapters.heads import Classifier
from hetdpt.adapters.models import num_classes_of
from hetdpt.adapters.preprocessing import preprocessing_of
from hetdpt.core.errors import TrainError
from hetdpt.core.modules import evaluating
from hetdpt.data.views import Batch
from hetdpt.training.config import TrainConfig
from hetdpt.training.hidden import HiddenLoss, Streams
from hetdpt.training.teacher_cache import TeacherAnswers

KINDS = ("none", "hard", "soft")


@dataclass(frozen=True, kw_only=True)
class Distillation:
    """How the student learns from its teacher (docs/training.md).

    The loss is (1 - alpha) cross-entropy + alpha distillation + hidden ``HiddenLoss``. hard: cross-entropy with the
    class that the teacher predicts. soft: T^2 KL(teacher || student), both softened by T.
    """

    kind: str = "hard"
    """none, hard or soft."""
    alpha: float = 0.5
    """Weight of the teacher's part of the loss."""
    temperature: float = 1.0
    """Temperature T of soft distillation."""
    hidden: float = 0.0
    """Weight of the difference between hidden states of teacher and student; 0 leaves them out."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise TrainError(f"distillation is {self.kind!r}; choose from {', '.join(KINDS)}")
        if not 0 <= self.alpha <= 1:
            raise TrainError(f"alpha is {self.alpha}; it must be between 0 and 1")
        if not self.temperature > 0:
            raise TrainError(f"temperature is {self.temperature}; it must be above 0")
        if self.hidden < 0:
            raise TrainError(f"hidden is {self.hidden}; it must be 0 or more")

    @property
    def needs_labels(self) -> bool:
        """Whether labels count in the loss."""
        return self.kind == "none" or self.alpha < 1


class Objective:
    """The loss of a student on a batch; ``student`` is what to train, ``teacher`` (if any) is never changed.

    ``cached``, if set, are the teacher's answers to fixed views of all training images; the teacher is then not run.
    """

    def __init__(
        self,
        student: nn.Module,
        config: TrainConfig,
        distillation: Distillation | None = None,
        teacher: nn.Module | None = None,
    ) -> None:
        distillation = distillation or Distillation(kind="none")
        if distillation.kind != "none" and teacher is None:
            raise TrainError(f"{distillation.kind} distillation needs a teacher; give the dense model")
        self.teacher = None if distillation.kind == "none" else teacher
        self.mixup = _mixup(config, num_classes_of(student))
        self.cached: TeacherAnswers | None = None
        self._hidden: HiddenLoss | None = None
        self._compared: dict[int, int] | None = None
        """How many tokens of each block are compared, once that is known."""
        criterion = _criterion(config)
        self.model = _for_timm(student)
        self.model.is_apart = distillation.needs_labels  # otherwise the class head would learn nothing
        self.model.set_distilled_training(self.teacher is not None)
        device = next(student.parameters()).device
        self.task: nn.Module
        if self.teacher is None:
            self.task = ClassificationTask(self.model, criterion, device=device, verbose=False)
            return
        self.teacher.to(device).eval().requires_grad_(False)
        self.distillation = distillation
        self._hidden = HiddenLoss(student, self.teacher) if distillation.hidden else None
        self._cache = _CachedTeacher(_for_timm(self.teacher))
        self.task = TokenDistillationTask(
            self.model,
            TokenDistillationTeacher(self._cache, device=device),
            criterion,
            distill_type=distillation.kind,
            task_loss_weight=1 - distillation.alpha,
            temperature=distillation.temperature,
            device=device,
            verbose=False,
        )

    @property
    def student(self) -> nn.Module:
        """The model that is trained."""
        return self.model.model

    @property
    def module(self) -> nn.Module:
        """What is trained, as accelerate wrapped it."""
        module: nn.Module = self.task.trainable_module  # type: ignore[assignment]
        return module

    @module.setter
    def module(self, module: nn.Module) -> None:
        self.task.trainable_module = module

    def __call__(self, batch: Batch) -> Tensor:
        """Return the loss of one batch, a scalar."""
        images, targets = batch.images, batch.targets
        if self.mixup is not None:
            images, targets = self.mixup(images, targets)
        if self.cached is not None and self.teacher is not None:
            self._cache.logits = self.cached.logits_of(batch)
        if self._hidden is None:
            return self._of_answers(images, targets)
        with self._hidden.student.watch(len(images)) as student, self._hidden.teacher.watch(len(images)) as teacher:
            loss = self._of_answers(images, targets)
        wanted = self._hidden.targets(teacher) if self.cached is None else self.cached.streams_of(batch)
        return loss + self.distillation.hidden * self._hidden(student, wanted)

    def of_answers(self, batch: Batch) -> Tensor:
        """Return the loss of the answers to one batch whose images are not mixed; hidden states do not count."""
        targets = batch.targets
        if self.mixup is not None:  # the criterion takes probabilities
            targets = mixup_target(targets, self.mixup.num_classes, smoothing=self.mixup.label_smoothing)
        return self._of_answers(batch.images, targets)

    def _of_answers(self, images: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = self.task(images, targets)["loss"]
        return loss

    @torch.no_grad()
    def teacher_logits(self, images: Tensor) -> Tensor:
        """Return the teacher's logits (B, classes) for images prepared for the student."""
        teacher: Any = self.task.teacher
        self._cache.logits = None
        logits: Tensor = teacher(teacher.normalize_input(images, self.task.student_mean, self.task.student_std))
        return logits

    @torch.no_grad()
    def teacher_answers(self, images: Tensor) -> tuple[Tensor, Streams]:
        """Return the teacher's logits and, if hidden states count, of its streams what the student computes too."""
        if self._hidden is None:
            return self.teacher_logits(images), {}
        with self._hidden.teacher.watch(len(images)) as teacher:
            logits = self.teacher_logits(images)
        targets = self._hidden.targets(teacher)
        if self._compared is None:
            with evaluating(self.student), self._hidden.student.watch(len(images)) as student:
                self.model(images)
            self._compared = self._hidden.tokens(student, targets)
        return logits, {number: targets[number][:, :count] for number, count in self._compared.items()}

    def close(self) -> None:
        """Set the student back to the outputs it had before."""
        self.model.set_distilled_training(False)


class OwnLoss:
    """The loss that ``student`` itself computes from images and targets, as detectors and segmenters do."""

    def __init__(self, student: nn.Module) -> None:
        self.student = self.module = student

    def __call__(self, batch: Any) -> Tensor:
        """Return the loss of one batch, a scalar."""
        loss: Tensor = self.module(batch.images, batch.targets)
        return loss

    def close(self) -> None:
        """Do nothing: training has changed nothing but weights."""


class _CachedTeacher(nn.Module):
    """The teacher, or its logits from before if ``logits`` is set."""

    def __init__(self, teacher: Classifier) -> None:
        super().__init__()
        self.teacher = teacher
        self.pretrained_cfg = teacher.pretrained_cfg
        self.logits: Tensor | None = None

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.teacher(images) if self.logits is None else self.logits
        return logits


def _for_timm(model: nn.Module) -> Classifier:
    """Return ``model`` with the attributes that ``timm.task`` expects of a model, whatever library it is from."""
    wants = preprocessing_of(model)
    classifier = Classifier(model)
    vars(classifier).update(
        pretrained_cfg={"mean": wants.mean, "std": wants.std},
        num_classes=num_classes_of(model),
        in_chans=wants.input_size[0],
    )
    return classifier


def _mixup(config: TrainConfig, classes: int) -> Mixup | None:
    if not config.mixes:
        return None
    return Mixup(
        mixup_alpha=config.mixup,
        cutmix_alpha=config.cutmix,
        prob=config.mix_prob,
        label_smoothing=config.smoothing,
        num_classes=classes,
    )


def _criterion(config: TrainConfig) -> nn.Module:
    if config.mixes:
        return SoftTargetCrossEntropy()  # the smoothing is in the mixed targets
    return LabelSmoothingCrossEntropy(config.smoothing) if config.smoothing else torch.nn.CrossEntropyLoss()
