"""Width pruning: fewer channels, hidden features, heads and head dimensions in a model, with or without all its layers.

What is removed is decided by ranking within groups of the same structure (isomorphic; Fang et al., 2024). Nothing is
trained here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from operator import length_hint
from sys import float_info
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hetdpt.adapters.heads import logits_of
from hetdpt.core.errors import DataError, ModelError, PlanError, first_line
from hetdpt.core.goals import BOUNDS, GOALS, Goal
from hetdpt.core.modules import checked, clone, evaluating, is_once, memory_advice
from hetdpt.core.plan import Plan
from hetdpt.core.progress import StageProgress
from hetdpt.measurement.costs import Costs
from hetdpt.reduce.width.choice import Kept, Ratios, choose, cut_of, removed_ratios, rescale_
from hetdpt.reduce.width.errors import StreamReads, score_by_error
from hetdpt.reduce.width.refit import Inputs, refit_, watching
from hetdpt.reduce.width.scores import (
    Importance,
    Narrowable,
    attentions_of,
    ffns_of,
    gradients,
    require_narrowable,
    score,
)
from hetdpt.reduce.width.search import RUNGS, RatioSearch, Timing
from hetdpt.reduce.width.shapes import cut_, map_of_heads, mark_narrowed_
from hetdpt.surgery.arrange import arrange_, take_off_, with_all_tokens
from hetdpt.surgery.fit_tail import fit_tail_
from hetdpt.surgery.merge import merge_
from hetdpt.surgery.record import InputSize, record_of, require_record
from hetdpt.surgery.remove import place_

Batches = Iterable[Any]
"""Images (B, C, H, W), or pairs of them and their labels (B,)."""
PURPOSE = "width pruning"
STEP, WIDE = 8, 1024  # measured at equal MACs on a CPU: 1.06x of DeiT-S, 1.09x of DeiT-B, 1.01x of ViT-Tiny (768)


@dataclass(frozen=True, kw_only=True)
class WidthConfig:
    """How width is pruned."""

    importance: Importance = "obs"
    """Score of what is removed: obs (optimal brain surgeon: the error that is left after a refit; no labels), taylor
    (the paper's: |weight * gradient|, summed over what is removed together), l2 or random."""
    round_to: int | None = None
    """Make sizes multiples of this; 8 for wide models by default. None: ``STEP`` where a target is searched for in a
    model with FFNs of ``WIDE`` hidden features, which makes as many MACs faster; else 1."""
    shares: tuple[float, float, float, float] | None = None
    """How much to remove of embedding, hidden features, heads and head dimensions, relative to each other, such as
    1,1,1,0.5. None: the first of ``RUNGS`` on which no size loses more than half, without the embedding where that
    cannot be narrowed."""
    refits: bool = True
    """Fit the layers behind removed features again, on the images (see ``reduce.width.refit``)."""
    seed: int = 0
    """Seed of the importance ``random`` and, in a run, of the choice of images."""

    def __post_init__(self) -> None:
        if self.importance not in (there := get_args(Importance)):
            raise PlanError(f"importance is one of {', '.join(there)}, not {self.importance!r}")
        if self.round_to is not None and self.round_to < 1:
            raise PlanError(f"sizes are rounded to multiples of 1 or more, not {self.round_to}")
        if self.shares is not None and not _are_shares(self.shares):
            raise PlanError(
                "shares are four numbers from 0 to 1, of embedding, hidden, heads and head dims, one of them above 0, "
                f"not {self.shares!r}"
            )


def _are_shares(values: Any) -> bool:
    if not isinstance(values, tuple | list) or len(values) != len(Ratios().by_name):
        return False
    return all(isinstance(share, int | float) and 0 <= share <= 1 for share in values) and any(values)


@dataclass(frozen=True)
class Narrowed:
    """A narrowed model, not merged yet, and its costs after merging."""

    model: nn.Module
    ratios: Ratios
    """What was actually removed of each size."""
    macs: int
    params: int
    speedup: float | None
    tried: int
    """How many ratios the search has tried."""


def narrow_(
    model: nn.Module,
    ratios: Ratios,
    config: WidthConfig | None = None,
    batches: Batches = (),
    input_size: InputSize | None = None,
) -> nn.Module:
    """Remove the fraction ``ratios`` of the width of ``model`` with the lowest scores, and return the model.

    ``batches`` are images, for ``obs`` and the refit, and their labels for ``taylor``. Without the refit, and with
    the full embedding, the model computes what it did with the removed entries set to 0. FFNs without their
    activation that are worth merging keep their hidden features. ``input_size`` (C, H, W) is read from the model if it
    is not given.

    >>> import timm
    >>> model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, num_classes=10)
    >>> config = WidthConfig(importance="l2", refits=False)
    >>> model = narrow_(model, Ratios(embedding=0.25, hidden=0.5), config)
    >>> model.embed_dim, model(torch.randn(1, 3, 32, 32)).shape
    (144, torch.Size([1, 10]))
    """
    config = config or WidthConfig()
    seen = WidthSurvey.of(model, config, batches, ratios, input_size)
    return _with_tail_(seen.apply_(model, seen.choose(ratios)), config, batches)


def narrow_to(
    model: nn.Module,
    *,
    ratio: float | None = None,
    config: WidthConfig | None = None,
    batches: Batches = (),
    dense: nn.Module | None = None,
    batch: int | None = None,
    input_size: InputSize | None = None,
    progress: StageProgress | None = None,
    **goal: float | None,
) -> Narrowed:
    """Return a narrowed copy of ``model`` that meets one goal within 2 %, or with ``ratio`` times the shares removed.

    The goal is one of ``macs``, ``params`` and ``speedup`` (``core.goals.GOALS``). It is fully met if that is possible
    within 2 % as well. ``macs`` and ``params`` are those of the copy after merging, ``speedup`` is measured against
    ``dense``, the given model by default, the two alternating on a ``batch`` of images (by default 256 on a GPU, 8 on a
    CPU). The search is over one number, which all sizes follow by ``config.shares``; if that is too coarse, hidden
    features make up the difference. For a goal out of reach ``PlanError`` says how near one can get. A ratio without
    shares applies to all sizes that can be narrowed, half of it to head dimensions; ``input_size`` as in ``narrow_``.
    """
    config = config or WidthConfig()
    row, target = _target(ratio, goal)
    shares = Ratios(*config.shares) if config.shares else None
    seen = WidthSurvey.of(model, config, batches, shares or RUNGS[-1], input_size, progress).in_steps()
    search = RatioSearch(model, seen, row, target, Timing(dense or model, batch), progress)
    if row is None:
        best = search.look((shares or seen.rungs[-1]).times(target))
    else:
        best = search.find(shares) if shares else search.find_gently()
    kept = seen.choose(best.ratios)
    narrowed = _with_tail_(seen.apply_(deepcopy(model), kept), config, batches)
    return Narrowed(narrowed, removed_ratios(seen.parts, kept), best.macs, best.params, best.speedup, search.count)


def _target(ratio: float | None, goal: Mapping[str, float | None]) -> tuple[Goal | None, float]:
    """Return the goal and its value, or None and the ratio; ``PlanError`` unless exactly one is given."""
    rows = {"ratio": None, **{name: GOALS[name] for name in BOUNDS}}
    given = {name: value for name, value in {"ratio": ratio, **goal}.items() if value is not None}
    if len(given) != 1 or not given.keys() <= rows.keys():
        raise PlanError(f"expected exactly one of {', '.join(rows)}, got {', '.join(given) or 'none'}")
    [(name, value)] = given.items()
    if not 0 < value <= (1 if name == "ratio" else float_info.max):
        raise PlanError(f"{name} is {value}; expected a number above 0{' and at most 1' if name == 'ratio' else ''}")
    return rows[name], value


@dataclass(frozen=True)
class WidthSurvey:
    """What one pass over a model found: the scores of its parts, and the inputs of its layers."""

    parts: Narrowable
    inputs: Inputs
    config: WidthConfig
    input_size: InputSize

    @classmethod
    def of(
        cls,
        model: nn.Module,
        config: WidthConfig,
        batches: Batches,
        ratios: Ratios,
        input_size: InputSize | None = None,
        progress: StageProgress | None = None,
    ) -> WidthSurvey:
        copy = clone(model)
        if record_of(copy) is None:
            place_(copy, Plan(), input_size)
        copy = with_all_tokens(copy)  # what is not computed later counts as well: it has the same weights
        require_narrowable(copy)
        inputs: Inputs = {}
        needed = _reduced(copy, ratios) if config.refits or config.importance == "obs" else []
        with gradients(copy), evaluating(copy):
            if config.importance == "obs":
                parts = score(copy, "obs")
                reads = StreamReads(parts.stream if ratios.embedding else None)
                with reads.watching(copy):
                    _look(copy, config, batches, needed, inputs, progress)
                parts = score_by_error(copy, parts, inputs, reads)
            else:
                _look(copy, config, batches, needed, inputs, progress)
                parts = score(copy, config.importance, config.seed)
        return cls(parts, inputs, config, require_record(copy).survey.input_size)

    @property
    def rungs(self) -> tuple[Ratios, ...]:
        """Those of ``RUNGS`` that apply to the model."""
        return RUNGS if self.parts.stream else RUNGS[:-1]

    def in_steps(self) -> WidthSurvey:
        """Return the same with sizes in the default steps for such a model, unless the config sets them."""
        if self.config.round_to is not None or max((len(one.scores) for one in self.parts.hidden), default=0) < WIDE:
            return self
        return replace(self, config=replace(self.config, round_to=STEP))

    def choose(self, ratios: Ratios) -> Kept:
        return choose(self.parts, ratios, self.config.round_to)

    def apply_(self, model: nn.Module, kept: Kept) -> nn.Module:
        """Narrow ``model`` to ``kept``; if that is impossible the model is unchanged."""
        self.costs(model, kept)  # sizes that do not run are refused before anything is changed
        for layer, indices in self.behind(kept).items():
            if layer in self.inputs and self.config.refits:
                refit_(_linear(model, layer), indices, self.inputs[layer])
        return rescale_(self.shrink_(model, kept), self.parts, kept)

    def costs(self, model: nn.Module, kept: Kept) -> Costs:
        """Return the costs of ``model`` narrowed and merged; ``ModelError`` if it would not run."""
        shape = clone(model).to("meta")  # sizes without values
        try:
            merged = merge_(self.shrink_(shape, kept))
            return Costs.of(merged, self.input_size)
        except (ModelError, RuntimeError) as error:  # sizes do not fit together
            raise ModelError(
                f"{type(model).__name__} does not run with these sizes: {first_line(error)}; "
                "keep some of them, the embedding first"
            ) from error

    def shrink_(self, model: nn.Module, kept: Kept) -> nn.Module:
        """Change the sizes of ``model`` as ``apply_`` does, without refitting or rescaling."""
        if record_of(model) is None:
            place_(model, Plan(), self.input_size)
        maps = {block: self._cut_map(model, block, kept, *pair) for block, pair in take_off_(model).items()}
        cut_(model, cut_of(model, self.parts, kept))
        before = require_record(model).channels
        if kept.stream is None:
            mark_narrowed_(model, None, before)
        else:
            left = tuple(int(channel) for channel in kept.stream)
            mark_narrowed_(model, len(left), left if before is None else tuple(before[channel] for channel in left))
        return arrange_(model, maps)

    def _cut_map(self, model: nn.Module, block: int, kept: Kept, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        """Return what is left of the map that gives the keys and values of patches in a block of a tail."""
        paths = {h.parts.core: h.site.block for h in require_record(model).survey.handles if h.parts}
        for number, table in kept.heads.items():
            if paths[self.parts.heads[number].attention.path] == block:
                weight, bias = map_of_heads(weight, bias, table.flatten())
        return (weight if kept.stream is None else weight[:, kept.stream.to(weight.device)]), bias

    def behind(self, kept: Kept) -> dict[str, Tensor]:
        """Return the layers after removed features, and which of their inputs are kept."""
        hidden = {self.parts.hidden[number].ffn.second: indices for number, indices in kept.hidden.items()}
        return hidden | {self.parts.heads[n].attention.out: table.flatten() for n, table in kept.heads.items()}


def _with_tail_(model: nn.Module, config: WidthConfig, batches: Batches) -> nn.Module:
    """Fit the tail of a narrowed model again, if it has one and the images can be read again."""
    if not config.refits or is_once(batches):
        return model
    return fit_tail_(model, (batch[0] if isinstance(batch, tuple | list) else batch for batch in batches))


def _linear(model: nn.Module, path: str) -> nn.Linear:
    layer = model.get_submodule(path)
    assert isinstance(layer, nn.Linear)
    return layer


def _reduced(model: nn.Module, ratios: Ratios) -> list[str]:
    """Return the layers whose inputs, other than those from the stream, will be reduced."""
    behind = [ffn.second for ffn in ffns_of(model)] if ratios.hidden else []
    return behind + ([one.out for one in attentions_of(model)] if ratios.heads or ratios.head_dims else [])


def _look(
    model: nn.Module,
    config: WidthConfig,
    batches: Batches,
    watched: list[str],
    inputs: Inputs,
    progress: StageProgress | None,
) -> None:
    """Run ``model`` on the images: sum gradients if importance needs them, and inputs of the ``watched`` layers."""
    is_taylor = config.importance == "taylor"
    if config.importance not in ("obs", "taylor") and not watched:
        return
    with watching(model, watched, inputs), torch.set_grad_enabled(is_taylor):
        for done, (images, labels) in enumerate(_pairs(model, batches, config.importance), 1):
            with memory_advice(f"{len(images)} images at once do not fit in memory; give smaller batches"):
                answer = model(images)
                if is_taylor:
                    _loss(answer, labels).backward()
            if progress:
                progress("measuring importance on images", done, length_hint(batches))


def _pairs(model: nn.Module, batches: Batches, importance: Importance) -> Iterator[tuple[Tensor, Any]]:
    """Yield images on the device and in the dtype of ``model``, and their labels."""
    labels: list[Any] = [None]

    def images() -> Iterator[Any]:
        for batch in batches:
            is_pair = isinstance(batch, tuple | list) and len(batch) == 2
            labels[0] = batch[1] if is_pair else None
            if importance == "taylor" and labels[0] is None:
                raise DataError(
                    "importance 'taylor' needs labels; give batches of (images, labels), or use importance 'obs'"
                )
            yield batch[0] if is_pair else batch

    if length_hint(batches, -1) == 0:
        needs, instead = {
            "obs": ("importance 'obs' needs images", "use importance 'l2' with refits=False"),
            "taylor": ("importance 'taylor' needs images and labels", "use importance 'l2' with refits=False"),
        }.get(importance, ("the refit needs images", "leave it out (refits=False)"))
        raise DataError(f"{needs}, but got none; give batches, or {instead}")
    for checked_images in checked(images(), model, PURPOSE):
        yield checked_images, labels[0]


def _loss(answer: Any, labels: Tensor) -> Tensor:
    """Return the cross-entropy, summed over images, so that every image has the same weight."""
    logits = logits_of(answer)
    classes = logits.shape[-1]
    if len(labels) != len(logits) or not bool(((labels >= 0) & (labels < classes)).all()):
        raise DataError(
            f"labels are one number from 0 to {classes - 1} for each of {len(logits)} images, but got "
            f"{labels.tolist()[:4]}; were they made for another model?"
        )
    return F.cross_entropy(logits, labels.to(logits.device), reduction="sum")
