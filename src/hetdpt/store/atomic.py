"""Files that are either whole or absent: atomic writes, checksums. No torch here."""

from __future__ import annotations

import csv
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

from hetdpt.core import host
from hetdpt.core.errors import FileError, first_line

T = TypeVar("T")
CHECKSUM = "checksum"


def require_new(target: Path, overwrite: bool = False, marker: str | None = None) -> None:
    """Raise ``FileError`` if writing ``target`` would replace something other than an empty directory.

    ``overwrite`` allows it, but of directories only those with the file ``marker``: ours.
    """
    if file := next((parent for parent in target.parents if parent.is_file()), None):
        raise FileError(f"{target} cannot be written, because {file} is a file, not a directory; give another path")
    is_taken = target.exists() and (not target.is_dir() or any(target.iterdir()))
    if is_taken and not overwrite:
        raise FileError(f"{target} exists already; give another path, or allow overwriting")
    if is_taken and marker is not None and not (target / marker).is_file():
        raise FileError(
            f"{target} is not overwritten, because it has no {marker} and so was not made by hetdpt; remove it yourself"
        )


def make_run_directory(directory: Path, first: str) -> None:
    """Create ``directory`` unless it exists; ``FileError`` if it holds files but not ``first``, as a run does."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FileError(f"{directory} cannot be written: {error.strerror}; give another path") from None
    others = [file for file in directory.iterdir() if not file.name.startswith(f".{first}.")]  # which a kill has left
    if others and not (directory / first).is_file():
        raise FileError(f"{directory} is not empty and is not a hetdpt run directory; give a new or an empty directory")


@contextmanager
def new_directory(target: Path, marker: str, overwrite: bool = False) -> Iterator[Path]:
    """Yield a scratch directory that becomes ``target`` when the block ends, all at once or not at all.

    ``overwrite`` replaces an earlier one, recognised by the file ``marker`` in it.
    """
    require_new(target, overwrite, marker)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    except OSError as error:
        raise FileError(f"{target} cannot be written: {error.strerror}; give another path") from None
    try:
        scratch.chmod(0o777 & ~_umask())
        yield scratch
        for file in scratch.iterdir():
            flush(file)
        _swap(scratch, target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _swap(scratch: Path, target: Path) -> None:
    """Put ``scratch`` in the place of ``target``; if that fails the old one is restored."""
    aside = scratch.with_name(f"{scratch.name}.old")
    if target.exists():
        os.replace(target, aside)
    try:
        os.replace(scratch, target)
    except OSError:
        if aside.exists():
            os.replace(aside, target)
        raise
    shutil.rmtree(aside, ignore_errors=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


@contextmanager
def written(target: Path) -> Iterator[Path]:
    """Yield a scratch file of the same suffix that becomes ``target`` when the block ends, whole or not at all."""
    name = f".{target.name}.{uuid4().hex}{target.suffix}"  # processes of other machines may have our number
    scratch = target.with_name(name)
    try:
        yield scratch
        flush(scratch)
        os.replace(scratch, target)
    finally:
        scratch.unlink(missing_ok=True)


def flush(path: Path) -> None:
    """Flush ``path``, a file or a directory, to disk; on Windows only files can be flushed."""
    if host.IS_WINDOWS and path.is_dir():
        return
    handle = os.open(path, os.O_RDWR if host.IS_WINDOWS else os.O_RDONLY)  # Windows flushes no handle that only reads
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_text(file: Path, text: str) -> None:
    """Write ``text``, whole or not at all."""
    with written(file) as scratch:
        scratch.write_text(text, encoding="utf-8")


def write_csv(file: Path, columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> None:
    """Write a line for each row, all or none; a cell is empty where a row has no value, or None."""
    with written(file) as scratch, scratch.open("w", newline="", encoding="utf-8") as opened:
        lines = csv.DictWriter(opened, columns)
        lines.writeheader()
        lines.writerows(rows)


def write_json(file: Path, values: Any) -> None:
    """Write ``values`` as JSON, whole or not at all."""
    file.parent.mkdir(exist_ok=True)
    write_text(file, json.dumps(values, indent=1) + "\n")


def parse_json(text: str | bytes) -> Any:
    """Return the value of the JSON ``text``; ``ValueError`` if it is not valid."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def write_sealed_json(file: Path, values: dict[str, Any]) -> None:
    """Write ``values`` with a checksum of themselves, whole or not at all."""
    write_json(file, sealed(values))


def read_sealed_json(file: Path) -> dict[str, Any]:
    """Return what ``write_sealed_json`` wrote of a saved model; ``FileError`` if it is missing or was altered since."""
    if not file.is_file():  # nor a device, which could be read for ever
        raise FileError(f"{file} is missing; a directory written by hetdpt.save was expected")
    try:
        values = parse_json(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise FileError(f"{file} is damaged: it is not JSON ({error}); save the model again") from None
    try:
        return unsealed(values)
    except ValueError:
        raise FileError(f"{file} was altered or damaged since it was saved; save the model again") from None


def find_sealed_json(file: Path, way_out: str) -> dict[str, Any] | None:
    """Return what ``write_sealed_json`` wrote, None if there is no file; ``FileError`` with ``way_out`` if altered."""
    try:
        return unsealed(parse_json(file.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise FileError(f"{file} is damaged ({first_line(error)}); {way_out}") from None


def find_sealed(file: Path, way_out: str, make: Callable[[dict[str, Any]], T]) -> T | None:
    """Return the value that ``make`` makes of ``find_sealed_json``; ``FileError`` too if it cannot."""
    try:
        values = find_sealed_json(file, way_out)
        return None if values is None else make(values)
    except (ValueError, TypeError, KeyError) as error:
        raise FileError(f"{file} is damaged ({first_line(error)}); {way_out}") from None


def sealed(values: dict[str, Any]) -> dict[str, Any]:
    """Return ``values`` with a checksum of themselves."""
    return {**values, CHECKSUM: checksum(values)}


def unsealed(values: Any) -> dict[str, Any]:
    """Return the values that ``sealed`` was given; ``ValueError`` if they were altered or have no checksum.

    >>> unsealed(sealed({"a": 1}))
    {'a': 1}
    """
    if not isinstance(values, dict) or values.pop(CHECKSUM, None) != checksum(values):
        raise ValueError("its checksum does not match")
    return values


def checksum(values: Any) -> str:
    """Return the SHA-256 of ``values`` as JSON."""
    values = json.loads(json.dumps(values))  # numbers that are keys become texts, and are sorted as such
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
