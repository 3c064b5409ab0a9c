"""The two observations of the paper on heterogeneity (its section 2), measured on any model. No files here.

Gradient disparity: how large the gradients are that reach the importance of each layer while the weights train.
Recovery asymmetry: accuracy right after a layer alone is removed, and after each epoch of fine-tuning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass
from statistics import fmean, median
from typing import Any

import torch
from pydantic import TypeAdapter
from torch import Tensor, nn

from hetdpt.core.plan import KINDS, Kind, Plan, Site
from hetdpt.data.sources import Data
from hetdpt.selection.predictor.samples import fine_tune
from hetdpt.surgery.calibrate import calibrate_, gate_fitted_
from hetdpt.surgery.gate import gates_by_site
from hetdpt.surgery.record import Removal
from hetdpt.surgery.remove import prune_
from hetdpt.training.recover import RecoverConfig, recover
from hetdpt.training.trainer import Keeper, Progress, State


@dataclass(frozen=True)
class Gradient:
    """What reached the importance of one layer: a number for each epoch, the mean over its updates.

    g = <d loss / d y, f(x) - r(x)> for a layer f and its replacement r (paper, Eq. 6).
    """

    site: Site
    magnitudes: tuple[float, ...]
    """Of |g|."""
    means: tuple[float, ...]
    """Of g itself; below 0 where the layer lowers the loss."""

    @property
    def magnitude(self) -> float:
        """Of |g|, over all updates."""
        return fmean(self.magnitudes)

    @property
    def mean(self) -> float:
        """Of g, over all updates."""
        return fmean(self.means)


@dataclass(frozen=True)
class Disparity:
    """The gradients of all layers under one removal."""

    removal: Removal
    layers: tuple[Gradient, ...]
    updates: int
    """Of the weights, in each epoch."""
    batch: int
    """Images of each update; the more there are, the smaller what is left of their noise."""

    @property
    def epochs(self) -> int:
        return len(self.layers[0].magnitudes) if self.layers else 0

    def magnitude(self, kind: Kind, epoch: int | None = None) -> float | None:
        """Return the median over blocks of the mean |g|, of one epoch (the first is 0) or of all; None without any."""
        of = [layer for layer in self.layers if layer.site.kind == kind]
        return median(row.magnitude if epoch is None else row.magnitudes[epoch] for row in of) if of else None

    def ratio(self, epoch: int | None = None) -> float | None:
        """Return how many times larger gradients of activations are than those of attention; None without either."""
        attention, activation = (self.magnitude(kind, epoch) for kind in KINDS)
        return activation / attention if attention and activation is not None else None


@dataclass(frozen=True)
class Asymmetry:
    """The accuracy of a model that has lost one layer."""

    site: Site
    removal: Removal
    accuracies: tuple[float, ...]
    """In percent: right after the removal, then after each epoch of fine-tuning."""


@dataclass(frozen=True)
class Observations:
    """All that was seen of one model."""

    dense: float | None
    """Its accuracy in percent; None where no layer is removed."""
    disparities: tuple[Disparity, ...]
    asymmetries: tuple[Asymmetry, ...]

    @property
    def removals(self) -> tuple[Removal, ...]:
        found = [row.removal for row in self.disparities] + [row.removal for row in self.asymmetries]
        return tuple(dict.fromkeys(found))

    @property
    def epochs(self) -> int:
        """Of fine-tuning, where there was any."""
        return max((len(row.accuracies) - 1 for row in self.asymmetries), default=0)

    def disparity(self, removal: Removal) -> Disparity | None:
        return next((row for row in self.disparities if row.removal == removal), None)

    def of(self, removal: Removal, kind: Kind) -> tuple[Asymmetry, ...]:
        """Return the layers of one kind, by block."""
        rows = [row for row in self.asymmetries if row.removal == removal and row.site.kind == kind]
        return tuple(sorted(rows, key=lambda row: row.site.block))

    def medians(self, removal: Removal, kind: Kind) -> tuple[float, ...]:
        """Return the median over blocks of the accuracies: right after the removal, then after each epoch."""
        return tuple(map(median, zip(*(row.accuracies for row in self.of(removal, kind)), strict=True)))

    def drops(self, removal: Removal, kind: Kind) -> tuple[float, ...]:
        """Return how far the medians are below the dense accuracy, in points; () where that is not known."""
        return () if self.dense is None else tuple(self.dense - each for each in self.medians(removal, kind))

    def summary(self, removal: Removal) -> dict[str, Any]:
        """Return the figures of both observations under one removal, as plain JSON."""
        found = self.disparity(removal)
        return {
            "removal": removal,
            "gradients": {kind: found.magnitude(kind) if found else None for kind in KINDS},
            "ratio": found.ratio() if found else None,
            "ratios": [found.ratio(epoch) for epoch in range(found.epochs)] if found else [],
            "drops": {kind: self.drops(removal, kind) for kind in KINDS},
        }

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain JSON, with a summary for each removal."""
        return {**asdict(self), "summary": [self.summary(removal) for removal in self.removals]}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Observations:
        """Return what ``to_dict`` made ``values`` of."""
        return TypeAdapter(cls).validate_python({key: values[key] for key in values if key != "summary"})


