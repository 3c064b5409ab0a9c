"""Single branches made narrower in closed form: hidden features of an FFN, heads of an attention and their dimensions.

Features and heads that are missed least once the others have taken over are removed first (``core.surgeon``), and the
layer behind them is refitted; dimensions of heads are turned first (``reduce.width.dims``). All of it needs only the
moments of inputs of layers over some images, without labels. Which branches become narrower, and by how much, is not
decided here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from hetdpt.adapters.attention import Attention, attention_at
from hetdpt.adapters.ffn import Ffn
from hetdpt.core.errors import ModelError, PlanError
from hetdpt.core.fold import exact
from hetdpt.core.modules import clone
from hetdpt.core.plan import FewerDims, FewerFeatures, FewerHeads, Narrower
from hetdpt.core.surgeon import order_removals
from hetdpt.reduce.width.dims import turn_heads_
from hetdpt.reduce.width.refit import Inputs, inputs_of, refit_
from hetdpt.reduce.width.shapes import (
    WidthCut,
    add_features,
    add_heads,
    cut_,
    existing,
    map_of_heads,
    mark_narrowed_,
)
from hetdpt.surgery.arrange import arrange_, kept_of, take_off_, with_all_tokens
from hetdpt.surgery.record import RECORD, require_record

PURPOSE = "making branches narrower"


@dataclass(frozen=True)
class Inner:
    """The features of one FFN, the heads of one attention, or their dimensions."""

    behind: str
    """The linear layer that they are inputs of."""
    groups: Tensor
    """(count, size): for each of them its inputs of that layer."""
    add: Callable[[WidthCut, Tensor], None]
    """Adds to a cut what the branch keeps, given the inputs of that layer that are kept, in order."""
    attention: Attention | None = None

    @property
    def count(self) -> int:
        return len(self.groups)


def feature_counts(model: nn.Module) -> dict[int, int]:
    """Return how many hidden features there are in the FFNs of a model from which some can be removed, by block.

    ``model`` has a record. FFNs without their activation, gated ones and those with convolutions are not among them.
    """
    return {block: inner.count for block, inner in _ffns(model).items()}


def head_counts(model: nn.Module) -> dict[int, int]:
    """Return how many heads there are in the attention layers of a model from which some can be removed, by block.

    ``model`` has a record. Attention layers of classes that hetdpt cannot narrow are not among them.
    """
    return {block: inner.count for block, inner in _heads(model).items()}


def dim_counts(model: nn.Module) -> dict[int, int]:
    """Return how many dimensions each head has in the attention layers from which some can be removed, by block.

    As with ``head_counts``; those that norm queries and keys are not among them, whose dimensions cannot be turned.
    """
    return {block: inner.count for block, inner in _dims(model).items()}


def _ffns(model: nn.Module) -> dict[int, Inner]:
    handles = [handle for handle in require_record(model).left if handle.ffn]
    found = {handle.site.block: handle.ffn for handle in handles if handle.ffn}
    return {block: _inner_ffn(model, ffn) for block, ffn in found.items() if _are_linear(model, ffn.first, ffn.second)}


def _inner_ffn(model: nn.Module, ffn: Ffn) -> Inner:
    def add(cut: WidthCut, kept: Tensor) -> None:
        add_features(cut, ffn, kept)

    return Inner(ffn.second, torch.arange(_layer(model, ffn.second).in_features)[:, None], add)


def _heads(model: nn.Module) -> dict[int, Inner]:
    return {block: _inner_attention(one, _table(one), one.head_dim) for block, one in _attentions(model).items()}


def _dims(model: nn.Module) -> dict[int, Inner]:
    return {
        block: _inner_attention(one, _table(one).T, None)
        for block, one in _attentions(model).items()
        if not one.norms and one.head_dim <= _layer(model, one.out).out_features
    }


def _table(attention: Attention) -> Tensor:
    """(heads, head_dim): inputs of the layer behind an attention."""
    return torch.arange(attention.heads * attention.head_dim).view(attention.heads, attention.head_dim)


def _inner_attention(attention: Attention, groups: Tensor, head_dim: int | None) -> Inner:
    """Return the inside of an attention; ``head_dim`` is None if it is what changes, not the number of heads."""

    def add(cut: WidthCut, kept: Tensor) -> None:
        add_heads(cut, attention, kept.view(-1, head_dim) if head_dim else kept.view(attention.heads, -1))

    return Inner(attention.out, groups, add, attention)


def _attentions(model: nn.Module) -> dict[int, Attention]:
    """Return the attention layers that can be made narrower, by block."""
    handles = [handle for handle in require_record(model).left if handle.site.kind == "attention"]
    found = {handle.site.block: _attention(model, handle.parts.core) for handle in handles if handle.parts}
    return {block: attention for block, attention in found.items() if attention is not None}


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


INNERS = {FewerFeatures: _ffns, FewerHeads: _heads, FewerDims: _dims}
WHAT = {
    FewerFeatures: "FFN whose hidden features",
    FewerHeads: "attention whose heads",
    FewerDims: "attention the dimensions of whose heads",
}


def _inner(model: nn.Module, move: Narrower) -> Inner:
    return INNERS[type(move)](model)[move.block]


def inner_count(model: nn.Module, move: Narrower) -> int:
    """Return how many features, heads or dimensions there are in what ``move`` makes narrower."""
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
            leave_(model, move, inner_moments(model, [move], batches))
    return model


def require_narrower(model: nn.Module, moves: Iterable[Narrower]) -> None:
    """Raise ``PlanError`` unless the branches have at least as many features, heads or dimensions as are left."""
    for move in moves:
        there = {block: inner.count for block, inner in INNERS[type(move)](model).items()}
        if move.block not in there:
            raise PlanError(
                f"block {move.block} has no {WHAT[type(move)]} can be removed; blocks that have one: "
                f"{', '.join(map(str, there)) or 'none'}"
            )
        if move.count > there[move.block]:
            raise PlanError(f"the plan leaves {move}, but there are {there[move.block]}")


def inner_moments(model: nn.Module, moves: Iterable[Narrower], batches: Iterable[Tensor]) -> Inputs:
    """Return the moments of the inputs of all layers that some moves need, by path, from one pass over the images."""
    moves = list(moves)
    inners = [_inner(model, move) for move in moves]
    turned = [inner.attention for move, inner in zip(moves, inners, strict=True) if isinstance(move, FewerDims)]
    paths = [inner.behind for inner in inners] + [attention.queries[0] for attention in turned if attention]
    return inputs_of(_with_patches(model, moves), paths, batches, PURPOSE) if moves else Inputs()


def _with_patches(model: nn.Module, moves: Iterable[Narrower]) -> nn.Module:
    """Return ``model`` or, for dimensions of heads in blocks that do not update patches, a copy that updates them.

    The keys of patches are not computed by the layer itself there.
    """
    record = require_record(model)
    stop = record.survey.anatomy.blocks if record.layout is None else kept_of(record)[0]
    is_in_tail = any(isinstance(move, FewerDims) and move.block >= stop for move in moves)
    return with_all_tokens(model) if is_in_tail else model


def with_narrower(model: nn.Module, moves: Iterable[Narrower], batches: Iterable[Tensor]) -> dict[Narrower, nn.Module]:
    """Return a copy of ``model`` with each of ``moves``, fitted in one pass as if it were the only one."""
    moves = list(moves)
    given = inner_moments(model, moves, batches)
    return {move: leave_(clone(model), move, given) for move in moves}


@torch.no_grad()
def leave_(model: nn.Module, move: Narrower, given: Inputs) -> nn.Module:
    """Remove the features, heads or dimensions of a block that are missed least, refit the layer behind; return it."""
    inner = _inner(model, move)
    if isinstance(move, FewerDims):
        assert inner.attention is not None
        turned = turn_heads_(model, inner.attention, move.count, given)
        return cut_branch_(model, move, of_maps=turned.of_maps)
    layer, moments = _layer(model, inner.behind), given[inner.behind]
    centred_moments = moments.moments(has_bias=layer.bias is not None)
    order = order_removals(layer.weight, centred_moments.xx, inner.groups).order
    kept = order[len(order) - move.count :].sort().values
    refit_(layer, inner.groups[kept].flatten(), moments)
    return cut_branch_(model, move, kept)


def cut_branch_(
    model: nn.Module, move: Narrower, kept: Tensor | None = None, of_maps: Tensor | None = None
) -> nn.Module:
    """Keep those ``kept`` of the features, heads or dimensions of a block, or the first ones, and return the model.

    Nothing is fitted. ``of_maps`` is applied to the map of keys and values that the block has in a tail.
    """
    inner, cut = _inner(model, move), WidthCut()
    left = inner.groups[torch.arange(move.count) if kept is None else kept].flatten().sort().values
    inner.add(cut, left)
    maps = take_off_(model)
    if move.kind == "attention" and move.block in maps:
        maps[move.block] = map_of_heads(*_turned(*maps[move.block], of_maps), left)
    cut_(model, existing(cut, model))
    mark_narrowed_(model, None, require_record(model).channels)
    record = require_record(model)
    vars(model)[RECORD] = replace(record, plan=record.plan.plus(move))
    return arrange_(model, maps)


def _turned(weight: Tensor, bias: Tensor, turn: Tensor | None) -> tuple[Tensor, Tensor]:
    if turn is None:
        return weight, bias
    return (turn @ exact(weight)).to(weight), (turn @ exact(bias)).to(bias)
