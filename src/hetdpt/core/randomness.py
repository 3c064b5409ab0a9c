"""Random numbers for one block of code. The global generators are restored afterwards."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def seeded(*entropy: int, device: torch.device | None = None) -> Iterator[None]:
    """Run the block with the generators seeded from ``entropy``, and restore their states afterwards.

    These are the generators of Python, numpy and torch on the CPU, and that of ``device`` if it is an accelerator.
    ``entropy`` are integers from 0; (1,) and (1, 0) differ, unlike in a plain ``np.random.SeedSequence``.

    >>> with seeded(1, 2):
    ...     first = random.random()
    >>> with seeded(1, 2):
    ...     first == random.random()
    True
    """
    seeds = np.random.SeedSequence((len(entropy), *entropy)).generate_state(4, np.uint64).tolist()
    accelerator = torch.get_device_module(device) if device is not None and device.type != "cpu" else None
    python, numpy, cpu = random.getstate(), np.random.get_state(legacy=False), torch.default_generator.get_state()
    other = accelerator.get_rng_state(device) if accelerator else None
    try:
        random.seed(seeds[0])
        np.random.seed(seeds[1] >> 32)
        torch.default_generator.manual_seed(seeds[2])  # torch.manual_seed would look at every accelerator
        if accelerator:
            accelerator.set_rng_state(torch.Generator(device).manual_seed(seeds[3]).get_state(), device)
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.default_generator.set_state(cpu)
        if accelerator:
            accelerator.set_rng_state(other, device)
