"""A run directory: what it was asked for, its checkpoints, its numbers. It does not know what the run does.

run.json       what was asked for; the same again goes on, something else is refused
checkpoints/   the last two states, each with its checksum in its name
metrics.jsonl  one JSON object per line
summary.json   written when the run is done
tensorboard/   the same numbers for TensorBoard, if asked for
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from pickle import UnpicklingError
from typing import Any
from uuid import uuid4

import torch

from hetdpt.errors import FileError, first_line
from hetdpt.files import flush, require_new, sha256, written

RUN, METRICS, SUMMARY = "run.json", "metrics.jsonl", "summary.json"
CHECKPOINTS, BOARD = "checkpoints", "tensorboard"
_OTHER_THINGS = "{} holds other things than a run; give a new or an empty directory"
KEPT = 2  # the newest, and the one before it in case the newest is damaged


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
            _read_json(file)  # a damaged one is refused, whatever is beside it
        else:
            _make(directory)
        if is_first:
            with run.alone():
                run._begin(asked)
        _require_same(file, asked)
        return run

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Hold the directory, so that no other process of this machine works in it; a kill lets it go."""
        handle = os.open(self.directory, os.O_RDONLY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            text = f"{self.directory} is in use by another process; wait for it, or give another directory"
            raise FileError(text) from None
        except OSError:  # a file system without locks
            pass
        try:
            yield
        finally:
            os.close(handle)

    def _begin(self, asked: dict[str, Any]) -> None:
        if not self.is_begun:
            with written(self.directory / RUN) as scratch:
                scratch.write_text(json.dumps(asked, indent=1) + "\n")

    @property
    def is_begun(self) -> bool:
        """Whether there is something to go on from, or to lose."""
        return bool(self.checkpoints.files()) or (self.directory / SUMMARY).is_file()

    @property
    def summary(self) -> dict[str, Any] | None:
        """What the run came to; None until it is done."""
        file = self.directory / SUMMARY
        return _read_json(file) if file.is_file() else None

    def finish(self, summary: dict[str, Any]) -> None:
        """Write what the run came to, and drop the checkpoints that are of no more use."""
        with written(self.directory / SUMMARY) as scratch:
            scratch.write_text(json.dumps(summary, indent=1) + "\n")
        self.checkpoints.clear()

    def discard(self) -> None:
        """Remove the directory with all that is in it, where what the run came to is elsewhere."""
        shutil.rmtree(self.directory)


def share(directory: Path, asked: dict[str, Any]) -> None:
    """Make a run directory that several processes work in, or join it; ``FileError`` as in ``Run.open``."""
    file = directory / RUN
    if not file.is_file():
        _make_shared(directory)
        scratch = file.with_name(f".{RUN}.{uuid4().hex}")
        scratch.write_text(json.dumps(asked, indent=1) + "\n")
        flush(scratch)
        with suppress(FileExistsError):  # of several processes at once the first one wins
            os.link(scratch, file)
        scratch.unlink()
    _require_same(file, asked)


class Checkpoints:
    """States of a training as files, the newest last; a damaged one is passed over."""

    def __init__(self, directory: Path, minutes: float) -> None:
        self.directory, self.minutes = directory, minutes
        self._last = time.monotonic()
        self._damaged: list[Path] = []

    def latest(self) -> dict[str, Any] | None:
        """Return the newest state that is sound, with a warning for each newer one that is not; None for a new run.

        Where all are damaged this is a ``FileError``: a new start would overwrite what the run came to so far.
        """
        files = self.files()
        for file in reversed(files):
            try:
                return self._read(file)
            except FileError as error:
                self._damaged.append(file)
                if file == files[0]:
                    raise FileError(
                        f"{error}, and there is none before it; remove {self.directory} to begin anew, "
                        "or give another directory"
                    ) from None
                warnings.warn(f"{error}; going on from the checkpoint before it", stacklevel=2)
        return None

    def is_due(self) -> bool:
        """Whether the time between two checkpoints has passed."""
        return time.monotonic() - self._last >= 60 * self.minutes

    def keep(self, state: dict[str, Any]) -> None:
        """Write ``state`` as the newest; the one before stays, older ones go."""
        self.directory.mkdir(parents=True, exist_ok=True)
        files = self.files()
        number = int(files[-1].name.split("-")[0]) + 1 if files else 1
        scratch = self.directory / f".{os.getpid()}.pt"
        self._save(state, scratch)
        os.replace(scratch, self.directory / f"{number:08d}-{sha256(scratch)}.pt")
        flush(self.directory)
        sound = [file for file in files if file not in self._damaged]
        left_by_kills = [*self.directory.glob(".*.pt")]
        for old in [*sound[: len(sound) + 1 - KEPT], *self._damaged, *left_by_kills]:
            old.unlink(missing_ok=True)
        self._last = time.monotonic()

    def clear(self) -> None:
        """Remove all of them."""
        for file in [*self.files(), *self.directory.glob(".*.pt")]:
            file.unlink()

    def files(self) -> list[Path]:
        """Return the checkpoints there are, the newest last."""
        names = sorted(self.directory.glob("*.pt")) if self.directory.is_dir() else []
        return [file for file in names if re.fullmatch(r"\d{8}-[0-9a-f]{64}\.pt", file.name)]

    def _save(self, state: dict[str, Any], scratch: Path) -> None:
        try:
            torch.save(state, scratch)
            flush(scratch)
        except (OSError, RuntimeError) as error:  # torch says of a full disk only that a position is unexpected
            scratch.unlink(missing_ok=True)
            raise FileError(
                f"a checkpoint cannot be written to {self.directory} ({first_line(error)}); is the disk full? "
                "The checkpoint before is unharmed"
            ) from None

    def _read(self, file: Path) -> dict[str, Any]:
        if sha256(file) != file.stem.split("-")[1]:
            raise FileError(f"the checkpoint {file} is damaged")
        try:
            state: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
        except (UnpicklingError, EOFError):  # torch would explain at length how to run code that is in it
            raise FileError(f"the checkpoint {file} is no state of a training and is not loaded") from None
        return state


class Metrics:
    """Numbers, one JSON object per line, each with its ``kind`` and ``update``.

    A run that was killed had written lines for updates after its last checkpoint; going on, it writes them again. The
    first line written by this process therefore takes the place of its earlier self and of all that followed.
    """

    def __init__(self, file: Path, board: Path | None = None) -> None:
        self.file, self.board = file, board
        self._is_trimmed = False
        self._writer: Any = None

    def write(self, kind: str, *, update: int, **numbers: Any) -> None:
        """Add a line."""
        if not self._is_trimmed:
            self._trim(kind, update)
            self._writer = _board(self.board, update) if self.board else None
        with self.file.open("a") as file:
            file.write(json.dumps({"kind": kind, "update": update, **numbers}) + "\n")
        if self._writer is not None:
            for name, number in numbers.items():
                if isinstance(number, int | float):
                    self._writer.add_scalar(f"{kind}/{name}", number, update)
            self._writer.flush()

    def read(self, kind: str) -> list[dict[str, Any]]:
        """Return the lines of one kind."""
        return [line for line in self._lines() if line["kind"] == kind]

    def _trim(self, kind: str, update: int) -> None:
        lines = self._lines()
        is_later = [line["update"] > update or (line["update"], line["kind"]) == (update, kind) for line in lines]
        kept = lines[: is_later.index(True)] if any(is_later) else lines
        with written(self.file) as scratch:
            scratch.write_text("".join(json.dumps(line) + "\n" for line in kept))
        self._is_trimmed = True

    def _lines(self) -> list[dict[str, Any]]:
        if not self.file.is_file():
            return []
        lines = []
        for line in self.file.read_text().splitlines():
            try:
                lines.append(json.loads(line))
            except json.JSONDecodeError:  # the last one, cut off when the run was killed
                break
        return lines


def _board(directory: Path, update: int) -> Any:
    """Return a writer for TensorBoard whose earlier numbers from ``update`` on are void."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise FileError(
            "TensorBoard is not installed; install hetdpt[tensorboard], or leave --tensorboard out"
        ) from None
    return SummaryWriter(str(directory), purge_step=update)


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


def _read_json(file: Path) -> dict[str, Any]:
    try:
        values = json.loads(file.read_text())
        if not isinstance(values, dict):
            raise ValueError("no JSON object")
    except (OSError, ValueError) as error:
        raise FileError(f"{file} cannot be read ({first_line(error)}); give another directory") from None
    return values


def _require_same(file: Path, asked: dict[str, Any]) -> None:
    before, now = _flat(_read_json(file)), _flat(json.loads(json.dumps(asked)))
    for key in sorted({*before, *now}):
        if before.get(key) != now.get(key):
            raise FileError(
                f"{file.parent} was begun with {key} = {_short(before.get(key))}, not {_short(now.get(key))}; "
                "give the same again to go on, or another directory"
            )


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested values by their path, such as ``config.recovery.training.lr``."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:40]}..."
