"""Single branches made narrower in closed form: fewer hidden features of an FFN, fewer heads of an attention.

Those that are missed least once the others have taken over are removed first (``core.surgeon``), and the layer behind
them is refitted. Both need only the moments of its inputs over some images, without labels. Which branches become
narrower, and by how much, is not decided here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from hetdpt.adapters.attention import Attention, attention_at
from hetdpt.adapters.ffn import Ffn
from hetdpt.core.errors import ModelError, PlanError
from hetdpt.core.modules import clone
from hetdpt.core.plan import FewerFeatures, FewerHeads, Narrower
from hetdpt.core.surgeon import order_removals
from hetdpt.reduce.width.refit import InputMoments, inputs_of, refit_
from hetdpt.reduce.width.shapes import (
    WidthCut,
    add_features,
    add_heads,
    cut_,
    existing,
    map_of_heads,
    mark_narrowed_,
)
from hetdpt.surgery.arrange import arrange_, take_off_
from hetdpt.surgery.record import RECORD, require_record

PURPOSE = "making branches narrower"


@dataclass(frozen=True)
class Inner:
    """The features of one FFN, or the heads of one attention."""

    behind: str
    """The linear layer that they are inputs of."""
    count: int
    size: int
    """How many inputs of that layer each of them is."""
    add: Callable[[WidthCut, Tensor], None]
    """Adds to a cut what the branch keeps, given (kept, size) inputs of that layer."""

    @property
    def groups(self) -> Tensor:
        """(count, size): the inputs of the layer behind them."""
        return torch.arange(self.count * self.size).view(self.count, self.size)


def feature_counts(model: nn.Module) -> dict[int, int]:
    """Return how many hidden features there are in the FFNs of a model from which some can be removed, by block.

    ``model`` has a record. FFNs without their activation, gated ones and those with convolutions are not among them.
    """
    return {block: inner.count for block, inner in _ffns(model).items()}


def head_counts(model: nn.Module) -> dict[int, int]:
    """Return how many heads there are in the attention layers of a model from which some can be removed, by block.

    ``model`` has a record. Attention layers of classes that hetdpt cannot narrow are not among them.
    """
    return {block: inner.count for block, inner in _attentions(model).items()}


def _ffns(model: nn.Module) -> dict[int, Inner]:
    handles = [handle for handle in require_record(model).left if handle.ffn]
    found = {handle.site.block: handle.ffn for handle in handles if handle.ffn}
    return {block: _inner_ffn(model, ffn) for block, ffn in found.items() if _are_linear(model, ffn.first, ffn.second)}


def _inner_ffn(model: nn.Module, ffn: Ffn) -> Inner:
    def add(cut: WidthCut, kept: Tensor) -> None:
        add_features(cut, ffn, kept.flatten())

    return Inner(ffn.second, _layer(model, ffn.second).in_features, 1, add)


def _attentions(model: nn.Module) -> dict[int, Inner]:
    found = dict[int, Inner]()
    for handle in require_record(model).left:
        attention = _attention(model, handle.parts.core) if handle.site.kind == "attention" and handle.parts else None
        if attention is not None:
            add = partial(_add_heads, attention)
            found[handle.site.block] = Inner(attention.out, attention.heads, attention.head_dim, add)
    return found


def _add_heads(attention: Attention, cut: WidthCut, kept: Tensor) -> None:
    add_heads(cut, attention, kept)


def _attention(model: nn.Module, path: str) -> Attention | None:
    """Return the sizes of an attention; None if its heads cannot be removed."""
    try:
        found = attention_at(model, path)
    except ModelError:
        return None
    layers = {layer for layer, _ in (found.queries, found.keys, found.values)}
    return found if _are_linear(model, *layers, found.out) else None


def _are_linear(model: nn.Module, *paths: str) -> bool:
    return all(type(model.get_submodule(path)) is nn.Linear for path in paths)


def _layer(model: nn.Module, path: str) -> nn.Linear:
    layer = model.get_submodule(path)
    assert isinstance(layer, nn.Linear)
    return layer


def _inners(model: nn.Module, kind: type[Narrower]) -> dict[int, Inner]:
    return _ffns(model) if kind is FewerFeatures else _attentions(model)


def _inner(model: nn.Module, move: Narrower) -> Inner:
    return _inners(model, type(move))[move.block]


def inner_count(model: nn.Module, move: Narrower) -> int:
    """Return how many features or heads there are in the branch that ``move`` makes narrower."""
    return _inner(model, move).count


def narrow_branches_(model: nn.Module, moves: Iterable[Narrower], batches: Iterable[Tensor]) -> nn.Module:
    """Make branches of ``model`` narrower and return it.

    They are in order of execution, and each is fitted on the inputs that it gets when those before it are narrower.

    >>> import timm
    >>> from hetdpt.surgery.remove import ready
    >>> model = ready(timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, num_classes=10), "plain")
    >>> model = narrow_branches_(model, [FewerHeads(0, 2), FewerFeatures(1, 64)], [torch.randn(8, 3, 32, 32)])
    >>> head_counts(model), feature_counts(model), model.blocks[1].mlp.fc1
    ({0: 2, 1: 3}, {0: 768, 1: 64}, Linear(in_features=192, out_features=64, bias=True))
    """
    moves = [*moves]
    require_narrower(model, moves)
    for move in moves:
        if move.count < inner_count(model, move):
            [moments] = inner_moments(model, [move], batches).values()
            leave_(model, move, moments)
    return model


def require_narrower(model: nn.Module, moves: Iterable[Narrower]) -> None:
    """Raise ``PlanError`` unless the branches have at least so many hidden features or heads."""
    for move in moves:
        there = {block: inner.count for block, inner in _inners(model, type(move)).items()}
        if move.block not in there:
            what = "FFN whose hidden features" if isinstance(move, FewerFeatures) else "attention whose heads"
            raise PlanError(
                f"block {move.block} has no {what} can be removed; blocks that have one: "
                f"{', '.join(map(str, there)) or 'none'}"
            )
        if move.count > there[move.block]:
            raise PlanError(f"the plan leaves {move}, but there are {there[move.block]}")


def inner_moments(
    model: nn.Module, moves: Iterable[Narrower], batches: Iterable[Tensor]
) -> dict[Narrower, InputMoments]:
    """Return the moments of the inputs of the layer behind what each move removes, from one pass over the images."""
    paths = {move: _inner(model, move).behind for move in moves}
    inputs = inputs_of(model, paths.values(), batches, PURPOSE)
    return {move: inputs[path] for move, path in paths.items()}


def with_narrower(model: nn.Module, moves: Iterable[Narrower], batches: Iterable[Tensor]) -> dict[Narrower, nn.Module]:
    """Return a copy of ``model`` with each of ``moves``, fitted in one pass as if it were the only one."""
    moves = list(moves)
    moments = inner_moments(model, moves, batches) if moves else {}
    return {move: leave_(clone(model), move, moments[move]) for move in moves}


@torch.no_grad()
def leave_(model: nn.Module, move: Narrower, given: InputMoments) -> nn.Module:
    """Remove the features or heads of a block that are missed least, refit the layer behind them; return the model."""
    inner = _inner(model, move)
    layer = _layer(model, inner.behind)
    moments = given.moments(has_bias=layer.bias is not None)
    order = order_removals(layer.weight, moments.xx, inner.groups).order
    kept = order[len(order) - move.count :].sort().values
    refit_(layer, inner.groups[kept].flatten(), given)
    return cut_branch_(model, move, kept)


def cut_branch_(model: nn.Module, move: Narrower, kept: Tensor | None = None) -> nn.Module:
    """Keep the features or heads ``kept`` of a block, or the first ones, and return the model; nothing is fitted."""
    inner, cut = _inner(model, move), WidthCut()
    left = inner.groups[torch.arange(move.count) if kept is None else kept]
    inner.add(cut, left)
    maps = take_off_(model)
    if isinstance(move, FewerHeads) and move.block in maps:
        maps[move.block] = map_of_heads(*maps[move.block], left.flatten())
    cut_(model, existing(cut, model))
    mark_narrowed_(model, None, require_record(model).channels)
    record = require_record(model)
    vars(model)[RECORD] = replace(record, plan=record.plan.plus(move))
    return arrange_(model, maps)
