"""Any model, dense or pruned, as a backbone: images in, feature maps out, finest first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hetdpt.adapters.features import feature_maps
from hetdpt.adapters.models import input_size_of
from hetdpt.adapters.trace import dry_run
from hetdpt.core.errors import DataError, ModelError, first_line
from hetdpt.core.format import sides
from hetdpt.surgery.record import record_of
from hetdpt.surgery.resize import resize_
from hetdpt.surgery.tail import untrim_

SCALES = (4.0, 2.0, 1.0, 0.5)
"""Sides of the maps over the side of the map they are computed from, finest first."""


class ChannelNorm(nn.LayerNorm):
    """LayerNorm of the channels at every place of a map (B, C, h, w)."""

    def forward(self, maps: Tensor) -> Tensor:
        return super().forward(maps.movedim(1, -1)).movedim(-1, 1)


class SimplePyramid(nn.Module):
    """Four maps of ``width`` channels, of 4, 2, 1 and 1/2 times the side of the one map (B, ``channels``, h, w).

    From Li et al. 2022, "Exploring Plain Vision Transformer Backbones for Object Detection", section 3
    (https://arxiv.org/abs/2203.16527).

    Each is computed from that same map: enlarged by transposed convolutions of stride 2, which halve the channels,
    unchanged, or max-pooled; then follow a 1 x 1 and a 3 x 3 convolution, each with a norm over the channels.

    >>> import torch
    >>> [tuple(one.shape) for one in SimplePyramid(48, 32)(torch.zeros(1, 48, 4, 6))]
    [(1, 32, 16, 24), (1, 32, 8, 12), (1, 32, 4, 6), (1, 32, 2, 3)]
    """

    def __init__(self, channels: int, width: int = 256) -> None:
        super().__init__()
        if width < 1:
            raise ModelError(f"the maps of a pyramid have at least 1 channel, not {width}")
        half, quarter = max(channels // 2, 1), max(channels // 4, 1)
        finest = [_enlarge(channels, half), ChannelNorm(half), nn.GELU(), _enlarge(half, quarter)]
        self.levels = nn.ModuleList(
            [
                nn.Sequential(*finest, *_finish(quarter, width)),
                nn.Sequential(_enlarge(channels, half), *_finish(half, width)),
                nn.Sequential(*_finish(channels, width)),
                nn.Sequential(nn.MaxPool2d(2, ceil_mode=True), *_finish(channels, width)),
            ]
        )

    def forward(self, one: Tensor) -> tuple[Tensor, ...]:
        return tuple(level(one) for level in self.levels)


def _enlarge(channels: int, width: int) -> nn.Module:
    return nn.ConvTranspose2d(channels, width, kernel_size=2, stride=2)


def _finish(channels: int, width: int) -> list[nn.Module]:
    first = nn.Conv2d(channels, width, kernel_size=1, bias=False)  # the norm that follows has a bias
    second = nn.Conv2d(width, width, kernel_size=3, padding=1, bias=False)
    return [first, ChannelNorm(width), second, ChannelNorm(width)]


class Backbone(nn.Module):
    """``model`` as a feature extractor: maps (B, C_i, H / s_i, W / s_i) of ``channels`` and ``strides``, finest first.

    Strides are whole numbers, or those of a pyramid; if a side is not a multiple of one, the model rounds up or down.

    A model with stages returns the last map of each of the four coarsest strides; from the last map of a plain ViT a
    pyramid of ``width`` channels is computed, with strides patch / 4 to 2 patch. ``model`` is the model itself, resized
    to images of ``size`` (a side, or height and width) if given; it can be pruned, merged and saved as before.

    >>> import hetdpt
    >>> backbone = Backbone(hetdpt.load(hetdpt.export.saved.DEMO_DIRECTORY), width=32)
    >>> backbone.channels, backbone.strides
    ((32, 32, 32, 32), (1.0, 2.0, 4.0, 8.0))
    >>> [tuple(one.shape[2:]) for one in backbone(torch.zeros(1, 3, 24, 24))]
    [(24, 24), (12, 12), (6, 6), (3, 3)]
    """

    def __init__(self, model: nn.Module, *, size: int | tuple[int, int] | None = None, width: int = 256) -> None:
        super().__init__()
        record = record_of(untrim_(model))
        if record and record.plan.tail:
            raise ModelError("a backbone returns maps of patches, which a model with a tail does not update to the end")
        if size is not None:
            resize_(model, size)
        self.model = model
        self.layers, shapes = _stages(model, self.input_size)
        channels, strides = tuple(shape[1] for shape in shapes), _strides(self.input_size[1:], shapes)
        is_plain = len(self.layers) == 1
        if is_plain:
            _check_map(shapes[0][2:], strides[0], self.input_size)
        self.pyramid = SimplePyramid(channels[0], width) if is_plain else None
        self.channels: tuple[int, ...] = (width,) * len(SCALES) if is_plain else channels
        self.strides: tuple[float, ...] = tuple(strides[0] / scale for scale in SCALES) if is_plain else strides

    @property
    def input_size(self) -> tuple[int, int, int]:
        """Channels, height and width of the images."""
        return input_size_of(self.model)

    def coarsest_(self, count: int) -> Backbone:
        """Keep only the ``count`` coarsest maps and what computes them, and return the backbone."""
        if not 1 <= count <= len(self.channels):
            raise ModelError(
                f"the backbone has {len(self.channels)} maps, not {count}; set maps to at least 1 and at most that"
            )
        if self.pyramid is None:
            self.layers = self.layers[-count:]
        else:
            self.pyramid.levels = self.pyramid.levels[-count:]
        self.channels, self.strides = self.channels[-count:], self.strides[-count:]
        return self

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        maps = self._maps(images)
        return tuple(maps) if self.pyramid is None else self.pyramid(maps[0])

    def forward_with_filtered_kwargs(self, pixel_values: Tensor, **_: Any) -> Any:
        """Return the maps as the ``BackboneOutput`` of transformers, whose task models call this method."""
        from transformers.modeling_outputs import BackboneOutput

        return BackboneOutput(feature_maps=self(pixel_values))

    def _maps(self, images: Tensor) -> list[Tensor]:
        try:
            return feature_maps(self.model, images, self.layers)
        except (AssertionError, ValueError, RuntimeError) as error:
            if tuple(images.shape[1:]) == self.input_size:
                raise
            raise DataError(
                f"this backbone takes images of {sides(self.input_size)}, but got {sides(tuple(images.shape[1:]))}: "
                f"{first_line(error)}; resize them, or make the backbone with size=(height, width)"
            ) from error


class _Maps(nn.Module):
    """Returns the maps of a model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> list[Tensor]:
        return feature_maps(self.model, images)


def _stages(model: nn.Module, size: tuple[int, int, int]) -> tuple[tuple[int, ...], list[tuple[int, ...]]]:
    """Return the last layer of each stride, finest first, and the shape (B, C, h, w) of its map.

    Found by a run on fake tensors; if there are more strides than a pyramid has, the coarsest are used.
    """
    shapes: list[tuple[int, ...]] = []

    def look(_: nn.Module, args: Any, maps: list[Tensor]) -> None:
        shapes[:] = [tuple(one.shape) for one in maps]

    @contextmanager
    def watch(copy: nn.Module, *_: Any) -> Iterator[None]:
        copy.register_forward_hook(look)
        with torch.no_grad():
            yield

    try:
        dry_run(_Maps(model), (2, *size), watch)
    except ModelError as error:
        cause = error.__cause__
        raise cause if isinstance(cause, ModelError) else error from None
    last = {shape[2:]: number for number, shape in enumerate(shapes)}
    layers = sorted(last.values(), key=lambda number: -shapes[number][2])[-len(SCALES) :]
    return tuple(layers), [shapes[number] for number in layers]


def _strides(size: Sequence[int], shapes: Sequence[tuple[int, ...]]) -> tuple[float, ...]:
    """Return the strides of maps (B, C, h, w) of images of ``size``, finest first.

    Each is a whole multiple of the one before it; an odd side is halved with rounding up or down.
    """
    longer, stride, strides = max(size), 1.0, []
    for shape in shapes:
        stride *= round(longer / max(shape[2:]))
        longer = max(shape[2:])
        strides.append(stride)
    return tuple(strides)


def _check_map(shape: Sequence[int], stride: float, size: tuple[int, int, int]) -> None:
    if min(shape) < 2:
        least = sides((round(2 * stride),) * 2)
        raise ModelError(
            f"a pyramid needs 2 x 2 patches or more, but images of {sides(size[1:])} pixels have {sides(shape)}; "
            f"use images of at least {least}"
        )
