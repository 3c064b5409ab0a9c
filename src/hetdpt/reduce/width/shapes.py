"""The sizes of a narrowed model: applied to a wide one, read from it, and restored on another.

A saved model needs no more, so Torch-Pruning is not imported. What is removed is not decided here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn

from hetdpt.adapters.anatomy import Survey
from hetdpt.adapters.attention import NAMES, Attention
from hetdpt.adapters.ffn import Ffn
from hetdpt.adapters.trace import dry_run
from hetdpt.core.errors import FileError, ModelError, first_line
from hetdpt.core.gates import Constant
from hetdpt.surgery.arrange import arrange_, take_off_
from hetdpt.surgery.kept import STEP
from hetdpt.surgery.record import RECORD, require_record

Place = tuple[str, int]
"""A tensor by name, and one of its axes."""
STREAM_SIZES = ("embed_dim", "num_features", "head_hidden_size", "hidden_size")
"""What models and their parts call the width of the stream."""
LAYER_SIZES = ("in_features", "out_features", "out_channels", "embedding_dim", "normalized_shape", "shape")
"""What layers call the sizes of their tensors."""
SIZES = {*STREAM_SIZES, *LAYER_SIZES, *(size for names in NAMES.values() for size in names.sizes)}
"""The attributes that hold a size and change with it; no others do."""


@dataclass(frozen=True)
class Widths:
    """The sizes of a narrowed model that differ from those of the original.

    >>> Widths((("head.weight", (10, 96)),), (("head", "in_features", 96),)).shapes[0]
    ('head.weight', (10, 96))
    """

    shapes: tuple[tuple[str, tuple[int, ...]], ...]
    """Parameters and buffers by name, and their shapes."""
    attributes: tuple[tuple[str, str, Any], ...]
    """Path of a module, name of an attribute, and its new value, a number or tuple of numbers."""
    stream: int | None = None
    """How many channels of the residual stream are left, if some were removed."""
    channels: tuple[int, ...] | None = None
    """Which of the original ones these are; None also in models that were saved before this was recorded."""

    @classmethod
    def from_dict(cls, values: Any) -> Widths:
        values = {"channels": None, **values}
        if other := set(values) ^ {field.name for field in fields(cls)}:
            raise ValueError(other)
        shapes = tuple((str(name), tuple(_whole(side) for side in shape)) for name, shape in values["shapes"])
        attributes = tuple((str(path), str(name), _number(value)) for path, name, value in values["attributes"])
        stream, channels = values["stream"], values["channels"]
        return cls(
            shapes,
            attributes,
            None if stream is None else _whole(stream),
            None if channels is None else tuple(map(_whole, channels)),
        )


@dataclass(frozen=True)
class WidthCut:
    """What is kept of a model: entries of its tensors along their axes, and the new values of attributes."""

    kept: dict[Place, Tensor] = field(default_factory=dict)
    """Indices, in order."""
    attributes: dict[tuple[str, str], Any] = field(default_factory=dict)
    """New values, by the path of the module and the name of the attribute."""


def add_heads(cut: WidthCut, attention: Attention, table: Tensor) -> None:
    """Add to ``cut`` what an attention keeps: its inputs of the layer behind it, (heads, dimensions of each)."""
    indices = table.flatten()
    rows: dict[str, list[Tensor]] = {}
    for layer, start in (attention.queries, attention.keys, attention.values):
        rows.setdefault(layer, []).append(start + indices)
    for layer, lists in rows.items():
        cut.kept.update({(f"{layer}.{name}", 0): torch.cat(lists) for name in ("weight", "bias")})
    cut.kept[f"{attention.out}.weight", 1] = indices
    for norm in attention.norms:
        cut.kept.update({(f"{norm}.{name}", 0): table[0] % attention.head_dim for name in ("weight", "bias")})
    for name, value in attention.attributes(*table.shape).items():
        cut.attributes[attention.path, name] = value


def add_features(cut: WidthCut, ffn: Ffn, indices: Tensor) -> None:
    """Add to ``cut`` the hidden features that an FFN keeps."""
    cut.kept.update({(f"{ffn.first}.weight", 0): indices, (f"{ffn.second}.weight", 1): indices})
    cut.kept[f"{ffn.first}.bias", 0] = indices


def map_of_heads(weight: Tensor, bias: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """Return what is left of the map of keys and values in a tail, given the inputs left of the layer behind them."""
    rows = torch.cat([indices, len(bias) // 2 + indices]).to(bias.device)
    return weight[rows], bias[rows]


def existing(cut: WidthCut, model: nn.Module) -> WidthCut:
    """Return ``cut`` without the parameters that ``model`` does not have, such as biases."""
    there = dict(model.named_parameters())
    return replace(cut, kept={place: indices for place, indices in cut.kept.items() if place[0] in there})


@torch.no_grad()
def cut_(model: nn.Module, cut: WidthCut) -> nn.Module:
    """Keep the entries that ``cut`` lists, in new tensors: models that share the old ones are not changed."""
    owners = set()
    for (name, axis), kept in cut.kept.items():
        path, _, leaf = name.rpartition(".")
        owner = model.get_submodule(path)
        old: Tensor = getattr(owner, leaf)
        setattr(owner, leaf, _like(old, old.detach().index_select(axis, kept.to(old.device))))
        owners.add(path)
    for path in owners:
        _follow(model.get_submodule(path))
    for (path, name), value in cut.attributes.items():
        vars(model.get_submodule(path))[name] = value
    return model


def mark_narrowed_(model: nn.Module, stream: int | None, channels: tuple[int, ...] | None) -> None:
    """Record that the sizes of a model have changed; its anatomy stays that of the original.

    ``stream`` is how many channels of the residual stream are left, ``channels`` which of the original ones.
    """
    record = require_record(model)
    survey = record.survey
    if stream is not None:
        survey = survey.with_layouts(lambda _, layout: layout.with_width(stream))
    vars(model)[RECORD] = replace(record, survey=survey, is_narrowed=True, channels=channels)


def _stream_now(survey: Survey) -> int | None:
    """Return the channels of the stream; None if unchanged."""
    width = next(handle.parts.core_layout.width for handle in survey.handles if handle.parts)
    return width if width != survey.anatomy.width else None


def widths_of(model: nn.Module, wide: nn.Module) -> Widths:
    """Return the sizes of ``model`` that differ from those of ``wide``, which has the same modules.

    Those of the maps of a tail are not among them: they follow from the sizes of attention.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in _tensors(wide) if f".{STEP}." not in name}
    others = {path: module for path, module in wide.named_modules() if f".{STEP}." not in path}
    return Widths(
        tuple((n, tuple(t.shape)) for n, t in _tensors(model) if n in shapes and shapes[n] != tuple(t.shape)),
        tuple(
            (path, name, value)
            for path, module in model.named_modules()
            if path in others
            for name, value in _sizes(module).items()
            if _is_alike(value, before := vars(others[path]).get(name)) and value != before
        ),
        _stream_now(require_record(model).survey),
        require_record(model).channels,
    )


