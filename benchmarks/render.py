"""Write the pages of docs/ that are rendered from benchmarks/results; no figure of theirs is typed by hand.

    python benchmarks/render.py [--check]

Every ``benchmarks/templates/NAME.md.j2`` becomes ``docs/NAME.md``; names that begin with ``_`` are parts. With
``--check`` nothing is written, and a page that is not what its results say ends the script with code 1. No torch here.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from evidence import RESULTS, Results, Row
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from paper_printed import printed, said

from hetdpt.core import format
from hetdpt.flow.comparison.statistics import RIGHT, difference_of
from hetdpt.measurement.intervals import wilson_interval
from hetdpt.selection.methods import METHODS

HERE = Path(__file__).parent
TEMPLATES, DOCS, REFERENCE = HERE / "templates", HERE.parent / "docs", HERE / "reference"
Number = float | list[float]
DRAWS = 2000


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


def study(name: str) -> Any:
    """Return what a command of hetdpt wrote to ``results/NAME.json``, as it is."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def source(name: str) -> str:
    """Return where the numbers of ``results/NAME.json`` come from: the file, and each session's command and machine."""
    found = Results.read(RESULTS / f"{name}.json")
    lines = [f"Source: [{name}.json](../benchmarks/results/{name}.json)."]
    for one in found.sessions:
        commit = f" ({one['commit']})" if one.get("commit") else ""
        kept = ", ".join(f"{package} {number}" for package, number in one["versions"].items())
        kept = kept.replace(",", f"{commit},", 1)  # hetdpt is the first
        place = f"{one['processor']} ({one['device']}), {one['threads']} threads, {one['dtype']}"
        lines.append(f"`{one['command']}` on {one['date']}: {place}; {kept}.")
    return "\n".join(lines)


def accuracy(found: Sequence[Row]) -> list[float]:
    """Return the mean accuracy of models that differ by their seed, with the interval of a bootstrap over both.

    A draw takes as many seeds and as many images as there are, each of them any number of times.
    """
    right = np.array([[answer == RIGHT for answer in row.values["right"]] for row in found])  # (seeds, images)
    generator, (seeds, images) = np.random.default_rng(0), right.shape
    chosen = generator.multinomial(seeds, [1 / seeds] * seeds, DRAWS) / seeds
    drawn = generator.multinomial(images, [1 / images] * images, DRAWS) / images
    means = 100 * np.einsum("ds,si,di->d", chosen, right, drawn, optimize=True)
    return [100 * float(right.mean()), *map(float, np.percentile(means, (2.5, 97.5)))]


def difference(found: Sequence[Row], others: Sequence[Row]) -> list[float]:
    """Return by how many points ``found`` is better than ``others``, over the seeds that both have.

    One of ``others`` without a seed, such as the dense model, is compared with every seed.
    """
    theirs = {row.key.get("seed"): row.values["right"] for row in others}
    apart = difference_of([(row.values["right"], theirs.get(row.key.get("seed"), theirs.get(None))) for row in found])
    if apart is None:
        raise LookupError(f"{found} and {others} have no answers in common")
    return [apart.value, apart.low, apart.high]


def one_shot(found: Sequence[Row]) -> list[float]:
    """Return the mean accuracy before fine-tuning, with Wilson's interval for the images of one seed."""
    images = found[0].values["images"]
    value = fmean(row.values["start_accuracy"] for row in found)
    return [value, *wilson_interval(round(value * images / 100), images)]


def times(value: Number, digits: int = 2) -> str:
    """Return a ratio, with its interval where there is one.

    >>> times([1.271, 1.26, 1.31]), times(1.5)
    ('1.27x [1.26, 1.31]', '1.50x')
    """
    return _estimate(value, lambda middle: format.times(middle, digits, "x"), digits)


def percent(value: Number, digits: int = 1) -> str:
    """Return percent, with the interval.

    >>> percent([72.5, 69.7, 75.2])
    '72.5 % [69.7, 75.2]'
    """
    return _estimate(value, lambda middle: format.percent(middle, digits), digits)


def signed(value: Number, digits: int = 1) -> str:
    """Return a difference, with the interval.

    >>> signed([-1.5, -3.7, 0.7])
    '−1.5 [−3.7, +0.7]'
    """

    def spell(one: float) -> str:
        return f"{one:+.{digits}f}".replace("-", "−")  # with a sign on 0 too: columns of differences

    return _estimate(value, spell, spell)


def giga(value: float, digits: int = 2) -> str:
    """Return a number in G, whatever its size: the rows of a column share their unit.

    >>> giga(17563828224)
    '17.56 G'
    """
    return f"{value / 1e9:.{digits}f} G"


def mega(value: float, digits: int = 2) -> str:
    """Return a number in M, whatever its size.

    >>> mega(22436432)
    '22.44 M'
    """
    return f"{value / 1e6:.{digits}f} M"


def _estimate(value: Number, spell: Callable[[float], str], ends: int | Callable[[float], str]) -> str:
    if not isinstance(value, list):
        return spell(value)
    middle, low, high = value
    return format.estimate(spell(middle), low, high, ends)


def pages() -> Iterator[tuple[Path, str]]:
    """Yield every page and what is to stand in it."""
    loader = FileSystemLoader(TEMPLATES)
    environment = Environment(
        loader=loader, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    reference = json.loads((REFERENCE / "reference.json").read_text())
    found = {"rows": rows, "row": row, "has": has, "study": study, "source": source, "reference": reference}
    environment.globals.update(**found, accuracy=accuracy, difference=difference, one_shot=one_shot)
    environment.globals.update(methods=list(METHODS))
    environment.globals.update(printed=printed, said=said)
    environment.filters.update(times=times, percent=percent, signed=signed, giga=giga, mega=mega)
    for template in sorted(TEMPLATES.glob("[!_]*.md.j2")):
        text = environment.get_template(template.name).render()
        yield DOCS / template.name.removesuffix(".j2"), text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    stale = {page: text for page, text in pages() if not page.is_file() or page.read_text() != text}
    if options.check and stale:
        sys.exit(f"not what the results say: {', '.join(page.name for page in stale)}; run python benchmarks/render.py")
    for page, text in stale.items():
        page.write_text(text)
        print(f"wrote {page}")


if __name__ == "__main__":
    main()
