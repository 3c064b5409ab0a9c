"""The heads of an attention with fewer dimensions, in closed form: products q k^T and values of lower rank.

Only products q k^T and W v matter, so the dimensions of a head may be turned before some are left out. Those that are
kept are the best for the tokens of some images (a singular value decomposition weighted by their second moments).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from hetdpt.adapters.attention import Attention
from hetdpt.core.fold import Moments, exact, fit_linear
from hetdpt.core.surgeon import RIDGE
from hetdpt.reduce.width.refit import Inputs, centred

Part = tuple[str, int]
"""A layer, and its first row that computes queries, keys or values."""


class Turned(NamedTuple):
    """How the dimensions of all heads are turned; for each head those to keep are the first rows, others are 0."""

    queries: Tensor
    """(heads, head_dim, head_dim)"""
    keys: Tensor
    values: Tensor

    @property
    def of_maps(self) -> Tensor:
        """The matrix that turns keys and values of all heads together."""
        joined: Tensor = torch.block_diag(*self.keys, *self.values)
        return joined


@torch.no_grad()
def turn_heads_(model: nn.Module, attention: Attention, count: int, given: Inputs) -> Turned:
    """Turn the dimensions of the heads so that the first ``count`` of each are enough; refit the layer behind them.

    ``given`` has the inputs of the layer of queries and of the one behind. The other dimensions have weights of 0.
    """
    tokens = given[attention.queries[0]].moments(has_bias=True)
    queries, keys = (_second_moments(model, attention, part, tokens) for part in (attention.queries, attention.keys))
    of_queries, of_keys = zip(*(_turn_pair(q, k, count) for q, k in zip(queries, keys, strict=True)), strict=True)
    factor = (count / attention.head_dim) ** 0.5  # attention divides by the square root of the number of dimensions
    behind = model.get_submodule(attention.out)
    assert isinstance(behind, nn.Linear)
    of_values = _turn_values(behind, attention, count, given)
    turned = Turned(factor * torch.stack(of_queries), torch.stack(of_keys), of_values)
    for part, turn in zip((attention.queries, attention.keys, attention.values), turned, strict=True):
        _turn_rows_(model, part, turn)
    return turned


def _rows(model: nn.Module, attention: Attention, part: Part) -> tuple[Tensor, Tensor]:
    """Return the weights (heads, head_dim, D) and biases (heads, head_dim) of queries, keys or values."""
    layer, start = model.get_submodule(part[0]), part[1]
    assert isinstance(layer, nn.Linear)
    rows, shape = slice(start, start + attention.heads * attention.head_dim), (attention.heads, attention.head_dim)
    weight = exact(layer.weight)[rows].view(*shape, -1)
    return weight, weight.new_zeros(shape) if layer.bias is None else exact(layer.bias)[rows].view(shape)


def _second_moments(model: nn.Module, attention: Attention, part: Part, tokens: Moments) -> Tensor:
    """Return E q q^T of each head, (heads, head_dim, head_dim), a little larger so that they have a root."""
    weight, bias = _rows(model, attention, part)
    mean = weight @ tokens.mean_x + bias  # (heads, head_dim)
    found = weight @ tokens.xx @ weight.mT / tokens.weight + mean[:, :, None] * mean[:, None]
    least = RIDGE * found.diagonal(dim1=1, dim2=2).mean(1).clamp(min=torch.finfo(found.dtype).tiny)
    return found + least[:, None, None] * torch.eye(attention.head_dim, dtype=found.dtype, device=found.device)


def _turn_pair(queries: Tensor, keys: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the turns of queries and keys after which ``count`` dimensions have most of E (q k^T)^2.

    With roots E q q^T = A A^T, E k k^T = B B^T and A^T B = U S V^T the turns are S^1/2 U^T A^-1 and S^1/2 V^T B^-1.
    """
    roots = [torch.linalg.cholesky(moments) for moments in (queries, keys)]
    u, sizes, v = torch.linalg.svd(roots[0].T @ roots[1])
    sizes = sizes.sqrt() * (torch.arange(len(sizes), device=sizes.device) < count)
    turns = zip(roots, (u, v.T), strict=True)
    first, second = (torch.linalg.solve_triangular(root.T, side * sizes, upper=True).T for root, side in turns)
    return first, second


def _turn_values(behind: nn.Linear, attention: Attention, count: int, given: Inputs) -> Tensor:
    """Return the turn of the values of each head, and fit the layer behind to the first ``count`` of each.

    For one head with outputs W v the best are U^T W v, U the first principal directions of W v.
    """
    shape = attention.heads, attention.head_dim
    folds = [centred(fold, behind.bias is not None) for fold in given[attention.out].folds if fold.weight]
    weight, whole = exact(behind.weight), Moments.sum(folds)
    turns = weight.new_zeros(attention.heads, attention.head_dim, attention.head_dim)
    for head in range(attention.heads):
        part = slice(head * attention.head_dim, (head + 1) * attention.head_dim)
        outputs = weight[:, part]
        _, directions = torch.linalg.eigh(outputs @ whole.xx[part, part] @ outputs.T)
        turns[head, :count] = directions[:, -count:].T @ outputs
    turn = torch.block_diag(*turns)
    kept = torch.arange(attention.heads * attention.head_dim).view(shape)[:, :count].flatten().to(weight.device)
    fit = fit_linear([_of_turned(fold, turn[kept], weight) for fold in folds])
    new = torch.zeros_like(weight).index_copy(1, kept, fit.weight)
    behind.weight = nn.Parameter(new.to(behind.weight), behind.weight.requires_grad)
    if behind.bias is not None:
        behind.bias = nn.Parameter((exact(behind.bias) + fit.bias).to(behind.bias), behind.bias.requires_grad)
    return turns


def _of_turned(inputs: Moments, turn: Tensor, weight: Tensor) -> Moments:
    """Return the moments of T x and W x."""
    found = Moments(len(turn), len(weight))
    found.weight, found.mean = inputs.weight, torch.cat([turn @ inputs.mean_x, weight @ inputs.mean_x])
    found.xx, found.xy = turn @ inputs.xx @ turn.T, turn @ inputs.xx @ weight.T
    found.yy = ((weight @ inputs.xx) * weight).sum()
    return found


def _turn_rows_(model: nn.Module, part: Part, turn: Tensor) -> None:
    """Give the rows of queries, keys or values new values, in new tensors."""
    layer, start = model.get_submodule(part[0]), part[1]
    assert isinstance(layer, nn.Linear)
    heads, dims, _ = turn.shape
    for name, parameter in [*layer.named_parameters(recurse=False)]:
        new = exact(parameter).clone()
        rows = new[start : start + heads * dims].view(heads, dims, -1)
        new[start : start + heads * dims] = (turn @ rows).reshape(heads * dims, *new.shape[1:])
        setattr(layer, name, nn.Parameter(new.to(parameter), parameter.requires_grad))
