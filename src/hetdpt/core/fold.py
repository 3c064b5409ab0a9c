"""Algebra of linear layers: several folded into one, and the one that fits a stream of values best. Knows no model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hetdpt.core.errors import FoldError

Layer = nn.Linear | nn.Conv2d


def is_cheaper_folded(first: Layer, second: Layer) -> bool:
    """Whether one matrix costs less than the two: in * out < (in + out) * hidden."""
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
        weight, bias = weight * exact(scale).flatten()[:, None], bias * exact(scale).flatten()
    has_bias = first.bias is not None or second.bias is not None
    return _like(second, weight, bias if has_bias else None)


@torch.no_grad()
def fold_norm(norm: nn.LayerNorm, layer: Layer) -> Layer:
    """Return the layer that takes ``norm`` without its affine part: W diag(g) and W s + b for gain g and shift s."""
    weight, bias = _matrix(layer)
    shift = torch.zeros_like(exact(norm.weight)) if norm.bias is None else exact(norm.bias)
    has_bias = layer.bias is not None or norm.bias is not None
    return _like(layer, weight * exact(norm.weight), bias + weight @ shift if has_bias else None)


@torch.no_grad()
def add(one: Tensor, other: Tensor) -> Tensor:
    """Return the sum in float64, rounded once to the dtype of ``one``."""
    return (exact(one) + exact(other)).to(one)


@torch.no_grad()
def new_layer(weight: Tensor, bias: Tensor, like: Tensor, is_conv: bool = False) -> Layer:
    """Return the layer W x + b, a 1 x 1 convolution if ``is_conv``, on the device and in the dtype of ``like``."""
    pattern = nn.Conv2d(1, 1, 1, device="meta") if is_conv else nn.Linear(1, 1, device="meta")
    pattern.weight = nn.Parameter(like.detach(), requires_grad=like.requires_grad)
    return _like(pattern, weight, bias)


class Moments:
    """Weighted means and centred second moments of pairs (x, y) over a stream, in float64.

    Batches are merged as Chan, Golub and LeVeque (1983) do, so nothing is lost to the size of the means. Memory is
    O(D^2), whatever the number of samples.
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        self.weight = 0.0
        self.mean = torch.zeros(inputs + outputs, dtype=torch.float64)
        self.xx = torch.zeros(inputs, inputs, dtype=torch.float64)
        self.xy = torch.zeros(inputs, outputs, dtype=torch.float64)
        self.yy = torch.zeros((), dtype=torch.float64)
        """Sum over samples and channels."""

    @property
    def mean_x(self) -> Tensor:
        return self.mean[: len(self.xx)]

    @property
    def mean_y(self) -> Tensor:
        return self.mean[len(self.xx) :]

    def add(self, x: Tensor, y: Tensor, weight: Tensor) -> None:
        """Add samples ``x`` (n, inputs) and ``y`` (n, outputs) with ``weight`` (n,)."""
        x, y, weight = exact(x), exact(y), exact(weight)
        total = weight.sum().item()
        if total <= 0:
            return
        means = weight @ x / total, weight @ y / total
        x, y = x - means[0], y - means[1]
        weighted = x * weight[:, None]
        self._merge(total, torch.cat(means), weighted.T @ x, weighted.T @ y, (y.square().sum(1) @ weight))

    def _merge(self, weight: float, mean: Tensor, xx: Tensor, xy: Tensor, yy: Tensor) -> None:
        if not self.weight:
            self.mean, self.xx, self.xy, self.yy = (torch.zeros_like(given) for given in (mean, xx, xy, yy))
        total = self.weight + weight
        shift = mean - self.mean
        x, y = shift[: len(xx)], shift[len(xx) :]
        between = self.weight * weight / total
        self.xx = self.xx + xx + between * torch.outer(x, x)
        self.xy = self.xy + xy + between * torch.outer(x, y)
        self.yy = self.yy + yy + between * y.dot(y)
        self.mean = self.mean + shift * (weight / total)
        self.weight = total

    @classmethod
    def sum(cls, parts: Sequence[Moments]) -> Moments:
        """Return the moments of all samples of ``parts`` together."""
        whole = cls(*parts[0].xy.shape)
        for part in parts:
            if part.weight:
                whole._merge(part.weight, part.mean, part.xx, part.xy, part.yy)
        return whole

    def take(self, x: Tensor, y: Tensor, weight: Tensor) -> None:
        """Add all tokens of ``x`` (n, P, inputs) and ``y`` (n, P, outputs) with ``weight`` (n, P)."""
        self.add(x.flatten(0, 1), y.flatten(0, 1), weight.flatten())

    @staticmethod
    def nbytes(width: int) -> int:
        """Return roughly how much memory the sums of a layer of that width take."""
        return 8 * 2 * width**2

    def error(self, matrix: Tensor, bias: Tensor) -> float:
        """Return the weighted sum of || y - (W x + b) ||^2 over all samples, for ``matrix`` = W^T (inputs, outputs)."""
        off = self.mean_y - self.mean_x @ matrix - bias
        spread = self.yy - 2 * (matrix * self.xy).sum() + ((self.xx @ matrix) * matrix).sum()
        return max(spread.item(), 0.0) + self.weight * off.dot(off).item()

    @property
    def energy(self) -> float:
        """Weighted sum of || y ||^2."""
        return self.yy.item() + self.weight * self.mean_y.dot(self.mean_y).item()


