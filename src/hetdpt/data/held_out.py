"""Training images held out to measure on, so that the validation images decide nothing."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from hetdpt.core.errors import DataError
from hetdpt.data.sources import Data
from hetdpt.data.streams import Stream
from hetdpt.data.subset import Subset, balanced_order

HELD_OUT = 5  # the part of training images that is held out is one in so many


def hold_out(data: Data) -> Data:
    """Return ``data`` with a fifth of its training images, of each class, as the images to measure on.

    Of a class of several images one at least is held out, and one stays.

    >>> from hetdpt.data.sources import open_data
    >>> data = hold_out(open_data("demo"))
    >>> len(data.train), len(data.val), len(open_data("demo").train)
    (1150, 287, 1437)
    """
    if data.train is None or isinstance(data.train, Stream):
        raise DataError(
            "samples of accuracy are measured on training images that are held out, which cannot be taken from a "
            "stream of shards; collect samples beforehand, and give --samples"
        )
    labels = data.train.targets()
    left = {label: max(round(count / HELD_OUT), 1) if count > 1 else 0 for label, count in Counter(labels).items()}
    held: set[int] = set()
    for index in balanced_order(labels, seed=0):
        if left[labels[index]]:
            left[labels[index]] -= 1
            held.add(index)
    kept = tuple(index for index in range(len(labels)) if index not in held)
    name = f"{data.name} without val, a fifth of train held out"
    return replace(data, name=name, train=Subset(data.train, kept), val=Subset(data.train, tuple(sorted(held))))
