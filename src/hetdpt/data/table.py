"""The sources of data, one row each; errors and the command line's help are derived from it. No torch.

A new source is a row here and a function ``open_...(name, split, root, download)`` that returns a split of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

DEMO = "demo"


@dataclass(frozen=True)
class DataSource:
    """One source of data."""

    prefix: str
    """How the names of its data begin; the rest is passed to ``open``."""
    form: str
    """How a name is shown in help and errors."""
    about: str
    """What it reads."""
    opener: str
    """The function that opens a split of it, in ``hetdpt.data``; imported when it is needed."""

    def matches(self, name: str) -> bool:
        """Whether ``name`` belongs to this source: the prefix and a name, or the prefix alone if that is its form."""
        return name.startswith(self.prefix) and (len(name) > len(self.prefix)) == (self.form != self.prefix)

    @property
    def open(self) -> Callable[..., Any]:
        module, _, function = self.opener.rpartition(".")
        found: Callable[..., Any] = getattr(import_module(f"hetdpt.data.{module}"), function)
        return found


SOURCES = (
    DataSource("", "a folder with train/ and val/", "images in one folder per class", "folders.open_folder"),
    DataSource("torch/", "torch/NAME", "a dataset of torchvision", "libraries.open_torch"),
    DataSource("hfds/", "hfds/NAME", "a dataset of HuggingFace", "libraries.open_hfds"),
    DataSource("wds/", "wds/FOLDER", "webdataset shards", "streams.open_wds"),
    DataSource(DEMO, DEMO, "the handwritten digits that come with scikit-learn", "libraries.open_digits"),
)
FORMS = f"{', '.join(row.form for row in SOURCES[:-1])} or {SOURCES[-1].form}"


def source_of(name: str) -> DataSource:
    """Return the row that opens the data called ``name``: the one with the longest prefix that matches.

    >>> source_of("torch/cifar100").about, source_of("photos").form
    ('a dataset of torchvision', 'a folder with train/ and val/')
    """
    return max((row for row in SOURCES if row.matches(name)), key=lambda row: len(row.prefix), default=SOURCES[0])
