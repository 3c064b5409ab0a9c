"""Calibrated removal (docs/oneshot.md): a removed layer is replaced by the constant or the linear map closest to it.

The fit is in closed form, on a few hundred images without labels. For a layer y of x it minimises
E w || y - r(x) ||^2 with w = 1 / || y || for every token, so that the few with massive activations do not dominate.
All sums are computed in a stream: memory is O(D^2) for any number of images. Nothing is trained or chosen here.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from operator import length_hint
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hetdpt.adapters.anatomy import Handle
from hetdpt.core.errors import ModelError
from hetdpt.core.fold import Means, Moments, exact
from hetdpt.core.gates import Values, first_tensor, replacement_class
from hetdpt.core.modules import (
    Peeked,
    checked,
    clone,
    evaluating,
    is_once,
    memory_advice,
    require_more_than_once,
)
from hetdpt.core.plan import Fit, Plan, Site, with_class_token
from hetdpt.core.progress import StepProgress
from hetdpt.core.styles import STYLES, Style
from hetdpt.surgery.arrange import kept_of
from hetdpt.surgery.fit_tail import (
    FOLDS,
    PURPOSE,
    fill_tail_,
    fit_tail,
    fit_tail_,
    require_finite,
    require_held_out,
)
from hetdpt.surgery.gate import fill_gate_, gates_by_site, place_gates_, restore_
from hetdpt.surgery.record import Record, layer_at, parts_of, record_of, require_record, with_class_layout
from hetdpt.surgery.remove import fill_, place_, ready_for, refuse_reductions, without
from hetdpt.surgery.replacement import place_of
from hetdpt.surgery.tail import trim_to_class_token_, untrim_

SUMS = 2 << 30  # bytes of sums in one pass over the images
FLOOR = 0.05  # of the median norm of y: a token below it is weighted as if it were there


class EnoughError(Exception):
    """Ends a forward pass after the last layer whose output is needed."""


@dataclass(frozen=True)
class Fitted:
    """A replacement that was fitted for one site."""

    site: Site
    fit: Fit
    values: Values


@torch.no_grad()
def calibrate_(
    model: nn.Module, plan: Plan, batches: Iterable[Tensor], *, progress: StepProgress | None = None
) -> nn.Module:
    """Remove the layers of ``plan``, each replaced by what fits it best on some images, and return the model.

    ``batches`` are images (B, C, H, W), prepared for the model; labels are not needed. Layers are fitted in order of
    execution, each on the inputs it gets when those before it are replaced already. That takes one pass over the images
    per layer; a one-shot iterator fits all of them in one pass, on the inputs they get in the unchanged model. A plan
    whose removal is not fitted on images (``plain``) is applied as ``calibrated``.

    ``progress`` is called with (batches done, in all); in all is 0 if ``batches`` have no length. How well each
    replacement fits is kept in the plan of the model (``Plan.fits``).

    >>> import hetdpt, timm
    >>> model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, num_classes=10)
    >>> model = calibrate_(model, Plan(attention=(1,), activation=(0,)), [torch.randn(8, 3, 32, 32)])
    >>> [site.path for site in hetdpt.sites(model)]
    ['blocks.0.attn', 'blocks.1.mlp.act']
    """
    refuse_reductions(plan)
    removal = plan.removal if plan.is_any_fitted else with_class_token("calibrated", plan.class_token)
    plan = replace(plan, fits=(), removal=removal)
    images = Peeked(batches, model, PURPOSE)
    whole = place_(clone(model), plan, images.size)  # an impossible plan is refused before anything is fitted
    if require_record(whole).plan.tail > 1:
        require_more_than_once(batches, "once to replace layers and once to fit the tail")
    dense = ready_for(images.first, model, plan.removal)
    removed = [handle.site for handle in require_record(dense).to_remove(plan)]
    kept = _kept_at(whole, removed)
    if images.is_once:
        found = [*fit_sites(dense, _fitted_styles(removed, plan), images, kept=kept, progress=progress).values()]
    else:
        found = _fit_in_order(dense, removed, plan, images, kept, progress)
    tail = fit_tail(_filled(whole, found), images, progress=progress)
    return fill_tail_(_filled(place_(model, plan, images.size), found), tail)


def _filled(model: nn.Module, found: Iterable[Fitted]) -> nn.Module:
    for fitted in found:
        fill_(model, fitted.site, fitted.values, fitted.fit)
    return model


def _kept_at(model: nn.Module, sites: Iterable[Site]) -> dict[Site, int]:
    """Return how many of the first tokens are computed at those of ``sites`` where others are not."""
    record = require_record(model)
    if record.layout is None:
        return {}
    stop, kept = kept_of(record)
    return {site: kept for site in sites if site.block >= stop}


def gate_fitted_(
    model: nn.Module, plan: Plan, batches: Iterable[Tensor], *, sites: Collection[Site] | None = None
) -> nn.Module:
    """Gate ``sites``, or all that the plan's removal can remove; their replacements are fitted on ``batches``.

    This is ``gate_`` for any removal. Each replacement is fitted as if it were the only one. If that fails the model
    is unchanged.
    """
    images = Peeked(batches, model, PURPOSE)
    place_gates_(model, plan, images.size, sites)
    gates = gates_by_site(model)
    for gate in gates.values():
        gate.is_open = True
    try:
        refit_gates_(model, plan, images)
    except Exception:
        restore_(model)
        raise
    for site, gate in gates.items():
        gate.is_open = not plan.removes(site)
    return model


def refit_gates_(model: nn.Module, plan: Plan, batches: Iterable[Tensor]) -> nn.Module:
    """Fit the replacements behind all open gates again, to the layers and their inputs as they are now."""
    wanted = _fitted_styles([site for site, gate in gates_by_site(model).items() if gate.is_open], plan)
    if wanted:
        with evaluating(model):
            for (site, _), fitted in fit_sites(model, wanted, batches, is_scaled=False).items():
                fill_gate_(model, site, fitted.values)
    return model


def replaced(model: nn.Module, fitted: Fitted) -> nn.Module:
    """Return a copy of ``model`` (one that is ``ready``) in which the site has its replacement."""
    return fill_(without(model, fitted.site, fitted.fit.style), fitted.site, fitted.values, fitted.fit)


def remove_(
    model: nn.Module, plan: Plan, batches: Iterable[Tensor], *, progress: StepProgress | None = None
) -> nn.Module:
    """Apply ``plan`` to a classifier as ``calibrate_`` does, but with its own removal even if that is not fitted.

    Where its head reads the class token alone, what follows the last attention is fitted to that token.
    """
    record = record_of(model)
    was_trimmed = record is not None and record.is_trimmed
    images = Peeked(batches, model, PURPOSE)
    trim_to_class_token_(model, images.size)
    try:
        if plan.is_any_fitted:
            return calibrate_(model, plan, images, progress=progress)
        return fit_tail_(place_(model, replace(plan, fits=()), images.size), images, progress=progress)
    finally:
        if not was_trimmed:
            untrim_(model)


def with_tail(model: nn.Module, length: int, batches: Iterable[Tensor]) -> nn.Module:
    """Return a copy of ``model`` (one that is ``ready``) with a tail of ``length``, fitted on ``batches``."""
    plan = Plan(removal=require_record(model).plan.removal, tail=length)
    return fit_tail_(place_(clone(model), plan), batches)


def variants_of(model: nn.Module, sites: Iterable[Site], batches: Iterable[Tensor]) -> dict[Site, nn.Module]:
    """Return a copy of ``model`` without each of ``sites``, by the removal it is ``ready`` for.

    Replacements that have to be fitted are so in one pass over ``batches``, each as if it were the only one.
    """
    sites = list(sites)
    wanted = _fitted_styles(sites, require_record(model).plan)
    found = {site: fitted for (site, _), fitted in fit_sites(model, wanted, batches).items()} if wanted else {}
    return {site: replaced(model, found[site]) if site in found else without(model, site) for site in sites}


def _fitted_styles(sites: Iterable[Site], plan: Plan) -> dict[Site, tuple[str]]:
    """Return those of ``sites`` whose replacement has to be fitted, with its style."""
    styles = {site: plan.style_of(site) for site in sites}
    return {site: (style.name,) for site, style in styles.items() if style.fit}


@torch.no_grad()
def fit_sites(
    model: nn.Module,
    wanted: Mapping[Site, Sequence[str]],
    batches: Iterable[Tensor],
    *,
    is_scaled: bool = True,
    kept: Mapping[Site, int] | None = None,
    progress: StepProgress | None = None,
) -> dict[tuple[Site, str], Fitted]:
    """Return a replacement for every wanted site and style, each as if it were the only one, from one pass.

    ``kept`` says of sites where later only so many of the first tokens are computed; others do not count there.
    ``model`` is one that is ``ready``. Without ``is_scaled`` replacements return what a LayerScale parameter multiplies
    afterwards, as those behind a gate have to. If the sums of all of them take more than ``SUMS`` bytes, and the images
    can be read again, there are more passes.
    """
    record = require_record(model)
    if any(STYLES[style].class_token == "keep" for styles in wanted.values() for style in styles):
        record = with_class_layout(model, record)
    sums = [
        _Sums(model, record.handle_of(site), STYLES[style], is_scaled, (kept or {}).get(site), record)
        for site, styles in wanted.items()
        for style in styles
    ]
    groups = [sums] if is_once(batches) else _groups(sums)
    found: dict[tuple[Site, str], Fitted] = {}
    for number, group in enumerate(groups):
        step = partial(_progress_of_pass, progress, number, len(groups)) if progress else None
        _sum_up(model, group, batches, step)
        found |= {(one.site, one.style.name): one.fitted() for one in group}
        for one in group:
            one.folds.clear()
    return found


def _groups(sums: list[_Sums]) -> list[list[_Sums]]:
    """Return ``sums`` in groups that take at most ``SUMS`` bytes each, or have one member."""
    groups: list[list[_Sums]] = []
    room = 0
    for one in sums:
        if not groups or room < one.nbytes:
            groups.append([])
            room = SUMS
        groups[-1].append(one)
        room -= one.nbytes
    return groups


def _sum_up(model: nn.Module, sums: list[_Sums], batches: Iterable[Tensor], progress: StepProgress | None) -> None:
    count = 0
    for done, images in enumerate(checked(batches, model, PURPOSE), 1):
        with memory_advice(f"{len(images)} images at once do not fit in memory; give smaller batches"):
            _add(model, sums, images, count)
        count += len(images)
        if progress:
            progress(done, length_hint(batches))
    require_held_out(count)


def _fit_in_order(
    dense: nn.Module,
    removed: list[Site],
    plan: Plan,
    batches: Iterable[Tensor],
    kept: Mapping[Site, int],
    progress: StepProgress | None,
) -> list[Fitted]:
    """Return the fitted replacements of the ``removed`` sites, each fitted with those before it replaced."""
    student, found = clone(dense), list[Fitted]()
    wanted = _fitted_styles(removed, plan)
    for site in removed:
        if site not in wanted:
            student = without(student, site, plan.style_of(site).name)
            continue
        step = partial(_progress_of_pass, progress, len(found), len(wanted)) if progress else None
        [fitted] = fit_sites(student, {site: wanted[site]}, batches, kept=kept, progress=step).values()
        found.append(fitted)
        student = replaced(student, fitted)
    return found


def _progress_of_pass(progress: StepProgress, number: int, passes: int, done: int, batches: int) -> None:
    progress(number * batches + done, passes * batches)


class _Sums:
    """What is summed over the images for one replacement."""

    def __init__(
        self,
        model: nn.Module,
        handle: Handle,
        style: Style,
        is_scaled: bool,
        kept: int | None,
        record: Record,
    ) -> None:
        self.site, self.style, layout = handle.site, style, record.layout
        self.positions = slice(0, kept)
        """The tokens that the replacement is for."""
        self.is_short = layout is not None and handle.site.block >= kept_of(record)[0]
        """Whether only the kept tokens are computed there."""
        if layout and style.removes == "patches":
            self.positions = slice(layout.protected, None)
        place = place_of(model, handle, style)
        self.place = place if is_scaled else replace(place, scales=())
        self.images_at = handle.images_at
        self.replacement = replacement_class(style)
        self.folds: list[Means | Moments] = []
        self.floor = 0.0
        self.size = math.prod(handle.parts.core_layout.shape) if handle.parts else 0
        """Values of one image or window, at all positions."""
        ffn = None if style.removes == "patches" else handle.ffn
        self.width = layer_at(model, ffn.first).weight.shape[1] if ffn else parts_of(handle).core_layout.width
        assert self.replacement.sums is not None
        self.nbytes = FOLDS * self.replacement.sums.nbytes(self.width)

    def tokens(self, values: Tensor, images: int) -> Tensor:
        """Return ``values`` as (images, positions, channels); windows of an image count as its positions."""
        values = values.movedim(self.place.axis, -1).movedim(self.images_at, 0)
        return values.reshape(images, -1, values.shape[-1])[:, self.positions]

    def output(self, model: nn.Module, output: Any) -> Tensor:
        """Return what the replacement has to return: the output of the target, multiplied by the scales."""
        y: Tensor = (output[0] if isinstance(output, tuple) else output).movedim(self.place.axis, -1)
        for scale in self.place.scales:
            y = y * model.get_parameter(scale).flatten()
        return y.movedim(-1, self.place.axis)

    def add(self, x: Tensor, y: Tensor, images: int, count: int) -> None:
        """Add a batch of ``images``, before which there were ``count``."""
        rows = images
        if self.style.is_per_position:
            y, rows = self._by_position(y, images), len(y)
        else:
            x, y = self.tokens(x, images), self.tokens(y, images)
        if not y.numel():  # patches that are not computed
            return
        require_finite(y, self.place.target)
        weight = self._weight(y)
        fold = (count + torch.arange(rows, device=y.device) // (rows // images)) % FOLDS  # of the image of each row
        assert self.replacement.sums is not None
        for number in range(FOLDS):
            part = fold == number
            if number >= len(self.folds):
                self.folds.append(self.replacement.sums(x.shape[-1], y.shape[-1]))
            if part.any():
                self.folds[number].take(x if self.style.is_per_position else x[part], y[part], weight[part])

    def _by_position(self, y: Tensor, images: int) -> Tensor:
        """Return ``y`` as (rows, positions, channels); a row is an image or one window of it."""
        values = y.movedim(self.place.axis, -1).flatten(1, -2)
        if self.is_short:  # patches are not computed, and what is put there is not read
            values = F.pad(values, (0, 0, 0, self.size // values.shape[-1] - values.shape[1]))
        if values[0].numel() != self.size or len(values) % images:
            raise ModelError(
                f"{self.place.target} returns {tuple(y.shape)} for {images} images, which does not have the images "
                "first and then the tokens; use removal style 'constant' or 'linear'"
            )
        return values

    def _weight(self, y: Tensor) -> Tensor:
        """Return the weight of each token (images, positions): 1 / || y ||."""
        size: Tensor = torch.linalg.vector_norm(exact(y), dim=-1)
        # the first image sets the floor, so that it does not depend on the batch size
        self.floor = self.floor or max(FLOOR * size[0].median().item(), torch.finfo(torch.float32).tiny)
        return size.clamp(min=self.floor).reciprocal()

    def fitted(self) -> Fitted:
        if not self.folds:
            zeros = torch.zeros(self.width, self.width, dtype=torch.float64)
            return Fitted(self.site, Fit(self.site.kind, self.site.block, self.style.name, 1.0), (zeros, zeros[0]))
        found = self.replacement.fit(self.folds)
        fit = Fit(self.site.kind, self.site.block, self.style.name, found.r2, found.ridge)
        return Fitted(self.site, fit, found.values)


def _add(model: nn.Module, sums: list[_Sums], images: Tensor, count: int) -> None:
    """Run ``model`` on ``images`` up to the last layer in ``sums`` and add the inputs and outputs of the layers."""
    inputs: dict[int, Tensor] = {}
    left = set(range(len(sums)))

    def keep(number: int, _: nn.Module, args: Any, kwargs: Any) -> None:
        inputs[number] = first_tensor((*args, *kwargs.values()))

    def add(number: int, _: nn.Module, args: Any, output: Any) -> None:
        sums[number].add(inputs.pop(number), sums[number].output(model, output), len(images), count)
        left.remove(number)
        if not left:
            raise EnoughError

    with ExitStack() as stack:
        for number, one in enumerate(sums):
            source, target = model.get_submodule(one.place.source), model.get_submodule(one.place.target)
            stack.callback(source.register_forward_pre_hook(partial(keep, number), with_kwargs=True).remove)
            stack.callback(target.register_forward_hook(partial(add, number)).remove)
        stack.enter_context(suppress(EnoughError))
        model(images)
