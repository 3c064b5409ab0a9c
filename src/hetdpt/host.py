"""What is known of the computer that hetdpt runs on, whichever system it has. No torch here."""

from __future__ import annotations

import platform
from pathlib import Path


def processor() -> str:
    """Return the name of the CPU: Linux has it in a file, others in the platform."""
    return _cpu_info("model name") or platform.processor() or platform.machine()


def instructions() -> str:
    """Return the instruction sets that the CPU offers, where the system lists them; virtual CPUs share a name."""
    return _cpu_info("flags") or _cpu_info("Features")


def _cpu_info(field: str) -> str:
    """Return what Linux says of the first CPU; an empty text where it does not, or where this is not Linux."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    return next((line.partition(":")[2].strip() for line in lines if line.partition(":")[0].strip() == field), "")
