"""From keys to batches of views: reading, decoding and transforming, in worker processes or here.

A view is a function of its key and the source, and of nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from PIL.Image import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from hetdpt.adapters.preprocessing import Preprocessing
from hetdpt.data.augmentation import Transform
from hetdpt.data.batch import NOTHING, Batch, check_label
from hetdpt.data.sources import Source
from hetdpt.errors import DataError
from hetdpt.randomness import seeded

TRIES = 20
"""After so many unreadable images in a row, training stops."""


@dataclass(frozen=True)
class Key:
    """One view: the index of the image, and what seeds its transform (nothing for one without chance)."""

    index: int
    entropy: tuple[int, ...] = ()


class Views(Dataset[Batch]):
    """A source whose items are batches of views, asked for by their keys.

    ``is_replaced``: an unreadable image gives way to the next readable one; else it is left blank, with label -1.
    """

    def __init__(
        self, source: Source, preprocessing: Preprocessing, transform: Transform, *, is_replaced: bool
    ) -> None:
        self._source, self._transform, self._is_replaced = source, transform, is_replaced
        self._mode, self._size = mode_of(preprocessing), preprocessing.input_size
        self._tries = min(TRIES, len(source)) if is_replaced else 1

    def __getitems__(self, keys: list[Key]) -> Batch | DataError:
        """Return a batch, or the error: raised in a worker, its sentence would drown in a traceback."""
        unreadable: list[str] = []
        try:
            views, targets = zip(*(self._view(key, unreadable) for key in keys), strict=True)
        except DataError as error:
            return error
        indices = torch.tensor([key.index for key in keys])
        return Batch(default_collate(list(views)), torch.tensor(targets), indices, tuple(unreadable))

    def _view(self, key: Key, unreadable: list[str]) -> tuple[Tensor, int]:
        """Return view and label of a key; adds to ``unreadable`` what could not be read on the way."""
        failed = []
        for step in range(self._tries if key.index != NOTHING else 0):
            index = (key.index + step) % len(self._source)
            try:
                image, target = self._source[index]
            except OSError:
                failed.append(self._source.name_of(index))
                continue
            check_label(target, self._source.num_classes, self._source.name_of(index))
            unreadable += failed
            return self._transformed(image, key.entropy), target
        if failed and self._is_replaced:
            raise DataError(f"{failed[0]} cannot be read, nor can the {len(failed) - 1} images after it")
        unreadable += failed
        return torch.zeros(self._size), NOTHING

    def _transformed(self, image: Image, entropy: tuple[int, ...]) -> Tensor:
        image = image if image.mode == self._mode else image.convert(self._mode)
        if not entropy:
            return self._transform(image)
        with seeded(*entropy):
            return self._transform(image)


class Loader:
    """The workers of a source, which stay alive from one iteration to the next; one iteration at a time."""

    def __init__(self, views: Views, workers: int) -> None:
        self._order = _Order()
        self._loader: DataLoader[Batch | DataError] = DataLoader(
            views,
            batch_sampler=self._order,
            num_workers=workers,
            persistent_workers=workers > 0,
            collate_fn=_as_it_is,
            pin_memory=torch.cuda.is_available(),
            generator=torch.Generator(),  # else it draws from the global one
        )

    def load(self, batches: Iterable[list[Key]]) -> Iterator[Batch]:
        self._order.batches = batches
        for batch in self._loader:
            if isinstance(batch, DataError):
                raise DataError(*batch.args)  # raised itself, it would hold this frame and the workers
            yield batch


class _Order:
    """A batch sampler that is told anew each time what to yield."""

    batches: Iterable[list[Key]] = ()

    def __iter__(self) -> Iterator[list[Key]]:
        return iter(self.batches)


def mode_of(preprocessing: Preprocessing) -> str:
    """Return what PIL calls images with the channels that the model takes."""
    return "L" if preprocessing.input_size[0] == 1 else "RGB"


def _as_it_is(batch: Any) -> Any:
    return batch
