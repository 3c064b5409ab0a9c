"""Fewer hidden features in the FFNs of single blocks, in closed form. Which blocks and how many is not decided here.

The features that are missed least once the others have taken over are removed first (``core.surgeon``), and the layer
behind them is refitted. Both need only the moments of the features over some images, without labels.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from hetdpt.adapters.ffn import Ffn
from hetdpt.core.errors import PlanError
from hetdpt.core.modules import clone
from hetdpt.core.plan import FewerFeatures
from hetdpt.core.surgeon import order_removals
from hetdpt.reduce.width.refit import InputMoments, inputs_of, refit_
from hetdpt.reduce.width.shapes import WidthCut, cut_, mark_narrowed_
from hetdpt.surgery.record import RECORD, require_record

PURPOSE = "removing hidden features"


def feature_counts(model: nn.Module) -> dict[int, int]:
    """Return how many hidden features there are in the FFNs of a model from which some can be removed, by block.

    ``model`` has a record. FFNs without their activation, gated ones and those with convolutions are not among them.
    """
    return {block: _layer(model, ffn.second).in_features for block, ffn in _ffns(model).items()}


def _ffns(model: nn.Module) -> dict[int, Ffn]:
    handles = [handle for handle in require_record(model).left if handle.ffn]
    found = {handle.site.block: handle.ffn for handle in handles if handle.ffn}
    return {block: ffn for block, ffn in found.items() if _are_linear(model, ffn)}


def _are_linear(model: nn.Module, ffn: Ffn) -> bool:
    return all(type(model.get_submodule(path)) is nn.Linear for path in (ffn.first, ffn.second))


def _layer(model: nn.Module, path: str) -> nn.Linear:
    layer = model.get_submodule(path)
    assert isinstance(layer, nn.Linear)
    return layer


def feature_moments(model: nn.Module, blocks: Iterable[int], batches: Iterable[Tensor]) -> dict[int, InputMoments]:
    """Return the moments of the hidden features of ``blocks``, from one pass over the images."""
    ffns = _ffns(model)
    paths = {block: ffns[block].second for block in blocks}
    inputs = inputs_of(model, paths.values(), batches, PURPOSE)
    return {block: inputs[path] for block, path in paths.items()}


def narrow_features_(model: nn.Module, counts: Mapping[int, int], batches: Iterable[Tensor]) -> nn.Module:
    """Leave so many hidden features in the FFNs of some blocks, by block, and return the model.

    Blocks are narrowed in order of execution, each on the inputs that it gets when those before it are narrowed.

    >>> import timm
    >>> from hetdpt.surgery.remove import ready
    >>> model = ready(timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, num_classes=10), "plain")
    >>> model = narrow_features_(model, {1: 64}, [torch.randn(8, 3, 32, 32)])
    >>> feature_counts(model), model.blocks[1].mlp.fc1
    ({0: 768, 1: 64}, Linear(in_features=192, out_features=64, bias=True))
    """
    require_features(model, counts)
    there = feature_counts(model)
    for block, count in sorted(counts.items()):
        if count < there[block]:
            [moments] = feature_moments(model, [block], batches).values()
            leave_features_(model, FewerFeatures(block, count), moments)
    return model


def require_features(model: nn.Module, counts: Mapping[int, int]) -> None:
    """Raise ``PlanError`` unless the FFNs of these blocks have at least so many hidden features."""
    there = feature_counts(model)
    for block, count in counts.items():
        if block not in there:
            raise PlanError(
                f"block {block} has no FFN whose hidden features can be removed; blocks that have one: "
                f"{', '.join(map(str, there)) or 'none'}"
            )
        if count > there[block]:
            raise PlanError(f"the plan leaves {count} features in block {block}, but there are {there[block]}")


def with_fewer_features(
    model: nn.Module, moves: Iterable[FewerFeatures], batches: Iterable[Tensor]
) -> dict[FewerFeatures, nn.Module]:
    """Return a copy of ``model`` with each of ``moves``, fitted in one pass as if it were the only one."""
    moves = list(moves)
    moments = feature_moments(model, {move.block for move in moves}, batches) if moves else {}
    return {move: leave_features_(clone(model), move, moments[move.block]) for move in moves}


@torch.no_grad()
def leave_features_(model: nn.Module, move: FewerFeatures, given: InputMoments) -> nn.Module:
    """Remove the features of a block that are missed least, refit the layer behind them, and return the model."""
    ffn = _ffns(model)[move.block]
    layer = _layer(model, ffn.second)
    order = _order(layer, given)
    kept = order[len(order) - move.count :].sort().values
    refit_(layer, kept, given)
    return cut_features_(model, move, kept)


def cut_features_(model: nn.Module, move: FewerFeatures, kept: Tensor | None = None) -> nn.Module:
    """Keep the features ``kept`` of a block, or the first ones, and return the model; nothing is fitted."""
    ffn, kept = _ffns(model)[move.block], torch.arange(move.count) if kept is None else kept
    kept_at = {(f"{ffn.first}.weight", 0): kept, (f"{ffn.second}.weight", 1): kept}
    if _layer(model, ffn.first).bias is not None:
        kept_at[f"{ffn.first}.bias", 0] = kept
    cut_(model, WidthCut(kept_at))
    mark_narrowed_(model, None, require_record(model).channels)
    record = require_record(model)
    vars(model)[RECORD] = replace(record, plan=record.plan.plus(move))
    return model


def _order(layer: nn.Linear, given: InputMoments) -> Tensor:
    """Return the inputs of ``layer`` in the order in which it can lose them."""
    moments = given.moments(has_bias=layer.bias is not None)
    return order_removals(layer.weight, moments.xx, torch.arange(layer.in_features)[:, None]).order
