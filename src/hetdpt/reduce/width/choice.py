"""Which parts of a model's width are kept, given their scores and how much is removed. Scores in, indices out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor, nn

from hetdpt.core.errors import PlanError
from hetdpt.core.fold import exact
from hetdpt.reduce.width.scores import Heads, Narrowable
from hetdpt.reduce.width.shapes import WidthCut, add_features, add_heads, existing


@dataclass(frozen=True)
class Ratios:
    """The fraction of each size that is removed, 0 to 1; at least one entry of each is kept.

    >>> Ratios(hidden=0.5, heads=0.25).times(0.5)
    Ratios(embedding=0.0, hidden=0.25, heads=0.125, head_dims=0.0)
    """

    embedding: float = 0.0
    """Channels of the residual stream."""
    hidden: float = 0.0
    """Features between the two layers of an FFN, of all FFNs together."""
    heads: float = 0.0
    """Attention heads, of all blocks together."""
    head_dims: float = 0.0
    """Dimensions of each head."""

    def __post_init__(self) -> None:
        for name, value in self.by_name.items():
            if not 0 <= value <= 1:
                raise PlanError(f"the fraction of {name} to remove is a number from 0 to 1, not {value}")

    @property
    def by_name(self) -> dict[str, float]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def times(self, factor: float) -> Ratios:
        return Ratios(**{name: min(value * factor, 1.0) for name, value in self.by_name.items()})


@dataclass(frozen=True)
class Kept:
    """What is kept: indices in order, by the number of a layer in ``Narrowable``; unchanged layers are not listed."""

    stream: Tensor | None
    hidden: dict[int, Tensor]
    heads: dict[int, Tensor]
    """(heads, dimensions of each): indices of inputs of the layer after the attention."""

    @property
    def sizes(self) -> tuple[object, ...]:
        """How much is kept of each size."""
        stream = None if self.stream is None else len(self.stream)
        hidden = tuple((number, len(indices)) for number, indices in self.hidden.items())
        return stream, hidden, tuple((number, tuple(table.shape)) for number, table in self.heads.items())


def choose(parts: Narrowable, ratios: Ratios, round_to: int | None = None) -> Kept:
    """Return what is kept: the entries of every size with the highest scores.

    Hidden features are ranked over all FFNs of one kind, heads over all blocks, dimensions within their head (or, if a
    norm is shared by all heads, by their mean over heads). ``round_to`` rounds all sizes but the number of heads to the
    nearest multiple.
    """
    step = round_to or 1
    if ratios.embedding and parts.stream is None:
        raise PlanError(f"the embedding of this model cannot be narrowed: {parts.why_no_stream}; leave it out")
    stream = None
    if ratios.embedding and parts.stream is not None:
        scores = parts.stream.scores
        stream = _best(scores, _counts([scores], ratios.embedding, step)[0])
    hidden: dict[int, Tensor] = {}
    for kind in dict.fromkeys(part.kind for part in parts.hidden) if ratios.hidden else ():
        numbers = [number for number, part in enumerate(parts.hidden) if part.kind == kind]
        scores_of = [parts.hidden[number].scores for number in numbers]
        counts = _counts(scores_of, ratios.hidden, step)
        hidden |= {n: _best(s, count) for n, s, count in zip(numbers, scores_of, counts, strict=True)}
    heads = _counts([part.scores.mean(1) for part in parts.heads], ratios.heads, 1)
    left = {number: _heads(part, heads[number], ratios, step) for number, part in enumerate(parts.heads)}
    return Kept(stream, hidden, left if ratios.heads or ratios.head_dims else {})


def removed_ratios(parts: Narrowable, kept: Kept) -> Ratios:
    """Return which fraction of each size is actually removed, as sizes are whole numbers."""
    hidden = [(len(kept.hidden.get(number, part.scores)), len(part.scores)) for number, part in enumerate(parts.hidden)]
    tables = [(kept.heads.get(number, part.scores).shape, part.scores.shape) for number, part in enumerate(parts.heads)]
    stream = [(len(kept.stream), len(parts.stream.scores))] if parts.stream and kept.stream is not None else []
    heads, dims = ([(left[axis], whole[axis]) for left, whole in tables] for axis in (0, 1))
    return Ratios(*(_removed_fraction(sizes) for sizes in (stream, hidden, heads, dims)))


def _removed_fraction(sizes: Sequence[tuple[int, int]]) -> float:
    """Return the removed fraction, from pairs (how many are kept, how many there were).

    >>> _removed_fraction([(3, 4), (2, 4)]), _removed_fraction([])
    (0.375, 0.0)
    """
    left, whole = sum(left for left, _ in sizes), sum(whole for _, whole in sizes)
    return 1 - left / whole if whole else 0.0


def _heads(part: Heads, count: int, ratios: Ratios, step: int) -> Tensor:
    """Return the best ``count`` heads, and of each the best dimensions."""
    size = part.attention.head_dim
    best = _best(part.scores.mean(1), count)  # (heads,)
    scores = part.scores[best]
    if part.attention.norms:
        scores = scores.mean(0).expand_as(scores)
    dims = _counts([scores[0]], ratios.head_dims, step)[0]
    return torch.stack([head * size + _best(row, dims) for head, row in zip(best, scores, strict=True)])


def _best(scores: Tensor, count: int) -> Tensor:
    order: Tensor = scores.argsort(descending=True, stable=True)[:count]
    return order.sort().values


def _counts(scores: Sequence[Tensor], ratio: float, step: int) -> list[int]:
    """Return how many entries of each layer are kept if the lowest ``ratio`` of all is removed; at least one each."""
    sizes = [len(one) for one in scores]
    if not ratio or not scores:
        return sizes
    protected = [one.index_fill(0, one.argmax(), torch.inf) for one in scores]
    layer = torch.cat([torch.full((size,), number) for number, size in enumerate(sizes)])
    stay = max(int(sum(sizes) * (1 - ratio) + 1e-9), len(sizes))  # 1e-9: 10 * (1 - 0.9) is 0.99...
    order = torch.cat(protected).argsort(descending=True, stable=True)[:stay]
    counts = layer[order].bincount(minlength=len(sizes)).tolist()
    return [_rounded(count, size, step) for count, size in zip(counts, sizes, strict=True)]


def _rounded(count: int, size: int, step: int) -> int:
    """Return the multiple of ``step`` nearest to ``count`` that is not above ``size``.

    >>> _rounded(29, 48, 8), _rounded(47, 47, 8), _rounded(3, 5, 8)
    (32, 40, 5)
    """
    if step > size:
        return size
    return min(max(round(count / step), 1), size // step) * step


def cut_of(model: nn.Module, parts: Narrowable, kept: Kept) -> WidthCut:
    """Return which entries of the tensors of ``model`` are kept, and the new values of its attributes."""
    cut, there = WidthCut(), dict(model.named_parameters())
    if kept.stream is not None and parts.stream is not None:
        width = len(parts.stream.scores)
        for name, axis in parts.stream.places:
            starts = range(0, there[name].shape[axis], width)  # more than one if tokens are concatenated
            cut.kept[name, axis] = torch.cat([start + kept.stream for start in starts])
        cut.attributes.update(dict.fromkeys(parts.stream.attributes, len(kept.stream)))
        cut.attributes.update({(path, "normalized_shape"): (len(kept.stream),) for path in parts.stream.norms})
    for number, indices in kept.hidden.items():
        add_features(cut, parts.hidden[number].ffn, indices)
    for number, table in kept.heads.items():
        add_heads(cut, parts.heads[number].attention, table)
    return existing(cut, model)


@torch.no_grad()
def rescale_(model: nn.Module, parts: Narrowable, kept: Kept) -> nn.Module:
    """Multiply the queries of heads with fewer dimensions by sqrt(new / old), after the cut.

    Attention divides by the square root of the number of dimensions; this keeps the products of queries and keys over
    the remaining dimensions what they were.
    """
    for number, table in kept.heads.items():
        attention, (heads, dims) = parts.heads[number].attention, table.shape
        factor = (dims / attention.head_dim) ** 0.5
        layer, start = (attention.norms[0], 0) if attention.norms else attention.queries
        rows = slice(0, dims) if attention.norms else slice(start, start + heads * dims)
        for parameter in model.get_submodule(layer).parameters() if factor != 1 else ():
            parameter[rows] = (exact(parameter[rows]) * factor).to(parameter)
    return model
