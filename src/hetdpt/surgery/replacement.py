"""The modules that take the place of removed layers: where they go, how they are shaped, how their values are set."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hetdpt.adapters.anatomy import Handle, Layout
from hetdpt.adapters.ffn import Ffn
from hetdpt.core.errors import PlanError
from hetdpt.core.fold import Layer, new_layer
from hetdpt.core.gates import Constant, Extras, Mapped, Pass, Removed, Zero
from hetdpt.core.plan import Plan
from hetdpt.surgery.record import layer_at, parts_of

Values = Tensor | tuple[Tensor, Tensor]
"""A constant (places, D), or the matrix and the bias of a linear map."""
SAME_PLACES = {"view", "_unsafe_view", "reshape", "clone", "alias", "detach", "_to_copy"}
"""Operations that leave every value in its place where they leave the shape."""


@dataclass(frozen=True)
class Place:
    """Where a fitted replacement goes: it must give what ``target`` gives, scaled, for what ``source`` is given."""

    source: str
    """The module that the replacement takes the place of."""
    target: str
    scales: tuple[str, ...]
    """Parameters that multiply the output of ``target`` on its way to the stream; the replacement has them in it."""
    stream: str
    """The module that is given the residual stream."""
    is_end: bool
    """Whether the output of ``target``, scaled, is what the branch adds to the stream, lying the same way."""
    axis: int
    """Where the output of ``target`` has its channels, counted from the end."""


def place_of(model: nn.Module, handle: Handle, style: str) -> Place:
    """Return where the fitted replacement of a site goes that is still in ``model``."""
    if handle.ffn is not None:
        return _place_of_ffn(model, handle, handle.ffn)
    parts = parts_of(handle)
    stream = (*parts.entry, parts.core)[0]
    is_mean = style == "constant"  # over all places, whatever order they are in
    if is_mean or parts.is_direct or parts.gate == parts.core:
        axis = parts.gate_layout.axis - len(parts.gate_layout.shape)
        is_end = parts.is_direct and SAME_PLACES.issuperset(parts.tail)
        return Place(parts.core, parts.gate, parts.scales, stream, is_end, axis)
    axis = parts.core_layout.axis - len(parts.core_layout.shape)
    return Place(parts.core, parts.core, (), stream, False, axis)


def _place_of_ffn(model: nn.Module, handle: Handle, ffn: Ffn) -> Place:
    scales = (ffn.scale,) if ffn.scale else ()
    parts = handle.parts
    stream = (*parts.entry, parts.core)[0] if parts else ffn.first
    is_end = ffn.is_end and parts is not None and parts.is_direct
    axis = -3 if isinstance(layer_at(model, ffn.second), nn.Conv2d) else -1
    return Place(ffn.first, ffn.second, scales, stream, is_end, axis)


@torch.no_grad()
def fill_values(module: nn.Module, values: Values, axis: int = -1) -> None:
    """Set a constant, whose channels are on ``axis``, or a matrix and a bias."""
    if isinstance(values, Tensor):
        assert isinstance(module, Constant)
        shape = module.value.movedim(axis, -1).shape
        module.bias.copy_(values.view(shape).movedim(-1, axis).reshape(module.bias.shape))
    else:
        layer = module.linear if isinstance(module, Mapped) else module
        assert isinstance(layer, Layer)
        assert layer.bias is not None
        layer.weight.copy_(values[0].view_as(layer.weight))
        layer.bias.copy_(values[1])


def stand_in(handle: Handle, plan: Plan) -> tuple[str, Removed]:
    """Return which module goes and what takes its place."""
    style = plan.style_of(handle.site.kind)
    if style == "identity":
        return handle.site.path, Pass()
    parts = parts_of(handle)
    return parts.core, (Pass if style == "norm" else Zero)(parts.extras)


def new_replacement(style: str, layout: Layout, like: Tensor, extras: Extras) -> Removed:
    """Return a replacement of that style for values that lie that way, with zeros for now."""
    if style in ("constant", "position"):
        shape = layout.vector if style == "constant" else layout.shape
        bias = torch.zeros(layout.width if style == "constant" else shape, dtype=like.dtype, device=like.device)
        return Constant(nn.Parameter(bias, like.requires_grad), shape, extras)
    zeros = torch.zeros(layout.width, layout.width, dtype=torch.float64, device=like.device)
    is_map = len(layout.shape) == 3 and layout.axis == 0
    return Mapped(new_layer(zeros, zeros[0], like, is_map), extras)


def why_not_removable(handle: Handle, plan: Plan) -> str | None:
    """Return why the plan's style cannot remove a site, or None if it can."""
    style = plan.style_of(handle.site.kind)
    if style == "identity" and handle.site.is_gated:
        return (
            f"activation {handle.site.block} belongs to a gated FFN, which has no exact linear form; "
            "use removal 'calibrated' (a fitted linear map), or remove the whole FFN with removal=('skip', 'drop')"
        )
    if style == "drop" and handle.parts is None:
        return f"the FFN of block {handle.site.block} cannot go as a whole; use activation style 'identity'"
    if style == "position" and handle.images_at:
        return (
            f"attention {handle.site.block} has tokens before images, (N, B, D), so that there is no value for each "
            "place to be fitted; use removal style 'constant' or 'linear', or a model with batch_first=True"
        )
    return None


def require_removable(handles: list[Handle], plan: Plan) -> None:
    for handle in handles:
        if why := why_not_removable(handle, plan):
            raise PlanError(why)
