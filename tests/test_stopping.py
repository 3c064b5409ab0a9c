"""A signal ends a command by one line, wherever it comes: in a ``__del__``, among workers, while all is taken down."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from textwrap import indent

import pytest

VICTIM = """
import os, signal, sys, time
import torch
from torch.utils.data import DataLoader
import hetdpt.cli

OWN = os.getpid()

class Images(torch.utils.data.Dataset):
    def __init__(self, signals=()):
        self.signals = signals  # (whose, which), sent by the first worker when it is asked for its first image

    def __len__(self):
        return 64

    def __getitem__(self, index):
        if index == 0:
            for process, number in self.signals:
                os.kill(process or os.getpid(), number)
                time.sleep(0.1)
        return torch.zeros(3)

def read(signals=(), **options):
    for batch in DataLoader(Images(signals), 8, num_workers=2, **options):
        pass

class Dying:
    def __del__(self):
        os.kill(OWN, signal.SIGTERM)
        time.sleep(0.1)

def wait():
    time.sleep(20)
    raise AssertionError("nothing has ended this")

def command(**words):
{body}

hetdpt.cli.app = command
sys.argv = ["hetdpt", "run", "MODEL"]
hetdpt.cli.main()
"""
FAREWELL = "stopped by SIGTERM; finished work is kept, and the same command resumes: hetdpt run MODEL\n"
SCENES = {
    "where nothing can be raised": "Dying(); wait()",
    "where nothing can be raised, and workers start then": "Dying(); read(); wait()",
    "among workers, which have it first": "read([(0, signal.SIGTERM), (OWN, signal.SIGTERM)]); wait()",
    "among workers only": "read([(0, signal.SIGTERM)]); wait()",
    "while workers start": "read(worker_init_fn=lambda worker: worker or os.kill(OWN, signal.SIGTERM)); wait()",
    "among failures of what is taken down": """try:
    os.kill(OWN, signal.SIGTERM)
    wait()
finally:
    raise OSError("torn")""",
    "among those who take a failure for another": """try:
    read([(0, signal.SIGTERM)])
except RuntimeError:
    raise hetdpt.core.errors.DataError("these are no images") from None""",
}


def begun(body: str) -> subprocess.Popen[str]:
    code = VICTIM.format(body=indent(body, "    "))
    return subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def ending(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Return the exit code, and what was said at the end; a process that does not end is killed with its workers."""
    try:
        _, told = process.communicate(timeout=30)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        _, told = process.communicate()
    return process.returncode, told


@pytest.mark.parametrize("scene", SCENES)
def test_a_signal_ends_a_command_by_one_line(scene: str) -> None:
    assert ending(begun(SCENES[scene])) == (143, FAREWELL)


def test_a_worker_that_is_killed_is_one_sentence() -> None:
    code, told = ending(begun("read([(0, signal.SIGKILL)])"))
    assert code == 2
    assert told == (
        "error: a worker process that reads images is killed by signal: Killed; is memory short? Give fewer --workers\n"
    )


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("is_group", [False, True])
def test_at_any_time(number: signal.Signals, is_group: bool) -> None:
    """Pools of workers come and go all the time; of 25 such processes 9 did not end or told more, once."""
    generator = random.Random(0)
    for _ in range(8):
        process = begun("print('reading', flush=True)\nwhile True:\n    read()")
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(generator.random() / 2)
        (os.killpg if is_group else os.kill)(process.pid, number)
        said = "Ctrl-C" if number == signal.SIGINT else "SIGTERM"
        assert ending(process) == (128 + number, FAREWELL.replace("SIGTERM", said))
