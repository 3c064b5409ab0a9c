"""Some images of a split, chosen by a seed; and training images held out for measuring. Reads no image."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL.Image import Image

from hetdpt.core.errors import DataError
from hetdpt.data.streams import Stream

if TYPE_CHECKING:  # sources needs balanced_order for the demo set
    from hetdpt.data.sources import Data, Source


@dataclass(frozen=True)
class Subset:
    """The images of ``source`` with these indices, numbered 0, 1, ... here."""

    source: Source
    indices: tuple[int, ...]

    @property
    def num_classes(self) -> int:
        return self.source.num_classes

    @property
    def classes(self) -> tuple[str, ...]:
        return self.source.classes

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> tuple[Image, int]:
        return self.source[self.indices[index]]

    def targets(self) -> Sequence[int]:
        labels = self.source.targets()
        return [labels[index] for index in self.indices]

    def name_of(self, index: int) -> str:
        return self.source.name_of(self.indices[index])


def subset(
    source: Source | Stream, *, fraction: float | None = None, per_class: int | None = None, seed: int = 0
) -> Source:
    """Return a fraction of the images, or ``per_class`` of each class; the same ones for the same seed.

    A fraction has the classes in proportion and contains every smaller fraction of the same seed. Without either, all
    images are returned.
    """
    if isinstance(source, Stream):
        raise DataError("a stream of shards has no subsets, because its images have no indices; list fewer shards")
    require_part(fraction, per_class)
    labels = source.targets()
    if per_class is not None:
        _check_enough(source.classes, labels, per_class)
        chosen = _first_of_each(labels, per_class, seed)
    else:
        chosen = balanced_order(labels, seed)[: math.ceil((fraction or 1) * len(labels))]
    return Subset(source, tuple(sorted(chosen)))


def require_part(fraction: float | None, per_class: int | None) -> None:
    """Raise ``DataError`` if the fraction or the count per class makes no sense."""
    if fraction is not None and per_class is not None:
        raise DataError(f"a subset is a fraction ({fraction}) or a count per class ({per_class}), not both")
    if fraction is not None and not 0 < fraction <= 1:
        raise DataError(f"a fraction of the images is above 0 and at most 1, not {fraction}")
    if per_class is not None and per_class < 1:
        raise DataError(f"a subset has at least 1 image per class, not {per_class}")


def balanced_order(labels: Sequence[int], seed: int) -> list[int]:
    """Return the indices in a random order in which every prefix has the classes in proportion.

    The i-th of the n images of a class, in a random order, is placed at the fraction (i + 1/2) / n of the whole.
    """
    sizes, seen, places = Counter(labels), Counter[int](), {}
    order = _random_order(len(labels), seed)
    for index in order:
        label = labels[index]
        places[index] = (seen[label] + 0.5) / sizes[label]
        seen[label] += 1
    return sorted(order, key=places.__getitem__)  # stable: ties stay in random order


def _first_of_each(labels: Sequence[int], count: int, seed: int) -> list[int]:
    seen, chosen = Counter[int](), []
    for index in _random_order(len(labels), seed):
        seen[labels[index]] += 1
        if seen[labels[index]] <= count:
            chosen.append(index)
    return chosen


def _random_order(count: int, seed: int) -> list[int]:
    if not 0 <= seed < 2**32:
        raise DataError(f"a seed is from 0 to 4294967295, not {seed}")
    order: list[int] = np.random.RandomState(seed).permutation(count).tolist()  # its numbers never change (NEP 19)
    return order


def _check_enough(classes: tuple[str, ...], labels: Sequence[int], per_class: int) -> None:
    sizes = Counter(labels)
    label = min(range(len(classes)), key=sizes.__getitem__)
    if sizes[label] < per_class:
        raise DataError(
            f"class {classes[label]} has only {sizes[label]} images, fewer than {per_class} per class; use at most "
            f"{sizes[label]}"
        )


HELD_OUT = 5  # one of this many training images is held out to measure samples of accuracy
MOST_HELD_OUT = 500  # images, to choose among epochs


def hold_out(data: Data) -> Data:
    """Return ``data`` with a fifth of the training images of each class as the images to measure on.

    Of a class with several images at least one is held out and one is kept.

    >>> from hetdpt.data.sources import open_data
    >>> data = hold_out(open_data("demo"))
    >>> len(data.train), len(data.val), len(open_data("demo").train)
    (1150, 287, 1437)
    """
    if data.train is None or isinstance(data.train, Stream):
        raise DataError(
            "samples of accuracy are measured on held-out training images, which a stream of shards cannot provide; "
            "collect samples from other data first and pass them with --samples"
        )
    labels = data.train.targets()
    left = {label: max(round(count / HELD_OUT), 1) if count > 1 else 0 for label, count in Counter(labels).items()}
    held: list[int] = []
    for index in balanced_order(labels, seed=0):
        if left[labels[index]]:
            left[labels[index]] -= 1
            held.append(index)
    name = f"{data.name} without val, a fifth of train held out"
    return replace(data, name=name, **_parted(data.train, held))


def hold_out_fraction(data: Data, fraction: float, seed: int = 0) -> Data:
    """Return ``data`` with a fraction of its training images, 500 at most, as the images to measure on.

    Classes are in proportion. They are the last ones in the order of which images to fit replacements on are the first.

    >>> from hetdpt.data.sources import open_data
    >>> data = hold_out_fraction(open_data("demo"), 0.1)
    >>> len(data.train), len(data.val)
    (1293, 144)
    """
    if data.train is None or isinstance(data.train, Stream):
        raise DataError("training images can be held out if they have indices, which those of a stream do not have")
    count = len(data.train)
    if count < 2:
        raise DataError("one training image cannot be both held out and trained on; give two or more")
    held = min(max(round(fraction * count), 1), MOST_HELD_OUT, count - 1)
    return replace(data, **_parted(data.train, balanced_order(data.train.targets(), seed)[-held:]))


def _parted(source: Source, held: Sequence[int]) -> dict[str, Any]:
    """Return the images with the indices ``held`` as ``val``, and the others as ``train``."""
    others = sorted(set(range(len(source))) - set(held))
    return {"train": Subset(source, tuple(others)), "val": Subset(source, tuple(sorted(held)))}
