"""GTP: the least important tokens are added to their neighbours (Xu et al., GTP-ViT, 2024). No model is known here."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from hetdpt.core.errors import ModelError
from hetdpt.core.tokens import Tokens
from hetdpt.reduce.tokens.stream import AttentionRecord, TokenStream, destinations, rows


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
    return rows(table.mT, numbers).mT


def _ends(stream: TokenStream, seen: AttentionRecord, kept: Tensor, removed: Tensor, edges: Tensor) -> Tensor:
    """Return the new index of each token (B, n)."""
    keys = F.normalize(seen.keys.mean(1)[:, stream.protected :].detach().float(), dim=-1)
    similar = rows(keys, kept) @ rows(keys, removed).mT  # (B, k, p)
    has_edge = (edges > 0).any(1, keepdim=True)
    nearest = torch.where(has_edge, edges, similar).argmax(1)  # (B, p), a number among the kept
    sources, into = stream.protected + removed, stream.protected + kept.gather(1, nearest)
    return destinations(sources, into, stream.tokens.shape[1])
