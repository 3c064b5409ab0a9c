"""The modules that replace removed layers: where they are put and how they are shaped. Which one is a row of a table.

Nothing is fitted here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from hetdpt.adapters.anatomy import Handle
from hetdpt.adapters.ffn import Ffn
from hetdpt.core.errors import PlanError
from hetdpt.core.gates import Removed, replacement_class
from hetdpt.core.styles import STYLES, Style
from hetdpt.surgery.record import layer_at, parts_of


@dataclass(frozen=True)
class Place:
    """Where a fitted replacement is put: it must return what ``target`` does, scaled, for the input of ``source``."""

    source: str
    """The module that is replaced."""
    target: str
    scales: tuple[str, ...]
    """Parameters that multiply the output of ``target`` on its way to the stream; they become part of the fit."""
    axis: int
    """The axis of the channels in the output of ``target``, counted from the end."""


def place_of(model: nn.Module, handle: Handle, style: Style) -> Place:
    """Return where the fitted replacement of a site that is still in ``model`` is put."""
    if style.removes == "ffn" and handle.ffn:
        return _place_of_ffn(model, handle.ffn)
    parts = parts_of(handle)
    is_order_free = not replacement_class(style).uses_input and not style.is_per_position  # one mean over all places
    if is_order_free or parts.is_direct or parts.gate == parts.core:
        return Place(parts.core, parts.gate, parts.scales, parts.gate_layout.axis - len(parts.gate_layout.shape))
    return Place(parts.core, parts.core, (), parts.core_layout.axis - len(parts.core_layout.shape))


def _place_of_ffn(model: nn.Module, ffn: Ffn) -> Place:
    axis = -3 if isinstance(layer_at(model, ffn.second), nn.Conv2d) else -1
    return Place(ffn.first, ffn.second, (ffn.scale,) if ffn.scale else (), axis)


def new_replacement(model: nn.Module, handle: Handle, style: Style, end: str) -> Removed:
    """Return a replacement, without fitted values, for the output of the module at ``end`` of a branch."""
    replacement = replacement_class(style)
    if handle.site.kind == "activation" and style.removes == "layer":
        return replacement()
    parts = parts_of(handle)
    layout, extras = (parts.core_layout, parts.extras) if end == parts.core else (parts.gate_layout, None)
    like = next(model.get_submodule(parts.core).parameters(), next(model.parameters()))
    return replacement.new(layout.shape, layout.axis, like, extras)


def why_not_removable(handle: Handle, style: Style) -> str | None:
    """Return why ``style`` cannot remove a site, or None if it can."""
    site = handle.site
    if site.is_gated and not style.allows_gated:
        return (
            f"activation {site.block} belongs to a gated FFN, which has no exact linear form; "
            f"{_advise(other for other in _others(style) if other.allows_gated)}"
        )
    if style.removes == "branch" and handle.parts is None:
        return (
            f"the FFN of block {site.block} cannot be removed as a whole; "
            f"{_advise(other for other in _others(style) if other.removes != 'branch')}"
        )
    if style.is_per_position and handle.images_at:
        return (
            f"{site.kind} {site.block} has tokens before images, (N, B, D), so values cannot be fitted per position; "
            f"{_advise(other for other in _others(style) if other.fit)}, or a model with batch_first=True"
        )
    return None


def _others(style: Style) -> list[Style]:
    return [other for other in STYLES.values() if other.kind == style.kind and other != style]


def _advise(styles: Iterable[Style]) -> str:
    found = list(styles)
    return f"use {found[0].kind} style " + " or ".join(f"{style.name!r} ({style.computes})" for style in found)


def require_removable(handle: Handle, style: Style) -> None:
    """Raise ``PlanError`` if ``style`` cannot remove a site."""
    if why := why_not_removable(handle, style):
        raise PlanError(why)
