"""What is done with any torch module: copies around the same weights, eval mode for a while, images, a device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy

import torch
from torch import Tensor, nn

from hetdpt.errors import DeviceError


def clone(model: nn.Module) -> nn.Module:
    """Return a copy of the modules of ``model`` around the very same tensors.

    Replacing a module of the copy leaves the model alone; training the copy trains the model.
    """
    tensors = (*model.parameters(), *model.buffers())
    return deepcopy(model, {id(tensor): tensor for tensor in tensors})


@contextmanager
def evaluating(*models: nn.Module) -> Iterator[None]:
    """Put every module in eval mode, and each one back as it was."""
    modes = [(module, module.training) for model in models for module in model.modules()]
    for model in models:
        model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextmanager
def memory_advice(sentence: str) -> Iterator[None]:
    """Raise ``DeviceError(sentence)`` in place of whatever torch raises where memory does not suffice."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:  # torch.OutOfMemoryError is a RuntimeError
        words = ("can't allocate memory", "out of memory", "out of shared memory")
        if isinstance(error, MemoryError) or any(word in str(error) for word in words):
            raise DeviceError(sentence) from None
        raise


def random_images(model: nn.Module, size: tuple[int, int, int], batch: int) -> Tensor:
    """Return the same random images (B, C, H, W) every time, on the device and in the dtype of ``model``."""
    images = torch.randn(batch, *size, generator=torch.Generator().manual_seed(0))
    return images.to(next(model.parameters()))


def find_device(name: str | None = None) -> torch.device:
    """Return the device called ``name``, or the fastest there is; ``DeviceError`` where it is not to be had.

    >>> find_device("cpu")
    device(type='cpu')
    """
    has = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name is None:
        return torch.device(next(k for k in has if has[k]))
    kind, _, number = name.partition(":")
    if not has.get(kind) or not (number or "0").isdecimal():
        raise DeviceError(f"device {name!r} is not to be had here; there is {', '.join(k for k in has if has[k])}")
    return torch.device(name)
