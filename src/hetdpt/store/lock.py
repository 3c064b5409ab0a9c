"""A lock on a directory: one process of this machine at a time."""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import lock_descriptor

from hetdpt.core import host
from hetdpt.core.errors import FileError

TRIES, WAIT = 10, 0.05  # seconds; a process that only looks holds it for a moment


@contextmanager
def alone(directory: Path) -> Iterator[None]:
    """Lock ``directory``, so that no other process of this machine works in it; a kill releases it."""
    handle = _open(directory)
    try:
        if not any(_lock(handle) for _ in range(TRIES)):
            raise FileError(f"{directory} is in use by another process; wait for it, or give another directory")
        yield
    finally:
        os.close(handle)


def is_in_use(directory: Path) -> bool:
    """Whether a process of this machine has locked ``directory``."""
    handle = _open(directory)
    try:
        return not any(_lock(handle) for _ in range(2))  # another process that only looks has released it by then
    finally:
        os.close(handle)


def _open(directory: Path) -> int:
    """Return the handle to lock: of the directory or, on Windows, of a file that stands for it."""
    if not host.IS_WINDOWS:
        return os.open(directory, os.O_RDONLY)
    name = hashlib.sha256(str(directory.resolve()).encode()).hexdigest()[:32]
    return os.open(Path(tempfile.gettempdir()) / f"hetdpt-{name}.lock", os.O_RDWR | os.O_CREAT)


def _lock(handle: int) -> bool:
    """Return whether the lock is ours now; if not, after a short wait."""
    try:
        is_ours = lock_descriptor(handle, blocking=False)
    except OSError:  # a file system without locks
        return True
    if not is_ours:
        time.sleep(WAIT)
    return is_ours
