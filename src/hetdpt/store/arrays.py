"""Arrays in files that are filled once and then read in part, memory-mapped. Knows nothing of what is in them."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.format import open_memmap

from hetdpt.core.errors import FileError
from hetdpt.core.format import amount
from hetdpt.store.atomic import parse_json, write_json

FILLED = "filled.json"
"""Written last: what the arrays are of. Without it they are not used."""


@dataclass(frozen=True)
class ArrayFiles:
    """Arrays in a directory, one file for each; several processes of one file system may fill parts of them."""

    directory: Path
    layout: Mapping[str, tuple[str, tuple[int, ...]]]
    """The type and the shape of each array, by name."""
    identity: Mapping[str, Any]
    """All that decides their values, as plain JSON."""

    @property
    def size(self) -> int:
        """The bytes of all arrays."""
        return sum(np.dtype(kind).itemsize * int(np.prod(shape)) for kind, shape in self.layout.values())

    @property
    def is_filled(self) -> bool:
        """Whether the arrays are there, complete, and of the same identity."""
        try:
            return bool(parse_json((self.directory / FILLED).read_text(encoding="utf-8")) == self._known_by)
        except (OSError, ValueError):
            return False

    @property
    def _known_by(self) -> dict[str, Any]:
        layout = {name: [kind, list(shape)] for name, (kind, shape) in self.layout.items()}
        return {"identity": dict(self.identity), "layout": layout}

    def require_space(self, hint: str) -> None:
        """Raise ``FileError`` with ``hint`` if the arrays do not fit on the disk."""
        place = next(path for path in (self.directory, *self.directory.absolute().parents) if path.is_dir())
        free = shutil.disk_usage(place).free
        if free < self.size:
            raise FileError(
                f"{amount(self.size)}B are needed in {self.directory} but only {amount(free)}B are free; {hint}"
            )

    def create(self) -> None:
        """Make the files, of zeros.

        Their space is taken now where the system can do so: a process that writes to a mapped file on a full disk dies.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        for name, (kind, shape) in self.layout.items():
            open_memmap(self._file(name), mode="w+", dtype=np.dtype(kind), shape=shape).flush()
            self._reserve(self._file(name))

    def _reserve(self, file: Path) -> None:
        if not hasattr(os, "posix_fallocate"):  # macOS and Windows have none
            return
        with file.open("r+b") as opened:
            try:
                os.posix_fallocate(opened.fileno(), 0, file.stat().st_size)
            except OSError as error:
                if error.errno in (errno.ENOSPC, errno.EDQUOT):  # other file systems cannot reserve
                    raise FileError(f"{file} cannot be written: {error.strerror}; free some space") from None

    def open(self, *, writes: bool = False) -> dict[str, np.ndarray[Any, Any]]:
        """Return the arrays, mapped; what is written to them is on disk after ``flush``."""
        return {name: np.load(self._file(name), mmap_mode="r+" if writes else "r") for name in self.layout}

    def seal(self) -> None:
        """Declare the arrays filled."""
        write_json(self.directory / FILLED, self._known_by)

    def remove(self) -> None:
        """Remove the directory, the declaration first, so that a kill leaves nothing that looks complete."""
        (self.directory / FILLED).unlink(missing_ok=True)
        shutil.rmtree(self.directory, ignore_errors=True)  # Windows keeps files that are still mapped

    def _file(self, name: str) -> Path:
        return self.directory / f"{name}.npy"
