"""The goal of a one-shot removal, in layers or in speed, and how much each site contributes to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from math import inf
from typing import Any

from torch import nn

from hetdpt.core.errors import PlanError
from hetdpt.core.goals import GOALS, require_pruning
from hetdpt.core.modules import clone
from hetdpt.core.plan import KINDS, Kind, Plan, Removal, Site
from hetdpt.core.progress import StepProgress
from hetdpt.measurement.speed import latency_table
from hetdpt.surgery.record import InputSize
from hetdpt.surgery.remove import place_, removable

ONESHOT_GOALS = ("layers", "speedup")


@dataclass(frozen=True, kw_only=True)
class OneShotConfig:
    """How much to remove in one shot, and how.

    >>> OneShotConfig(layers=4, speedup=1.2)
    Traceback (most recent call last):
    hetdpt.core.errors.PlanError: expected exactly one goal, --layers 8 or --speedup 1.5; got layers and speedup
    """

    layers: int | None = None
    """Goal: remove this many layers."""
    speedup: float | None = None
    """Goal: at least this many times faster on this device."""
    kind: Kind | None = None
    """The only kind of layer to remove, attention or activation; both by default."""
    removal: Removal = "calibrated"
    """What removed layers leave behind: a name from ``styles.PRESETS`` or (attention style, activation style)."""

    def __post_init__(self) -> None:
        given = {name: value for name in ONESHOT_GOALS if (value := getattr(self, name)) is not None}
        if len(given) != 1:
            examples = " or ".join(f"--{name} {GOALS[name].example}" for name in ONESHOT_GOALS)
            raise PlanError(f"expected exactly one goal, {examples}; got {' and '.join(given) or 'none'}")
        require_pruning(given)
        if self.kind not in (None, *KINDS):
            raise PlanError(f"kind is {self.kind!r}; expected {' or '.join(KINDS)}")
        Plan(removal=self.removal)  # refuses an unknown one

    @property
    def is_fitted(self) -> bool:
        """Whether replacements are fitted on images, for at least one kind of layer."""
        return Plan(removal=self.removal).is_any_fitted


@dataclass(frozen=True)
class RemovalTarget:
    """How much to gain in total, and what removing each site gains: 1 layer, or milliseconds of a batch."""

    gains: Mapping[Site, float]
    target: float
    dense: float | None = None
    """Milliseconds of a batch of the dense model; None if layers are counted."""

    @classmethod
    def of(
        cls, model: nn.Module, config: OneShotConfig, size: InputSize, progress: StepProgress | None = None
    ) -> RemovalTarget:
        """Return the target that ``config`` sets; for a speedup, each site is timed on this device."""
        known = place_(clone(model).eval(), Plan(removal=config.removal), size)  # refuses one pruned in another style
        if config.layers is not None:
            offered = [site for site in removable(known) if config.kind in (None, site.kind)]
            if len(offered) < config.layers:
                raise PlanError(
                    f"the goal is {config.layers} layers removed, but this model has {len(offered)} that can be removed"
                )
            return cls(dict.fromkeys(offered, 1.0), float(config.layers))
        assert config.speedup is not None
        table = latency_table(known, size, removal=config.removal, progress=progress)
        gains = {one.site: one.saved.value for one in table.savings if config.kind in (None, one.site.kind)}
        dense = table.dense
        found = cls(gains, dense.value * (1 - 1 / config.speedup), dense.value)
        if found.most < found.target:
            raise PlanError(
                f"a speedup of {config.speedup:g} is out of reach: by the times measured here ({dense.device}, "
                f"{dense.dtype}, batch {dense.batch}), removing all {len(gains)} layers would give "
                f"{found.reached(found.most):.3g}; set an easier goal"
            )
        return found

    @classmethod
    def from_dict(cls, values: Any) -> RemovalTarget:
        """Return the target that ``to_dict`` wrote as ``values``."""
        return cls({Site(**site): gain for site, gain in values["gains"]}, values["target"], values["dense"])

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain JSON."""
        gains = [[asdict(site), gain] for site, gain in self.gains.items()]
        return {"gains": gains, "target": self.target, "dense": self.dense}

    @property
    def most(self) -> float:
        """What removing all sites gains."""
        return sum(gain for gain in self.gains.values() if gain > 0)

    def reached(self, gained: float) -> float:
        """Return the layers or the speedup that ``gained`` amounts to."""
        if self.dense is None:
            return gained
        return self.dense / (self.dense - gained) if gained < self.dense else inf

    def raised(self, gained: float, measured: float, wanted: float) -> RemovalTarget | None:
        """Return the target with the missing time added if the ``measured`` speedup is below the ``wanted`` one.

        None if the speedup is reached, or if the remaining sites cannot save that time.
        """
        if self.dense is None or measured >= wanted:
            return None
        target = gained + self.dense / measured - self.dense / wanted
        return replace(self, target=target) if target <= self.most else None
