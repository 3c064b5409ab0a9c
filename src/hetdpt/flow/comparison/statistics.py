"""The statistics of a comparison: summaries over seeds, and differences paired over images."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import TYPE_CHECKING

import numpy as np

from hetdpt.results import ComparisonRow, DenseModel, Difference, MethodSummary

if TYPE_CHECKING:
    from torch import Tensor

    from hetdpt.data.sources import Data

DRAWS = 10_000
RIGHT, WRONG, UNREAD = "1", "0", "-"


def summarise(
    rows: Sequence[ComparisonRow], answers: Sequence[str | None], dense: DenseModel, first: str
) -> tuple[MethodSummary, ...]:
    """Return the results of each method for each number of layers, compared to the method ``first``.

    ``answers`` say for every row which images the model got right, as ``RIGHT``, ``WRONG`` and ``UNREAD``.
    """
    right = {(row.layers, row.method, row.seed): found for row, found in zip(rows, answers, strict=True)}
    groups: dict[tuple[int, str], list[ComparisonRow]] = {}
    for row in rows:
        groups.setdefault((row.layers, row.method), []).append(row)
    found = []
    for (layers, method), group in groups.items():
        pairs = [(right[layers, method, row.seed], right.get((layers, first, row.seed))) for row in group]
        found.append(
            MethodSummary(
                layers=layers,
                method=method,
                plans=tuple(dict.fromkeys(row.plan for row in group)),
                seeds=tuple(row.seed for row in group),
                accuracies=tuple(row.accuracy for row in group),
                difference=difference_of(pairs) if method != first else None,
                start=fmean(row.start for row in group),
                speedup=fmean(row.speed.speedup for row in group),
                macs=fmean(row.speed.macs for row in group) / dense.macs,
                seconds=fmean(row.seconds for row in group),
            )
        )
    return tuple(found)


class Answers:
    """Which validation images of ``data`` a model gets right."""

    def __init__(self, data: Data) -> None:
        from hetdpt.data.streams import Stream  # here, since pages of docs/ are rendered without torch

        has_no_numbers = data.val is None or isinstance(data.val, Stream)
        self._found = None if has_no_numbers else [UNREAD] * len(data.val or ())

    def add(self, indices: Tensor, is_right: Tensor) -> None:
        """Take the answers to some images, as ``evaluate`` gives them."""
        if self._found is not None:
            for index, right in zip(indices.tolist(), is_right.tolist(), strict=True):
                self._found[index] = RIGHT if right else WRONG

    @property
    def text(self) -> str | None:
        """One mark per image; None where images have no numbers, as in a stream of shards."""
        return "".join(self._found) if self._found is not None else None


def difference_of(pairs: Sequence[tuple[str | None, str | None]]) -> Difference | None:
    """Return how much better the first of each pair is, the mean over seeds; a pair is two models of one seed.

    The bootstrap draws images, each with the answers of all models to it, and seeds where there are several. Pairs
    that lack an answer are left out.

    >>> difference_of([("1101", "1001")]).value
    25.0
    >>> difference_of([("11-1", "1001")]).value  # of three images
    33.33...
    """
    known = [(one, other) for one, other in pairs if one and other and len(one) == len(other)]
    if not known:
        return None
    answers = np.array([[list(one), list(other)] for one, other in known])  # (seeds, 2, images)
    is_read = (answers != UNREAD).all(axis=(0, 1))
    right = (answers[:, :, is_read] == RIGHT).astype(int)
    gains = right[:, 0] - right[:, 1]  # (seeds, images)
    seeds, images = gains.shape
    if not images:
        return None
    values, counts = np.unique(gains, axis=1, return_counts=True)  # images of the same gains are one to the bootstrap
    generator = np.random.default_rng(0)
    drawn = generator.multinomial(images, counts / images, DRAWS) / images
    chosen = generator.multinomial(seeds, [1 / seeds] * seeds, DRAWS) / seeds
    means = 100 * np.einsum("ds,sv,dv->d", chosen, values, drawn)
    low, high = np.percentile(means, (2.5, 97.5))
    return Difference(float(100 * gains.mean()), float(low), float(high))
