"""The tokens of a batch between two blocks, and the methods that reduce them: ToMe and GTP. No model is known here.

ToMe merges similar tokens (Bolya et al., Token Merging: Your ViT But Faster, 2023). GTP adds the least important tokens
to their neighbours (Xu et al., GTP-ViT, 2024).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import reduce

import torch
from torch import Tensor
from torch.nn import functional as F

from hetdpt.core.errors import ModelError
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
    """Return the rows (B, m, D) of ``table`` (B, n, D) with these ``numbers`` (B, m).

    Whole rows are copied, which on a CPU takes a third of the time that ``gather`` takes for their elements.
    """
    chosen = table.flatten(0, 1).index_select(0, (numbers + _first_rows(table)).flatten())
    return chosen.view(*numbers.shape, table.shape[2])


def _first_rows(table: Tensor) -> Tensor:
    """Return the number (B, 1) of the first row of each of the tables (B, n, D) in one table of B * n rows."""
    batch, n = table.shape[:2]
    return torch.arange(0, batch * n, n, device=table.device)[:, None]


def destinations(removed: Tensor, into: Tensor, n: int) -> Tensor:
    """Return the new index of each of n tokens (B, n) after ``removed`` (B, r) are merged ``into`` others (B, r)."""
    stays = removed.new_ones(removed.shape[0], n).scatter(1, removed, torch.zeros_like(removed))
    numbers = stays.cumsum(1) - 1
    return numbers.scatter(1, removed, numbers.gather(1, into))


def merge(stream: TokenStream, removed: Tensor, into: Tensor) -> TokenStream:
    """Return the tokens after ``removed`` (B, r) are merged into ``into`` (B, r): means, weighted by size.

    x' = sum s x / sum s and s' = sum s over the tokens that are merged, so that sum s x does not change. It is computed
    as x' = x + sum s_i / s' (x_i - x) over the removed tokens i, and all others are only copied. Small models spend as
    much time on the number of operations as on their size, so the tokens of all images are one table here.
    """
    (batch, n), r, first = stream.tokens.shape[:2], removed.shape[1], _first_rows(stream.tokens)
    tokens, sizes = stream.tokens.flatten(0, 1), stream.weights.flatten()
    source, target = (removed + first).flatten(), (into + first).flatten()
    numbers = torch.arange(batch * n, device=removed.device)
    kept = numbers.index_fill(0, source, batch * n).sort().values[: batch * (n - r)]
    end = numbers.scatter(0, kept, numbers[: batch * (n - r)]).index_select(0, target)  # its number among the kept
    added = sizes.index_select(0, source)
    total = sizes.index_select(0, kept).index_add_(0, end, added)
    part = (added / total.index_select(0, end))[:, None]
    moved = part * (tokens.index_select(0, source).to(part.dtype) - tokens.index_select(0, target))
    means = tokens.index_select(0, kept).index_add_(0, end, moved.to(tokens.dtype))
    places = None if stream.places is None else stream.moved(destinations(removed, into, n))
    return replace(stream, tokens=means.view(batch, n - r, -1), sizes=total.view(batch, n - r), places=places)


# ToMe


def merge_alike(stream: TokenStream, seen: AttentionRecord, count: int, tokens: Tokens) -> TokenStream:
    """Return the stream with ``count`` tokens fewer: the most similar pairs are merged to size-weighted means.

    Similarity is the cosine of keys, each the mean over heads. Tokens, without the protected ones, belong alternately
    to sets A and B; each of A has one edge, to the most similar of B, and the ``count`` strongest edges merge (section
    3). Our own choice: tokens stay in order, so that neighbours in the image tend to be in different sets in every
    block.
    """
    sources, into = match(seen.keys[:, :, stream.protected :], count)
    return merge(stream, stream.protected + sources, stream.protected + into)


@torch.no_grad()
def match(keys: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return which tokens are merged into which ones, (B, count) each, by their ``keys`` (B, heads, n, d)."""
    metric = F.normalize(reduce(torch.add, keys.float().unbind(1)), dim=-1)  # (B, n, d)
    similar, partner = torch.bmm(metric[:, ::2], metric[:, 1::2].mT).max(-1)  # (B, half of n)
    removed = similar.topk(count, dim=-1).indices
    return 2 * removed, 2 * partner.gather(1, removed) + 1


# GTP


