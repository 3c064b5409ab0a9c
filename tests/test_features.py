"""Fewer hidden features in single blocks, and plans that have them beside removed layers and a tail."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from families import named
from test_training import SHORT, tiny
from torch import Tensor, nn

import hetdpt
from hetdpt.core.errors import PlanError
from hetdpt.core.plan import FewerFeatures, Plan
from hetdpt.reduce.apply import apply_
from hetdpt.reduce.width.inner import feature_counts, inner_moments, leave_, narrow_branches_
from hetdpt.surgery.record import require_record
from hetdpt.surgery.remove import ready

WHOLE = Plan(
    attention=(0,),
    activation=(1,),
    removal=("constant", "calibrated-keep"),
    site_styles=(("attention", 0, "linear"),),
    tail=2,
    features=((0, 64),),
)
ROUNDING = 2e-5  # of the largest output: float32 rounding of the layers behind


@pytest.fixture
def images() -> Tensor:
    return torch.randn(24, 3, 16, 16, generator=torch.Generator().manual_seed(0))


def model() -> nn.Module:
    return ready(tiny(depth=4), "plain")


def answers(network: nn.Module, images: Tensor) -> Tensor:
    with torch.no_grad():
        found: Tensor = network.eval()(images)
    return found


def distance(one: Tensor, other: Tensor) -> float:
    return ((one - other).abs().max() / other.abs().max()).item()


def test_features_that_others_repeat_cost_nothing(images: Tensor) -> None:
    network = model()
    ffn = network.get_submodule("blocks.1.mlp")
    with torch.no_grad():
        ffn.fc1.weight[64:] = ffn.fc1.weight[:64]  # type: ignore[operator, union-attr]
        ffn.fc1.bias[64:] = ffn.fc1.bias[:64]  # type: ignore[operator, union-attr]
    dense = answers(network, images)
    narrowed = narrow_branches_(network, [FewerFeatures(1, 64)], [images])
    assert feature_counts(narrowed) == {0: 128, 1: 64, 2: 128, 3: 128}
    assert distance(answers(narrowed, images), dense) < 1e-3  # the ridge that is found on few samples
    assert require_record(narrowed).plan.features == ((1, 64),)


def test_a_narrow_ffn_is_the_wide_one_with_features_of_zero_and_another_second_layer(images: Tensor) -> None:
    network = model().double()
    given = images.double()
    moments = inner_moments(network, [FewerFeatures(2, 40)], [given])
    narrow = leave_(deepcopy(network), FewerFeatures(2, 40), moments)
    kept = narrow.get_submodule("blocks.2.mlp")
    wide = network.get_submodule("blocks.2.mlp")
    rows = [int((wide.fc1.weight == row).all(1).nonzero()) for row in kept.fc1.weight]  # type: ignore[operator, union-attr]
    assert rows == sorted(rows)
    with torch.no_grad():
        wide.fc2.weight.zero_()  # type: ignore[operator, union-attr]
        wide.fc2.weight[:, rows] = kept.fc2.weight  # type: ignore[operator, union-attr]
        wide.fc2.bias.copy_(kept.fc2.bias)  # type: ignore[operator, union-attr, arg-type]
    assert distance(answers(narrow, given), answers(network, given)) < 1e-12


def test_the_second_layer_takes_over(images: Tensor) -> None:
    """Refitted it is nearer to the dense model than with the same features and its old weights."""
    network, layers = model(), "blocks.1.mlp"
    moments = inner_moments(network, [FewerFeatures(1, 48)], [images])
    narrow = leave_(deepcopy(network), FewerFeatures(1, 48), moments)
    wide, kept = network.get_submodule(layers), narrow.get_submodule(layers)
    rows = [int((wide.fc1.weight == row).all(1).nonzero()) for row in kept.fc1.weight]  # type: ignore[operator, union-attr]
    plain = deepcopy(narrow)
    with torch.no_grad():
        plain.get_submodule(layers).fc2.weight.copy_(wide.fc2.weight[:, rows])  # type: ignore[operator, union-attr, index]
        plain.get_submodule(layers).fc2.bias.copy_(wide.fc2.bias)  # type: ignore[operator, union-attr, arg-type]
    dense = answers(network, images)
    assert distance(answers(narrow, images), dense) < distance(answers(plain, images), dense)


def test_a_whole_plan_is_applied_saved_and_loaded(tmp_path: Path) -> None:
    vit, plan = named("vit_tiny_patch16_224"), replace(WHOLE, activation=())
    images = vit.images(24)
    pruned = apply_(vit.build(), plan, [images, images])
    found = require_record(pruned).plan
    assert found == replace(plan, anatomy=found.anatomy)
    merged = hetdpt.merge_(deepcopy(pruned))
    assert distance(answers(merged, images), answers(pruned, images)) < ROUNDING
    loaded = hetdpt.load(hetdpt.save(merged, tmp_path / "saved"))
    assert torch.equal(answers(loaded, images), answers(merged, images))
    assert require_record(loaded).plan == found


def test_it_is_trained_like_any_student(images: Tensor) -> None:
    dense = tiny(depth=4)
    student = apply_(deepcopy(dense), WHOLE, [images, images])
    config = SHORT.with_settings({"distillation.hidden": 1.0, "distillation.alpha": 1.0})
    *_, last = hetdpt.recover(student, dense, "demo", config)
    assert last.loss is not None
    assert feature_counts(student)[0] == 64


def test_layers_may_be_removed_in_a_style_that_needs_no_images(images: Tensor) -> None:
    plan = Plan(attention=(0,), tail=2, features=((1, 64),))
    pruned = apply_(tiny(depth=4), plan, [images, images])
    found = require_record(pruned).plan
    assert replace(found, fits=()) == replace(plan, anatomy=found.anatomy)
    assert answers(pruned, images).isfinite().all()


def test_a_plan_that_does_not_fit_changes_nothing(images: Tensor) -> None:
    network = tiny()
    before = answers(network, images)
    with pytest.raises(PlanError, match="leaves 200 features in block 1, but there are 128"):
        apply_(network, Plan(attention=(0,), features=((1, 200),)), [images, images])
    assert torch.equal(answers(network, images), before)
    assert len(hetdpt.sites(network)) == 6


def test_costs_of_such_a_plan_are_those_of_the_model_that_was_saved(images: Tensor) -> None:
    with pytest.raises(PlanError, match="which is fitted on images; apply the plan with hetdpt apply"):
        hetdpt.plan_costs(tiny(), Plan(features=((1, 64),)))


def test_what_cannot_be_done_is_said(images: Tensor) -> None:
    with pytest.raises(PlanError, match=r"leaves 64 features in block 0, which is fitted on images"):
        hetdpt.prune_(tiny(), Plan(features=((0, 64),)))
    with pytest.raises(PlanError, match="which is fitted on images; apply the plan with hetdpt apply"):
        hetdpt.calibrate_(tiny(), Plan(features=((0, 64),)), [images])
    with pytest.raises(
        PlanError, match=r"block 1 has no FFN whose hidden features can be removed; blocks that have one: 0, 2"
    ):
        narrow_branches_(hetdpt.prune_(tiny(), Plan(activation=(1,))), [FewerFeatures(1, 64)], [images])
    with pytest.raises(PlanError, match="leaves 200 features in block 0, but there are 128"):
        narrow_branches_(model(), [FewerFeatures(0, 200)], [images])
    with pytest.raises(
        PlanError, match="block 9 has no FFN whose hidden features can be removed; blocks that have one: 0, 1, 2"
    ):
        hetdpt.apply_(tiny(), Plan(features=((9, 64),)), [images])
