"""The figures that the paper prints, with the lines of its LaTeX source where they stand; nothing is computed here."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

REFERENCE = Path(__file__).parent / "reference"


@cache
def reference() -> dict[str, Any]:
    """Return the facts to test against, some of them printed in the paper."""
    found: dict[str, Any] = json.loads((REFERENCE / "reference.json").read_text())
    return found


@cache
def _paper() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((REFERENCE / "paper_tables.json").read_text())
    return found


def rows_of(number: int) -> list[dict[str, Any]]:
    """Return the rows of a table of the paper."""
    found: list[dict[str, Any]] = _paper()["tables"][str(number)]["rows"]
    return found


def printed(number: int, group: str, row: str) -> dict[str, Any]:
    """Return one row of a table of the paper.

    >>> printed(8, "DeiT-B", "HetDPT (8 layers)")["macs_g"]
    11.8
    """
    return next(one for one in rows_of(number) if (one["group"], one["row"]) == (group, row))


def said(name: str) -> dict[str, Any]:
    """Return a sentence of the paper: its line, the quote as it reads once typeset, and the figures in it.

    >>> said("reduction_main")["quote"], said("reduction_main")["line"]
    ('reducing computation by 33%', 470)
    """
    found = _paper()["text"][name]
    quote = found["quote"].replace("\\%", "%").replace("$\\times$", "×").replace("  ", " ")
    return {**found, "quote": quote}
