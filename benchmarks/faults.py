"""Faults put on real commands, which are then given again: what is lost on a bad day.

    python benchmarks/faults.py [--jobs run recover ...] [--faults kill full ...] [--points 8]
                                [--out benchmarks/results/faults.json]

A job is a long command on a small model. It is run twice undisturbed; what both leave alike is what a disturbed one
has to come to. Then, each time from nothing:

    kill, terminate, interrupt   SIGKILL, SIGTERM or SIGINT just before the n-th change of a file
    full                         the disk, a tmpfs, is too small for it
    read-only                    the disk has become read-only
    damage                       a byte of a file is flipped, and its end cut off, or all of it, or the file gone: one
                                 file of each sort, in a half-done directory and in a finished one
    data                         an image, or all of them, go in the midst of training, or one becomes too thin
    foreign                      its model describes itself by another one's words: files, hub repositories
    rank                         one of two processes of a group is killed

and the command is given again; where it is refused, once more after the cure (more space, the file back, ...). Of all
that comes one of

    equal     all is as if nothing had happened
    warned    it goes on after a warning
    refused   one sentence and exit code 2, and after the cure all is as if nothing had happened
    by use    a damaged file that the command does not need stays as it is; what reads it refuses it
    unread    likewise, but nothing of hetdpt reads it: without it, too, all else is the same
    lost      a traceback, a hang, another result, a loss that is not told

Commands run in processes forked off this one, where torch is loaded already. Faults of disks need root, for mount.
"""

from __future__ import annotations

import argparse
import csv
import json
import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is there: its threads do not survive a fork

import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import chdir, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any, TypeVar

from evidence import RESULTS, Recorder
from fault_jobs import JOBS, World, make_world
from PIL import Image

import hetdpt
from hetdpt.cli import main as command_line
from hetdpt.core.errors import HetDPTError
from hetdpt.store.atomic import read_sealed_json, sha256, write_sealed_json
from hetdpt.store.queue import PATIENCE

SECONDS = 180  # after which a command hangs
HANGS = -1000
CANARY = "canary.bin"  # a file that no command has a reason to open
REACHES = ("socket.connect", "socket.getaddrinfo", "subprocess.Popen", "os.system")
CHANGES = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.truncate")
PASSING = ("claims", "checkpoints")  # directories whose files come and go
TOLD = r"^(?:signalled|changes) (.*)\n"
Found = dict[str, Any]
T = TypeVar("T")
TIMES = "second|speed|throughput|latency|time|begun|measured"  # entries that are never twice the same


@dataclass(frozen=True)
class Ended:
    """How a command ended, and what it said."""

    code: int
    text: str
    changes: int = 0
    """How often it changed a file."""
    after_signal: float | None = None
    """Seconds from the signal to its end."""

    @property
    def is_refused(self) -> bool:
        return self.code == 2 and len(re.findall("^error", self.text, re.M)) == 1 and not self.is_crash

    @property
    def is_crash(self) -> bool:
        return "Traceback" in self.text or self.code == HANGS

    @property
    def warnings(self) -> set[str]:
        return set(re.findall(r"^\s*warning: .*", self.text, re.M))

    @property
    def said(self) -> str:
        """The line that matters: the error, else where it was stopped, else the warning, else the last."""
        lines = [line for line in self.text.splitlines() if line.strip()]
        for start in ("error", "stopped", "warning"):
            if told := [line for line in lines if line.startswith(start)]:
                return told[-1]
        return lines[-1] if lines else ""


# Commands in forked processes


def give(words: list[str], root: Path, at: int | None = None, act: Callable[[], None] = lambda: None) -> Ended:
    """Run a command to its end; ``act`` is called in its process just before the ``at``-th change of a file."""
    with tempfile.TemporaryFile("w+") as log:
        pid = os.fork()
        if pid == 0:
            _be_command(words, log.fileno(), str(root), at, act)
        code = _wait(pid)
        ended = time.monotonic()
        log.seek(0)
        text = log.read()
    signalled, changes = re.findall(r"^signalled (.*)\n", text, re.M), re.findall(r"^changes (.*)\n", text, re.M)
    after = round(ended - float(signalled[0]), 2) if signalled else None
    return Ended(code, re.sub(TOLD, "", text, flags=re.M), int(changes[0]) if changes else 0, after)


