"""Claims on steps: one holder at a time, among processes that race, are killed, sleep, or are on other machines."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hetdpt.core.errors import FileError
from hetdpt.store import queue as claims
from hetdpt.store.queue import KEPT, PATIENCE, Claim, holder

ELSEWHERE = "elsewhere/another-boot"

# Every process first becomes one of the host that it is told; "" is this one.
PRELUDE = """
import fcntl, os, random, signal, sys, time
from pathlib import Path
from hetdpt.store import queue as claims
from hetdpt.store.queue import Claim
from hetdpt.core.errors import FileError
directory, host, *arguments = Path(sys.argv[1]), *sys.argv[2:]
if host:
    claims._host = lambda: host
"""

# Takes a claim, then does what it is told line by line.
OWNER = """
def without_locks(*arguments):
    raise OSError(37, "No locks available")

name, patience, *options = arguments
if "without locks" in options:
    fcntl.flock = without_locks
claim = Claim.take(directory, name, float(patience))
print("took" if claim else "none", flush=True)
for line in sys.stdin:
    match line.strip():
        case "held?":
            print(claim.is_held(), flush=True)
        case "require":
            try:
                claim.require_held()
                print("held", flush=True)
            except FileError as error:
                print(error, flush=True)
        case "fork":  # a child that outlives its parent
            if (child := os.fork()) == 0:
                time.sleep(60)
                os._exit(0)
            print(child, flush=True)
"""

# Takes and lets go as fast as it can, and writes when it enters and leaves. A mortal one is at times killed instead.
HAMMER = """
log, seconds, is_mortal = Path(arguments[0]), float(arguments[1]), arguments[2] == "mortal"
end = time.monotonic() + seconds

def note(name, text):
    handle = os.open(log / name, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(handle, f"{text}\\n".encode())
    os.close(handle)

def work(name, is_killed):
    claim = Claim.take(directory, name)
    if claim is None:
        return
    note(name, f"enter {os.getpid()} {claim.generation}")
    time.sleep(random.choice([0, 0, 0.001, 0.01]))
    claim.require_held()
    note(name, f"leave {os.getpid()} {claim.generation}")
    if is_killed:
        os.kill(os.getpid(), signal.SIGKILL)
    claim.release()

while time.monotonic() < end:
    name = random.choice(["ag", "recheck-4-4", "x"])
    if is_mortal and random.random() < 0.3:
        if (child := os.fork()) == 0:
            work(name, True)
            os._exit(0)
        assert os.waitpid(child, 0)[1] in (0, signal.SIGKILL)
    else:
        work(name, False)
"""

# All find the claim dead before the first of them creates the next.
HEIRS = """
name, number = arguments[0], int(arguments[1])
look = claims._look

def look_and_wait(*arguments):
    found = look(*arguments)
    (directory / f"looked-{os.getpid()}").touch()
    while len(list(directory.glob("looked-*"))) < number:
        time.sleep(0.001)
    return found

claims._look = look_and_wait
claim = Claim.take(directory, name)
print("took" if claim else "none", flush=True)
sys.stdin.read()
"""

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Return what starts a process on the claims in ``tmp_path``; all that were started are ended."""
    started: list[subprocess.Popen[str]] = []

    def begin(program: str, *arguments: object, host: str = "") -> subprocess.Popen[str]:
        command = [sys.executable, "-c", PRELUDE + program, str(tmp_path), host, *map(str, arguments)]
        pipe = subprocess.PIPE
        started.append(subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True))
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def answer(process: subprocess.Popen[str], question: str = "") -> str:
    assert process.stdin is not None
    assert process.stdout is not None
    if question:
        process.stdin.write(f"{question}\n")
        process.stdin.flush()
    return process.stdout.readline().strip()


def kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()


def taken(directory: Path, name: str = "ag", patience: float = PATIENCE) -> Claim:
    claim = Claim.take(directory, name, patience)
    assert claim is not None
    return claim


def file_of(directory: Path, name: str = "ag") -> Path:
    """Return the file of the newest claim."""
    return max(directory.glob(f"{name}.*.claim"))


def make_older(file: Path, seconds: float) -> None:
    changed = file.stat().st_mtime
    os.utime(file, (changed - seconds, changed - seconds))


# One at a time


