"""The modules that replace removed layers: where they are put and how they are shaped. Which one is a row of a table.

Nothing is fitted here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from hetdpt.adapters.anatomy import Handle
from hetdpt.adapters.ffn import Ffn
from hetdpt.adapters.layout import TokenLayout
from hetdpt.core.errors import PlanError
from hetdpt.core.fold import new_layer
from hetdpt.core.gates import ForPatches, PatchMap, PatchPass, Removed, replacement_class
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
    if style.removes == "patches":  # what follows the core is for class tokens too
        return Place(parts.core, parts.core, (), -1)
    is_order_free = not replacement_class(style).uses_input and not style.is_per_position  # one mean over all places
    if is_order_free or parts.is_direct or parts.gate == parts.core:
        return Place(parts.core, parts.gate, parts.scales, parts.gate_layout.axis - len(parts.gate_layout.shape))
    return Place(parts.core, parts.core, (), parts.core_layout.axis - len(parts.core_layout.shape))


def _place_of_ffn(model: nn.Module, ffn: Ffn) -> Place:
    axis = -3 if isinstance(layer_at(model, ffn.second), nn.Conv2d) else -1
    return Place(ffn.first, ffn.second, (ffn.scale,) if ffn.scale else (), axis)


def new_replacement(model: nn.Module, handle: Handle, style: Style, end: str, tokens: TokenLayout | None) -> Removed:
    """Return a replacement, without fitted values, for the output of the module at ``end`` of a branch.

    ``tokens`` are needed by styles in which the class token keeps its FFN.
    """
    if style.class_token == "keep":
        assert tokens is not None
        return _new_for_patches(model.get_submodule(end), handle, style, tokens.protected)
    replacement = replacement_class(style)
    if handle.site.kind == "activation" and style.removes == "layer":
        return replacement()
    parts = parts_of(handle)
    layout, extras = (parts.core_layout, parts.extras) if end == parts.core else (parts.gate_layout, None)
    like = next(model.get_submodule(parts.core).parameters(), next(model.parameters()))
    return replacement.new(layout.shape, layout.axis, like, extras)


def _new_for_patches(kept: nn.Module, handle: Handle, style: Style, protected: int) -> ForPatches:
    if style.removes == "layer":
        return PatchPass(kept, protected)
    width = parts_of(handle).core_layout.width
    like = next(kept.parameters())
    zeros = torch.zeros(width, width, dtype=torch.float64, device=like.device)
    return PatchMap(kept, protected, new_layer(zeros, zeros[0], like))


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
    if style.class_token == "keep" and not _is_module_of_tokens(handle):
        return (
            f"the class token cannot keep the FFN of block {site.block}, which is not a module of its own that gets "
            "tokens (B, N, D); use class_token 'share'"
        )
    if style.is_per_position and handle.images_at:
        return (
            f"{site} has tokens before images, (N, B, D), so values cannot be fitted per position; "
            f"{_advise(other for other in _others(style) if other.fit)}, or a model with batch_first=True"
        )
    return None


def _is_module_of_tokens(handle: Handle) -> bool:
    """Whether an FFN is a module that computes nothing else, of tokens (B, N, D)."""
    if handle.parts is None or handle.parts.extras is not None or handle.images_at:
        return False
    return len(handle.parts.core_layout.shape) == 2 and (handle.ffn is None or handle.ffn.core is not None)


def _others(style: Style) -> list[Style]:
    alike = [other for other in STYLES.values() if other.kind == style.kind and other != style]
    return [other for other in alike if other.class_token == style.class_token]


def _advise(styles: Iterable[Style]) -> str:
    found = list(styles)
    return f"use {found[0].kind} style " + " or ".join(f"{style.name!r} ({style.computes})" for style in found)


def require_removable(handle: Handle, style: Style) -> None:
    """Raise ``PlanError`` if ``style`` cannot remove a site."""
    if why := why_not_removable(handle, style):
        raise PlanError(why)
