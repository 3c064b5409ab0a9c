"""The progress of a command: drawn in a terminal, a line now and then elsewhere. All of it on stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from hetdpt.cli.show import is_first_process
from hetdpt.core.format import duration, percent

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.text import Text

    from hetdpt.flow.stages.stage import Event
    from hetdpt.training.trainer import Progress

EVERY = 30.0  # seconds between two lines of progress
LOSS_EVERY = 1.0  # seconds between two readings of the loss, each of which waits for the device
PER_SECOND = 4  # times that the display is drawn
BAR = 30  # columns
BELOW = 4  # lines of the display under the list of stages
# The marks of a stage, and their replacements where the terminal has no such letters.
DONE, STOPPED, LEFT = ("✓", "+"), ("✗", "x"), ("·", ".")


@contextmanager
def live(is_quiet: bool, as_json: bool) -> Iterator[Display]:
    """Yield the display of a command.

    stdout is left to the results. With ``as_json`` they are one object, so that only a terminal, where a person waits,
    shows progress. ``is_quiet`` hides all progress, but no warning and no result.
    """
    if is_quiet or not is_first_process():
        yield Display(as_json)
        return
    from rich.console import Console

    console = Console(stderr=True)
    if sys.stderr.isatty() and console.is_interactive:
        with _drawn(console, as_json) as display:
            yield display
    else:
        yield Display(as_json) if as_json else LineDisplay(as_json)


class Display:
    """Receives the progress of a command. This one shows nothing."""

    def __init__(self, as_json: bool) -> None:
        self.as_json, self.now = as_json, RunProgress()

    def event(self, event: Event) -> None:
        """Receive an event of a run."""

    def step(self, text: str, done: int, total: int, left: float | None = None) -> None:
        """Receive how many steps are done; ``left`` are the seconds left, by the pace so far if None."""

    def counter(self, text: str) -> Callable[[int, int], None]:
        """Return ``step`` of one ``text``."""
        return partial(self.step, text)

    def training(self, state: Progress) -> None:
        """Receive the progress of a training; the loss is read now and then."""

    def say(self, line: str) -> None:
        """Print a line of the results on stdout."""
        if not self.as_json and is_first_process():
            click.echo(line)


class RunProgress:
    """The progress of a command, as reported so far."""

    def __init__(self) -> None:
        self.stages: list[str] = []
        self.words: dict[str, str] = {}
        """What is shown for the stages that are done or unchanged."""
        self.stage = ""
        """The running stage; empty between stages, and in commands without stages."""
        self.text, self.done, self.total = "", 0, 0
        """The current work, its steps that are done, and all its steps; 0 if not known."""
        self.left: float | None = None
        """Seconds left, if known."""
        self.best = ""
        self.began = self.stage_began = time.monotonic()
        self._pace = Pace()

    def take(self, event: Event) -> None:
        if not event.stage:
            self.stages = event.text.split(",")
            return
        if event.stage not in self.stages:
            self.stages.append(event.stage)
        if event.best is not None:
            self.best = f"best {percent(event.best)} in {event.stage}"
        if event.kind == "progress":
            self.stage = event.stage
            self.step(event.text, event.done, event.total)
        elif event.kind == "begin":
            self.stage, self.stage_began = event.stage, time.monotonic()
            self.text, self.total, self.left = event.text, 0, None
        elif event.kind in ("skip", "done"):
            is_done = event.kind == "done"
            self.words[event.stage] = f"done in {duration(event.seconds)}" if is_done else event.text or "as before"
            self.stage, self.text, self.total, self.left = "", "", 0, None

    def step(self, text: str, done: int, total: int, left: float | None = None) -> None:
        pace = self._pace.left(f"{self.stage} {total}" if self.stage else text, done, total)
        self.text, self.done, self.total, self.left = text, done, total, pace if left is None else left

    @property
    def line(self) -> str:
        """The progress as text."""
        return ", ".join(filter(None, (how_far(self.text, self.done, self.total, self.left), self.best)))


class Pace:
    """How fast a piece of work is done. Another name, or fewer steps done than before, is a new piece."""

    def __init__(self) -> None:
        self._name, self._began, self._first, self._done = "", 0.0, 0, 0

    def left(self, name: str, done: int, total: int) -> float | None:
        """Return the seconds that the rest takes at the pace so far; None before a step is done."""
        now = time.monotonic()
        if name != self._name or done < self._done:
            self._name, self._began, self._first = name, now, done
        self._done = done
        return (now - self._began) / (done - self._first) * max(total - done, 0) if done > self._first else None


def how_far(text: str, done: int, total: int, left: float | None) -> str:
    """Return the progress of a piece of work as text.

    >>> how_far("evaluating", 40, 230, left=61.2)
    'evaluating 40/230, 0:01:01 left'
    """
    if not total:
        return f"{text} {done}" if done else text
    return f"{text} {done}/{total}".strip() + ("" if left is None else f", {clock(left)} left")


def clock(seconds: float) -> str:
    """Return a time as hours, minutes and seconds."""
    return str(timedelta(seconds=round(seconds)))


def _training_text(state: Progress) -> str:
    speed = f"{state.images_per_second:.1f} images/s"
    return f"epoch {state.epoch}/{state.epochs}, loss {state.mean_loss():.4f}, {speed}"


class LineDisplay(Display):
    """Prints a line for each stage and, now and then, its progress."""

    def __init__(self, as_json: bool) -> None:
        super().__init__(as_json)
        self._last = time.monotonic()

    def event(self, event: Event) -> None:
        self.now.take(event)
        if event.kind == "note":
            click.echo(f"  {event.text}", err=True)
        elif event.kind == "progress":
            self._tell("  ")
        elif event.stage:
            place = f"{self.now.stages.index(event.stage) + 1}/{len(self.now.stages)} {event.stage}"
            click.echo(place if event.kind == "begin" else f"{place}: {self.now.words[event.stage]}", err=True)

    def step(self, text: str, done: int, total: int, left: float | None = None) -> None:
        self.now.step(text, done, total, left)
        self._tell()

    def training(self, state: Progress) -> None:
        if self._is_due:
            self.step(f"{_training_text(state)}, update", state.update, state.updates, state.seconds_left)

    @property
    def _is_due(self) -> bool:
        return time.monotonic() - self._last >= EVERY

    def _tell(self, indent: str = "") -> None:
        if self._is_due:
            self._last = time.monotonic()
            click.echo(f"{indent}{self.now.line}", err=True)


class TerminalDisplay(Display):
    """Draws the progress of the command in a terminal."""

    def __init__(self, as_json: bool, console: Console) -> None:
        super().__init__(as_json)
        self._console, self._loss_read = console, 0.0

    def event(self, event: Event) -> None:
        self.now.take(event)
        if event.kind == "note":
            self._print(event.text)

    def step(self, text: str, done: int, total: int, left: float | None = None) -> None:
        self.now.step(text, done, total, left)

    def training(self, state: Progress) -> None:
        text = self.now.text
        if time.monotonic() - self._loss_read >= LOSS_EVERY:
            self._loss_read, text = time.monotonic(), _training_text(state)
        self.step(text, state.update, state.updates, state.seconds_left)

    def say(self, line: str) -> None:
        if sys.stdout.isatty() and not self.as_json:
            self._print(line)  # above the drawing, behind which a line on stdout would begin
        else:
            super().say(line)

    def _print(self, line: str) -> None:
        from rich.text import Text

        self._console.print(Text(line), soft_wrap=True)


@contextmanager
def _drawn(console: Console, as_json: bool) -> Iterator[Display]:
    """Yield the display of a terminal; however it ends, the drawing is complete and the cursor visible."""
    from rich.live import Live

    display = TerminalDisplay(as_json, console)
    picture = RunDisplay(display.now)
    # Where stdout is this terminal too, what is printed there has to appear above the display.
    with Live(picture, console=console, refresh_per_second=PER_SECOND, redirect_stdout=sys.stdout.isatty()):
        try:
            yield display
        finally:
            picture.is_over = True


class RunDisplay:
    """The stages of a run with a mark each, and the running step with a bar; drawn by rich at any width."""

    def __init__(self, now: RunProgress) -> None:
        from rich.spinner import Spinner

        self.now, self.is_over = now, False
        self._spinner, self._plain_spinner = Spinner("dots"), Spinner("line")

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        now = self.now
        if now.stages:
            yield self._stages(now.stage, max(1, console.height - BELOW), int(options.ascii_only))
        if now.text and not self.is_over:
            yield _one_line(f"  {now.text}")
        if now.total and not self.is_over:
            yield self._bar(min(BAR, options.max_width // 2))
        if now.stages or not self.is_over:
            since = f"  {clock(time.monotonic() - now.began)} so far"
            yield _one_line(", ".join(filter(None, (since, now.best))))

    def _stages(self, stage: str, room: int, look: int) -> Any:
        """Return the list of stages; where there is no room for all, those around the running one."""
        from rich.table import Table

        now = self.now
        at = now.stages.index(stage) if stage else len(now.words)
        first = max(0, min(at - room // 2, len(now.stages) - room))
        rows = Table.grid(padding=(0, 1))
        for name in now.stages if self.is_over else now.stages[first : first + room]:
            mark, words, style = self._row(name, stage, look)
            rows.add_row(mark, _one_line(name, style), _one_line(words, style))
        return rows

    def _row(self, name: str, stage: str, look: int) -> tuple[Any, str, str]:
        """Return the mark of a stage, what is said of it, and the style of both."""
        if name != stage:
            words = self.now.words.get(name)
            return (LEFT[look], "", "dim") if words is None else (DONE[look], words, "")
        since = clock(time.monotonic() - self.now.stage_began)
        if self.is_over:
            return STOPPED[look], f"stopped after {since}", "bold"
        return (self._plain_spinner if look else self._spinner), since, "bold"

    def _bar(self, width: int) -> Any:
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        row, now = Table.grid(padding=(0, 1)), self.now
        counts = how_far("", now.done, now.total, now.left)
        row.add_row(" ", ProgressBar(total=now.total, completed=now.done, width=width), _one_line(counts))
        return row


def _one_line(text: str, style: str = "") -> Text:
    from rich.text import Text

    return Text(text, style, no_wrap=True, overflow="ellipsis")
