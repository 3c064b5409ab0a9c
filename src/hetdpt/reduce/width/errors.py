"""Scores of what can be removed: the error that is left without it, by the optimal brain surgeon.

Beyond the paper. The layer behind hidden features or heads loses them one at a time, and those that are left take over,
as in the refit (``reduce.width.refit``). Labels are not needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hetdpt.core.fold import exact
from hetdpt.core.surgeon import order_removals
from hetdpt.reduce.width.refit import InputMoments, Inputs
from hetdpt.reduce.width.scores import Channels, Heads, Hidden, Narrowable

TINY = torch.finfo(torch.float64).tiny


class StreamReads:
    """What the channels of the residual stream contribute to the linear layers that read them."""

    def __init__(self, channels: Channels | None) -> None:
        self.width = len(channels.scores) if channels else 0
        inputs = [name for name, axis in channels.places if axis == 1] if channels else []
        self.paths = [name.removesuffix(".weight") for name in inputs if name.endswith(".weight")]
        self.sums: dict[str, Tensor] = {}
        """For each layer and channel j the sum over tokens of || W_j x_j ||^2 and, last, the sum of || W x ||^2."""

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Add what the layers read meanwhile."""
        there = {path: module for path, module in model.named_modules() if isinstance(module, nn.Linear)}
        with ExitStack() as stack:
            for path in self.paths:
                if path in there:
                    stack.enter_context(there[path].register_forward_hook(partial(self._add, path)))
            yield

    def _add(self, path: str, layer: nn.Linear, args: Any, output: Tensor) -> None:
        x, weight = exact(args[0]).flatten(0, -2), exact(layer.weight)
        each = (x.square().sum(0) * weight.square().sum(0)).view(-1, self.width).sum(0)  # tokens may be concatenated
        found = torch.cat([each, (x @ weight.T).square().sum()[None]]).cpu()
        self.sums[path] = self.sums[path] + found if path in self.sums else found

    @property
    def scores(self) -> Tensor:
        """(D,): the part of each channel in what is read, the sum over all layers."""
        return torch.stack([found[:-1] / found[-1].clamp(min=TINY) for found in self.sums.values()]).sum(0)


def score_by_error(model: nn.Module, parts: Narrowable, inputs: Inputs, reads: StreamReads) -> Narrowable:
    """Return ``parts`` with scores from the images where ``inputs`` or ``reads`` has those of the layers.

    The score of a hidden feature or head is the relative error of the layer behind it, E w || y - y' ||^2 /
    E w || y ||^2, once all with scores up to that are removed and the others refitted. So the layers of a model that is
    cut at one score have one relative error. Dimensions of a head are ranked by the error without their value, channels
    of the stream by their part in what layers read; nothing can take over for those.
    """

    def hidden(part: Hidden) -> Hidden:
        features = torch.arange(len(part.scores))[:, None]
        return part._replace(scores=_errors(model, part.ffn.second, inputs, features))

    def heads(part: Heads) -> Heads:
        channels = torch.arange(part.scores.numel()).view_as(part.scores)  # (heads, head_dim)
        heads = _errors(model, part.attention.out, inputs, channels)  # (heads,)
        dims = _errors(model, part.attention.out, inputs, channels.view(-1, 1)).view_as(part.scores)
        return part._replace(scores=heads[:, None] * dims / dims.mean(1, keepdim=True).clamp(min=TINY))

    stream = replace(parts.stream, scores=reads.scores) if parts.stream and reads.sums else parts.stream
    return replace(
        parts,
        stream=stream,
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
    errors = found.errors / max(energy.item(), TINY)
    return torch.empty_like(errors).index_copy(0, found.order, errors)
