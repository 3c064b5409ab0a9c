"""Scores of hidden features and heads: the error that is left without them, by the optimal brain surgeon.

Beyond the paper. The layer behind the features loses them one at a time, and those that are left take over, as in the
refit (``reduce.width.refit``). Labels are not needed.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from hetdpt.core.fold import exact
from hetdpt.core.surgeon import order_removals
from hetdpt.reduce.width.refit import InputMoments, Inputs
from hetdpt.reduce.width.scores import Heads, Hidden, Narrowable


def score_by_error(model: nn.Module, parts: Narrowable, inputs: Inputs) -> Narrowable:
    """Return ``parts`` with the scores of hidden features and heads replaced where ``inputs`` has those of the layer.

    The score is the relative error of the layer's output, E w || y - y' ||^2 / E w || y ||^2, once the feature and all
    with lower scores are removed and the others refitted. So the layers of a model that is cut at one score have one
    relative error. Channels of the stream and the dimensions within a head keep the relation of their scores.
    """

    def hidden(part: Hidden) -> Hidden:
        features = torch.arange(len(part.scores))[:, None]
        return part._replace(scores=_errors(model, part.ffn.second, inputs, features))

    def heads(part: Heads) -> Heads:
        channels = torch.arange(part.scores.numel()).view_as(part.scores)  # (heads, head_dim)
        errors = _errors(model, part.attention.out, inputs, channels)
        means = part.scores.mean(1, keepdim=True).clamp(min=torch.finfo(part.scores.dtype).tiny)
        return part._replace(scores=errors[:, None] * part.scores / means)

    return replace(
        parts,
        hidden=tuple(hidden(part) if part.ffn.second in inputs else part for part in parts.hidden),
        heads=tuple(heads(part) if part.attention.out in inputs else part for part in parts.heads),
    )


def _errors(model: nn.Module, path: str, inputs: Inputs, groups: Tensor) -> Tensor:
    layer = model.get_submodule(path)
    assert isinstance(layer, nn.Linear)
    return errors_without(layer, inputs[path], groups)


@torch.no_grad()
def errors_without(layer: nn.Linear, given: InputMoments, groups: Tensor) -> Tensor:
    """Return for each of the ``groups`` (groups, size) of inputs the relative error of ``layer`` when it is removed.

    All groups that are missed less are removed before it, and the remaining inputs are refitted.
    """
    moments, weight = given.moments(has_bias=layer.bias is not None), exact(layer.weight)
    mean = weight @ moments.mean_x + (0 if layer.bias is None else exact(layer.bias))
    energy = ((weight @ moments.xx) * weight).sum() + moments.weight * mean.square().sum()
    found = order_removals(weight, moments.xx, groups)
    errors = found.errors / max(energy.item(), torch.finfo(torch.float64).tiny)
    return torch.empty_like(errors).index_copy(0, found.order, errors)
