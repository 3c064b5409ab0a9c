"""The fit of a tail: keys and values of patches in its blocks as linear maps of the patches at its first block.

In closed form, on images without labels; all sums are computed in a stream. Nothing is trained or chosen here.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from operator import length_hint
from typing import Any

import torch
from torch import Tensor, nn

from hetdpt.adapters.attention import key_value_matrix
from hetdpt.adapters.maps import MapWatch
from hetdpt.core.errors import DataError, ModelError
from hetdpt.core.fold import LinearFit, Moments, fit_linear
from hetdpt.core.gates import first_tensor
from hetdpt.core.modules import checked
from hetdpt.core.plan import Fit
from hetdpt.core.progress import StepProgress
from hetdpt.surgery.arrange import stop_of, with_all_tokens
from hetdpt.surgery.kept import STEP, TailStep, base_of, unwrapped
from hetdpt.surgery.record import RECORD, layout_of, require_record

FOLDS = 4  # parts of the images, each held out once
PURPOSE = "calibration"
UNREAD = 0.1  # how much a patch that gets no attention counts; one that gets the mean counts 1 more


@torch.no_grad()
def fit_tail_(model: nn.Module, batches: Iterable[Tensor], *, progress: StepProgress | None = None) -> nn.Module:
    """Fit the maps of the tail of ``model`` on ``batches`` and return it; without a tail, nothing is done."""
    return fill_tail_(model, fit_tail(model, batches, progress=progress))


@torch.no_grad()
def fit_tail(
    model: nn.Module, batches: Iterable[Tensor], *, progress: StepProgress | None = None
) -> dict[int, LinearFit]:
    """Return the maps for the blocks of the tail of ``model`` that need one, fitted on ``batches`` in one pass.

    Each gives the input of the attention of one block, as it would be if patches were updated, from the patches at the
    stop. A patch counts as much as the tokens that the head reads attend to it, and a little more.
    """
    record = require_record(model)
    stop, readers = stop_of(record) if record.plan.tail else (0, [])
    if not (later := [block for block in readers if block != stop]):
        return {}
    sums = _TailSums(with_all_tokens(model), stop, later)
    for done, images in enumerate(checked(batches, model, PURPOSE), 1):
        sums.add(images)
        if progress:
            progress(done, length_hint(batches))
    require_held_out(sums.count)
    return {block: fit_linear(folds) for block, folds in sums.folds.items()}


@torch.no_grad()
def fill_tail_(model: nn.Module, maps: dict[int, LinearFit]) -> nn.Module:
    """Set the maps of a tail, each folded with the weights of keys and values of its block."""
    record = require_record(model)
    joined = next((step.maps for step in model.modules() if isinstance(step, TailStep) and step.maps is not None), None)
    for block, found in maps.items():
        handle = record.attentions[block]
        step = model.get_submodule(f"{handle.owner}.{STEP}")
        assert joined is not None
        assert isinstance(step, TailStep)
        assert step.columns is not None
        part = slice(*step.columns)
        matrix, shift = key_value_matrix(unwrapped(model.get_submodule(handle.site.path)))
        joined.weight[part] = (matrix @ found.weight).to(joined.weight)
        joined.bias[part] = (matrix @ found.bias + shift).to(joined.bias)
    others = [fit for fit in record.plan.fits if fit.kind != "tail"]
    fits = [Fit("tail", block, "tail", found.r2, found.ridge) for block, found in maps.items()]
    vars(model)[RECORD] = replace(record, plan=replace(record.plan, fits=(*others, *fits)))
    return model


def require_held_out(images: int) -> None:
    """Raise ``DataError`` if there are too few images to judge a fit on."""
    if images < 2:
        raise DataError("a fit is judged on held-out images, but there is only one image; give two or more")


def require_finite(values: Tensor, path: str) -> None:
    """Raise ``ModelError`` if the module at ``path`` has values that no fit can use."""
    if not values.isfinite().all():
        raise ModelError(f"{path} returns values that are not finite; check the weights, or use float32")


class _TailSums:
    """What is summed over the images for the maps of a tail."""

    def __init__(self, model: nn.Module, stop: int, later: list[int]) -> None:
        record = require_record(model)
        self.model, self.layout, self.count = model, layout_of(record), 0
        self.stop = record.attentions[stop].owner
        self.attentions = {block: record.attentions[block].site.path for block in later}
        self.folds: dict[int, list[Moments]] = {block: [] for block in later}

    def add(self, images: Tensor) -> None:
        """Add a batch of images."""
        inputs, watch = dict[str, Tensor](), MapWatch()

        def enter(path: str, _: nn.Module, args: Any, kwargs: Any) -> None:
            inputs[path] = first_tensor((*args, *kwargs.values()))[:, self.layout.protected :]

        with ExitStack() as stack:
            for path in (self.stop, *self.attentions.values()):
                module = self.model.get_submodule(path)
                stack.callback(module.register_forward_pre_hook(partial(enter, path), with_kwargs=True).remove)
                if path != self.stop:
                    stack.callback(module.register_forward_pre_hook(partial(watch.begin, path)).remove)
                    stack.callback(module.register_forward_hook(watch.end).remove)
            stack.enter_context(watch)
            self.model(images)
        base = base_of(inputs[self.stop])
        width = base.shape[-1]
        fold = (self.count + torch.arange(len(images), device=images.device)) % FOLDS
        for block, path in self.attentions.items():
            weight = self._weight(watch.maps[path][0])
            require_finite(inputs[path], f"the norm before {path}")
            self.folds[block] = self.folds[block] or [Moments(width, width) for _ in range(FOLDS)]
            for number, sums in enumerate(self.folds[block]):
                part = fold == number
                sums.take(base[part], inputs[path][part], weight[part])
        self.count += len(images)

    def _weight(self, attention: Tensor) -> Tensor:
        """Return how much each patch counts, (B, patches), given the map (B, heads, N, N)."""
        mean = attention[:, :, : self.layout.read, self.layout.protected :].mean((1, 2))
        return mean / mean.mean(1, keepdim=True) + UNREAD
