"""A run as it is watched: drawn in a terminal, in lines elsewhere, not at all if quiet; events are given by hand."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import time
from dataclasses import asdict

import pytest

import hetdpt.cli.live
from hetdpt.cli.live import Pace, live
from hetdpt.flow.stages.stage import Event

LONG = "sample [bold]2+1[/bold]: 96.10 % " + "and so on " * 6  # longer than the terminal is wide
EVENT = asdict(Event("", "begin"))
START = f"""
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell lets what it runs in the background ignore Ctrl-C
from contextlib import contextmanager
from types import SimpleNamespace
from hetdpt.cli.live import live
def Event(*values, **named):  # the real one takes five seconds to import, with torch and all
    return SimpleNamespace(**{{**{EVENT!r}, **dict(zip({[*EVENT]!r}, values)), **named}})
@contextmanager
def watching(*words):
    global watch
    with live(*words) as display:
        watch = display.event
        yield
def tell():
    watch(Event("", "begin", "analyse,collect,fit,report"))
    watch(Event("analyse", "skip"))
    watch(Event("collect", "begin"))
    watch(Event("collect", "progress", "fine-tuning", 0, 8))
    time.sleep(0.2)
    watch(Event("collect", "progress", "fine-tuning", 4, 8, best=96.1))
    watch(Event("collect", "note", {LONG!r}))
    print("warning: of a library", file=sys.stderr)
def wait():
    sys.stdin.readline()
def finish():
    watch(Event("collect", "done", seconds=3.4))
    for stage in ("fit", "report"):
        watch(Event(stage, "begin"))
        watch(Event(stage, "done", seconds=75.0))
"""


class Screen:
    """What a terminal shows: letters, line ends, and the few commands that rich gives to draw anew."""

    def __init__(self, columns: int, text: str) -> None:
        self.columns, self.lines, self.row, self.column, self.has_cursor = columns, [""], 0, 0, True
        for command, letter, sign in re.findall(r"\x1b\[([?0-9;]*)([a-zA-Z])|(.)", text, re.DOTALL):
            if sign:
                self._put(sign)
            elif letter == "A":
                self.row = max(0, self.row - int(command or 1))
            elif letter == "K":
                self.lines[self.row] = ""
            elif letter in "hl" and command == "?25":
                self.has_cursor = letter == "h"
            else:
                assert letter == "m", f"the test knows no command {command}{letter}"

    def _put(self, sign: str) -> None:
        if sign == "\r":
            self.column = 0
        elif sign == "\n":
            self._down()
        else:
            if self.column == self.columns:
                self._down()
                self.column = 0
            line = self.lines[self.row].ljust(self.column)
            self.lines[self.row] = line[: self.column] + sign + line[self.column + 1 :]
            self.column += 1

    def _down(self) -> None:
        self.row += 1
        if self.row == len(self.lines):
            self.lines.append("")

    @property
    def text(self) -> str:
        return "\n".join(line.rstrip() for line in self.lines).rstrip("\n")


class Terminal:
    """A Python program whose stderr is a terminal."""

    def __init__(self, code: str, columns: int = 60, rows: int = 24, **environment: str) -> None:
        self.master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        hidden = ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE")
        env = {name: value for name, value in os.environ.items() if name not in hidden}
        self.process = subprocess.Popen(
            [sys.executable, "-c", START + code],
            env={**env, "TERM": "xterm", "PYTHONUTF8": "1", **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=slave,
        )
        os.close(slave)
        self.columns, self._bytes = columns, b""

    @property
    def shown(self) -> str:
        return self._bytes.decode(errors="ignore")

    @property
    def screen(self) -> Screen:
        return Screen(self.columns, self.shown)

    def read_until(self, pattern: re.Pattern[str]) -> None:
        """Read what is shown until that is all there is on the screen."""
        deadline = time.monotonic() + 30
        while not pattern.fullmatch(self.screen.text):
            if time.monotonic() > deadline or not self._read():
                self.process.kill()
                self.end()
                raise AssertionError(self.screen.text)

    def end(self) -> tuple[int, str]:
        """Let it go on and read all there is; return the exit code and what was printed on stdout."""
        assert self.process.stdin
        self.process.stdin.close()
        while self._read():
            pass
        os.close(self.master)
        assert self.process.stdout
        with self.process.stdout as out:
            printed = out.read().decode()
        return self.process.wait(timeout=30), printed

    def _read(self) -> bool:
        try:
            part = os.read(self.master, 65536)
        except OSError:  # how Linux says that nobody writes any more
            return False
        self._bytes += part
        return bool(part)


def drawn(*lines: str) -> re.Pattern[str]:
    return re.compile("\n".join(lines))


NOTES = (*(re.escape(LONG[at : at + 60].rstrip()) for at in range(0, len(LONG), 60)), "warning: of a library")
TOP = (*NOTES, "✓ analyse as before")
AT_WORK = drawn(
    *TOP,
    r"\S collect 0:00:\d\d",
    r"· fit",
    r"· report",
    r"  fine-tuning",
    r"  ━+[╸╺]━+ 4/8, 0:00:\d\d left",
    r"  0:00:\d\d so far, best 96.10 % in collect",
)


@pytest.mark.parametrize("as_json", [False, True])
def test_a_terminal_shows_all_stages_and_the_step_at_work(as_json: bool) -> None:
    code = f"with watching(False, {as_json}):\n tell(); wait()\n finish()\nprint('result')"
    terminal = Terminal(code)
    terminal.read_until(AT_WORK)
    assert terminal.end() == (0, "result\n")
    assert drawn(
        *TOP,
        "✓ collect done in 3.4 s",
        "✓ fit     done in 1 min 15 s",
        "✓ report  done in 1 min 15 s",
        r"  0:00:\d\d so far, best 96.10 % in collect",
    ).fullmatch(terminal.screen.text), terminal.screen.text
    assert terminal.screen.has_cursor


def test_the_display_is_drawn_at_most_four_times_a_second() -> None:
    code = """
