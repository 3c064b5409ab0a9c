"""ONNX: exported with a dynamic batch, then run in ONNX Runtime against the model it came from."""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hetdpt.adapters.models import input_size_of, unfuse_
from hetdpt.core.errors import FileError, ModelError, first_line
from hetdpt.core.modules import clone, evaluating, random_images
from hetdpt.measurement.agreement import outputs_of
from hetdpt.store.atomic import require_new
from hetdpt.surgery.gate import gates_of
from hetdpt.surgery.record import record_of

BATCHES = (1, 3)  # one is traced with neither, so the batch is shown to be dynamic
REARRANGING = {"Expand", "Reshape", "Transpose", "Slice", "Squeeze", "Unsqueeze", "Identity"}
"""Operations that make zeros of zeros."""


@dataclass(frozen=True)
class OnnxExport:
    """Where the model is, and by how much ONNX Runtime differs from torch on random images."""

    path: Path
    largest_difference: float
    relative_difference: float
    """The largest difference over the largest output."""


class _Tensors(nn.Module):
    """Returns a model's tensors as a tuple, whatever it returns them in."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        return tuple(outputs_of(self.model, images))


def export_onnx(
    model: nn.Module,
    path: str | Path,
    input_size: tuple[int, int, int] | None = None,
    *,
    overwrite: bool = False,
    tolerance: float | None = None,
) -> OnnxExport:
    """Write ``model`` as one ONNX file with a dynamic batch and return how far ONNX Runtime is from torch.

    A relative difference above ``tolerance`` (1e-3, or 2e-2 in half precision) is an error, and nothing is left behind.
    """
    target = Path(path)
    require_new(target, overwrite)
    if target.is_dir():
        raise FileError(f"{target} is a directory; give the name of a file, such as {target / 'model.onnx'}")
    if gates_of(model):
        raise ModelError("this model has gates on its layers; call restore_(model) before exporting it")
    record = record_of(model)
    size = input_size or (record.survey.input_size if record else input_size_of(model))
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = target.with_name(f".{target.name}.{os.getpid()}")
    weight = next(model.parameters())
    if weight.is_meta:
        raise ModelError("this model cannot be exported: it has no weights (its parameters are on the meta device)")
    tolerance = tolerance or (1e-3 if weight.dtype == torch.float32 else 2e-2)
    images = random_images(model, size, 2)
    try:
        with evaluating(model):
            _export(unfuse_(clone(model)), images, scratch)
            largest, relative = _difference(model, images, scratch)
        if not relative <= tolerance:
            raise ModelError(
                f"ONNX Runtime differs from torch by {relative:.1e} of the largest output, more than {tolerance:.0e}; "
                "the model was not exported"
            )
        os.replace(scratch, target)
    finally:
        scratch.unlink(missing_ok=True)
    return OnnxExport(target, largest, relative)


def _export(model: nn.Module, images: Tensor, path: Path) -> None:
    try:
        import onnxscript  # noqa: F401  (torch's exporter needs it)
    except ImportError:
        raise ModelError("export to ONNX needs onnx, onnxscript and onnxruntime; install hetdpt[export]") from None
    batch = torch.export.Dim("batch")
    with warnings.catch_warnings(action="ignore"):  # the exporter's own deprecations
        try:
            program = torch.onnx.export(
                _Tensors(model).eval(),
                (images,),
                dynamo=True,
                dynamic_shapes=({0: batch},),
                input_names=["images"],
                verbose=False,
            )
        except torch.onnx.OnnxExporterError as error:
            cause = first_line(error.__cause__ or error)
            raise ModelError(f"{type(model).__name__} cannot be exported to ONNX by this torch: {cause}") from error
        assert program is not None
        _drop_zeros_(program.model)
        program.save(path, external_data=False)


def _drop_zeros_(model: Any) -> None:
    """Take x + 0 out of a graph, which is what a removed branch leaves, and all that only led up to these zeros.

    No runtime does it by itself while the batch is dynamic. Where the sum may have another shape than x it stays.
    """
    from onnxscript.optimizer import remove_unused_nodes

    zeros: set[Any] = set()
    for node in model.graph:
        if _is_zero(node, zeros):
            zeros.update(node.outputs)
        elif node.op_type == "Add" and not zeros.isdisjoint(node.inputs):
            [total], kept = node.outputs, [value for value in node.inputs if value not in zeros]
            is_output = any(total is output for output in model.graph.outputs)
            if len(kept) == 1 and kept[0].shape is not None and kept[0].shape == total.shape and not is_output:
                for user, number in tuple(total.uses()):
                    user.replace_input_with(number, kept[0])
    if zeros:
        remove_unused_nodes(model)


def _is_zero(node: Any, zeros: set[Any]) -> bool:
    """Whether a node of the graph gives nothing but 0, given the values that are known to be."""
    if node.op_type == "ConstantOfShape":
        filled = node.attributes.get("value")
        return filled is None or not filled.value.numpy().any()
    if node.op_type == "Concat":  # with slices, what rolls an image
        return zeros.issuperset(node.inputs)
    return node.op_type in REARRANGING and node.inputs[0] in zeros


@torch.inference_mode()
def _difference(model: nn.Module, images: Tensor, path: Path) -> tuple[float, float]:
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    largest = relative = 0.0
    for batch in BATCHES:
        given = images[:1].expand(batch, *images.shape[1:]) + 0.1 * torch.arange(batch).to(images)[:, None, None, None]
        expected = outputs_of(model, given)
        got = session.run(None, {"images": given.cpu().numpy()})
        for one, other in zip(expected, got, strict=True):
            difference = (one.cpu() - torch.from_numpy(other)).abs().max().item()
            largest = max(largest, difference)
            relative = max(relative, difference / max(one.abs().max().item(), 1e-30))
    return largest, relative
