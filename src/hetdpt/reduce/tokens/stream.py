"""The tokens of a batch between two blocks, and what a method that reduces them is told; no model is known here."""

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
    """So many of them, the first, never go: class, distillation and register tokens."""
    grid: tuple[int, int]
    """Rows and columns of the patches that the others once were."""
    sizes: Tensor | None = None
    """(B, n): of how many patches each token is made. None until the first have gone: 1 each."""
    places: Tensor | None = None
    """(B, N): where each of the first N tokens is now. None where nobody will ask."""
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
        """Return where the first tokens are once token i of now is at ``destinations`` (B, n)."""
        return None if self.places is None else destinations.gather(1, self.places)

    def put_back(self) -> Tensor:
        """Return tokens (B, N, D): in each place of the first N what its token has become part of."""
        if self.sizes is None or self.places is None:  # the very tensor where none has gone: a copy may round otherwise
            return self.tokens
        return rows(self.tokens, self.places)


@dataclass(frozen=True)
class AttentionRecord:
    """What the attention before the reduction did."""

    given: Tensor
    """The tokens (B, n, D) that the block was given."""
    keys: Tensor
    """(B, heads, n, d)."""
    map: Tensor | None
    """(B, heads, n, n): who looks at whom, where the method wants to know."""


@dataclass(frozen=True)
class TokenMethod:
    """A row of the table of methods."""

    reduce: Callable[[TokenStream, AttentionRecord, int, Tokens], TokenStream]
    """Returns the stream with so many tokens fewer."""
    needs_map: bool = False
    """Whether it looks at the attention map, which is then computed as such."""


def rows(table: Tensor, numbers: Tensor) -> Tensor:
    """Return the rows (B, m, D) of ``table`` (B, n, D) that have these ``numbers`` (B, m)."""
    return table.gather(1, numbers[..., None].expand(-1, -1, table.shape[-1]))


def destinations(gone: Tensor, into: Tensor, n: int) -> Tensor:
    """Return where each of n tokens (B, n) is once some have ``gone`` (B, r) ``into`` others (B, r); order stays."""
    stays = gone.new_ones(gone.shape[0], n).scatter(1, gone, torch.zeros_like(gone))
    numbers = stays.cumsum(1) - 1
    return numbers.scatter(1, gone, numbers.gather(1, into))


def merge(stream: TokenStream, gone: Tensor, into: Tensor) -> TokenStream:
    """Return the tokens once those ``gone`` (B, r) are part of ``into`` (B, r): means, weighted by size.

    x' = sum s x / sum s and s' = sum s over the tokens that become one, so that sum s x stays what it is.
    """
    tokens, sizes = stream.tokens, stream.weights
    ends = destinations(gone, into, tokens.shape[1])
    left = tokens.shape[1] - gone.shape[1]
    total = sizes.new_zeros(sizes.shape[0], left).scatter_add(1, ends, sizes)
    weighted = tokens.to(sizes.dtype) * sizes[..., None]
    sums = weighted.new_zeros(sizes.shape[0], left, tokens.shape[2])
    sums = sums.scatter_add(1, ends[..., None].expand_as(weighted), weighted)
    means = (sums / total[..., None]).to(tokens.dtype)
    return replace(stream, tokens=means, sizes=total, places=stream.moved(ends))
