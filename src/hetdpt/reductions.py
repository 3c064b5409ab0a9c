"""What a model may have lost besides layers: width, and tokens. Two values that a saved model carries.

Nothing is computed here: :mod:`hetdpt.combine` makes and applies them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Widths:
    """The sizes of a narrowed model that differ from those of the model it was made of.

    >>> Widths((("head.weight", (10, 96)),), (("head", "in_features", 96),)).shapes[0]
    ('head.weight', (10, 96))
    """

    shapes: tuple[tuple[str, tuple[int, ...]], ...]
    """Parameters and buffers by name, and their shapes."""
    attributes: tuple[tuple[str, str, Any], ...]
    """Path of a module, name of an attribute, and the number or tuple of numbers that it has now."""

    @classmethod
    def from_dict(cls, values: Any) -> Widths:
        shapes = tuple((str(name), tuple(int(side) for side in shape)) for name, shape in values["shapes"])
        attributes = tuple((str(path), str(name), _number(value)) for path, name, value in values["attributes"])
        return cls(shapes, attributes)


@dataclass(frozen=True)
class Tokens:
    """By what method and how many tokens go in the blocks that have attention.

    >>> Tokens("tome", 8)
    Tokens(method='tome', r=8, schedule='constant')
    """

    method: str
    r: int
    """Tokens that go in each such block, on average."""
    schedule: str = "constant"

    @classmethod
    def from_dict(cls, values: Any) -> Tokens:
        return cls(str(values["method"]), int(values["r"]), str(values["schedule"]))


def _number(value: Any) -> Any:
    """Return a number, or a tuple of numbers, as JSON has it; ``ValueError`` for anything else."""
    if isinstance(value, list | tuple):
        return tuple(_number(side) for side in value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(value)
    return value
