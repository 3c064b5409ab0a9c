"""The tokens of a batch between two blocks, and the interface of methods that reduce them. No model is known here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hetdpt.core.tokens import Tokens


@dataclass(frozen=True)
class TokenStream:
    """Tokens on their way through the blocks of a model."""

    tokens: Tensor
    """(B, n, D)."""
    protected: int
    """How many of the first tokens are never removed: class, distillation and register tokens."""
    grid: tuple[int, int]
    """Rows and columns of the patches of the other tokens."""
    sizes: Tensor | None = None
    """(B, n): how many patches each token represents. None until the first are removed: 1 each."""
    places: Tensor | None = None
    """(B, N): the index of each of the first N tokens now. None if not needed."""
    graph: Tensor | None = None
    """(B, n - protected, n - protected): how much each token takes from each other one (GTP)."""

    @property
    def weights(self) -> Tensor:
        """The sizes (B, n), in float32 or better."""
        if self.sizes is not None:
            return self.sizes
        exact = torch.promote_types(self.tokens.dtype, torch.float32)
        return self.tokens.new_ones(self.tokens.shape[:2], dtype=exact)

    def moved(self, destinations: Tensor) -> Tensor | None:
        """Return the indices of the first tokens after token i has moved to ``destinations`` (B, n)."""
        return None if self.places is None else destinations.gather(1, self.places)

    def put_back(self) -> Tensor:
        """Return tokens (B, N, D): at each of the first N positions the token that its own was merged into."""
        if self.sizes is None or self.places is None:  # the same tensor if none was removed: a copy may round otherwise
            return self.tokens
        return rows(self.tokens, self.places)


@dataclass(frozen=True)
class AttentionRecord:
    """What the attention before the reduction computed."""

    given: Tensor
    """The tokens (B, n, D) that the block got."""
    keys: Tensor
    """(B, heads, n, d)."""
    map: Tensor | None
    """(B, heads, n, n): the attention map, if the method needs it."""


@dataclass(frozen=True)
class TokenMethod:
    """A row of the table of methods."""

    reduce: Callable[[TokenStream, AttentionRecord, int, Tokens], TokenStream]
    """Returns the stream with that many tokens removed."""
    needs_map: bool = False
    """Whether it needs the attention map, which is then computed explicitly."""


def rows(table: Tensor, numbers: Tensor) -> Tensor:
    """Return the rows (B, m, D) of ``table`` (B, n, D) with these ``numbers`` (B, m)."""
    return table.gather(1, numbers[..., None].expand(-1, -1, table.shape[-1]))


def destinations(removed: Tensor, into: Tensor, n: int) -> Tensor:
    """Return the new index of each of n tokens (B, n) after ``removed`` (B, r) are merged ``into`` others (B, r)."""
    stays = removed.new_ones(removed.shape[0], n).scatter(1, removed, torch.zeros_like(removed))
    numbers = stays.cumsum(1) - 1
    return numbers.scatter(1, removed, numbers.gather(1, into))


def merge(stream: TokenStream, removed: Tensor, into: Tensor) -> TokenStream:
    """Return the tokens after ``removed`` (B, r) are merged into ``into`` (B, r): means, weighted by size.

    x' = sum s x / sum s and s' = sum s over the tokens that are merged, so that sum s x does not change.
    """
    tokens, sizes = stream.tokens, stream.weights
    ends = destinations(removed, into, tokens.shape[1])
    left = tokens.shape[1] - removed.shape[1]
    total = sizes.new_zeros(sizes.shape[0], left).scatter_add(1, ends, sizes)
    weighted = tokens.to(sizes.dtype) * sizes[..., None]
    sums = weighted.new_zeros(sizes.shape[0], left, tokens.shape[2])
    sums = sums.scatter_add(1, ends[..., None].expand_as(weighted), weighted)
    means = (sums / total[..., None]).to(tokens.dtype)
    return replace(stream, tokens=means, sizes=total, places=stream.moved(ends))
