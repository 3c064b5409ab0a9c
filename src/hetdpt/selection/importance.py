"""The importance search (paper, stage 1 step 2): importances learned with the weights decide which layers go.

Every candidate has a gate. Its importance starts at 0 and follows the gradient of the mask, straight through (paper,
Eq. 6): importance -= d loss / d m, which is what the layer is worth to the loss as far as one gradient tells. A
schedule takes layers away one at a time, each the least important of its own kind, never back.

The gradient at m = 1 tells what a little less of a layer would cost, not what its removal would; where the weights are
at a minimum of the loss it is 0, since a layer's size is one of the weights. So, unless asked not to, the search tries:
for every image one candidate is closed for once, all in turn, and the gradient at m = 0 counts, that at m = 1 does not.
Where the loss is quadratic in m and least at m = 1, half of it is loss(m = 0) - loss(m = 1). A search of few images
would take its first layers before it has tried them: it waits until each was tried on some images, and then goes
through the schedule in what is left of its updates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

import numpy as np
import torch
from torch import nn

from hetdpt.errors import PlanError
from hetdpt.plan import Kind, Site
from hetdpt.selection.schedule import due
from hetdpt.surgery import gates_by_site
from hetdpt.training.trainer import State

ENOUGH = 16  # images on which each candidate is tried before the first layer goes


@dataclass(frozen=True)
class Picked:
    """A layer that goes."""

    site: Site
    score: float
    """By which it was chosen: the lower the sooner, comparable within one method and kind."""


class Search:
    """A companion of the training loop that learns importances and closes gates.

    ``kinds`` says of which kind each layer is that goes, None for any. ``refit`` is called after each removal: the
    replacements of those that are left are of a model that has changed.
    """

    def __init__(
        self,
        model: nn.Module,
        kinds: Sequence[Kind | None],
        *,
        explores: bool,
        seed: int,
        refit: Callable[[], None] | None = None,
        watch: Callable[[Picked], None] | None = None,
    ) -> None:
        self.gates, self.kinds, self.explores, self.seed = gates_by_site(model), kinds, explores, seed
        self.refit, self.watch = refit, watch
        self.gone: list[Picked] = []
        self.tried = dict.fromkeys(self.gates, 0.0)
        """Batches for whose images a candidate was closed, in parts."""
        self._draws = (0, 0)  # updates done, and batches of the next one seen
        self._images, self._begun = 0, None if explores else 0  # that were tried on; the update from which layers go
        if explores:
            model.register_forward_pre_hook(self._try)

    @property
    def parameters(self) -> Sequence[nn.Parameter]:
        return [gate.importance for gate in self.gates.values()]

    @property
    def importances(self) -> dict[Site, float]:
        """Of the candidates that are left; where they are tried, in proportion to the images they were tried on."""
        left = {site: gate.importance.item() for site, gate in self.gates.items() if gate.is_open}
        if not self.explores:
            return left
        return {site: value / self.tried[site] if self.tried[site] else inf for site, value in left.items()}

    def before_update(self, update: int, updates: int) -> None:
        """Take the layers that are due."""
        if updates < len(self.kinds):
            raise PlanError(
                f"the search has {updates} updates to choose {len(self.kinds)} layers in; give it more images or "
                "epochs, or smaller batches"
            )
        if self._begun is None and self._knows_enough(update, updates):
            self._begun = update
        if self._begun is not None:
            while len(self.gone) < due(update - self._begun, updates - self._begun, len(self.kinds)):
                self._remove(self.kinds[len(self.gone)])
        self._draws = (update, 0)

    def _knows_enough(self, update: int, updates: int) -> bool:
        """Whether layers may go: each was tried, or half of the search is over, or updates are left for no more."""
        is_late = updates - update <= max(updates // 2, len(self.kinds))
        return is_late or self._images >= ENOUGH * len(self.gates)

    def _remove(self, kind: Kind | None) -> None:
        importances = {site: value for site, value in self.importances.items() if kind in (None, site.kind)}
        site = min(importances, key=importances.__getitem__)  # on a tie the one that runs first
        self.gates[site].is_open = False
        self.gone.append(Picked(site, importances[site]))
        if self.refit is not None and len(self.gone) < len(self.kinds):
            self.refit()
        if self.watch is not None:
            self.watch(self.gone[-1])

    def _try(self, model: nn.Module, args: tuple[Any, ...]) -> None:
        """Close one candidate for each image of a batch, of the kinds that are still to lose some, all in turn."""
        if not model.training:
            return
        images, to_go = len(args[0]), self.kinds[len(self.gone) :]
        self._images += images
        left = [site for site, gate in self.gates.items() if gate.is_open and (site.kind in to_go or None in to_go)]
        order = np.random.default_rng((self.seed, *self._draws)).permutation(len(left))
        turns = torch.arange(images) % max(len(left), 1)
        for gate in self.gates.values():
            gate.trial = None
        for place, site in zip(order, left, strict=True):
            self.gates[site].trial = is_tried = turns == int(place)
            self.tried[site] += is_tried.sum().item() / images
        self._draws = (self._draws[0], self._draws[1] + 1)

    def state(self) -> State:
        places = {site: number for number, site in enumerate(self.gates)}
        gone = [[places[picked.site], picked.score] for picked in self.gone]
        return {"gone": gone, "tried": list(self.tried.values()), "images": self._images, "begun": self._begun}

    def restore(self, state: State) -> None:
        sites = list(self.gates)
        self.gone = [Picked(sites[number], score) for number, score in state["gone"]]
        self.tried = dict(zip(sites, state["tried"], strict=True))
        self._images, self._begun = state["images"], state["begun"]
        for picked in self.gone:
            self.gates[picked.site].is_open = False
            if self.watch is not None:
                self.watch(picked)
