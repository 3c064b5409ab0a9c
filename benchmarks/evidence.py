"""What all benchmarks have in common: rows in a JSON file that knows when, how and on what they were measured.

A file of ``benchmarks/results`` written here is

    {"benchmark": NAME, "sessions": [SESSION, ...], "rows": [{"key": {...}, "values": {...}, "session": 0}, ...]}

A session is a command on a machine on a day. A row's key says what was measured, such as ``{"plan": ..., "batch": 8}``.
A value is a number, ``[value, low, high]`` where there is an interval, or a text. Every row is on disk as soon as it is
known, and one that is there is not measured again: a benchmark that was killed goes on where it was. Several processes
may add to one file. Reading needs no torch.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

from filelock import lock_descriptor

from hetdpt.store.atomic import written

RESULTS = Path(__file__).parent / "results"
SHARED = Path(__file__).parents[2] / "shared" / "data"
VIT_TINY, VIT_TINY_WEIGHTS, IMAGENET = (
    "vit_tiny_patch16_224",
    SHARED / "vit_tiny_patch16_224.safetensors",
    SHARED / "imagenet",
)
OLD_QUICK: dict[str, Any] = {
    "training.epochs": 5,
    "training.lr": 2e-4,
    "training.final_lr": 0.05,
    "training.weight_decay": 0.05,
    "distillation.alpha": 0.9,
    "distillation.hidden": 0.0,
    "augmentation.scale": [0.5, 1.0],
    "hold_out": 0.0,
}
"""What the recipe ``quick`` said before it learnt hidden states; with it the results of then can be measured again."""
Key = dict[str, Any]
Values = dict[str, Any]


@dataclass(frozen=True)
class Row:
    """What was measured, its values, and the number of its session in ``Results.sessions``."""

    key: Key
    values: Values
    session: int


@dataclass(frozen=True)
class Results:
    """A file of results as it was read."""

    benchmark: str
    sessions: tuple[dict[str, Any], ...]
    rows: tuple[Row, ...]

    @classmethod
    def read(cls, file: Path) -> Results:
        """Return what ``file`` holds; nothing where it is not there."""
        if not file.is_file():
            return cls(file.stem, (), ())
        values = json.loads(file.read_text())
        return cls(values["benchmark"], tuple(values["sessions"]), tuple(Row(**row) for row in values["rows"]))

    def where(self, **wanted: Any) -> tuple[Row, ...]:
        """Return the rows whose keys have these entries."""
        return tuple(row for row in self.rows if wanted.items() <= row.key.items())

    def find(self, **key: Any) -> Row | None:
        """Return the row of exactly this key."""
        return next((row for row in self.rows if row.key == key), None)


class Recorder:
    """Adds rows to a file of results, those of one session."""

    def __init__(
        self, file: Path, *, dtype: str = "float32", redo: bool = False, forget: bool = False, **more: Any
    ) -> None:
        """Begin a session. ``redo`` measures again what is there; ``forget`` begins with no rows at all.

        ``more`` is said of the session too.
        """
        from torch import device

        from hetdpt.export.saved import versions
        from hetdpt.measurement.speed import machine_of

        self.file, self.redo, self.added = file, redo, list[Key]()
        file.parent.mkdir(parents=True, exist_ok=True)
        script = Path(sys.argv[0])
        named = script.name if script.parent.name != "benchmarks" else f"benchmarks/{script.name}"
        self.session = {
            "command": shlex.join(["python", named, *sys.argv[1:]]),
            "date": date.today().isoformat(),
            **asdict(machine_of(device("cpu"))),
            "dtype": dtype,
            "commit": _commit(),
            "versions": versions(),
            **more,
        }
        if forget:
            file.unlink(missing_ok=True)

    def has(self, **key: Any) -> bool:
        """Whether a row of this key is there and need not be measured."""
        if self.redo:
            return key in self.added
        return Results.read(self.file).find(**key) is not None

    def add(self, key: Key, **values: Any) -> None:
        """Write a row, in the place of an earlier one of the same key, and print it."""
        with self._alone():
            old = Results.read(self.file)
            sessions = list(old.sessions)
            if self.session not in sessions:
                sessions.append(self.session)
            rows = [row for row in old.rows if row.key != key] + [Row(key, values, sessions.index(self.session))]
            _write(self.file, Results(old.benchmark, tuple(sessions), tuple(rows)))
        self.added.append(key)
        print(f"{self.file.stem}: {line(key)}: {line(values)}", flush=True)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Keep other processes from the file for a while."""
        with self.file.with_name(f".{self.file.name}.lock").open("w") as lock:
            lock_descriptor(lock.fileno())
            yield


def adopt(file: Path, into: Path) -> None:
    """Put the rows of ``file`` among those of ``into``, each in the place of one of the same key."""
    new, old = Results.read(file), Results.read(into)
    left = [row for row in old.rows if new.find(**row.key) is None]
    found = [Row(row.key, row.values, len(old.sessions) + row.session) for row in new.rows]
    _write(into, Results(new.benchmark, (*old.sessions, *new.sessions), (*left, *found)))


def interval(ratio: Any) -> list[float]:
    """Return the [value, low, high] of what has these attributes, such as a measured speedup."""
    return [round(number, 5) for number in (ratio.value, ratio.low, ratio.high)]


def settings(prefix: str, values: dict[str, Any], option: str = "--set") -> list[str]:
    """Return the words of a command line that change settings whose names begin with ``prefix``."""
    return [word for name, value in values.items() for word in (option, f"{prefix}{name}={value}")]


def require_real_data() -> None:
    """End the script in a sentence where the real ViT-Tiny and its images are absent."""
    if not IMAGENET.is_dir():
        sys.exit(f"{SHARED} is absent; this benchmark needs the real ViT-Tiny and ImageNet's images that lie there")


def _commit() -> str:
    """Return the commit of the code that runs, with a + where files of it were changed since; empty if unknown."""
    here = Path(__file__).parent
    command = ["git", "-C", str(here), "describe", "--always", "--dirty=+", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def _write(file: Path, results: Results) -> None:
    """Write ``results``, a line for each row, without the sessions that no row is of any more."""
    used = sorted({row.session for row in results.rows})
    rows = [{**asdict(row), "session": used.index(row.session)} for row in results.rows]
    lines = ",\n  ".join(json.dumps(row) for row in rows)
    sessions = json.dumps([results.sessions[number] for number in used], indent=1).replace("\n", "\n ")
    text = (
        f'{{\n "benchmark": {json.dumps(results.benchmark)},\n "sessions": {sessions},\n "rows": [\n  {lines}\n ]\n}}\n'
    )
    with written(file) as scratch:
        scratch.write_text(text)


def line(values: dict[str, Any]) -> str:
    """Return names and values in a line."""
    return ", ".join(f"{name} {value}" for name, value in values.items())