@dataclass(frozen=True)
class LinearFit:
    """The map W x + b closest to a stream of pairs."""

    weight: Tensor
    """(outputs, inputs), float64."""
    bias: Tensor
    ridge: float
    """Added to the second moments of x, relative to their mean over directions."""
    r2: float
    """1 - E || y - (W x + b) ||^2 / E || y ||^2, measured on parts of the stream that W was not fitted on."""

    @property
    def values(self) -> tuple[Tensor, ...]:
        return self.weight, self.bias


class Means:
    """Weighted sums of values y at P positions over a stream, in float64; memory is O(P D)."""

    def __init__(self, inputs: int = 0, outputs: int = 0) -> None:
        self.weight = self.sum = self.squares = torch.zeros((), dtype=torch.float64)

    def take(self, x: Tensor, y: Tensor, weight: Tensor) -> None:
        """Add ``y`` (n, P, D) with ``weight`` (n, P), each position for itself; ``x`` is not needed."""
        self.add(y, weight)

    @staticmethod
    def nbytes(width: int) -> int:
        """Return 0: next to moments, the memory of means does not count."""
        return 0

    def add(self, y: Tensor, weight: Tensor) -> None:
        """Add ``y`` (n, P, D) with ``weight`` (n, P)."""
        y, weight = exact(y), exact(weight)
        self.weight = self.weight + weight.sum(0)  # (P,)
        self.sum = self.sum + torch.einsum("np,npd->pd", weight, y)
        self.squares = self.squares + (weight * y.square().sum(2)).sum()

    @classmethod
    def total(cls, parts: Sequence[Means]) -> Means:
        """Return the sums over all samples of ``parts`` together."""
        whole = cls()
        for part in parts:
            whole.weight, whole.sum = whole.weight + part.weight, whole.sum + part.sum
            whole.squares = whole.squares + part.squares
        return whole

    @property
    def mean(self) -> Tensor:
        """(P, D)."""
        return self.sum / self.weight.clamp(min=torch.finfo(self.sum.dtype).tiny)[:, None]

    def error(self, value: Tensor) -> float:
        """Return the weighted sum of || y - value ||^2 for ``value`` (P, D)."""
        spread = self.squares - 2 * (self.sum * value).sum() + (self.weight * value.square().sum(1)).sum()
        return max(spread.item(), 0.0)


class TokenMeans(Means):
    """Weighted sums of values y over a stream, all positions together."""

    def take(self, x: Tensor, y: Tensor, weight: Tensor) -> None:
        self.add(y.flatten(0, 1)[:, None], weight.flatten()[:, None])


@dataclass(frozen=True)
class MeanFit:
    """The constant closest to a stream of values."""

    value: Tensor
    """(P, D), float64."""
    r2: float
    """1 - E || y - value ||^2 / E || y ||^2, measured on parts of the stream that the value was not fitted on."""
    ridge: None = None

    @property
    def values(self) -> tuple[Tensor, ...]:
        return (self.value,)


def fit_mean(folds: Sequence[Means]) -> MeanFit:
    """Return the weighted mean; each of the ``folds`` is held out once to measure how good it is."""
    full = [fold for fold in folds if fold.weight.any()] or [*folds[:1]]
    error = sum(fold.error(Means.total([f for f in full if f is not fold] or [fold]).mean) for fold in full)
    whole = Means.total(full)
    energy = whole.squares.item()
    return MeanFit(whole.mean, 1 - error / energy if energy else 1.0)


RIDGES = tuple(10.0**power for power in range(-12, 3))


def fit_linear(folds: Sequence[Moments]) -> LinearFit:
    """Return the ridge regression of y on x; the ridge is the one with the least error on held-out samples.

    Each of the ``folds`` is held out once. Only their moments are needed, so one pass over the samples serves every
    ridge. With a single fold the error is that on the samples themselves.
    """
    full = [fold for fold in folds if fold.weight]
    errors = [0.0] * len(RIDGES)
    for fold in full:
        rest = Moments.sum([other for other in full if other is not fold] or [fold])
        for number, (matrix, bias) in enumerate(_solutions(rest, RIDGES)):
            errors[number] += fold.error(matrix, bias)
    whole = Moments.sum(full)
    best = errors.index(min(errors))
    [(matrix, bias)] = _solutions(whole, RIDGES[best : best + 1])
    r2 = 1 - errors[best] / whole.energy if whole.energy else 1.0
    return LinearFit(matrix.T, bias, RIDGES[best], r2)


def _solutions(moments: Moments, ridges: Sequence[float]) -> list[tuple[Tensor, Tensor]]:
    """Return (W^T, b) for each of ``ridges``."""
    values, vectors = torch.linalg.eigh(moments.xx)
    values = values.clamp(min=0)
    projected = vectors.T @ moments.xy
    mean = values.mean().clamp(min=torch.finfo(values.dtype).tiny)
    matrices = [vectors @ (projected / (values + ridge * mean)[:, None]) for ridge in ridges]
    return [(matrix, moments.mean_y - moments.mean_x @ matrix) for matrix in matrices]


def exact(tensor: Tensor) -> Tensor:
    """Return ``tensor`` in float64, on a device that has it (MPS does not)."""
    return (tensor.cpu() if tensor.device.type == "mps" else tensor).detach().double()


def _matrix(layer: Layer) -> tuple[Tensor, Tensor]:
    weight = exact(layer.weight).flatten(1)  # (out, in), also of a 1 x 1 convolution
    return weight, weight.new_zeros(len(weight)) if layer.bias is None else exact(layer.bias)


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
