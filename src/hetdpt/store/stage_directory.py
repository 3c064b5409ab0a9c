"""The stages of a run directory: numbered folders, each with its settings, inputs and result. No torch here.

RUN/config.yaml         the whole configuration
RUN/flow.json           the names of all stages in order, and whether this run has each
RUN/summary.json        the outcome of the run, once it is done
RUN/04-allocate/        a stage; its number is that of its name in ``flow.json``
    stage.json          its settings and inputs and, once it is done, its result
    now.json            while it is running: its progress
    work/               what it needs to resume after a kill, and what it leaves behind

What decides a result (``asked``) are ``settings``, which are fields of the configuration, and ``inputs``, which are
checksums of the results of other stages, of the model and the data. If both are equal, a stage does not run again. What
it writes to RUN itself is named with its checksum under ``files`` of its result. Paths are relative, so that a run can
be moved. This module does not know which stages exist.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hetdpt.core.errors import FileError, first_line
from hetdpt.store.atomic import (
    checksum,
    find_sealed_json,
    make_run_directory,
    parse_json,
    require_new,
    sha256,
    write_sealed_json,
    write_text,
)
from hetdpt.store.config_diff import first_difference, read_json
from hetdpt.store.lock import alone

CONFIG, FLOW, SUMMARY = "config.yaml", "flow.json", "summary.json"
STAGE, NOW, WORK = "stage.json", "now.json", "work"
Asked = Mapping[str, Mapping[str, Any]]
"""The ``settings`` and ``inputs`` of a stage."""
BEAT = 2.0  # seconds between two notes of progress
OLDER = "was written by an older version of hetdpt; start a new run directory or use the version that made it"


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
    """Spent on it, all in all."""
    versions: dict[str, str] = field(default_factory=dict)
    """Of the libraries that it ran with."""
    result: dict[str, Any] | None = None
    """As plain JSON; None until it is done."""

    @property
    def is_done(self) -> bool:
        return self.result is not None

    @property
    def fingerprint(self) -> str:
        return checksum(self.asked)

    @property
    def now(self) -> dict[str, Any]:
        """Its progress: ``text``, ``done``, ``total``, ``time`` and ``seconds`` spent; empty if not known."""
        try:
            found = read_json(self.directory / NOW)
        except FileError:
            return {}
        numbers = (found.get(name) for name in ("done", "total", "time", "seconds"))
        return found if all(isinstance(number, int | float) for number in numbers) else {}

    @property
    def files(self) -> dict[str, str | None]:
        """What it wrote to the run directory, by name: a checksum, or None for a folder."""
        found: dict[str, str | None] = (self.result or {}).get("files", {})
        return found

    @property
    def is_whole(self) -> bool:
        """Whether all of its files are still there, unchanged."""
        run = self.directory.parent
        return all(
            (run / name).exists() and (seal is None or sha256(run / name) == seal) for name, seal in self.files.items()
        )

    @property
    def is_untouched(self) -> bool:
        """Whether nothing was done yet, so that nothing is lost by other settings."""
        work = self.directory / WORK
        return not self.is_done and not (work.is_dir() and any(work.iterdir()))

    def write(self) -> None:
        """Write ``stage.json`` atomically."""
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
            is_sound = found.name == directory.name[3:] and found.fingerprint == values["fingerprint"]
            if not is_sound or not isinstance(found.result, dict | None) or not all(map(_is_plain, found.files)):
                raise ValueError
        except (FileError, KeyError, TypeError, ValueError, AttributeError):
            raise FileError(f"{file} is damaged; run that stage again with --redo {directory.name[3:]}") from None
        return found


def _is_plain(name: str) -> bool:
    """Whether ``name`` is that of something in the run directory, and not of a place elsewhere."""
    return name == Path(name).name and name not in ("", ".", "..")


def stage_directory(run: Path, name: str) -> Path:
    """Return the folder of a stage."""
    flow = [*read_flow(run)]
    if name not in flow:
        raise FileError(f"{run} {OLDER}")
    return run / f"{flow.index(name) + 1:02d}-{name}"


def read_stages(run: Path) -> list[StageRecord]:
    """Return the stages that are begun or done in a run directory, in order; ``FileError`` if it is not one.

    Folders of stages that the run no longer has are ignored.
    """
    if not (run / CONFIG).is_file():
        raise FileError(f"{run} is not a directory of hetdpt run: it has no {CONFIG}; give one that has")
    found = (_record(run, name) for name, is_needed in read_flow(run).items() if is_needed)
    return [record for record in found if record is not None]


def _record(run: Path, name: str) -> StageRecord | None:
    folder = stage_directory(run, name)
    return StageRecord.read(folder) if (folder / STAGE).is_file() else None


def read_flow(run: Path) -> dict[str, bool]:
    """Return the names of all stages in order, and whether the run has each."""
    file = run / FLOW
    try:
        found = parse_json(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise FileError(f"{file} cannot be read ({first_line(error)}); run the same command again") from None
    is_table = isinstance(found, dict) and all(isinstance(is_needed, bool) for is_needed in found.values())
    if not is_table or not all(map(str.isidentifier, found)):
        raise FileError(f"{run} {OLDER}")
    return dict(found)


def begin(run: Path, name: str, asked: Asked, versions: dict[str, str], is_derived: bool = False) -> StageRecord:
    """Return the stage as it was left, or begun; ``FileError`` if it was begun with other settings or inputs.

    One that ``is_derived`` costs nothing, and begins again instead.
    """
    record, plain = _record(run, name), json.loads(json.dumps(asked))
    if record is not None:
        difference = first_difference(record.asked, plain)
        if difference is None and (record.is_whole or not record.is_done):
            return record if record.is_done else _resumed(record, versions)
        if difference is not None and not is_derived and not record.is_untouched:
            raise FileError(_changed(run, name, difference))
    now = datetime.now(UTC).isoformat(timespec="seconds")
    record = StageRecord(name, stage_directory(run, name), plain, now, versions=versions)
    record.write()
    return record


def _resumed(record: StageRecord, versions: dict[str, str]) -> StageRecord:
    """Return a stage to resume, with the time spent on it so far and the versions of both times."""
    both = dict(record.versions)
    for name, new in versions.items():
        both[name] = " and ".join(dict.fromkeys([*both.get(name, new).split(" and "), new]))
    return replace(record, seconds=record.now.get("seconds", 0.0), versions=both)


@contextmanager
def held(
    run: Path,
    flow: Sequence[str],
    config: str,
    asked: Mapping[str, Asked],
    redo: str | None = None,
    derived: Collection[str] = (),
) -> Iterator[None]:
    """Lock a run directory, new or begun; ``FileError`` if a stage was begun with other settings or inputs.

    ``flow`` names all stages in order. ``asked`` is what is known beforehand of those that the run has: all settings,
    some inputs. ``redo`` removes that stage and all later ones. Nothing is removed and nothing is written before all
    the others have been compared. Stages in ``derived`` are not compared: they begin again if something has changed.
    """
    _make(run)
    with alone(run):
        if (run / FLOW).is_file():
            if [*read_flow(run)] != [*flow]:
                raise FileError(f"{run} {OLDER}")
            kept = flow[: flow.index(redo)] if redo else flow
            for name in (name for name in asked if name in kept and name not in derived):
                _require_same(run, name, asked[name])
            if redo:
                _undo(run, redo)
        _write(run / FLOW, json.dumps({name: name in asked for name in flow}))
        _write(run / CONFIG, config)
        yield


def is_as_before(run: Path, name: str, asked: Asked) -> bool:
    """Whether a stage is done with the same settings and inputs, as far as they are known beforehand."""
    record = _record(run, name) if (run / FLOW).is_file() else None
    return record is not None and record.is_done and record.is_whole and _difference(record, asked) is None


def _write(file: Path, text: str) -> None:
    """Write ``text`` atomically, unless it is there already."""
    if not file.is_file() or file.read_text(encoding="utf-8") != text:
        write_text(file, text)


def _make(run: Path) -> None:
    """Make a run directory, unless it is one; ``FileError`` if it holds other files."""
    if run.exists() and not run.is_dir():
        raise FileError(f"{run} is a file; give a directory for the run")
    if not run.is_dir():
        require_new(run)
    make_run_directory(run, FLOW)


def _require_same(run: Path, name: str, asked: Asked) -> None:
    record = _record(run, name)
    difference = _difference(record, asked) if record else None
    if record and difference is not None and not record.is_untouched:
        raise FileError(_changed(run, name, difference))


def _difference(record: StageRecord, asked: Asked) -> str | None:
    """Return the first difference, of what is known beforehand."""
    inputs = {name: value for name, value in record.asked["inputs"].items() if name in asked["inputs"]}
    return first_difference({**record.asked, "inputs": inputs}, {name: dict(part) for name, part in asked.items()})


def _changed(run: Path, name: str, difference: str) -> str:
    what = difference.removeprefix("settings.")
    return (
        f"the stage {name} of {run} was begun with {what}; give the same to resume, another --out, or --redo {name} to "
        "run it and all later stages again"
    )


def _undo(run: Path, name: str) -> None:
    """Remove a stage and all later ones, the last one first, with what they wrote to the run directory."""
    flow = [*read_flow(run)]
    for later in reversed(flow[flow.index(name) :]):
        folder = stage_directory(run, later)
        for left in _files(folder):
            shutil.rmtree(run / left) if (run / left).is_dir() else (run / left).unlink(missing_ok=True)
        if folder.is_dir():
            (folder / STAGE).unlink(missing_ok=True)  # first: what a kill leaves here then counts as not begun
            shutil.rmtree(folder)


def _files(folder: Path) -> list[str]:
    try:
        return [*StageRecord.read(folder).files]
    except FileError:
        return []


class Clock:
    """Measures the time spent on a stage, and writes its progress now and then."""

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
        write_text(self.record.directory / NOW, json.dumps(values))

    def finish(self, result: dict[str, Any]) -> StageRecord:
        """Write the result of the stage, plain JSON."""
        done = replace(self.record, result=result, seconds=self.seconds)
        done.write()
        (self.record.directory / NOW).unlink(missing_ok=True)
        return done
