"""The machine that numbers are measured on."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hetdpt.core.host import processor


@dataclass(frozen=True)
class Machine:
    """A device and its name."""

    device: str
    """cpu, cuda or mps."""
    processor: str
    threads: int
    """Threads of torch on a CPU."""

    @classmethod
    def of(cls, device: torch.device) -> Machine:
        """Return the machine that ``device`` is part of.

        >>> Machine.of(torch.device("cpu")).device
        'cpu'
        """
        is_gpu = device.type == "cuda"
        return cls(
            device.type,
            torch.cuda.get_device_name(device) if is_gpu else processor(),
            torch.get_num_threads(),
        )
