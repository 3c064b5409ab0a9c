"""A second line of defence while a model is built from a file: nothing but installed libraries is read, nothing called.

It rests on Python's audit events, so it does not see files that a compiled library opens by itself. The first line is
:mod:`hetdpt.adapters.allowed`.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any

from hetdpt.errors import ModelError

PATH_EVENTS = {"open", "os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate"}
"""Audit events whose first argument is the path of a file that is read or changed."""
REFUSED = ("socket.", "subprocess.", "os.system", "os.exec", "os.fork", "os.posix_spawn", "os.spawn", "pickle.")
"""How the names of other events begin that no constructor of a model has a reason for."""


SYSTEM = ("/proc", "/sys")
"""Where a system tells of itself: libraries ask how much memory there is, and how files are mounted."""


class _State(threading.local):
    """What is refused in this thread: nothing without directories."""

    directories: tuple[str, ...] | None = None


_state = _State()


@contextmanager
def guarded(*directories: str | Path) -> Iterator[None]:
    """Refuse files outside of ``directories`` and of the installed libraries, sockets, processes and pickles.

    It holds for the block and its thread; what is refused raises ``ModelError``.
    """
    _watch()
    before = _state.directories
    _state.directories = tuple(os.path.realpath(directory) for directory in (*SYSTEM, *_libraries(), *directories))
    try:
        yield
    finally:
        _state.directories = before


def guarded_directory(name: str) -> AbstractContextManager[None]:
    """Return ``guarded(name)`` where ``name`` is a directory; what has another name may be fetched, as was asked."""
    return guarded(name) if name and Path(name).is_dir() else nullcontext()


@cache
def _watch() -> None:
    sys.addaudithook(_audit)  # for good: Python has no way to take one off


@cache
def _libraries() -> tuple[str, ...]:
    """Return where Python and its packages are: modules are imported when they are first needed."""
    paths = {*sysconfig.get_paths().values(), str(Path(__file__).parents[1])}
    for name in ("torch", "timm", "transformers", "accelerate"):
        if file := getattr(sys.modules.get(name), "__file__", None):
            paths.add(str(Path(file).parents[1]))
    return (*paths, sys.pycache_prefix) if sys.pycache_prefix else tuple(paths)


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    directories = _state.directories
    if directories is None:
        return
    if event in PATH_EVENTS and not _is_inside(arguments[0], directories):
        raise ModelError(f"building this model would open {arguments[0]!r}, which no model needs; do not load it")
    if event.startswith(REFUSED):
        raise ModelError(f"building this model would call {event}, which no model needs; do not load it")


def _is_inside(path: Any, directories: tuple[str, ...]) -> bool:
    if isinstance(path, int) or path == os.devnull:  # an open file; nothing
        return True
    file = os.path.realpath(os.fsdecode(path))
    return any(file == directory or file.startswith(directory + os.sep) for directory in directories)
