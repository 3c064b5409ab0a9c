"""How the blocks of a model reduce tokens, as a value; :mod:`hetdpt.reduce.tokens` applies it. No torch here."""

from __future__ import annotations

from dataclasses import dataclass, fields
from fractions import Fraction
from itertools import pairwise
from typing import Any

from hetdpt.core.errors import PlanError

TOKEN_PAPERS = {"tome": "https://arxiv.org/abs/2210.09461", "gtp": "https://arxiv.org/abs/2311.03035"}
"""The methods that reduce tokens, and their papers."""
SCHEDULES = ("constant", "decreasing")
GTP_OPTIONS = ("alpha", "neighbours", "sparsity")


@dataclass(frozen=True)
class Tokens:
    """How many tokens are removed in each block that has attention, and by which method.

    >>> Tokens("tome", 8).amounts(3), Tokens("tome", 8, "decreasing").amounts(3)
    ((8, 8, 8), (16, 8, 0))
    """

    method: str
    """``tome`` merges similar tokens; ``gtp`` adds the least important ones to their neighbours."""
    r: int
    """Tokens removed in each such block, on average; 0 leaves the model unchanged."""
    schedule: str = "constant"
    """``constant``, or ``decreasing``: from 2 r in the first such block to 0 in the last."""
    alpha: float = 0.2
    """How much of a removed token is added to its neighbours; only for ``gtp``, as all that follows."""
    neighbours: int = 8
    """Number of most similar tokens that a token is linked to, in addition to those next to it in the image."""
    sparsity: float = 1.0
    """Fraction of the attention map, its largest entries, that is kept."""

    def __post_init__(self) -> None:
        if self.method not in TOKEN_PAPERS:
            raise PlanError(
                f"no method of reducing tokens is called {self.method!r}; available: {', '.join(TOKEN_PAPERS)}"
            )
        if self.schedule not in SCHEDULES:
            raise PlanError(f"the schedule of tokens is {' or '.join(SCHEDULES)}, not {self.schedule!r}")
        if not _is_whole(self.r):
            raise PlanError(f"r is how many tokens each block removes, a whole number such as 8, not {self.r!r}")
        if not 0 <= self.alpha <= 1 or not 0 < self.sparsity <= 1 or not _is_whole(self.neighbours):
            raise PlanError(
                f"alpha and sparsity are from 0 to 1, sparsity above 0, and neighbours are a whole number, not "
                f"{self.alpha!r}, {self.sparsity!r} and {self.neighbours!r}"
            )
        given = [name for name in GTP_OPTIONS if getattr(self, name) != getattr(Tokens, name)]
        if given and self.method != "gtp":
            raise PlanError(f"{given[0]} is an option of gtp, not of {self.method}; leave it out")

    def amounts(self, blocks: int) -> tuple[int, ...]:
        """Return how many tokens each of so many blocks removes; both schedules average r per block."""
        if self.schedule == "constant" or blocks == 1:
            return (self.r,) * blocks
        ends = [round(Fraction(self.r * block * (2 * blocks - 1 - block), blocks - 1)) for block in range(blocks + 1)]
        return tuple(end - start for start, end in pairwise(ends))

    @classmethod
    def from_dict(cls, values: Any) -> Tokens:
        if set(values) - {field.name for field in fields(cls)}:
            raise ValueError(values)
        return cls(**values)


def read_tokens(text: str) -> Tokens:
    """Return the value written in ``text`` as METHOD:R or METHOD:R:SCHEDULE.

    >>> read_tokens("tome:8") == Tokens("tome", 8), read_tokens("tome:8:decreasing").schedule
    (True, 'decreasing')
    """
    method, *rest = text.split(":")
    if not 1 <= len(rest) <= 2 or not rest[0].isdecimal():
        raise PlanError(f"tokens are METHOD:R, such as tome:8, or METHOD:R:SCHEDULE, not {text!r}")
    return Tokens(method, int(rest[0]), (*rest, "constant")[1])


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
