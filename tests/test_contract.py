"""The contract every family keeps: gated == pruned == merged, none == dense, restore and save -> load bit-equal."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from families import FAMILIES, HF, SMALL, TIMM, Family, sparing
from torch import Tensor, nn

import hetdpt
from hetdpt.measurement.agreement import outputs_of

ROUNDING = 2e-5  # of the largest output: float32 rounding of one merged matrix, through the batch norms of hybrids too


def run(model: nn.Module, family: Family) -> Tensor:
    with torch.no_grad():
        return torch.cat([output.flatten() for output in outputs_of(model, family.images())])


def distance(one: Tensor, other: Tensor) -> float:
    return ((one - other).abs().max() / other.abs().max()).item()


@pytest.fixture(params=sparing(FAMILIES, SMALL))
def family(request: pytest.FixtureRequest) -> Family:
    return request.param


def test_gated_is_pruned_is_merged_and_none_is_dense(family: Family) -> None:
    model = family.build()
    sites = hetdpt.sites(model, family.size)
    assert sum(site.kind == "attention" for site in sites) == family.attention
    assert sum(site.kind == "activation" for site in sites) == family.activation
    plan = family.plan(sites)
    dense = run(model, family)

    assert torch.equal(run(hetdpt.gate_(model, hetdpt.Plan(removal=family.removal), family.size), family), dense)
    assert len(hetdpt.gates_of(model)) == len(sites)
    assert torch.equal(run(hetdpt.restore_(model), family), dense)

    gated = run(hetdpt.gate_(model, plan, family.size), family)
    assert torch.equal(run(hetdpt.restore_(model), family), dense)

    before = hetdpt.count_params(model)
    pruned = run(hetdpt.prune_(model, plan, family.size), family)
    assert torch.equal(gated, pruned)
    assert distance(pruned, dense) > 1e-4
    assert len(hetdpt.sites(model)) == len(sites) - len(plan)

    merged = run(hetdpt.merge_(model), family)
    assert distance(merged, pruned) < ROUNDING
    assert hetdpt.count_params(model) < before
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    hetdpt.merge_(model)
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(run(model, family), merged)


def test_saved_and_loaded_is_bit_equal(family: Family, tmp_path) -> None:  # type: ignore[no-untyped-def]
    model = family.build()
    hetdpt.merge_(hetdpt.prune_(model, family.plan(hetdpt.sites(model, family.size)), family.size))
    loaded = hetdpt.load(hetdpt.save(model, tmp_path / "saved"))
    assert torch.equal(run(loaded, family), run(model, family))
    assert hetdpt.sites(loaded) == hetdpt.sites(model)


def test_gradients_reach_what_is_left_and_every_open_gate(family: Family) -> None:
    model = family.build()
    plan = family.plan(hetdpt.sites(model, family.size))
    hetdpt.gate_(model, plan, family.size).train()
    sum(output.float().pow(2).mean() for output in outputs_of(model, family.images())).backward()
    gates = hetdpt.gates_of(model).values()
    assert all((gate.importance.grad is not None) == gate.is_open for gate in gates)
    scores = [gate.importance.grad for gate in gates if gate.is_open]
    assert not scores or any(scores)  # a ReLU whose inputs are all positive is no different from the identity
    copied = deepcopy(model)
    assert len(hetdpt.gates_of(copied)) == len(hetdpt.gates_of(model))


def test_at_least_thirty_five_timm_modules_and_all_listed_huggingface_classes() -> None:
    import timm

    modules = {timm.models.model_entrypoint(family.base.name).__module__ for family in TIMM if family.attention}
    assert len(modules) >= 35
    listed = ("ViT", "DeiT", "Swin", "Dinov2", "Beit", "CLIPVision", "SiglipVision")
    assert all(any(family.base.name.startswith(name) for family in HF) for name in listed)
