"""What the classes of a model are called, where its library says so; and which of them a word means."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from functools import cache
from typing import Any

from torch import nn

from hetdpt.adapters.huggingface import is_hf
from hetdpt.core.errors import DataError

IMAGENET = 1000


def class_names(model: nn.Module) -> tuple[str, ...] | None:
    """Return a name for each class; None where nobody knows.

    The labels in the config of a transformers model, if each class has one; of a timm model with 1,000 classes, those
    of ImageNet.
    """
    if is_hf(model):
        config: Any = model.config
        if set(config.id2label) != set(range(config.num_labels)):
            return None
        names = tuple(str(config.id2label[number]) for number in range(config.num_labels))
        return None if all(name == f"LABEL_{number}" for number, name in enumerate(names)) else names
    is_timm = isinstance(getattr(model, "pretrained_cfg", None), dict)
    return _imagenet() if is_timm and getattr(model, "num_classes", 0) == IMAGENET else None


@cache
def _imagenet() -> tuple[str, ...]:
    from timm.data import ImageNetInfo

    info = ImageNetInfo()
    return tuple(info.index_to_description(number) for number in range(IMAGENET))


def find_class(text: str, names: Sequence[str] | None) -> int:
    """Return the class that ``text`` means: a number, or a name that one class alone has, whole or in part.

    >>> find_class("7", None), find_class("tabby", ["tabby, tabby cat", "tiger cat"])
    (7, 0)
    """
    if text.removeprefix("-").isdecimal():
        return int(text)
    if names is None:
        raise DataError(f"the classes of this model have no names that are known here; give a number, not {text!r}")
    word = text.casefold()
    synonyms = {number: [part.strip().casefold() for part in name.split(",")] for number, name in enumerate(names)}
    whole = [number for number, parts in synonyms.items() if word in parts or word == names[number].casefold()]
    near = whole or [number for number, name in enumerate(names) if word in name.casefold()]
    if len(near) == 1:
        return near[0]
    if not near:
        known = {part: number for number, parts in synonyms.items() for part in parts}
        near = [known[part] for part in difflib.get_close_matches(word, known, 3)]
    hint = ", ".join(f"{number} ({names[number]})" for number in near[:4])
    raise DataError(
        f"no single class is called {text!r}; {'did you mean ' + hint + '?' if hint else 'give its number'}"
    )
