"""What each layer is worth before anything is trained: every site removed by every style, one at a time.

Two passes over some images suffice for all of them: one fits all replacements, one compares the outputs of all variants
with those of the dense model. Tails take one more each. No labels are needed; nothing is trained or written here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import zip_longest
from math import inf, isfinite
from operator import length_hint
from typing import Any

import torch
from torch import Tensor, nn

from hetdpt.adapters.anatomy import Handle
from hetdpt.core.errors import DataError, ModelError, PlanError
from hetdpt.core.format import sides
from hetdpt.core.modules import Peeked, clone, is_once, memory_advice, require_more_than_once
from hetdpt.core.plan import KINDS, Kind, Measurement, Plan, Site
from hetdpt.core.styles import PRESETS, STYLES, styles_for
from hetdpt.measurement.agreement import Damage
from hetdpt.measurement.costs import Costs
from hetdpt.measurement.kept_blocks import finished, trimmed
from hetdpt.measurement.speed import LatencyTable, latency_table
from hetdpt.selection.entropy import Spread, entropy_of_dense, transfer
from hetdpt.surgery.calibrate import Fitted, fit_sites, replaced
from hetdpt.surgery.fit_tail import fit_tail_
from hetdpt.surgery.prefix_cache import MEMORY, CachedVariants, Probe
from hetdpt.surgery.record import require_record
from hetdpt.surgery.remove import place_, plan_without, ready_for, without
from hetdpt.surgery.replacement import why_not_removable

LIMIT = 0.5
"""Of the damage of an output that ignores the image: a style that does more does not replace a layer."""
PURPOSE = "a scan"
Progress = Callable[[str, int, int], None]
"""Called with (what is being done, steps done, steps in all)."""
LONGEST = 2  # a tail takes at most one in so many blocks
Variant = tuple[Site, str]
"""A site and the style that removes it."""


@dataclass(frozen=True)
class ScanRow:
    """The effect of removing one site by one style."""

    site: Site
    style: str
    te: float
    """Transfer entropy of this removal on the logits, in nats; infinity if an output is not finite."""
    r2: float | None
    """How well the replacement fits the layer on held-out images; None for styles that are not fitted."""
    damage: float
    """KL(dense || changed) in nats or, without classes, the error of the features; see ``Damage``."""
    is_replaceable: bool
    """Whether this style replaces the layer: its damage is at most ``LIMIT`` of that of ignoring the image."""
    macs_saved: int
    """Multiply-accumulates per image that the merged model saves, trimmed if it can be."""
    ms_saved: Measurement | None
    """Milliseconds per batch that it saves; None if nothing was timed."""


@dataclass(frozen=True)
class ScanTail:
    """The effect of a tail: patches are not updated in the last ``blocks`` blocks, and no other layer is removed."""

    blocks: int
    te: float
    r2: float | None
    """The worst of the fits of its blocks on held-out images; None for a tail of 1, which is exact."""
    damage: float
    macs_saved: int
    ms_saved: float | None
    """Milliseconds per batch, predicted from those of single blocks; None if nothing was timed."""


@dataclass(frozen=True)
class ScanTable:
    """Every site of a model under every style, in order of execution, and tails."""

    rows: tuple[ScanRow, ...]
    tails: tuple[ScanTail, ...]
    """From the shortest; none if the output depends on patches."""
    is_classifier: bool
    """Whether damage is in nats; else it is the fraction of the features that is lost."""
    uninformed: float
    """The damage of the best output that ignores the image; see ``Uninformed``."""
    dense: Costs
    latency: Measurement | None
    """Of the dense model; None if nothing was timed."""
    fitted_on: int
    """Images."""
    judged_on: int
    is_apart: bool
    """Whether these are other images than those fitted on."""

    @property
    def limit(self) -> float:
        """The most damage with which a style still replaces a layer."""
        return LIMIT * self.uninformed

    @property
    def sites(self) -> tuple[Site, ...]:
        return tuple(dict.fromkeys(row.site for row in self.rows))

    @property
    def blocks(self) -> int:
        return 1 + max(site.block for site in self.sites)

    def of(self, site: Site) -> tuple[ScanRow, ...]:
        return tuple(row for row in self.rows if row.site == site)

    def best(self, site: Site) -> ScanRow:
        """Return the style with the least damage, on a tie the one that saves more."""
        return min(self.of(site), key=lambda row: (row.damage, -row.macs_saved))

    @property
    def irreplaceable(self) -> tuple[Site, ...]:
        """The sites that no style replaces."""
        return tuple(site for site in self.sites if not any(row.is_replaceable for row in self.of(site)))

    def to_dict(self) -> dict[str, Any]:
        """Return values for JSON, which has no infinity: None stands for it."""
        values = asdict(self)
        for row in (*values["rows"], *values["tails"]):
            row |= {name: row[name] if isfinite(row[name]) else None for name in ("te", "damage")}
        return values

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=1)

    @classmethod
    def from_json(cls, text: str) -> ScanTable:
        """Return what ``to_json`` wrote."""
        values = json.loads(text)
        dense, latency = Costs(**values["dense"]), _measurement(values["latency"])
        rows = {
            "rows": tuple(map(_row, values["rows"])),
            "tails": tuple(ScanTail(**_finite(tail)) for tail in values["tails"]),
        }
        return cls(**{**values, **rows, "dense": dense, "latency": latency})


def _row(values: dict[str, Any]) -> ScanRow:
    return ScanRow(**{**_finite(values), "site": Site(**values["site"]), "ms_saved": _measurement(values["ms_saved"])})


def _finite(values: dict[str, Any]) -> dict[str, Any]:
    """Return ``values`` with the infinity that JSON does not have."""
    return values | {name: inf if values[name] is None else values[name] for name in ("te", "damage")}


def _measurement(values: dict[str, Any] | None) -> Measurement | None:
    return Measurement(**values) if values else None


class Uninformed:
    """The damage of the best output that is the same for every image; computed in a stream, in float64.

    For a classifier that output is the mean of the dense predictions q, and the damage E KL(p || q) = H(q) - E H(p):
    all the information of the dense outputs about the image, at most the logarithm of the number of images. For a model
    without classes it is the mean of the features, and the damage their variance, E || f - E f ||^2 / E || f ||^2.

    >>> uninformed = Uninformed(is_classifier=True)
    >>> uninformed.add(torch.tensor([[50.0, 0.0], [0.0, 50.0]]))  # sure of two classes, one bit
    >>> f"{uninformed.value:.3f}"
    '0.693'
    """

    def __init__(self, is_classifier: bool) -> None:
        self.is_classifier = is_classifier
        self.spread = Spread()
        self.whole = 0.0
        """Sum of H(p), or of || f ||^2."""

    def add(self, dense: Tensor) -> None:
        """Add outputs (B, C) of the dense model."""
        dense = dense.detach().cpu().double()
        if self.is_classifier:
            logarithms = dense.log_softmax(1)
            dense = logarithms.exp()
            self.whole -= (dense * logarithms).sum().item()
        else:
            self.whole += dense.square().sum().item()
        self.spread.add(dense)

    @property
    def value(self) -> float:
        count = self.spread.count
        if not self.is_classifier:
            return count * self.spread.variance.sum().item() / self.whole
        mean = (self.spread.origin + self.spread.mean).clamp(min=0)  # of rounding
        return max(-torch.xlogy(mean, mean).sum().item() - self.whole / count, 0.0)


def scan(
    model: nn.Module,
    batches: Iterable[Tensor],
    *,
    judge: Iterable[Tensor] | None = None,
    memory: int = MEMORY,
    batch: int | None = None,
    latency: bool = True,
    progress: Progress | None = None,
) -> ScanTable:
    """Return the effect of removing each site by each style that can remove it, one at a time, without training.

    Replacements are fitted on ``batches`` of images (B, C, H, W), prepared for the model; outputs are compared on those
    of ``judge``, by default the same. Images that were not fitted on give the damage to expect on others. ``memory``
    (bytes) bounds the cache for one batch. ``latency`` times the merged blocks on ``batch`` images at once (256 on a
    GPU, 8 on a CPU); styles with the same costs (``Style.costs_like``) are measured once.

    A style replaces a layer (``is_replaceable``) if it does at most half (``LIMIT``) of the damage of an output that
    ignores the image (``Uninformed``), which keeps half of the information about the images. On ViT-Tiny and ImageNet
    about half of the accuracy is left there. The quality of the fit does not tell: the first FFN is fitted with
    R^2 = 0.67, better than most, and the model is at chance.

    A pruned model is scanned with the removal it was pruned with.

    >>> import timm
    >>> model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, num_classes=10)
    >>> found = scan(model, [torch.randn(8, 3, 32, 32)], latency=False)
    >>> [row.style for row in found.rows][:7]
    ['skip', 'norm', 'constant', 'position', 'linear', 'identity', 'calibrated']
    """
    if judge is None:
        require_more_than_once(batches, "twice: to fit the replacements, and to compare")
    images = Peeked(batches, model, PURPOSE)
    size = images.size
    base = ready_for(images.first, model, "plain")
    offered = _offered(base)
    fits = _fit(base, offered, images, progress)
    fitted_on = images.count
    tails = _tails(base, images, progress)
    variants = tails | {key: _variant(base, key, fits) for key in offered}
    judge = images if judge is None or judge is batches else judge
    found = _compare(base, variants, judge, size, memory, progress)
    dense, macs = _macs_saved(base, offered, size, progress)
    timed, times = _ms_saved(base, size, batch, progress) if latency else (None, {})
    rows = tuple(
        ScanRow(
            site=site,
            style=style,
            te=found.te[site, style],
            r2=fits[site, style].fit.r2 if (site, style) in fits else None,
            damage=found.damage[site, style],
            is_replaceable=found.damage[site, style] <= LIMIT * found.uninformed,
            macs_saved=macs[site, style],
            ms_saved=times.get((site, style)) or times.get((site, _costs_as(style))),
        )
        for site, style in offered
    )
    return ScanTable(
        rows=rows,
        tails=tuple(_tail_row(tail, model, found, dense, timed) for tail, model in enumerate(tails.values(), 1)),
        is_classifier=found.is_classifier,
        uninformed=found.uninformed,
        dense=dense,
        latency=timed.dense if timed else None,
        fitted_on=fitted_on,
        judged_on=found.images,
        is_apart=judge is not images,
    )


def _tails(model: nn.Module, batches: Iterable[Tensor], progress: Progress | None) -> dict[Variant | int, nn.Module]:
    """Return copies with a tail, by its length; none if the model has one already, or its output depends on patches.

    Images that come only once are gone; then there is a tail of 1, which is exact.
    """
    record = require_record(model)
    found: dict[Variant | int, nn.Module] = {}
    if record.plan.tail:
        return found
    longest = 1 if is_once(batches) else record.survey.anatomy.blocks // LONGEST
    for tail in range(1, longest + 1):
        step = partial(_move_part, progress, "fitting tails", tail - 1, longest) if progress else None
        try:
            found[tail] = fit_tail_(
                place_(clone(model), replace(record.plan, tail=tail, fits=())), batches, progress=step
            )
        except (ModelError, PlanError):  # its output depends on patches
            break
    return found


def _tail_row(tail: int, model: nn.Module, found: _Found, dense: Costs, timed: LatencyTable | None) -> ScanTail:
    record = require_record(model)
    fits = [fit.r2 for fit in record.plan.fits if fit.kind == "tail"]
    macs = dense.macs - Costs.of(model, record.survey.input_size).macs
    ms = (timed.prices.dense - timed.prices.of(Plan(tail=tail))).ms if timed else None
    return ScanTail(tail, found.te[tail], min(fits, default=None), found.damage[tail], macs, ms)


def _offered(model: nn.Module) -> list[Variant]:
    record = require_record(model)
    return [(handle.site, style) for handle in record.left for style in _styles(handle, record.plan)]


def _styles(handle: Handle, plan: Plan) -> list[str]:
    """Return the styles that can remove a site; those of last resort only if another one cannot."""
    names = (plan.style_of(handle.site.kind).name,) if len(plan) else _shared_styles(handle.site.kind)
    able = [name for name in names if why_not_removable(handle, STYLES[name]) is None]
    usual = [name for name in able if not STYLES[name].is_last_resort]
    is_any_unable = len(able) < len(names)
    return able if is_any_unable or len(plan) else usual


def _shared_styles(kind: Kind) -> list[str]:
    """Return the styles of ``kind`` that treat all tokens alike; that the class token keeps its FFN is not compared."""
    return [name for name in styles_for(kind) if STYLES[name].class_token == "share"]


def _timed() -> list[tuple[str, str]]:
    """Return pairs of styles to time together, so that each style with separate costs is in one of them."""
    attention, activation = ([name for name in _shared_styles(kind) if not STYLES[name].costs_like] for kind in KINDS)
    rest = zip_longest(attention, activation)
    plain = PRESETS["plain"]
    return [(one or plain.attention, other or plain.activation) for one, other in rest]


def _costs_as(style: str) -> str:
    return STYLES[style].costs_like or style


def _fit(
    model: nn.Module, offered: list[Variant], batches: Iterable[Tensor], progress: Progress | None
) -> dict[Variant, Fitted]:
    """Return a replacement for every variant that is fitted, all from one pass if memory allows."""
    wanted: dict[Site, list[str]] = {}
    for site, style in offered:
        if STYLES[style].fit:
            wanted.setdefault(site, []).append(style)
    if not wanted:
        return {}
    return fit_sites(model, wanted, batches, progress=partial(progress, "fitting") if progress else None)


def _variant(model: nn.Module, key: Variant, fits: dict[Variant, Fitted]) -> nn.Module:
    return replaced(model, fits[key]) if key in fits else without(model, *key)


@dataclass(frozen=True)
class _Found:
    """The measures of all variants from one pass over the images."""

    te: dict[Variant | int, float]
    damage: dict[Variant | int, float]
    is_classifier: bool
    uninformed: float
    images: int


def _compare(
    model: nn.Module,
    variants: dict[Variant | int, nn.Module],
    judge: Iterable[Tensor],
    size: tuple[int, int, int],
    memory: int,
    progress: Progress | None,
) -> _Found:
    """Return how far the outputs of each variant are from those of ``model``, from one pass over ``judge``."""
    judged = Peeked(judge, model, PURPOSE)
    first = judged.first
    if first.shape[1:] != size:
        raise DataError(f"the images to judge on are {sides(first.shape[1:])} but those to fit on {sides(size)}")
    side_by_side = CachedVariants(model, variants, Probe(), first, memory)
    damages = {key: Damage.to(model) for key in variants}
    spreads: dict[Variant | int | None, Spread] = {key: Spread() for key in (None, *variants)}
    uninformed = Uninformed(Damage.to(model).is_classifier)
    done, dense = 0, first.new_zeros(0)
    for images in judged:
        with memory_advice(f"{len(images)} images at once do not fit in memory; give smaller batches or memory=0"):
            for key, values in side_by_side.answers(images):
                spreads[key].add(values)
                if key is None:
                    dense = values
                    uninformed.add(values)
                else:
                    damages[key].add(dense, values)
                done += 1
                if progress:
                    progress("comparing", done, length_hint(judged) * len(spreads))
    entropy = entropy_of_dense(spreads[None])
    return _Found(
        {key: transfer(entropy, spreads[key].entropy) for key in variants},
        {key: damage.value for key, damage in damages.items()},
        uninformed.is_classifier,
        uninformed.value,
        spreads[None].count,
    )


def _macs_saved(
    model: nn.Module, offered: list[Variant], size: tuple[int, int, int], progress: Progress | None
) -> tuple[Costs, dict[Variant, int]]:
    """Return the costs of ``model`` and the MACs that each variant saves, equal costs counted once.

    They are those of a model that is trimmed, if it can be.
    """
    dense, small = Costs.of(model, size), trimmed(model)
    whole, saved = Costs.of(small, size).macs, dict[Variant, int]()
    for done, (site, style) in enumerate(offered, 1):
        same = site, _costs_as(style)
        if same not in saved:
            saved[site, style] = whole - Costs.of(finished(small, plan_without(small, site, style)), size).macs
        saved.setdefault((site, style), saved.get(same, 0))
        if progress:
            progress("counting", done, len(offered))
    return dense, saved


def _ms_saved(
    model: nn.Module, size: tuple[int, int, int], batch: int | None, progress: Progress | None
) -> tuple[LatencyTable, dict[Variant, Measurement]]:
    """Return the times of ``model`` and its blocks, and what each style that is timed saves of a batch."""
    record = require_record(model)
    removals = [record.plan.styles] if len(record.plan) else _timed()
    saved: dict[Variant, Measurement] = {}
    tables = []
    for number, styles in enumerate(removals):
        move = partial(_move_part, progress, "timing", number, len(removals)) if progress else None
        table = latency_table(model, size, batch=batch, removal=styles, progress=move)
        tables.append(table)
        plan = Plan(removal=styles)
        saved |= {(one.site, plan.style_of(one.site.kind).name): one.saved for one in table.savings}
    return tables[0], saved


def _move_part(progress: Progress, what: str, number: int, times: int, done: int, steps: int) -> None:
    progress(what, number * steps + done, times * steps)
