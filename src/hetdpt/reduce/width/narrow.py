"""Width pruning: fewer channels, hidden features, heads and dimensions of heads in a model that may have lost layers.

What goes is decided by isomorphic ranking (Fang et al., 2024): like is compared with like. Nothing is trained here.
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
from hetdpt.core.modules import checked, clone, evaluating, memory_advice
from hetdpt.core.plan import Plan
from hetdpt.measurement.costs import Costs
from hetdpt.reduce.width.choice import Kept, Ratios, choose, cut_of, gone, rescale_
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
from hetdpt.reduce.width.search import RUNGS, Progress, RatioSearch, Timing
from hetdpt.reduce.width.shapes import cut_, mark_narrowed_
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

    importance: Importance = "taylor"
    """What a piece is worth: taylor (|weight * gradient|, summed over what is removed together), l2 or random."""
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
    """Of ``random`` and, in a run, of the images that are looked at."""

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
    """A narrowed model, not merged yet, and what it costs once it is."""

    model: nn.Module
    ratios: Ratios
    """What really went of each size."""
    macs: int
    params: int
    speedup: float | None
    tried: int
    """How many ratios the search has looked at."""


def narrow_(
    model: nn.Module,
    ratios: Ratios,
    config: WidthConfig | None = None,
    batches: Batches = (),
    input_size: InputSize | None = None,
) -> nn.Module:
    """Take the part ``ratios`` of its width from ``model``, what matters least, and return it.

    ``batches`` are images and labels, for ``taylor`` and for the refit (which needs no labels). Without the refit, and
    with the embedding as it was, the model computes what it did with the removed pieces set to 0. FFNs that lost their
    activation and are worth merging keep their hidden features. ``input_size`` (C, H, W) is taken from the model where
    it says so.

    >>> import timm
    >>> model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, num_classes=10)
    >>> config = WidthConfig(importance="l2", refits=False)
    >>> model = narrow_(model, Ratios(embedding=0.25, hidden=0.5), config)
    >>> model.embed_dim, model(torch.randn(1, 3, 32, 32)).shape
    (144, torch.Size([1, 10]))
    """
    config = config or WidthConfig()
    seen = WidthSurvey.of(model, config, batches, ratios, input_size)
    return seen.apply_(model, seen.choose(ratios))


def narrow_to(
    model: nn.Module,
    *,
    ratio: float | None = None,
    config: WidthConfig | None = None,
    batches: Batches = (),
    dense: nn.Module | None = None,
    batch: int | None = None,
    input_size: InputSize | None = None,
    progress: Progress | None = None,
    **goal: float | None,
) -> Narrowed:
    """Return a narrowed copy of ``model`` that meets one goal within 2 %, or takes ``ratio`` times the shares.

    The goal is one of ``macs``, ``params`` and ``speedup`` (``core.goals.GOALS``). It is met, and not only nearly met,
    where that is possible within 2 % as well.
    ``macs`` and ``params`` are those of the copy once it is merged, ``speedup`` is measured against ``dense``, the
    given model by default, the two taking turns on a ``batch`` of images (by default 256 on a GPU, 8 on a CPU). One
    number is searched for, all sizes following by ``config.shares``; where that is too coarse, hidden features make up
    the rest. A target out of reach is a ``PlanError`` that says how near one can come. A ratio without shares takes
    from all sizes that can go, half as much from the dimensions of heads. ``input_size`` is as in ``narrow_``.
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
    narrowed = seen.apply_(deepcopy(model), kept)
    return Narrowed(narrowed, gone(seen.parts, kept), best.macs, best.params, best.speedup, search.count)


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
    """What was read off a model once: what each piece of it is worth, and what layers are given."""

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
        progress: Progress | None = None,
    ) -> WidthSurvey:
        copy = clone(model)
        if record_of(copy) is None:
            place_(copy, Plan(), input_size)
        require_narrowable(copy)
        inputs: Inputs = {}
        with gradients(copy), evaluating(copy):
            _look(copy, config, batches, _refitted(copy, ratios) if config.refits else [], inputs, progress)
            parts = score(copy, config.importance, config.seed)
        return cls(parts, inputs, config, require_record(copy).survey.input_size)

    @property
    def rungs(self) -> tuple[Ratios, ...]:
        """Those of ``RUNGS`` that the model can go down to."""
        return RUNGS if self.parts.stream else RUNGS[:-1]

    def in_steps(self) -> WidthSurvey:
        """Return the same with sizes in the steps that are usual for such a model, unless the config says which."""
        if self.config.round_to is not None or max((len(one.scores) for one in self.parts.hidden), default=0) < WIDE:
            return self
        return replace(self, config=replace(self.config, round_to=STEP))

    def choose(self, ratios: Ratios) -> Kept:
        return choose(self.parts, ratios, self.config.round_to)

    def apply_(self, model: nn.Module, kept: Kept) -> nn.Module:
        """Make ``model`` as narrow as ``kept`` says; the model is as it was where that cannot be."""
        self.costs(model, kept)  # what does not run is refused before anything is changed
        for layer, indices in self._behind(kept).items():
            if layer in self.inputs:
                refit_(_linear(model, layer), indices, self.inputs[layer])
        return rescale_(self.shrink_(model, kept), self.parts, kept)

    def costs(self, model: nn.Module, kept: Kept) -> Costs:
        """Return what ``model`` would cost, merged; ``ModelError`` if it would not run at all."""
        shape = clone(model).to("meta")  # sizes without values
        try:
            merged = merge_(self.shrink_(shape, kept))
            return Costs.of(merged, self.input_size)
        except (ModelError, RuntimeError) as error:  # sizes do not fit together
            raise ModelError(
                f"{type(model).__name__} does not run with the sizes asked for: {first_line(error)}; "
                "leave out those it cannot lose, the embedding first"
            ) from error

    def shrink_(self, model: nn.Module, kept: Kept) -> nn.Module:
        """Do what ``apply_`` does as far as sizes are concerned."""
        if record_of(model) is None:
            place_(model, Plan(), self.input_size)
        cut_(model, cut_of(model, self.parts, kept))
        mark_narrowed_(model, None if kept.stream is None else len(kept.stream))
        return model

    def _behind(self, kept: Kept) -> dict[str, Tensor]:
        """Return the layers behind what goes, and which of their inputs stay."""
        hidden = {self.parts.hidden[number].ffn.second: indices for number, indices in kept.hidden.items()}
        return hidden | {self.parts.heads[n].attention.out: table.flatten() for n, table in kept.heads.items()}


