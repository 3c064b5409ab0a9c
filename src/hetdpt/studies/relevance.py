"""The relevance of each patch to a class, for every attention layer; and how similar neighbouring layers are in that.

Relevance is gradient-weighted attention (Chefer et al., ICCV 2021, Eq. 5). With A (heads, N, N) the attention of a
block and y the logit of the class,

    A_bar = mean over heads of max(dy/dA * A, 0)

is (N, N): how much token j, attended to by token i, supports the class. The rollout (Chefer et al., CVPR 2021)
follows it through the L blocks,

    R = S_L ... S_2 S_1,    S = (I + A_bar), each row divided by its sum,

so the rows of R sum to 1. A map is a row, without the tokens that are not patches, in the grid of patches. It is the
row of the class token if the head reads it (of DeiT's two tokens the first, with the mean of its two logits), else the
mean of the rows of the patches that the head reads. Blocks with windows have no row for the whole image: there a map is
what each token receives, the mean over the rows of its window, and there is no rollout.

Nothing is drawn or written here, and the model is not changed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from math import comb, isnan
from random import Random
from statistics import fmean, stdev
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hetdpt.adapters.anatomy import Handle
from hetdpt.adapters.heads import logits_of
from hetdpt.adapters.maps import look
from hetdpt.adapters.models import num_classes_of
from hetdpt.adapters.windows import Windows, find_windows, not_tokens
from hetdpt.core.errors import DataError, ModelError
from hetdpt.core.modules import checked, clone, require_takes
from hetdpt.core.plan import Site
from hetdpt.surgery.arrange import with_all_tokens
from hetdpt.surgery.gate import gates_by_site
from hetdpt.surgery.record import record_of, survey_of

FEW = 10
"""With fewer images there is no interval: their spread is too uncertain."""
CHOICES = 20_000
"""At most this many other choices of layers are compared with the one that was made."""


@dataclass(frozen=True)
class Relevance:
    """The relevance maps of B images, of each attention layer and of the whole model."""

    sites: tuple[Site, ...]
    """The attention layers of the model, removed ones too, in order of execution."""
    maps: tuple[Tensor | None, ...]
    """Of each (B, rows, columns), in the grid of its tokens; None for one that is removed."""
    whole: Tensor | None
    """Of the whole model (B, rows, columns), by rollout; None for a model with windows."""
    rows: str
    """Whose rows they are: ``class token``, ``patches`` or ``windows``."""
    classes: tuple[int, ...]
    """The class that the maps of each image are for."""
    probabilities: tuple[float, ...]
    """Of these classes, by softmax."""
    answers: tuple[int, ...]
    """The most probable classes."""
    answer_probabilities: tuple[float, ...]


@dataclass(frozen=True)
class Pair:
    """The similarity of the maps of two neighbouring attention layers, for each image; nan if a map is blank."""

    blocks: tuple[int, int]
    cosines: tuple[float, ...]
    """Maps have no negative values, so this is between 0 and 1, and above 0 even for unrelated maps."""
    ranks: tuple[float, ...]
    """Spearman's correlation of ranks, -1 to 1."""


@dataclass(frozen=True)
class Contrast:
    """Whether the maps of removed layers are more similar to their neighbours' than those of kept ones."""

    removed: float
    """Mean over layers and images of the similarity of a layer to its one or two neighbours."""
    kept: float
    low: float | None
    """95 % interval of removed - kept over images, by the normal distribution; None with fewer than ``FEW``."""
    high: float | None
    as_alike: float
    """Part of all choices of as many layers that are at least as similar to their neighbours as this one."""

    @property
    def difference(self) -> float:
        return self.removed - self.kept


