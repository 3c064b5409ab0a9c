"""One small model per family: the rows of the contract suite. Sizes are cut down where the family allows it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import hetdpt  # before timm: cures torchvision where its operators do not load

import timm
import torch
from torch import nn

from hetdpt.adapters.models import Base, build


@dataclass(frozen=True)
class Family:
    name: str
    base: Base
    size: tuple[int, int, int]
    attention: int
    """How many attention sites it must offer."""
    activation: int
    removal: Any = "plain"

    def build(self) -> nn.Module:
        """Return the model with random values in every parameter, so that no branch is zero by initialisation."""
        model = build(self.base)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in model.parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(noise / max(parameter[0].numel(), 1) ** 0.5 if parameter.ndim > 1 else 0.5 + 0.1 * noise)
        return model.eval()


VIT = {"depth": 3, "embed_dim": 48, "num_heads": 3, "img_size": 32, "patch_size": 8, "num_classes": 10}
SMALL = {"num_classes": 10, "img_size": 64}


def timm_family(name: str, attention: int, activation: int, size: int = 64, /, removal: Any = "plain", **kw: Any) -> Family:
    return Family(name, Base("timm", name, kw), (3, size, size), attention, activation, removal)
