"""The choices the paper publishes, as plans by name: ``paper/deit_base-10``, ``paper/deit_base-10/map+te``, ...

A name is ``paper/MODEL-LAYERS``, the paper's own method, or that and a method of its comparisons. No torch here.
"""

from __future__ import annotations

import difflib

from hetdpt.core.errors import PlanError
from hetdpt.core.plan import Anatomy, Plan

PREFIX = "paper/"
ALL = tuple(range(12))
ANATOMY = {"deit_small": Anatomy(12, 384, ALL, ALL), "deit_base": Anatomy(12, 768, ALL, ALL)}

# (model, layers, method): (attention removed, activation removed); paper, tables of the ablation and of NOSE's rows
CHOICES: dict[tuple[str, int, str], tuple[tuple[int, ...], tuple[int, ...]]] = {
    ("deit_small", 6, "hetdpt"): ((1, 10, 11), (8, 10, 11)),
    ("deit_small", 6, "importance-only"): ((7, 11), (0, 1, 10, 11)),
    ("deit_small", 6, "map+te"): ((1, 9, 11), (9, 10, 11)),
    ("deit_small", 6, "te-static"): ((1, 9, 10, 11), (9, 10)),
    ("deit_small", 8, "hetdpt"): ((1, 7, 10, 11), (7, 8, 10, 11)),
    ("deit_small", 8, "importance-only"): ((7, 8, 11), (0, 1, 9, 10, 11)),
    ("deit_small", 8, "map+te"): ((1, 9, 10, 11), (8, 9, 10, 11)),
    ("deit_small", 8, "te-static"): ((1, 8, 9, 10, 11), (9, 10, 11)),
    ("deit_base", 5, "attention-only"): ((0, 1, 3, 4, 6), ()),
    ("deit_base", 6, "attention-only"): ((0, 1, 3, 4, 6, 9), ()),
    ("deit_base", 8, "hetdpt"): ((0, 3, 7, 11), (2, 7, 8, 11)),
    ("deit_base", 8, "importance-only"): ((0, 3), (0, 1, 3, 4, 9, 10)),
    ("deit_base", 8, "map+te"): ((0, 3, 9, 11), (7, 8, 9, 10)),
    ("deit_base", 8, "te-static"): ((5, 7, 9, 10, 11), (6, 10, 11)),
    ("deit_base", 10, "hetdpt"): ((0, 3, 7, 8, 11), (2, 7, 8, 10, 11)),
    ("deit_base", 10, "importance-only"): ((0, 1, 2, 5), (0, 1, 2, 3, 9, 10)),
    ("deit_base", 10, "map+te"): ((0, 3, 8, 9, 11), (7, 8, 9, 10, 11)),
    ("deit_base", 10, "te-static"): ((5, 7, 9, 10, 11), (5, 6, 9, 10, 11)),
}


def published_plan(name: str) -> Plan:
    """Return a plan of the paper by its name.

    >>> published_plan("paper/deit_base-10").attention
    (0, 3, 7, 8, 11)
    """
    plans = published_plans()
    if name not in plans:
        near = difflib.get_close_matches(name, plans, 3) or list(plans)[:3]
        raise PlanError(f"the paper has no plan called {name!r}; it has {len(plans)}, such as {', '.join(near)}")
    return plans[name]


def published_plans() -> dict[str, Plan]:
    """Return all plans of the paper by name."""
    plans = {}
    for (model, layers, method), (attention, activation) in CHOICES.items():
        suffix = "" if method == "hetdpt" else f"/{method}"
        plans[f"{PREFIX}{model}-{layers}{suffix}"] = Plan(attention, activation, anatomy=ANATOMY[model])
    return plans
