"""The learning rate for the model at hand: of a few that are tried, the one that is best on held-out images."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from hetdpt.core.errors import TrainError
from hetdpt.data.sources import Source
from hetdpt.data.streams import Stream
from hetdpt.data.subset import Subset, balanced_order

RATES = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3)
MIDDLE = 2  # the one that is tried first
MOST = 4  # trials at most
UPDATES = 24  # of each trial
NEAR = 1.1  # times the least loss is as good: a training is longer than a trial, and likes larger rates
HELD_OUT, IMAGES = 10, 200  # one of so many training images is held out, but not more than so many


@dataclass(frozen=True)
class RateProbe:
    """What came of the rates that were tried."""

    losses: dict[float, float]
    """The loss on held-out images of each rate, in the order in which they were tried."""
    start: float
    """The loss before any update."""

    @property
    def best(self) -> float:
        """The largest rate whose loss is near the least."""
        least = min(self.losses.values())
        if not math.isfinite(least):
            tried = ", ".join(f"{rate:g}" for rate in self.losses)
            raise TrainError(
                f"no learning rate was found: the loss is not finite with any of {tried}; check the weights, or give "
                "--lr and --clip-grad 1"
            )
        return max(rate for rate, loss in self.losses.items() if loss <= NEAR * least)

    def __str__(self) -> str:
        tried = ", ".join(f"{rate:g}: {loss:.4g}" for rate, loss in sorted(self.losses.items()))
        return f"learning rate {self.best:g}, by the loss on held-out images ({self.start:.4g} before; {tried})"


def probe_rates(loss_of: Callable[[float], float], start: float) -> RateProbe:
    """Return the losses of a few rates, up to ``MOST``, around the best of ``RATES``; ``start`` is that of no update.

    From the middle on, larger rates are tried as long as they are better, and if the first is not, smaller ones. If the
    middle is not better than no update at all, only smaller ones are tried.

    >>> probe_rates(lambda rate: abs(rate - 3e-5), start=1.0).best
    3e-05
    """
    losses = {MIDDLE: loss_of(RATES[MIDDLE])}
    for direction in (1, -1) if losses[MIDDLE] < start else (-1,):
        best = MIDDLE
        while 0 <= (tried := best + direction) < len(RATES):
            losses[tried] = loss_of(RATES[tried])
            if not (losses[tried] < losses[best] or math.isinf(losses[best])):
                break
            best = tried
        if best != MIDDLE:
            break
    return RateProbe({RATES[number]: loss for number, loss in losses.items()}, start)


def split_for_probe(images: Source | Stream, seed: int, least: int) -> tuple[Source, Source]:
    """Return the images that rates are tried on, and others that they are judged by: the last tenth, at most 200.

    ``least`` images of an update are left to train on.
    """
    if isinstance(images, Stream):
        raise TrainError(
            "a learning rate is found on held-out training images, which a stream of shards cannot provide; give --lr"
        )
    held = min(max(len(images) // HELD_OUT, 1), IMAGES, len(images) - least)
    if held < 1:
        raise TrainError(
            f"{len(images)} images are too few to find a learning rate with {least} in an update; give --lr, or lower "
            "--batch-size"
        )
    order = balanced_order(images.targets(), seed)
    return Subset(images, tuple(sorted(order[:-held]))), Subset(images, tuple(sorted(order[-held:])))
