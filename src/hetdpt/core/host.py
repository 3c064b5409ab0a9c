"""Facts about the computer that hetdpt runs on, on any operating system. No torch here."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path

IS_WINDOWS = sys.platform == "win32"


def processor() -> str:
    """Return the name of the CPU."""
    return _cpu_info("model name") or platform.processor() or platform.machine()


def instructions() -> str:
    """Return the instruction sets of the CPU, if the system lists them; virtual CPUs share a name."""
    return _cpu_info("flags") or _cpu_info("Features")


def cores() -> int:
    """Return how many cores this process may use or, if the system does not say (macOS), how many there are."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def peak_memory() -> int:
    """Return the peak memory of this process in bytes."""
    try:
        import resource
    except ImportError:  # Windows, where psutil knows the peak
        import psutil

        memory = psutil.Process().memory_info()
        return int(getattr(memory, "peak_wset", memory.rss))
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _cpu_info(field: str) -> str:
    """Return a field of Linux's description of the first CPU; empty where the system has no such description."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    return next((line.partition(":")[2].strip() for line in lines if line.partition(":")[0].strip() == field), "")
