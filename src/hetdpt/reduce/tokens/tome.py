"""ToMe: similar tokens are merged (Bolya et al., Token Merging: Your ViT But Faster, 2023). No model is known here."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from hetdpt.core.tokens import Tokens
from hetdpt.reduce.tokens.stream import AttentionRecord, TokenStream, merge


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
    metric = F.normalize(keys.mean(1).float(), dim=-1)  # (B, n, d)
    similar, partner = (metric[:, ::2] @ metric[:, 1::2].mT).max(-1)  # (B, half of n)
    removed = similar.topk(count, dim=-1).indices
    return 2 * removed, 2 * partner.gather(1, removed) + 1
