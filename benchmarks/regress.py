"""Regression guard: say what got worse from one file of results to another, beyond noise.

    python benchmarks/regress.py BEFORE.json AFTER.json [--tolerance 0.05] [--common]

Rows are matched by their keys. A value counts if its name says which way is good (``HIGHER``, ``LOWER``; with a prefix
such as ``start_accuracy`` too). It got worse where the intervals do not meet. Without intervals it did where it moved
the wrong way by more than the part ``--tolerance`` of it. What is counted (MACs, parameters) is to stay as it is. An
accuracy is compared image by image where both files say which ones were right; without, and without an interval, it
has that of its images. An ``outcome`` that became ``lost`` is worse. Rows that are gone are named as well, unless only
what both have in ``--common`` counts. Code 1 if anything got worse, 2 for a file that is none of ours. No torch here.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evidence import Key, Results, Row, line

from hetdpt.flow.comparison.statistics import difference_of

HIGHER = ("accuracy", "speedup", "efficiency", "throughput")
LOWER = ("macs", "params", "seconds", "milliseconds", "peak_bytes", "bytes", "epochs_of_dense")
COUNTED = ("macs", "params")
RIGHTS = "right"  # which images were, a letter each
Span = tuple[float, float, float]


@dataclass(frozen=True)
class Change:
    """A value of a row that is there before and after."""

    key: Key
    name: str
    before: Span
    """Value, lower and upper end."""
    after: Span
    is_worse: bool

    def __str__(self) -> str:
        return f"{line(self.key)}: {self.name} {_spell(self.before)} -> {_spell(self.after)}"


def direction(name: str) -> int:
    """Return 1 where more is better, -1 where less is, 0 where nobody knows.

    >>> direction("start_accuracy"), direction("peak_bytes"), direction("plan")
    (1, -1, 0)
    """
    ends = [name == known or name.endswith(f"_{known}") for known in (*HIGHER, *LOWER)]
    return 0 if True not in ends else 1 if ends.index(True) < len(HIGHER) else -1


def changes(before: Results, after: Results, tolerance: float) -> Iterator[Change]:
    """Yield every value that both have and that has a direction."""
    for old in before.rows:
        new = after.find(**old.key)
        for name in old.values if new else ():
            assert new is not None
            one, other = span(old, name, tolerance), span(new, name, tolerance)
            if one and other and direction(name):
                yield Change(old.key, name, one, other, has_lost(name, old, new, one, other))


def has_lost(name: str, old: Row, new: Row, before: Span, after: Span) -> bool:
    """Whether a value got worse: counted exactly, image by image where that is known, else by its intervals."""
    if is_counted(name):
        return before != after
    apart = difference_of([(new.values.get(RIGHTS), old.values.get(RIGHTS))]) if name == "accuracy" else None
    return apart.high < 0 if apart else is_worse(before, after, direction(name))


def is_counted(name: str) -> bool:
    return any(name == known or name.endswith(f"_{known}") for known in COUNTED)


def newly_lost(before: Results, after: Results) -> list[Key]:
    """Return the keys of what was all right before and is lost now."""
    lost = [row.key for row in after.rows if row.values.get("outcome") == "lost"]
    return [row.key for row in before.rows if row.key in lost and row.values.get("outcome") != "lost"]


def is_worse(before: Span, after: Span, better: int) -> bool:
    """Whether all that ``after`` may be is worse than all that ``before`` may be.

    >>> is_worse((70.0, 68.0, 72.0), (66.0, 64.0, 67.5), 1), is_worse((70.0, 68.0, 72.0), (67.0, 65.0, 69.0), 1)
    (True, False)
    """
    return after[2] < before[1] if better > 0 else after[1] > before[2]


def span(row: Row, name: str, tolerance: float) -> Span | None:
    """Return a value with the ends between which it may lie; None for what is no number."""
    value = row.values.get(name)
    if isinstance(value, list) and len(value) == 3 and all(_is_number(one) for one in value):
        return value[0], value[1], value[2]
    if not _is_number(value):
        return None
    if is_counted(name):
        noise = 0.0
    elif name.endswith("accuracy") and (images := row.values.get("images")):
        noise = 100 * (1.96 * (value / 100 * (1 - value / 100) / images) ** 0.5)
    else:
        noise = abs(value) * tolerance / 2
    return value, value - noise, value + noise


def gone(before: Results, after: Results) -> list[Key]:
    """Return the keys that ``after`` has no row of."""
    return [row.key for row in before.rows if after.find(**row.key) is None]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _spell(span: Span) -> str:
    value, low, high = (f"{number:.6g}" for number in span)
    return value if low == high else f"{value} [{low}, {high}]"


def _read(file: Path) -> Results:
    try:
        if not file.is_file():
            raise ValueError("it does not exist")
        return Results.read(file)
    except (ValueError, KeyError, TypeError, json.JSONDecodeError) as error:
        print(f"{file} is not a results file ({error}); give one that a script of benchmarks/ wrote", file=sys.stderr)
        sys.exit(2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--tolerance", type=float, default=0.05)
    parser.add_argument("--common", action="store_true")
    options = parser.parse_args()
    before, after = _read(options.before), _read(options.after)
    known = list(changes(before, after, options.tolerance))
    worse = [change for change in known if change.is_worse]
    lost = [] if options.common else gone(before, after)
    failing = newly_lost(before, after)
    for change in worse:
        print(f"worse: {change}")
    for key in failing:
        print(f"no longer works: {line(key)}")
    for key in lost:
        print(f"missing: {line(key)}")
    print(
        f"{after.benchmark}: {len(known)} values compared, {len(worse) + len(failing)} worse, {len(lost)} rows missing"
    )
    sys.exit(1 if worse or failing or lost else 0)


if __name__ == "__main__":
    main()
