"""A linear classifier on fixed features: multinomial logistic regression, its penalty chosen on held-out images.

minimise over W, b:  mean of -log softmax(W z + b)[y] + strength / 2 * |W|^2,  z = (x - mean) / deviation

It knows features and labels; no model, no image and no file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from hetdpt.core.errors import MeasureError

STRENGTHS = (1.0, 0.1, 0.01, 1e-3, 1e-4)
"""Strengths of the penalty to try; 1 / (C images) for the C of other libraries."""
STEPS = 1000  # of LBFGS, at most
SCALE = 1e6  # of the loss: LBFGS of torch skips steps s with changes y of the gradient where y s is below 1e-10
LARGE = 1 << 32  # bytes of features above which float32 is used


@dataclass(frozen=True)
class LinearProbe:
    """A linear layer on raw features, with the standardisation folded in."""

    weight: Tensor
    """(classes, D)."""
    bias: Tensor
    """(classes,)."""
    strength: float
    steps: int
    """Evaluations of the loss in the search."""

    def logits(self, values: Tensor) -> Tensor:
        """Return the logits (B, classes) of features (B, D), on the device of the probe."""
        return F.linear(values.to(self.weight), self.weight, self.bias)


@dataclass(frozen=True)
class Trial:
    """The result of one strength on held-out training images."""

    strength: float
    accuracy: float
    """In percent."""
    loss: float


def fit_probe(
    values: Tensor, labels: Tensor, classes: int, strength: float, start: Tensor | None = None
) -> LinearProbe:
    """Return the probe that minimises the loss above for features (B, D) and labels (B,), on their device.

    In float64 if the device has it and memory suffices. Biases are not penalised. A constant feature gets no weight.
    ``start`` (classes, D), for raw features, is where the search starts.

    >>> values = torch.tensor([[0.0], [1.0], [2.0], [3.0]])
    >>> fit_probe(values, torch.tensor([0, 0, 1, 1]), 2, 0.01).logits(values).argmax(1)
    tensor([0, 0, 1, 1])
    """
    if not values.isfinite().all():
        raise MeasureError("features are not finite, so no probe can be fitted; does the model still work?")
    is_small = 8 * values.numel() <= LARGE and values.device.type != "mps"
    inputs = values.to(torch.float64 if is_small else torch.float32)
    mean, deviation = inputs.mean(0), inputs.std(0, correction=0)
    largest = torch.maximum(inputs.amax(0), -inputs.amin(0))
    scale = torch.where(deviation > 1e-6 * largest, 1 / deviation, 0)  # else only the rounding differs
    layer = inputs.new_zeros(classes, inputs.shape[1] + 1)  # the last column is the bias
    if start is not None:
        layer[:, :-1] = start.to(layer) * deviation
    steps = _minimise(layer, (inputs - mean) * scale, labels, strength)
    weight = layer[:, :-1] * scale
    return LinearProbe(weight, layer[:, -1] - weight @ mean, strength, steps)


def _minimise(layer: Tensor, inputs: Tensor, labels: Tensor, strength: float) -> int:
    """Minimise the loss over ``layer`` (classes, D + 1), in place; return how often the loss was evaluated."""
    truth = F.one_hot(labels, len(layer)).to(inputs)  # (B, classes)
    is_double = layer.dtype == torch.float64
    # The loss is then above its minimum by no more than |gradient|^2 / (2 strength).
    search = torch.optim.LBFGS(
        [layer],
        max_iter=STEPS,
        history_size=20,
        tolerance_grad=SCALE * (1e-7 if is_double else 1e-5),
        tolerance_change=SCALE * (1e-14 if is_double else 1e-9),
        line_search_fn="strong_wolfe",
    )
    looks = 0

    def look() -> Tensor:
        nonlocal looks
        looks += 1
        weight = layer[:, :-1]
        log_odds = F.log_softmax(inputs @ weight.T + layer[:, -1], 1)
        wrong = (log_odds.exp() - truth) / len(inputs)
        layer.grad = SCALE * torch.cat([wrong.T @ inputs + strength * weight, wrong.sum(0)[:, None]], 1)
        return SCALE * (strength / 2 * weight.square().sum() - (log_odds * truth).sum() / len(inputs))

    search.step(look)
    return looks


def choose_strength(
    values: Tensor,
    labels: Tensor,
    is_held: Tensor,
    classes: int,
    strengths: Sequence[float] = STRENGTHS,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[Trial, ...]:
    """Return the results of the strengths on held-out images (B,), the best first: accuracy, then loss.

    Each search starts from the result of the one before it, from the strongest on.
    """
    if not is_held.any() or is_held.all():
        raise MeasureError("some images must be held out and some not; give both")
    trials, start = list[Trial](), None
    for number, strength in enumerate(sorted(strengths, reverse=True), 1):
        probe = fit_probe(values[~is_held], labels[~is_held], classes, strength, start)
        logits, truth = probe.logits(values[is_held]), labels[is_held]
        accuracy = 100 * (logits.argmax(1) == truth).double().mean().item()
        trials.append(Trial(strength, accuracy, F.cross_entropy(logits, truth).item()))
        start = probe.weight
        if progress is not None:
            progress(number, len(strengths))
    return tuple(sorted(trials, key=lambda trial: (-trial.accuracy, trial.loss)))
