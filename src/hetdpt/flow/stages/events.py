"""What a run tells while it works. Whoever shows it is upstairs; nothing here prints or imports torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Event:
    """One thing that happened in a run.

    The first of a run has no ``stage``, is a ``begin``, and its ``text`` names the stages to come, with commas between.
    """

    stage: str
    """Name of the stage."""
    kind: Literal["begin", "skip", "progress", "note", "done"]
    """Whether the stage begins, is as before, is under way, has a line to show, or is done."""
    text: str = ""
    """What is being done, or the line to show."""
    done: int = 0
    """Steps of ``text`` that are done."""
    total: int = 0
    """Steps of ``text`` in all; 0 where nobody knows."""
    best: float | None = None
    """The best accuracy so far in percent, where there is one."""
    seconds: float = 0.0
    """How long the stage took, once it is done."""
