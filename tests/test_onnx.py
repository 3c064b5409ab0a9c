"""ONNX: exported, run in ONNX Runtime, compared with torch."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
import torch
from families import FAMILIES, Family, by_label, named
from torch import Tensor, nn

import hetdpt
from hetdpt.core.errors import FileError, ModelError
from hetdpt.core.plan import Plan
from hetdpt.export.exported import Exported

PARITY = 1e-4  # of the largest output: two runtimes sum float32 in different orders
REFUSED = "gemma4_vit_167m"  # its control flow looks at values
QUICK = ["vit_tiny_patch16_224", "swin_tiny_patch4_window7_224", "hf ViTForImageClassification"]


def export(family: Family, path: Path) -> Exported:
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


def operations(path: Path) -> list[str]:
    return [node.op_type for node in onnx.load(path).graph.node]


@pytest.mark.parametrize(
    "label", ["vit_tiny_patch16_224", pytest.param("swin_tiny_patch4_window7_224", marks=pytest.mark.slow)]
)
def test_a_removed_attention_leaves_no_operation_behind(label: str, tmp_path: Path) -> None:
    family = named(label)
    hetdpt.export_onnx(family.build(), tmp_path / "dense.onnx", family.size)
    pruned = hetdpt.prune_(family.build(), Plan(attention=tuple(range(family.attention))), family.size)
    hetdpt.export_onnx(pruned, tmp_path / "pruned.onnx", family.size)
    dense, left = operations(tmp_path / "dense.onnx"), operations(tmp_path / "pruned.onnx")
    gone = {"Softmax", "Slice", "Mul"}  # attention, windows cut and rolled, scales
    assert gone <= {*dense}
    assert gone.isdisjoint(left)
    assert "ConstantOfShape" not in left
    positions = label == "vit_tiny_patch16_224"
    assert left.count("Add") == 3 * family.activation + positions  # two biases and a residual add of every FFN


class Broadcasting(nn.Module):
    """Adds zeros that are larger than what they are added to; its output is such a sum, too."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, images: Tensor) -> Tensor:
        zeros = images.new_zeros(()).expand(images.shape)
        wide = images[:, :, :1] + zeros  # (B, C, 1, W) to (B, C, H, W)
        return self.layer(wide) + zeros


def test_a_sum_with_zeros_that_has_another_shape_or_is_an_output_stays(tmp_path: Path) -> None:
    torch.manual_seed(0)
    result = hetdpt.export_onnx(Broadcasting(), tmp_path / "model.onnx", (3, 4, 4))
    assert result.relative_difference < PARITY
    assert operations(result.path).count("Add") == 3


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