def explain(
    model: nn.Module,
    images: Tensor,
    target: int | Sequence[int] | None = None,
    *,
    batch_size: int = 8,
    progress: Callable[[int, int], None] | None = None,
) -> Relevance:
    """Return the relevance maps of all attention layers of ``model`` for ``images`` (B, C, H, W), prepared for it.

    ``target`` is the class that maps are for, or one for each image; the most probable one of each by default.

    >>> import timm
    >>> model = timm.create_model("vit_tiny_patch16_224", depth=2, num_classes=10, img_size=64)
    >>> found = explain(model, torch.randn(3, 3, 64, 64), target=7)
    >>> len(found.maps), found.whole.shape, found.classes
    (2, torch.Size([3, 4, 4]), (7, 7, 7))
    """
    require_classifier(model)
    model = _with_all_tokens(model)
    [images] = checked([images], model, "relevance")
    require_takes(clone(model).eval(), images)
    targets = _targets(target, len(images))
    channels, height, width = images.shape[1:]
    handles = [h for h in survey_of(model, (channels, height, width)).handles if h.site.kind == "attention"]
    left = _left(model, handles)
    parts = []
    for start in range(0, len(images), batch_size):
        some = slice(start, start + batch_size)
        parts.append(_explain(model, left, images[some], targets[some]))
        if progress:
            progress(min(some.stop, len(images)), len(images))
    return _joined(tuple(h.site for h in handles), left, parts)


@dataclass(frozen=True)
class _Part:
    maps: list[Tensor]
    whole: Tensor | None
    rows: str
    logits: Tensor
    classes: Tensor


def require_classifier(model: nn.Module) -> None:
    """Raise ``ModelError`` unless ``model`` is a classifier: relevance is for a class."""
    try:
        num_classes_of(model)
    except ModelError:
        raise ModelError(
            f"relevance is for a class, but {type(model).__name__} has no classification head; build it with one "
            "(num_classes of timm, ...ForImageClassification of transformers)"
        ) from None


def _targets(target: int | Sequence[int] | None, count: int) -> Sequence[int | None]:
    if target is None or isinstance(target, int):
        return [target] * count
    if len(target) != count:
        raise DataError(f"{len(target)} classes were given for {count} images; give one, or one for each")
    return list(target)


def _with_all_tokens(model: nn.Module) -> nn.Module:
    """Return ``model``, or a copy that computes all tokens, whose maps relevance follows; a tail has none."""
    record = record_of(model)
    if record and record.plan.tail > 1:
        raise ModelError(
            f"relevance follows patches through all blocks, but this model does not update them in its last "
            f"{record.plan.tail} (its tail); explain the model without a tail instead"
        )
    is_whole = record is None or not (record.is_trimmed or record.plan.tail)
    return model if is_whole else with_all_tokens(model)


def _left(model: nn.Module, handles: Sequence[Handle]) -> list[Handle]:
    """Return the attention layers that run."""
    record = record_of(model)
    if record and record.tokens:
        raise ModelError(
            f"this model reduces its tokens by {record.tokens.method}, and those left have no position in the image; "
            "call restore_tokens_(model), or give the model before the reduction"
        )
    closed = {site for site, gate in gates_by_site(model).items() if not gate.is_open} if record else set()
    left = [h for h in handles if h.site not in closed and not (record and record.plan.removes(h.site))]
    if not left:
        raise ModelError(
            f"relevance is read off attention layers, but {type(model).__name__} has none"
            f"{' left; explain the dense model instead' if handles else ', or none in a residual branch of its own'}"
        )
    return left


@torch.enable_grad()
def _explain(model: nn.Module, handles: list[Handle], images: Tensor, targets: Sequence[int | None]) -> _Part:
    seen = look(model, handles, images)
    logits = logits_of(seen.answer)
    classes = logits.argmax(1)
    for number, wanted in enumerate(targets):
        if wanted is not None and not 0 <= wanted < logits.shape[1]:
            raise DataError(f"got class {wanted}, but this model has the classes 0-{logits.shape[1] - 1}")
        classes[number] = classes[number] if wanted is None else wanted
    score = logits.gather(1, classes[:, None]).sum()  # images are independent of each other
    *gradients, at_end = torch.autograd.grad(score, [*seen.maps, seen.end], allow_unused=True, materialize_grads=True)
    with torch.no_grad():
        relevance = [weighted(a, g) for a, g in zip(seen.maps, gradients, strict=True)]
        shapes = {(len(a), *a.shape[-2:]) for a in relevance}
        if len(shapes) == 1 and seen.end.ndim == 3 and shapes == {(len(images), seen.end.shape[1], seen.end.shape[1])}:
            maps, whole, rows = _of_rows(relevance, at_end, _patches(handles[0], seen.grid, seen.end.shape[1]))
        else:
            windows = find_windows(model, handles, images)
            maps = [_of_windows(*each, len(images)) for each in zip(handles, relevance, windows, strict=True)]
            whole, rows = None, "windows"
    return _Part([each.cpu() for each in maps], whole, rows, logits.detach().float().cpu(), classes.cpu())


