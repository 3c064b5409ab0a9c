"""The job runner: tasks are done once each, in order, by whichever process is free."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hetdpt.core.errors import FileError
from hetdpt.store.jobs import Finished, Guard, Task, run_tasks
from hetdpt.store.queue import Claim


class Chores:
    """Tasks that are files once they are done; a task such as ``b-after-a`` needs ``a``."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.taken, self.waited = directory, list[str](), list[str]()

    def result(self, name: str) -> str | None:
        file = self.directory / f"{name}.txt"
        return file.read_text() if file.is_file() else None

    def take(self, name: str, guard: Guard) -> None:
        guard()
        self.taken.append(name)
        self.finish(name)

    def finish(self, name: str) -> None:
        (self.directory / f"{name}.txt").write_text(f"done {name}")

    def task(self, name: str, **options: Any) -> Task[str, str]:
        needs = tuple(filter(None, [name.partition("-after-")[2]]))
        return Task(name, name, partial(self.result, name), partial(self.take, name), needs, **options)

    def run(self, *tasks: str | Task[str, str]) -> list[Finished[str, str]]:
        each = [self.task(task) if isinstance(task, str) else task for task in tasks]
        return list(run_tasks(self.directory / "claims", each, self.waited.append))


def test_tasks_are_done_once_each_after_those_they_need(tmp_path: Path) -> None:
    chores = Chores(tmp_path)
    chores.finish("c")
    found = chores.run("b-after-a", "a", "c")
    assert chores.taken == ["a", "b-after-a"]
    expected = [("c", "done c", False), ("a", "done a", True), ("b-after-a", "done b-after-a", True)]
    assert found == [Finished(*each) for each in expected]
    assert [one.is_own for one in chores.run("a", "c")] == [False, False]


def test_the_task_of_another_process_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chores, claim = Chores(tmp_path), Claim.take(tmp_path / "claims", "a")
    assert claim is not None

    def other_process(_: float) -> None:
        assert chores.waited == [f"pid {os.getpid()} on {os.uname().nodename}"]
        chores.finish("a")
        claim.release()

    monkeypatch.setattr(time, "sleep", other_process)
    assert [one.is_own for one in chores.run("a", "b-after-a")] == [False, True]
    assert chores.taken == ["b-after-a"]


def test_a_task_that_fails_is_free_again(tmp_path: Path) -> None:
    class Clumsy(Chores):
        def take(self, name: str, guard: Guard) -> None:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        Clumsy(tmp_path).run("a")
    assert len(Chores(tmp_path).run("a")) == 1


def test_tasks_that_follow_from_a_result_come_next_and_the_last_one_last(tmp_path: Path) -> None:
    chores = Chores(tmp_path)

    def then(result: str) -> Iterable[Task[str, str]]:
        return [chores.task(f"{result.removeprefix('done ')}-more")]

    last = chores.task("last", is_last=True)
    found = chores.run(last, chores.task("a", then=then), chores.task("b", then=then))
    assert [one.subject for one in found] == chores.taken == ["a", "a-more", "b", "b-more", "last"]


def test_tasks_with_one_key_share_one_result(tmp_path: Path) -> None:
    chores = Chores(tmp_path)
    assert [one.is_own for one in chores.run("a", "a")] == [True, False]
    assert chores.taken == ["a"]


@dataclass(frozen=True)
class Total:
    """A result."""

    parts: tuple[int, ...]
    note: str | None = None


def test_a_result_is_a_typed_value_in_a_file(tmp_path: Path) -> None:
    file, counts = tmp_path / "results" / "total.json", iter(range(1, 9))

    def run(least: int) -> list[Any]:
        def make(guard: Guard) -> Total:
            return Total(tuple(range(next(counts))))

        task = Task.to_file("total", "", file, Total, make, is_complete=lambda one: len(one.parts) >= least)
        return [(one.result, one.is_own) for one in run_tasks(tmp_path / "claims", [task], lambda _: None)]

    assert run(least=1) == [(Total((0,)), True)]
    assert run(least=1) == [(Total((0,)), False)]
    assert run(least=2) == [(Total((0, 1)), True)]  # the result before was not complete
    file.write_text("{}")
    with pytest.raises(FileError, match=r"total\.json is damaged .*; remove it to have it made again"):
        run(least=1)
