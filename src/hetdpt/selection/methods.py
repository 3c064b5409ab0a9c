"""METHODS: every way to choose layers, a row each. Data only; ``select`` runs them. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from typing import Literal

from hetdpt.core.errors import PlanError
from hetdpt.core.plan import Kind

SplitBy = Literal["map", "joint", "attention", "activation", "none"]
Score = Literal["importance", "te", "damage", "random"]

HETDPT = "HetDPT, ICML 2026"
NOSE = "MLP Can Be a Good Transformer Learner (NOSE), CVPR 2024"
DEPTHSHRINKER = "DepthShrinker, ICML 2022"


@dataclass(frozen=True, kw_only=True)
class Method:
    """One way to choose what to remove."""

    name: str
    split: SplitBy
    """How the budget is split between the kinds. ``map``: by the accuracy predictor, or as the user says. ``joint``:
    all layers are ranked in one list. ``attention`` or ``activation``: only that kind is removed. ``none``: there is no
    budget of layers; everything that can be removed is ranked in one list."""
    score: Score
    """How layers are ranked: by learned importance, transfer entropy, damage after calibration, or at random."""
    paper: str
    """Its source."""
    about: str
    """One sentence."""

    @property
    def only(self) -> Kind | None:
        """The only kind that is removed; None for both."""
        return self.split if self.split in ("attention", "activation") else None

    @property
    def is_nested(self) -> bool:
        """Whether a smaller budget removes a subset of the layers of a larger one: they are taken from one list."""
        return self.split not in ("map", "none") and self.score != "importance"

    @property
    def takes_budget(self) -> bool:
        """Whether it removes a number of layers, when that is given.

        Else its plan has longer tails, fewer hidden features and fewer tokens beside layers.
        """
        return self.split != "none"

    @property
    def is_priced(self) -> bool:
        """Whether it can choose by what plans cost, until they meet a goal such as a speedup."""
        return self.split in ("joint", "none") and self.score == "damage"


_ROWS = (
    Method(
        name="hetdpt",
        split="map",
        score="importance",
        paper=HETDPT,
        about="MAP splits the budget; within each kind, importances learned with the weights choose the layers.",
    ),
    Method(
        name="map+te",
        split="map",
        score="te",
        paper=f"{HETDPT}, ablation without step 2",
        about="MAP splits the budget; within each kind, the least transfer entropy is removed first.",
    ),
    Method(
        name="map+greedy",
        split="map",
        score="damage",
        paper="none: ours",
        about="MAP splits the budget; within each kind, the least damage after calibration is removed first.",
    ),
    Method(
        name="te-static",
        split="joint",
        score="te",
        paper=f"{HETDPT}, ablation with transfer entropy alone",
        about="The least transfer entropy is removed first, whatever its kind.",
    ),
    Method(
        name="importance-only",
        split="joint",
        score="importance",
        paper=f"{HETDPT}, ablation with step 2 alone; in the style of {DEPTHSHRINKER}",
        about="The least learned importance is removed first, whatever its kind.",
    ),
    Method(
        name="attention-only",
        split="attention",
        score="te",
        paper=NOSE,
        about="Only attention layers are removed, the least transfer entropy first.",
    ),
    Method(
        name="activation-only",
        split="activation",
        score="te",
        paper=f"{NOSE}, applied to activations as in HetDPT, Fig. 7",
        about="Only activations are removed, the least transfer entropy first.",
    ),
    Method(
        name="random",
        split="joint",
        score="random",
        paper="none: the baseline",
        about="Random layers, drawn with the seed.",
    ),
    Method(
        name="calibrated-greedy",
        split="joint",
        score="damage",
        paper="none: ours",
        about="One after another, the layer whose fitted replacement changes the outputs least; for a goal of speed or "
        "size the layer, or the longer tail, that does so for what it saves.",
    ),
    Method(
        name="mixed",
        split="none",
        score="damage",
        paper="none: ours",
        about="Every kind of removal by damage per millisecond: layers, tails, hidden features, heads, their "
        "dimensions and tokens.",
    ),
)
METHODS: dict[str, Method] = {row.name: row for row in _ROWS}
BY_LAYERS = tuple(row.name for row in _ROWS if row.takes_budget)
"""The names of the methods that remove a number of layers."""


def method_called(name: str) -> Method:
    """Return the method called ``name``.

    >>> method_called("map+te").score
    'te'
    """
    if name not in METHODS:
        (nearest,) = get_close_matches(name, METHODS, 1, cutoff=0)
        raise PlanError(f"no method is called {name!r}; did you mean {nearest}? Available: {', '.join(METHODS)}")
    return METHODS[name]


def require_budget(method: Method) -> None:
    """Raise ``PlanError`` unless the method removes a number of layers."""
    if not method.takes_budget:
        raise PlanError(
            f"the method {method.name} removes more than layers, until a goal of speed or MACs is met; use hetdpt run "
            f"or hetdpt oneshot with --speedup 1.5, or a method that removes layers: {', '.join(BY_LAYERS)}"
        )


def require_priced(method: Method) -> None:
    """Raise ``PlanError`` unless the method can choose layers by what plans cost."""
    if not method.is_priced:
        able = ", ".join(row.name for row in _ROWS if row.is_priced and row.takes_budget)
        raise PlanError(
            f"the method {method.name} removes a number of layers, whatever they cost; give --layers, or a method that "
            f"meets other goals: hetdpt, which splits a budget, or {able}, which removes layers until the goal is met"
        )
