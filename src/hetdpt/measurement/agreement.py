"""How far apart two models are on the same images."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from hetdpt.adapters.models import evaluating


def outputs_of(model: nn.Module, images: Tensor) -> list[Tensor]:
    """Return all tensors that ``model`` computes from ``images``, whatever structure it returns them in."""
    return [leaf for leaf in tree_leaves(model(images)) if isinstance(leaf, Tensor)]


@torch.no_grad()
def relative_difference(one: nn.Module, other: nn.Module, input_size: tuple[int, int, int], batch: int = 4) -> float:
    """Return the largest difference of outputs over the largest output, both in eval mode on random images."""
    weight = next(one.parameters())
    images = torch.randn(batch, *input_size, generator=torch.Generator().manual_seed(0)).to(weight)
    with evaluating(one), evaluating(other):
        pairs = list(zip(outputs_of(one, images), outputs_of(other, images), strict=True))
    return max(((a - b).abs().max() / a.abs().max().clamp(min=1e-30)).item() for a, b in pairs)
