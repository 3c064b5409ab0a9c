"""What numbers are measured on, so that nobody has to guess it from them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hetdpt.core.host import processor


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
            torch.cuda.get_device_name(device) if is_gpu else processor(),
            torch.get_num_threads(),
        )
