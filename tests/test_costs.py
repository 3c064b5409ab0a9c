"""Costs against the facts of ``benchmarks/reference/reference.json``, to the last parameter and MAC."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import timm
import torch
from families import named

import hetdpt
from hetdpt.core.plan import Plan
from hetdpt.measurement.costs import Costs

REFERENCE = json.loads((Path(__file__).parent.parent / "benchmarks/reference/reference.json").read_text())


def row_name(row: dict) -> str:
    return f"{row['model']}-{len(row['attention'])}-{len(row['activation'])}"


def empty(name: str, **arguments: object) -> torch.nn.Module:
    return hetdpt.create(name, is_empty=True) if not arguments else timm.create_model(name, **arguments)


@pytest.mark.parametrize("row", REFERENCE["costs"], ids=row_name)
def test_costs_of_the_paper_rows(row: dict) -> None:
    plan = Plan(row["attention"], row["activation"])
    model = hetdpt.merge_(hetdpt.prune_(empty(row["model"]), plan))
    assert hetdpt.count_params(model) == row["params"]
    assert hetdpt.count_macs(model, (3, 224, 224)) == row["macs"]
    assert hetdpt.count_macs(model, attention_products=False) == row["macs_without_attention_products"]
    kept = Plan(row["attention"], row["activation"], removal="norm")
    norm = hetdpt.merge_(hetdpt.prune_(empty(row["model"]), kept))
    assert hetdpt.count_params(norm) == row["params_if_norm1_kept"]


@pytest.mark.parametrize("name", REFERENCE["swin_dense"])
def test_costs_of_dense_swin(name: str) -> None:
    row = REFERENCE["swin_dense"][name]
    costs = Costs.of(empty(name), (3, 224, 224))
    assert (costs.macs / 1e9, costs.params / 1e6) == (row["macs_g"], row["params_m"])


def test_dinov2_giant_loses_whole_branches() -> None:
    row = REFERENCE["dinov2_giant"]
    with torch.device("meta"):
        model = timm.create_model(row["model"], img_size=row["img_size"], num_classes=row["num_classes"])
    assert hetdpt.count_params(model) == row["dense_params"]
    hetdpt.prune_(model, Plan(attention=range(8), activation=range(7), removal=("skip", "drop")))
    assert hetdpt.count_params(model) == row["pruned_params"]


def test_fused_and_unfused_attention_cost_the_same() -> None:
    model = named("vit_tiny_patch16_224").build()
    fused = hetdpt.count_macs(model, (3, 32, 32))
    for block in model.blocks:
        assert block.attn.fused_attn
        block.attn.fused_attn = False
    assert hetdpt.count_macs(model, (3, 32, 32)) == fused
    tokens, width = 17, 48
    products = 3 * 2 * tokens * tokens * width  # three blocks, q k and a v
    assert fused - hetdpt.count_macs(model, (3, 32, 32), attention_products=False) == products


def test_counting_leaves_the_model_alone(model: torch.nn.Module) -> None:
    model.train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    hetdpt.count_macs(model, (3, 32, 32))
    assert model.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