@pytest.mark.parametrize(("hosts", "mortality"), [(("", ELSEWHERE), "immortal"), (("",), "mortal")])
def test_eight_that_hammer_never_hold_at_once(
    tmp_path: Path, start: Start, hosts: tuple[str, ...], mortality: str
) -> None:
    log = tmp_path / "log"
    log.mkdir()
    hammers = [start(HAMMER, log, 2, mortality, host=hosts[number % len(hosts)]) for number in range(8)]
    for hammer in hammers:
        assert hammer.communicate()[1] == ""
        assert hammer.returncode == 0
    for name in ("ag", "recheck-4-4", "x"):
        lines = [line.split() for line in (log / name).read_text().splitlines()]
        enters, leaves = lines[::2], lines[1::2]
        assert [["enter", *who] for _, *who in leaves] == enters  # who enters leaves before anybody else enters
        assert [int(generation) for _, _, generation in enters] == list(range(1, len(enters) + 1))
        assert len(enters) > 20
        assert len({pid for _, pid, _ in enters}) >= 4
        assert len(list(tmp_path.glob(f"{name}.*.claim"))) <= KEPT + 8  # each of eight may be about to remove its own


def test_of_those_who_found_a_claim_dead_one_takes_over(tmp_path: Path, start: Start) -> None:
    owner = start(OWNER, "ag", PATIENCE)
    assert answer(owner) == "took"
    kill(owner)
    heirs = [start(HEIRS, "ag", 6) for _ in range(6)]
    assert sorted(answer(heir) for heir in heirs) == [*["none"] * 5, "took"]


@pytest.mark.parametrize("takes", [1, 2, KEPT, KEPT + 1, KEPT + 2, 3 * KEPT])
@pytest.mark.parametrize("first", [0, 1, 5])
def test_one_who_sleeps_between_look_and_creation_has_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: int, takes: int
) -> None:
    """However many came and went since the look, and whether or not the generation it goes for was removed."""
    for _ in range(first):
        taken(tmp_path).release()
    seen = claims._look(tmp_path, "ag", PATIENCE)
    assert seen == (first, None)
    for _ in range(takes - 1):
        taken(tmp_path).release()
    with taken(tmp_path) as claim:
        with monkeypatch.context() as patch:
            patch.setattr(claims, "_look", lambda *_: seen)
            assert Claim.take(tmp_path, "ag") is None
        assert claim.is_held()
        assert Claim.take(tmp_path, "ag") is None
    taken(tmp_path).release()


def test_release_frees_and_generations_only_grow(tmp_path: Path) -> None:
    numbers = []
    for _ in range(3 * KEPT):
        with taken(tmp_path / "deep" / "er") as claim:
            assert Claim.take(tmp_path / "deep" / "er", "ag") is None
            numbers.append(claim.generation)
        assert not claim.is_held()
        claim.release()  # a second time
    assert numbers == list(range(1, 3 * KEPT + 1))
    files = sorted(file.name for file in (tmp_path / "deep" / "er").iterdir())
    assert files == [f"ag.{number:08d}.claim" for number in numbers[-KEPT:]]


def test_release_frees_at_once_for_another_machine(tmp_path: Path, start: Start) -> None:
    claim = taken(tmp_path)
    assert answer(start(OWNER, "ag", PATIENCE, host=ELSEWHERE)) == "none"
    claim.release()
    assert answer(start(OWNER, "ag", PATIENCE, host=ELSEWHERE)) == "took"


def test_an_error_frees(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), taken(tmp_path):
        _ = 1 / 0
    taken(tmp_path).release()


def test_release_leaves_no_thread_and_no_handle(tmp_path: Path) -> None:
    before = (threading.active_count(), len(os.listdir("/proc/self/fd")))
    claim = taken(tmp_path)
    assert Claim.take(tmp_path, "ag") is None
    assert (threading.active_count(), len(os.listdir("/proc/self/fd"))) == (before[0] + 1, before[1] + 1)
    claim.release()
    assert (threading.active_count(), len(os.listdir("/proc/self/fd"))) == before


def test_steps_are_strangers(tmp_path: Path) -> None:
    for other in ("ag.9.claim", "ag.00000009", "xag.00000009.claim", "ag.00000009.claim.bak"):
        (tmp_path / other).touch()
    with taken(tmp_path, "ag") as first, taken(tmp_path, "ag-4") as second, taken(tmp_path, "4") as third:
        assert [claim.generation for claim in (first, second, third)] == [1, 1, 1]
        assert first.is_held()
    assert holder(tmp_path, "ag-4") is None


