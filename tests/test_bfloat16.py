"""Whether a machine multiplies in bfloat16 is tried once, not at every start and not in every process."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hetdpt.core.errors import TrainError
from hetdpt.training import bfloat16
from hetdpt.training.processes import start

Ended = tuple[int, str]
"""The exit code of a process and what it said."""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return the directory of an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    bfloat16.runs_bfloat16.cache_clear()
    yield tmp_path / "caches" / "hetdpt"
    bfloat16.runs_bfloat16.cache_clear()


@pytest.fixture
def tries(monkeypatch: pytest.MonkeyPatch) -> Callable[[Ended], list[Any]]:
    """Return a function that lets every process end so, and gives the list of those that were started."""

    def pretend(ended: Ended) -> list[Any]:
        commands: list[Any] = []

        def run(command: Any, **options: Any) -> Any:
            commands.append(command)
            if ended[0] == TIMES_OUT:
                raise subprocess.TimeoutExpired(command, 1)
            return subprocess.CompletedProcess(command, ended[0], "", ended[1])

        monkeypatch.setattr(subprocess, "run", run)
        return commands

    return pretend


TIMES_OUT = 1000
WORKS, CRASHES = (0, ""), (-signal.SIGILL, "")


def in_a_new_process() -> None:
    bfloat16.runs_bfloat16.cache_clear()


def test_it_is_tried_once_for_every_start_and_every_process(tries: Callable[[Ended], list[Any]]) -> None:
    commands = tries(WORKS)
    start("bfloat16", "cpu")
    start("bfloat16", "cpu")
    in_a_new_process()
    start("bfloat16", "cpu")
    assert len(commands) == 1


def test_it_is_not_tried_where_nobody_asks_for_bfloat16(tries: Callable[[Ended], list[Any]]) -> None:
    commands = tries(WORKS)
    start("float32", "cpu")
    start("auto", "cpu")
    assert not commands


def test_a_crash_is_an_answer_and_is_kept(tries: Callable[[Ended], list[Any]]) -> None:
    commands = tries(CRASHES)
    for _ in range(2):
        in_a_new_process()
        with pytest.raises(TrainError, match="^this machine's cpu does not support bfloat16; use"):
            start("bfloat16", "cpu")
    assert len(commands) == 1


@pytest.mark.parametrize(
    ("ended", "reason"),
    [
        ((TIMES_OUT, ""), "no answer within 600 seconds"),
        ((-9, ""), "the process ended with -9"),
        ((1, "Traceback\nMemoryError: no memory\n"), "MemoryError: no memory"),
    ],
    ids=["it hangs", "it is killed", "it raises"],
)
def test_what_is_no_answer_is_not_kept(
    tries: Callable[[Ended], list[Any]], cache: Path, ended: Ended, reason: str
) -> None:
    tries(ended)
    with pytest.raises(TrainError) as refused:
        start("bfloat16", "cpu")
    assert str(refused.value) == (
        f"cannot tell whether this machine's cpu supports bfloat16 ({reason}); use --precision float32"
    )
    assert not cache.exists()
    tries(WORKS)
    assert start("bfloat16", "cpu").mixed_precision == "bf16"  # the same process may ask again


@pytest.mark.parametrize("fact", ["torch", "processor", "instructions", "device"])
def test_it_is_tried_again_where_anything_else_is_used(
    tries: Callable[[Ended], list[Any]], monkeypatch: pytest.MonkeyPatch, fact: str
) -> None:
    commands = tries(WORKS)
    assert bfloat16.runs_bfloat16("cpu")
    in_a_new_process()
    if fact == "torch":
        monkeypatch.setattr(torch, "__version__", "9.9")
    elif fact != "device":
        monkeypatch.setattr(bfloat16, fact, lambda: "another")
    assert bfloat16.runs_bfloat16("mps" if fact == "device" else "cpu")
    assert len(commands) == 2


@pytest.mark.parametrize(
    "content", [b"", b"{", b"\xff", b"[]", b"{}", b'{"runs": "no"}', b'{"runs": false, "checksum": "0"}']
)
def test_a_damaged_cache_is_made_again(tries: Callable[[Ended], list[Any]], cache: Path, content: bytes) -> None:
    commands = tries(WORKS)
    assert bfloat16.runs_bfloat16("cpu")
    (file,) = cache.iterdir()
    file.write_bytes(content)
    in_a_new_process()
    assert bfloat16.runs_bfloat16("cpu")
    assert len(commands) == 2
    assert json.loads(file.read_text())["runs"] is True


def test_a_cache_that_cannot_be_written_is_no_error(tries: Callable[[Ended], list[Any]], cache: Path) -> None:
    cache.parent.write_text("a file where the directory would be")
    commands = tries(WORKS)
    for _ in range(2):
        in_a_new_process()
        assert bfloat16.runs_bfloat16("cpu")
    assert len(commands) == 2


def test_a_process_really_tries(cache: Path) -> None:
    works = bfloat16.runs_bfloat16("cpu")
    assert json.loads(next(cache.iterdir()).read_text())["runs"] is works
    with pytest.raises(TrainError, match="this machine's nowhere supports bfloat16 .RuntimeError: Expected one of"):
        bfloat16.runs_bfloat16("nowhere")
