"""Samples of accuracy as a CSV file, ours or one that a spreadsheet exported. No torch here.

It only reads values; ``polynomial`` checks whether they are samples.
"""

from __future__ import annotations

import codecs
import csv
import io
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from math import isfinite
from pathlib import Path
from typing import Any

from hetdpt.core.errors import PredictError
from hetdpt.core.plan import KINDS, Budget, Kind, Sample
from hetdpt.store.atomic import written

SAMPLES_FILE = "samples.csv"  # of a directory of hetdpt collect
COUNTS = ("attention", "activation", "accuracy")
RATIOS = ("a", "t", "accuracy")
DELIMITERS = (",", ";", "\t")
EXPECTED = "attention, activation, accuracy (layers removed, percent) or a, t, accuracy (ratios kept, percent)"
LETTERS: dict[Kind, str] = {"attention": "a", "activation": "g"}  # as in the paper's m^a and m^g
LAYER = re.compile(r"([ag])(\d+)")
SHOWN = 12  # columns of a header that an error lists
Line = tuple[int, list[str]]
"""The number of a line in the file, and its cells."""


def read_rows(path: Path) -> list[Sample | tuple[float, float, float]]:
    """Return the samples of a CSV file, or tuples (a, t, accuracy) if its columns are ratios.

    Columns are found by name and others ignored; if it has both, the counts are read, as they are exact. Cells are
    separated by commas, semicolons or tabs. 81,3 is 81.3. Blank lines are skipped.
    """
    lines = list(_lines(path, _text(path)))
    if not lines:
        raise PredictError(f"{path} is empty; expected a CSV with the columns {EXPECTED}")
    header = [cell.strip().lower() for cell in lines[0][1]]
    wanted = _columns(path, header)
    if len(lines) == 1:
        raise PredictError(f"{path} has a header but no rows; expected a line for each sample")
    return [_row(path, line, header, wanted) for line in lines[1:]]


def read_order(path: Path) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return ``order_of`` the layers that the samples of a CSV file are without; empty if it does not name them."""
    header, *lines = [[cell.strip().lower() for cell in cells] for _, cells in _lines(path, _text(path))] or [[]]
    rows = [dict(zip(header, cells, strict=False)) for cells in lines]
    named = [(row.get("chain", ""), LAYER.fullmatch(name)) for row in rows for name in row.get("layers", "").split()]
    kinds = {letter: kind for kind, letter in LETTERS.items()}
    return order_of((chain, kinds[found[1]], int(found[2])) for chain, found in named if found)


def order_of(picks: Iterable[tuple[str, Kind, int]]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the blocks of attention and of activation layers, in the order in which chains removed them.

    ``picks`` are the chain, kind and block of layers in the order of removal. The chain of a kind decides; of the
    interleaved one only layers that it lacks count.

    >>> order_of([("interleaved", "attention", 4), ("attention", "attention", 3), ("interleaved", "activation", 1)])
    ((3, 4), (1,))
    """
    every = sorted(picks, key=lambda pick: pick[0] != pick[1])
    attention, activation = (tuple(dict.fromkeys(block for _, of, block in every if of == kind)) for kind in KINDS)
    return attention, activation


def samples_file(samples: Path) -> Path:
    """Return ``samples`` itself, or the CSV in it if it is a directory of ``hetdpt collect``."""
    if not samples.is_dir():
        return samples
    if not (samples / SAMPLES_FILE).is_file():
        raise PredictError(f"{samples} has no {SAMPLES_FILE}; give a CSV, or a directory of hetdpt collect")
    return samples / SAMPLES_FILE


def plain_rows(rows: Iterable[Sample | Sequence[float]]) -> list[Any]:
    """Return samples as plain JSON."""
    return [asdict(row) if isinstance(row, Sample) else list(row) for row in rows]


