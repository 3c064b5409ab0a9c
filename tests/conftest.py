"""Shared fixtures. hetdpt is imported first: it cures torchvision where its operators do not load."""

from __future__ import annotations

import pytest
import torch
from families import Family, named
from torch import nn

import hetdpt  # noqa: F401


@pytest.fixture
def vit() -> Family:
    """The plain ViT of three blocks that most tests use."""
    return named("vit_tiny_patch16_224")


@pytest.fixture
def model(vit: Family) -> nn.Module:
    return vit.build()


@pytest.fixture
def images(vit: Family) -> torch.Tensor:
    return vit.images()
