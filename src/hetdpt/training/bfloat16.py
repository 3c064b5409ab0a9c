"""Whether a device supports bfloat16: tried in another process, once for each machine and version of torch."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import signal
import subprocess
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch

from hetdpt.core.errors import FileError, TrainError
from hetdpt.core.host import instructions, processor
from hetdpt.store.atomic import find_sealed, write_sealed_json

PATIENCE = 600.0  # seconds; importing torch took 17 on a busy machine
CRASHES = {-signal.SIGILL, -signal.SIGABRT, -signal.SIGFPE, -signal.SIGSEGV, 0xC000001D, 0xC0000005}
"""How a process ends that its CPU cannot run, the last two on Windows: illegal instruction, access violation."""


@cache
def runs_bfloat16(device: str) -> bool:
    """Return whether a matrix product in bfloat16 works on ``device``, as in ``cpu`` and ``mps``.

    On some CPUs it ends the process, so another process tries it; the answer is kept in the user's cache.
    ``TrainError`` if there is no answer because that process was killed or failed before.
    """
    file = _file(device)
    if (known := _known(file)) is not None:
        return known
    works = _try(device)
    with suppress(OSError):  # without a cache the next process tries again
        file.parent.mkdir(parents=True, exist_ok=True)
        write_sealed_json(file, {"runs": works, "torch": torch.__version__, "processor": processor(), "device": device})
    return works


def _file(device: str) -> Path:
    """Return where the answer is kept: one file for each machine, version of torch and kind of device."""
    facts = (torch.__version__, device, platform.system(), platform.release(), processor(), instructions())
    name = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(caches) / "hetdpt" / f"bfloat16-{name}.json"


def _known(file: Path) -> bool | None:
    """Return the cached answer; None if there is no file, or it cannot be read."""
    try:
        answer = find_sealed(file, "it is made again", lambda values: values["runs"])
    except (FileError, OSError):
        return None
    return answer if isinstance(answer, bool) else None


def _try(device: str) -> bool:
    code = f"import torch; a = torch.ones(64, 64, dtype=torch.bfloat16, device={device!r}); (a @ a).sum().item()"
    try:
        ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        raise TrainError(_no_answer(device, f"no answer within {PATIENCE:g} seconds")) from None
    if ended.returncode == 0:
        return True
    if ended.returncode in CRASHES:
        return False
    lines = ended.stderr.strip().splitlines()
    raise TrainError(_no_answer(device, lines[-1] if lines else f"the process ended with {ended.returncode}"))


def _no_answer(device: str, reason: str) -> str:
    return f"cannot tell whether this machine's {device} supports bfloat16 ({reason}); use --precision float32"