def weighted(attention: Tensor, gradient: Tensor) -> Tensor:
    """Return A_bar (B, N, N), the mean over heads of max(dy/dA * A, 0), both (B, heads, N, N)."""
    return (attention.detach().float() * gradient.float()).clamp(min=0).mean(1)


def rollout(relevance: Iterable[Tensor]) -> Tensor:
    """Return R (B, N, N) = S_L ... S_1, S = I + A_bar with rows divided by their sums; so the rows of R sum to 1."""
    result: Tensor | None = None
    for each in relevance:
        step = each + torch.eye(each.shape[-1], device=each.device)
        step = step / step.sum(-1, keepdim=True)
        result = step if result is None else step @ result
    assert result is not None
    return result


def _patches(first: Handle, grid: tuple[int, int] | None, count: int) -> tuple[int, int]:
    """Return rows and columns of the patches among ``count`` tokens."""
    rows, columns = grid or (0, 0)
    if not 0 <= count - rows * columns < rows * columns:
        raise ModelError(
            f"the {count} tokens of {first.owner} were expected to be the patches that a convolution makes of the "
            f"image, and a few before them; the last convolution makes {rows} x {columns}, so no map can be drawn"
        )
    return rows, columns


def _of_rows(relevance: list[Tensor], at_end: Tensor, grid: tuple[int, int]) -> tuple[list[Tensor], Tensor, str]:
    """Return the maps of blocks that attend to all tokens, that of the whole model, and whose rows they are.

    ``at_end`` (B, N, D) is the gradient of the logit with respect to the output of the last block: 0 for tokens that
    the head does not read.
    """
    others = at_end.shape[1] - grid[0] * grid[1]
    is_read = at_end.abs().amax(2) > 0  # (B, N); with max pooling an image's own
    tokens = is_read[:, :others]
    first, patches = tokens & (tokens.cumsum(1) == 1), is_read[:, others:] & ~tokens.any(1, keepdim=True)
    weight = torch.cat([first, patches], 1).float()  # (B, N), of each row
    weight /= weight.sum(1, keepdim=True).clamp(min=1)

    def drawn(matrix: Tensor) -> Tensor:
        return (weight[:, None] @ matrix[:, :, others:]).view(-1, *grid)

    whole = drawn(rollout(relevance)).cpu()
    return [drawn(each) for each in relevance], whole, "class token" if tokens.any() else "patches"


def _of_windows(handle: Handle, relevance: Tensor, windows: Windows, images: int) -> Tensor:
    """Return the map (B, rows, columns) of a block with windows; rows of padding do not count."""
    count, n = windows.places.shape
    if relevance.shape != (images * count, n, n):
        raise not_tokens(handle)
    is_real = (windows.places >= 0).to(relevance)[:, :, None]  # (windows, N, 1)
    given = (relevance.unflatten(0, (images, count)) * is_real).sum(2) / is_real.sum(1)  # (B, windows, N)
    return windows.put_back(given)


def _joined(sites: tuple[Site, ...], left: list[Handle], parts: list[_Part]) -> Relevance:
    columns = dict(zip((h.site for h in left), zip(*(part.maps for part in parts), strict=True), strict=True))
    wholes = [part.whole for part in parts if part.whole is not None]
    probabilities = torch.cat([part.logits for part in parts]).softmax(1)
    classes = torch.cat([part.classes for part in parts])
    best = probabilities.max(1)
    return Relevance(
        sites=sites,
        maps=tuple(torch.cat(columns[site]) if site in columns else None for site in sites),
        whole=torch.cat(wholes) if wholes else None,
        rows=parts[0].rows,
        classes=tuple(classes.tolist()),
        probabilities=tuple(probabilities.gather(1, classes[:, None])[:, 0].tolist()),
        answers=tuple(best.indices.tolist()),
        answer_probabilities=tuple(best.values.tolist()),
    )


