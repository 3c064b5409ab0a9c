"""A run as it is watched: a display that is drawn anew in a terminal, plain lines elsewhere. All of it on stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer

from hetdpt.cli.show import EVERY, Pace, clock, how_far, is_first_process
from hetdpt.flow.stages.events import Event

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.text import Text

Watch = Callable[[Event], None]

PER_SECOND = 4  # times that the display is drawn
BAR = 30  # columns
BELOW = 4  # lines of the display under the list of stages
# How the marks of a stage look, and their likes where the terminal has no such letters.
DONE, STOPPED, LEFT = ("✓", "+"), ("✗", "x"), ("·", ".")


@contextmanager
def live(is_quiet: bool, as_json: bool) -> Iterator[Watch]:
    """Give a function that shows the events of a run.

    stdout is left to what the run comes to. ``as_json`` promises nothing else beside it, so that only a terminal, where
    a person waits, shows how the run goes on. Quiet is quiet: warnings do not come this way.
    """
    if is_quiet or not is_first_process():
        yield lambda event: None
        return
    from rich.console import Console

    console = Console(stderr=True)
    if sys.stderr.isatty() and console.is_interactive:
        with _drawn(console) as watch:
            yield watch
    else:
        yield (lambda event: None) if as_json else Lines()


class RunProgress:
    """What the events so far add up to."""

    def __init__(self) -> None:
        self.stages: list[str] = []
        self.words: dict[str, str] = {}
        """What there is to say of the stages that are done, or as before."""
        self.now: Event | None = None
        """The last word of the stage at work; None between stages."""
        self.left: float | None = None
        """Seconds that are left of its step, where they are known."""
        self.best = ""
        self.began = self.stage_began = time.monotonic()
        self._pace = Pace()

    def take(self, event: Event) -> None:
        """Take an event in."""
        if not event.stage:
            self.stages = event.text.split(",")
            return
        if event.stage not in self.stages:
            self.stages.append(event.stage)
        if event.best is not None:
            self.best = f"best {event.best:.2f} % in {event.stage}"
        if event.kind == "begin":
            self.now, self.left, self.stage_began = event, None, time.monotonic()
        elif event.kind == "progress":
            self.left = self._pace.left(f"{event.stage} {event.total}", event.done, event.total)
            self.now = event
        elif event.kind in ("skip", "done"):
            self.words[event.stage] = _took(event.seconds) if event.kind == "done" else event.text or "as before"
            self.now = self.left = None

    @property
    def step(self) -> str:
        """How far the stage at work is, in words."""
        return how_far(self.now.text, self.now.done, self.now.total, self.left) if self.now else ""


def _took(seconds: float) -> str:
    from hetdpt.core.format import duration

    return f"done in {duration(seconds)}"


class Lines:
    """Prints a line for whatever happens, but for progress only now and then."""

    def __init__(self) -> None:
        self.course, self._last = RunProgress(), time.monotonic()

    def __call__(self, event: Event) -> None:
        self.course.take(event)
        line = self._line(event) if event.stage else ""
        if line:
            typer.echo(line, err=True)

    def _line(self, event: Event) -> str:
        course = self.course
        if event.kind == "note":
            return f"  {event.text}"
        if event.kind == "progress":
            if time.monotonic() - self._last < EVERY:
                return ""
            self._last = time.monotonic()
            return "  " + ", ".join(filter(None, (course.step, course.best)))
        place = f"{course.stages.index(event.stage) + 1}/{len(course.stages)} {event.stage}"
        return place if event.kind == "begin" else f"{place}: {course.words[event.stage]}"


@contextmanager
def _drawn(console: Console) -> Iterator[Watch]:
    """Give what shows events in a terminal; whatever ends it, the display is left whole and the cursor visible."""
    from rich.live import Live
    from rich.text import Text

    picture = RunDisplay()

    def watch(event: Event) -> None:
        picture.course.take(event)
        if event.kind == "note":
            console.print(Text(event.text), soft_wrap=True)

    # Where stdout is this terminal too, what is printed there has to go above the display.
    with Live(picture, console=console, refresh_per_second=PER_SECOND, redirect_stdout=sys.stdout.isatty()):
        try:
            yield watch
        finally:
            picture.is_over = True


class RunDisplay:
    """The stages of a run with a mark each, and the step at work with a bar; drawn by rich at any width."""

    def __init__(self) -> None:
        from rich.spinner import Spinner

        self.course, self.is_over = RunProgress(), False
        self._spinner, self._plain_spinner = Spinner("dots"), Spinner("line")

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        course, now = self.course, self.course.now  # once: it may change while this is drawn
        yield self._stages(now, max(1, console.height - BELOW), int(options.ascii_only))
        if now and now.text and not self.is_over:
            yield _one_line(f"  {now.text}")
        if now and now.total and not self.is_over:
            yield self._bar(now, min(BAR, options.max_width // 2))
        yield _one_line(", ".join(filter(None, (f"  {clock(time.monotonic() - course.began)} so far", course.best))))

    def _stages(self, now: Event | None, room: int, look: int) -> Any:
        """Return the list of stages; where there is no room for all, those around the one at work."""
        from rich.table import Table

        course = self.course
        at = course.stages.index(now.stage) if now else len(course.words)
        first = max(0, min(at - room // 2, len(course.stages) - room))
        rows = Table.grid(padding=(0, 1))
        for name in course.stages if self.is_over else course.stages[first : first + room]:
            mark, words, style = self._row(name, now, look)
            rows.add_row(mark, _one_line(name, style), _one_line(words, style))
        return rows

    def _row(self, name: str, now: Event | None, look: int) -> tuple[Any, str, str]:
        """Return the mark of a stage, what is said of it, and the style of both."""
        if not now or now.stage != name:
            words = self.course.words.get(name)
            return (LEFT[look], "", "dim") if words is None else (DONE[look], words, "")
        since = clock(time.monotonic() - self.course.stage_began)
        if self.is_over:
            return STOPPED[look], f"stopped after {since}", "bold"
        return (self._plain_spinner if look else self._spinner), since, "bold"

    def _bar(self, now: Event, width: int) -> Any:
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        row = Table.grid(padding=(0, 1))
        counts = how_far("", now.done, now.total, self.course.left).strip()
        row.add_row(" ", ProgressBar(total=now.total, completed=now.done, width=width), _one_line(counts))
        return row


def _one_line(text: str, style: str = "") -> Text:
    from rich.text import Text

    return Text(text, style, no_wrap=True, overflow="ellipsis")
