"""What the settings of a training leave open: how many epochs fit into the time given, and the learning rate.

It is decided once, before the first update, and kept in the state, so that a resumed training has the same schedule.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from typing import Any

from hetdpt.core.errors import TrainError
from hetdpt.core.format import counted, duration
from hetdpt.core.processes import of_first, process_count
from hetdpt.core.progress import StageProgress
from hetdpt.data.batches import EvaluationBatches
from hetdpt.data.sources import Source
from hetdpt.data.streams import Stream
from hetdpt.data.subset import Subset, balanced_order
from hetdpt.training.config import TrainConfig
from hetdpt.training.rate import MOST, RATES, UPDATES, RateProbe, probe_rates, split_for_probe
from hetdpt.training.trainer import Keeper, State
from hetdpt.training.trial import Attempt

DECIDED = "decided"
PROBE = 0.25  # of the training, at most
SPARE = 0.95  # of the minutes are planned; the rest is for writing checkpoints and models
FEWEST = 4  # updates of a probe


@dataclass(frozen=True)
class Decision:
    """What was decided about a training."""

    epochs: int
    lr: float | None = None
    """Peak learning rate that a probe found; None if it was given."""
    images: int | None = None
    """Training images that there is time for, if not even one epoch of all fits."""
    notes: tuple[str, ...] = ()
    """What was found, in words."""

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that it fixes, by name."""
        found = {} if self.lr is None else {"training.lr": self.lr, "training.lr_batch": None}
        return {"training.epochs": self.epochs, "training.minutes": None, **found}


