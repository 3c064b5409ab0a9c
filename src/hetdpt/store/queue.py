"""Which process works on which task, where several processes or machines share a directory; for ``store.jobs`` alone.

There is no lock service, and no torch here. A claim on the task ``ag`` is a file ``ag.00000001.claim``, its next
holder's ``ag.00000002.claim``, and so on: the newest generation counts. What keeps two processes from holding a task at
once:

1. A generation is created exclusively, by a single process, and only after its predecessor was released or is dead.
2. The newest is never removed, renamed or created again, not even when its holder is finished, so that generations
   only grow: a process that looked, was suspended and then creates an old generation finds it there and has lost.
3. Older ones are removed when ``KEPT`` newer ones exist. A process suspended through all of them can create one that
   was removed, and so looks once more: only the newest is a claim.

A claim is released by setting its modification time to 0. It is dead, on the machine that wrote it, if its lock is free
(a kill frees it); seen from another machine, or without locks, if it was not renewed for ``patience`` seconds by the
clock of the file system. A process that was itself suspended for so long may have lost its claim without noticing:
it calls ``require_held`` before results are written.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import socket
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from hetdpt.core.errors import FileError
from hetdpt.store.atomic import parse_json

PATIENCE = 120.0  # seconds; six beats, and twice the minute for which NFS may show an old time
BEATS = 6  # renewals within the patience
KEPT = 16  # generations; takeovers that a process may miss between a look and a creation


class Claim:
    """The right to work on one task; ``take`` returns it, ``release`` or the end of a ``with`` ends it.

    It belongs to the process that took it; a forked child does not hold it.
    """

    def __init__(self, directory: Path, name: str, generation: int, patience: float, handle: int) -> None:
        self.directory, self.name, self.generation, self.patience = directory, name, generation, patience
        self._handle, self._token, self._stop = handle, secrets.token_hex(8), threading.Event()
        # Windows sets times by name alone.
        self._target = handle if os.utime in os.supports_fd else _file(directory, name, generation)
        self._beat = threading.Thread(target=_renew, args=(self._target, self._stop, patience / BEATS), daemon=True)
        _HELD.add(self)

    @classmethod
    def take(cls, directory: Path, name: str, patience: float = PATIENCE) -> Claim | None:
        """Return the claim on the task ``name``, or None if another process works on it.

        ``patience`` in seconds is the same for all that share the directory, which is created when needed.

        >>> with tempfile.TemporaryDirectory() as directory:
        ...     with Claim.take(Path(directory), "ag") as claim:
        ...         claim.is_held(), Claim.take(Path(directory), "ag")
        (True, None)
        """
        assert re.fullmatch("[A-Za-z0-9-]+", name), f"{name!r} is not a name of a task"
        with _told(directory):
            directory.mkdir(parents=True, exist_ok=True)
            newest, owner = _look(directory, name, patience)
            return cls._create(directory, name, newest + 1, patience) if owner is None else None

    @classmethod
    def _create(cls, directory: Path, name: str, generation: int, patience: float) -> Claim | None:
        try:
            handle = os.open(_file(directory, name, generation), os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        except FileExistsError:  # another process was faster
            return None
        claim = cls(directory, name, generation, patience, handle)
        try:
            claim._sign()
            generations = _generations(directory, name)
            if generations[-1:] == [generation]:
                claim._beat.start()
                _remove(directory, name, generations[:-KEPT])
                return claim
        except BaseException:
            claim.release()
            raise
        claim.release()  # another process took and released it meanwhile
        return None

    def _sign(self) -> None:
        """Lock the file, and then write its owner: a reader may rely on the lock being there."""
        is_locked = bool(_lock(self._handle, is_shared=False))
        owner = {"host": _host(), "pid": os.getpid(), "token": self._token, "is_locked": is_locked}
        os.write(self._handle, f"{json.dumps(owner)}\n".encode())
        os.fsync(self._handle)  # NFS would hold it back until the file is closed

    def is_held(self) -> bool:
        """Whether the claim still exists and is the newest."""
        if self not in _HELD:
            return False
        with _told(self.directory), suppress(FileNotFoundError):
            _clock(self.directory)  # NFS may list from a cache, unless this machine itself has changed the directory
            if _generations(self.directory, self.name)[-1:] == [self.generation]:
                file = _file(self.directory, self.name, self.generation)
                return bool(_owner(file.read_bytes()).get("token") == self._token)
        return False

    def require_held(self) -> None:
        """Raise ``FileError`` if another process has taken over."""
        if not self.is_held():
            raise FileError(
                f"another process took over {self.name} in {self.directory}, because this one did not respond "
                f"for {self.patience:g} seconds; this one stops, and nothing is lost"
            )

    def release(self) -> None:
        """Release the task, finished or not; a second call changes nothing."""
        if self not in _HELD:
            return
        _HELD.discard(self)
        self._stop.set()
        if self._beat.is_alive():
            self._beat.join()  # else it could renew a released claim, or the file that gets this handle next
        with suppress(OSError):  # taken over and removed, which NFS reports
            os.utime(self._target, (0, 0))
        os.close(self._handle)

    def __enter__(self) -> Claim:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def holder(directory: Path, name: str, patience: float = PATIENCE) -> str | None:
    """Return the process that works on the task ``name``, as in "pid 123 on host"; None if there is none."""
    with _told(directory):
        _, owner = _look(directory, name, patience)
    if owner is None:
        return None
    if not owner:
        return "a process that is just starting"
    return f"pid {owner['pid']} on {owner['host'].split('/')[0]}"


_HELD: set[Claim] = set()  # by this process


def _forget() -> None:
    """Close the handles that a forked child inherited: it would keep the lock when its parent is killed."""
    for claim in _HELD:
        os.close(claim._handle)
    _HELD.clear()


if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(after_in_child=_forget)


def _renew(target: int | Path, stop: threading.Event, seconds: float) -> None:
    while not stop.wait(seconds):
        with suppress(OSError):  # a file system that does not respond may do so the next time
            os.utime(target)


def _look(directory: Path, name: str, patience: float) -> tuple[int, dict[str, Any] | None]:
    """Return the newest generation, 0 if there is none, and its live owner: {} if unsigned, None if there is none."""
    newest = max(_generations(directory, name), default=0)
    try:
        with _file(directory, name, newest).open("rb") as file:
            owner = _owner(file.read())
            return newest, owner if _is_live(file.fileno(), owner, directory, patience) else None
    except FileNotFoundError:  # there is none, or it was removed as an old one; then a newer one exists
        return newest, None


def _is_live(handle: int, owner: dict[str, Any], directory: Path, patience: float) -> bool:
    """Whether a process works under a claim, judged by its lock if that is visible here, by its age otherwise."""
    if os.fstat(handle).st_mtime == 0:
        return False
    if owner.get("host") == _host() and owner["is_locked"]:
        is_free = _lock(handle, is_shared=True)  # shared: two that look do not block each other
        if is_free is not None:
            return not is_free
    now = _clock(directory)  # before the time of the claim: if we are suspended in between, the claim looks young
    return now - os.fstat(handle).st_mtime < patience


def _lock(handle: int, *, is_shared: bool) -> bool | None:
    """Lock the file of a claim until it is closed; False if another process has it, None if there are no locks.

    Those of Windows are not used: a file locked there cannot be read by others.
    """
    try:
        import fcntl
    except ImportError:  # Windows
        return None
    try:
        fcntl.flock(handle, (fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return None
    return True


def _clock(directory: Path) -> float:
    """Return the time of the file system in seconds; the clocks of machines differ."""
    with tempfile.TemporaryFile(dir=directory) as file:
        if os.utime in os.supports_fd:  # not on Windows, where a new file has that time
            os.utime(file.fileno())
        return os.fstat(file.fileno()).st_mtime


def _owner(content: bytes) -> dict[str, Any]:
    """Return the owner written in a claim; {} if it is not yet wholly written."""
    try:
        owner = parse_json(content)
    except ValueError:
        return {}
    return owner if isinstance(owner, dict) and {"host", "pid", "token", "is_locked"} <= owner.keys() else {}


def _host() -> str:
    """Return the name of this machine and of its boot: machines may share a name."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    except OSError:
        boot = ""
    return f"{socket.gethostname()}/{boot}"


def _file(directory: Path, name: str, generation: int) -> Path:
    return directory / f"{name}.{generation:08d}.claim"


def _generations(directory: Path, name: str) -> list[int]:
    files = os.listdir(directory) if directory.is_dir() else []
    matches = [re.fullmatch(rf"{name}\.(\d{{8}})\.claim", file) for file in files]
    return sorted(int(match[1]) for match in matches if match)


def _remove(directory: Path, name: str, generations: list[int]) -> None:
    for generation in generations:
        with suppress(PermissionError):  # Windows, where it stays while a suspended process has it open
            _file(directory, name, generation).unlink(missing_ok=True)


@contextmanager
def _told(directory: Path) -> Iterator[None]:
    """Turn errors of the file system into a ``FileError`` of one sentence."""
    try:
        yield
    except OSError as error:
        text = f"{directory} cannot be shared with other processes: {error.strerror}; give another path"
        raise FileError(text) from None