def _linear(model: nn.Module, path: str) -> nn.Linear:
    layer = model.get_submodule(path)
    assert isinstance(layer, nn.Linear)
    return layer


def _refitted(model: nn.Module, ratios: Ratios) -> list[str]:
    """Return the layers that will lose inputs other than the stream's."""
    behind = [ffn.second for ffn in ffns_of(model)] if ratios.hidden else []
    return behind + ([one.out for one in attentions_of(model)] if ratios.heads or ratios.head_dims else [])


def _look(
    model: nn.Module,
    config: WidthConfig,
    batches: Batches,
    refitted: list[str],
    inputs: Inputs,
    progress: Progress | None,
) -> None:
    """Run ``model`` on the images: sum up gradients if they are asked for, and what the ``refitted`` are given."""
    is_taylor = config.importance == "taylor"
    if not (is_taylor or refitted):
        return
    with watching(model, refitted, inputs), torch.set_grad_enabled(is_taylor):
        for done, (images, labels) in enumerate(_pairs(model, batches, is_taylor), 1):
            with memory_advice(f"{len(images)} images at once do not fit in memory; give smaller batches"):
                answer = model(images)
                if is_taylor:
                    _loss(answer, labels).backward()
            if progress:
                progress("looking at images", done, length_hint(batches))


def _pairs(model: nn.Module, batches: Batches, needs_labels: bool) -> Iterator[tuple[Tensor, Any]]:
    """Yield images as ``model`` wants them, and their labels."""
    labels: list[Any] = [None]

    def images() -> Iterator[Any]:
        for batch in batches:
            is_pair = isinstance(batch, tuple | list) and len(batch) == 2
            labels[0] = batch[1] if is_pair else None
            if needs_labels and labels[0] is None:
                raise DataError(
                    "importance 'taylor' needs labels; give batches of (images, labels), or use importance 'l2'"
                )
            yield batch[0] if is_pair else batch

    if length_hint(batches, -1) == 0:
        needs = "importance 'taylor' needs images and labels" if needs_labels else "the refit needs images"
        instead = "use importance 'l2'" if needs_labels else "leave it out (refits=False)"
        raise DataError(f"{needs}, but there are none; give batches, or {instead}")
    for checked_images in checked(images(), model, PURPOSE):
        yield checked_images, labels[0]


def _loss(answer: Any, labels: Tensor) -> Tensor:
    """Return the cross-entropy, summed over images, so that batches of any size count as much as they hold."""
    logits = logits_of(answer)
    classes = logits.shape[-1]
    if len(labels) != len(logits) or not bool(((labels >= 0) & (labels < classes)).all()):
        raise DataError(
            f"labels are one number from 0 to {classes - 1} for each of {len(logits)} images, but came "
            f"{labels.tolist()[:4]}; were they made for another model?"
        )
    return F.cross_entropy(logits, labels.to(logits.device), reduction="sum")
