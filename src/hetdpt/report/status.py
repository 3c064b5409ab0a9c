"""The progress of a run, read from its directory while another process may be running it. Writes nothing, no torch."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hetdpt.core.format import duration
from hetdpt.report.run import RunRecord
from hetdpt.store.lock import is_in_use
from hetdpt.store.stage_directory import StageRecord

State = Literal["done", "running", "interrupted", "left", "not needed"]


@dataclass(frozen=True)
class StageStatus:
    """The progress of one stage."""

    stage: str
    state: State
    seconds: float | None = None
    """Spent so far; None if nothing was done, or that is not known."""
    words: str = ""
    """Its result in short, or its progress."""


@dataclass(frozen=True)
class RunStatus:
    """The progress of a run, by its stages in order."""

    is_running: bool
    """Whether a process of this machine has locked the directory."""
    stages: tuple[StageStatus, ...]

    @property
    def is_done(self) -> bool:
        return all(stage.state in ("done", "not needed") for stage in self.stages)


def read_status(run: Path) -> RunStatus:
    """Return the progress of the run in a directory; ``FileError`` if it is not a run, or a file is damaged.

    Whether a process is running it is checked first, so that one that ends meanwhile is not called interrupted.
    """
    is_running = run.is_dir() and is_in_use(run)
    record = RunRecord.read(run)
    there = {stage.name: stage for stage in record.stages}
    stages = []
    for name, is_needed in record.flow.items():
        if name in there:
            stages.append(_begun(there[name], getattr(record.results, name, None), is_running))
        else:
            stages.append(StageStatus(name, "left" if is_needed else "not needed"))
    return RunStatus(is_running, tuple(stages))


def _begun(stage: StageRecord, result: object, is_running: bool) -> StageStatus:
    if stage.is_done:
        return StageStatus(stage.name, "done", stage.seconds, str(result or ""))
    now = stage.now
    return StageStatus(stage.name, "running" if is_running else "interrupted", now.get("seconds"), _how_far(now))


def _how_far(now: dict[str, Any]) -> str:
    """Return the last progress of a stage, such as ``fine-tuning, 40/230, 3.0 s ago``."""
    if not {"text", "done", "total", "time"} <= now.keys():
        return ""
    count = [f"{now['done']}/{now['total']}"] if now["total"] else []
    return ", ".join([now["text"], *count, f"{duration(max(0.0, time.time() - now['time']))} ago"])
