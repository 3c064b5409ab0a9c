"""Shared fixtures. hetdpt is imported first: it cures torchvision where its operators do not load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from families import Family, named
from torch import nn

import hetdpt


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Run the tests of one file in one process, so that what a module's fixtures make is made once."""
    from xdist.scheduler import LoadFileScheduling

    return LoadFileScheduling(config, log)


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


@pytest.fixture
def dense(home: Path) -> nn.Module:
    """The model ``dense`` in the ``home`` of a module's tests."""
    return hetdpt.load(home / "dense")


@pytest.fixture
def models(home: Path) -> dict[str, nn.Module]:
    """The models ``dense`` and ``pruned`` in the ``home`` of a module's tests."""
    return {name: hetdpt.load(home / name) for name in ("dense", "pruned")}