@dataclass(frozen=True)
class OpenTraining:
    """A training that something is to be decided about."""

    training: TrainConfig
    images: Source | Stream
    """All training images."""
    attempt: Callable[..., Attempt]
    """Gives a training of a copy of the student with these ``images`` and ``training``, of so many ``updates``."""
    evaluation: Callable[[Source], EvaluationBatches]
    """Gives the evaluation views of images."""
    evaluating: Callable[[], float]
    """Gives the seconds of the evaluation after an epoch, tried on a part of it."""
    beforehand: Callable[[], float]
    """Gives the seconds that the teacher takes before the first epoch."""
    held: Source | None = None
    """Training images that are held out anyway; if there are none, some are held out for the probe."""
    progress: StageProgress | None = None

    @property
    def steps(self) -> int:
        """Updates of an epoch."""
        return max(len(self.images) // self.training.images_per_update(process_count()), 1)

    def decide(self) -> Decision:
        """Return what is best for this student and device; all processes get what the first finds."""
        begun, notes = time.perf_counter(), list[str]()
        minutes, update = self.training.minutes, 0.0
        if minutes is not None:
            self._tell("timing an update")
            update = self._seconds()
        found = self._probe(update) if self.training.lr is None else None
        if found is not None:
            notes.append(str(found))
        epochs, images = self.training.epochs, None
        if minutes is not None:
            evaluation, before = of_first(self.evaluating()), of_first(self.beforehand())
            left = of_first(SPARE * 60 * minutes - (time.perf_counter() - begun)) - before
            epochs, updates = fitting(left, steps=self.steps, update=update, evaluation=evaluation)
            length = f"{counted(epochs, 'epoch')} of {counted(updates, 'update')}"
            notes.append(f"{length} in {duration(60 * minutes)}, at {update:.3g} s per update")
            if updates < self.steps:
                images = updates * self.training.images_per_update(process_count())
                notes.append(
                    f"the time is not enough for all {len(self.images)} images; {images} of them are used once"
                )
        return Decision(epochs, found.best if found else None, images, tuple(notes))

    def _seconds(self) -> float:
        with closing(self.attempt(self.images, replace(self.training, lr=RATES[0], minutes=None))) as attempt:
            return attempt.seconds()

    def _probe(self, update: float) -> RateProbe:
        """Return what came of the rates that were tried; ``update`` is the time of one, if known."""
        least = self.training.images_per_update(process_count())
        images, held = self.images, self.held
        if held is None:
            images, held = split_for_probe(images, self.training.seed, least)
        batches, updates = self.evaluation(held), probe_updates(self.training, self.steps, update)
        text, done = f"finding the learning rate, up to {MOST * updates} updates", 0
        self._tell(text, 0, MOST * updates)

        def attempt(rate: float) -> Attempt:
            alone: dict[str, Any] = {"epochs": 1, "minutes": None, "warmup_epochs": None, "ema_decay": 0.0}
            settings = replace(self.training, lr=rate, lr_batch=None, **alone)
            return self.attempt(images, settings, updates=updates)

        def loss_of(rate: float) -> float:
            nonlocal done
            with closing(attempt(rate)) as tried:
                for _ in tried.updates():
                    done += 1
                    self._tell(text, done, MOST * updates)
                return tried.loss(batches)

        with closing(attempt(RATES[0])) as untrained:
            start = untrained.loss(batches)
        return probe_rates(loss_of, start)

    def _tell(self, text: str, done: int = 0, total: int = 0) -> None:
        if self.progress is not None:
            self.progress(text, done, total)


def probe_updates(training: TrainConfig, steps: int, update: float) -> int:
    """Return the updates for each learning rate that is tried: all of them take a quarter of the training at most.

    ``update`` is the time of one in seconds, for a training that is given in minutes.

    >>> probe_updates(TrainConfig(epochs=5), 100, 0.5), probe_updates(TrainConfig(minutes=1), 100, 0.5)
    (24, 7)
    """
    whole = training.epochs * steps if training.minutes is None else 60 * training.minutes / update
    return max(min(UPDATES, int(PROBE * whole / MOST)), FEWEST)


def fitting(seconds: float, *, steps: int, update: float, evaluation: float) -> tuple[int, int]:
    """Return how many epochs fit into ``seconds``, and the updates of each: fewer than ``steps`` if none fits whole.

    An epoch is ``steps`` updates and an evaluation; one more evaluation comes before all.

    >>> fitting(100.0, steps=10, update=1.0, evaluation=2.0), fitting(10.0, steps=10, update=1.0, evaluation=2.0)
    ((8, 10), (1, 6))
    """
    left = seconds - evaluation
    epochs = int(left // (steps * update + evaluation))
    return (epochs, steps) if epochs >= 1 else (1, min(max(int((left - evaluation) // update), 1), steps))


def first_images(images: Source | Stream, count: int, seed: int) -> Source | Stream:
    """Return ``count`` of the images, with the classes in proportion; all of a stream, which has no parts."""
    if isinstance(images, Stream) or count >= len(images):
        return images
    return Subset(images, tuple(sorted(balanced_order(images.targets(), seed)[:count])))


class DecidedKeeper:
    """A keeper whose states say what was decided; it reads the newest one once."""

    def __init__(self, keeper: Keeper | None) -> None:
        self._keeper = keeper
        self._latest = keeper.latest() if keeper is not None else None
        self.decision: Decision | None = None
        if self._latest is not None:
            if (kept := self._latest.get(DECIDED)) is None:
                raise TrainError(
                    "the checkpoint is of a training whose epochs and learning rate were given; give them again, or "
                    "another directory"
                )
            self.decision = Decision(**{**kept, "notes": tuple(kept["notes"])})

    def latest(self) -> State | None:
        """Return the state that was the newest in the beginning."""
        state, self._latest = self._latest, None
        return state

    def is_due(self) -> bool:
        """Whether another state is to be kept now."""
        return self._keeper is not None and self._keeper.is_due()

    def keep(self, state: State) -> None:
        """Keep ``state``, with what was decided."""
        assert self.decision is not None
        if self._keeper is not None:
            self._keeper.keep({**state, DECIDED: {**asdict(self.decision), "notes": list(self.decision.notes)}})
