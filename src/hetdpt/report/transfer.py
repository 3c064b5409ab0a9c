"""Results of transfer: cells of a table and lines below it. No torch here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hetdpt.core.format import amount, estimate, layers, percent, signed

Row = Mapping[str, Any]
"""One of ``rows`` in results.json: a model and its results."""


def columns(mode: str) -> list[str]:
    """Return the names of the columns after that of the model."""
    how = ["features", "penalty"] if mode == "probe" else ["epochs"]
    return ["removed", "accuracy [95 %]", "to the first [95 %]", "MACs", "params", *how]


def cells(row: Row) -> list[str]:
    """Return the cells of these columns.

    >>> removed = {"attention": 1, "activation": 0, "removal": "plain", "epochs": None, "strength": 0.01, "width": 192}
    >>> known = {"top1": 97.5, "low": 95.3, "high": 98.7, "macs": 1.1e9, "params": 5.2e6}
    >>> cells({**removed, **known, "difference": -0.5, "difference_low": -1.25, "difference_high": 0.25})[:3]
    ['1 attention layer, plain', '97.50 % [95.3, 98.7]', '−0.50 [−1.25, +0.25]']
    """
    removed = layers(row["attention"], row["activation"]) if row["attention"] or row["activation"] else ""
    to_first = ""
    if row["difference"] is not None:
        ends = row["difference_low"], row["difference_high"]
        to_first = estimate(signed(row["difference"]), *ends, signed)
    how = [str(row["width"]), f"{row['strength']:g}"] if row["epochs"] is None else [str(row["epochs"])]
    return [
        f"{removed}, {row['removal']}" if row["removal"] else removed,
        estimate(percent(row["top1"]), row["low"], row["high"]),
        to_first,
        amount(row["macs"]),
        amount(row["params"]),
        *how,
    ]


def measured(mode: str, rows: Sequence[Row]) -> str:
    """Return in a line how the numbers were measured; values that are the same for all models are given once.

    >>> row = {"device": "cpu", "dtype": "float32", "batch": 64, "images": 360, "training_images": 1437}
    >>> measured("probe", [row, row])
    'cpu, float32, batch 64; 1437 training images, accuracy on 360'
    """
    names = "device", "dtype", "batch"
    device, dtype, batch = (" and ".join(dict.fromkeys(str(row[name]) for row in rows)) for name in names)
    learnt, seen = rows[0]["training_images"], rows[0]["images"]
    last = ", of the last epoch" if mode == "finetune" else ""
    return f"{device}, {dtype}, batch {batch}; {learnt} training images, accuracy on {seen}{last}"


def places(rows: Sequence[Row], directory: Path) -> list[str]:
    """Return a line for each model that says where it was saved.

    >>> places([{"model": "dense", "saved": "models/1/model"}, {"model": "tower", "saved": None}], Path("run"))
    ['dense: saved to run/models/1/model', 'tower: not saved, since a probe cannot be its head']
    """
    return [
        f"{row['model']}: saved to {directory / row['saved']}"
        if row["saved"]
        else f"{row['model']}: not saved, since a probe cannot be its head"
        for row in rows
    ]
