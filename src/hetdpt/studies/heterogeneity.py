"""The two observations of the paper on heterogeneity (its section 2), measured on any model. No files here.

Gradient disparity: how large the gradients are that reach the importance of each layer while the weights train.
Recovery asymmetry: accuracy right after a layer alone is removed, and after each epoch of fine-tuning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import deepcopy

import torch
from torch import Tensor, nn

from hetdpt.core.plan import Plan, Site
from hetdpt.data.sources import Data
from hetdpt.results import Disparity, Gradient
from hetdpt.selection.predictor.samples import fine_tune
from hetdpt.surgery.calibrate import calibrate_, gate_fitted_
from hetdpt.surgery.gate import gates_by_site
from hetdpt.surgery.record import Removal
from hetdpt.surgery.remove import prune_
from hetdpt.training.recover import RecoverConfig, recover
from hetdpt.training.trainer import Keeper, Progress, State


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
