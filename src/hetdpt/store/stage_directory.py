"""The stages of a run directory: numbered folders, each with what it was asked for and what it came to. No torch here.

RUN/config.yaml         the whole configuration
RUN/flow.json           the names of the stages that the run has
RUN/summary.json        what the run came to, once it is done
RUN/04-allocate/        a stage; its number is that of its name in ``STAGES``
    stage.json          what it was asked for and, once it is done, what it came to
    now.json            while it is at work: how far it is
    work/               what it needs to go on after a kill, and what it leaves behind

A stage was asked for ``settings``, which are fields of the configuration, and ``inputs``, which are checksums of what
other stages came to, of the model and the data. Both equal: it is not done again. What it leaves in RUN itself is named
with its checksum under ``files`` of its result. Paths in here are relative, so that a run can be moved.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hetdpt.core.errors import FileError, first_line
from hetdpt.store.atomic import find_sealed_json, parse_json, require_new, sha256, write_sealed_json, written
from hetdpt.store.config_diff import first_difference, read_json
from hetdpt.store.lock import alone

STAGES = (
    "analyse", "collect", "fit", "allocate", "balance", "select", "narrow", "recover", "merge", "reduce", "measure",
    "save", "compare", "report",
)  # fmt: skip
CONFIG, FLOW, SUMMARY = "config.yaml", "flow.json", "summary.json"
STAGE, NOW, WORK = "stage.json", "now.json", "work"
Asked = Mapping[str, Mapping[str, Any]]
"""The ``settings`` and ``inputs`` of a stage."""
BEAT = 2.0  # seconds between two notes of how far a stage is


@dataclass(frozen=True)
class StageRecord:
    """One stage of a run, begun or done."""

    name: str
    directory: Path
    asked: dict[str, dict[str, Any]]
    """``settings`` and ``inputs``, as plain JSON."""
    begun: str = ""
    """When, in UTC."""
    seconds: float = 0.0
    """At work, all in all."""
    versions: dict[str, str] = field(default_factory=dict)
    """Of the libraries that it was done with."""
    result: dict[str, Any] | None = None
    """What it came to, as plain JSON; None until it is done."""

    @property
    def number(self) -> int:
        return STAGES.index(self.name) + 1

    @property
    def is_done(self) -> bool:
        return self.result is not None

    @property
    def fingerprint(self) -> str:
        return checksum(self.asked)

    @property
    def now(self) -> dict[str, Any]:
        """How far it is: ``text``, ``done``, ``total``, ``time`` and ``seconds`` at work; empty where nobody knows."""
        try:
            found = read_json(self.directory / NOW)
        except FileError:
            return {}
        numbers = (found.get(name) for name in ("done", "total", "time", "seconds"))
        return found if all(isinstance(number, int | float) for number in numbers) else {}

    @property
    def files(self) -> dict[str, str | None]:
        """What it left in the run directory, by name: a checksum, or None for a folder."""
        found: dict[str, str | None] = (self.result or {}).get("files", {})
        return found

    @property
    def is_whole(self) -> bool:
        """Whether all of that is still there, as it was."""
        run = self.directory.parent
        return all(
            (run / name).exists() and (seal is None or sha256(run / name) == seal) for name, seal in self.files.items()
        )

    @property
    def is_untouched(self) -> bool:
        """Whether nothing was done yet, so that nothing is lost by asking for something else."""
        work = self.directory / WORK
        return not self.is_done and not (work.is_dir() and any(work.iterdir()))

    def write(self) -> None:
        """Write ``stage.json``, at once."""
        values = {"stage": self.name, "fingerprint": self.fingerprint, "is_done": self.is_done, **asdict(self)}
        del values["name"], values["directory"]
        self.directory.mkdir(parents=True, exist_ok=True)
        write_sealed_json(self.directory / STAGE, values)

    @classmethod
    def read(cls, directory: Path) -> StageRecord:
        file = directory / STAGE
        names = ("asked", "begun", "seconds", "versions", "result")
        try:
            values = find_sealed_json(file, "") or {}
            found = cls(values["stage"], directory, **{name: values[name] for name in names})
            is_sound = found.name in STAGES and found.fingerprint == values["fingerprint"]
            if not is_sound or not isinstance(found.result, dict | None) or not all(map(_is_plain, found.files)):
                raise ValueError
        except (FileError, KeyError, TypeError, ValueError, AttributeError):
            raise FileError(f"{file} is damaged; do that stage again with --redo {directory.name[3:]}") from None
        return found


def _is_plain(name: str) -> bool:
    """Whether ``name`` is that of something in the run directory, and not of a place elsewhere."""
    return name == Path(name).name and name not in ("", ".", "..")


def stage_directory(run: Path, name: str) -> Path:
    """Return the folder of a stage.

    >>> stage_directory(Path("RUN"), "allocate").name
    '04-allocate'
    """
    return run / f"{STAGES.index(name) + 1:02d}-{name}"


def read_stages(run: Path) -> list[StageRecord]:
    """Return the stages that are begun or done in a run directory, in order; ``FileError`` if it is none.

    What is left of stages that the run does not have any more is passed over.
    """
    if not (run / CONFIG).is_file():
        raise FileError(f"{run} is no directory of hetdpt run: it has no {CONFIG}; give one that has")
    folders = (stage_directory(run, name) for name in read_flow(run))
    return [StageRecord.read(folder) for folder in folders if (folder / STAGE).is_file()]


def read_flow(run: Path) -> tuple[str, ...]:
    """Return the names of the stages that a run has, in order; all there are where nobody has written them."""
    file = run / FLOW
    if not file.is_file():
        return STAGES
    try:
        found = parse_json(file.read_text(encoding="utf-8"))
        return tuple(name for name in STAGES if name in found)
    except (OSError, ValueError, TypeError) as error:
        raise FileError(f"{file} is damaged ({first_line(error)}); the command of the run writes it again") from None


def begin(
    run: Path,
    name: str,
    settings: Mapping[str, Any],
    inputs: Mapping[str, Any],
    versions: dict[str, str],
    is_derived: bool = False,
) -> StageRecord:
    """Return the stage as it was left, or begun; ``FileError`` if it was begun with something else.

    One that ``is_derived`` costs nothing, and is begun anew instead.
    """
    folder, asked = stage_directory(run, name), {"settings": dict(settings), "inputs": dict(inputs)}
    if (folder / STAGE).is_file():
        record = StageRecord.read(folder)
        difference = first_difference(record.asked, asked)
        if difference is None and (record.is_whole or not record.is_done):
            return record if record.is_done else _resumed(record, versions)
        if difference is not None and not is_derived and not record.is_untouched:
            raise FileError(_changed(run, name, difference))
    now = datetime.now(UTC).isoformat(timespec="seconds")
    record = StageRecord(name, folder, json.loads(json.dumps(asked)), now, versions=versions)
    record.write()
    return record


def _resumed(record: StageRecord, versions: dict[str, str]) -> StageRecord:
    """Return a stage to go on with: at work for as long as it was, with the versions of both times."""
    both = dict(record.versions)
    for name, new in versions.items():
        both[name] = " and ".join(dict.fromkeys([*both.get(name, new).split(" and "), new]))
    return replace(record, seconds=record.now.get("seconds", 0.0), versions=both)


@contextmanager
def held(
    run: Path, config: str, asked: Mapping[str, Asked], redo: str | None = None, derived: Collection[str] = ()
) -> Iterator[None]:
    """Hold a run directory, new or begun; ``FileError`` where a stage was begun with something else, by its name.

    ``asked`` is what is known beforehand of the stages that the run has: all settings, some inputs. ``redo`` removes
    that stage and all that follow. Nothing is removed and nothing is written before all the others have been compared.
    Stages in ``derived`` are not compared: they are begun anew where something has changed.
    """
    _make(run)
    with alone(run):
        kept = STAGES[: STAGES.index(redo)] if redo else STAGES
        for name in (name for name in asked if name in kept and name not in derived):
            _require_same(run, name, asked[name])
        if redo:
            _undo(run, redo)
        for name, text in {FLOW: json.dumps(list(asked)), CONFIG: config}.items():
            _write(run / name, text)
        yield


def is_as_before(run: Path, name: str, asked: Asked) -> bool:
    """Whether a stage is done, and was asked for the same as far as that is known beforehand."""
    folder = stage_directory(run, name)
    if not (folder / STAGE).is_file():
        return False
    record = StageRecord.read(folder)
    return record.is_done and record.is_whole and _difference(record, asked) is None


def _write(file: Path, text: str) -> None:
    """Write ``text`` at once, unless it is there already."""
    if not file.is_file() or file.read_text(encoding="utf-8") != text:
        with written(file) as scratch:
            scratch.write_text(text, encoding="utf-8")


def _make(run: Path) -> None:
    """Make a run directory, unless it is one; what holds other things is refused."""
    if run.exists() and not run.is_dir():
        raise FileError(f"{run} is a file; give a directory for the run")
    if not run.is_dir():
        require_new(run)
    try:
        run.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FileError(f"{run} cannot be written: {error.strerror}; give another path") from None
    others = [file for file in run.iterdir() if not file.name.startswith(f".{FLOW}.")]  # which a kill has left
    if others and not (run / FLOW).is_file():
        raise FileError(f"{run} holds other things than a run; give a new or an empty directory")


def _require_same(run: Path, name: str, asked: Asked) -> None:
    if (stage_directory(run, name) / STAGE).is_file():
        record = StageRecord.read(stage_directory(run, name))
        difference = _difference(record, asked)
        if difference is not None and not record.is_untouched:
            raise FileError(_changed(run, name, difference))


def _difference(record: StageRecord, asked: Asked) -> str | None:
    """Return what differs first, of what is known beforehand."""
    inputs = {name: value for name, value in record.asked["inputs"].items() if name in asked["inputs"]}
    return first_difference({**record.asked, "inputs": inputs}, {name: dict(part) for name, part in asked.items()})


def _changed(run: Path, name: str, difference: str) -> str:
    what = difference.removeprefix("settings.")
    return (
        f"the stage {name} of {run} was begun with {what}; give the same again to go on, another --out, or "
        f"--redo {name} to do it and all that follow anew"
    )


def _undo(run: Path, name: str) -> None:
    """Remove a stage and all that come after it, the last one first, with what they left in the run directory."""
    for later in reversed(STAGES[STAGES.index(name) :]):
        folder = stage_directory(run, later)
        for left in _files(folder):
            shutil.rmtree(run / left) if (run / left).is_dir() else (run / left).unlink(missing_ok=True)
        if folder.is_dir():
            (folder / STAGE).unlink(missing_ok=True)  # first: what a kill leaves here then counts as not begun
            shutil.rmtree(folder)


def _files(folder: Path) -> list[str]:
    """Return the names of what a stage left in the run directory; none where its record is damaged."""
    try:
        return [*StageRecord.read(folder).files]
    except FileError:
        return []


class Clock:
    """Tells how long a stage has been at work, and writes now and then how far it is."""

    def __init__(self, record: StageRecord) -> None:
        self.record, self._begun, self._last = record, time.monotonic() - record.seconds, 0.0

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._begun

    def note(self, text: str, done: int, total: int) -> None:
        if time.monotonic() - self._last < BEAT:
            return
        self._last = time.monotonic()
        values = {"text": text, "done": done, "total": total, "time": time.time(), "seconds": self.seconds}
        with written(self.record.directory / NOW) as scratch:
            scratch.write_text(json.dumps(values), encoding="utf-8")

    def finish(self, result: dict[str, Any]) -> StageRecord:
        """Write what the stage came to."""
        done = replace(self.record, result=json.loads(json.dumps(result)), seconds=self.seconds)
        done.write()
        (self.record.directory / NOW).unlink(missing_ok=True)
        return done


def checksum(values: Any) -> str:
    """Return the SHA-256 of plain JSON."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