class Recorder:
    """Goes with a training and takes down the gradients that reach some importances.

    An importance takes plain steps of rate 1, so one that was 0 before an update is -g after it. An open gate does not
    look at its importance: that each is set back to 0 changes nothing else.
    """

    def __init__(self, importances: Sequence[nn.Parameter], epochs: int) -> None:
        self.parameters = importances
        self.sums = torch.zeros(epochs, 2, len(importances), dtype=torch.float64)
        """Of |g| and of g."""
        self.seen = 0
        """Updates that are in the sums."""

    @torch.no_grad()
    def before_update(self, update: int, updates: int) -> None:
        """Take down what the update before came to; the last one says so with ``update == updates``."""
        if update > self.seen:
            gradients = -torch.stack([parameter.detach() for parameter in self.parameters]).cpu().double()
            self.sums[self.seen * len(self.sums) // updates] += torch.stack([gradients.abs(), gradients])
            self.seen += 1
            assert self.seen == update, "an update went by unseen"
        for parameter in self.parameters:
            parameter.zero_()

    def state(self) -> State:
        return {"sums": self.sums, "seen": self.seen}

    def restore(self, state: State) -> None:
        self.sums, self.seen = state["sums"], state["seen"]


def gradient_disparity(
    model: nn.Module,
    data: Data,
    config: RecoverConfig,
    removal: Removal,
    images: Iterable[Tensor],
    *,
    device: str | None = None,
    workers: int = 0,
    keeper: Keeper | None = None,
    watch: Callable[[Progress], None] | None = None,
) -> Disparity:
    """Return how large the gradients of the importances are in a training of all weights; ``model`` stays as it is.

    The loss is that of the labels alone: of a teacher that the student equals there is no gradient. Replacements that
    are fitted are so on ``images``.
    """
    config = config.with_settings({"train_merged": False, "training.ema_decay": 0.0})  # neither is of use here
    student = gate_fitted_(deepcopy(model), Plan(removal=removal), images)
    gates = gates_by_site(student)
    recorder = Recorder([gate.importance for gate in gates.values()], config.training.epochs)
    for _ in recover(
        student,
        None,
        data,
        config,
        device=device,
        workers=workers,
        keeper=keeper,
        watch=watch,
        companion=recorder,
        evaluates=False,
    ):
        pass
    updates = recorder.seen // config.training.epochs
    columns = (recorder.sums / updates).permute(2, 1, 0).tolist()  # (sites, 2, epochs)
    layers = [Gradient(site, *map(tuple, column)) for site, column in zip(gates, columns, strict=True)]
    return Disparity(removal, tuple(layers), updates, config.training.images_per_update())


def accuracies_without(
    model: nn.Module,
    site: Site,
    data: Data,
    config: RecoverConfig,
    removal: Removal,
    images: Iterable[Tensor],
    *,
    device: str | None = None,
    workers: int = 0,
    keeper: Keeper | None = None,
    watch: Callable[[Progress], None] | None = None,
) -> Iterator[tuple[int, float]]:
    """Yield (epoch, accuracy in percent) of a copy of ``model`` without one layer, epoch 0 right after the removal.

    ``model`` is the teacher of the epochs that follow. Replacements that are fitted are so on ``images``. A ``keeper``
    that has a state goes on from there, and epochs that were yielded before are not yielded again.
    """
    plan = Plan(**{site.kind: (site.block,)}, removal=removal)  # type: ignore[arg-type]
    student = deepcopy(model)
    student = calibrate_(student, plan, images) if plan.fitted else prune_(student, plan)
    yield from fine_tune(student, model, data, config, device=device, workers=workers, keeper=keeper, watch=watch)
