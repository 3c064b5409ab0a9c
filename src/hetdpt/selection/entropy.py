"""Transfer entropy: what a layer adds to the spread of a model's outputs, measured without labels and training.

H(F) = sum_j log sigma_j(F) over the channels j of a probe F, and TE(S) = |H(dense) - H(S removed)| (NOSE, CVPR 2024,
from which the paper takes it). ``prefix_cache`` runs the model without each of its layers, only from that layer on.
Nothing is trained or written here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf, isfinite, nan
from operator import length_hint

import torch
from torch import Tensor, nn

from hetdpt.core.errors import DataError, ModelError, PlanError
from hetdpt.core.modules import Peeked, memory_advice, require_more_than_once
from hetdpt.core.plan import KINDS, Kind, Removal, Site
from hetdpt.core.progress import StepProgress
from hetdpt.surgery.calibrate import variants_of
from hetdpt.surgery.prefix_cache import MEMORY, CachedVariants, Probe, ProbeName
from hetdpt.surgery.record import require_record
from hetdpt.surgery.remove import ready_for, removable

PURPOSE = "transfer entropy"


def transfer_entropy(
    model: nn.Module,
    batches: Iterable[Tensor],
    *,
    sites: Iterable[Site] | None = None,
    removal: Removal = "plain",
    probe: ProbeName = "logits",
    signed: bool = False,
    memory: int = MEMORY,
    progress: StepProgress | None = None,
) -> dict[Site, float]:
    """Return TE of each site by itself, in order of execution: TE = |H(dense) - H(site removed)|, in nats.

    ``batches`` are images (B, C, H, W), preprocessed as the model expects; they are iterated once, and once more before
    if ``removal`` is fitted on them (``calibrated``). ``sites`` default to all that ``removal`` can remove; a pruned
    model keeps the removal it was pruned with. The probe ``logits`` is the output of the model (without a head, its
    first tensor, each number a channel); ``feature`` is the input of the linear layers that compute the logits, joined
    where there are two heads. ``signed`` returns H(dense) - H(site removed). TE is infinity if outputs are not finite
    without the site.

    ``memory`` (bytes) bounds what is cached of one batch; with less of it more is computed again, with 0 everything.
    The values do not depend on it. ``progress`` is called with (forward passes done, total); the total is 0 if
    ``batches`` have no length.

    >>> import timm
    >>> model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, num_classes=10)
    >>> _ = nn.init.zeros_(model.blocks[0].attn.proj.weight)
    >>> for site, value in transfer_entropy(model, [torch.randn(4, 3, 32, 32)]).items():
    ...     print(site.path, "is inert" if value == 0 else "counts")
    blocks.0.attn is inert
    blocks.0.mlp.act counts
    blocks.1.attn counts
    blocks.1.mlp.act counts
    """
    images = Peeked(batches, model, PURPOSE)
    base = ready_for(images.first, model, removal)
    if require_record(base).plan.is_any_fitted:
        require_more_than_once(batches, "twice: to fit the replacements, and to compare")
    variants = variants_of(base, removable(base, sites), images)
    scan = CachedVariants(base, variants, Probe.of(probe, base, images.first, PURPOSE), images.first, memory)
    dense, without = _entropies(scan, images, progress, length_hint(images))
    return {site: transfer(dense, entropy, signed) for site, entropy in without.items()}


def greedy_order(
    model: nn.Module,
    batches: Iterable[Tensor],
    kinds: Sequence[Kind | None],
    *,
    removal: Removal = "plain",
    progress: StepProgress | None = None,
) -> dict[Site, float]:
    """Return sites in the order of removal, each with the TE of removing it and all before it.

    Every step removes the site s with the least TE(S + s), S being those removed before; on a tie, the one that runs
    first. TE is relative to ``model`` as given. ``kinds`` are the kinds of the sites in order, None for any.
    ``batches`` are iterated for each site and should yield the same images each time. ``progress`` is called with
    (sites chosen, total); for the rest see ``transfer_entropy``.
    """
    require_more_than_once(batches, "once for each site")
    images = Peeked(batches, model, PURPOSE)
    pruned = ready_for(images.first, model, removal)
    probe = Probe.of("logits", pruned, images.first, PURPOSE)
    left = [site for site in removable(pruned) if None in kinds or site.kind in kinds]
    require_offered(left, kinds)
    order: dict[Site, float] = {}
    dense = nan
    for step, kind in enumerate(kinds, 1):
        variants = variants_of(pruned, [site for site in left if kind in (None, site.kind)], images)
        scan = CachedVariants(pruned, variants, probe, images.first, MEMORY)
        entropy, without = _entropies(scan, images)
        dense = entropy if step == 1 else dense
        values = {site: transfer(dense, value) for site, value in without.items()}
        least = min(values, key=values.__getitem__)
        order[least] = values[least]
        left.remove(least)
        pruned = variants[least]
        if progress:
            progress(step, len(kinds))
    return order


def require_offered(sites: Iterable[Site], kinds: Sequence[Kind | None]) -> None:
    """Raise ``PlanError`` unless ``sites`` has as many of each kind as ``kinds``."""
    offered = [site.kind for site in sites]
    for kind in (*KINDS, None):
        wanted, left = kinds.count(kind), offered.count(kind) if kind else len(offered)
        if wanted > left:
            what = f"{kind} layers" if kind else "layers"
            raise PlanError(f"cannot remove {wanted} {what}: this model has {left} that can be removed")


class Spread:
    """The variance of each channel over a stream of samples, in float64, whatever the sizes of the batches.

    Batches are merged as in Chan, Golub and LeVeque (1983). Values are taken relative to the first sample, so that a
    channel that never changes has a variance of exactly 0. Memory does not grow with the number of samples.

    >>> spread = Spread()
    >>> spread.add(torch.tensor([[1.0, 5.0], [3.0, 5.0]]))
    >>> spread.add(torch.tensor([[8.0, 5.0]]))
    >>> spread.variance.tolist() == [torch.tensor([1.0, 3.0, 8.0]).double().var(correction=0).item(), 0]
    True
    """

    def __init__(self) -> None:
        self.count = 0
        self.origin = self.mean = self.squares = torch.zeros(0)

    def add(self, values: Tensor) -> None:
        """Add ``values`` (B, C)."""
        values = values.detach().cpu().double()  # float64 on the CPU: some devices have none
        if not self.count:
            self.origin = values[0].clone()
            self.mean = self.squares = torch.zeros_like(self.origin)
        deviations = values - self.origin
        mean = deviations.mean(0)
        total = self.count + len(values)
        shift = mean - self.mean
        between = shift.square() * (self.count * len(values) / total)
        self.squares = self.squares + (deviations - mean).square().sum(0) + between
        self.mean = self.mean + shift * (len(values) / total)
        self.count = total

    @property
    def variance(self) -> Tensor:
        """(C,), float64, divided by the number of samples."""
        return self.squares / self.count

    @property
    def entropy(self) -> float:
        """H = sum_j log sigma_j; channels with sigma = 0 are left out."""
        variance = self.variance
        return variance[variance != 0].log().sum().item() / 2


def _entropies(
    scan: CachedVariants[Site], stream: Iterable[Tensor], progress: StepProgress | None = None, batches: int = 0
) -> tuple[float, dict[Site, float]]:
    """Return H of the model, and H without each of the sites."""
    spreads: dict[Site | None, Spread] = {site: Spread() for site in (None, *scan.variants)}
    done = 0
    for images in stream:
        with memory_advice(f"{len(images)} images at once do not fit in memory; give smaller batches or memory=0"):
            for site, values in scan.answers(images):
                spreads[site].add(values)
                done += 1
                if progress:
                    progress(done, batches * len(spreads))
    dense = entropy_of_dense(spreads[None])
    return dense, {site: spreads[site].entropy for site in scan.variants}


def entropy_of_dense(spread: Spread) -> float:
    """Return H of the outputs of a dense model; ``DataError`` or ``ModelError`` if it cannot be compared with."""
    if spread.count < 2:
        raise DataError("transfer entropy is a spread over images, but there is only one image; give two or more")
    if not spread.squares.any():
        raise DataError(f"the model has the same output for all {spread.count} images; give images that differ")
    if not isfinite(spread.entropy):
        raise ModelError("the model's outputs are not finite; check its weights, or use float32")
    return spread.entropy


def transfer(dense: float, entropy: float, signed: bool = False) -> float:
    """Return TE = |H(dense) - H(removed)|, infinity if outputs are not finite; ``signed`` leaves the sign."""
    if not isfinite(entropy):
        return inf
    return dense - entropy if signed else abs(dense - entropy)
