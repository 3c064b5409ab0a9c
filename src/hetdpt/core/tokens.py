"""How the blocks of a model reduce tokens, as a value; :mod:`hetdpt.reduce.tokens` applies it. No torch here."""

from __future__ import annotations

from dataclasses import dataclass, fields
from fractions import Fraction
from itertools import pairwise
from typing import Any

from hetdpt.core.errors import PlanError

TOKEN_PAPERS = {"tome": "https://arxiv.org/abs/2210.09461", "gtp": "https://arxiv.org/abs/2311.03035"}
"""The methods that reduce tokens, and where they are from."""
SCHEDULES = ("constant", "decreasing")
GTP_OPTIONS = ("alpha", "neighbours", "sparsity")


@dataclass(frozen=True)
class Tokens:
    """By what method and how many tokens go in the blocks that have attention.

    >>> Tokens("tome", 8).amounts(3), Tokens("tome", 8, "decreasing").amounts(3)
    ((8, 8, 8), (16, 8, 0))
    """

    method: str
    """``tome`` merges alike tokens; ``gtp`` adds those that matter least to their neighbours."""
    r: int
    """Tokens that go in each such block, on average; 0 leaves the model as it is."""
    schedule: str = "constant"
    """``constant``, or ``decreasing``: from 2 r in the first such block to 0 in the last."""
    alpha: float = 0.2
    """How much of a token that goes its neighbours take in; of ``gtp`` alone, as all that follows."""
    neighbours: int = 8
    """Most similar tokens that one is linked to, besides those beside it in the image."""
    sparsity: float = 1.0
    """Part of the attention map, its largest entries, that is kept."""

    def __post_init__(self) -> None:
        if self.method not in TOKEN_PAPERS:
            raise PlanError(
                f"no method of reducing tokens is called {self.method!r}; there are {', '.join(TOKEN_PAPERS)}"
            )
        if self.schedule not in SCHEDULES:
            raise PlanError(f"a schedule of tokens is {' or '.join(SCHEDULES)}, not {self.schedule!r}")
        if not _is_whole(self.r):
            raise PlanError(f"r is how many tokens go in each block, a whole number such as 8, not {self.r!r}")
        if not 0 <= self.alpha <= 1 or not 0 < self.sparsity <= 1 or not _is_whole(self.neighbours):
            raise PlanError(
                f"alpha and sparsity are from 0 to 1, sparsity above 0, and neighbours are a whole number, not "
                f"{self.alpha!r}, {self.sparsity!r} and {self.neighbours!r}"
            )
        given = [name for name in GTP_OPTIONS if getattr(self, name) != getattr(Tokens, name)]
        if given and self.method != "gtp":
            raise PlanError(f"{given[0]} is an option of gtp, and {self.method} has none; leave it out")

    def amounts(self, blocks: int) -> tuple[int, ...]:
        """Return how many tokens go in each of so many blocks; both schedules come to r a block."""
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
    """Return what ``text`` says: METHOD:R, or METHOD:R:SCHEDULE.

    >>> read_tokens("tome:8") == Tokens("tome", 8), read_tokens("tome:8:decreasing").schedule
    (True, 'decreasing')
    """
    method, *rest = text.split(":")
    if not 1 <= len(rest) <= 2 or not rest[0].isdecimal():
        raise PlanError(f"tokens are METHOD:R, such as tome:8, or METHOD:R:SCHEDULE, not {text!r}")
    return Tokens(method, int(rest[0]), (*rest, "constant")[1])


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
