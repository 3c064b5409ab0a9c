"""Metrics of a run, one line each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hetdpt.core.errors import FileError
from hetdpt.store.atomic import parse_json, sealed, unsealed, write_text

EPOCH = "epoch"
METRICS, BOARD = "metrics.jsonl", "tensorboard"


class Metrics:
    """Metrics, one JSON object per line, each with its ``kind`` and ``update`` and a checksum.

    A run that was killed had written lines for updates after its last checkpoint; when resumed, it writes them again.
    The first line written by this process therefore replaces its earlier version and all lines after it. Lines that
    are lost or damaged in another way raise ``FileError``: accuracies of epochs are results.
    """

    def __init__(self, file: Path, board: Path | None = None) -> None:
        self.file, self.board = file, board
        self._is_trimmed, self._epochs = False, 0
        self._writer: Any = None

    def write(self, kind: str, *, update: int, **numbers: Any) -> None:
        """Add a line; an epoch has its ``number``, from 0 on, without gaps."""
        if not self._is_trimmed:
            self._trim(kind, update)
            self._writer = _board(self.board, update) if self.board else None
        if kind == EPOCH:
            self._require_next(numbers["number"])
        with self.file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(sealed({"kind": kind, "update": update, **numbers})) + "\n")
        if self._writer is not None:
            for name, number in numbers.items():
                if isinstance(number, int | float):
                    self._writer.add_scalar(f"{kind}/{name}", number, update)
            self._writer.flush()

    def read(self, kind: str) -> list[dict[str, Any]]:
        """Return the lines of one kind."""
        return [line for line in self._lines() if line["kind"] == kind]

    def _require_next(self, number: int) -> None:
        if number != self._epochs:
            raise FileError(
                f"{self.file} lacks epochs: after {self._epochs} of them number {number} follows; {self._way_out}"
            )
        self._epochs += 1

    @property
    def _way_out(self) -> str:
        return f"restore the file, or remove {self.file.parent} to start again"

    def _trim(self, kind: str, update: int) -> None:
        lines = self._lines()
        is_later = [line["update"] > update or (line["update"], line["kind"]) == (update, kind) for line in lines]
        kept = lines[: is_later.index(True)] if any(is_later) else lines
        write_text(self.file, "".join(json.dumps(sealed(line)) + "\n" for line in kept))
        self._is_trimmed, self._epochs = True, sum(line["kind"] == EPOCH for line in kept)

    def _lines(self) -> list[dict[str, Any]]:
        if not self.file.is_file():
            return []
        *whole, _ = self.file.read_bytes().split(b"\n")  # a line without an end was cut off when the run was killed
        return [self._line(number, line) for number, line in enumerate(whole, 1) if line]

    def _line(self, number: int, text: bytes) -> dict[str, Any]:
        try:
            return unsealed(parse_json(text))
        except ValueError:
            raise FileError(f"line {number} of {self.file} is damaged; {self._way_out}") from None


def _board(directory: Path, update: int) -> Any:
    """Return a writer for TensorBoard that replaces earlier numbers from ``update`` on."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise FileError(
            "TensorBoard is not installed; install hetdpt[tensorboard], or leave --tensorboard out"
        ) from None
    return SummaryWriter(str(directory), purge_step=update)
