"""Write the pages of docs/ that are rendered from benchmarks/results; no figure of theirs is typed by hand.

    python benchmarks/render.py [--check]

Every ``benchmarks/templates/NAME.md.j2`` becomes ``docs/NAME.md``; names that begin with ``_`` are parts. With
``--check`` nothing is written, and a page that is not what its results say ends the script with code 1. No torch here.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from evidence import RESULTS, Results, Row
from jinja2 import Environment, FileSystemLoader, StrictUndefined

HERE = Path(__file__).parent
TEMPLATES, DOCS, REFERENCE = HERE / "templates", HERE.parent / "docs", HERE / "reference"
Number = float | list[float]


def rows(name: str, **wanted: Any) -> tuple[Row, ...]:
    """Return the rows of ``results/NAME.json`` whose keys have these entries."""
    return Results.read(RESULTS / f"{name}.json").where(**wanted)


def row(name: str, **wanted: Any) -> Row:
    """Return the one row whose key has these entries."""
    found = rows(name, **wanted)
    if len(found) != 1:
        raise LookupError(f"{name}.json has {len(found)} rows with {wanted}; one was expected")
    return found[0]


def has(name: str, **wanted: Any) -> bool:
    """Whether there is any such row."""
    return bool(rows(name, **wanted))


def source(name: str) -> str:
    """Return where the numbers of ``results/NAME.json`` come from: the file, and each session's command and machine."""
    found = Results.read(RESULTS / f"{name}.json")
    lines = [f"Source: [{name}.json](../benchmarks/results/{name}.json)."]
    for one in found.sessions:
        kept = ", ".join(f"{package} {number}" for package, number in one["versions"].items())
        place = f"{one['processor']} ({one['device']}), {one['threads']} threads, {one['dtype']}"
        lines.append(f"`{one['command']}` on {one['date']}: {place}; {kept}.")
    return "\n".join(lines)


def times(value: Number, digits: int = 2) -> str:
    """Return a ratio, with its interval where there is one.

    >>> times([1.271, 1.26, 1.31]), times(1.5)
    ('1.27x [1.26, 1.31]', '1.50x')
    """
    return _interval(value, lambda number: f"{number:.{digits}f}", "x")


def percent(value: Number, digits: int = 1) -> str:
    """Return percent, with the interval.

    >>> percent([72.5, 69.7, 75.2])
    '72.5 % [69.7, 75.2]'
    """
    return _interval(value, lambda number: f"{number:.{digits}f}", " %")


def signed(value: Number, digits: int = 1) -> str:
    """Return a difference, with the interval.

    >>> signed([-1.5, -3.7, 0.7])
    '−1.5 [−3.7, +0.7]'
    """
    return _interval(value, lambda number: f"{number:+.{digits}f}".replace("-", "−"), "")


def giga(value: float, digits: int = 2) -> str:
    """Return so many G.

    >>> giga(17563828224)
    '17.56 G'
    """
    return f"{value / 1e9:.{digits}f} G"


def mega(value: float, digits: int = 2) -> str:
    """Return so many M.

    >>> mega(22436432)
    '22.44 M'
    """
    return f"{value / 1e6:.{digits}f} M"


def _interval(value: Number, write: Any, unit: str) -> str:
    middle, *ends = value if isinstance(value, list) else [value]
    return f"{write(middle)}{unit}" + (f" [{', '.join(map(write, ends))}]" if ends else "")


def pages() -> Iterator[tuple[Path, str]]:
    """Yield every page and what is to stand in it."""
    loader = FileSystemLoader(TEMPLATES)
    environment = Environment(
        loader=loader, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    reference = json.loads((REFERENCE / "reference.json").read_text())
    environment.globals.update(rows=rows, row=row, has=has, source=source, reference=reference)
    environment.filters.update(times=times, percent=percent, signed=signed, giga=giga, mega=mega)
    for template in sorted(TEMPLATES.glob("[!_]*.md.j2")):
        text = environment.get_template(template.name).render()
        yield DOCS / template.name.removesuffix(".j2"), text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    stale = [page for page, text in pages() if not page.is_file() or page.read_text() != text]
    if options.check and stale:
        sys.exit(f"not what the results say: {', '.join(page.name for page in stale)}; run python benchmarks/render.py")
    for page, text in pages():
        if page in stale:
            page.write_text(text)
            print(f"wrote {page}")


if __name__ == "__main__":
    main()
