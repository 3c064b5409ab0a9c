"""How far apart two models are on the same images."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf, isfinite

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hetdpt.adapters.models import num_classes_of
from hetdpt.core.errors import ModelError
from hetdpt.core.modules import checked, evaluating, random_images, tensors_in
from hetdpt.surgery.prefix_cache import Probe


def outputs_of(model: nn.Module, images: Tensor) -> list[Tensor]:
    """Return all tensors that ``model`` computes from ``images``, whatever structure it returns them in."""
    return tensors_in(model(images))


@torch.no_grad()
def relative_difference(one: nn.Module, other: nn.Module, input_size: tuple[int, int, int], batch: int = 4) -> float:
    """Return the largest difference of outputs over the largest output, in eval mode on random images.

    NaN if an output is; infinity if the outputs have different shapes.
    """
    images = random_images(one, input_size, batch)
    with evaluating(one, other):
        pairs = list(zip(outputs_of(one, images), outputs_of(other, images), strict=True))
    differences = [(a - b).abs().max() / a.abs().max().clamp(min=1e-30) for a, b in pairs if a.shape == b.shape]
    if len(differences) < len(pairs):
        return float("inf")
    return torch.stack(differences).max().item()


class Damage:
    """How far the outputs of a changed model are from those of the dense one, over a stream of images; no labels.

    For a classifier, KL(dense || changed) of the class probabilities in nats, the mean over images. For a model
    without classes, the error of its features, E || f - g ||^2 / E || f ||^2.

    >>> damage = Damage(is_classifier=True)
    >>> damage.add(torch.tensor([[2.0, 0.0]]), torch.tensor([[2.0, 0.0]]))
    >>> damage.value
    0.0
    """

    def __init__(self, is_classifier: bool) -> None:
        self.is_classifier = is_classifier
        self.lost = self.whole = 0.0

    @classmethod
    def to(cls, model: nn.Module) -> Damage:
        """Return a damage of 0 so far, for the dense ``model``."""
        try:
            return cls(num_classes_of(model) > 1)
        except ModelError:
            return cls(False)

    def add(self, dense: Tensor, changed: Tensor) -> None:
        """Add the outputs (B, C) of both models for the same images."""
        dense, changed = dense.detach().cpu().double(), changed.detach().cpu().double()
        if self.is_classifier:
            both = changed.log_softmax(1), dense.log_softmax(1)
            self.lost += F.kl_div(*both, reduction="sum", log_target=True).item()
            self.whole += len(dense)
        else:
            self.lost += (dense - changed).square().sum().item()
            self.whole += dense.square().sum().item()

    @property
    def value(self) -> float:
        """The damage so far; infinity if an output is not finite."""
        return max(self.lost / self.whole, 0.0) if isfinite(self.lost) and self.whole else inf


@torch.no_grad()
def measure_damage(dense: nn.Module, changed: nn.Module, batches: Iterable[Tensor]) -> float:
    """Return the damage of ``changed`` to ``dense`` on the images of ``batches``, both in eval mode."""
    damage, probe = Damage.to(dense), Probe()
    with evaluating(dense, changed):
        for images in checked(batches, dense, "damage"):
            damage.add(probe(dense, images), probe(changed, images))
    return damage.value
