"""The one training loop. It yields an ``Epoch`` after every epoch, can be stopped anywhere and resumes from its state.

Everything random in an update is drawn from generators seeded by (seed, process, update), so the state has no
generators in it and a resumed run draws what the uninterrupted one would have drawn.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, broadcast, broadcast_object_list, gather_object
from timm.optim import create_optimizer_v2, list_optimizers, param_groups_weight_decay
from timm.scheduler import create_scheduler_v2
from timm.scheduler.scheduler import Scheduler
from timm.utils import ModelEmaV3
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)

from hetdpt.adapters.heads import Classifier
from hetdpt.core.errors import TrainError
from hetdpt.core.modules import memory_advice
from hetdpt.core.randomness import seeded
from hetdpt.training.config import TrainConfig
from hetdpt.training.processes import is_sharded

FORMAT = 1
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)
State = dict[str, Any]
"""Tensors, numbers, strings, lists and dictionaries: what ``torch.load(weights_only=True)`` reads."""


@dataclass(frozen=True)
class Evaluation:
    """How good a model is after an epoch."""

    score: float
    """In percent: an accuracy, or what else its task is measured by."""
    divergence: float | None = None
    """How far its answers are from the teacher's; the best epoch has the least, or the highest score without it."""


Evaluate = Callable[[nn.Module], Evaluation]


class TrainingBatch(Protocol):
    """What one forward pass is given."""

    @property
    def unreadable(self) -> tuple[str, ...]:
        """The files that could not be read for it."""

    def to(self, device: torch.device) -> TrainingBatch:
        """Return the batch on ``device``."""


class Batches(Protocol):
    """The batches of this process, epoch by epoch."""

    def __len__(self) -> int:
        """Return how many an epoch has."""

    def epoch(self, number: int, start: int = 0) -> Iterator[Any]:
        """Yield the batches of an epoch from batch ``start`` on, the same as in the whole epoch."""


class LossFunction(Protocol):
    """The loss of a model on a batch, which training minimises."""

    module: nn.Module
    """What is trained, as accelerate wrapped it."""

    @property
    def student(self) -> nn.Module:
        """The model in it whose weights are kept."""

    def __call__(self, batch: Any) -> Tensor:
        """Return the loss of one batch, a scalar."""

    def close(self) -> None:
        """Leave the student as it was, but for its weights."""


class Keeper(Protocol):
    """Keeps the state of a training, in files or elsewhere."""

    def latest(self) -> State | None:
        """Return the newest undamaged state; None if there is no state yet."""

    def is_due(self) -> bool:
        """Whether enough time has passed since the last state to keep another one."""

    def keep(self, state: State) -> None:
        """Write ``state`` so that it survives a power cut."""


class Companion(Protocol):
    """Something that learns in the same loop as the weights, and may change the model between two updates."""

    @property
    def parameters(self) -> Sequence[nn.Parameter]:
        """Its parameters, which take plain steps, p -= d loss / d p, with any optimizer; no decay, no clipping."""

    def before_update(self, update: int, updates: int) -> None:
        """Called in all processes when ``update`` of ``updates`` are done, and once more after the last."""

    def state(self) -> State:
        """Return what it needs to resume, besides its parameters."""

    def restore(self, state: State) -> None:
        """Resume from ``state``."""