def _be_command(words: list[str], log: int, root: str, at: int | None, act: Callable[[], None]) -> None:
    """Be a command in a process of its own, from its words to its exit code."""
    os.setsid()
    for handle in (1, 2):
        os.dup2(log, handle)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in what a shell runs in the background
    count, code = 0, 0

    def hook(event: str, args: tuple[Any, ...]) -> None:
        nonlocal count
        if event in REACHES or (event == "open" and CANARY in str(args[0])):
            os.write(2, f"reached {event} {args[0]}\n".encode())
        if is_change(event, args, root):
            count += 1
            if count == at:
                act()

    sys.addaudithook(hook)
    sys.argv = ["hetdpt", *words]
    try:
        command_line()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os.write(2, f"changes {count}\n".encode())
    os._exit(code)


def is_change(event: str, args: tuple[Any, ...], root: str) -> bool:
    """Whether an audit event of Python says that a file below ``root`` is about to be changed."""
    if event not in CHANGES or not isinstance(args[0], str | os.PathLike):
        return False
    is_read = event == "open" and not (isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR))
    return not is_read and os.fspath(args[0]).startswith(root)


def _wait(pid: int) -> int:
    """Return the exit code of a process; one that hangs is killed, with all that it began."""
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return HANGS


def send(number: int) -> None:
    """Send a signal to this process, and note when."""
    os.write(2, f"signalled {time.monotonic():.3f}\n".encode())
    os.kill(os.getpid(), number)


# What a command leaves


def contents(root: Path) -> Found:
    """Return what the files of a directory hold: JSON by its entries, tables by cells, others by checksum."""
    found: Found = {}
    for file in sorted(root.rglob("*")):
        name = str(file.relative_to(root))
        if not file.is_file() or any(part in PASSING for part in file.relative_to(root).parts):
            continue
        if file.suffix in (".json", ".jsonl"):
            with suppress(ValueError):  # damaged, so that its entries are not there
                texts = [file.read_bytes()] if file.suffix == ".json" else file.read_bytes().splitlines()
                found |= {f"{name}: {key}": value for key, value in _entries([json.loads(text) for text in texts])}
        elif file.suffix == ".csv":
            cells = csv.DictReader(file.read_text(errors="replace").splitlines())
            found |= {f"{name}: {key}": value for key, value in _entries(list(cells))}
        else:
            found[name] = sha256(file)
    return {name: value for name, value in found.items() if not re.search(TIMES, name)}


