"""The pooled features of images, computed once and kept in files.

Of a classifier they are the inputs of the linear layers of its head, side by side if there are two (DeiT: the class
token, then the distillation token). Of a model without a head they are its pooled output. Nothing is fitted here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.nn import functional as F

from hetdpt.adapters.heads import logits_of, with_head_
from hetdpt.adapters.models import input_size_of, num_classes_of
from hetdpt.adapters.preprocessing import preprocessing_of
from hetdpt.core.errors import DataError, FileError, ModelError, first_line
from hetdpt.core.modules import bytes_of, evaluating, memory_advice, random_images
from hetdpt.data.batches import EvaluationBatches
from hetdpt.data.sources import Source
from hetdpt.data.subset import Subset
from hetdpt.export.saved import write_tensors
from hetdpt.store.atomic import written
from hetdpt.surgery.prefix_cache import Probe, heads_of

CHUNK = 256  # images in a file; a kill loses no more than that
SEAL = "sha256"


@dataclass(frozen=True)
class Features:
    """The features of the images of a split, in its order."""

    values: Tensor
    """(images, D), float32; zeros where an image could not be read."""
    labels: Tensor
    """(images,), int64; -1 where an image could not be read."""

    @property
    def is_read(self) -> Tensor:
        return self.labels >= 0


def heads_in(model: nn.Module) -> tuple[str, ...]:
    """Return the paths of the linear layers that compute the logits of ``model``; none if it has no head.

    >>> import timm
    >>> heads_in(timm.create_model("deit_tiny_distilled_patch16_224", depth=1))
    ('head', 'head_dist')
    """
    try:
        classes = num_classes_of(model)
    except ModelError:
        return ()
    with evaluating(model):
        heads = heads_of(model, random_images(model, input_size_of(model), 1))
    if any(model.get_submodule(path).out_features != classes for path in heads):
        raise ModelError(
            f"the logits of {type(model).__name__} do not come from linear layers with an output for each of its "
            f"{classes} classes, so its features are unknown; give another model"
        )
    return heads


def pooled_features(model: nn.Module, heads: tuple[str, ...], images: Tensor) -> Tensor:
    """Return the features (B, D) of ``images`` (B, C, H, W); ``heads`` are those of the model."""
    if heads:
        return Probe(heads)(model, images)
    answer: Any = model(images)
    found = answer if isinstance(answer, Tensor) else getattr(answer, "image_embeds", None)
    found = getattr(answer, "pooler_output", None) if found is None else found
    if not isinstance(found, Tensor) or found.ndim != 2:
        raise ModelError(
            f"{type(model).__name__} has neither a head nor a pooled output (B, D) to take features from; build it "
            "with a pooling, or with a classification head"
        )
    return found


@torch.no_grad()
def with_classifier_(model: nn.Module, heads: tuple[str, ...], weight: Tensor, bias: Tensor) -> nn.Module:
    """Make a linear layer on its features, (classes, D) and (classes,), the head of ``model``, and return the model.

    Two heads whose logits a model averages each get their part of it, doubled. ``ModelError`` if it does not.
    """
    with_head_(model, len(bias), heads)
    heads, images = heads_in(model), random_images(model, input_size_of(model), 2)
    first = 0
    for path in heads:
        head = model.get_submodule(path)
        assert isinstance(head, nn.Linear)
        if head.bias is None:
            raise ModelError(f"the head of {type(model).__name__} has no bias, but a probe has")
        head.weight.copy_(len(heads) * weight[:, first : first + head.in_features])
        head.bias.copy_(bias)
        first += head.in_features
    with evaluating(model):
        asked = F.linear(pooled_features(model, heads, images), weight.to(images), bias.to(images))
        answer = logits_of(model(images))
    if not torch.allclose(answer, asked, rtol=1e-3, atol=1e-3 * asked.abs().max().item()):
        raise ModelError(f"{type(model).__name__} does not average its {len(heads)} heads, so they are not one layer")
    return model


@torch.no_grad()
def compute_features(
    directory: Path,
    split: str,
    model: nn.Module,
    source: Source,
    *,
    batch_size: int,
    workers: int = 0,
    progress: Callable[[int, int], None] | None = None,
    before_write: Callable[[], None] | None = None,
) -> Features:
    """Return the features of all images of ``source``, without augmentation; those in ``directory`` are only read.

    Each ``CHUNK`` of them is a file, written whole or not at all. ``before_write`` is called before each and may raise.
    """
    directory.mkdir(parents=True, exist_ok=True)
    parts = [range(start, min(start + CHUNK, len(source))) for start in range(0, len(source), CHUNK)]
    files = {directory / f"{split}-{number:05d}.safetensors": part for number, part in enumerate(parts)}
    missing = {file: part for file, part in files.items() if not file.is_file()}
    indices = [index for part in missing.values() for index in part]
    rows = _rows(model, source, indices, batch_size, workers, progress)
    for file, part in missing.items():
        values, labels = (torch.stack(column) for column in zip(*islice(rows, len(part)), strict=True))
        if before_write is not None:
            before_write()
        with written(file) as scratch:
            tensors, seal = {"values": values, "labels": labels}, {SEAL: _seal(values, labels)}
            write_tensors(tensors, scratch, file, seal)
    return _read(list(files))


def _seal(values: Tensor, labels: Tensor) -> str:
    return hashlib.sha256(bytes_of(values) + bytes_of(labels)).hexdigest()


def _rows(
    model: nn.Module,
    source: Source,
    indices: list[int],
    batch_size: int,
    workers: int,
    progress: Callable[[int, int], None] | None,
) -> Iterator[tuple[Tensor, Tensor]]:
    if not indices:
        return
    heads, weight, done = heads_in(model), next(model.parameters()), len(source) - len(indices)
    chosen = Subset(source, tuple(indices))
    with evaluating(model):
        for batch in EvaluationBatches(chosen, preprocessing_of(model), batch_size=batch_size, workers=workers):
            with memory_advice(f"{len(batch.images)} images at once do not fit in memory; lower --batch-size"):
                values = pooled_features(model, heads, batch.images.to(weight)).float().cpu()
            is_read, done = batch.targets >= 0, done + len(batch.targets)
            if progress is not None:
                progress(done, len(source))
            yield from zip(values * is_read[:, None], batch.targets, strict=True)


def _read(files: list[Path]) -> Features:
    """Return the features in the files, in their order; ``DataError`` if no image could be read."""
    values, labels = [], []
    for file in files:
        way_out = "remove it to have it made again"
        try:
            with safe_open(file, "pt") as found:
                seal = (found.metadata() or {}).get(SEAL)
                values.append(found.get_tensor("values"))
                labels.append(found.get_tensor("labels"))
        except SafetensorError as error:
            raise FileError(f"{file} is damaged ({first_line(error)}); {way_out}") from None
        if seal != _seal(values[-1], labels[-1]):
            raise FileError(f"{file} is damaged (its checksum does not match); {way_out}")
    features = Features(torch.cat(values), torch.cat(labels))
    if not features.is_read.any():
        raise DataError(f"none of the {len(features.labels)} images can be read; check the files")
    return features
