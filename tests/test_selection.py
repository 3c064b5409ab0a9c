"""Choosing by damage: equal to full models tried one by one, and what was planted is found first. No labels."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import pytest
import timm
import torch
from families import Family, named
from torch import Tensor, nn
from torch.nn import functional as F

import hetdpt
from hetdpt.core.errors import DataError, ModelError, PlanError, PredictError
from hetdpt.core.modules import clone
from hetdpt.core.plan import KINDS, Plan, Site, Tail
from hetdpt.measurement.agreement import outputs_of
from hetdpt.selection import goal as goals
from hetdpt.selection.damage import GreedyChoice, choose, damage_of_each
from hetdpt.selection.goal import OneShotConfig, RemovalTarget
from hetdpt.surgery.calibrate import variants_of
from hetdpt.surgery.remove import ready, removable
from hetdpt.surgery.tail import is_tail_possible, trim_if_possible_, untrim_

SAME = 1e-9  # relative; the same operations run, so only the order of the float64 sums may differ
# one stream, windows, a library of its own, gated FFNs, no head
LABELS = [
    "vit_tiny_patch16_224",
    "swin_tiny_patch4_window7_224",
    "hf DeiTForImageClassificationWithTeacher",
    "eva02_tiny_patch14_224",
    "hf DINOv3ViTModel",
]


def batches_of(family: Family, count: int = 8) -> list[Tensor]:
    return list(family.images(count).split(3))


def others_of(family: Family, count: int = 5) -> list[Tensor]:
    """Return images to judge by that no replacement was fitted on."""
    return list(family.images(8 + count)[8:].split(3))


def sites_of(model: nn.Module, family: Family, removal: Any = "calibrated") -> list[Site]:
    return removable(ready(model, removal, family.size))


def trimmed(model: nn.Module) -> nn.Module:
    """Return ``model``, trimmed if a class token is read."""
    trim_if_possible_(model)
    return model if is_tail_possible(model) else untrim_(model)


def cost_of(gains: Mapping[Site, float]) -> Callable[[Plan], float]:
    """Return the cost of plans whose layers save so much, whatever else is removed."""
    return lambda plan: 100 - sum(gain for site, gain in gains.items() if plan.removes(site))


@torch.no_grad()
def naive_damage(dense: nn.Module, changed: nn.Module, images: list[Tensor], has_classes: bool) -> float:
    """Return KL or the error of features of two models, all images at hand at once."""
    one, other = (
        torch.cat([outputs_of(model, batch)[0].flatten(1).double() for batch in images]) for model in (dense, changed)
    )
    if has_classes:
        return F.kl_div(other.log_softmax(1), one.log_softmax(1), reduction="batchmean", log_target=True).item()
    return ((one - other).square().sum() / one.square().sum()).item()


def naive_choices(
    model: nn.Module, family: Family, gains: Mapping[Site, float], target: float, removal: Any, has_classes: bool
) -> list[GreedyChoice]:
    """Choose by trying full models, each candidate fitted by itself."""
    dense = current = trimmed(ready(model, removal, family.size))
    damage, choices = 0.0, list[GreedyChoice]()
    while sum(choice.gain for choice in choices) < target:
        tried = {}
        for site in gains:
            if all(site != choice.move for choice in choices):
                variant = variants_of(current, [site], batches_of(family))[site]
                tried[site] = variant, naive_damage(dense, variant, others_of(family), has_classes)
        best = min(tried, key=lambda site: (tried[site][1] - damage) / gains[site])
        missing = target - sum(choice.gain for choice in choices)
        if gains[best] >= missing:
            best = min((site for site in tried if gains[site] >= missing), key=lambda site: tried[site][1])
        current, damage = tried[best]
        choices.append(GreedyChoice(best, damage, gains[best]))
    return choices


@pytest.mark.parametrize(
    "removal",
    [
        "calibrated",
        pytest.param(("skip", "drop"), marks=pytest.mark.slow),
        pytest.param(("linear", "calibrated"), marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("label", LABELS)
def test_choices_are_those_of_full_models_tried_one_by_one(label: str, removal: Any) -> None:
    family = named(label)
    model = family.build()
    gains = {site: 1.0 + 0.25 * number for number, site in enumerate(sites_of(model, family, removal))}
    judge = others_of(family)
    found = list(choose(model, batches_of(family), gains, 5.0, cost=cost_of(gains), judge=judge, removal=removal))
    expected = naive_choices(model, family, gains, 5.0, removal, has_classes="DINOv3" not in label)
    assert [choice.move for choice in found] == [choice.move for choice in expected]
    for one, other in zip(found, expected, strict=True):
        assert one.damage == pytest.approx(other.damage, rel=SAME)
        assert one.gain == gains[one.move]
    assert sum(choice.gain for choice in found) >= 5 > sum(choice.gain for choice in found[:-1])


def plant(model: Any) -> nn.Module:
    """Make attention 1 give one and the same vector whatever it is given, and the FFN of block 2 exactly linear."""
    with torch.no_grad():
        model.blocks[1].attn.qkv.weight[2 * 48 :].zero_()  # values are their bias alone
    model.blocks[2].mlp.act = nn.LeakyReLU(1.0)
    return model


def test_what_can_be_replaced_exactly_goes_first(model: nn.Module, vit: Family) -> None:
    plant(model)
    found = list(choose(model, [vit.images(96)], sites_of(model, vit), 3))  # block 2 sees one token of each
    assert {choice.move.path for choice in found[:2]} == {"blocks.1.attn", "blocks.2.mlp.act"}
    assert max(choice.damage for choice in found[:2]) < 1e-3 * found[2].damage  # what float32 leaves of 0


def test_plain_removal_breaks_what_a_replacement_keeps(model: nn.Module, vit: Family) -> None:
    plant(model)
    judge = others_of(vit)
    found = {
        removal: list(choose(model, [vit.images(96)], sites_of(model, vit), 2, judge=judge, removal=removal))[-1].damage
        for removal in ("calibrated", "plain")
    }
    assert found["calibrated"] < 1e-6 * found["plain"]  # float32 against a vector that is missing


def test_one_more_block_of_the_tail_is_a_choice_like_a_layer(model: nn.Module, vit: Family) -> None:
    def cost(plan: Plan) -> float:
        return 100 - 1000 * max(plan.tail - 1, 0) - len(plan)

    found = list(choose(model, batches_of(vit), sites_of(model, vit), 2000, cost=cost, longest=3))
    assert [choice.move for choice in found] == [Tail(2), Tail(3)]  # a layer saves too little to be tried
    for choice in found:
        assert isinstance(choice.move, Tail)
        changed = hetdpt.calibrate_(clone(model), Plan(tail=choice.move.length), batches_of(vit))
        assert choice.damage == pytest.approx(naive_damage(model, changed, batches_of(vit), True), rel=1e-3)
    [choice] = choose(model, batches_of(vit), sites_of(model, vit), 1, longest=3)
    assert isinstance(choice.move, Site)  # where layers are counted, a tail saves none
    with pytest.raises(PlanError, match="the goal is to save 2000, but all 6 layers save 1006"):
        next(choose(model, batches_of(vit), sites_of(model, vit), 2000, cost=cost, longest=2))


def test_layers_in_front_of_a_tail_are_chosen_with_it(model: nn.Module, vit: Family) -> None:
    sites = [site for site in sites_of(model, vit) if site.kind == "attention"]
    found = list(choose(model, batches_of(vit), sites, 2, tail=2))
    assert len(found) == 2
    again = [GreedyChoice.from_dict(asdict(choice)) for choice in found[:1]]
    assert [*again, *choose(model, batches_of(vit), sites, 2, tail=2, chosen=again)] == found
    plan = Plan(removal="calibrated", tail=2).plus(*(choice.move for choice in found))
    changed = hetdpt.calibrate_(clone(model), plan, batches_of(vit))
    assert found[-1].damage == pytest.approx(naive_damage(model, changed, batches_of(vit), True), rel=0.5)


def test_the_last_step_does_the_least_damage_that_is_enough(model: nn.Module, vit: Family) -> None:
    sites = sites_of(model, vit)
    damages = damage_of_each(model, batches_of(vit), sites)
    mild, harsh = sorted(sites, key=damages.__getitem__)[3:5]
    ratio = 2 * damages[harsh] / damages[mild]  # so that the harsh one does less damage for what it saves
    gains = {mild: 1.0, harsh: ratio}
    [choice] = choose(model, batches_of(vit), gains, 1.0, cost=cost_of(gains))
    assert choice.move == mild
    first, *_ = choose(model, batches_of(vit), gains, 0.5 + ratio, cost=cost_of(gains))
    assert first.move == harsh


def test_activations_that_class_tokens_keep_and_patches_do_not_have_are_not_removed(
    model: nn.Module, vit: Family
) -> None:
    keep = ("constant", "calibrated-keep")
    activations = [site for site in sites_of(model, vit, keep) if site.kind == "activation"]
    found = list(choose(model, batches_of(vit), activations, 1, removal=keep, tail=2))
    assert [choice.move for choice in found] == activations[:1]  # the only one before the tail


def test_no_tail_where_patches_are_read(vit: Family) -> None:
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=3, num_classes=7, global_pool="avg").eval()
    images = [torch.randn(8, 3, 32, 32)]
    [choice] = choose(model, images, hetdpt.sites(model), 1, cost=lambda plan: -plan.tail - len(plan), longest=3)
    assert isinstance(choice.move, Site)


def test_sites_that_gain_nothing_are_never_taken(model: nn.Module, vit: Family) -> None:
    plant(model)
    gains = {site: -0.1 if site.path == "blocks.1.attn" else 1.0 for site in sites_of(model, vit)}
    gains |= {site: 0.0 for site in gains if site.path == "blocks.2.mlp.act"}
    found = [choice.move.path for choice in choose(model, [vit.images(24)], gains, 4, cost=cost_of(gains))]
    assert len(found) == 4
    assert not {"blocks.1.attn", "blocks.2.mlp.act"} & {*found}


def test_a_large_gain_makes_up_for_more_damage(model: nn.Module, vit: Family) -> None:
    gains = {site: 1e9 if site.path == "blocks.0.attn" else 1e-3 for site in sites_of(model, vit)}
    [choice] = choose(model, [vit.images(24)], gains, 0.0005, cost=cost_of(gains), removal="plain")
    assert choice.move.path == "blocks.0.attn"


def test_what_a_layer_saves_depends_on_those_removed_before(model: nn.Module, vit: Family) -> None:
    """As where the last attention that is left makes nearly a whole block superfluous."""
    sites, costs = sites_of(model, vit), {(): 10.0, (1,): 9.0, (2,): 10.0, (1, 2): 4.0}
    wanted = [site for site in sites if site.kind == "attention" and site.block]
    found = list(choose(model, [vit.images(24)], wanted, 6, cost=lambda plan: costs[plan.attention]))
    assert [(choice.move.block, choice.gain) for choice in found] == [(1, 1.0), (2, 5.0)]


def test_of_two_that_do_no_damage_the_one_that_runs_first_goes(model: Any, vit: Family) -> None:
    for block in (2, 1):
        nn.init.zeros_(model.blocks[block].attn.proj.weight)
        nn.init.zeros_(model.blocks[block].attn.proj.bias)
    backwards = list(reversed(sites_of(model, vit)))
    found = list(choose(model, [vit.images()], backwards, 2, removal="plain"))
    assert [choice.move.path for choice in found] == ["blocks.1.attn", "blocks.2.attn"]
    assert [choice.damage for choice in found] == pytest.approx([0, 0], abs=1e-12)  # float32 rounding, squared


@pytest.mark.parametrize("removal", ["calibrated", "plain"])
def test_going_on_from_earlier_choices_gives_the_same(model: nn.Module, vit: Family, removal: str) -> None:
    sites, batches, judge = sites_of(model, vit), batches_of(vit), others_of(vit)
    whole = list(choose(model, batches, sites, 5, judge=judge, removal=removal))
    for step in (1, 3, 5):
        kept = [GreedyChoice.from_dict(asdict(choice)) for choice in whole[:step]]
        assert [*kept, *choose(model, batches, sites, 5, judge=judge, removal=removal, chosen=kept)] == whole


def test_the_model_is_left_as_it_was_and_its_mode_makes_no_difference(model: nn.Module, vit: Family) -> None:
    before, sites = clone(model), sites_of(model, vit)
    found = list(choose(model, batches_of(vit), sites, 2))
    model.train()
    assert list(choose(model, batches_of(vit), sites, 2, memory=0)) == found
    assert model.training
    assert str(model.eval()) == str(before)
    torch.testing.assert_close(model(vit.images()), before(vit.images()), rtol=0, atol=0)


def test_progress_ends_with_all_steps_done(model: nn.Module, vit: Family) -> None:
    seen: list[tuple[int, int]] = []
    list(choose(model, batches_of(vit), sites_of(model, vit), 3, progress=lambda *step: seen.append(step)))
    assert seen[-1] == (300, 300)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert {total for _, total in seen} == {300}


def test_what_cannot_be_chosen_is_refused_in_a_sentence(model: Any, vit: Family) -> None:
    batches, sites = batches_of(vit), sites_of(model, vit)
    with pytest.raises(DataError, match="once for each layer, but got a one-shot iterator"):
        next(choose(model, iter(batches), sites, 1))
    with pytest.raises(DataError, match="once for each layer, but got a one-shot iterator"):
        next(choose(model, batches, sites, 1, judge=iter(batches)))
    with pytest.raises(PlanError, match="the goal is to save 7, but all 6 layers save 6; set a smaller goal"):
        next(choose(model, batches, sites, 7))
    with pytest.raises(PlanError, match="attention 7 at blocks.7.attn is not a site of this model"):
        next(choose(model, batches, [Site("attention", 7, "blocks.7.attn")], 1))
    with pytest.raises(DataError, match="does not take images of 3 x 40 x 40"):
        next(choose(model, [torch.randn(2, 3, 40, 40)], sites, 1))
    nn.init.constant_(model.head.weight, float("nan"))
    with pytest.raises(ModelError, match="returns values that are not finite; check its weights"):
        next(choose(model, batches, sites, 1))


def test_images_that_come_in_another_order_each_time_are_refused(model: nn.Module, vit: Family) -> None:
    """Answers of the dense model are kept, and would be compared with those to other images."""
    images = torch.cat(batches_of(vit))
    loader = torch.utils.data.DataLoader(images, batch_size=4, shuffle=True)  # type: ignore[arg-type]
    with pytest.raises(DataError, match="were in another order than before; give a loader that does not shuffle"):
        list(choose(model, loader, sites_of(model, vit), target=2))


def test_answers_that_are_not_finite_are_no_choice(model: Any, vit: Family) -> None:
    model.blocks[1].mlp.act = nn.Sigmoid()
    with torch.no_grad():
        model.blocks[1].mlp.fc1.weight.mul_(1e37)  # without the sigmoid the next norm squares it
    site = next(site for site in sites_of(model, vit) if site.path == "blocks.1.mlp.act")
    with pytest.raises(
        PlanError, match="after 0 layers, removing any other leaves a model whose outputs are not finite"
    ):
        next(choose(model, batches_of(vit), [site], 1, removal="plain"))


# goals


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({}, "expected exactly one goal, --layers 8 or --speedup 1.5; got none"),
        (
            {"layers": 2, "speedup": 1.2},
            "--layers 8 or --speedup 1.5; got layers and speedup",
        ),
        ({"layers": 0}, "the dense model already meets the goal layers 0; set a harder one, such as 8"),
        ({"speedup": 1.0}, "the dense model already meets the goal speedup 1; set a harder one, such as 1.5"),
        ({"speedup": float("nan")}, "speedup is nan; expected a number above 0, such as 1.5"),
        ({"layers": 1, "kind": "norm"}, "kind is 'norm'; expected attention or activation"),
        ({"layers": 1, "removal": "soft"}, "removal is one of plain, norm, authors, calibrated or a pair"),
    ],
)
def test_contradictions_are_refused(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises((PlanError, PredictError)) as error:
        OneShotConfig(**settings)
    assert sentence in str(error.value)


def test_a_goal_in_layers(model: nn.Module, vit: Family) -> None:
    goal = RemovalTarget.of(model, OneShotConfig(layers=3, kind="attention"), vit.size)
    two = Plan(attention=(0, 1))
    assert ({site.kind for site in goal.sites}, goal.target, goal.reached(two)) == ({"attention"}, 3, 2)
    assert goal.raised(two, 1.1, 0.0) is None
    with pytest.raises(PlanError, match="the goal is 4 layers removed, but this model has 3 that can be removed"):
        RemovalTarget.of(model, OneShotConfig(layers=4, kind="attention"), vit.size)


def prices_of(attention: list[float], activation: list[float]) -> hetdpt.Prices:
    """Return prices by which the model takes 100 ms, and its layers save what is given."""
    kinds = (tuple(hetdpt.Price(0, 0, ms) for ms in saved) for saved in (attention, activation))
    return hetdpt.Prices(hetdpt.Price(1, 1, 100), *kinds, measured="cpu, float32, batch 8")


def test_a_goal_in_speed(model: nn.Module, vit: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def measure(given: nn.Module, *, removal: Any, input_size: Any, trim: bool, progress: Any) -> Any:
        asked.append((input_size, removal, trim))
        return prices_of([10, -1, 10], [20, 5, 5])

    monkeypatch.setattr(goals, "measure_prices", measure)
    goal = RemovalTarget.of(model, OneShotConfig(speedup=1.25, removal="plain"), vit.size)
    assert asked == [(vit.size, "plain", True)]
    assert goal.target == pytest.approx(20)  # of 100 ms, 80 may be left
    assert goal.reached(Plan(activation=(0,))) == pytest.approx(1.25)
    assert goal.most == 50  # without the one that saves nothing
    assert RemovalTarget.from_dict(goal.to_dict()) == goal
    some, more = Plan(activation=(0, 1)), Plan(attention=(0, 1, 2), activation=(0, 1))  # 25 and 44 ms
    higher = goal.raised(some, measured=1.0 / 0.83, wanted=1.25)
    assert higher is not None
    assert higher.target == pytest.approx(28)  # 83 ms are measured, 3 too many
    assert goal.raised(some, measured=1.25, wanted=1.25) is None
    assert goal.raised(more, measured=1.15, wanted=1.25) is None  # the 6 ms that are left are too few
    with pytest.raises(PlanError) as error:
        RemovalTarget.of(model, OneShotConfig(speedup=3), vit.size)
    assert str(error.value) == (
        "a speedup of 3 is out of reach: by the costs measured here (cpu, float32, batch 8), removing all 6 layers "
        "would give a speedup of 2; set an easier goal"
    )


@pytest.mark.parametrize(("name", "saved"), [("macs", 3), ("params", 2)])
def test_a_goal_in_macs_or_parameters(name: str, saved: int) -> None:
    layers = [Site(kind, block, "") for kind in KINDS for block in range(2)]
    prices = hetdpt.Prices(hetdpt.Price(20, 20), (hetdpt.Price(3, 2),) * 2, (hetdpt.Price(5, 1),) * 2)
    goal = RemovalTarget.priced({name: 18.0}, layers, prices)
    assert (goal.target, goal.dense) == (2, 20)
    assert goal.cost(Plan(attention=(1,))) == 20 - saved
    assert RemovalTarget.from_dict(goal.to_dict()) == goal
    with pytest.raises(
        PlanError, match="^3 .* is out of reach: .*, removing all 4 layers would give .*; set an easier"
    ):
        RemovalTarget.priced({name: 3.0}, layers, prices)