def _entries(values: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if not isinstance(values, dict | list):
        yield path, values
        return
    for key, value in values.items() if isinstance(values, dict) else enumerate(values):
        yield from _entries(value, f"{path}.{key}")


def spread(values: Sequence[T], count: int) -> list[T]:
    """Return ``count`` of the values, from the first to the last; all where there are no more.

    >>> spread([1, 2, 3, 4, 5], 3)
    [1, 3, 5]
    """
    if count >= len(values):
        return list(values)
    return [values[round(part * (len(values) - 1) / (count - 1))] for part in range(count)]


class Trial:
    """A job, what it comes to when nothing happens, and a place to disturb it in, the same for all."""

    def __init__(self, name: str, world: World, home: Path, points: int) -> None:
        self.name, self.world, self.points = name, world, points
        self.home, self.here = home / name, home / name / "here"
        self.words = [*JOBS[name](world), "--out", str(self.here / ("out.json" if name == "select" else "out"))]
        self.changes, self.warnings = 0, set[str]()
        runs = [self._undisturbed(name) for name in ("one", "whole")]
        self.stable = {name: value for name, value in runs[0].items() if runs[1].get(name, self) == value}

    def _undisturbed(self, name: str) -> Found:
        self.begin()
        ended = self.give()
        if ended.code:
            sys.exit(f"{self.name} fails undisturbed:\n{ended.text}")
        self.changes, self.warnings = ended.changes, self.warnings | ended.warnings
        shutil.copytree(self.here, self.home / name)
        return contents(self.here)

    def begin(self, left: Path | None = None) -> None:
        """Empty the place, or make it what ``left`` is."""
        shutil.rmtree(self.here, ignore_errors=True)
        shutil.copytree(left, self.here) if left else self.here.mkdir(parents=True)

    def give(self, at: int | None = None, act: Callable[[], None] = lambda: None) -> Ended:
        return give(self.words, self.here, at, act)

    def differs(self) -> list[str]:
        """Return what is not as it is when nothing happens."""
        now = contents(self.here)
        return [name for name, value in self.stable.items() if now.get(name, self) != value]

    def moments(self, count: int) -> list[int]:
        """Return numbers of changes of files, evenly spread."""
        return spread(range(1, self.changes + 1), count)

    def half(self) -> Path:
        """Return a directory that a kill left half-done."""
        place = self.home / "half"
        if not place.is_dir():
            self.begin()
            self.give(self.changes * 2 // 3, partial(send, signal.SIGKILL))
            shutil.copytree(self.here, place)
        return place

    def after(self, first: Ended, cure: Callable[[], None] = lambda: None, is_told: bool = True) -> Found:
        """Return what came of a fault; ``first`` is how the command took it, and then it is given again.

        ``is_told`` says whether ``first`` said what it had to.
        """
        cure()
        last = first if first.code == 0 else self.give()
        crashed, differs = [one for one in (first, last) if one.is_crash], self.differs()
        is_done = last.code == 0 or (last.is_refused and " already; give another" in last.said)
        outcome = "equal"
        if crashed or differs or not (is_done and is_told):
            outcome = "lost"
        elif first.is_refused:
            outcome = "refused"
        elif (first.warnings | last.warnings) - self.warnings:
            outcome = "warned"
        found: Found = {"outcome": outcome, "said": (crashed or [first])[0].said.replace(str(self.home.parent), "")}
        if outcome == "lost":
            found |= {"differs": differs[:5], "last": last.text[-2000:], "first": first.text[-2000:]}
        return found if first.after_signal is None else {**found, "seconds": first.after_signal}


# Faults: each yields where it struck, and what came of it


def killed(trial: Trial) -> Iterator[tuple[str, Found]]:
    for moment in trial.moments(trial.points):
        trial.begin()
        first = trial.give(moment, partial(send, signal.SIGKILL))
        found = trial.after(first, is_told=first.code in (0, -signal.SIGKILL))
        found.pop("seconds", None)
        yield f"change {moment} of {trial.changes}", {**found, "said": ""}


def stopped(trial: Trial, number: int) -> Iterator[tuple[str, Found]]:
    for moment in trial.moments(max(2, trial.points // 3)):
        trial.begin()
        first = trial.give(moment, partial(send, number))
        is_told = first.said.startswith("stopped by") and first.code == 128 + number
        yield f"change {moment} of {trial.changes}", trial.after(first, is_told=is_told)


def full(trial: Trial) -> Iterator[tuple[str, Found]]:
    needed = sum(file.stat().st_size // 4096 * 4 + 8 for file in trial.home.joinpath("whole").rglob("*"))
    for part in (0.02, 0.3, 0.6, 0.9):
        trial.begin()
        with disk(trial.here, f"size={max(16, int(part * needed))}k"):
            first = trial.give()
            yield f"{100 * part:.0f} % of {needed} KiB", trial.after(first, cure=lambda: remount(trial.here, "size=1g"))


def read_only(trial: Trial) -> Iterator[tuple[str, Found]]:
    for state, left in (("empty", None), ("half-done", trial.half())):
        trial.begin()
        with disk(trial.here, "size=1g"):
            if left:
                shutil.copytree(left, trial.here, dirs_exist_ok=True)
            remount(trial.here, "ro")
            first = trial.give()
            yield state, trial.after(first, cure=lambda: remount(trial.here, "rw"), is_told=first.is_refused)


@contextmanager
def disk(place: Path, options: str) -> Iterator[None]:
    """Let ``place`` be a small disk of its own for a while."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", place], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", place], check=True)


def remount(place: Path, options: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{options}", place], check=True)


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 0x15
    file.write_bytes(content)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "flipped": flip, "cut": cut, "emptied": lambda file: file.write_bytes(b""), "gone": Path.unlink,
}  # fmt: skip


def damaged(trial: Trial) -> Iterator[tuple[str, Found]]:
    for state, left in (("half-done", trial.half()), ("finished", trial.home / "whole")):
        others = cycle(way for way in DAMAGES if way != "flipped")
        for file in spread(one_of_each_sort(left), 3 * trial.points):
            for way in ("flipped", next(others)) if (left / file).stat().st_size else ("gone",):
                trial.begin(left)
                DAMAGES[way](trial.here / file)
                let_patience_pass(trial.here / file)
                yield f"{state}, {file} {way}", after_damage(trial, left, file)


def let_patience_pass(file: Path) -> None:
    """Make a claim as old as others wait for one that they cannot read: it could be of another machine."""
    if file.suffix == ".claim" and file.exists():
        long_ago = time.time() - 2 * PATIENCE
        os.utime(file, (long_ago, long_ago))


def one_of_each_sort(root: Path) -> list[Path]:
    """Return the files of a directory, of those whose names differ in numbers alone the last."""
    files = [file.relative_to(root) for file in sorted(root.rglob("*")) if file.is_file()]
    return [*{re.sub("[0-9a-f]*[0-9][0-9a-f]*", "0", str(file)): file for file in files}.values()]


def after_damage(trial: Trial, left: Path, file: Path) -> Found:
    """Return what came of damage to one file: the command is given, and the file is put back where that is refused."""
    here, whole = trial.here / file, left / file
    spoilt = here.read_bytes() if here.exists() else None
    first = trial.give()

    def put_back() -> None:
        if not first.code:
            return
        here.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(whole, here)

    stays = (here.read_bytes() if here.exists() else None) == spoilt and file.parts[-2:-1] != ("checkpoints",)
    found = trial.after(first, cure=put_back)
    if first.code == 0 and stays and (trial.home / "whole" / file).is_file():
        outcome = "by use" if is_refused_by_use(here, trial) else "unread" if is_needless(file, trial) else "lost"
        return {**(found if outcome == "lost" else {}), "outcome": outcome, "said": ""}
    return found


def is_needless(file: Path, trial: Trial) -> bool:
    """Whether all else is the same with ``file`` damaged, and without it."""

    def others_differ() -> bool:
        return any(name != str(file) and not name.startswith(f"{file}: ") for name in trial.differs())

    if others_differ():
        return False
    (trial.here / file).unlink(missing_ok=True)
    return trial.give().code == 0 and not others_differ()


def is_refused_by_use(file: Path, trial: Trial) -> bool:
    """Whether what reads a damaged file refuses it: the model it is of, or the report of its run."""
    for mark, load in {"hetdpt.json": hetdpt.load, "task.json": hetdpt.load_task}.items():
        if file.name == mark or (file.parent / mark).exists():
            try:
                load(file.parent)
            except HetDPTError:
                return True
    aside = ["--out", str(trial.home / "read.json"), "--overwrite"]
    readers = {"run": (["status"], ["report", *aside]), "collect": (["predict", "--layers", "2"],)}.get(trial.name, ())
    return any(give([*words, str(trial.here / "out")], trial.here).is_refused for words in readers)


def data_spoilt(trial: Trial) -> Iterator[tuple[str, Found]]:
    if str(trial.world.images) not in trial.words:
        return
    kept = trial.home / "images"
    shutil.copytree(trial.world.images, kept, dirs_exist_ok=True)
    for what, pattern, spoil in (
        ("one image goes", "train/class3/03.png", Path.unlink),
        ("all images go", "train/*/*.png", Path.unlink),
        ("an image is thin", "val/class3/43.png", Image.new("RGB", (200_000, 1)).save),
    ):
        trial.begin()

        def disturb(pattern: str = pattern, spoil: Callable[[Path], Any] = spoil) -> None:
            for file in trial.world.images.glob(pattern):
                spoil(file)

        first = trial.give(trial.changes // 2, disturb)
        put_back = partial(shutil.copytree, kept, trial.world.images, dirs_exist_ok=True)
        is_told = first.is_refused or "could not be read" in first.text
        found = trial.after(first, cure=put_back, is_told=is_told)
        if first.code == 0 and is_told:
            found = {"outcome": "warned", "said": first.said}
        put_back()
        yield f"{what} at change {trial.changes // 2} of {trial.changes}", found


FOREIGN: dict[str, tuple[str, str, dict[str, Any]]] = {
    "nested checkpoint": (
        "transformers",
        "TimmWrapperForImageClassification",
        {"architecture": "test_vit", "num_classes": 10, "model_args": {"checkpoint_path": CANARY}},
    ),
    "checkpoint": ("timm", "test_vit", {"checkpoint_path": CANARY}),
    "backbone": ("transformers", "TimmBackbone", {"backbone": "hf-hub:evil/x"}),
    "decoder": ("transformers", "DPTForDepthEstimation", {"backbone": "evil/x", "use_timm_backbone": False}),
    "processor": ("transformers", "ViTForImageClassification", {"name_or_path": "evil/x"}),
}
"""Library, name and arguments of models that would read a file, or ask a hub, if they were built."""


def foreign(trial: Trial) -> Iterator[tuple[str, Found]]:
    """Let the model say that it is built of something else; the checksum is that of what it says."""
    recipe = Path(trial.world.model, "hetdpt.json")
    sound, values = recipe.read_bytes(), read_sealed_json(recipe)
    for what, base in FOREIGN.items():
        trial.begin()
        changed = dict(zip(("library", "name", "arguments"), base, strict=True))
        write_sealed_json(recipe, {**values, "base": changed, "preprocessing": None})
        with tempfile.TemporaryDirectory() as folder, chdir(folder):
            Path(CANARY).write_bytes(b"")
            first = trial.give()
        is_told = first.is_refused and "reached " not in first.text
        yield what, trial.after(first, cure=partial(recipe.write_bytes, sound), is_told=is_told)


def rank_dies(trial: Trial) -> Iterator[tuple[str, Found]]:
    if trial.name != "recover":
        return
    group = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "hetdpt",
             *trial.words, "--device", "cpu"]  # fmt: skip
    trial.begin()
    subprocess.run(group, check=True, capture_output=True)
    whole = weights_of(trial)
    for rank in (0, 1):
        trial.begin()
        with subprocess.Popen(group, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as process:
            while process.poll() is None and not list(trial.here.glob("out/checkpoints/*.pt")):
                time.sleep(0.02)
            ranks = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True).stdout.split()
            os.kill(int(ranks[rank]), signal.SIGKILL)
            process.communicate()
        again = subprocess.run(group, capture_output=True, text=True)
        is_equal = again.returncode == 0 and weights_of(trial) == whole
        yield f"process {rank}", {"outcome": "equal" if is_equal else "lost", "said": ""}


def weights_of(trial: Trial) -> Found:
    """Return the checksums of the weights that a command has left."""
    return {name: seal for name, seal in contents(trial.here).items() if name.endswith(".safetensors")}


FAULTS: dict[str, Callable[[Trial], Iterator[tuple[str, Found]]]] = {
    "kill": killed,
    "terminate": partial(stopped, number=signal.SIGTERM),
    "interrupt": partial(stopped, number=signal.SIGINT),
    "full": full,
    "read-only": read_only,
    "damage": damaged,
    "data": data_spoilt,
    "foreign": foreign,
    "rank": rank_dies,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", nargs="+", default=list(JOBS), choices=JOBS)
    parser.add_argument("--faults", nargs="+", default=list(FAULTS), choices=FAULTS)
    parser.add_argument("--points", type=int, default=8, help="points in time at which a command is killed")
    parser.add_argument("--out", type=Path, default=RESULTS / "faults.json")
    options = parser.parse_args()
    recorder = Recorder(options.out)
    with tempfile.TemporaryDirectory() as home:
        world = make_world(Path(home))
        for job in options.jobs:
            trial = Trial(job, world, Path(home), options.points)
            for fault in options.faults:
                for at, found in FAULTS[fault](trial):
                    recorder.add({"job": job, "fault": fault, "at": at}, **found)


if __name__ == "__main__":
    main()
