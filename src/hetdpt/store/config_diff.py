"""The first difference between the settings of a run directory and those given now."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hetdpt.core.errors import FileError, first_line
from hetdpt.store.atomic import parse_json


def read_json(file: Path) -> dict[str, Any]:
    """Return the JSON object in ``file``; ``FileError`` if there is none."""
    try:
        values = parse_json(file.read_text(encoding="utf-8"))
        if not isinstance(values, dict):
            raise ValueError("not a JSON object")
    except (OSError, ValueError) as error:
        raise FileError(f"{file} cannot be read ({first_line(error)}); give another directory") from None
    return values


def first_difference(before: dict[str, Any], now: dict[str, Any]) -> str | None:
    """Return the first difference, as in ``training.lr = 0.1, not 0.2``; None if there is none.

    The order is that of ``now``; settings that only ``before`` has are last.

    >>> first_difference({"seed": 0, "training": {"lr": 0.1}}, {"training": {"lr": 0.2}, "seed": 1})
    'training.lr = 0.1, not 0.2'
    """
    old, new = flat(before), flat(json.loads(json.dumps(now)))
    for key in dict.fromkeys([*new, *sorted(old)]):
        if old.get(key) != new.get(key):
            return f"{key} = {_short(old.get(key))}, not {_short(new.get(key))}"
    return None


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested values by their path, such as ``config.recovery.training.lr``."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:40]}..."