@pytest.mark.parametrize("name", ["", "a.b", "a/b", "a b", "a_b", "*"])
def test_other_names_are_our_mistake(tmp_path: Path, name: str) -> None:
    with pytest.raises(AssertionError, match="is not a name of a task"):
        Claim.take(tmp_path, name)


def test_a_place_that_is_no_directory_is_told_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(FileError) as error:
        Claim.take(tmp_path / "file" / "claims", "ag")
    place = tmp_path / "file" / "claims"
    assert str(error.value) == f"{place} cannot be shared with other processes: Not a directory; give another path"


def test_a_claim_that_cannot_be_signed_blocks_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(FileError, match="No space left on device"):
            Claim.take(tmp_path, "ag")
    taken(tmp_path).release()


# Killed


def test_killed_on_this_machine_its_step_is_free_at_once(tmp_path: Path, start: Start) -> None:
    owner = start(OWNER, "ag", PATIENCE)
    assert answer(owner) == "took"
    make_older(file_of(tmp_path), 2 * PATIENCE)  # age does not matter where the lock can be seen
    assert Claim.take(tmp_path, "ag") is None
    kill(owner)
    taken(tmp_path).release()


def test_a_forked_child_does_not_keep_the_claim_of_its_killed_parent(tmp_path: Path, start: Start) -> None:
    owner = start(OWNER, "ag", PATIENCE)
    assert answer(owner) == "took"
    child = int(answer(owner, "fork"))
    try:
        time.sleep(0.1)  # the child closes what it inherited as its first act
        assert (answer(owner, "held?"), Claim.take(tmp_path, "ag")) == ("True", None)
        kill(owner)
        taken(tmp_path).release()
        os.kill(child, 0)  # it was there all the time
    finally:
        os.kill(child, signal.SIGKILL)


def test_killed_on_another_machine_its_step_is_free_when_the_patience_is_over(tmp_path: Path, start: Start) -> None:
    owner = start(OWNER, "ag", PATIENCE, host=ELSEWHERE)
    assert answer(owner) == "took"
    kill(owner)
    assert Claim.take(tmp_path, "ag") is None
    make_older(file_of(tmp_path), PATIENCE - 20)
    assert Claim.take(tmp_path, "ag") is None
    make_older(file_of(tmp_path), 21)
    with taken(tmp_path) as claim:
        assert claim.generation == 2


def test_one_that_stirs_while_it_is_judged_lives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: Start) -> None:
    """As if the judge had been stopped between its look at the clock and its look at the claim."""
    assert answer(start(OWNER, "ag", PATIENCE, host=ELSEWHERE)) == "took"
    make_older(file_of(tmp_path), 2 * PATIENCE)
    clock = claims._clock

    def slow(directory: Path) -> float:
        now = clock(directory)
        os.utime(file_of(tmp_path))
        return now

    monkeypatch.setattr(claims, "_clock", slow)
    assert Claim.take(tmp_path, "ag") is None


@pytest.mark.parametrize("content", ["", '{"host": "elsewh', "[]", "{}", "\xff"])
def test_a_claim_not_yet_written_is_held_until_it_is_old(tmp_path: Path, content: str) -> None:
    file = tmp_path / "ag.00000003.claim"
    file.write_text(content, encoding="latin-1")
    assert Claim.take(tmp_path, "ag") is None
    assert holder(tmp_path, "ag") == "a process that is just starting"
    make_older(file, PATIENCE + 1)
    with taken(tmp_path) as claim:
        assert claim.generation == 4


# Stopped


def test_the_beat_keeps_a_claim_and_one_that_was_stopped_finds_it_lost(tmp_path: Path, start: Start) -> None:
    patience = 1.2  # six beats of 0.2 s; seen from another machine there is only the age
    owner = start(OWNER, "ag", patience, host=ELSEWHERE)
    assert answer(owner) == "took"
    end = time.monotonic() + 2 * patience
    while time.monotonic() < end:
        assert Claim.take(tmp_path, "ag", patience) is None
        time.sleep(0.05)
    assert answer(owner, "require") == "held"
    owner.send_signal(signal.SIGSTOP)
    stopped = time.monotonic()
    while (claim := Claim.take(tmp_path, "ag", patience)) is None:
        assert time.monotonic() - stopped < 3 * patience
        time.sleep(0.05)
    assert time.monotonic() - stopped > patience / 2
    owner.send_signal(signal.SIGCONT)
    assert answer(owner, "held?") == "False"
    assert answer(owner, "require") == (
        f"another process took over ag in {tmp_path}, because this one did not respond for 1.2 seconds; "
        "this one stops, and nothing is lost"
    )
    time.sleep(2 * patience / claims.BEATS)  # it beats again, on what is no claim any more
    assert (claim.is_held(), answer(owner, "held?")) == (True, "False")
    claim.release()
    assert answer(owner, "held?") == "False"