def propagate(stream: TokenStream, seen: AttentionRecord, count: int, tokens: Tokens) -> TokenStream:
    """Return the stream with ``count`` tokens removed, which are propagated to the kept ones they are linked to.

    X' = X_k + alpha A_kp X_p with k the tokens that are kept, p those that are removed and A the graph of ``links``,
    built once, from the tokens that the first of these blocks gets; the paper's code does it so. Sizes follow the same
    formula, and their logarithm is added to attention as in ToMe; they do not sum to the number of patches. Our own
    choice: the position of a removed token is taken by the kept token with the strongest edge to it or, if no edge is
    left, the one with the most similar key.
    """
    assert seen.map is not None
    kept, removed = rank(seen.map, stream.protected, count)
    graph = stream.graph
    if graph is None:
        graph = links(seen.given[:, stream.protected :], stream.grid, tokens.neighbours)
    of_kept = rows(graph, kept)  # (B, k, n)
    edges = _columns(of_kept, removed)  # (B, k, p)
    safe, patches = stream.tokens.split([stream.protected, graph.shape[1]], 1)
    taken = edges.to(patches.dtype) @ rows(patches, removed)
    safe_sizes, sizes = stream.weights.split([stream.protected, graph.shape[1]], 1)
    taken_sizes = (edges.to(sizes.dtype) @ sizes.gather(1, removed)[..., None]).squeeze(-1)
    return replace(
        stream,
        tokens=torch.cat([safe, rows(patches, kept) + tokens.alpha * taken], 1),
        sizes=torch.cat([safe_sizes, sizes.gather(1, kept) + tokens.alpha * taken_sizes], 1),
        places=stream.moved(_ends(stream, seen, kept, removed, edges)) if stream.places is not None else None,
        graph=_columns(of_kept, kept),
    )


@torch.no_grad()
def rank(attention: Tensor, protected: int, count: int) -> tuple[Tensor, Tensor]:
    """Return which tokens are kept, in order, and which ``count`` removed, by the map ``attention`` (B, heads, n, n).

    The score of a token is gamma psi: gamma = a_ii, how hard it is to reconstruct from others; psi = sum over j of
    a_ji, how much others attend to it; each is the maximum over heads, as in the paper's code. The map is the full one:
    in the sparse one most tokens of some heads would have the score 0. Indices are counted without the ``protected``
    tokens, which are not ranked, but attend to others too.
    """
    gamma = attention.diagonal(dim1=-2, dim2=-1).amax(1)  # (B, n)
    psi = attention.sum(-2).amax(1)
    worth = (gamma * psi)[:, protected:]
    n = worth.shape[1]
    kept, removed = worth.topk(n).indices.split([n - count, count], 1)
    return kept.sort(dim=-1).values, removed


@torch.no_grad()
def links(patches: Tensor, grid: tuple[int, int], neighbours: int) -> Tensor:
    """Return the graph D^-1/2 A D^-1/2 (B, n, n) of ``patches`` (B, n, D), A the union of two graphs, D its row sums.

    A patch is linked to the 8 around it in the image, and to the ``neighbours`` with the largest cosine.
    """
    if patches.shape[1] != grid[0] * grid[1]:
        raise ModelError(
            f"gtp expected the tokens of {grid[0]} x {grid[1]} patches, but got {patches.shape[1]}; "
            "give images of the size the model was prepared for, or use tome"
        )
    alike = F.normalize(patches.float(), dim=-1)
    cosines = alike @ alike.mT - 3 * torch.eye(patches.shape[1], device=patches.device)  # never itself
    chosen = cosines.topk(min(neighbours, patches.shape[1] - 1), dim=-1).indices
    similar = torch.zeros_like(cosines).scatter(-1, chosen, torch.ones_like(chosen, dtype=cosines.dtype))
    graph = torch.maximum(similar, beside(grid).to(cosines))
    scale = graph.sum(-1).clamp(min=1).rsqrt()
    return scale[..., None] * graph * scale[:, None]


def beside(grid: tuple[int, int]) -> Tensor:
    """Return 1 for all pairs of patches (n, n) of a grid that touch, also at a corner, and 0 for others.

    >>> beside((1, 3)).int().tolist()
    [[0, 1, 0], [1, 0, 1], [0, 1, 0]]
    """
    places = torch.cartesian_prod(torch.arange(grid[0]), torch.arange(grid[1]))
    distance = (places[:, None] - places).abs().amax(-1)
    return (distance == 1).float()


def _columns(table: Tensor, numbers: Tensor) -> Tensor:
    """Return the columns (B, m, k) of ``table`` (B, m, n) with these ``numbers`` (B, k)."""
    return table.gather(2, numbers[:, None].expand(-1, table.shape[1], -1))


def _ends(stream: TokenStream, seen: AttentionRecord, kept: Tensor, removed: Tensor, edges: Tensor) -> Tensor:
    """Return the new index of each token (B, n)."""
    keys = F.normalize(seen.keys.mean(1)[:, stream.protected :].detach().float(), dim=-1)
    similar = rows(keys, kept) @ rows(keys, removed).mT  # (B, k, p)
    has_edge = (edges > 0).any(1, keepdim=True)
    nearest = torch.where(has_edge, edges, similar).argmax(1)  # (B, p), a number among the kept
    sources, into = stream.protected + removed, stream.protected + kept.gather(1, nearest)
    return destinations(sources, into, stream.tokens.shape[1])
