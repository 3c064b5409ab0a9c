"""Files that are either whole or not there: atomic writes, checksums. No torch here."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

from hetdpt.core import host
from hetdpt.core.errors import FileError, first_line

T = TypeVar("T")
CHECKSUM = "checksum"


def require_new(target: Path, overwrite: bool = False, marker: str | None = None) -> None:
    """Raise ``FileError`` if writing ``target`` would replace something; an empty directory is nothing.

    ``overwrite`` allows it, but of directories only those that hold the file ``marker``: ours.
    """
    if file := next((parent for parent in target.parents if parent.is_file()), None):
        raise FileError(f"{target} cannot be written, because {file} is a file and no directory; give another place")
    is_taken = target.exists() and (not target.is_dir() or any(target.iterdir()))
    if is_taken and not overwrite:
        raise FileError(f"{target} exists already; give another place, or overwrite it on purpose")
    if is_taken and marker is not None and not (target / marker).is_file():
        raise FileError(
            f"{target} is not overwritten, because it holds no {marker} and so is not ours; remove it yourself"
        )


@contextmanager
def new_directory(target: Path, marker: str, overwrite: bool = False) -> Iterator[Path]:
    """Give a scratch directory that becomes ``target`` when the block ends, all at once or not at all.

    ``overwrite`` replaces an earlier one, known by the file ``marker`` in it.
    """
    require_new(target, overwrite, marker)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    except OSError as error:
        raise FileError(f"{target} cannot be written: {error.strerror}; give another place") from None
    try:
        scratch.chmod(0o777 & ~_umask())
        yield scratch
        for file in scratch.iterdir():
            flush(file)
        _swap(scratch, target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _swap(scratch: Path, target: Path) -> None:
    """Put ``scratch`` in the place of ``target``; where that fails the old one comes back."""
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
    """Give a scratch file of the same suffix that becomes ``target`` when the block ends, all at once or not at all."""
    name = f".{target.name}.{uuid4().hex}{target.suffix}"  # processes of other machines may have our number
    scratch = target.with_name(name)
    try:
        yield scratch
        flush(scratch)
        os.replace(scratch, target)
    finally:
        scratch.unlink(missing_ok=True)


def flush(path: Path) -> None:
    """Make the system write ``path``, a file or a directory, to disk now; Windows does so with files alone."""
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


def write_json(file: Path, values: Any) -> None:
    """Write ``values`` as JSON, whole or not at all."""
    file.parent.mkdir(exist_ok=True)
    with written(file) as scratch:
        scratch.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")


def parse_json(text: str | bytes) -> Any:
    """Return what ``text`` says in JSON; ``ValueError`` for all that may be wrong with it."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def keep_json(file: Path, values: dict[str, Any]) -> None:
    """Write ``values`` with a checksum of themselves, whole or not at all, for ``kept_json``."""
    write_json(file, sealed(values))


def kept_json(file: Path, way_out: str) -> dict[str, Any] | None:
    """Return what ``keep_json`` wrote, None where it has not; ``FileError`` with ``way_out`` if it was altered since.

    What has no checksum is taken as it is: versions before this one wrote none.
    """
    try:
        values = parse_json(file.read_text(encoding="utf-8"))
        return values if isinstance(values, dict) and CHECKSUM not in values else unsealed(values)
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise FileError(f"{file} is damaged ({first_line(error)}); {way_out}") from None


def kept(file: Path, way_out: str, make: Callable[[dict[str, Any]], T]) -> T | None:
    """Return what ``make`` makes of what ``keep_json`` wrote; ``FileError`` also where nothing can be made of it."""
    try:
        values = kept_json(file, way_out)
        return None if values is None else make(values)
    except (ValueError, TypeError, KeyError) as error:
        raise FileError(f"{file} is damaged ({first_line(error)}); {way_out}") from None


def write_sealed_json(path: Path, values: dict[str, Any]) -> None:
    """Write ``values`` with a checksum of themselves, which ``read_sealed_json`` compares."""
    path.write_text(json.dumps(sealed(values), indent=1) + "\n", encoding="utf-8")


def read_sealed_json(path: Path) -> dict[str, Any]:
    if not path.is_file():  # nor a device, which could be read for ever
        raise FileError(f"{path} is missing; a directory written by hetdpt.save was expected")
    try:
        values = parse_json(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise FileError(f"{path} is damaged: it is not JSON ({error}); save the model again") from None
    try:
        return unsealed(values)
    except ValueError:
        raise FileError(f"{path} was altered or damaged since it was saved; save the model again") from None


def sealed(values: dict[str, Any]) -> dict[str, Any]:
    """Return ``values`` with a checksum of themselves."""
    return {**values, CHECKSUM: _seal(values)}


def unsealed(values: Any) -> dict[str, Any]:
    """Return what ``sealed`` was given; ``ValueError`` where it is not that, or has no checksum.

    >>> unsealed(sealed({"a": 1}))
    {'a': 1}
    """
    if not isinstance(values, dict) or values.pop(CHECKSUM, None) != _seal(values):
        raise ValueError("it is not what was written")
    return values


def _seal(values: Any) -> str:
    values = json.loads(json.dumps(values))  # numbers that are keys become texts, and are sorted as such
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