def neighbours(found: Relevance) -> tuple[Pair, ...]:
    """Return the similarity of each map to the next existing one; of two grids the finer is averaged to the coarser."""
    there = [(site.block, each) for site, each in zip(found.sites, found.maps, strict=True) if each is not None]
    pairs = []
    for (block, one), (after, other) in pairwise(there):
        sides = (min(one.shape[1], other.shape[1]), min(one.shape[2], other.shape[2]))
        x, y = (F.adaptive_avg_pool2d(each, sides).flatten(1).double() for each in (one, other))
        pairs.append(Pair((block, after), _cosines(x, y), _cosines(*(_centred(ranks(each)) for each in (x, y)))))
    return tuple(pairs)


def ranks(values: Tensor) -> Tensor:
    """Return the rank of each value among its row (B, n), from 0; equal ones share the mean of theirs.

    >>> ranks(torch.tensor([[3.0, 1.0, 3.0, 7.0]])).tolist()
    [[1.5, 0.0, 1.5, 3.0]]
    """
    ordered, values = values.sort(1).values, values.contiguous()
    below, reached = (torch.searchsorted(ordered, values, right=is_right) for is_right in (False, True))
    return (below + reached - 1) / 2


def _centred(values: Tensor) -> Tensor:
    return values.double() - values.double().mean(1, keepdim=True)


def _cosines(one: Tensor, other: Tensor) -> tuple[float, ...]:
    """Return the cosine of the rows of two (B, n); nan where one is all 0."""
    lengths = one.norm(dim=1) * other.norm(dim=1)
    return tuple(((one * other).sum(1) / lengths).tolist())


def similarity(pairs: Sequence[Pair], by: Literal["cosines", "ranks"]) -> dict[int, list[float]]:
    """Return, by block, the mean similarity of each map to those of its neighbours, a number for each image."""
    found: dict[int, list[Sequence[float]]] = {}
    for pair in pairs:
        for block in pair.blocks:
            found.setdefault(block, []).append(getattr(pair, by))
    return {block: [mean(column) for column in zip(*rows, strict=True)] for block, rows in found.items()}


def contrast(alike: dict[int, list[float]], removed: Collection[int]) -> Contrast | None:
    """Return how the removed blocks differ from the kept ones in their ``similarity``.

    None if there are no removed or no kept blocks, or only a single pair, whose layers have the same similarity.
    """
    pruned, kept = [b for b in alike if b in removed], [b for b in alike if b not in removed]
    means = {block: mean(values) for block, values in alike.items()}
    if not pruned or not kept or len(alike) < 3 or any(map(isnan, means.values())):
        return None
    by_image = [
        mean([alike[b][i] for b in pruned]) - mean([alike[b][i] for b in kept]) for i in range(len(alike[pruned[0]]))
    ]
    known = [value for value in by_image if not isnan(value)]
    reached = fmean(means[b] for b in pruned)
    error = 1.96 * stdev(known) / len(known) ** 0.5 if len(known) >= FEW else None
    others = [fmean(means[b] for b in choice) for choice in _choices(list(means), len(pruned))]
    as_alike = fmean(other >= reached - 1e-12 for other in others)  # rounding of the sums may differ
    centre = reached - fmean(means[b] for b in kept)
    low, high = (None, None) if error is None else (centre - error, centre + error)
    return Contrast(reached, reached - centre, low, high, as_alike)


def _choices(blocks: list[int], count: int) -> Iterable[Sequence[int]]:
    """Return every choice of ``count`` blocks, or ``CHOICES`` of them at random."""
    if comb(len(blocks), count) <= CHOICES:
        return combinations(blocks, count)
    random = Random(0)
    return [random.sample(blocks, count) for _ in range(CHOICES)]


def mean(values: Iterable[float]) -> float:
    """Return the mean of the values that are not nan; nan if there are none.

    >>> mean([1.0, float("nan"), 2.0])
    1.5
    """
    known = [value for value in values if not isnan(value)]
    return fmean(known) if known else float("nan")
