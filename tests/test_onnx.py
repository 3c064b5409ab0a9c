"""ONNX: exported, run in ONNX Runtime, compared with torch."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from families import FAMILIES, Family, by_label, named
from torch import nn

import hetdpt
from hetdpt.errors import FileError, ModelError
from hetdpt.plan import Plan

PARITY = 1e-4  # of the largest output: two runtimes sum float32 in different orders
REFUSED = "gemma4_vit_167m"  # its control flow looks at values
QUICK = ["vit_tiny_patch16_224", "swin_tiny_patch4_window7_224", "hf ViTForImageClassification"]


def export(family: Family, path: Path) -> hetdpt.export.onnx.OnnxExport:
    model = family.build()
    plan = family.plan(hetdpt.sites(model, family.size))
    hetdpt.merge_(hetdpt.prune_(model, plan, family.size))
    return hetdpt.export_onnx(model, path, family.size)


@pytest.mark.parametrize("label", QUICK)
def test_parity(label: str, tmp_path: Path) -> None:
    result = export(named(label), tmp_path / "model.onnx")
    assert result.relative_difference < PARITY
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]
    graph = onnx.load(result.path).graph
    assert graph.input[0].name == "images"
    assert graph.input[0].type.tensor_type.shape.dim[0].dim_param  # a name, not a number: the batch is dynamic


@pytest.mark.slow
@pytest.mark.parametrize("family", [f for f in FAMILIES if f.label not in (*QUICK, REFUSED)], ids=by_label)
def test_parity_of_every_family(family: Family, tmp_path: Path) -> None:
    assert export(family, tmp_path / "model.onnx").relative_difference < PARITY


def test_what_torch_cannot_export_is_refused_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(
        ModelError, match="Gemma4VitClassifier cannot be exported to ONNX by this torch: Could not guard"
    ):
        export(named(REFUSED), tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())


def test_existing_files_and_gates_are_refused(model: nn.Module, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_text("mine")
    with pytest.raises(FileError, match="model.onnx exists already"):
        hetdpt.export_onnx(model, path)
    with pytest.raises(ModelError, match="has gates on its layers"):
        hetdpt.export_onnx(hetdpt.gate_(model, Plan((1,))), tmp_path / "other.onnx")
    assert path.read_text() == "mine"


def test_a_difference_above_the_tolerance_leaves_nothing_behind(model: nn.Module, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="ONNX Runtime differs from torch by .* the model was not exported"):
        hetdpt.export_onnx(model, tmp_path / "model.onnx", tolerance=-1.0)
    assert not list(tmp_path.iterdir())