def write_rows(path: Path, samples: Iterable[Sample], more: Mapping[str, Sequence[object]] | None = None) -> None:
    """Write a line for each sample, all or nothing; ``more`` are further columns by name, a value for each sample."""
    columns = more or {}
    lines = [[sample.budget.attention, sample.budget.activation, sample.accuracy] for sample in samples]
    assert all(len(values) == len(lines) for values in columns.values()), "a value for each sample"
    with written(path) as scratch, scratch.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow([*COUNTS, *columns])
        writer.writerows([*line, *rest] for line, *rest in zip(lines, *columns.values(), strict=True))


def _text(path: Path) -> str:
    """Return the text of a file: UTF-16 if it has a byte order mark, as spreadsheets write, else UTF-8."""
    try:
        content = path.read_bytes()
        is_wide = content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        text = content.decode("utf-16" if is_wide else "utf-8-sig")
    except FileNotFoundError:
        raise PredictError(f"there is no file {path}; give a CSV with the columns {EXPECTED}") from None
    except OSError as error:
        raise PredictError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise PredictError(f"{path} is not a CSV: it is not text in UTF-8; export it as CSV (UTF-8)")
    return text


def _lines(path: Path, text: str) -> Iterator[Line]:
    """Yield the lines that are not blank, split by the delimiter of the header."""
    first = next((line for line in text.splitlines() if line.strip()), "")
    delimiter = max(DELIMITERS, key=lambda delimiter: _promise(first, delimiter))
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, skipinitialspace=True, strict=True)
    try:
        for cells in reader:
            if any(cell.strip() for cell in cells):
                yield reader.line_num, cells
    except csv.Error as error:
        raise PredictError(f"line {reader.line_num} of {path} is not CSV ({error}); export the table again") from None


def _promise(header: str, delimiter: str) -> tuple[int, int]:
    """Return a key that is largest for the right delimiter: how many known names, how many names."""
    names = [cell.strip(' "').lower() for cell in header.split(delimiter)]
    return len({*COUNTS, *RATIOS} & {*names}), len(names)


def _columns(path: Path, header: list[str]) -> tuple[str, ...]:
    """Return the names of the columns to read; ``PredictError`` if some are missing."""
    wanted = next((names for names in (COUNTS, RATIOS) if {*names} <= {*header}), None)
    if wanted is None:
        shown = ", ".join(header[:SHOWN]) + (", ..." if len(header) > SHOWN else "")
        raise PredictError(f"{path} has the columns {shown[:200]}; expected {EXPECTED} in its first line")
    if twice := next((name for name in wanted if header.count(name) > 1), None):
        raise PredictError(f"{path} has the column {twice} twice; keep one")
    return wanted


def _row(path: Path, line: Line, header: list[str], wanted: tuple[str, ...]) -> Sample | tuple[float, float, float]:
    number, cells = line
    if any(cell.strip() for cell in cells[len(header) :]):
        raise PredictError(
            f"line {number} of {path} has {len(cells)} cells, but the header has {len(header)}; if numbers have a "
            "decimal comma, separate cells by semicolons"
        )
    found = dict(zip(header, cells, strict=False))
    first, second, accuracy = (_number(found.get(name, ""), name, f"line {number} of {path}") for name in wanted)
    if wanted == RATIOS:
        return first, second, accuracy
    counts = zip(COUNTS, (first, second), strict=False)
    return Sample(Budget(*(_count(value, name, f"line {number} of {path}") for name, value in counts)), accuracy)


def _number(cell: str, name: str, where: str) -> float:
    text = cell.strip()
    if not text:
        raise PredictError(f"{where} has no {name}; expected a number")
    try:
        value = float(text.replace(",", "."))
    except ValueError:
        value = float("nan")
    if not isfinite(value):
        raise PredictError(f"{where} has the {name} {text[:40]!r}; expected a number")
    return value


def _count(value: float, name: str, where: str) -> int:
    if value != int(value) or value < 0:
        raise PredictError(f"{where} has the {name} {value:g}; expected a whole number of layers, at least 0")
    return int(value)
