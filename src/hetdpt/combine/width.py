"""Width pruning of a model that may have lost layers: heads, head dimensions, hidden features, the embedding."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn


@dataclass(frozen=True)
class Ratios:
    """Which part of each size goes."""

    embedding: float = 0.0
    hidden: float = 0.0
    heads: float = 0.0
    head_dims: float = 0.0


@dataclass(frozen=True)
class WidthConfig:
    """How width goes."""

    importance: Literal["taylor", "l2", "random"] = "taylor"
    round_to: int | None = None
    shares: Ratios = Ratios(1.0, 1.0, 1.0, 0.5)
    refits: bool = True
    seed: int = 0


@dataclass(frozen=True)
class Narrowed:
    """A narrowed model, and what it came to."""

    model: nn.Module
    ratios: Ratios
    macs: int
    params: int
    speedup: float | None
    tried: int


def narrow_to(
    model: nn.Module,
    *,
    ratio: float | None = None,
    macs: float | None = None,
    params: float | None = None,
    speedup: float | None = None,
    config: WidthConfig | None = None,
    batches: Iterable[tuple[Tensor, Tensor]] = (),
    dense: nn.Module | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> Narrowed:
    raise NotImplementedError
