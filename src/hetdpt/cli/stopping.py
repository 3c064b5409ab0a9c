"""How a command ends early: Ctrl-C, SIGTERM, a full disk. One line that says what to do."""

from __future__ import annotations

import errno
import os
import re
import shlex
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import active_children
from types import FrameType

from hetdpt.core.errors import DataError

IS_POSIX = hasattr(signal, "SIGALRM")  # Windows has neither alarms nor a signal for a child that ends
AGAIN, GRACE = 0.01, 0.5  # seconds until a lost stop is tried again; that a signal may take to arrive

RESUMABLE = {
    "run", "demo", "collect", "oneshot", "frontier", "observe", "compare", "select", "tokens", "transfer", "train",
    "recover", "predict", "detect", "segment",
}  # fmt: skip
"""Commands that can be resumed."""

WAYS_OUT = {
    errno.ENOSPC: "free some space and run the same command again",
    errno.EDQUOT: "free some of your quota and run the same command again",
    errno.EROFS: "make it writable, or give another path",
    errno.EACCES: "allow reading and writing, or give another path",
    errno.EPERM: "allow reading and writing, or give another path",
    errno.ENOENT: "it has disappeared; restore it, or give another path",
    errno.EMFILE: "raise the limit (ulimit -n), or give fewer --workers",
    errno.EIO: "the disk failed; give another path",
}
"""What to do about errors of the file system."""


class Stopped(BaseException):
    """A signal has arrived; running code cleans up, as for any error."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.code = 128 + number  # as shells have it
        self.name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name


@contextmanager
def stoppable() -> Iterator[None]:
    """Let Ctrl-C and SIGTERM end the block by ``Stopped``; the same signal a second time ends the process at once.

    Whatever else is raised after a signal counts as ``Stopped`` too, and so does what torch raises about a worker that
    the signal has reached before this process.
    """
    own, received = os.getpid(), list[Stopped]()

    def stop(number: int, frame: FrameType | None) -> None:
        received.append(Stopped(number))
        signal.signal(number, signal.SIG_DFL)
        if os.getpid() != own:
            os.kill(os.getpid(), number)  # a forked process ends silently
        sys.unraisablehook = look_for_lost
        if IS_POSIX:
            signal.signal(signal.SIGALRM, end)
        end(number, frame)

    def end(number: int, frame: FrameType | None) -> None:
        if IS_POSIX:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch would raise for workers that end as they should
        for worker in active_children():
            worker.kill()  # they only read; alive, they would report that their images are not taken
        raise received[0]

    def look_for_lost(lost: sys.UnraisableHookArgs) -> None:
        """Try again in a moment: Python drops what is raised in ``__del__``. Print nothing about other errors now."""
        if isinstance(lost.exc_value, Stopped) and IS_POSIX:
            signal.setitimer(signal.ITIMER_REAL, AGAIN)

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:  # Ctrl-C does not mean what a shell runs in the background
            signal.signal(number, stop)
    try:
        yield
    except SystemExit:
        raise
    except BaseException as error:
        if received:
            raise received[0] from None
        if ended := ended_worker(error):
            time.sleep(GRACE)  # a signal for this process too raises here
            raise ended from None
        raise
    finally:
        if IS_POSIX:
            signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            signal.signal(number, handler)


def ended_worker(error: BaseException) -> Stopped | DataError | None:
    """Return what ends a command in which a worker that reads images has ended; None where none has.

    torch raises it anywhere, so that what caused ``error`` is looked at too.

    >>> ended_worker(RuntimeError("DataLoader worker (pid 7) is killed by signal: Terminated. ")).name
    'SIGTERM'
    """
    cause: BaseException | None = error
    ended: list[str] = []
    while cause is not None:
        ended += re.findall(r"DataLoader worker \(pid\S* [\d, ]+\) (.+?)\.? *$", str(cause))
        cause = cause.__cause__ or cause.__context__
    if not ended:
        return None
    for number, name in {signal.SIGTERM: "Terminated", signal.SIGINT: "Interrupt"}.items():
        if f"is killed by signal: {name}" in ended:
            return Stopped(number)
    return DataError(f"a worker process that reads images {ended[-1]}; is memory short? Give fewer --workers")


def farewell(stopped: Stopped) -> str:
    """Return the last line of a command that was stopped."""
    words = sys.argv[1:]
    if words[:1] and words[0] in RESUMABLE:
        again = "" if "RANK" in os.environ else f": {shlex.join(['hetdpt', *words])}"
        return f"stopped by {stopped.name}; finished work is kept, and the same command resumes{again}"
    return f"stopped by {stopped.name}; nothing was written, and the same command starts over"


def one_line(text: str) -> str:
    """Return ``text`` without characters that break the line or control the terminal: it may quote anyone's file.

    >>> one_line("no setting a\\nb\\x1b[2J")
    'no setting a b [2J'
    """
    return "".join(letter if letter.isprintable() else " " for letter in text)


def reason(error: OSError) -> str:
    """Return an error of the system as a sentence.

    >>> reason(OSError(errno.ENOSPC, "No space left on device", "/runs/a/plan.json"))
    '/runs/a/plan.json: No space left on device; free some space and run the same command again'
    """
    if error.errno is None:
        return str(error)
    what = f"{error.filename}: {error.strerror}" if error.filename else f"{error.strerror}"
    return f"{what}; {WAYS_OUT.get(error.errno, 'check it, then run the same command again')}"
