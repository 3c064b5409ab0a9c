"""Events of a run, for whoever shows its progress. Nothing here prints or imports torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Event:
    """One thing that happened in a run.

    The first event of a run has no ``stage``, is a ``begin``, and its ``text`` names all stages, separated by commas.
    """

    stage: str
    """Name of the stage."""
    kind: Literal["begin", "skip", "progress", "note", "done"]
    """Whether the stage begins, is skipped as its result is there, makes progress, has a line to show, or is done."""
    text: str = ""
    """The step that is running, or the line to show."""
    done: int = 0
    """Steps of ``text`` that are done."""
    total: int = 0
    """Steps of ``text`` in all; 0 if not known."""
    best: float | None = None
    """The best accuracy so far in percent, if there is one."""
    seconds: float = 0.0
    """Time spent on the stage, once it is done."""