def reshape_(model: nn.Module, widths: Widths) -> nn.Module:
    """Give ``model`` the sizes of a narrowed one; the values of these tensors are lost.

    ``FileError`` unless all sizes exist, none is larger than it was, and the model runs: the file may be anyone's.
    """
    take_off_(model)  # the maps of a tail follow from the sizes of attention
    tensors, modules = dict(_tensors(model)), dict(model.named_modules())
    for name, shape in widths.shapes:
        old = tensors.get(name)
        if (
            old is None
            or old.ndim != len(shape)
            or not all(0 < new <= was for new, was in zip(shape, old.shape, strict=True))
        ):
            raise _refusal(name, shape, None if old is None else tuple(old.shape))
        path, _, leaf = name.rpartition(".")
        setattr(modules[path], leaf, _like(old, old.new_empty(shape)))
    for path, name, value in widths.attributes:
        was = _sizes(modules[path]).get(name) if path in modules else None
        if not _is_alike(value, was) or not _is_narrower(value, was):
            raise _refusal(f"{path}.{name}", value, was)
        setattr(modules[path], name, value)
    for name, _ in widths.shapes:
        _follow(modules[name.rpartition(".")[0]])
    _require_stream(model, widths)
    mark_narrowed_(model, widths.stream, widths.channels)
    _require_runs(arrange_(model))
    return model


