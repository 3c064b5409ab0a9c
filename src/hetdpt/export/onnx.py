"""ONNX, written by torch's exporter with a dynamic batch and run in ONNX Runtime."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hetdpt.adapters.models import unfuse_
from hetdpt.core.errors import ModelError, first_line
from hetdpt.core.modules import clone
from hetdpt.export.exported import Exported, Tensors, export_model
from hetdpt.export.runtimes import EXPORTS

REARRANGING = {"Expand", "Reshape", "Transpose", "Slice", "Squeeze", "Unsqueeze", "Identity"}
"""Operations that turn zeros into zeros."""


def export_onnx(
    model: nn.Module,
    path: str | Path,
    input_size: tuple[int, int, int] | None = None,
    *,
    overwrite: bool = False,
    tolerance: float | None = None,
) -> Exported:
    """Write ``model`` as one ONNX file with a dynamic batch and return how far ONNX Runtime is from torch.

    A relative difference above ``tolerance`` (1e-3, or 2e-2 in half precision) is an error, and no file is written.
    """
    return export_model(model, path, input_size, runtime=EXPORTS["onnx"], overwrite=overwrite, tolerance=tolerance)


def write(model: nn.Module, images: Tensor, path: Path) -> None:
    """Write ``model`` as ONNX; attention is unfused because torch cannot export every form of the fused operator."""
    batch = torch.export.Dim("batch")
    with warnings.catch_warnings(action="ignore"):  # the exporter's own deprecations
        try:
            program = torch.onnx.export(
                Tensors(unfuse_(clone(model))).eval(),
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


def open_file(path: Path) -> Callable[[Tensor], list[Tensor]]:
    """Return a function that runs the file in ONNX Runtime, on the CPU."""
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return lambda images: [torch.from_numpy(each) for each in session.run(None, {"images": images.cpu().numpy()})]


def _drop_zeros_(model: Any) -> None:
    """Remove x + 0, which a removed branch leaves behind, and everything that only computes these zeros.

    No runtime does this while the batch is dynamic. A sum that may have another shape than x stays.
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
    """Whether a node of the graph outputs only zeros, given the values that are known to be zero."""
    if node.op_type == "ConstantOfShape":
        filled = node.attributes.get("value")
        return filled is None or not filled.value.numpy().any()
    if node.op_type == "Concat":  # with slices, it rolls an image
        return zeros.issuperset(node.inputs)
    return node.op_type in REARRANGING and node.inputs[0] in zeros
