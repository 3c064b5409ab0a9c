"""A run directory: what it was asked for, its checkpoints, its numbers. It does not know what the run does.

run.json       what was asked for; the same again goes on, something else is refused
checkpoints/   the last two states, each with its checksum in its name
metrics.jsonl  one JSON object per line
summary.json   written when the run is done
tensorboard/   the same numbers for TensorBoard, if asked for
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
from hetdpt.store.atomic import flush, keep_json, kept_json, require_new, written
from hetdpt.store.checkpoints import CHECKPOINTS, Checkpoints
from hetdpt.store.config_diff import first_difference, read_json
from hetdpt.store.lock import alone
from hetdpt.store.metrics import BOARD, METRICS, Metrics

RUN, SUMMARY = "run.json", "summary.json"
_OTHER_THINGS = "{} holds other things than a run; give a new or an empty directory"


class Run:
    """The directory of one run; ``open`` makes it or goes on with it."""

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
        """Return the run in ``directory``; ``FileError`` if it was begun with something else than ``asked``.

        ``asked`` is plain JSON: everything that decides the outcome. ``minutes`` lie between two checkpoints;
        ``has_board`` writes the numbers for TensorBoard too. Of several processes ``is_first`` writes, the others look.
        """
        file, run = directory / RUN, cls(directory, minutes, has_board, is_first)
        if file.is_file():
            read_json(file)  # a damaged one is refused, whatever is beside it
        else:
            _make(directory)
        if is_first:
            with run.alone():
                run._begin(asked)
        _require_same(file, asked)
        return run

    def alone(self) -> AbstractContextManager[None]:
        """Hold the directory, so that no other process of this machine works in it; a kill lets it go."""
        return alone(self.directory)

    def _begin(self, asked: dict[str, Any]) -> None:
        if not self.is_begun:
            with written(self.directory / RUN) as scratch:
                scratch.write_text(json.dumps(asked, indent=1) + "\n", encoding="utf-8")

    @property
    def is_begun(self) -> bool:
        """Whether there is something to go on from, or to lose."""
        return bool(self.checkpoints.files()) or (self.directory / SUMMARY).is_file()

    @property
    def summary(self) -> dict[str, Any] | None:
        """What the run came to; None until it is done."""
        return kept_json(self.directory / SUMMARY, f"remove {self.directory} to begin anew, or give another directory")

    def finish(self, summary: dict[str, Any]) -> None:
        """Write what the run came to, and drop the checkpoints that are of no more use."""
        keep_json(self.directory / SUMMARY, summary)
        self.checkpoints.clear()

    def discard(self) -> None:
        """Remove the directory with all that is in it, where what the run came to is elsewhere."""
        shutil.rmtree(self.directory)


def summary_of(directory: Path) -> dict[str, Any]:
    """Return what the run in ``directory``, which is done, came to."""
    summary = Run(directory).summary
    if summary is None:
        raise FileError(f"{directory / SUMMARY} is missing; the same command again finishes the run")
    return summary


def share(directory: Path, asked: dict[str, Any]) -> None:
    """Make a run directory that several processes work in, or join it; ``FileError`` as in ``Run.open``."""
    file = directory / RUN
    if not file.is_file():
        _make_shared(directory)
        scratch = file.with_name(f".{RUN}.{uuid4().hex}")
        scratch.write_text(json.dumps(asked, indent=1) + "\n", encoding="utf-8")
        flush(scratch)
        with suppress(FileExistsError):  # of several processes at once the first one wins
            os.link(scratch, file)
        scratch.unlink()
    _require_same(file, asked)


def _make(directory: Path) -> None:
    """Make a directory in which there is nothing but what a kill left of its first file."""
    scratches = list(directory.glob(f".{RUN}.*")) if directory.is_dir() else []
    if directory.is_dir() and len(scratches) < len(list(directory.iterdir())):
        raise FileError(_OTHER_THINGS.format(directory))
    if not directory.is_dir():
        require_new(directory)
    _make_directory(directory)
    for scratch in scratches:
        scratch.unlink(missing_ok=True)


def _make_shared(directory: Path) -> None:
    """Make a directory, or find it made by another process a moment ago; its first file is the first to appear."""
    _make_directory(directory)
    others = [file for file in directory.iterdir() if not file.name.startswith(f".{RUN}.")]
    if others and not (directory / RUN).is_file():
        raise FileError(_OTHER_THINGS.format(directory))


def _make_directory(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FileError(f"{directory} cannot be written: {error.strerror}; give another place") from None


def _require_same(file: Path, asked: dict[str, Any]) -> None:
    if difference := first_difference(read_json(file), asked):
        raise FileError(
            f"{file.parent} was begun with {difference}; give the same again to go on, or another directory"
        )