@dataclass(frozen=True)
class Epoch:
    """The results of an epoch; number 0 is the model before training."""

    number: int
    epochs: int
    update: int
    """Updates of the weights so far."""
    loss: float | None
    """Mean training loss of the epoch."""
    lr: float
    last: float | None
    """Score of the weights as they are now, in percent."""
    best: float | None
    """Score of the best epoch so far: the one with the least ``divergence``, or with the highest score without it."""
    ema: float | None
    """Score of the moving average of the weights, in percent."""
    is_best: bool
    seconds: float
    """Time spent training in this epoch, without evaluation and restarts."""
    images_per_second: float | None
    unreadable: tuple[str, ...]
    """Files of this epoch that could not be read and were replaced by others."""
    student: nn.Module = field(repr=False, compare=False)
    """The trained model; under FSDP a copy on the CPU of the first process."""
    average: nn.Module | None = field(repr=False, compare=False)
    """The model with the averaged weights."""
    divergence: float | None = None
    """Mean KL divergence of the student's answers from its teacher's on images that were held out, in nats."""
    lr_found: float | None = None
    """Peak learning rate, if it was found and not given."""
    notes: tuple[str, ...] = ()
    """What was found about the learning rate and the number of epochs beforehand, in words."""

    def record(self) -> dict[str, Any]:
        """Return the numbers of this epoch, as JSON takes them."""
        plain = replace(self, student=nn.Identity(), average=None)
        return {key: value for key, value in asdict(plain).items() if key not in ("student", "average")}


@dataclass(frozen=True)
class Progress:
    """The position of a training, passed to a watcher after every update."""

    epoch: int
    epochs: int
    update: int
    updates: int
    """Updates of the whole training."""
    lr: float
    images_per_second: float
    seconds_left: float
    """Seconds until the last update, without evaluations."""
    mean_loss: Callable[[], float]
    """Returns the mean loss of the epoch so far; it waits for the device."""


@dataclass
class _Position:
    """The position of the loop: what a checkpoint needs besides the states of model and optimizer."""

    epoch: int = 0
    """Epochs completed."""
    step: int = 0
    """Updates done in the current epoch; all of them if it is about to be evaluated."""
    loss_sums: list[float] = field(default_factory=list)
    """Sum of the losses of that epoch, of each process."""
    seconds: float = 0.0
    best: float | None = None
    best_divergence: float | None = None
    best_epoch: int = 0
    unreadable: list[str] = field(default_factory=list)


