"""The two observations of the paper on heterogeneity (its section 2), measured on any model. No files here.

Gradient disparity: the size of the gradient of the importance of each layer while the weights are trained.
Recovery asymmetry: accuracy right after a single layer is removed, and after each epoch of fine-tuning.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from hetdpt.core.plan import Plan, Removal, Site
from hetdpt.data.sources import Data
from hetdpt.results import Disparity, Gradient
from hetdpt.selection.predictor.samples import fine_tune
from hetdpt.surgery.calibrate import calibrate_, gate_fitted_
from hetdpt.surgery.gate import gates_by_site
from hetdpt.surgery.remove import prune_
from hetdpt.training.recover import RecoverConfig, recover
from hetdpt.training.trainer import State


class Recorder:
    """A companion of a training that records the gradients of some importances.

    An importance takes plain steps of rate 1, so one that was 0 before an update is -g after it. An open gate does not
    read its importance, so setting each back to 0 changes nothing else.
    """

    def __init__(self, importances: Sequence[nn.Parameter], epochs: int) -> None:
        self.parameters = importances
        self.sums = torch.zeros(epochs, 2, len(importances), dtype=torch.float64)
        """Of |g| and of g."""
        self.seen = 0
        """Updates in the sums."""

    @torch.no_grad()
    def before_update(self, update: int, updates: int) -> None:
        """Record the gradients of the update before; after the last one ``update == updates``."""
        if update > self.seen:
            gradients = -torch.stack([parameter.detach() for parameter in self.parameters]).cpu().double()
            self.sums[self.seen * len(self.sums) // updates] += torch.stack([gradients.abs(), gradients])
            self.seen += 1
            assert self.seen == update, "an update was missed"
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
    **options: Any,
) -> Disparity:
    """Return the gradients of the importances in a training of all weights; ``model`` is not changed.

    The loss is that of the labels alone: a teacher that the student equals gives no gradient. Replacements are fitted
    on ``images``. ``options`` are those of ``recover``: device, workers, keeper, watch.
    """
    config = config.with_settings({"train_merged": False, "training.ema_decay": 0.0})  # neither is used here
    student = gate_fitted_(deepcopy(model), Plan(removal=removal), images)
    gates = gates_by_site(student)
    recorder = Recorder([gate.importance for gate in gates.values()], config.training.epochs)
    for _ in recover(student, None, data, config, companion=recorder, evaluates=False, **options):
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
    **options: Any,
) -> Iterator[tuple[int, float]]:
    """Yield (epoch, accuracy in percent) of a copy of ``model`` without one layer, epoch 0 right after the removal.

    ``model`` is the teacher of the epochs that follow. Replacements are fitted on ``images``. ``options`` are those of
    ``fine_tune``.
    """
    plan = Plan(**{site.kind: (site.block,)}, removal=removal)  # type: ignore[arg-type]
    student = deepcopy(model)
    student = calibrate_(student, plan, images) if plan.needs_images else prune_(student, plan)
    yield from fine_tune(student, model, data, config, **options)
