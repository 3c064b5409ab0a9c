"""What a one-shot removal is to reach, in layers or in speed, and how much nearer each site brings it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from math import inf
from typing import Any

from torch import nn

from hetdpt.core.errors import PlanError
from hetdpt.core.modules import clone
from hetdpt.core.plan import KINDS, Kind, Plan, Site
from hetdpt.measurement.speed import latency_table
from hetdpt.surgery.record import InputSize, Removal
from hetdpt.surgery.remove import place_, removable

Progress = Callable[[int, int], None]
"""Called with (steps done, steps in all)."""


@dataclass(frozen=True, kw_only=True)
class OneShotConfig:
    """What is to be removed in one shot, and how.

    >>> OneShotConfig(layers=4, speedup=1.2)
    Traceback (most recent call last):
    hetdpt.core.errors.PlanError: give either --layers (such as 4) or --speedup (such as 1.2)
    """

    layers: int | None = None
    """How many layers go."""
    speedup: float | None = None
    """How many times faster the model is to be on this device."""
    kind: Kind | None = None
    """The only kind of layer that may go; None for both."""
    removal: Removal = "calibrated"
    """What removed layers leave behind: a name from ``styles.PRESETS`` or (attention style, activation style)."""

    def __post_init__(self) -> None:
        if (self.layers is None) == (self.speedup is None):
            raise PlanError("give either --layers (such as 4) or --speedup (such as 1.2)")
        if self.layers is not None and self.layers < 1:
            raise PlanError(f"at least 1 layer goes, not {self.layers}")
        if self.speedup is not None and not 1 < self.speedup < inf:
            raise PlanError(f"a speedup is above 1, such as 1.2, not {self.speedup:g}")
        if self.kind not in (None, *KINDS):
            raise PlanError(f"the kind of layer is {' or '.join(KINDS)}, not {self.kind!r}")
        Plan(removal=self.removal)  # refuses what is none

    @property
    def is_fitted(self) -> bool:
        """Whether replacements are fitted on images, for one kind of layer at least."""
        return Plan(removal=self.removal).is_any_fitted


@dataclass(frozen=True)
class Goal:
    """How much is to be gained in all, and what each site gains: 1 layer, or milliseconds of a batch."""

    gains: Mapping[Site, float]
    target: float
    dense: float | None = None
    """Milliseconds that a batch takes with nothing removed; None where layers are counted."""

    @classmethod
    def of(cls, model: nn.Module, config: OneShotConfig, size: InputSize, progress: Progress | None = None) -> Goal:
        """Return the goal that ``config`` sets; where that is a speedup, each site is timed on this device."""
        known = place_(clone(model).eval(), Plan(removal=config.removal), size)  # one pruned otherwise is refused
        if config.layers is not None:
            offered = [site for site in removable(known) if _may_go(site, config)]
            if len(offered) < config.layers:
                raise PlanError(
                    f"{config.layers} layers are to go, but this model has {len(offered)} that can; ask for fewer"
                )
            return cls(dict.fromkeys(offered, 1.0), float(config.layers))
        assert config.speedup is not None
        table = latency_table(known, size, removal=config.removal, progress=progress)
        gains = {saving.site: saving.saved.value for saving in table.savings if _may_go(saving.site, config)}
        dense = table.dense
        goal = cls(gains, dense.value * (1 - 1 / config.speedup), dense.value)
        if goal.most < goal.target:
            raise PlanError(
                f"a speedup of {config.speedup:g} is out of reach: by the times measured here ({dense.device}, "
                f"{dense.dtype}, batch {dense.batch}), all {len(gains)} layers that may go would give "
                f"{goal.reached(goal.most):.3g}; ask for less"
            )
        return goal

    @classmethod
    def from_dict(cls, values: Any) -> Goal:
        """Return the goal that ``to_dict`` made ``values`` of."""
        return cls({Site(**site): gain for site, gain in values["gains"]}, values["target"], values["dense"])

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain JSON."""
        gains = [[asdict(site), gain] for site, gain in self.gains.items()]
        return {"gains": gains, "target": self.target, "dense": self.dense}

    @property
    def most(self) -> float:
        """What all sites gain together."""
        return sum(gain for gain in self.gains.values() if gain > 0)

    def reached(self, gained: float) -> float:
        """Return what ``gained`` amounts to: layers, or a speedup."""
        if self.dense is None:
            return gained
        return self.dense / (self.dense - gained) if gained < self.dense else inf

    def raised(self, gained: float, measured: float, wanted: float) -> Goal | None:
        """Return the goal with the time that is missing added, where ``measured`` is below the speedup ``wanted``.

        None where the speedup is reached, or where the sites that are left do not have that time.
        """
        if self.dense is None or measured >= wanted:
            return None
        target = gained + self.dense / measured - self.dense / wanted
        return replace(self, target=target) if target <= self.most else None


def _may_go(site: Site, config: OneShotConfig) -> bool:
    return config.kind in (None, site.kind)
