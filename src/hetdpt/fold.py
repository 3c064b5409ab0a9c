"""Algebra of linear layers: several of them as one. Knows layers, not models."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hetdpt.errors import FoldError

Layer = nn.Linear | nn.Conv2d


def is_cheaper_folded(first: Layer, second: Layer) -> bool:
    """Whether one matrix costs less than the two: in * out < (in + out) * hidden (SPEC section 8)."""
    hidden, inputs = first.weight.shape[:2]
    outputs = second.weight.shape[0]
    return inputs * outputs < (inputs + outputs) * hidden


@torch.no_grad()
def fold_pair(first: Layer, second: Layer, scale: Tensor | None = None) -> Layer:
    """Return the one layer equal to ``scale * second(first(z))`` (paper, Eq. 7); 1 x 1 convolutions count as linear.

    W = W2 W1 and b = W2 b1 + b2, with LayerScale folded in if given; computed in float64 and rounded once, to the
    dtype of ``second``.

    >>> one, two = nn.Linear(4, 16), nn.Linear(16, 4)
    >>> z = torch.randn(3, 4)
    >>> torch.allclose(fold_pair(one, two)(z), two(one(z)), atol=1e-6)
    True
    """
    if first.weight.shape[0] != second.weight.shape[1]:
        raise FoldError(
            f"the first layer gives {first.weight.shape[0]} features but the second takes "
            f"{second.weight.shape[1]}; only adjacent layers can be folded"
        )
    weight1, bias1 = _matrix(first)
    weight2, bias2 = _matrix(second)
    weight, bias = weight2 @ weight1, weight2 @ bias1 + bias2
    if scale is not None:
        weight, bias = weight * _exact(scale).flatten()[:, None], bias * _exact(scale).flatten()
    has_bias = first.bias is not None or second.bias is not None
    return _like(second, weight, bias if has_bias else None)


@torch.no_grad()
def fold_norm(norm: nn.LayerNorm, layer: Layer) -> Layer:
    """Return the layer that takes ``norm`` without its affine part: W diag(g) and W s + b for gain g and shift s."""
    weight, bias = _matrix(layer)
    shift = torch.zeros_like(_exact(norm.weight)) if norm.bias is None else _exact(norm.bias)
    has_bias = layer.bias is not None or norm.bias is not None
    return _like(layer, weight * _exact(norm.weight), bias + weight @ shift if has_bias else None)


def _exact(tensor: Tensor) -> Tensor:
    """Return ``tensor`` in float64, on a device that has it (MPS does not)."""
    return (tensor.cpu() if tensor.device.type == "mps" else tensor).detach().double()


def _matrix(layer: Layer) -> tuple[Tensor, Tensor]:
    weight = _exact(layer.weight).flatten(1)  # (out, in), also of a 1 x 1 convolution
    return weight, weight.new_zeros(len(weight)) if layer.bias is None else _exact(layer.bias)


def _like(layer: Layer, weight: Tensor, bias: Tensor | None) -> Layer:
    outputs, inputs = weight.shape
    if isinstance(layer, nn.Conv2d):
        made: Layer = nn.Conv2d(inputs, outputs, 1, bias=bias is not None, device="meta")
        weight = weight[:, :, None, None]
    else:
        made = nn.Linear(inputs, outputs, bias=bias is not None, device="meta")
    made.weight = nn.Parameter(weight.to(layer.weight), requires_grad=layer.weight.requires_grad)
    if bias is not None:
        made.bias = nn.Parameter(bias.to(layer.weight), requires_grad=layer.weight.requires_grad)
    return made.train(layer.training)
