"""Runs of many steps: memory stays, handles and processes go, and Ctrl-C ends them with a word on how to go on."""

from __future__ import annotations

import gc
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import test_training_cli
from test_cli import SCRIPT

import hetdpt
from hetdpt.cli.stopping import RESUMABLE, Stopped, farewell, reason, stoppable
from hetdpt.flow.recipes import recipe

MEGABYTE = 2**20
SMALL = {"training.epochs": 25, "training.batch_size": 8, "per_class": 32, "training.lr": 1e-4}  # 40 updates an epoch


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("long")
    test_training_cli.build(folder / "dense")
    (folder / "plan.json").write_text(hetdpt.Plan(attention=(1,), activation=(2,)).to_json())
    return folder


def taken(updates: Iterator[Any], sizes: list[int]) -> None:
    process = psutil.Process()
    for _ in updates:
        gc.collect()
        sizes.append(process.memory_info().rss)


@pytest.mark.slow
def test_memory_does_not_grow_over_a_thousand_updates(home: Path) -> None:
    dense = hetdpt.load(home / "dense")
    student = hetdpt.prune_(hetdpt.load(home / "dense"), hetdpt.Plan(attention=(1,), activation=(2,)))
    process, sizes = psutil.Process(), list[int]()
    before = process.num_fds(), len(process.children(recursive=True))
    config = recipe("brief").config.with_settings(SMALL)
    taken(hetdpt.recover(student, dense, "demo", config, workers=0, evaluates=False), sizes)
    assert len(sizes) == 26  # the start and 25 epochs of 40 updates
    later, earlier = max(sizes[-5:]), max(sizes[3:8])  # allocators settle in the first epochs
    assert later - earlier < 4 * MEGABYTE, [size // MEGABYTE for size in sizes]
    gc.collect()
    assert (process.num_fds(), len(process.children(recursive=True))) == before


@pytest.mark.slow
def test_workers_and_handles_are_gone_after_a_training_with_workers(home: Path) -> None:
    process = psutil.Process()
    config = recipe("brief").config.with_settings({**SMALL, "training.epochs": 1})
    model = hetdpt.load(home / "dense")
    list(hetdpt.recover(model, None, "demo", config, workers=2))  # torch opens some handles once, for good
    gc.collect()
    before = process.num_fds()
    list(hetdpt.recover(model, None, "demo", config, workers=2))
    gc.collect()
    assert process.children(recursive=True) == []
    assert process.num_fds() <= before


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
@pytest.mark.slow
def test_a_signal_ends_a_run_with_workers_and_says_how_to_go_on(home: Path, tmp_path: Path, name: str) -> None:
    number, out = getattr(signal, name), tmp_path / "run"
    model, loop = str(home / "dense"), (*test_training_cli.PLAIN, "--epochs", "500", "--workers", "2")
    words = ["train", model, "--data", "demo", *loop, "--out", str(out)]
    with subprocess.Popen(
        [str(SCRIPT), *words], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert "before training" in process.stdout.readline()
        assert "epoch 1/" in process.stdout.readline()
        children = psutil.Process(process.pid).children(recursive=True)
        os.killpg(process.pid, number)  # as a terminal does: workers are told too
        _, told = process.communicate(timeout=30)
    assert process.returncode == 128 + number
    said = "Ctrl-C" if name == "SIGINT" else name
    again = f"hetdpt {' '.join(words)}"
    assert told == f"stopped by {said}; finished work is kept, and the same command resumes: {again}\n"
    assert len(children) >= 2
    assert psutil.wait_procs(children, timeout=10)[1] == []


def test_what_is_said_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["hetdpt", "run", "a model", "--out", "RUN"])
    stopped = Stopped(signal.SIGINT)
    assert stopped.code == 130
    kept = "finished work is kept, and the same command resumes"
    assert farewell(stopped) == f"stopped by Ctrl-C; {kept}: hetdpt run 'a model' --out RUN"
    monkeypatch.setenv("RANK", "0")
    assert farewell(stopped) == f"stopped by Ctrl-C; {kept}"
    monkeypatch.setattr("sys.argv", ["hetdpt", "inspect", "demo"])
    assert farewell(Stopped(signal.SIGTERM)) == (
        "stopped by SIGTERM; nothing was written, and the same command starts over"
    )


def test_a_second_signal_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)  # put back at the end
    before = signal.getsignal(signal.SIGTERM)
    handlers = []

    def work() -> None:
        with stoppable():
            try:
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(5)
            finally:
                handlers.append(signal.getsignal(signal.SIGTERM))

    with pytest.raises(Stopped) as first:
        work()
    assert handlers == [signal.SIG_DFL]
    assert first.value.name == "SIGTERM"
    assert signal.getsignal(signal.SIGTERM) is before


def test_every_command_that_resumes_is_one(tmp_path: Path) -> None:
    told = subprocess.run([str(SCRIPT), "--help"], capture_output=True, text=True, check=True).stdout
    assert set(re.findall(r"^  (\w+) ", told, re.M)) >= RESUMABLE


def test_what_a_file_system_refuses_is_a_sentence() -> None:
    assert reason(OSError(28, "No space left on device")) == (
        "No space left on device; free some space and run the same command again"
    )
    assert reason(OSError(30, "Read-only file system", "/a")) == (
        "/a: Read-only file system; make it writable, or give another path"
    )
    assert reason(OSError(71, "Protocol error", "/a")) == (
        "/a: Protocol error; check it, then run the same command again"
    )
    assert reason(OSError("torn")) == "torn"
