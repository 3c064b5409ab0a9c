"""Checkpoints of a training; a kill loses what was done after the last one."""

from __future__ import annotations

import os
import re
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

from hetdpt.core.errors import FileError, first_line
from hetdpt.store.atomic import flush, sha256

CHECKPOINTS = "checkpoints"
KEPT = 2  # the newest, and the one before it in case the newest is damaged


class Checkpoints:
    """States of a training as files, the newest last; damaged ones are skipped."""

    def __init__(self, directory: Path, minutes: float, guard: Callable[[], None] | None = None) -> None:
        """``guard`` is called before a state is written, and raises if this process has lost the right to."""
        self.directory, self.minutes, self.guard = directory, minutes, guard
        self._last = time.monotonic()
        self._damaged: list[Path] = []

    def latest(self) -> dict[str, Any] | None:
        """Return the newest sound state, with a warning for each newer one that is damaged; None for a new run.

        If all are damaged this raises ``FileError``: a new start would overwrite the results so far.
        """
        files = self.files()
        for file in reversed(files):
            try:
                return self._read(file)
            except FileError as error:
                self._damaged.append(file)
                if file == files[0]:
                    raise FileError(
                        f"{error}, and there is no earlier one; remove {self.directory} to start again, "
                        "or give another directory"
                    ) from None
                warnings.warn(f"{error}; resuming from the checkpoint before it", stacklevel=2)
        return None

    def is_due(self) -> bool:
        """Whether the time between two checkpoints has passed."""
        return time.monotonic() - self._last >= 60 * self.minutes

    def keep(self, state: dict[str, Any]) -> None:
        """Write ``state`` as the newest; the one before stays, older ones are removed."""
        if self.guard:
            self.guard()
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
        """Return the files of all checkpoints, the newest last."""
        names = sorted(self.directory.glob("*.pt")) if self.directory.is_dir() else []
        return [file for file in names if re.fullmatch(r"\d{8}-[0-9a-f]{64}\.pt", file.name)]

    def _save(self, state: dict[str, Any], scratch: Path) -> None:
        try:
            torch.save(state, scratch)
            flush(scratch)
        except (OSError, RuntimeError) as error:  # of a full disk torch says only that a position is unexpected
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
            raise FileError(f"the checkpoint {file} is not a checkpoint of a training; it is not loaded") from None
        return state