class Trainer:
    """One training: ``epochs()`` runs it, ``state()`` and ``restore()`` save and resume it."""

    def __init__(
        self,
        accelerator: Accelerator,
        objective: LossFunction,
        batches: Batches,
        config: TrainConfig,
        *,
        evaluate: Evaluate | None = None,
        keeper: Keeper | None = None,
        watch: Callable[[Progress], None] | None = None,
        companion: Companion | None = None,
        is_new: bool = False,
    ) -> None:
        """``is_new``: part of the model is untrained, so that its start is the best only if no epoch is as good."""
        self.accelerator, self.objective, self.batches, self.config = accelerator, objective, batches, config
        self.evaluate, self.keeper, self.watch, self.companion = evaluate, keeper, watch, companion
        self._is_new = is_new
        self.steps = len(batches) // config.accumulate
        if not self.steps:
            raise TrainError(
                f"one epoch has {len(batches)} batches but an update takes {config.accumulate}; "
                "lower --accumulate or --batch-size"
            )
        self.student = objective.student
        if is_sharded(accelerator) and config.ema_decay:
            raise TrainError("FSDP does not support a moving average of the weights; set ema_decay to 0")
        if is_sharded(accelerator) and companion is not None:
            raise TrainError("FSDP does not support the importance search; use torchrun, or one device")
        self._plain = deepcopy(self.student).cpu() if is_sharded(accelerator) else None
        self._average = _average(self.student, config) if config.ema_decay else None
        self._prepare()
        self.at = _Position()
        self._lr = self._peak_group_lr()
        """Learning rate of the last update; of the first one until then."""
        self._loss_sum = torch.zeros((), device=accelerator.device)

    def _prepare(self) -> None:
        """Make the optimizer and the schedule, and let accelerate wrap what is trained."""
        config, accelerator = self.config, self.accelerator
        peak = config.peak_lr(accelerator.num_processes)
        if config.optimizer.lower().split("_")[-1] not in list_optimizers():  # as in lookahead_adamw
            raise TrainError(f"timm has no optimizer {config.optimizer!r}; use one that it has, such as adamw or sgd")
        apart = self.companion.parameters if self.companion is not None else ()
        with _left_out(apart):
            optimizer = create_optimizer_v2(
                self.student,
                opt=config.optimizer,
                lr=peak,
                weight_decay=config.weight_decay,
                momentum=config.momentum,
                layer_decay=config.layer_decay,
                param_group_fn=_with_slow_backbone(config) if config.backbone_lr != 1 else None,
            )
        if accelerator.num_processes > 1 and not is_sharded(accelerator) and self._has_idle_parameters():
            accelerator.ddp_handler = DistributedDataParallelKwargs(find_unused_parameters=True)
        self.objective.module, self.optimizer = accelerator.prepare(self.objective.module, optimizer)
        self.schedule = _schedule(self.optimizer.optimizer, config, peak, self.steps)
        self._plain_steps = torch.optim.SGD(apart, lr=1.0) if apart else None
        """The steps of the companion's parameters, which have no state."""

    def _has_idle_parameters(self) -> bool:
        """Whether some parameter does not affect the loss, or may not later; DDP would wait for it forever."""
        if self.companion is not None:
            return True
        with memory_advice(_advice_on_memory(self.config)):
            self._loss(next(self.batches.epoch(0)), 0).backward()
        idle = any(p.requires_grad and p.grad is None for p in self.student.parameters())
        self.student.zero_grad(set_to_none=True)
        return idle

    def epochs(self) -> Generator[Epoch]:
        """Train, and yield after every epoch; the first one yielded, number 0, is the model before training.

        The state is kept before an epoch is evaluated: resuming from it yields that epoch again, also the last.
        """
        if self.keeper is not None and (state := self.keeper.latest()) is not None:
            self.restore(state)
        if len(set(gather_object([self._updates_done]))) > 1:
            raise TrainError("processes read different checkpoints; --out must be on a file system that all can see")
        try:
            if not self._updates_done:
                yield self._report(0)
            while self.at.epoch < self.config.epochs:
                if self.at.step < self.steps:
                    self._run_epoch()
                if self.at.epoch + 1 == self.config.epochs:
                    self._tell_companion()
                yield self._report(self.at.epoch + 1)
                best = {name: getattr(self.at, name) for name in ("best", "best_divergence", "best_epoch")}
                self.at = _Position(epoch=self.at.epoch + 1, **best)
                self._loss_sum.zero_()
        finally:
            self.objective.close()

    def _run_epoch(self) -> None:
        """Do the remaining updates of the current epoch."""
        batches = self.batches.epoch(self.at.epoch, self.at.step * self.config.accumulate)
        begun, first, before = time.perf_counter(), self.at.step, self.at.seconds
        while self.at.step < self.steps:
            self._advance(batches)
            is_due = self.at.step == self.steps or self._is_due()
            self._stop_if_not_finite(is_due)
            self.at.seconds = before + time.perf_counter() - begun
            if self.watch is not None and self.accelerator.is_main_process:
                self.watch(self._progress((time.perf_counter() - begun) / (self.at.step - first)))
            if is_due:
                started = time.perf_counter()
                self._keep()
                begun += time.perf_counter() - started  # writing is not training

    def trial(self) -> Iterator[None]:
        """Do the updates of the first epoch and yield after each; nothing is kept, and the loss may be anything."""
        batches = self.batches.epoch(0)
        for _ in range(self.steps):
            self._advance(batches)
            yield

    def _advance(self, batches: Iterator[Any]) -> None:
        """Do the next update."""
        self._tell_companion()
        with memory_advice(_advice_on_memory(self.config)):
            self.update([next(batches) for _ in range(self.config.accumulate)])
        self.at.step += 1

    def update(self, batches: list[TrainingBatch]) -> None:
        """Change the weights once, by the mean gradient of ``batches``."""
        module, update = self.objective.module, self._updates_done
        module.train()
        for number, batch in enumerate(batches):
            is_last = number == len(batches) - 1
            with nullcontext() if is_last else self.accelerator.no_sync(module):
                loss = self._loss(batch, update * len(batches) + number) / len(batches)
                self.accelerator.backward(loss)
            self._loss_sum += loss.detach()
            self.at.unreadable += batch.unreadable
        if self.config.clip_grad is not None:
            apart = {id(parameter) for parameter in self.companion.parameters} if self.companion is not None else ()
            weights = [parameter for parameter in module.parameters() if id(parameter) not in apart]
            self.accelerator.clip_grad_norm_(weights, self.config.clip_grad)
        self._lr = self._peak_group_lr()
        self._step()
        self.schedule.step_update(update + 1)
        if self._average is not None:
            self._average.update(self.student, step=update + 1)

    def _step(self) -> None:
        """Change the weights and the companion's parameters by their gradients.

        In float16 the loss is scaled, and gradients are scaled back first. The companion takes no step if a gradient of
        its own or of the weights overflows; both lower the scale.
        """
        own, scaler = self._plain_steps, self.accelerator.scaler
        if own is not None and scaler is not None:
            scaler.unscale_(own)  # with the scale of this loss, which a step of the weights may change
        self.optimizer.step()
        if own is not None:
            if not self.optimizer.step_was_skipped and (scaler is None or _has_finite_gradients(own)):
                own.step()
            own.zero_grad()
        self.optimizer.zero_grad()

    def _tell_companion(self) -> None:
        if self.companion is not None:
            self.companion.before_update(self._updates_done, self.config.epochs * self.steps)

    def _loss(self, batch: TrainingBatch, draw: int) -> Tensor:
        device = self.accelerator.device
        with seeded(self.config.seed, self.accelerator.process_index, draw, device=device), self.accelerator.autocast():
            return self.objective(batch.to(device))

    @property
    def _updates_done(self) -> int:
        return self.at.epoch * self.steps + self.at.step

    @property
    def _images_per_update(self) -> int:
        return self.config.images_per_update(self.accelerator.num_processes)

    def _peak_group_lr(self) -> float:
        return max(float(group["lr"]) for group in self.optimizer.param_groups)

    def _stop_if_not_finite(self, is_due: bool) -> None:
        """Raise if the loss is not finite; on a GPU checked only now and then, since checking waits for the device."""
        is_free = self.accelerator.device.type == "cpu"
        if (is_free or is_due or self.at.step % 20 == 0) and not torch.isfinite(self._loss_sum):
            when = f"{'' if is_free else 'or before '}update {self._updates_done}"
            clip = "" if self.config.clip_grad is not None else "--clip-grad 1, "
            raise TrainError(
                f"the loss is not finite at {when} (epoch {self.at.epoch + 1}, learning rate {self._lr:.2e}); "
                f"start again in another directory with a lower --lr, {clip}or --precision float32"
            )

    def _progress(self, seconds_per_update: float) -> Progress:
        updates = self.config.epochs * self.steps
        step = self.at.step
        return Progress(
            epoch=self.at.epoch + 1,
            epochs=self.config.epochs,
            update=self._updates_done,
            updates=updates,
            lr=self._lr,
            images_per_second=self._images_per_update / seconds_per_update,
            seconds_left=(updates - self._updates_done) * seconds_per_update,
            mean_loss=lambda: self._loss_sum.item() / step,
        )

    def _report(self, number: int) -> Epoch:
        """Evaluate, and return the epoch that has just ended."""
        self.objective.module.eval()
        self._share_buffers()
        found = self._evaluation(self.objective.module)
        average = self._evaluation(self._average.module) if self._average is not None else None
        is_best = found is not None and self._is_best(found)
        if found is not None and is_best:
            self.at.best, self.at.best_divergence, self.at.best_epoch = found.score, found.divergence, number
        names = gather_object(self.at.unreadable)
        return Epoch(
            number=number,
            epochs=self.config.epochs,
            update=number * self.steps,
            loss=self._mean_loss() if number else None,
            lr=self._lr,
            last=found.score if found is not None else None,
            divergence=found.divergence if found is not None else None,
            best=self.at.best,
            ema=average.score if average is not None else None,
            is_best=is_best,
            seconds=self.at.seconds,
            images_per_second=self.steps * self._images_per_update / self.at.seconds if number else None,
            unreadable=tuple(sorted(set(names))),
            student=self._gathered_student(),
            average=self._average.module if self._average is not None else None,
        )

    def _is_best(self, found: Evaluation) -> bool:
        """Whether no epoch so far is better than ``found``: of epochs that are equally good, the latest is the best.

        A start that is as good as the trained model stays the best, unless part of the model is new: it needed no
        training.
        """
        if self.at.best is None:
            return True
        last, best = found.score, self.at.best
        if found.divergence is not None and self.at.best_divergence is not None:
            last, best = -found.divergence, -self.at.best_divergence
        return last > best or (last == best and (self._is_new or self.at.best_epoch > 0))

    def _share_buffers(self) -> None:
        """Copy the buffers of the first process, whose model is saved, to all; batch norms keep their means there."""
        if self.accelerator.num_processes > 1 and not is_sharded(self.accelerator):
            broadcast(list(self.student.buffers()))

    def _mean_loss(self) -> float:
        total: Tensor = self.accelerator.reduce(self._loss_sum, reduction="mean")
        return total.item() / self.steps

    def _evaluation(self, model: nn.Module) -> Evaluation | None:
        if self.evaluate is None:
            return None
        if not is_sharded(self.accelerator):
            model = self.accelerator.unwrap_model(model)
        with self.accelerator.autocast():
            return self.evaluate(model)

    def _gathered_student(self) -> nn.Module:
        if self._plain is None:
            return self.student
        weights = get_model_state_dict(self.objective.module, options=WHOLE)
        if weights:  # the first process has them all, the others none
            self._plain.load_state_dict({name.removeprefix("model."): value for name, value in weights.items()})
        return self._plain

    def _is_due(self) -> bool:
        """Whether to keep a state now; the first process decides for all."""
        if self.keeper is None:
            return False
        if self.accelerator.num_processes == 1:
            return self.keeper.is_due()
        if self.at.step % 10:
            return False
        answer = [self.keeper.is_due()]
        return bool(broadcast_object_list(answer)[0])

    def _keep(self) -> None:
        if self.keeper is None:
            return
        state = self.state()
        if self.accelerator.is_main_process:
            self.keeper.keep(state)
        self.accelerator.wait_for_everyone()

    def state(self) -> State:
        """Return everything needed to resume; all processes must call it, the first one gets it."""
        self.at.loss_sums = self.accelerator.gather(self._loss_sum[None]).tolist()
        unreadable = sorted(set(gather_object(self.at.unreadable)))
        if is_sharded(self.accelerator):
            model, optimizer = _gather(self.objective.module, self.optimizer.optimizer)
        else:
            model, optimizer = self.student.state_dict(), self.optimizer.state_dict()
        scaler = self.accelerator.scaler
        return {
            "format": FORMAT,
            "lr": self._lr,
            "model": model,
            "optimizer": optimizer,
            "schedule": self.schedule.state_dict(),
            "ema": self._average.state_dict() if self._average is not None else None,
            "scaler": scaler.state_dict() if scaler is not None else None,
            "companion": self.companion.state() if self.companion is not None else None,
            "position": {**asdict(self.at), "unreadable": unreadable},
        }

    def restore(self, state: State) -> None:
        """Resume from ``state``."""
        if state.get("format") != FORMAT:
            raise TrainError(
                f"expected a checkpoint of format {FORMAT}, got {state.get('format')!r}; start again in a new directory"
            )
        if is_sharded(self.accelerator):
            options = StateDictOptions(full_state_dict=True)
            set_state_dict(
                self.objective.module,
                self.optimizer.optimizer,
                model_state_dict=state["model"],
                optim_state_dict=state["optimizer"],
                options=options,
            )
        else:
            self.student.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        if self._average is not None:
            self._average.load_state_dict(state["ema"])
        if self.accelerator.scaler is not None:
            self.accelerator.scaler.load_state_dict(state["scaler"])
        if self.companion is not None:
            self.companion.restore(state["companion"])
        self.at = _Position(**state["position"])
        self._lr = state["lr"]
        self._loss_sum.fill_(self.at.loss_sums[self.accelerator.process_index])


