"""The importance search (paper, stage 1 step 2): importances learned with the weights decide which layers to remove.

Every candidate has a gate. Its importance starts at 0, or at a prior, and follows the gradient of the mask, straight
through (paper, Eq. 6): importance -= d loss / d m, the layer's value for the loss as far as one gradient shows it. A
schedule removes layers one at a time, each the least important of its kind; a removed layer never returns.

The gradient at m = 1 shows the cost of scaling a layer down a little, not of removing it; at a minimum of the loss it
is 0, since the scale of a layer is part of the weights. So, with ``explores``, the search tries removals: for every
image one candidate is closed, all in turn, and the gradient at m = 0 counts, that at m = 1 does not. Where the loss is
quadratic in m with its minimum at m = 1, half of it is loss(m = 0) - loss(m = 1). A search on few images tries each
candidate only a few times. A prior, the measured damage of removing each candidate on some images, counts as trials on
as many images: it decides a short search, and fades in a long one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

import numpy as np
import torch
from torch import nn

from hetdpt.core.errors import PlanError
from hetdpt.core.plan import Kind, Move, Site
from hetdpt.selection.schedule import due
from hetdpt.surgery.gate import gates_by_site
from hetdpt.training.trainer import State


@dataclass(frozen=True)
class Picked:
    """A layer to remove, or a longer tail."""

    move: Move
    score: float
    """The lowest is removed first; comparable within one method and kind."""

    @property
    def site(self) -> Site:
        """The layer, where that is what was picked."""
        assert isinstance(self.move, Site)
        return self.move


@dataclass(frozen=True)
class Prior:
    """The damage of removing each candidate alone, measured before the search."""

    damages: Mapping[Site, float]
    """Mean over images of the KL divergence in nats, the loss of a search that is distilled from the dense model."""
    updates: float
    """How many updates of the search have as many images; each candidate counts as tried on all of them."""


class ImportanceSearch:
    """A companion of the training loop that learns importances and closes gates.

    ``kinds`` are the kinds of the layers to remove in order, None for any. An update has ``accumulate`` batches.
    ``refit`` is called after each removal, since the other replacements were fitted on a model that has changed.
    """

    def __init__(
        self,
        model: nn.Module,
        kinds: Sequence[Kind | None],
        *,
        explores: bool,
        seed: int,
        prior: Prior | None = None,
        accumulate: int = 1,
        refit: Callable[[], None] | None = None,
        watch: Callable[[Picked], None] | None = None,
    ) -> None:
        self.gates, self.kinds, self.explores, self.seed = gates_by_site(model), kinds, explores, seed
        self.accumulate, self.refit, self.watch = accumulate, refit, watch
        self.removed: list[Picked] = []
        self.tried = dict.fromkeys(self.gates, 0.0)
        """For how many updates' images each candidate was closed; fractions count."""
        self._draws = (0, 0)  # updates done, and batches of the next one seen
        if prior:
            self._begin_with(prior)
        if explores:
            model.register_forward_pre_hook(self._try)

    @property
    def parameters(self) -> Sequence[nn.Parameter]:
        return [gate.importance for gate in self.gates.values()]

    @property
    def importances(self) -> dict[Site, float]:
        """Importances of the remaining candidates; with ``explores``, per update they were tried on."""
        left = {site: gate.importance.item() for site, gate in self.gates.items() if gate.is_open}
        if not self.explores:
            return left
        return {site: value / self.tried[site] if self.tried[site] else inf for site, value in left.items()}

    def before_update(self, update: int, updates: int) -> None:
        """Remove the layers that are due."""
        if updates < len(self.kinds):
            raise PlanError(
                f"the search has {updates} updates, but needs one for each of the {len(self.kinds)} layers to remove; "
                "use more images or epochs, or smaller batches"
            )
        while len(self.removed) < due(update, updates, len(self.kinds)):
            self._remove(self.kinds[len(self.removed)])
        self._draws = (update, 0)

    def _begin_with(self, prior: Prior) -> None:
        """Set importances to what trials would have made them."""
        for site, gate in self.gates.items():
            self.tried[site] = prior.updates
            gate.importance.data.fill_(2 * prior.damages[site] * prior.updates)

    def _remove(self, kind: Kind | None) -> None:
        importances = {site: value for site, value in self.importances.items() if kind in (None, site.kind)}
        site = min(importances, key=importances.__getitem__)  # on a tie the one that runs first
        self.gates[site].is_open = False
        self.removed.append(Picked(site, importances[site]))
        if self.refit is not None and len(self.removed) < len(self.kinds):
            self.refit()
        if self.watch is not None:
            self.watch(self.removed[-1])

    def _try(self, model: nn.Module, args: tuple[Any, ...]) -> None:
        """Close one candidate for each image of a batch, all in turn, of the kinds of which more are removed."""
        if not model.training:
            return
        images, kinds = len(args[0]), self.kinds[len(self.removed) :]
        left = [site for site, gate in self.gates.items() if gate.is_open and (site.kind in kinds or None in kinds)]
        order = np.random.default_rng((self.seed, *self._draws)).permutation(len(left))
        turns = torch.arange(images) % max(len(left), 1)
        for gate in self.gates.values():
            gate.trial = None
        for place, site in zip(order, left, strict=True):
            self.gates[site].trial = is_tried = turns == int(place)
            self.tried[site] += is_tried.sum().item() / images / self.accumulate
        self._draws = (self._draws[0], self._draws[1] + 1)

    def state(self) -> State:
        places = {site: number for number, site in enumerate(self.gates)}
        removed = [[places[picked.site], picked.score] for picked in self.removed]
        return {"removed": removed, "tried": list(self.tried.values())}

    def restore(self, state: State) -> None:
        sites = list(self.gates)
        self.removed = [Picked(sites[number], score) for number, score in state["removed"]]
        self.tried = dict(zip(sites, state["tried"], strict=True))
        for picked in self.removed:
            self.gates[picked.site].is_open = False
            if self.watch is not None:
                self.watch(picked)
