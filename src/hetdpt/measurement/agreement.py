"""How far apart two models are on the same images."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from hetdpt.modules import evaluating, random_images


def outputs_of(model: nn.Module, images: Tensor) -> list[Tensor]:
    """Return all tensors that ``model`` computes from ``images``, whatever structure it returns them in."""
    return [leaf for leaf in tree_leaves(model(images)) if isinstance(leaf, Tensor)]


@torch.no_grad()
def relative_difference(one: nn.Module, other: nn.Module, input_size: tuple[int, int, int], batch: int = 4) -> float:
    """Return the largest difference of outputs over the largest output, in eval mode on random images.

    NaN where an output is; infinity where the outputs have different shapes.
    """
    images = random_images(one, input_size, batch)
    with evaluating(one, other):
        pairs = list(zip(outputs_of(one, images), outputs_of(other, images), strict=True))
    differences = [(a - b).abs().max() / a.abs().max().clamp(min=1e-30) for a, b in pairs if a.shape == b.shape]
    if len(differences) < len(pairs):
        return float("inf")
    return torch.stack(differences).max().item()
