"""Which layers of a Swin can have gone, given what the paper prints: all choices, by stage and kind.

The paper prints for its pruned Swins the MACs, the parameters and, of one, the number of layers, not which they were.
What a layer saves depends on its stage and kind alone, and savings add up, so a choice is eight numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

import hetdpt
from hetdpt.core.plan import Plan
from hetdpt.measurement.costs import Costs

DEPTHS = (2, 2, 18, 2)  # blocks of each stage, of Swin-S and Swin-B alike
STARTS = (0, 2, 4, 22)
KINDS = ("attention", "activation")
CAPS = tuple(depth for depth in DEPTHS for _ in KINDS)
MACS, WITHOUT_PRODUCTS, PARAMS = range(3)
SIZE = (3, 224, 224)


@dataclass(frozen=True)
class Choices:
    """All choices of layers of a Swin, and what each costs."""

    counts: np.ndarray
    """(choices, 8): attention and activation layers gone of stage 1, of stage 2, ..."""
    costs: np.ndarray
    """(choices, 3): MACs, MACs without the attention products, parameters."""

    def of(self, layers: int) -> Choices:
        """Return those with so many layers."""
        chosen = self.counts.sum(axis=1) == layers
        return Choices(self.counts[chosen], self.costs[chosen])

    def meeting(self, macs_g: float, params_m: float, *, products: bool = True) -> np.ndarray:
        """Return the counts of those whose MACs and parameters are the printed ones, rounded to one decimal."""
        macs = self.costs[:, MACS if products else WITHOUT_PRODUCTS]
        near = (np.abs(macs / 1e9 - macs_g) < 0.05) & (np.abs(self.costs[:, PARAMS] / 1e6 - params_m) < 0.05)
        found: np.ndarray = self.counts[near]
        return found


@cache
def choices(name: str) -> Choices:
    """Return every choice of layers of the Swin of this name."""
    dense = _costs(name, Plan())
    single = [Plan(**{kind: [start]}) for start in STARTS for kind in KINDS]
    savings = np.array([dense - _costs(name, plan) for plan in single])  # (8, 3)
    counts = np.stack(np.meshgrid(*(np.arange(cap + 1) for cap in CAPS), indexing="ij"), axis=-1).reshape(-1, 8)
    return Choices(counts, dense - counts @ savings)


def even_choice(name: str, macs_g: float, params_m: float, layers: int | None) -> np.ndarray:
    """Return our choice among those that have the printed costs, attention products counted.

    The most even split between the kinds; of those the one with the most layers in stage 3; of those the first.
    """
    there = choices(name) if layers is None else choices(name).of(layers)
    meeting = there.meeting(macs_g, params_m)
    uneven = np.abs(meeting[:, 0::2].sum(axis=1) - meeting[:, 1::2].sum(axis=1))
    outside = meeting.sum(axis=1) - meeting[:, 4:6].sum(axis=1)
    found: np.ndarray = meeting[np.lexsort((outside, uneven))[0]]
    return found


def plan_of_counts(counts: np.ndarray) -> Plan:
    """Return the plan that takes so many layers of each kind from each stage, the last ones of it.

    >>> plan = plan_of_counts(np.array([1, 0, 0, 0, 2, 1, 0, 0]))
    >>> plan.attention, plan.activation
    ((1, 20, 21), (21,))
    """
    gone: dict[str, list[int]] = {kind: [] for kind in KINDS}
    for number, count in enumerate(counts):
        stage, kind = divmod(number, 2)
        end = STARTS[stage] + DEPTHS[stage]
        gone[KINDS[kind]] += range(end - int(count), end)
    return Plan(**gone)


def _costs(name: str, plan: Plan) -> np.ndarray:
    model = hetdpt.create(name, is_empty=True)
    costs = Costs.of(hetdpt.merge_(hetdpt.prune_(model, plan)), SIZE)
    return np.array([costs.macs, costs.macs_without_attention_products, costs.params])