with watching(False, False):
    watch(Event("", "begin", "collect"))
    watch(Event("collect", "begin"))
    for step in range(1000):
        watch(Event("collect", "progress", "counting", step, 1000))
        time.sleep(0.001)
"""
    terminal = Terminal(code)
    assert terminal.end() == (0, "")
    drawings = terminal.shown.count("so far")
    seconds = int(re.findall(r"0:00:(\d\d) so far", terminal.shown)[-1])
    assert 3 <= drawings <= 4 * (seconds + 1) + 2  # the first and the last are drawn whenever they come


@pytest.mark.parametrize("way", ["Ctrl-C", "error"])
def test_a_run_that_is_stopped_leaves_a_whole_display(way: str) -> None:
    code = "wait()" if way == "Ctrl-C" else "raise ValueError('no such thing')"
    terminal = Terminal(f"with watching(False, False):\n tell(); {code}")
    if way == "Ctrl-C":
        terminal.read_until(AT_WORK)
        time.sleep(0.5)  # not in the middle of a line
        terminal.process.send_signal(signal.SIGINT)
    code, out = terminal.end()
    assert (code != 0, out) == (True, "")
    assert drawn(
        *TOP,
        r"✗ collect stopped after 0:00:\d\d",
        r"· fit",
        r"· report",
        r"  0:00:\d\d so far, best 96.10 % in collect",
        r"Traceback \(most recent call last\):",
    ).match(terminal.screen.text), terminal.screen.text
    assert terminal.screen.text.endswith("KeyboardInterrupt" if way == "Ctrl-C" else "ValueError: no such thing")
    assert terminal.screen.has_cursor


def test_a_low_terminal_shows_the_stages_around_the_one_at_work() -> None:
    terminal = Terminal("with watching(False, False):\n tell(); wait()\n finish()", rows=6)
    terminal.read_until(
        drawn(*NOTES, r"✓ analyse as before", r"\S collect 0:00:\d\d", "  fine-tuning", "  ━.* 4/8, .*", "  0:00:.*")
    )
    assert terminal.end() == (0, "")
    assert terminal.screen.text.count("✓") == 4


def test_a_narrow_terminal_shows_what_fits() -> None:
    terminal = Terminal("with watching(False, False):\n tell(); wait()\n finish()", columns=18)
    above = [re.escape(LONG[at : at + 18].rstrip()) for at in range(0, len(LONG), 18)] + ["warning: of a", "library"]
    step = ("  fine-tuning", "  ━━━╸━━━ 4/8, 0:…", "  0:00:.. so far,…")
    terminal.read_until(drawn(*above, "✓ analyse as befo…", r"\S collect 0:00:\d\d", "· fit", "· report", *step))
    assert terminal.end() == (0, "")
    assert terminal.screen.text.count("✓") == 4


def test_a_terminal_without_such_letters_gets_plain_ones() -> None:
    terminal = Terminal(
        "with watching(False, False):\n tell()\n finish()",
        PYTHONUTF8="0",
        PYTHONIOENCODING="ascii",
    )
    assert terminal.end() == (0, "")
    assert "+ collect done in 3.4 s" in terminal.screen.text
    assert terminal.shown.isascii()


def test_a_terminal_that_cannot_draw_gets_lines() -> None:
    terminal = Terminal("with watching(False, False):\n tell()\n finish()", TERM="dumb")
    assert terminal.end() == (0, "")
    assert "\x1b" not in terminal.shown
    assert terminal.shown.startswith("1/4 analyse: as before\r\n2/4 collect\r\n")


def test_a_quiet_run_shows_nothing_in_a_terminal_but_warnings() -> None:
    terminal = Terminal("with watching(True, False):\n tell()\n finish()\nprint('result')")
    assert terminal.end() == (0, "result\n")
    assert terminal.shown == "warning: of a library\r\n"


EVENTS = (
    Event("", "begin", "analyse,collect,report"),
    Event("analyse", "skip", "as before, 12 s"),
    Event("collect", "begin"),
    Event("collect", "progress", "reading", 0, 0),
    Event("collect", "progress", "fine-tuning", 10, 12),
    Event("collect", "progress", "fine-tuning", 11, 12, best=96.1),
    Event("collect", "note", "sample 2+1: 96.10 %"),
    Event("collect", "done", seconds=61.2),
)


def feed(is_quiet: bool, as_json: bool) -> None:
    with live(is_quiet, as_json) as display:
        for event in EVENTS:
            display.event(event)


def test_lines_where_nobody_watches(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    feed(is_quiet=False, as_json=False)
    rarely = capsys.readouterr()
    assert rarely.out == ""
    assert rarely.err.splitlines() == [
        "1/3 analyse: as before, 12 s",
        "2/3 collect",
        "  sample 2+1: 96.10 %",
        "2/3 collect: done in 1 min 1 s",
    ]
    monkeypatch.setattr(hetdpt.cli.live, "EVERY", 0.0)
    feed(is_quiet=False, as_json=False)
    assert capsys.readouterr().err.splitlines()[2:5] == [
        "  reading",
        "  fine-tuning 10/12",  # how fast that goes nobody knows yet
        "  fine-tuning 11/12, 0:00:00 left, best 96.10 % in collect",
    ]


@pytest.mark.parametrize(("is_quiet", "as_json"), [(True, False), (False, True), (True, True)])
def test_nothing_at_all_if_quiet_or_as_json(
    is_quiet: bool, as_json: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hetdpt.cli.live, "EVERY", 0.0)
    feed(is_quiet, as_json)
    assert capsys.readouterr() == ("", "")


def test_one_process_of_a_group_speaks(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    feed(is_quiet=False, as_json=False)
    assert capsys.readouterr() == ("", "")


def test_the_time_left_follows_the_pace_of_the_piece_of_work() -> None:
    pace = Pace()
    assert pace.left("a", 50, 60) is None  # a run that goes on did not do those 50 now
    time.sleep(0.2)
    left = pace.left("a", 52, 60)
    assert left is not None
    assert 0.8 <= left < 8  # 0.1 s for each of 8 steps; a busy machine sleeps longer
    assert pace.left("a", 0, 60) is None  # the next piece of the same name
    assert pace.left("b", 1, 60) is None
