"""Costs against the facts of ``benchmarks/reference/reference.json``, to the last parameter and MAC."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import timm
import torch
from families import named

import hetdpt
from hetdpt.core.plan import Plan
from hetdpt.core.published import published_plan
from hetdpt.measurement.costs import Costs
from hetdpt.selection.predictor.pricing import measure_prices

REFERENCE = json.loads((Path(__file__).parent.parent / "benchmarks/reference/reference.json").read_text())
SLOW = pytest.mark.slow  # more rows of the same


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


# plans


@pytest.mark.parametrize(
    ("name", "plan", "ratio"),
    [
        ("deit_base_distilled_patch16_224", Plan(), 1.074),
        ("vit_tiny_patch16_224", Plan(), 1.075),
        pytest.param("deit_small_distilled_patch16_224", "paper/deit_small-6", 1.448, marks=SLOW),
        ("deit_small_distilled_patch16_224", "paper/deit_small-8", 1.627),
        pytest.param("deit_base_distilled_patch16_224", "paper/deit_base-8", 1.613, marks=SLOW),
        pytest.param("deit_base_distilled_patch16_224", "paper/deit_base-10", 1.696, marks=SLOW),
        ("deit_base_distilled_patch16_224", "paper/deit_base-10/te-static", 1.884),
        pytest.param("vit_tiny_patch16_224", Plan(attention=(11,)), 1.177, marks=SLOW),
        pytest.param("vit_tiny_patch16_224", Plan(attention=(10, 11)), 1.302, marks=SLOW),
        ("vit_tiny_patch16_224", Plan(attention=(9, 10, 11)), 1.456),
        pytest.param("vit_tiny_patch16_224", Plan(tail=2), 1.161, marks=SLOW),
        pytest.param("vit_tiny_patch16_224", Plan(tail=3), 1.263, marks=SLOW),
        ("vit_tiny_patch16_224", Plan(tail=4), 1.385),
    ],
)
def test_ratios_of_trimmed_plans(name: str, plan: Plan | str, ratio: float) -> None:
    known = published_plan(plan) if isinstance(plan, str) else plan
    model = empty(name)
    found = hetdpt.plan_costs(model, known)
    assert round(hetdpt.count_macs(model) / found.macs, 3) == ratio
    if not isinstance(plan, str):
        return
    pruned = hetdpt.merge_(hetdpt.prune_(empty(name), known))
    assert hetdpt.plan_costs(model, known, trim=False) == Costs.of(pruned, (3, 224, 224))
    assert found == Costs.of(hetdpt.trim_(pruned), (3, 224, 224))


def random_plans(blocks: int, removal: Any, count: int, has_tail: bool) -> Iterator[Plan]:
    draw = Random(0)
    for _ in range(count):
        part = draw.choice((0.2, 0.5, 0.9))
        kinds = [tuple(block for block in range(blocks) if draw.random() < part) for _ in range(2)]
        yield Plan(*kinds, removal=removal, tail=draw.randint(0, blocks) if has_tail else 0)


@pytest.mark.parametrize(
    ("removal", "trim"),
    [
        ("calibrated", True),
        ("plain", False),
        pytest.param("calibrated", False, marks=SLOW),
        pytest.param("plain", True, marks=SLOW),
    ],
)
def test_prices_compose_the_costs_of_any_plan(removal: str, trim: bool) -> None:
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=4, embed_dim=24, num_heads=2)
    prices = measure_prices(model, removal=removal, latency=False, trim=trim)
    for plan in random_plans(4, removal, 12, has_tail=True):
        expected, found = hetdpt.plan_costs(model, plan, trim=trim), prices.of(plan)
        assert (found.macs, found.params) == (expected.macs, expected.params), plan


@pytest.mark.slow
@pytest.mark.parametrize("removal", ["norm", "authors", ("linear", "calibrated"), ("position", "drop")])
def test_prices_compose_the_costs_of_any_plan_in_every_style(removal: Any) -> None:
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=3, embed_dim=24, num_heads=2)
    prices = measure_prices(model, removal=removal, latency=False)
    for plan in random_plans(3, removal, 8, has_tail=removal != "authors"):
        expected, found = hetdpt.plan_costs(model, plan), prices.of(plan)
        assert (found.macs, found.params) == (expected.macs, expected.params), plan


def test_prices_of_models_that_are_pruned_pooled_or_cannot_be_trimmed() -> None:
    def vit(**changes: Any) -> torch.nn.Module:
        made = {"img_size": 32, "patch_size": 8, "depth": 3, "embed_dim": 24, "num_heads": 2}
        return timm.create_model("vit_tiny_patch16_224", **{**made, **changes})

    pruned = hetdpt.merge_(hetdpt.prune_(vit(), Plan(attention=(2,), activation=(0,))))
    pooled = vit(global_pool="avg", class_token=False, fc_norm=False, final_norm=False)
    maps = vit(global_pool="", num_classes=0)
    stops = []
    for model in (pruned, pooled, maps):
        prices = measure_prices(model, latency=False)
        stops.append(prices.stop(Plan()))
        for plan in (Plan(), Plan(attention=(1,), activation=(2,))):
            found, expected = prices.of(plan), hetdpt.plan_costs(model, plan)
            assert (found.macs, found.params) == (expected.macs, expected.params)
    assert stops == [1, 2, 3]


def test_a_model_that_is_trimmed_costs_the_same_without_a_plan(model: torch.nn.Module) -> None:
    whole = Costs.of(model, (3, 32, 32))
    expected = hetdpt.plan_costs(model, Plan())
    assert expected.macs < whole.macs
    hetdpt.trim_(model)
    assert hetdpt.plan_costs(model, Plan()) == Costs.of(model, (3, 32, 32)) == expected
    assert hetdpt.plan_costs(model, Plan(), trim=False) == whole
    prices = measure_prices(model, latency=False, trim=False)  # it stays as it is
    assert (prices.dense.macs, prices.of(Plan()).macs) == (expected.macs, expected.macs)
    assert prices.whole is not None
    assert prices.whole.macs == whole.macs
