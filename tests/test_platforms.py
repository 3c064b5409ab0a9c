"""Other systems than Linux, as far as Linux can play them: what they lack is taken away, then hetdpt is used."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hetdpt.cli.options import workers_of
from hetdpt.core import host

# Libraries come first: they look at sys.platform, which stays Linux.
MACOS = """
import os, signal, sys
import hetdpt
import accelerate, datasets, filelock, psutil, timm, torch, torchvision, transformers, webdataset
import torch.distributed.checkpoint.state_dict, torch.utils.tensorboard
torch.multiprocessing.set_start_method("spawn")  # workers get what they need by pickle
del os.sched_getaffinity
"""
WINDOWS = """
import errno, fcntl, shutil
from hetdpt.core import host

def is_read_only(handle, ours=fcntl.fcntl, code=fcntl.F_GETFL):
    return ours(handle, code) & os.O_ACCMODE == os.O_RDONLY

def fsync(handle, ours=os.fsync):
    if is_read_only(handle):
        raise OSError(errno.EBADF, "Windows flushes no handle that only reads")
    ours(handle)

def utime(path, *arguments, ours=os.utime):
    assert not isinstance(path, int), "Windows sets times by name alone"
    ours(path, *arguments)

def opened(path, *arguments, ours=os.open, **options):
    if os.path.isdir(path):
        raise PermissionError(errno.EACCES, "Windows opens no directory", str(path))
    return ours(path, *arguments, **options)

os.fsync, os.utime, os.open, host.IS_WINDOWS = fsync, utime, opened, True
shutil._use_fd_functions = False  # it would open directories
for name in ("fcntl", "resource", "pwd", "grp", "termios"):
    sys.modules[name] = None
for name in ("register_at_fork", "fork", "killpg", "getuid", "geteuid", "fchmod", "O_NONBLOCK", "O_DIRECTORY"):
    delattr(os, name)
for name in ("SIGCHLD", "SIGKILL", "SIGHUP", "SIGUSR1", "SIGALRM"):
    delattr(signal, name)
"""
SYSTEMS = {"macOS": MACOS, "Windows": MACOS + WINDOWS}
WORKERS = {"macOS": "", "Windows": "--workers 0"}  # torch would ask for signals of Linux

IMPORTS = """
import pkgutil
from importlib import import_module
for module in pkgutil.walk_packages(hetdpt.__path__, "hetdpt."):
    if module.name != "hetdpt.__main__":
        import_module(module.name)
"""
LOCKS = """
import subprocess
from pathlib import Path
from hetdpt.store.queue import Claim, holder
from hetdpt.core.errors import FileError
from hetdpt.store import lock as alone
place = Path("place")
place.mkdir()
assert not alone.is_in_use(place)
with alone.alone(place):
    assert alone.is_in_use(place)
    try:
        with alone.alone(place):
            raise AssertionError
    except FileError as error:
        assert "in use by another process" in str(error)
assert not alone.is_in_use(place)
with Claim.take(place, "a", patience=0.5) as claim:
    time.sleep(1)  # it is renewed
    assert claim.is_held() and holder(place, "a", patience=0.5) == f"pid {os.getpid()} on {socket.gethostname()}"
    assert Claim.take(place, "a", patience=0.5) is None
for _ in range(20):
    with Claim.take(place, "a") as claim:
        claim.require_held()
assert host.peak_memory() > 10_000_000
"""
COMMANDS = """
from hetdpt.cli import main
for words in (
    "inspect demo", "run demo --data demo --layers 1 --out run --dry-run --workers 0",
    "oneshot demo --data demo --images 8 --judge-images 4 --layers 1 --out one",
    "eval one --data demo --per-class 2 {workers}",
    "recover demo --data demo --plan one/plan.json --out two --epochs 1 --workers 0 --per-class 2 --batch-size 10",
):
    sys.argv = ["hetdpt", *words.split()]
    try:
        main()
    except SystemExit as end:
        assert not end.code, words
"""


def play(system: str, code: str, folder: Path) -> str:
    """Return what ``code`` prints where ``system`` is played."""
    command = [sys.executable, "-c", f"{SYSTEMS[system]}\nimport socket, time\nfrom hetdpt.core import host\n{code}"]
    environment = {**os.environ, "TMPDIR": str(folder)}
    result = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.slow
def test_every_module_can_be_imported_and_processes_keep_apart(tmp_path: Path) -> None:
    play("Windows", IMPORTS + LOCKS, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("system", SYSTEMS)
def test_commands_run(system: str, tmp_path: Path) -> None:
    assert "top-1" in play(system, COMMANDS.format(workers=WORKERS[system]), tmp_path)


def test_cores_are_those_that_this_process_may_use_or_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 5, 6}, raising=False)
    assert (host.cores(), workers_of(None), workers_of(0)) == (3, 3, 0)
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 5)
    assert (host.cores(), workers_of(None)) == (5, 5)
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert (host.cores(), workers_of(None)) == (1, 1)


def texts_without_encoding(source: str) -> list[int]:
    """Return the lines that read or write text in the encoding of the system: Windows has others than UTF-8."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    return [call.lineno for call in calls if _is_text(call) and "encoding" not in {word.arg for word in call.keywords}]


def _is_text(call: ast.Call) -> bool:
    name = ast.unparse(call.func).rpartition(".")[2]
    modes = [mode.value for mode in call.args if isinstance(mode, ast.Constant) and mode.value in ("r", "w", "a", "x")]
    return name in ("read_text", "write_text") or (name == "open" and bool(modes or (not call.args and call.keywords)))


def test_text_is_utf_8_on_every_system() -> None:
    assert texts_without_encoding('a.read_text()\nb.open("w", newline="")\nc.open(newline="")') == [1, 2, 3]
    assert texts_without_encoding('a.open("rb")\nImage.open(b)\nc.read_text(encoding="utf-8")') == []
    files = sorted(Path(host.__file__).parent.rglob("*.py"))
    found = {str(file): lines for file in files if (lines := texts_without_encoding(file.read_text(encoding="utf-8")))}
    assert found == {}
