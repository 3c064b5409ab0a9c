"""Runs as Markdown: what they came to, tables, layers, warnings, versions. No torch here."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from hetdpt.core.format import duration, machine
from hetdpt.core.goals import describe
from hetdpt.core.plan import KINDS
from hetdpt.report.commands import commands, further
from hetdpt.report.headline import balanced, confidence, difference, goal_line, lead, narrowed, title
from hetdpt.report.run import RunRecord
from hetdpt.report.tables import Table, balance_table, before_and_after, comparison_table, runs_table

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
    if record.summary and record.summary.goal:
        yield from _goal(record)
    else:
        yield from (f"Asked for: {_plain(describe(record.goals))}", "")
    results = record.results
    if results.measure:
        said = (
            f"{difference(results.measure)} The models took turns on {machine(results.measure, results.measure.batch)}."
        )
        yield from (*_table(before_and_after(results.measure)), "", _plain(said), "")
    if results.select:
        yield from _layers(record, heading)
    if results.balance or results.narrow:
        yield from _width(record, heading)
    if results.compare and results.measure:
        yield from (f"{heading}# Other ways to choose", "", *_table(comparison_table(record)), "")
    if record.warnings:
        yield from (f"{heading}# Warnings", "", *(f"- {_plain(text)}" for text in record.warnings), "")
    yield from _how(record, heading)


def _goal(record: RunRecord) -> Iterable[str]:
    goal = record.summary.goal if record.summary else None
    assert goal is not None
    yield from (f"**{_plain(goal_line(goal))}**", "")
    if goal.next is not None:
        yield from ("What to try next:", "", *_code(further(goal.next.budget, record.directory)), "")


def _layers(record: RunRecord, heading: str) -> Iterable[str]:
    chosen = record.results.select
    assert chosen is not None
    yield from (f"{heading}# Which layers went", "")
    for kind in KINDS:
        yield f"- {kind} of blocks: {', '.join(map(str, getattr(chosen.plan, kind))) or 'none'}"
    yield from (f"- {_plain(text)}" for text in confidence(record)[1:])
    yield ""


def _width(record: RunRecord, heading: str) -> Iterable[str]:
    balance, narrowing = record.results.balance, record.results.narrow
    yield from (f"{heading}# {'Layers or width' if balance else 'How much width went'}", "")
    if balance:
        yield from (_plain(balanced(balance)), "", *_table(balance_table(balance)), "")
    yield from (_plain(narrowed(narrowing)), "") if narrowing else ()


def _how(record: RunRecord, heading: str) -> Iterable[str]:
    yield from (f"{heading}# How it was done", "")
    yield from (*_code(commands(record)[0].text), "")
    seconds = ", ".join(f"{stage.name} {duration(stage.seconds)}" for stage in record.stages if stage.is_done)
    yield from (f"Time: {duration(record.seconds)} ({seconds}).", "") if seconds else ()
    versions = ", ".join(f"{package} {', '.join(found)}" for package, found in record.versions.items())
    yield from (f"Versions: {_plain(versions)}.", "") if versions else ()


def _table(table: Table) -> list[str]:
    names, rows = table
    sides = ["---"] + ["---:"] * (len(names) - 1)
    return [_cells(map(_plain, names)), _cells(sides), *(_cells(map(_plain, row)) for row in rows)]


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
