"""Numbers of a run, a line each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hetdpt.errors import FileError
from hetdpt.files import written

METRICS, BOARD = "metrics.jsonl", "tensorboard"


class Metrics:
    """Numbers, one JSON object per line, each with its ``kind`` and ``update``.

    A run that was killed had written lines for updates after its last checkpoint; going on, it writes them again. The
    first line written by this process therefore takes the place of its earlier self and of all that followed.
    """

    def __init__(self, file: Path, board: Path | None = None) -> None:
        self.file, self.board = file, board
        self._is_trimmed = False
        self._writer: Any = None

    def write(self, kind: str, *, update: int, **numbers: Any) -> None:
        """Add a line."""
        if not self._is_trimmed:
            self._trim(kind, update)
            self._writer = _board(self.board, update) if self.board else None
        with self.file.open("a") as file:
            file.write(json.dumps({"kind": kind, "update": update, **numbers}) + "\n")
        if self._writer is not None:
            for name, number in numbers.items():
                if isinstance(number, int | float):
                    self._writer.add_scalar(f"{kind}/{name}", number, update)
            self._writer.flush()

    def read(self, kind: str) -> list[dict[str, Any]]:
        """Return the lines of one kind."""
        return [line for line in self._lines() if line["kind"] == kind]

    def _trim(self, kind: str, update: int) -> None:
        lines = self._lines()
        is_later = [line["update"] > update or (line["update"], line["kind"]) == (update, kind) for line in lines]
        kept = lines[: is_later.index(True)] if any(is_later) else lines
        with written(self.file) as scratch:
            scratch.write_text("".join(json.dumps(line) + "\n" for line in kept))
        self._is_trimmed = True

    def _lines(self) -> list[dict[str, Any]]:
        if not self.file.is_file():
            return []
        lines = []
        for line in self.file.read_text().splitlines():
            try:
                lines.append(json.loads(line))
            except json.JSONDecodeError:  # the last one, cut off when the run was killed
                break
        return lines


def _board(directory: Path, update: int) -> Any:
    """Return a writer for TensorBoard whose earlier numbers from ``update`` on are void."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise FileError(
            "TensorBoard is not installed; install hetdpt[tensorboard], or leave --tensorboard out"
        ) from None
    return SummaryWriter(str(directory), purge_step=update)
