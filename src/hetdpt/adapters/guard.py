"""A second line of defence while a model is built from a file; the first is :mod:`hetdpt.adapters.allowed`.

Files outside of the installed libraries, sockets, processes and pickles are refused by Python's audit events. These do
not report files that a compiled library opens itself, so the files that safetensors would open are checked before.
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

from torch.nn.modules.module import register_module_module_registration_hook

from hetdpt.core.errors import ModelError
from hetdpt.store.atomic import parse_json

PATH_EVENTS = {
    "open": 1, "os.remove": 1, "os.mkdir": 1, "os.rmdir": 1, "os.truncate": 1, "os.chmod": 1, "os.chown": 1,
    "os.utime": 1, "os.rename": 2, "os.link": 2, "os.symlink": 2,
}  # fmt: skip
"""Audit events that are about files, and how many paths each begins with."""
REFUSED = ("socket.", "subprocess.", "os.system", "os.exec", "os.fork", "os.posix_spawn", "os.spawn", "pickle.")
"""How the names of other events begin that no constructor of a model has a reason for."""
SYSTEM = ("/proc", "/sys")
"""Where the system describes itself: libraries query how much memory there is, and how files are mounted."""
MOST_MODULES = 20_000
"""More than ten times as many as the largest model of timm has."""


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
    """Return ``guarded(name)`` where ``name`` is a directory; any other name may be downloaded, as requested."""
    return guarded(*_own(Path(name))) if name and Path(name).is_dir() else nullcontext()


def require_own_weights(directory: Path) -> None:
    """Raise ``ModelError`` if weights in ``directory`` are files elsewhere, by a link or by the name in an index."""
    inside = tuple(os.path.realpath(place) for place in _own(directory))
    for file in directory.iterdir():
        if not _is_inside(file, inside):
            raise ModelError(f"{file} is a link to a file outside of its directory; put the file itself there")
        if file.name.endswith(".index.json") and not _names_own_files(file):
            raise ModelError(f"{file} names weights outside of its directory; put them there, and name them alone")


def _own(directory: Path) -> list[Path]:
    """Return where the files of ``directory`` may be: in the hub's cache they are links to a folder next to it."""
    parent = directory.absolute().parent
    return [directory, parent.parent / "blobs"] if parent.name == "snapshots" else [directory]


def _names_own_files(index: Path) -> bool:
    try:
        names = parse_json(index.read_bytes())["weight_map"].values()
    except (ValueError, KeyError, TypeError, AttributeError):
        return False
    return all(isinstance(name, str) and name == Path(name).name for name in names)


@contextmanager
def few_modules() -> Iterator[None]:
    """Refuse to make more than ``MOST_MODULES`` modules: a number in a file may request billions of layers."""
    count = 0

    def look(*_: Any) -> None:
        nonlocal count
        count += 1
        if count > MOST_MODULES:
            raise ModelError(f"this model would have more than {MOST_MODULES} modules; do not load it")

    hook = register_module_module_registration_hook(look)
    try:
        yield
    finally:
        hook.remove()


@cache
def _watch() -> None:
    sys.addaudithook(_audit)  # for good: Python has no way to take one off


@cache
def _libraries() -> tuple[str, ...]:
    """Return where Python and its packages are: modules are imported when they are first needed."""
    known = sysconfig.get_paths()
    paths = {*(known[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")), str(Path(__file__).parents[1])}
    for name in ("torch", "timm", "transformers", "accelerate"):
        if file := getattr(sys.modules.get(name), "__file__", None):
            paths.add(str(Path(file).parents[1]))
    return (*paths, sys.pycache_prefix) if sys.pycache_prefix else tuple(paths)


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    directories = _state.directories
    if directories is None:
        return
    for path in arguments[: PATH_EVENTS.get(event, 0)]:
        if not _is_inside(path, directories):
            raise ModelError(f"building this model would open {path!r}, a file that is not part of it; do not load it")
    if event.startswith(REFUSED):
        raise ModelError(f"building this model would call {event}, which no model needs; do not load it")


def _is_inside(path: Any, directories: tuple[str, ...]) -> bool:
    if isinstance(path, int) or path == os.devnull:  # an open file; nothing
        return True
    file = os.path.realpath(os.fsdecode(path))
    return any(file == directory or file.startswith(directory + os.sep) for directory in directories)
