"""The job runner: tasks whose results are files, shared by all processes that are given the same directory.

``run_tasks`` runs everything that several processes or machines may do together. ``store.queue``, which only this
module uses, decides which process works on which task. No torch here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Generic, TypeVar

from hetdpt.store.atomic import find_sealed, write_sealed_json
from hetdpt.store.queue import Claim, holder

WAIT = 1.0  # seconds between two looks at the results of other processes
Subject = TypeVar("Subject")
Result = TypeVar("Result")
Guard = Callable[[], None]
"""Raises ``FileError`` if another process has taken over the task; called before anything is written."""


@dataclass(frozen=True, eq=False)
class Task(Generic[Subject, Result]):
    """Work that one process does by itself, and that is finished once ``read`` returns its result."""

    key: str
    """Tasks with the same key are not worked on at once."""
    subject: Subject
    """What the task is about, for those who get its result."""
    read: Callable[[], Result | None]
    """Returns the result; None until it exists, from this process or another."""
    run: Callable[[Guard], None]
    """Makes the result."""
    needs: tuple[str, ...] = ()
    """Keys of the tasks that have to be finished first."""
    is_last: bool = False
    """Whether it waits until all other tasks are finished."""
    then: Callable[[Result], Iterable[Task[Any, Any]]] | None = None
    """Returns the tasks that follow from the result."""

    @classmethod
    def to_file(
        cls,
        key: str,
        subject: Subject,
        file: Path,
        kind: Any,
        make: Callable[[Guard], Result],
        *,
        is_complete: Callable[[Result], bool] = lambda _: True,
        **options: Any,
    ) -> Task[Subject, Result]:
        """Return the task whose result ``make`` returns, a value of type ``kind``, kept in ``file``.

        A result in the file that is not complete is made again. ``options`` are the other fields of a task.
        """

        def read() -> Result | None:
            found: Result | None = read_result(file, kind)
            return found if found is not None and is_complete(found) else None

        def run(guard: Guard) -> None:
            made = make(guard)
            guard()
            write_sealed_json(file, _adapter(kind).dump_python(made))

        return cls(key, subject, read, run, **options)


@dataclass(frozen=True)
class Finished(Generic[Subject, Result]):
    """A task that is finished."""

    subject: Subject
    result: Result
    is_own: bool
    """Whether this process did it, just now."""


def read_result(file: Path, kind: Any) -> Any:
    """Return the value of type ``kind`` in the file of a task; None if there is no file, ``FileError`` if it is bad."""
    return find_sealed(file, "remove it to have it made again", _adapter(kind).validate_python)


def run_tasks(
    directory: Path, tasks: Iterable[Task[Subject, Result]], waiting: Callable[[str], None]
) -> Iterator[Finished[Subject, Result]]:
    """Do the tasks that no other process works on, one after another, until all are finished by some process.

    Yields every finished task once, also those of other processes and of earlier calls. ``directory`` is where the
    processes tell each other what they work on; ``waiting`` is called with the process that this one waits for.
    """
    left, own, finished = list(tasks), set[Task[Subject, Result]](), set[str]()
    while left:
        found = [(task, result) for task in left if (result := task.read()) is not None]
        for task, result in found:
            place = left.index(task)
            left[place : place + 1] = task.then(result) if task.then else ()
            finished.add(task.key)
            yield Finished(task.subject, result, task in own)
        if found:
            continue
        ready = [task for task in left if finished.issuperset(task.needs) and (not task.is_last or len(left) == 1)]
        if claimed := _claim(directory, ready):
            task, claim = claimed
            with claim:
                if task.read() is None:  # not finished since we looked
                    task.run(claim.require_held)
                    own.add(task)
        else:
            others = (holder(directory, task.key) for task in left)
            waiting(next((other for other in others if other), "another process"))
            time.sleep(WAIT)


def _claim(directory: Path, ready: Iterable[Task[Subject, Result]]) -> tuple[Task[Subject, Result], Claim] | None:
    for task in ready:
        if claim := Claim.take(directory, task.key):
            return task, claim
    return None


@cache
def _adapter(kind: Any) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(kind)
