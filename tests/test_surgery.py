"""What surgery promises beyond the contract: styles, composition, and every habit a torch model is used with."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import timm
import torch
from families import Family, named
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hetdpt
from hetdpt.core.errors import ModelError, PlanError
from hetdpt.core.modules import clone
from hetdpt.core.plan import Plan
from hetdpt.measurement.agreement import outputs_of, relative_difference
from hetdpt.surgery.calibrate import calibrate_, gate_fitted_
from hetdpt.surgery.record import parts_of, require_record
from hetdpt.training.drop_paths import drop_paths

PLAN = Plan(attention=(0, 2), activation=(1, 2))
CLOSE = {"rtol": 1e-4, "atol": 1e-5}  # one float32 rounding of a merged matrix


def run(model: nn.Module, images: Tensor) -> Tensor:
    with torch.no_grad():
        return model(images)


def by_hand(model: nn.Module, images: Tensor, plan: Plan) -> Tensor:
    """Return what a plain timm ViT computes under ``plan``, written from its formulas (docs/architecture.md)."""
    x = model._pos_embed(model.patch_embed(images))
    for number, block in enumerate(model.blocks):
        is_gone = number in plan.attention, number in plan.activation
        if not is_gone[0]:
            x = x + block.attn(block.norm1(x))
        elif plan.styles[0] == "norm":
            x = x + block.norm1(x)
        hidden = block.mlp.fc1(block.norm2(x))
        x = x + block.mlp.fc2(hidden if is_gone[1] else block.mlp.act(hidden))
        if plan.removal == "authors" and all(is_gone):
            x = nn.functional.gelu(x)
    return model.forward_head(model.norm(x))


@pytest.mark.parametrize("removal", ["plain", "norm", "authors"])
def test_removed_means_what_the_spec_says(model: nn.Module, images: Tensor, removal: str) -> None:
    plan = Plan(PLAN.attention, PLAN.activation, removal=removal)
    with torch.no_grad():
        expected = by_hand(deepcopy(model), images, plan)
    pruned = run(hetdpt.prune_(model, plan), images)
    torch.testing.assert_close(pruned, expected, **CLOSE)
    torch.testing.assert_close(run(hetdpt.merge_(model), images), expected, **CLOSE)


@pytest.mark.parametrize("label", ["vit_tiny_patch16_224", "swinv2_tiny_window8_256", "beit_base_patch16_224"])
@pytest.mark.parametrize("removal", ["norm", "authors", ("skip", "drop")])
def test_other_styles_keep_the_contract(label: str, removal: str | tuple[str, str]) -> None:
    family = named(label)
    model, images = family.build(), family.images()
    plan = Plan(attention=(0, 2), activation=(1, 2), removal=removal)
    dense = run(model, images)
    gated = run(hetdpt.gate_(model, plan), images)
    assert torch.equal(run(hetdpt.restore_(model), images), dense)
    pruned = run(hetdpt.prune_(model, plan), images)
    assert torch.equal(gated, pruned)
    torch.testing.assert_close(run(hetdpt.merge_(model), images), pruned, **CLOSE)


PROTECTED = {
    "vit_tiny_patch16_224": 1,
    "deit_tiny_distilled_patch16_224": 2,
    "vit_small_patch16_dinov3": 5,
    "vit_medium_patch16_reg4_gap_256": 4,
    "beit_base_patch16_224": 1,
    "hf ViTForImageClassification": 1,
    "hf DeiTForImageClassificationWithTeacher": 2,
}
KEPT = [(label, "calibrated-keep") for label in PROTECTED] + [("deit_tiny_distilled_patch16_224", "identity-keep")]
SLOWLY = [(label, "identity-keep") for label in PROTECTED if (label, "identity-keep") not in KEPT]


@pytest.mark.parametrize(("label", "style"), [*KEPT, *(pytest.param(*row, marks=pytest.mark.slow) for row in SLOWLY)])
def test_class_tokens_keep_their_ffn(label: str, style: str, tmp_path: Path) -> None:
    """Gated = pruned = merged = loaded; for class tokens the FFN is what it was, for patches it is not."""
    class_tokens_keep_their_ffn(named(label), PROTECTED[label], style, tmp_path)


def test_class_tokens_keep_a_gated_ffn(tmp_path: Path) -> None:
    class_tokens_keep_their_ffn(named("eva02_tiny_patch14_224"), 1, "calibrated-keep", tmp_path)


def class_tokens_keep_their_ffn(family: Family, protected: int, style: str, tmp_path: Path) -> None:
    dense, images, plan = family.build(), family.images(6), Plan(activation=(1,), removal=("constant", style))
    gated = gate_fitted_(deepcopy(dense), plan, [images])
    model = calibrate_(deepcopy(dense), plan, [images])
    [handle] = (h for h in require_record(model).survey.handles if plan.removes(h.site))
    core, before = (one.get_submodule(parts_of(handle).core) for one in (model, dense))
    tokens = torch.randn(2, *parts_of(handle).core_layout.shape)
    exact = CLOSE if style == "identity-keep" else {"rtol": 0, "atol": 0}  # until it is merged, fc1 is for all at once
    with torch.no_grad():
        torch.testing.assert_close(core(tokens)[:, :protected], before(tokens[:, :protected]), **exact)
        assert torch.equal(core(tokens[:, :protected]), before(tokens[:, :protected]))
        assert (core(tokens) - before(tokens))[:, protected:].abs().max() > 1e-3
    torch.testing.assert_close(outputs_of(gated, images), outputs_of(model, images), **CLOSE)
    calibrate_(model, replace(plan, attention=(2,)), [images])  # its constant is folded into both biases before it
    pruned = outputs_of(model, images)
    torch.testing.assert_close(outputs_of(hetdpt.merge_(model), images), pruned, **CLOSE)
    loaded = hetdpt.load(hetdpt.save(model, tmp_path / "saved"))
    torch.testing.assert_close(outputs_of(loaded, images), outputs_of(model, images), rtol=0, atol=0)


def test_what_trains_before_merging_is_merged(model: nn.Module, images: Tensor) -> None:
    hetdpt.prune_(model, Plan(activation=(0, 1), removal=("skip", "identity-keep")))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model(images).square().mean().backward()
    optimizer.step()
    trained = run(model, images)
    params = hetdpt.count_params(model)
    torch.testing.assert_close(run(hetdpt.merge_(model), images), trained, **CLOSE)
    assert hetdpt.count_params(model) == params + 2 * (48 * 48 + 48)  # the FFNs stay, for class tokens


@pytest.mark.parametrize(
    ("label", "why"),
    [
        ("swin_tiny_patch4_window7_224", "the class token can keep its FFN in models whose blocks all get as many"),
        ("vit_base_patch16_siglip_224", "the blocks of this model get patches alone, no class token"),
        ("tnt_s_patch16_224", "the class token can keep its FFN in models whose blocks all get as many"),
        ("convnext_atto", "the class token can keep its FFN in models with attention, but this one has none"),
    ],
)
def test_no_class_token_no_ffn_to_keep(label: str, why: str) -> None:
    family = named(label)
    with pytest.raises(PlanError, match=f"{why}.*; use class_token 'share'"):
        hetdpt.prune_(family.build(), Plan(activation=(0,), removal=("skip", "identity-keep")), family.size)


@pytest.mark.parametrize("label", ["vit_small_patch14_dinov2", "hf Dinov2ForImageClassification", "cait_xxs24_224"])
def test_layer_scale_and_norms_fold_away(label: str) -> None:
    family = named(label)
    model, images = family.build(), family.images()
    hetdpt.prune_(model, Plan(activation=(1,)))
    outputs = [model(images)] if isinstance(model(images), Tensor) else [model(images).logits]
    before = hetdpt.count_params(model)
    merged = deepcopy(model)
    hetdpt.merge_(merged)
    width = hetdpt.surgery.record.survey_of(model).anatomy.width
    hidden = 2 * width if label.startswith("hf") else 4 * width
    ffn, one, scale = 2 * width * hidden + hidden + width, width * width + width, width
    assert before - hetdpt.count_params(merged) == ffn - one + scale
    hetdpt.merge_(model, fold_norms=True)
    assert hetdpt.count_params(merged) - hetdpt.count_params(model) == 2 * width
    for result in (merged(images), model(images)):
        torch.testing.assert_close(result if isinstance(result, Tensor) else result.logits, outputs[0], **CLOSE)


def test_a_pruned_model_may_lose_more(model: nn.Module, images: Tensor) -> None:
    whole = run(hetdpt.prune_(deepcopy(model), PLAN), images)
    hetdpt.prune_(model, Plan(attention=(0,)))
    hetdpt.merge_(hetdpt.prune_(model, Plan(activation=(1,))))
    hetdpt.merge_(hetdpt.prune_(model, PLAN))
    torch.testing.assert_close(run(model, images), whole, **CLOSE)
    assert [site.path for site in hetdpt.sites(model)] == ["blocks.0.mlp.act", "blocks.1.attn"]
    with pytest.raises(PlanError, match="was pruned with removal 'plain' and the plan says 'norm'"):
        hetdpt.prune_(model, Plan(attention=(1,), removal="norm"))


def test_a_pruned_model_can_be_gated(model: nn.Module, images: Tensor) -> None:
    hetdpt.prune_(model, Plan(attention=(0,), activation=(0,)))
    pruned = run(model, images)
    hetdpt.gate_(model)
    assert torch.equal(run(model, images), pruned)
    assert len(hetdpt.gates_of(model)) == 4


def test_an_empty_plan_changes_nothing(model: nn.Module, images: Tensor) -> None:
    dense = run(model, images)
    assert torch.equal(run(hetdpt.merge_(hetdpt.prune_(model, Plan())), images), dense)


def test_merge_leaves_narrow_ffns_alone() -> None:
    family = named("vit_tiny_patch16_224")
    narrow = Family(
        "narrow", hetdpt.Base("timm", family.base.name, {**family.base.arguments, "mlp_ratio": 0.5}), 32, 3, 3
    )
    model = hetdpt.prune_(narrow.build(), Plan(activation=(1,)))
    before = hetdpt.count_params(model)
    assert hetdpt.count_params(hetdpt.merge_(model)) == before


def test_norms_may_be_folded_later_and_more_layers_merged(model: nn.Module, images: Tensor, tmp_path: Path) -> None:
    hetdpt.merge_(hetdpt.prune_(model, Plan(activation=(0,))), fold_norms=True)
    hetdpt.merge_(hetdpt.prune_(model, Plan(activation=(1,))))
    before = run(hetdpt.prune_(model, Plan(activation=(2,))), images)
    loaded = hetdpt.load(hetdpt.save(model, tmp_path / "saved"))  # two merged, one not, one norm folded
    assert torch.equal(run(loaded, images), before)
    hetdpt.merge_(model, fold_norms=True)
    torch.testing.assert_close(run(model, images), before, **CLOSE)
    assert not any(block.norm2.elementwise_affine for block in model.blocks)


def test_a_gated_model_still_knows_its_sites(model: nn.Module) -> None:
    expected = hetdpt.sites(model)
    assert hetdpt.sites(hetdpt.gate_(model, PLAN)) == expected
    assert hetdpt.sites(hetdpt.restore_(model)) == expected


@pytest.mark.slow
@pytest.mark.parametrize("label", ["levit_128s", pytest.param("coat_lite_tiny", marks=pytest.mark.slow)])
@pytest.mark.parametrize("is_training", [True, False])
def test_norms_in_a_mode_of_their_own_stay_in_it(label: str, is_training: bool) -> None:
    family = named(label)
    model, images = family.build().train(is_training), [family.images(4)]
    norms = nn.BatchNorm1d, nn.BatchNorm2d, nn.LayerNorm
    for module in model.modules():
        module.training = is_training != isinstance(module, norms)
    plan = family.plan(hetdpt.sites(model, family.size))
    fitted = replace(plan, removal="calibrated")
    for change in (
        lambda changed: hetdpt.gate_(changed, plan, family.size),
        lambda changed: hetdpt.restore_(hetdpt.gate_(changed, plan, family.size)),
        lambda changed: gate_fitted_(changed, fitted, images),
        lambda changed: hetdpt.restore_(gate_fitted_(changed, fitted, images)),
        lambda changed: hetdpt.prune_(changed, plan, family.size),
        lambda changed: hetdpt.merge_(hetdpt.prune_(changed, plan, family.size), fold_norms=True),
        lambda changed: hetdpt.merge_(hetdpt.calibrate_(changed, fitted, images)),
    ):
        changed = deepcopy(model)
        modes = {module: module.training for module in changed.modules()}
        assert all(module.training == modes.get(module, module.training) for module in change(changed).modules())


@pytest.mark.parametrize("label", ["hf ViTForImageClassification", "hf SwinForImageClassification"])
def test_drop_paths_takes_images_by_name(label: str) -> None:
    family = named(label)
    model, answers = family.build().train(), []
    for arguments in ({"pixel_values": family.images()}, {"labels": None, "pixel_values": family.images()}):
        with drop_paths(model, 0.5), torch.random.fork_rng():
            torch.manual_seed(0)
            answers.append(model(**arguments).logits)
    with drop_paths(model, 0.5), torch.random.fork_rng():
        torch.manual_seed(0)
        answers.append(model(family.images()).logits)
    assert torch.equal(answers[0], answers[1])
    assert torch.equal(answers[0], answers[2])


def test_in_place_activations_keep_their_importance() -> None:
    family = named("vit_tiny_patch16_224")
    scores = []
    for act_layer in (nn.ReLU, partial(nn.ReLU, inplace=True)):
        torch.manual_seed(0)
        model = timm.create_model(family.base.name, **{**family.base.arguments, "act_layer": act_layer})
        hetdpt.gate_(model)(family.images()).sum().backward()
        scores.append({path: gate.importance.grad.item() for path, gate in hetdpt.gates_of(model).items()})
        assert hetdpt.restore_(model).blocks[0].mlp.act.inplace == (act_layer is not nn.ReLU)
    assert scores[0] == pytest.approx(scores[1])
    assert any(score for path, score in scores[0].items() if "mlp" in path)


def test_merging_deit_base_costs_less_than_rounding_shows() -> None:
    torch.manual_seed(0)
    pruned = hetdpt.prune_(
        hetdpt.create("deit_base_distilled_patch16_224"), hetdpt.published_plan("paper/deit_base-10")
    )
    merged = hetdpt.merge_(clone(pruned))
    assert 0 < relative_difference(pruned, merged, (3, 224, 224), batch=1) < 1e-5  # float32 has seven digits


class TestHabits:
    """A pruned or gated model is used like any other."""

    @pytest.fixture(params=["gated", "pruned", "merged"])
    def operated(self, request: pytest.FixtureRequest, model: nn.Module) -> nn.Module:
        if request.param == "gated":
            return hetdpt.gate_(model, PLAN)
        hetdpt.prune_(model, PLAN)
        return hetdpt.merge_(model) if request.param == "merged" else model

    def test_inference_mode(self, operated: nn.Module, images: Tensor) -> None:
        with torch.inference_mode():
            result = operated(images)
        assert torch.equal(result, run(operated, images))

    def test_deepcopy_is_independent(self, operated: nn.Module, images: Tensor) -> None:
        copied = deepcopy(operated)
        before = run(operated, images)
        assert torch.equal(run(copied, images), before)
        for gate in hetdpt.gates_of(copied).values():
            gate.is_open = False
        with torch.no_grad():
            for parameter in copied.parameters():
                parameter.zero_()
        assert torch.equal(run(operated, images), before)

    def test_state_dict_round_trip(self, operated: nn.Module, images: Tensor) -> None:
        twin = deepcopy(operated)
        with torch.no_grad():
            for parameter in twin.parameters():
                parameter.normal_()
        twin.load_state_dict(operated.state_dict())
        assert torch.equal(run(twin, images), run(operated, images))

    def test_train_and_eval_mode_reach_every_module(self, operated: nn.Module) -> None:
        assert not any(module.training for module in operated.modules())
        assert all(module.training for module in operated.train().modules())

    def test_half_precision(self, operated: nn.Module, images: Tensor) -> None:
        full = run(operated, images)
        half = run(operated.half(), images.half())
        assert half.dtype == torch.float16
        assert (half.float() - full).abs().max() < 0.05 * full.abs().max()  # three decimal digits through three blocks

    def test_gradient_checkpointing(self, operated: nn.Module, images: Tensor) -> None:
        gradients = []
        for is_checkpointed in (False, True):
            operated.set_grad_checkpointing(is_checkpointed)
            operated.zero_grad()
            operated.train()(images).sum().backward()
            gradients.append({n: p.grad.clone() for n, p in operated.named_parameters() if p.grad is not None})
        assert gradients[0].keys() == gradients[1].keys()
        for name, gradient in gradients[0].items():
            torch.testing.assert_close(gradients[1][name], gradient, **CLOSE)

    def test_torch_compile(self, operated: nn.Module, images: Tensor) -> None:
        torch._dynamo.reset()
        compiled = torch.compile(operated, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(run(compiled, images), run(operated, images), **CLOSE)

    def test_torch_compile_trains(self, operated: nn.Module, images: Tensor) -> None:
        torch._dynamo.reset()
        operated(images).sum().backward()
        expected = {n: p.grad.clone() for n, p in operated.named_parameters() if p.grad is not None}
        operated.zero_grad()
        torch.compile(operated, backend="aot_eager")(images).sum().backward()
        for name, gradient in expected.items():
            torch.testing.assert_close(operated.get_parameter(name).grad, gradient, rtol=1e-3, atol=1e-4)

    def test_torch_export(self, operated: nn.Module, images: Tensor) -> None:
        program = torch.export.export(operated, (images,), dynamic_shapes=({0: torch.export.Dim("batch")},))
        more = torch.cat([images, images + 0.1])
        torch.testing.assert_close(run(program.module(), more), run(operated, more), **CLOSE)

    def test_non_reentrant_checkpoint_of_the_whole(self, operated: nn.Module, images: Tensor) -> None:
        images.requires_grad_()
        checkpoint(operated, images, use_reentrant=False).sum().backward()
        assert images.grad is not None


@pytest.mark.slow
def test_torch_compile_with_inductor(model: nn.Module, images: Tensor) -> None:
    hetdpt.merge_(hetdpt.prune_(model, PLAN))
    torch._dynamo.reset()
    torch.testing.assert_close(run(torch.compile(model), images), run(model, images), **CLOSE)


class TestRefusals:
    def test_block_out_of_range(self, model: nn.Module) -> None:
        with pytest.raises(PlanError, match="removes attention 12 but this model has blocks 0-2"):
            hetdpt.prune_(model, Plan(attention=(12,)))

    def test_plan_of_another_model(self, model: nn.Module) -> None:
        with pytest.raises(PlanError, match="made for a model with 12 blocks of width 768 .* 3 blocks of width 48"):
            hetdpt.prune_(model, hetdpt.published_plan("paper/deit_base-8"))

    def test_gated_ffn_has_no_linear_form(self) -> None:
        model = named("eva02_tiny_patch14_224").build()
        with pytest.raises(PlanError, match="activation 1 belongs to a gated FFN, which has no exact linear form"):
            hetdpt.prune_(model, Plan(activation=(1,)))
        hetdpt.prune_(model, Plan(attention=(1,)))  # nothing was changed by the refusal

    @pytest.mark.parametrize("removal", ["calibrated", ("linear", "identity")])
    def test_fitted_styles_need_images(self, model: nn.Module, removal: str | tuple[str, str]) -> None:
        with pytest.raises(PlanError, match="is fitted on images"):
            hetdpt.prune_(model, Plan(attention=(1,), removal=removal))

    def test_a_refusal_leaves_no_gate_behind(self) -> None:
        model = named("eva02_tiny_patch14_224").build()
        with pytest.raises(PlanError, match="activation 1 belongs to a gated FFN"):
            hetdpt.gate_(model, Plan(attention=(0,), activation=(1,)))
        assert not hetdpt.gates_of(model)

    def test_authors_needs_blocks_that_are_one_module(self) -> None:
        family = named("lowformer_b0")
        model = family.build()
        block = next(site.block for site in hetdpt.sites(model, family.size))
        plan = Plan((block,), (block,), removal="authors")
        before = run(model, family.images())
        with pytest.raises(PlanError, match="removal 'authors' needs blocks that are one module"):
            hetdpt.prune_(model, plan, family.size)
        assert torch.equal(run(model, family.images()), before)

    def test_an_ffn_that_cannot_go_as_a_whole(self) -> None:
        model = named("hf Swinv2ForImageClassification").build()  # its FFN is two modules of the block
        with pytest.raises(PlanError, match="the FFN of block 1 cannot be removed as a whole"):
            hetdpt.prune_(model, Plan(activation=(1,), removal=("skip", "drop")))

    def test_gates_of_another_style(self, model: nn.Module) -> None:
        hetdpt.prune_(model, Plan(attention=(0,)))
        with pytest.raises(PlanError, match="was pruned with removal 'plain' and the plan says 'norm'"):
            hetdpt.gate_(model, Plan(removal="norm"))

    def test_gates_must_be_off(self, model: nn.Module) -> None:
        hetdpt.gate_(model)
        for action in (lambda: hetdpt.prune_(model, PLAN), lambda: hetdpt.merge_(model), lambda: hetdpt.gate_(model)):
            with pytest.raises(PlanError, match=r"call restore_\(model\) first"):
                action()

    def test_a_refused_plan_leaves_the_model_alone(self, model: nn.Module, images: Tensor) -> None:
        dense = run(model, images)
        with pytest.raises(PlanError):
            hetdpt.prune_(model, Plan(attention=(0, 7)))
        assert torch.equal(run(model, images), dense)
        assert len(hetdpt.sites(model)) == 6

    def test_wrong_image_size(self, model: nn.Module) -> None:
        with pytest.raises(ModelError, match="does not take images of 3 x 48 x 48"):
            hetdpt.sites(model, (3, 48, 48))
