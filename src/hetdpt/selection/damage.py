"""Layers chosen one after another, each with the least damage per gain; no labels.

The damage is measured after the replacements are fitted, between the outputs of the model as given and those of the
model without the layers. The gain of a layer is given: 1, or the milliseconds that it costs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, isfinite
from operator import length_hint
from typing import Any

import torch
from torch import Tensor, nn

from hetdpt.core.errors import DataError, ModelError, PlanError
from hetdpt.core.modules import Peeked, checked, clone, memory_advice, require_more_than_once
from hetdpt.core.plan import Removal, Site
from hetdpt.core.progress import StepProgress
from hetdpt.measurement.agreement import Damage
from hetdpt.surgery.calibrate import variants_of
from hetdpt.surgery.prefix_cache import MEMORY, CachedVariants, Probe
from hetdpt.surgery.remove import ready_for, removable

PURPOSE = "choosing layers"
PARTS = 100  # of a step, as progress counts them


@dataclass(frozen=True)
class GreedyChoice:
    """One layer to remove."""

    site: Site
    damage: float
    """Damage of the model without this layer and all that were chosen before it."""
    gain: float

    @classmethod
    def from_dict(cls, values: Any) -> GreedyChoice:
        """Return the choice whose ``asdict`` is ``values``."""
        return cls(Site(**values["site"]), values["damage"], values["gain"])


def choose(
    model: nn.Module,
    batches: Iterable[Tensor],
    gains: Mapping[Site, float],
    target: float,
    *,
    judge: Iterable[Tensor] | None = None,
    removal: Removal = "calibrated",
    chosen: Sequence[GreedyChoice] = (),
    memory: int = MEMORY,
    progress: StepProgress | None = None,
) -> Iterator[GreedyChoice]:
    """Yield layers to remove, one after another, until together they gain ``target``.

    Every step takes the site s of ``gains`` with the least (damage(S + s) - damage(S)) / gain(s), where S are those
    chosen before; on a tie the one that runs first. Sites without a gain are never taken. ``removal`` says what
    replaces a removed layer; replacements are fitted anew in every step, on ``batches`` and on the model without S. The
    damage is ``Damage``, relative to ``model`` as given, on the images of ``judge``, by default ``batches``. Both are
    read in every step and should give the same images each time.

    ``chosen`` are the choices of an earlier call, from which to continue. ``memory`` is that of ``CachedVariants``.
    ``progress`` is called with (hundredths of steps done, in all), an estimate where gains differ.

    >>> import hetdpt, timm
    >>> model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, num_classes=10).eval()
    >>> _ = nn.init.zeros_(model.blocks[1].attn.proj.weight)
    >>> gains = dict.fromkeys(hetdpt.sites(model), 1.0)
    >>> [choice] = choose(model, [torch.randn(8, 3, 32, 32)], gains, target=1)
    >>> choice.site.path, round(choice.damage, 6)
    ('blocks.1.attn', 0.0)
    """
    images, judge = _both(model, batches, judge, "once for each layer")
    current = ready_for(images.first, model, removal)
    left = removable(current, [site for site, gain in gains.items() if gain > 0])
    reached = sum(choice.gain for choice in chosen)
    if reached >= target:
        return
    for choice in chosen:
        left.remove(choice.site)
        current = variants_of(current, [choice.site], images)[choice.site]
    _require_reachable(reached + sum(gains[site] for site in left), target, len(left))
    damage = chosen[-1].damage if chosen else 0.0
    dense = _DenseOutputs(model, judge, memory)
    step = len(chosen)
    while left and reached < target:
        steps = step + ceil((target - reached) * len(left) / sum(gains[site] for site in left))
        tell = _part_of(progress, step, steps)
        variants = variants_of(current, left, images)
        damages = dense.damages(current, variants, tell, length_hint(images))
        best = min(left, key=lambda site: (damages[site] - damage) / gains[site])
        _require_finite(damages[best], step)
        current, damage, reached, step = variants[best], damages[best], reached + gains[best], step + 1
        left.remove(best)
        yield GreedyChoice(best, damage, gains[best])


def damage_of_each(
    model: nn.Module,
    batches: Iterable[Tensor],
    sites: Iterable[Site],
    *,
    judge: Iterable[Tensor] | None = None,
    removal: Removal = "calibrated",
    progress: StepProgress | None = None,
) -> dict[Site, float]:
    """Return the damage of ``model`` without each of ``sites`` alone; ``batches`` and ``judge`` as in ``choose``.

    >>> import hetdpt, timm
    >>> model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, num_classes=10).eval()
    >>> _ = nn.init.zeros_(model.blocks[1].attn.proj.weight)
    >>> damages = damage_of_each(model, [torch.randn(8, 3, 32, 32)], hetdpt.sites(model))
    >>> min(damages, key=damages.__getitem__).path
    'blocks.1.attn'
    """
    images, judge = _both(model, batches, judge, "to fit replacements and to judge them")
    current = ready_for(images.first, model, removal)
    variants = variants_of(current, sites, images)
    dense = _DenseOutputs(model, judge, MEMORY)
    return dense.damages(current, variants, _part_of(progress, 0, 1), length_hint(images))


def _both(
    model: nn.Module, batches: Iterable[Tensor], judge: Iterable[Tensor] | None, times: str
) -> tuple[Peeked, Iterable[Tensor]]:
    """Return the images to fit on and those to judge on, which are the same unless ``judge`` is given."""
    judge = batches if judge is None else judge
    for images in (batches, judge):
        require_more_than_once(images, times)
    peeked = Peeked(batches, model, PURPOSE)
    return peeked, peeked if judge is batches else judge


class _DenseOutputs:
    """The outputs of the dense model for some images, with which those of variants are compared."""

    @torch.no_grad()
    def __init__(self, model: nn.Module, images: Iterable[Tensor], memory: int) -> None:
        self.model, self.images, self.memory = model, images, memory
        dense = clone(model).eval()
        self.answers, self.marks = list[Tensor](), list[Tensor]()
        for batch in checked(images, model, PURPOSE):
            self.answers.append(Probe()(dense, batch).cpu())
            self.marks.append(_mark(batch))
        if not all(answers.isfinite().all() for answers in self.answers):
            raise ModelError("the model returns values that are not finite; check its weights, or use float32")

    def damages(
        self, current: nn.Module, variants: Mapping[Site, nn.Module], tell: Callable[[float], None], fits: int
    ) -> dict[Site, float]:
        """Return the damage of each variant of ``current``; ``tell`` is called with the fraction of the step done.

        ``fits`` is how many forward passes of the step have been made before.
        """
        found = {site: Damage.to(self.model) for site in variants}
        done, in_all = fits, fits + len(self.answers) * (1 + len(variants))
        scan: CachedVariants[Site] | None = None
        stream = checked(self.images, self.model, PURPOSE)
        for dense, mark, images in zip(self.answers, self.marks, stream, strict=True):
            _require_same(mark, images)
            with memory_advice(f"{len(images)} images at once do not fit in memory; give smaller batches or memory=0"):
                scan = scan or CachedVariants(current, variants, Probe(), images, self.memory)
                for site, answers in scan.answers(images):
                    if site is not None:
                        found[site].add(dense, answers)
                    done += 1
                    tell(done / in_all)
        return {site: damage.value for site, damage in found.items()}


def _mark(images: Tensor) -> Tensor:
    """Return a number that identifies each image."""
    return images.float().flatten(1).mean(1).cpu()


def _require_same(mark: Tensor, images: Tensor) -> None:
    if len(mark) != len(images) or not torch.allclose(mark, _mark(images), rtol=1e-4, atol=1e-6):
        raise DataError(
            "choosing layers reads the images once for each layer, but they were in another order than before; "
            "give a loader that does not shuffle or augment"
        )


def _part_of(progress: StepProgress | None, step: int, steps: int) -> Callable[[float], None]:
    def tell(part: float) -> None:
        if progress:
            progress(round(PARTS * (step + part)), PARTS * steps)

    return tell


def _require_reachable(whole: float, target: float, left: int) -> None:
    if whole < target:
        raise PlanError(
            f"the goal is a gain of {target:g}, but removing all {left} layers gains {whole:g}; set a smaller goal"
        )


def _require_finite(damage: float, step: int) -> None:
    if not isfinite(damage):
        raise PlanError(
            f"after {step} layers, removing any other leaves a model whose outputs are not finite; "
            "remove fewer layers, or use float32"
        )
