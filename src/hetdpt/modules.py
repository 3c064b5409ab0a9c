"""What is done with any torch module: copies around the same weights, eval mode for a while, images to feed it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy

import torch
from torch import Tensor, nn


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


def random_images(model: nn.Module, size: tuple[int, int, int], batch: int) -> Tensor:
    """Return the same random images (B, C, H, W) every time, on the device and in the dtype of ``model``."""
    images = torch.randn(batch, *size, generator=torch.Generator().manual_seed(0))
    return images.to(next(model.parameters()))
