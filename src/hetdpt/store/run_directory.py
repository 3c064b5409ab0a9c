"""A run directory: its settings, its checkpoints, its metrics. It does not know what the run does.

run.json       the settings; called again with the same ones a run resumes, with others it raises
checkpoints/   the last two states, each with its checksum in its name
metrics.jsonl  one JSON object per line
summary.json   written when the run is finished
tensorboard/   the same metrics for TensorBoard, if wanted
"""

from __future__ import annotations

import json
import os
import shutil
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

from hetdpt.core.errors import FileError
from hetdpt.store.atomic import find_sealed_json, flush, make_run_directory, require_new, write_json, write_sealed_json
from hetdpt.store.checkpoints import CHECKPOINTS, Checkpoints
from hetdpt.store.config_diff import first_difference, read_json
from hetdpt.store.lock import alone
from hetdpt.store.metrics import BOARD, METRICS, Metrics

RUN, SUMMARY = "run.json", "summary.json"


class Run:
    """The directory of one run; ``open`` creates it, or resumes the run in it."""

    def __init__(self, directory: Path, minutes: float = 10.0, has_board: bool = False, is_first: bool = True) -> None:
        self.directory = directory
        self.checkpoints = Checkpoints(directory / CHECKPOINTS, minutes)
        self.metrics = Metrics(directory / METRICS, directory / BOARD if has_board else None)
        self.is_first = is_first

    @classmethod
    def open(
        cls,
        directory: Path,
        asked: dict[str, Any],
        minutes: float = 10.0,
        *,
        has_board: bool = False,
        is_first: bool = True,
    ) -> Run:
        """Return the run in ``directory``; ``FileError`` if it was started with other settings than ``asked``.

        ``asked`` is plain JSON: everything that decides the outcome. ``minutes`` are between two checkpoints;
        ``has_board`` writes metrics for TensorBoard too. Of several processes only the first, ``is_first``, writes.
        """
        file, run = directory / RUN, cls(directory, minutes, has_board, is_first)
        if file.is_file():
            read_json(file)  # a damaged one raises, whatever is beside it
        else:
            _make(directory)
        if is_first:
            with run.alone():
                if not run.is_begun:
                    write_json(file, asked)
        _require_same(file, asked)
        return run

    def alone(self) -> AbstractContextManager[None]:
        """Lock the directory for this process; a kill releases it."""
        return alone(self.directory)

    @property
    def is_begun(self) -> bool:
        """Whether there is something to resume, or to lose."""
        return bool(self.checkpoints.files()) or (self.directory / SUMMARY).is_file()

    @property
    def summary(self) -> dict[str, Any] | None:
        """The results of the run; None until it is finished."""
        way_out = f"remove {self.directory} to start again, or give another directory"
        return find_sealed_json(self.directory / SUMMARY, way_out)

    def finish(self, summary: dict[str, Any]) -> None:
        """Write the results of the run, and remove its checkpoints."""
        write_sealed_json(self.directory / SUMMARY, summary)
        self.checkpoints.clear()

    def discard(self) -> None:
        """Remove the directory and all its files, for runs whose results are elsewhere."""
        shutil.rmtree(self.directory)


def summary_of(directory: Path) -> dict[str, Any]:
    """Return the results of the finished run in ``directory``."""
    summary = Run(directory).summary
    if summary is None:
        raise FileError(f"{directory / SUMMARY} is missing; run the same command again to finish the run")
    return summary


def share(directory: Path, asked: dict[str, Any]) -> None:
    """Create a run directory for several processes, or join it; ``FileError`` as in ``Run.open``."""
    file = directory / RUN
    if not file.is_file():
        make_run_directory(directory, RUN)  # others may do so too; the first file is the first to appear
        scratch = file.with_name(f".{RUN}.{uuid4().hex}")
        scratch.write_text(json.dumps(asked, indent=1) + "\n", encoding="utf-8")
        flush(scratch)
        with suppress(FileExistsError):  # of several processes at once the first one wins
            os.link(scratch, file)
        scratch.unlink()
    _require_same(file, asked)


def _make(directory: Path) -> None:
    """Create a directory with nothing in it but what a kill left of its first file."""
    if not directory.is_dir():
        require_new(directory)
    scratches = list(directory.glob(f".{RUN}.*"))
    make_run_directory(directory, RUN)
    for scratch in scratches:
        scratch.unlink(missing_ok=True)


def _require_same(file: Path, asked: dict[str, Any]) -> None:
    if difference := first_difference(read_json(file), asked):
        raise FileError(f"{file.parent} was started with {difference}; give the same to resume, or another directory")
