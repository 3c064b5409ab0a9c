"""Runs as Markdown: the headline, then the same panels as the page without its charts. No torch here."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from hetdpt.core.goals import describe
from hetdpt.report.commands import Command, further
from hetdpt.report.headline import goal_line, lead, title
from hetdpt.report.panels import Beside, Bullets, Part, Text, panels_of
from hetdpt.report.run import RunRecord
from hetdpt.report.tables import Table, runs_table

SPECIAL = re.compile(r"([\\`*_{}\[\]()#|~!<>&])")


def render_markdown(records: Sequence[RunRecord]) -> str:
    """Return one document of one run, or of several."""
    if len(records) == 1:
        return "\n".join(_run(records[0], 1)).rstrip() + "\n"
    lines = [f"# {len(records)} runs compared", "", *_table(runs_table(records)), ""]
    for record in records:
        lines += _run(record, 2)
    return "\n".join(lines).rstrip() + "\n"


def _run(record: RunRecord, level: int) -> Iterable[str]:
    heading = "#" * level
    yield from (f"{heading} {_plain(record.name)}: {_plain(title(record))}", "", _plain(lead(record)), "")
    if record.summary:
        goal = record.summary.goal
        yield from (f"**{_plain(goal_line(goal, record.results))}**", "")
        if goal.next is not None:
            yield from _part(Command("What to try next", further(goal.next.budget, record.directory)), level)
    else:
        yield from (f"Goal: {_plain(describe(record.goals))}", "")
    for panel in panels_of(record):
        yield from (f"{heading}# {panel.title}", "")
        for part in panel.parts(record):
            yield from _part(part, level + 2)
    if record.warnings:
        yield from (f"{heading}# Warnings", "", *(f"- {_plain(text)}" for text in record.warnings), "")


def _part(part: Part, level: int) -> Iterable[str]:
    """Yield the lines of a part; charts and what the page folds up have none."""
    match part:
        case Text(words, role):
            before = {"heading": "#" * level + " ", "warning": "- "}.get(role, "")
            yield from (before + _plain(words), "")
        case Bullets(items):
            yield from (*(f"- {_plain(item)}" for item in items), "")
        case Table():
            yield from (*_table(part), "")
        case Command(about, text):
            yield from (f"{_plain(about)}:", "", *_code(text), "")
        case Beside(left, right):
            for one in (*left, *right):
                yield from _part(one, level)


def _table(table: Table) -> list[str]:
    sides = ["---"] + ["---:"] * (len(table.columns) - 1)
    return [_cells(map(_plain, table.columns)), _cells(sides), *(_cells(map(_plain, row)) for row in table.rows)]


def _cells(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _plain(text: str) -> str:
    """Return ``text`` on one line, with nothing in it that Markdown or HTML reads as a command.

    >>> _plain("a_b|<script>")
    'a\\\\_b\\\\|&lt;script&gt;'
    """
    one = " ".join(text.split())
    return SPECIAL.sub(r"\\\1", one).replace(r"\<", "&lt;").replace(r"\>", "&gt;").replace(r"\&", "&amp;")


def _code(text: str) -> list[str]:
    """Return a block of code, its fence longer than any in ``text``."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return [fence, *text.splitlines(), fence]
