"""The machine that numbers are measured on."""

from __future__ import annotations

import torch

from hetdpt.core.host import processor
from hetdpt.results import Machine


def machine_of(device: torch.device) -> Machine:
    """Return the machine that ``device`` is part of.

    >>> machine_of(torch.device("cpu")).device
    'cpu'
    """
    is_gpu = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if is_gpu else processor()
    return Machine(device.type, name, torch.get_num_threads())