def _require_stream(model: nn.Module, widths: Widths) -> None:
    """Raise unless FFNs take as many channels as the stream has by the file, and these exist."""
    survey, there = require_record(model).survey, dict(model.named_modules())
    layers = [there.get(handle.ffn.first) for handle in survey.handles if handle.ffn]
    given = [layer.weight.shape[1] for layer in layers if isinstance(layer, nn.Linear)]
    expected = survey.anatomy.width if widths.stream is None else widths.stream
    if not 0 < expected <= survey.anatomy.width or any(width != expected for width in given):
        raise _refusal("the stream", expected, given[0] if given else survey.anatomy.width)
    channels = widths.channels
    if channels is not None and (len(set(channels)) != expected or max(channels) >= survey.anatomy.width):
        raise _refusal("the channels of the stream", channels, f"{expected} of {survey.anatomy.width}")


def _require_runs(model: nn.Module) -> None:
    """Raise unless the sizes of a model fit together, found by a dry run."""
    try:
        dry_run(model, (2, *require_record(model).survey.input_size), lambda *_: torch.no_grad())
    except ModelError as error:
        raise FileError(
            f"the widths are inconsistent: the model does not run with them: "
            f"{first_line(error.__cause__ or error)}; save it again"
        ) from error


def _refusal(name: str, value: Any, was: Any) -> FileError:
    there = "does not exist" if was is None else f"is {was}"
    return FileError(f"the widths say {name} is {value}, but in the original model it {there}; save it again")


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _like(old: Tensor, new: Tensor) -> Tensor:
    return nn.Parameter(new, requires_grad=old.requires_grad) if isinstance(old, nn.Parameter) else new


def _sizes(module: nn.Module) -> Mapping[str, Any]:
    """Return the attributes of ``module`` that hold a size: numbers, or tuples of whole ones."""
    return {name: value for name, value in vars(module).items() if name in SIZES and _is_alike(value, value)}


def _is_alike(one: Any, other: Any) -> bool:
    """Whether two values are both integers, both floats, or both tuples of as many integers."""
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) > 0 and all(type(side) is int for side in (*one, *other))
    return type(one) is type(other) and type(one) in (int, float)


def _is_narrower(value: Any, was: Any) -> bool:
    if isinstance(value, tuple):
        return all(0 < new <= old for new, old in zip(value, was, strict=True))
    return 0 < value <= was if isinstance(value, int) else value > 0 and isfinite(value)


def _follow(module: nn.Module) -> None:
    """Update the size attributes of a layer from its tensors."""
    if isinstance(module, nn.Linear):
        module.out_features, module.in_features = module.weight.shape
    elif isinstance(module, nn.Conv2d):
        module.out_channels = len(module.weight)
    elif isinstance(module, nn.Embedding):
        module.embedding_dim = module.weight.shape[1]
    elif "normalized_shape" in vars(module):
        vars(module)["normalized_shape"] = tuple(module.weight.shape)  # type: ignore[arg-type]
    elif isinstance(module, Constant):
        module.shape = (*module.shape[:-1], module.bias.shape[-1])


def _whole(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(value)
    return int(value)


def _number(value: Any) -> Any:
    """Return a number, or a tuple of numbers, from JSON; ``ValueError`` for anything else."""
    if isinstance(value, list | tuple):
        return tuple(_number(side) for side in value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(value)
    return value
