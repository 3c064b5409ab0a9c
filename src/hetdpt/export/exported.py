"""A model as one file for another runtime, run there and compared with torch before it is kept."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from hetdpt.adapters.models import input_size_of
from hetdpt.core.errors import FileError, ModelError
from hetdpt.core.modules import evaluating, random_images
from hetdpt.export.runtimes import ExportRuntime, runtime_of
from hetdpt.measurement.agreement import outputs_of
from hetdpt.store.atomic import require_new
from hetdpt.surgery.gate import gates_of
from hetdpt.surgery.record import record_of

BATCHES = (1, 3)  # the model is traced with 2, so these show that the batch is dynamic


@dataclass(frozen=True)
class Exported:
    """Where the model is, and by how much the runtime differs from torch on random images."""

    path: Path
    largest_difference: float
    relative_difference: float
    """The largest difference over the largest output."""


class Tensors(nn.Module):
    """Returns a model's tensors as a tuple, whatever it returns them in."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        return tuple(outputs_of(self.model, images))


def export_model(
    model: nn.Module,
    path: str | Path,
    input_size: tuple[int, int, int] | None = None,
    *,
    runtime: ExportRuntime | None = None,
    overwrite: bool = False,
    tolerance: float | None = None,
) -> Exported:
    """Write ``model`` as one file of ``runtime`` and return how far that is from torch; the suffix names it if None.

    A relative difference above ``tolerance`` (1e-3, or 2e-2 in half precision) is an error, and no file is written.
    """
    target = Path(path)
    runtime = runtime or runtime_of(target)
    require_new(target, overwrite)
    if target.is_dir():
        raise FileError(f"{target} is a directory; give the name of a file, such as {target / runtime.file}")
    if gates_of(model):
        raise ModelError("this model has gates on its layers; call restore_(model) before exporting it")
    weight = next(model.parameters())
    if weight.is_meta:
        raise ModelError("this model cannot be exported: it has no weights (its parameters are on the meta device)")
    record, module = record_of(model), runtime.load()
    size = input_size or (record.survey.input_size if record else input_size_of(model))
    tolerance = tolerance or (1e-3 if weight.dtype == torch.float32 else 2e-2)
    images = random_images(model, size, 2)
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = target.with_name(f".{os.getpid()}.{target.name}")  # some runtimes insist on their suffix
    try:
        with evaluating(model):
            module.write(model, images, scratch)
            largest, relative = _difference(model, images, module.open_file(scratch))
        if not relative <= tolerance:
            raise ModelError(
                f"{runtime.runner} differs from torch by {relative:.1e} of the largest output, more than "
                f"{tolerance:.0e}; the model was not exported"
            )
        os.replace(scratch, target)
    finally:
        scratch.unlink(missing_ok=True)
    return Exported(target, largest, relative)


@torch.inference_mode()
def _difference(model: nn.Module, images: Tensor, run: Callable[[Tensor], Sequence[Tensor]]) -> tuple[float, float]:
    """Return the largest difference of any output, and the largest one over the largest output."""
    largest = relative = 0.0
    for batch in BATCHES:
        given = images[:1].expand(batch, *images.shape[1:]) + 0.1 * torch.arange(batch).to(images)[:, None, None, None]
        for one, other in zip(outputs_of(model, given), run(given), strict=True):
            difference = (one.cpu() - other).abs().max().item()
            largest = max(largest, difference)
            relative = max(relative, difference / max(one.abs().max().item(), 1e-30))
    return largest, relative
