"""Tables as CSV files. No torch here."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any


def write_csv(path: Path, columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> None:
    """Write a line for each row; a cell is empty where a row has nothing, or None."""
    with path.open("w", newline="", encoding="utf-8") as file:
        lines = csv.DictWriter(file, columns)
        lines.writeheader()
        lines.writerows(rows)
