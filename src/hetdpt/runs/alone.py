"""One process at a time in a directory."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hetdpt.errors import FileError

TRIES, WAIT = 10, 0.05  # seconds; one who only asks holds it for a moment


@contextmanager
def alone(directory: Path) -> Iterator[None]:
    """Hold ``directory``, so that no other process of this machine works in it; a kill lets it go."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        if not any(_lock(handle) for _ in range(TRIES)):
            raise FileError(f"{directory} is in use by another process; wait for it, or give another directory")
        yield
    finally:
        os.close(handle)


def _lock(handle: int) -> bool:
    """Return whether the lock is ours now; where not, a moment later."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        time.sleep(WAIT)
        return False
    except OSError:  # a file system without locks
        pass
    return True


def is_in_use(directory: Path) -> bool:
    """Whether a process of this machine holds ``directory``."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks
        return False
    finally:
        os.close(handle)
    return False
