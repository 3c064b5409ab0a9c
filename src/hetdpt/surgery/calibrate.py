"""Calibrated removal (docs/oneshot.md): a removed layer is replaced by the constant or the linear map closest to it.

The fit is in closed form, on a few hundred images without labels. For a layer y of x it minimises
E w || y - (W x + b) ||^2 with w = 1 / || y || for every token, so that the few with massive activations do not decide.
All sums are taken in a stream: memory is O(D^2), whatever the number of images. Nothing is trained or chosen here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from operator import length_hint
from typing import Any

import torch
from torch import Tensor, nn

from hetdpt.adapters.anatomy import Handle
from hetdpt.core.errors import DataError, ModelError, PlanError
from hetdpt.core.fold import Means, Moments, exact, fit_linear, fit_mean
from hetdpt.core.modules import Peeked, checked, clone, evaluating, is_once, memory_advice
from hetdpt.core.plan import Fit, Plan, Site
from hetdpt.surgery.gate import fill_gate_, gates_by_site, place_gates_, restore_
from hetdpt.surgery.record import layer_at, require_record
from hetdpt.surgery.remove import fill_, place_, ready_for, without
from hetdpt.surgery.replacement import Values, place_of

FOLDS = 4  # parts of the images, each held out once
SUMS = 2 << 30  # bytes of sums in one pass over the images
FLOOR = 0.05  # of the median size of y: a token with less of it counts as if it had this much
PURPOSE = "calibration"
Progress = Callable[[int, int], None]
"""Called with (steps done, steps in all)."""


@dataclass(frozen=True)
class Fitted:
    """A replacement that was fitted for one site."""

    site: Site
    fit: Fit
    values: Values
    """float64."""


@torch.no_grad()
def calibrate_(
    model: nn.Module,
    plan: Plan,
    batches: Iterable[Tensor],
    *,
    absorb: bool = False,
    sweeps: int = 1,
    progress: Progress | None = None,
) -> nn.Module:
    """Remove the layers of ``plan``, each replaced by what fits it best on some images, and return the model.

    ``batches`` are images (B, C, H, W), prepared as the model wants them; labels are not needed. Layers are fitted in
    order of execution, each on what it gets when those before it are replaced already. For that the images are gone
    through once for each layer; an iterator, which can be read only once, fits all of them on what the unchanged model
    gives them. A plan whose removal is not fitted on images (``plain``) is taken as ``calibrated``.

    ``absorb``: the replacement is to give the layer's output plus the error made so far, dense stream minus pruned
    stream, wherever the layer adds to the stream directly. ``sweeps`` above 1 fit every layer again, tokens then
    weighted by what the fit before left: 1 / || y - r(x) ||. ``progress`` is called with (batches done, in all); in all
    is 0 where ``batches`` do not say how many they are. How well each replacement fits is kept in the plan of the
    model (``Plan.fits``).

    >>> import hetdpt, timm
    >>> model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, num_classes=10)
    >>> model = calibrate_(model, Plan(attention=(1,), activation=(0,)), [torch.randn(8, 3, 32, 32)])
    >>> [site.path for site in hetdpt.sites(model)]
    ['blocks.0.attn', 'blocks.1.mlp.act']
    """
    if sweeps < 1:
        raise PlanError(f"each replacement is fitted at least once, not {sweeps} times")
    plan = replace(plan, fits=(), removal=plan.removal if plan.is_any_fitted else "calibrated")
    if is_once(batches) and (absorb or sweeps > 1):
        raise DataError(
            "absorb and sweeps go over the images more than once, but came an iterator that can be read only once; "
            "give a list of batches or a loader"
        )
    images = Peeked(batches, model, PURPOSE)
    size = images.first.shape[1], images.first.shape[2], images.first.shape[3]
    place_(clone(model), plan, size)  # what does not fit is refused before anything is fitted
    dense = ready_for(images.first, model, plan.removal)
    going = _going(dense, plan)
    if images.is_once:
        asked = {handle.site: (plan.style_of(handle.site.kind),) for handle in going if _is_fitted(handle, plan)}
        found = [*fit_sites(dense, asked, images, progress=progress).values()]
    else:
        found = _fit_in_order(dense, plan, images, absorb, sweeps, progress)
    place_(model, plan, size)
    for fitted in found:
        fill_(model, fitted.site, fitted.values, fitted.fit)
    return model


def gate_fitted_(
    model: nn.Module, plan: Plan, batches: Iterable[Tensor], *, sites: Collection[Site] | None = None
) -> nn.Module:
    """Gate ``sites``, or all that the plan's removal can remove, with fitted replacements on the other side.

    ``gate_`` for any removal: those that are fitted are so on ``batches``, each as if it were the only one. Where that
    fails the model is as it was.
    """
    images = Peeked(batches, model, PURPOSE)
    place_gates_(model, plan, (images.first.shape[1], images.first.shape[2], images.first.shape[3]), sites)
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
    """Fit the other sides of all open gates again, to the layers and their inputs as they are now."""
    gates = gates_by_site(model)
    asked = {
        site: (plan.style_of(site.kind),) for site, gate in gates.items() if gate.is_open and plan.is_fitted(site.kind)
    }
    if asked:
        with evaluating(model):
            for (site, _), fitted in fit_sites(model, asked, batches, is_scaled=False).items():
                fill_gate_(model, site, fitted.values)
    return model


def replaced(model: nn.Module, fitted: Fitted) -> nn.Module:
    """Return a copy of ``model`` (one that is ``ready``) in which the site has its replacement."""
    return fill_(without(model, fitted.site, fitted.fit.style), fitted.site, fitted.values, fitted.fit)


def is_fitted(model: nn.Module) -> bool:
    """Whether the removal that a model is ``ready`` for is fitted on images, for one kind of layer at least."""
    record = require_record(model)
    return record.plan.is_any_fitted


def variants_of(model: nn.Module, sites: Iterable[Site], batches: Iterable[Tensor]) -> dict[Site, nn.Module]:
    """Return a copy of ``model`` without each of ``sites``, by the removal it is ``ready`` for.

    Where that is fitted, all replacements are fitted in one pass over ``batches``, each as if it were the only one.
    """
    record = require_record(model)
    sites = list(sites)
    asked = {site: (record.plan.style_of(site.kind),) for site in sites if record.plan.is_fitted(site.kind)}
    found = {site: fitted for (site, _), fitted in fit_sites(model, asked, batches).items()} if asked else {}
    return {site: replaced(model, found[site]) if site in found else without(model, site) for site in sites}


@torch.no_grad()
def fit_sites(
    model: nn.Module,
    asked: Mapping[Site, Sequence[str]],
    batches: Iterable[Tensor],
    *,
    dense: nn.Module | None = None,
    before: Mapping[tuple[Site, str], Fitted] | None = None,
    is_scaled: bool = True,
    progress: Progress | None = None,
) -> dict[tuple[Site, str], Fitted]:
    """Return a replacement for every site and style asked for, each for itself, from one pass over the images.

    ``model`` is one that is ``ready``. With ``dense``, the model before anything was removed, targets absorb the error
    made so far; ``before`` are replacements whose residuals say how much each token counts. Not ``is_scaled``, they
    give what a LayerScale parameter is yet to multiply, as the other side of a gate has to. Where the sums of all of
    them would take more than ``SUMS`` bytes, and the images can be read again, there are more passes.
    """
    record = require_record(model)
    handles = {handle.site: handle for handle in record.survey.handles}
    sums = [
        _Sums(model, handles[site], style, (before or {}).get((site, style)), is_scaled)
        for site, styles in asked.items()
        for style in styles
    ]
    groups = [sums] if is_once(batches) else _groups(sums)
    found: dict[tuple[Site, str], Fitted] = {}
    for number, group in enumerate(groups):
        move = partial(_move, progress, number, len(groups)) if progress else None
        _sum_up(model, group, batches, dense, move)
        found |= {(one.site, one.style): one.fitted() for one in group}
        for one in group:
            one.folds.clear()
    return found


def _groups(sums: list[_Sums]) -> list[list[_Sums]]:
    """Return ``sums`` in groups that take at most ``SUMS`` bytes each, or hold one."""
    groups: list[list[_Sums]] = []
    room = 0
    for one in sums:
        if not groups or room < one.nbytes:
            groups.append([])
            room = SUMS
        groups[-1].append(one)
        room -= one.nbytes
    return groups


def _sum_up(
    model: nn.Module,
    sums: list[_Sums],
    batches: Iterable[Tensor],
    dense: nn.Module | None,
    progress: Progress | None,
) -> None:
    """Let all of ``sums`` take in all images."""
    count = 0
    for done, images in enumerate(checked(batches, model, PURPOSE), 1):
        with memory_advice(f"{len(images)} images at once do not fit in memory; give smaller batches"):
            ends = _ends(dense, sums, images) if dense is not None else {}
            _add(model, sums, images, count, ends)
        count += len(images)
        if progress:
            progress(done, length_hint(batches))
    if count < 2:
        raise DataError("a fit is judged on images held out, but there is one image only; give two or more")


def _fit_in_order(
    dense: nn.Module, plan: Plan, batches: Iterable[Tensor], absorb: bool, sweeps: int, progress: Progress | None
) -> list[Fitted]:
    """Return a replacement for each fitted site of ``plan``, each on what it gets when those before are replaced."""
    student, found = clone(dense), list[Fitted]()
    going = _going(dense, plan)
    steps = sweeps * sum(_is_fitted(handle, plan) for handle in going)
    for handle in going:
        site, style = handle.site, plan.style_of(handle.site.kind)
        got: dict[tuple[Site, str], Fitted] = {}
        for sweep in range(sweeps if _is_fitted(handle, plan) else 0):
            move = partial(_move, progress, len(found) * sweeps + sweep, steps) if progress else None
            got = fit_sites(
                student, {site: (style,)}, batches, dense=dense if absorb else None, before=got, progress=move
            )
        found += got.values()
        student = replaced(student, got[site, style]) if got else without(student, site)
    return found


def _move(progress: Progress, step: int, steps: int, done: int, batches: int) -> None:
    progress(step * batches + done, steps * batches)


def _going(dense: nn.Module, plan: Plan) -> list[Handle]:
    """Return the sites that ``plan`` removes and that are still there, in order of execution."""
    record = require_record(dense)
    return [h for h in record.survey.handles if plan.removes(h.site) and not record.plan.removes(h.site)]


def _is_fitted(handle: Handle, plan: Plan) -> bool:
    return plan.is_fitted(handle.site.kind)


def _width(model: nn.Module, handle: Handle) -> int:
    """Return how many channels a layer has."""
    if handle.ffn:
        return layer_at(model, handle.ffn.first).weight.shape[1]
    assert handle.parts is not None
    return handle.parts.core_layout.width


class _EnoughError(Exception):
    """Ends a forward pass of which all that was asked for is known."""


class _Sums:
    """What is summed up over the images for one replacement."""

    def __init__(
        self, model: nn.Module, handle: Handle, style: str, before: Fitted | None, is_scaled: bool = True
    ) -> None:
        self.site, self.style, self.before = handle.site, style, before
        place = place_of(model, handle, style)
        self.place = place if is_scaled else replace(place, scales=())
        self.images_at = handle.images_at
        self.is_linear = style in ("linear", "calibrated")
        self.folds: list[Any] = []
        self.floor = 0.0
        self.size = math.prod(handle.parts.core_layout.shape) if handle.parts else 0
        """Values of one image or window, at all places."""
        width = _width(model, handle)
        self.nbytes = 8 * FOLDS * 2 * width**2 if self.is_linear else 0
        """What the moments take, roughly."""

    def tokens(self, values: Tensor, images: int) -> Tensor:
        """Return ``values`` as (images, places, channels); windows of an image count as its places."""
        values = values.movedim(self.place.axis, -1).movedim(self.images_at, 0)
        return values.reshape(images, -1, values.shape[-1])

    def output(self, model: nn.Module, output: Any) -> Tensor:
        """Return what the branch adds to the stream, or the like of it where more is done to it on the way."""
        y: Tensor = (output[0] if isinstance(output, tuple) else output).movedim(self.place.axis, -1)
        for scale in self.place.scales:
            y = y * model.get_parameter(scale).flatten()
        return y.movedim(-1, self.place.axis)

    def add(self, x: Tensor, y: Tensor, images: int, count: int) -> None:
        """Take in a batch of ``images``, before which there were ``count``."""
        rows = images
        if self.style == "position":
            y, rows = self._by_place(y, images), len(y)
        else:
            x, y = self.tokens(x, images), self.tokens(y, images)
        if not y.isfinite().all():
            raise ModelError(f"{self.place.target} gives values that are not finite; check the weights, or use float32")
        weight = self._weight(x, y)
        fold = (count + torch.arange(rows, device=y.device) // (rows // images)) % FOLDS  # of the image of each row
        for number in range(FOLDS):
            part = fold == number
            if number >= len(self.folds):
                self.folds.append(Moments(x.shape[-1], y.shape[-1]) if self.is_linear else Means())
            if not part.any():
                continue
            if self.is_linear:
                self.folds[number].add(x[part].flatten(0, 1), y[part].flatten(0, 1), weight[part].flatten())
            elif self.style == "constant":
                self.folds[number].add(y[part].flatten(0, 1)[:, None], weight[part].flatten()[:, None])
            else:
                self.folds[number].add(y[part], weight[part])

    def _by_place(self, y: Tensor, images: int) -> Tensor:
        """Return ``y`` as (rows, places, channels); a row is an image or one window of it."""
        values = y.movedim(self.place.axis, -1).flatten(1, -2)
        if values[0].numel() != self.size or len(values) % images:
            raise ModelError(
                f"{self.place.target} gives {tuple(y.shape)} for {images} images, which does not have the images first "
                "and then the tokens; use removal style 'constant' or 'linear'"
            )
        return values

    def _weight(self, x: Tensor, y: Tensor) -> Tensor:
        """Return how much each token counts (images, places): 1 / || y ||, or 1 / || y - r(x) || once there is an r."""
        rest = exact(y)
        values = self.before.values if self.before else None
        if isinstance(values, tuple):
            rest = rest - exact(x) @ values[0].T - values[1]
        elif values is not None:
            rest = rest - values
        size: Tensor = torch.linalg.vector_norm(rest, dim=-1)
        # the first image sets the floor, so that the sizes of batches make no difference
        self.floor = self.floor or max(FLOOR * size[0].median().item(), torch.finfo(torch.float32).tiny)
        return size.clamp(min=self.floor).reciprocal()

    def fitted(self) -> Fitted:
        kind, block = self.site.kind, self.site.block
        if self.is_linear:
            line = fit_linear(self.folds)
            return Fitted(self.site, Fit(kind, block, self.style, line.r2, line.ridge), (line.weight, line.bias))
        mean = fit_mean(self.folds)
        return Fitted(self.site, Fit(kind, block, self.style, mean.r2), mean.value)


Take = Callable[[int, Tensor, Tensor, Tensor], None]
"""Called with the number of a layer, the stream before it, its input and its output."""


def _add(model: nn.Module, sums: list[_Sums], images: Tensor, count: int, ends: dict[int, Tensor]) -> None:
    """Run ``model`` on ``images`` and let all sums take in what their layers are given and give.

    ``ends`` are streams behind the layers of the dense model, by number; the target is then what is missing to them.
    """

    def take(number: int, stream: Tensor, x: Tensor, y: Tensor) -> None:
        target = ends[number] - stream if number in ends else y
        sums[number].add(x, target, len(images), count)

    _watch(model, sums, images, take)


def _ends(dense: nn.Module, sums: list[_Sums], images: Tensor) -> dict[int, Tensor]:
    """Return the streams of the dense model behind those layers that add to them directly."""
    ends: dict[int, Tensor] = {}

    def take(number: int, stream: Tensor, x: Tensor, y: Tensor) -> None:
        if sums[number].place.is_end and stream.shape == y.shape:
            ends[number] = stream + y

    _watch(dense, sums, images, take)
    return ends


def _watch(model: nn.Module, sums: list[_Sums], images: Tensor, take: Take) -> None:
    """Run ``model`` on ``images`` up to the last layer in ``sums``, and call ``take`` for each when it has run."""
    given: dict[tuple[int, str], Tensor] = {}
    left = set(range(len(sums)))

    def keep(key: tuple[int, str], _: nn.Module, args: Any, kwargs: Any) -> None:
        given[key] = next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))

    def end(number: int, _: nn.Module, args: Any, output: Any) -> None:
        y = sums[number].output(model, output)
        take(number, given.pop((number, "stream")), given.pop((number, "source")), y)
        left.remove(number)
        if not left:
            raise _EnoughError

    with ExitStack() as stack:
        for number, one in enumerate(sums):
            for role in ("stream", "source"):
                module = model.get_submodule(getattr(one.place, role))
                hook = module.register_forward_pre_hook(partial(keep, (number, role)), with_kwargs=True)
                stack.callback(hook.remove)
            target = model.get_submodule(one.place.target)
            stack.callback(target.register_forward_hook(partial(end, number)).remove)
        stack.enter_context(suppress(_EnoughError))
        model(images)