@contextmanager
def _left_out(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Keep ``parameters`` out of an optimizer that is created in this context."""
    for parameter in parameters:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in parameters:
            parameter.requires_grad_(True)


def _has_finite_gradients(optimizer: torch.optim.Optimizer) -> bool:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return all(bool(p.grad.isfinite().all()) for p in parameters if p.grad is not None)


def _with_slow_backbone(config: TrainConfig) -> Callable[[nn.Module], list[dict[str, Any]]]:
    """Return a function that groups a model's parameters, those of its backbone with a learning rate of their own.

    The pyramid on a plain ViT is part of the backbone.
    """

    def groups(model: nn.Module) -> list[dict[str, Any]]:
        exempt = model.no_weight_decay() if hasattr(model, "no_weight_decay") else ()  # type: ignore[operator]
        plain = param_groups_weight_decay(model, config.weight_decay, no_weight_decay_list=exempt)
        backbone = {id(p) for name, p in model.named_parameters() if name.startswith("backbone.")}
        scales = {True: config.backbone_lr, False: 1.0}
        parts = [
            {**group, "params": [p for p in group["params"] if (id(p) in backbone) is is_in], "lr_scale": scale}
            for group in plain
            for is_in, scale in scales.items()
        ]
        return [part for part in parts if part["params"]]

    return groups


def _average(student: nn.Module, config: TrainConfig) -> ModelEmaV3:
    """Return a copy of ``student`` that follows the mean of its weights."""
    average = ModelEmaV3(student, config.ema_decay, use_warmup=config.ema_warmup)
    Classifier(average.module).set_distilled_training(False)
    return average


def _gather(module: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[State, State]:
    """Return the weights and the optimizer's state of a sharded model, whole, to the first process."""
    assert optimizer.state, "before the first update, torch would create a state by an update of its own"
    model, moments = get_state_dict(module, optimizer, options=WHOLE)
    return dict(model), dict(moments)


def _schedule(optimizer: torch.optim.Optimizer, config: TrainConfig, peak: float, steps: int) -> Scheduler:
    """Return timm's schedule, one step per update; a constant learning rate is one whose steps divide by 1."""
    rates = {"poly": 1.0, "constant": 1.0}  # of ``poly``, the power
    warmup = config.warmup_updates(steps) / steps
    schedule: Scheduler
    schedule, _ = create_scheduler_v2(
        optimizer,
        sched="step" if config.schedule == "constant" else config.schedule,
        num_epochs=config.epochs,
        min_lr=peak * config.final_lr,
        warmup_lr=peak / 100,
        warmup_epochs=warmup,  # type: ignore[arg-type]  # parts of epochs are as good
        decay_epochs=config.decay_epochs,  # type: ignore[arg-type]
        decay_rate=rates.get(config.schedule, 0.1),
        step_on_epochs=False,
        updates_per_epoch=steps,
    )
    return schedule


def _advice_on_memory(config: TrainConfig) -> str:
    """Return the advice for a batch that does not fit in memory: a smaller one, accumulated to the same size."""
    size, step = config.batch_size, 2 if config.mixes else 1
    parts = [part for part in range(step, size // 2 + 1, step) if size % part == 0]
    sentence = f"a batch of {size} images does not fit in memory"
    if not parts:
        return f"{sentence}; use a smaller model or smaller images"
    accumulate = config.accumulate * size // parts[-1]
    return f"{sentence}; try --batch-size {parts[-1]} --accumulate {accumulate}, which trains the same way"
