"""How a command ends before its time: Ctrl-C, SIGTERM, a disk that will not take more. One line, and what to do."""

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
AGAIN, GRACE = 0.01, 0.5  # seconds until a stop that was lost is tried again; that a signal may take to get here

RESUMABLE = {
    "run", "demo", "collect", "oneshot", "observe", "compare", "select", "tokens", "transfer", "train", "recover",
    "detect", "segment",
}  # fmt: skip
"""Commands that keep what they have done in their directory."""

WAYS_OUT = {
    errno.ENOSPC: "free some space and give the same command again",
    errno.EDQUOT: "free some of your quota and give the same command again",
    errno.EROFS: "make it writable, or give another path",
    errno.EACCES: "make it yours to read and write, or give another path",
    errno.EPERM: "make it yours to read and write, or give another path",
    errno.ENOENT: "it was there when it was looked for; put it back, or give another path",
    errno.EMFILE: "raise the limit (ulimit -n), or give fewer --workers",
    errno.EIO: "the disk has a fault; give another path",
}
"""What to do about what a file system says."""


class Stopped(BaseException):
    """A signal came; what is under way cleans up behind itself, as for any error."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.code = 128 + number  # as shells have it
        self.name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name


@contextmanager
def stoppable() -> Iterator[None]:
    """Let Ctrl-C and SIGTERM end the block by ``Stopped``; the same signal a second time ends the process at once.

    Whatever else is raised after a signal is taken for ``Stopped`` too, and so is what torch raises of a worker that
    the signal has reached before this process.
    """
    own, came = os.getpid(), list[Stopped]()

    def stop(number: int, frame: FrameType | None) -> None:
        came.append(Stopped(number))
        signal.signal(number, signal.SIG_DFL)
        if os.getpid() != own:
            os.kill(os.getpid(), number)  # a process that was forked off ends without a word
        sys.unraisablehook = look_for_lost
        if IS_POSIX:
            signal.signal(signal.SIGALRM, end)
        end(number, frame)

    def end(number: int, frame: FrameType | None) -> None:
        if IS_POSIX:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch would raise for workers that end, as they should
        for worker in active_children():
            worker.kill()  # they only read; alive, they would complain that nobody takes what they have read
        raise came[0]

    def look_for_lost(lost: sys.UnraisableHookArgs) -> None:
        """Try again in a moment: Python drops what is raised in ``__del__``. Tell nothing of what is taken down now."""
        if isinstance(lost.exc_value, Stopped) and IS_POSIX:
            signal.setitimer(signal.ITIMER_REAL, AGAIN)

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:  # what a shell has in the background is not meant by Ctrl-C
            signal.signal(number, stop)
    try:
        yield
    except SystemExit:
        raise
    except BaseException as error:
        if came:
            raise came[0] from None
        if ended := ended_worker(error):
            time.sleep(GRACE)  # a signal that was meant for this process too raises here
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
    return DataError(f"a worker that reads images {ended[-1]}; is memory short? Give fewer --workers")


def farewell(stopped: Stopped) -> str:
    """Return what is said at the end of a command that was stopped."""
    words = sys.argv[1:]
    if words[:1] and words[0] in RESUMABLE:
        again = "" if "RANK" in os.environ else f": {shlex.join(['hetdpt', *words])}"
        return f"stopped by {stopped.name}; what is done is kept, and the same command goes on from there{again}"
    return f"stopped by {stopped.name}; nothing was written, and the same command begins anew"


def one_line(text: str) -> str:
    """Return ``text`` without what would break its line or command the terminal: it may quote a file of anyone.

    >>> one_line("no setting a\\nb\\x1b[2J")
    'no setting a b [2J'
    """
    return "".join(letter if letter.isprintable() else " " for letter in text)


def reason(error: OSError) -> str:
    """Return what the system refuses, in a sentence.

    >>> reason(OSError(errno.ENOSPC, "No space left on device", "/runs/a/plan.json"))
    '/runs/a/plan.json: No space left on device; free some space and give the same command again'
    """
    if error.errno is None:
        return str(error)
    what = f"{error.filename}: {error.strerror}" if error.filename else f"{error.strerror}"
    return f"{what}; {WAYS_OUT.get(error.errno, 'look at it, then give the same command again')}"
