"""What numbers are measured on, so that nobody has to guess it from them."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class Machine:
    """A device, and what it is called."""

    device: str
    """cpu, cuda or mps."""
    processor: str
    threads: int
    """That torch computes with on a CPU."""

    @classmethod
    def of(cls, device: torch.device) -> Machine:
        """Return what is known of ``device``.

        >>> Machine.of(torch.device("cpu")).device
        'cpu'
        """
        is_gpu = device.type == "cuda"
        return cls(
            device.type,
            torch.cuda.get_device_name(device) if is_gpu else _processor(),
            torch.get_num_threads(),
        )


def _processor() -> str:
    """Return the name of the CPU: Linux has it in a file, others in the platform."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())