def test_stopped_on_this_machine_it_keeps_its_claim(tmp_path: Path, start: Start) -> None:
    owner = start(OWNER, "ag", 0.1)
    assert answer(owner) == "took"
    owner.send_signal(signal.SIGSTOP)
    time.sleep(0.3)
    assert Claim.take(tmp_path, "ag", 0.1) is None
    owner.send_signal(signal.SIGCONT)
    assert answer(owner, "require") == "held"


def test_a_claim_removed_by_hand_is_lost_though_another_has_its_number(tmp_path: Path) -> None:
    claim = taken(tmp_path)
    file_of(tmp_path).unlink()
    assert not claim.is_held()
    with taken(tmp_path) as other:
        assert other.generation == claim.generation
        assert (claim.is_held(), other.is_held()) == (False, True)
        claim.release()
        assert other.is_held()
        assert Claim.take(tmp_path, "ag") is None


def test_a_directory_removed_by_hand_is_a_lost_claim(tmp_path: Path) -> None:
    with taken(tmp_path / "claims") as claim:
        file_of(tmp_path / "claims").unlink()
        (tmp_path / "claims").rmdir()
        with pytest.raises(FileError, match=f"another process took over ag in {tmp_path / 'claims'}"):
            claim.require_held()


# Without locks


def without_locks(*_: Any) -> None:
    raise OSError(errno.ENOLCK, "No locks available")


def test_without_locks_age_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: Start) -> None:
    monkeypatch.setattr(fcntl, "flock", without_locks)
    taken(tmp_path).release()
    taken(tmp_path).release()  # let go, it is free at once
    owner = start(OWNER, "ag", PATIENCE, "without locks")
    assert answer(owner) == "took"
    kill(owner)
    assert Claim.take(tmp_path, "ag") is None
    make_older(file_of(tmp_path), PATIENCE + 1)
    taken(tmp_path).release()


def test_locks_that_only_one_of_them_gets_do_not_deceive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: Start
) -> None:
    """A lock server can be out of order for a while: a lock that was never taken is free, and its owner lives."""
    assert answer(start(OWNER, "one", PATIENCE, "without locks")) == "took"
    assert Claim.take(tmp_path, "one") is None
    assert answer(start(OWNER, "two", PATIENCE)) == "took"
    monkeypatch.setattr(fcntl, "flock", without_locks)
    assert Claim.take(tmp_path, "two") is None
    make_older(file_of(tmp_path, "two"), PATIENCE + 1)
    taken(tmp_path, "two").release()


# Who it is


def test_the_holder_is_told_while_there_is_one(tmp_path: Path, start: Start) -> None:
    assert holder(tmp_path / "nowhere", "ag") is None
    assert not (tmp_path / "nowhere").exists()
    with taken(tmp_path):
        assert holder(tmp_path, "ag") == f"pid {os.getpid()} on {os.uname().nodename}"
        assert holder(tmp_path, "other") is None
    assert holder(tmp_path, "ag") is None
    owner = start(OWNER, "ag", PATIENCE, host=ELSEWHERE)
    assert answer(owner) == "took"
    assert holder(tmp_path, "ag") == f"pid {owner.pid} on elsewhere"
    kill(owner)
    make_older(file_of(tmp_path), PATIENCE + 1)
    assert holder(tmp_path, "ag") is None


def test_two_that_look_are_not_in_each_others_way(tmp_path: Path, start: Start) -> None:
    owner = start(OWNER, "ag", PATIENCE)
    assert answer(owner) == "took"
    kill(owner)
    with file_of(tmp_path).open() as other:
        fcntl.flock(other, fcntl.LOCK_SH)
        assert holder(tmp_path, "ag") is None
        taken(tmp_path).release()


def test_a_claim_is_one_line_of_json(tmp_path: Path) -> None:
    with taken(tmp_path):
        (line,) = file_of(tmp_path).read_text().splitlines()
        owner = json.loads(line)
        token = owner.pop("token")
        assert owner == {"host": claims._host(), "pid": os.getpid(), "is_locked": True}
        assert file_of(tmp_path).name == "ag.00000001.claim"
    with taken(tmp_path):
        assert json.loads(file_of(tmp_path).read_text())["token"] != token
