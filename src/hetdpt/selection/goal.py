"""How much to remove, in layers, in speed or in size, and the costs of plans that it is measured by."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from torch import nn

from hetdpt.core.errors import PlanError
from hetdpt.core.goals import GOALS, require_pruning
from hetdpt.core.modules import clone
from hetdpt.core.plan import KINDS, Kind, Plan, Removal, Site, Tail, require_class_token
from hetdpt.core.progress import StageProgress
from hetdpt.core.styles import ClassTokenChoice
from hetdpt.results import Price, Prices
from hetdpt.selection.damage import cheapest, fewer_layers
from hetdpt.selection.predictor.pricing import measure_prices
from hetdpt.surgery.record import InputSize, require_record
from hetdpt.surgery.remove import place_, removable
from hetdpt.surgery.tail import is_tail_possible, trim_if_possible_

ONESHOT_GOALS = ("layers", "speedup")
Quantity = Literal["ms", "macs", "params"]
QUANTITIES: Mapping[str, Quantity] = {"speedup": "ms", "macs": "macs", "params": "params"}
"""What plans cost, by the goal that bounds it."""


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
    tail: int | None = None
    """Blocks at the end in which patches are not updated: 0, 2, ..., or auto, by damage for a speedup and else 0."""
    trim: bool = True
    """Do not compute tokens that no output depends on; outputs stay the same."""
    class_token: ClassTokenChoice = "auto"
    """Whether the class token keeps its FFN where patches lose their activation; auto: what does less damage."""

    def __post_init__(self) -> None:
        given = {name: value for name in ONESHOT_GOALS if (value := getattr(self, name)) is not None}
        if len(given) != 1:
            examples = " or ".join(f"--{name} {GOALS[name].example}" for name in ONESHOT_GOALS)
            raise PlanError(f"expected exactly one goal, {examples}; got {' and '.join(given) or 'none'}")
        require_pruning(given)
        if self.kind not in (None, *KINDS):
            raise PlanError(f"kind is {self.kind!r}; expected {' or '.join(KINDS)}")
        Plan(removal=self.removal, tail=self.tail or 0)  # refuses an unknown one
        require_class_token(self.class_token, self.removal)

    @property
    def is_mixed(self) -> bool:
        """Whether everything that can be removed is offered, and not layers alone.

        Layers alone are removed where they are counted, where one kind is asked for or a tail is given, and from
        models that are not to be trimmed or where nothing is to be fitted.
        """
        is_fitted = Plan(removal=self.removal).is_any_fitted
        return self.speedup is not None and self.kind is None and not self.tail and self.trim and is_fitted


@dataclass(frozen=True)
class RemovalTarget:
    """How much to save, the layers that may be removed for it, and what plans cost."""

    sites: tuple[Site, ...]
    target: float
    """Layers, or so much of ``quantity``."""
    prices: Prices | None = None
    """With the times of this device; None if layers are counted."""
    tail: int = 0
    """The tail that is fitted before layers are chosen."""
    longest: int = 0
    """The longest tail that may be chosen; 0 for none."""
    quantity: Quantity = "ms"
    """What a plan costs: milliseconds of a batch, MACs or parameters."""

    @classmethod
    def of(
        cls, model: nn.Module, config: OneShotConfig, size: InputSize, progress: StageProgress | None = None
    ) -> RemovalTarget:
        """Return the target that ``config`` sets; for a speedup, blocks are timed on this device."""
        plan = Plan(removal=config.removal, tail=config.tail or 0)
        known = place_(clone(model).eval(), plan, size)  # refuses one pruned in another style, and an impossible tail
        offered = tuple(site for site in removable(known) if config.kind in (None, site.kind))
        if config.layers is not None:
            if len(offered) < config.layers:
                raise PlanError(
                    f"the goal is {config.layers} layers removed, but this model has {len(offered)} that can be removed"
                )
            return cls(offered, float(config.layers), tail=plan.tail)
        assert config.speedup is not None
        prices = measure_prices(known, removal=config.removal, input_size=size, trim=config.trim, progress=progress)
        return cls.priced({"speedup": config.speedup}, offered, prices, tail=plan.tail)

    @classmethod
    def priced(
        cls, goal: Mapping[str, float], sites: Iterable[Site], prices: Prices, longest: int = 0, tail: int = 0
    ) -> RemovalTarget:
        """Return the target that the one ``goal`` sets, such as {"speedup": 1.5}; ``PlanError`` if it is out of reach.

        >>> from hetdpt.results import Price
        >>> prices = Prices(Price(10, 10, 8.0), (Price(2, 1, 1.0),) * 4, (None,) * 4)
        >>> layers = [Site("attention", block, "") for block in range(4)]
        >>> RemovalTarget.priced({"macs": 7.0}, layers, prices).target
        3.0
        """
        [(name, value)] = goal.items()
        found = cls(tuple(sites), 0.0, prices, tail, longest, QUANTITIES[name])
        limit = found.dense / value if name == "speedup" else value
        found = replace(found, target=found.cost(Plan()) - limit)
        if found.most < found.target:
            show, best = GOALS[name].show, GOALS[name].reached(prices.measures(found.cheapest)) or 0.0
            where = f" ({prices.measured})" if prices.measured else ""
            raise PlanError(
                f"{show(value)} is out of reach: by the costs measured here{where}, removing all {len(found.sites)} "
                f"layers would give {show(best)}; set an easier goal"
            )
        return found

    @classmethod
    def from_dict(cls, values: Any) -> RemovalTarget:
        """Return the target that ``to_dict`` wrote as ``values``."""
        prices = Prices.from_json(values["prices"]) if values["prices"] else None
        sites = tuple(Site(**site) for site in values["sites"])
        return cls(sites, values["target"], prices, values["tail"], values["longest"], values["quantity"])

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain JSON."""
        prices = self.prices.to_json() if self.prices else None
        return {**asdict(self), "prices": prices}

    def cost(self, plan: Plan) -> float:
        """Return minus the layers that ``plan`` removes, or the ``quantity`` that is left without them."""
        return fewer_layers(plan) if self.prices is None else self._quantity_of(self.prices.of(plan))

    @property
    def dense(self) -> float:
        """The ``quantity`` of the dense model; 0 if layers are counted."""
        return self._quantity_of(self.prices.dense) if self.prices else 0.0

    def _quantity_of(self, price: Price) -> float:
        value: float | None = getattr(price, self.quantity)
        assert value is not None, "times were measured"
        return value

    @property
    def cheapest(self) -> Plan:
        """The plan that costs the least."""
        tails = [Tail(self.longest)] if self.longest else []
        return cheapest(self.cost, Plan(tail=self.tail), [*self.sites, *tails])

    @property
    def most(self) -> float:
        """What can be saved at most."""
        return self.cost(Plan()) - self.cost(self.cheapest)

    def reached(self, plan: Plan) -> float:
        """Return the layers or the speedup that ``plan`` amounts to."""
        if self.prices is None:
            return float(len(plan))
        return self.prices.speedup(plan) or 0.0

    def raised(self, plan: Plan, measured: float, wanted: float) -> RemovalTarget | None:
        """Return the target with the missing time added if the ``measured`` speedup is below the ``wanted`` one.

        None if the speedup is reached, or if the remaining sites cannot save that time.
        """
        if self.prices is None or measured >= wanted:
            return None
        target = self.cost(Plan()) - self.cost(plan) + self.dense / measured - self.dense / wanted
        return replace(self, target=target) if target <= self.most else None


def longest_tail(model: nn.Module) -> int:
    """Return how many blocks a tail of ``model`` can have."""
    trim_if_possible_(copy := clone(model))
    return require_record(copy).survey.anatomy.blocks if is_tail_possible(copy) else 0
