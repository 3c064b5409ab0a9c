"""Segmentation: UperNet on a backbone, a class for every pixel (Xiao et al. 2018, https://arxiv.org/abs/1807.10221)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hetdpt.core.errors import TrainError
from hetdpt.core.modules import evaluating
from hetdpt.tasks.annotated import AnnotatedBatch, Target
from hetdpt.tasks.backbone import Backbone
from hetdpt.tasks.masks import IGNORED
from hetdpt.tasks.model import TaskModel

CLASSES_AT_ONCE = 16
"""Classes that are upsampled together: all 150 of a large photograph would take gigabytes."""


@dataclass(frozen=True, kw_only=True)
class SegmenterConfig:
    """The head of a segmenter; the defaults are those of UperNet on ADE20K."""

    width: int = 512
    """Channels of the head."""
    pool_scales: tuple[int, ...] = (1, 2, 3, 6)
    """Sides of the grids that the coarsest map is pooled to, so that every pixel has global context."""
    auxiliary_weight: float = 0.4
    """Weight of the loss of an auxiliary head on the second-last map, which helps in training; 0 for none."""
    auxiliary_width: int = 256
    """Channels of that head."""
    auxiliary_layers: int = 1
    """Convolutions of that head."""

    def __post_init__(self) -> None:
        for name in ("width", "auxiliary_width"):
            _require(getattr(self, name) >= 1, f"{name} is {getattr(self, name)}; it must be 1 or more")
        _require(self.auxiliary_layers >= 1, f"auxiliary_layers is {self.auxiliary_layers}; it must be 1 or more")
        _require(self.auxiliary_weight >= 0, f"auxiliary_weight is {self.auxiliary_weight}; it cannot be negative")
        _require(
            len(self.pool_scales) > 0 and min(self.pool_scales) >= 1,
            f"pool_scales are {self.pool_scales}; numbers of 1 or more were expected",
        )


class Segmenter(TaskModel):
    """UperNet's heads, those of transformers, on the maps of a backbone.

    ``forward(images)`` returns logits (B, classes, H, W) on the canvas. ``forward(images, targets)`` returns the loss:
    the mean cross-entropy over the pixels that are not ignored, plus ``auxiliary_weight`` times the auxiliary head's.
    """

    task = "segmentation"

    def __init__(self, backbone: Backbone, classes: Sequence[str], config: SegmenterConfig | None = None) -> None:
        from transformers import UperNetConfig
        from transformers.models.upernet.modeling_upernet import UperNetFCNHead, UperNetHead

        config = config or SegmenterConfig()
        super().__init__(backbone, classes, config)
        settings = UperNetConfig(
            hidden_size=config.width,
            pool_scales=config.pool_scales,
            auxiliary_channels=config.auxiliary_width,
            auxiliary_num_convs=config.auxiliary_layers,
        )
        settings.num_labels = len(classes)
        channels = backbone.channels
        self.head = UperNetHead(settings, channels)
        self._auxiliary_weight = config.auxiliary_weight
        place = max(0, len(channels) - 2)
        self.auxiliary = UperNetFCNHead(settings, channels, in_index=place) if config.auxiliary_weight else None

    def forward(self, images: Tensor, targets: Sequence[Target] | None = None) -> Tensor:
        if targets is None:
            return _enlarged(self.head(self.backbone(images)), images.shape[2:])
        if self.training:
            self.require_batch(len(images))
        maps = self.backbone(images)
        mask = _masks(targets, images)
        loss = pixel_loss(_enlarged(self.head(maps), images.shape[2:]), mask)
        if self.auxiliary is None:
            return loss
        auxiliary = pixel_loss(_enlarged(self.auxiliary(maps), images.shape[2:]), mask)
        return loss + self._auxiliary_weight * auxiliary

    def require_batch(self, images: int) -> None:
        """Refuse batches of one image: a map pooled to one pixel has no variance for batch norm."""
        has_norm = any(isinstance(module, nn.BatchNorm2d) for module in self.head.modules())
        if images < 2 and has_norm:  # a synchronised one is not a BatchNorm2d
            raise TrainError("UperNet has batch norms, which need at least 2 images per batch; raise batch_size")


def pixel_loss(logits: Tensor, mask: Tensor) -> Tensor:
    """Return the mean cross-entropy of ``logits`` (B, C, H, W) over the pixels of ``mask`` (B, H, W) with a class.

    It is 0 if all pixels are ignored.
    """
    total = F.cross_entropy(logits, mask.long(), ignore_index=IGNORED, reduction="sum")
    return total / (mask != IGNORED).sum().clamp(min=1)


@torch.no_grad()
def segment(model: nn.Module, batch: AnnotatedBatch) -> list[Tensor]:
    """Return the classes (h, w) of each image in ``batch``, at the size of its file, on the device of ``model``.

    The targets say where the images are on the canvas, as those of ``MaskView`` for evaluation; masks are not needed.
    """
    with evaluating(model):
        logits = model(batch.images.to(next(model.parameters()))).float()
    return [
        _best(one[:, : int(target["inside"][0]), : int(target["inside"][1])], target["size"].tolist())
        for one, target in zip(logits, batch.targets, strict=True)
        if target
    ]


def _best(logits: Tensor, size: list[int]) -> Tensor:
    """Return the class of the largest of ``logits`` (C, h, w) at each pixel of ``size``, a few classes at a time."""
    value, best = logits.new_full(size, -torch.inf), torch.zeros(size, dtype=torch.long, device=logits.device)
    for first in range(0, len(logits), CLASSES_AT_ONCE):
        found = _enlarged(logits[None, first : first + CLASSES_AT_ONCE], size)[0].max(dim=0)
        is_better = found.values > value
        best = torch.where(is_better, found.indices + first, best)
        value = torch.where(is_better, found.values, value)
    return best


def _enlarged(maps: Tensor, size: Sequence[int]) -> Tensor:
    return F.interpolate(maps, size=tuple(size), mode="bilinear", align_corners=False)


def _masks(targets: Sequence[Target], images: Tensor) -> Tensor:
    """Return the masks (B, H, W) of a batch; where there is no image, all pixels are ignored."""
    nothing = torch.full(images.shape[2:], IGNORED, dtype=torch.uint8, device=images.device)
    return torch.stack([target.get("mask", nothing) for target in targets])


def _require(holds: bool, sentence: str) -> None:
    if not holds:
        raise TrainError(sentence)
