"""A pyramid of maps from the one map of a plain ViT (Li et al. 2022, "Exploring Plain Vision Transformer Backbones for
Object Detection", https://arxiv.org/abs/2203.16527, section 3). Knows no model and no task."""

from __future__ import annotations

from torch import Tensor, nn

from hetdpt.core.errors import ModelError

SCALES = (4.0, 2.0, 1.0, 0.5)
"""Sides of the maps over the side of the map they are made from, finest first."""


class ChannelNorm(nn.LayerNorm):
    """LayerNorm of the channels at every place of a map (B, C, h, w)."""

    def forward(self, maps: Tensor) -> Tensor:
        return super().forward(maps.movedim(1, -1)).movedim(-1, 1)


class SimplePyramid(nn.Module):
    """Four maps of ``width`` channels, of 4, 2, 1 and 1/2 times the side of the one map (B, ``channels``, h, w).

    Each is made of that same map: enlarged by transposed convolutions of stride 2, which halve the channels, as it is,
    or by max-pooling; then come a 1 x 1 and a 3 x 3 convolution, a norm of the channels after each.

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
    first = nn.Conv2d(channels, width, kernel_size=1, bias=False)  # the norm behind has a bias
    second = nn.Conv2d(width, width, kernel_size=3, padding=1, bias=False)
    return [first, ChannelNorm(width), second, ChannelNorm(width)]
