"""The contract every family keeps: gated == pruned == merged, none == dense, restore and save -> load bit-equal."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from families import ENCODERS, FAMILIES, HF, SMALL, TIMM, TORCHVISION, Family, by_label, sparing
from torch import Tensor, nn

import hetdpt
from hetdpt.core.errors import ModelError
from hetdpt.measurement.agreement import outputs_of
from hetdpt.surgery.calibrate import gate_fitted_
from hetdpt.surgery.record import survey_of
from hetdpt.training.drop_paths import drop_paths

ROUNDING = 2e-5  # of the largest output: float32 rounding of one merged matrix, through the batch norms of hybrids too


def run(model: nn.Module, family: Family) -> Tensor:
    with torch.no_grad():
        return torch.cat([output.flatten() for output in outputs_of(model, family.images())])


def distance(one: Tensor, other: Tensor) -> float:
    return ((one - other).abs().max() / other.abs().max()).item()


ALL = pytest.mark.parametrize(
    "family", [*sparing(FAMILIES, SMALL), *(pytest.param(f, id=f.label) for f in TORCHVISION)]
)


@ALL
def test_gated_is_pruned_is_merged_is_loaded_and_none_is_dense(family: Family, tmp_path: Path) -> None:
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

    if family not in TORCHVISION:  # models that hetdpt builds are those that it saves
        loaded = hetdpt.load(hetdpt.save(model, tmp_path / "saved"))
        assert torch.equal(run(loaded, family), merged)
        assert hetdpt.sites(loaded) == hetdpt.sites(model)


@ALL
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


MODES = {"eval, no gradients": (False, False), "eval": (False, True), "train": (True, True)}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", ENCODERS, ids=by_label)
def test_torch_encoder_layers_run_what_was_put_into_them(family: Family, mode: str) -> None:
    is_training, has_gradients = MODES[mode]
    model, images = family.build().train(is_training), family.images()
    sites = hetdpt.sites(model, family.size)
    kinds = [site.kind for site in sites]
    assert (kinds.count("attention"), kinds.count("activation")) == (family.attention, family.activation)
    plan, every = family.plan(sites), hetdpt.Plan(removal=family.removal)
    with torch.set_grad_enabled(has_gradients):
        dense = model(images)
        # layers with gates are not on torch's fast path, which rounds differently
        assert distance(hetdpt.gate_(model, every, family.size)(images), dense) < ROUNDING
        assert torch.equal(hetdpt.restore_(model)(images), dense)
        gated = hetdpt.gate_(model, plan, family.size)(images)
        assert torch.equal(hetdpt.restore_(model)(images), dense)
        pruned = hetdpt.prune_(model, plan, family.size)(images)
        assert distance(gated, pruned) < ROUNDING
        assert distance(pruned, dense) > 1e-3
        assert distance(hetdpt.merge_(model)(images), pruned) < ROUNDING
    with torch.enable_grad():
        assert distance(pruned, model.train()(images)) < ROUNDING  # where torch has no fast path


@pytest.mark.parametrize("removal", ["calibrated", ("linear", "calibrated")])
@pytest.mark.parametrize("family", ENCODERS, ids=by_label)
def test_torch_encoder_layers_are_calibrated(family: Family, removal: str | tuple[str, str]) -> None:
    model, images = family.build(), family.images(4)
    plan = replace(family.plan(hetdpt.sites(model, family.size)), removal=removal)
    dense = run(model, family)
    gated = gate_fitted_(model, plan, [images])
    for gate in hetdpt.gates_of(gated).values():
        gate.is_open = True
    assert distance(run(gated, family), dense) < ROUNDING
    assert torch.equal(run(hetdpt.restore_(model), family), dense)
    calibrated = run(hetdpt.calibrate_(model, plan, [images]), family)
    assert distance(calibrated, dense) > 1e-3
    assert distance(run(hetdpt.merge_(model), family), calibrated) < ROUNDING
    with torch.enable_grad():
        assert distance(model.train()(family.images()).flatten(), calibrated) < ROUNDING


@pytest.mark.parametrize("family", ENCODERS[:1] + ENCODERS[3:], ids=by_label)
def test_images_are_told_apart_whether_they_or_tokens_come_first(family: Family) -> None:
    model, images = family.build().train(), family.images(4)
    dense, ends = model(images), list[Tensor]()
    with drop_paths(model, 0.5, survey_of(model, family.size)), torch.random.fork_rng():
        torch.manual_seed(0)
        model.encoder.layers[2].self_attn.register_forward_hook(lambda *seen: ends.append(seen[2][0]))
        model(family.images(16))
    is_zero = ends[0].movedim(1 - model.tokens_at, 0).flatten(1) == 0
    assert torch.equal(is_zero.all(1), is_zero.any(1)), "a whole image or none of it"
    assert 0 < is_zero.all(1).sum() < 16
    for gate in hetdpt.gates_of(hetdpt.gate_(model, input_size=family.size)).values():
        gate.trial = torch.tensor([False, True, False, False])
        assert ((model(images) - dense).abs().amax(1) > 1e-5).tolist() == gate.trial.tolist()
        gate.trial = None


EAGER, ASKED = {"attn_implementation": "eager"}, {"output_attentions": True, "output_hidden_states": True}


@pytest.mark.parametrize("family", HF, ids=by_label)
def test_attention_maps_of_transformers_keep_their_places(family: Family, tmp_path: Path) -> None:
    """Of models with gates, without layers, and loaded."""
    model = replace(family, base=replace(family.base, arguments={**family.base.arguments, **EAGER})).build()
    dense = model(family.images(), **ASKED)
    layers = [site.block for site in hetdpt.sites(model, family.size) if site.kind == "attention"]
    stride = len(layers) // len(dense.attentions)  # Swin returns the maps of the last layer of each stage
    plan = hetdpt.Plan(attention=(0, stride - 1) if stride > 1 else (0, 2), removal=family.removal)
    shapes = [
        None if layer in plan.attention else map.shape
        for layer, map in zip(layers[stride - 1 :: stride], dense.attentions, strict=True)
    ]
    has_own_model = "ForImageClassification" in family.label  # which is used on its own too

    def keeps_places(model: nn.Module) -> None:
        answer = model(family.images(), **ASKED)
        assert len(answer.hidden_states) == len(dense.hidden_states)
        assert [None if map is None else map.shape for map in answer.attentions] == shapes
        assert not model(family.images()).get("attentions")
        if has_own_model:
            own = model.base_model(family.images(), **ASKED)  # type: ignore[operator]
            assert answer.attentions.count(None) == own.attentions.count(None) > 0
        with pytest.raises(ModelError, match="call it without output_attentions, or without return_dict=False"):
            model(family.images(), output_attentions=True, return_dict=False)

    keeps_places(hetdpt.gate_(model, plan, family.size))
    keeps_places(hetdpt.prune_(hetdpt.restore_(model), plan, family.size))
    keeps_places(hetdpt.load(hetdpt.save(model, tmp_path / "saved")))


def test_at_least_thirty_five_timm_modules_and_all_listed_huggingface_classes() -> None:
    import timm

    modules = {timm.models.model_entrypoint(family.base.name).__module__ for family in TIMM if family.attention}
    assert len(modules) >= 35
    listed = ("ViT", "DeiT", "Swin", "Dinov2", "Beit", "CLIPVision", "SiglipVision")
    assert all(any(family.base.name.startswith(name) for family in HF) for name in listed)
