"""The layer after removed features is refitted to predict their contribution from those kept (beyond the paper).

For a layer y = W x + b that keeps the inputs k and loses r, the map of x_k closest to W_r x_r over some images is added
to W_k, b. It is found in closed form from the moments of x in the model before the cut; labels are not needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hetdpt.core.errors import ModelError
from hetdpt.core.fold import Moments, exact, fit_linear
from hetdpt.core.modules import checked, evaluating
from hetdpt.surgery.calibrate import FLOOR, EnoughError

FOLDS = 2  # parts of the images, each held out once to choose the ridge


class InputMoments:
    """Moments of the inputs of a linear layer, for each part of the images.

    As in calibration, a token has the weight 1 / || y ||, so that the few with massive activations do not dominate.
    """

    def __init__(self, inputs: int) -> None:
        self.folds = [Moments(inputs, 0) for _ in range(FOLDS)]
        self.floor = 0.0
        """A token with || y || below it is weighted as if it were there."""

    def add(self, x: Tensor, y: Tensor) -> None:
        """Add inputs (images, ..., inputs) and outputs of the layer."""
        size = torch.linalg.vector_norm(y, dim=-1)
        self.floor = self.floor or max(FLOOR * size[0].median().item(), torch.finfo(torch.float32).tiny)
        weight = size.clamp(min=self.floor).reciprocal()
        for number, fold in enumerate(self.folds):
            rows = x[number::FOLDS].flatten(0, -2)  # (n, inputs)
            fold.add(rows, rows[:, :0], weight[number::FOLDS].flatten())

    def moments(self, has_bias: bool) -> Moments:
        """Return the moments over all images: centred if the layer has a bias, else about 0."""
        return centred(Moments.sum(self.folds), has_bias)


def centred(inputs: Moments, has_bias: bool) -> Moments:
    """Return ``inputs`` or, without a bias, their moments about 0, so that a fit has no bias either."""
    if has_bias:
        return inputs
    found = Moments(len(inputs.xx), 0)
    found.weight, found.mean = inputs.weight, torch.zeros_like(inputs.mean)
    found.xx = inputs.xx + inputs.weight * torch.outer(inputs.mean_x, inputs.mean_x)
    return found


Inputs = dict[str, InputMoments]
"""By the paths of the layers."""


@contextmanager
def watching(model: nn.Module, paths: Iterable[str], inputs: Inputs) -> Iterator[None]:
    """Add what the linear layers at ``paths`` get as input meanwhile to ``inputs``."""
    with ExitStack() as stack:
        for path in paths:
            stack.enter_context(model.get_submodule(path).register_forward_hook(partial(_add, path, inputs)))
        yield


@torch.no_grad()
def inputs_of(model: nn.Module, paths: Iterable[str], batches: Iterable[Tensor], purpose: str) -> Inputs:
    """Return the moments of what the linear layers at ``paths`` get, from one pass that ends with the last of them."""
    inputs, wanted, left = Inputs(), dict.fromkeys(paths), set[str]()

    def end(path: str, *_: Any) -> None:
        left.discard(path)
        if not left:
            raise EnoughError

    with evaluating(model), watching(model, wanted, inputs), ExitStack() as stack:
        for path in wanted:
            stack.enter_context(model.get_submodule(path).register_forward_hook(partial(end, path)))
        for images in checked(batches, model, purpose):
            left.update(wanted)
            with suppress(EnoughError):
                model(images)
    return inputs


def _add(path: str, inputs: Inputs, _: nn.Module, args: Any, output: Tensor) -> None:
    x, y = args[0].detach(), output.detach()
    if not y.isfinite().all():
        raise ModelError(f"{path} returns values that are not finite; check the weights, or use float32")
    inputs.setdefault(path, InputMoments(x.shape[-1])).add(x, y)


@torch.no_grad()
def refit_(layer: nn.Linear, kept: Tensor, given: InputMoments) -> None:
    """Fit ``layer`` so that the inputs ``kept`` alone reproduce its output from all of them as well as possible.

    On the images seen the weighted squared error of its output is at most that of dropping the other inputs. The layer
    keeps its shape and gets new tensors.
    """
    weight = exact(layer.weight).clone()
    kept = kept.to(weight.device)
    is_lost = torch.ones(layer.in_features, dtype=torch.bool, device=kept.device).index_fill(0, kept, False)
    lost = is_lost.nonzero().flatten()
    if not len(lost):
        return
    folds = [centred(fold, layer.bias is not None) for fold in given.folds if fold.weight]
    fit = fit_linear([_of_lost(fold, weight[:, lost], kept, lost) for fold in folds])
    weight[:, kept] += fit.weight
    layer.weight = nn.Parameter(weight.to(layer.weight), layer.weight.requires_grad)
    if layer.bias is not None:
        bias = (exact(layer.bias) + fit.bias).to(layer.bias)
        layer.bias = nn.Parameter(bias, layer.bias.requires_grad)


def _of_lost(inputs: Moments, weight: Tensor, kept: Tensor, lost: Tensor) -> Moments:
    """Return the moments of x_k and of W_r x_r."""
    found, xx, mean = Moments(len(kept), len(weight)), inputs.xx, inputs.mean_x
    found.weight = inputs.weight
    found.mean = torch.cat([mean[kept], weight @ mean[lost]])
    found.xx = xx[kept][:, kept]
    found.xy = xx[kept][:, lost] @ weight.T
    found.yy = ((weight @ xx[lost][:, lost]) * weight).sum()
    return found
