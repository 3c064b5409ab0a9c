"""Tokens that nothing reads are not computed: ``trim_`` changes no answer; the tail of a plan is what was fitted."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from families import ENCODERS, GATED, VIT, Family, by_label, named
from torch import Tensor, nn
from transformers import PreTrainedModel

import hetdpt
from hetdpt.adapters.heads import answer_tensors
from hetdpt.adapters.models import Base, unfuse_
from hetdpt.core.errors import DataError, ModelError, PlanError
from hetdpt.core.modules import digest
from hetdpt.core.plan import Measurement, Plan
from hetdpt.core.tokens import Tokens
from hetdpt.export.saved import RECIPE
from hetdpt.measurement.costs import count_macs
from hetdpt.measurement.speed import LatencyTable
from hetdpt.reduce.tokens.reduce import reduce_tokens_, restore_tokens_
from hetdpt.reduce.width.choice import Ratios
from hetdpt.reduce.width.narrow import WidthConfig, narrow_
from hetdpt.report.scan import csv_rows
from hetdpt.results import KeptBlock, Price, Prices
from hetdpt.store.atomic import read_sealed_json, write_sealed_json
from hetdpt.studies import scan as studies
from hetdpt.surgery.arrange import with_all_tokens
from hetdpt.surgery.calibrate import gate_fitted_
from hetdpt.surgery.kept import MeanStep, TailStep
from hetdpt.surgery.record import record_of, require_record
from hetdpt.surgery.resize import resize_
from hetdpt.training.bfloat16 import runs_bfloat16

SLOW = pytest.mark.slow
ROUNDING = 1e-5  # of the largest output in float32: sums over fewer rows round in another order
HF = {"hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 96}
HF = {**HF, "image_size": 32, "patch_size": 8}


def token(name: str, label: str, removal: Any = "plain", **options: Any) -> Family:
    """Return a family of timm whose head reads the class token."""
    arguments = {"num_classes": 10, "global_pool": "token", **VIT, **options}
    return Family(f"{name} {label}", Base("timm", name, arguments), 32, 3, 3, removal)


class ResPostFamily(Family):
    """A ViT whose blocks have their norms behind attention and FFN; timm's own is mean-pooled."""

    def make(self) -> nn.Module:
        from timm.models.vision_transformer import ResPostBlock, VisionTransformer

        return VisionTransformer(num_classes=10, block_fn=ResPostBlock, **VIT)


CLASS_TOKEN = [
    *map(named, ["vit_tiny_patch16_224", "vit_small_patch14_dinov2", "vit_base_patch16_clip_quickgelu_224"]),
    *map(named, ["flexivit_small", "deit_tiny_patch16_224", "deit_tiny_distilled_patch16_224"]),
    *map(named, ["deit3_small_patch16_224", "vit_tiny_r_s16_p8_224"]),
    *map(named, ["hf ViTForImageClassification", "hf DeiTForImageClassification"]),
    *map(named, ["hf DeiTForImageClassificationWithTeacher", "hf CLIPVisionModelWithProjection"]),
    token("vit_small_patch14_reg4_dinov2", "class token"),
    token("vit_small_patch16_dinov3", "class token"),
    token("beit_base_patch16_224", "class token"),
    token("beitv2_base_patch16_224", "class token"),
    token("beit_base_patch16_224", "one table", use_rel_pos_bias=False, use_shared_rel_pos_bias=True),
    token("eva_giant_patch14_224", "class token"),
    token("eva02_tiny_patch14_224", "class token", GATED),
    token("vit_small_patch16_rope_224", "class token"),
    token("vit_small_patch16_rope_mixed_224", "class token"),
    token("vit_betwixt_patch16_rope_reg4_gap_256", "class token", class_token=True),
    token("vit_tiny_patch16_224", "norms of queries and keys", qk_norm=True),
    ResPostFamily("vit norms behind", Base("timm", "VisionTransformer", {}), 32, 3, 3),
]
MEAN = [
    *map(named, ["vit_medium_patch16_reg4_gap_256", "vit_betwixt_patch16_rope_reg4_gap_256"]),
    *map(named, ["beit_base_patch16_224", "eva_giant_patch14_224", "vit_relpos_small_patch16_224", "qwen3_vit_88m"]),
    *map(named, ["hf BeitForImageClassification"]),
    token("vit_tiny_patch16_224", "mean", global_pool="avg"),
    token("vit_tiny_patch16_224", "mean, no class token", global_pool="avg", class_token=False),
    Family("hf CLIP", Base("transformers", "CLIPForImageClassification", {"vision_config": HF}), 32, 3, 3),
]
PATCHES = "this model cannot be trimmed: its output depends on patches of its last block, not only on the class token"
SHAPES = r"tokens that nothing reads can be left out in models whose blocks all get as many tokens, \(B, N, D\); this"
REFUSED = {
    "swin_tiny_patch4_window7_224": SHAPES,
    "hf Swinv2ForImageClassification": SHAPES,
    "samvit_base_patch16_224": SHAPES,
    "tnt_s_patch16_224": SHAPES,
    "pit_ti_224": SHAPES,
    "xcit_nano_12_p8_224": PATCHES,
    "cait_xxs24_224": PATCHES,
    "convit_tiny": PATCHES,
    "vit_base_patch16_siglip_224": PATCHES,
    "aimv2_large_patch14_224": PATCHES,
    "vit_small_patch16_dinov3": PATCHES,
    "eva02_tiny_patch14_224": "no linear layer is the last before the mean of its tokens",
    "naflexvit_base_patch16_gap": "expected the 20 tokens of NaFlexVit to be the patches",
    "convnext_atto": "in models with attention, but this one has none that can be removed",
    "hf Dinov2ForImageClassification": PATCHES,
    "hf Dinov2WithRegistersForImageClassification": PATCHES,
    "hf DINOv3ViTModel": PATCHES,
    "hf CLIPVisionModel": PATCHES,
    "hf SiglipVisionModel": PATCHES,
}
OTHERS = [  # and why each is refused
    (token("vit_tiny_patch16_224", "mean of normed tokens", global_pool="avg", fc_norm=False), PATCHES),
    (token("vit_tiny_patch16_224", "maximum", global_pool="max"), PATCHES),
    (token("vit_tiny_patch16_224", "map", global_pool="map"), PATCHES),
    (
        token("vit_relpos_base_patch16_cls_224", "class token"),
        "blocks.2.attn cannot attend to patches that are not computed: its class, .*RelPosAttention, is not known",
    ),
    (Family("backbone", Base("timm", "vit_tiny_patch16_224", {**VIT, "features_only": True}), 32, 3, 3), PATCHES),
    (Family("hf ViTModel", Base("transformers", "ViTModel", HF), 32, 3, 3), PATCHES),
    (
        Family("hf SigLIP", Base("transformers", "SiglipForImageClassification", {"vision_config": HF}), 32, 3, 4),
        PATCHES,
    ),
    (ENCODERS[1], "no linear layer is the last before the mean of its tokens"),
    (ENCODERS[3], SHAPES),
]


def rows(every: Iterable[tuple[Any, ...]], quick: Container[tuple[Any, ...]]) -> list[Any]:
    """Return the rows of a test, slow but for those in ``quick``; the others are of kinds that these are of."""
    return [pytest.param(*row, id="-".join(map(str, row)), marks=[] if row in quick else [SLOW]) for row in every]


def few(labels: Iterable[str], quick: Container[str]) -> list[Any]:
    return [pytest.param(label, marks=[] if label in quick else [SLOW]) for label in labels]


@torch.no_grad()
def run(model: nn.Module, images: Tensor) -> list[Tensor]:
    return answer_tensors(model(images))


def distance(some: list[Tensor], others: list[Tensor]) -> float:
    """Return the largest difference, as a part of the largest value."""
    assert [one.shape for one in some] == [other.shape for other in others]
    return max(((one - other).abs().max() / other.abs().max()).item() for one, other in zip(some, others, strict=True))


def are_equal(some: list[Tensor], others: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(some, others, strict=True))


def steps_of(model: nn.Module) -> list[TailStep | MeanStep]:
    return [module for module in model.modules() if isinstance(module, TailStep | MeanStep)]


# Trim: one contract for every family


@pytest.mark.parametrize("family", [*CLASS_TOKEN, *MEAN], ids=by_label)
def test_contract(family: Family) -> None:
    """The same answers from fewer operations, saved and loaded to the same bits, and undone bit for bit."""
    model, images = family.build(), family.images()
    before, macs, printed = run(model, images), count_macs(model, family.size), digest(model)
    names = list(model.state_dict())
    assert hetdpt.trim_(model, family.size) is model
    [step] = steps_of(model)
    after = run(model, images)
    assert distance(after, before) < ROUNDING
    assert count_macs(model, family.size) < macs
    assert list(model.state_dict()) == names
    assert not any(module.training for module in model.modules())
    assert digest(model) != printed

    one = [torch.cat(parts) for parts in zip(*(run(model, image[None]) for image in images), strict=True)]
    assert distance(one, after) < ROUNDING, "images do not see each other"
    assert are_equal(run(deepcopy(model), images), after)
    assert distance(run(unfuse_(deepcopy(model)), images), after) < ROUNDING
    assert distance(run(model.train().eval(), images), after) == 0
    printed_once = digest(model)
    assert digest(hetdpt.trim_(model)) == printed_once, "trimming twice changes nothing"
    assert steps_of(model) == [step]

    hetdpt.untrim_(model)
    assert are_equal(run(model, images), before)
    assert digest(model) == printed
    assert not steps_of(model)
    assert count_macs(model, family.size) == macs
    assert digest(hetdpt.untrim_(model)) == printed


def test_as_many_families_as_promised() -> None:
    timm = [family for family in CLASS_TOKEN if family.base.library == "timm"]
    assert len(timm) >= 15
    assert sum(family.base.library == "transformers" for family in [*CLASS_TOKEN, *MEAN]) >= 5


@pytest.mark.parametrize(
    ("family", "why"),
    [*((named(label), why) for label, why in REFUSED.items()), *OTHERS],
    ids=lambda v: getattr(v, "label", ""),
)
def test_what_cannot_be_is_refused_in_a_sentence_and_left_alone(family: Family, why: str) -> None:
    model = family.build()
    printed, before = digest(model), run(model, family.images())
    with pytest.raises(ModelError, match=why) as refused:
        hetdpt.trim_(model, family.size)
    assert "\n" not in str(refused.value)
    assert digest(model) == printed
    assert record_of(model) is None
    assert are_equal(run(model, family.images()), before)


# A trimmed model


REMOVALS = ["norm", "authors", ("skip", "drop"), ("constant", "calibrated"), ("position", "calibrated")]
REMOVALS += [("linear", "calibrated"), ("skip", "calibrated-keep"), ("skip", "identity-keep")]
OTHER = ["deit_tiny_distilled_patch16_224", "vit_small_patch16_dinov3 class token", "beit_base_patch16_224 class token"]
OTHER += ["vit_medium_patch16_reg4_gap_256", "hf ViTForImageClassification"]
FAMILY = {family.label: family for family in [*CLASS_TOKEN, *MEAN]}
ROWS = [("vit_tiny_patch16_224", removal) for removal in REMOVALS]
ROWS += [(label, "calibrated") for label in OTHER]
PLAIN = [(label, "plain") for label in OTHER]


def applied(plan: Plan, family: Family) -> nn.Module:
    """Return the model without the layers of ``plan``, whatever its removal needs."""
    if plan.is_any_fitted or plan.needs_images:
        return hetdpt.calibrate_(family.build(), plan, [family.images(8)])
    return hetdpt.prune_(family.build(), plan, family.size)


@pytest.mark.parametrize("plan", [Plan((0,), (2,)), Plan((2,), (1, 2))], ids=["before the last", "and the last"])
@pytest.mark.parametrize(("label", "removal"), rows([*ROWS, *PLAIN], ROWS))
def test_pruned_and_merged_it_answers_the_same(label: str, removal: Any, plan: Plan) -> None:
    family = FAMILY[label]
    model, images = applied(replace(plan, removal=removal), family), family.images()
    before, other = run(model, images), deepcopy(model)
    hetdpt.trim_(model)
    assert distance(run(model, images), before) < ROUNDING
    assert count_macs(model, family.size) < count_macs(other, family.size)
    hetdpt.merge_(model)
    assert distance(run(model, images), before) < 2 * ROUNDING  # merging rounds once more
    hetdpt.trim_(hetdpt.merge_(other))
    assert are_equal(run(model, images), run(other, images)), "in either order"
    assert count_macs(model, family.size) == count_macs(other, family.size)
    assert digest(hetdpt.untrim_(model)) == digest(hetdpt.untrim_(other))


@pytest.mark.parametrize("label", ["vit_tiny_patch16_224", "vit_medium_patch16_reg4_gap_256"])
def test_more_layers_of_a_trimmed_model_are_removed(label: str) -> None:
    """It is then trimmed as if it had been afterwards; where that is impossible, nothing has changed."""
    family = FAMILY[label]
    model, images = hetdpt.trim_(family.build(), family.size), family.images()
    for plan in (Plan((2,)), Plan((2,), (1, 2)), Plan((0, 1, 2), (1, 2))):
        hetdpt.prune_(model, plan)
        other = hetdpt.trim_(hetdpt.prune_(family.build(), plan, family.size))
        assert are_equal(run(model, images), run(other, images))
        assert digest(model) == digest(other)


def test_the_last_ffn_of_a_trimmed_model_that_averages_tokens_stays() -> None:
    family = FAMILY["vit_medium_patch16_reg4_gap_256"]
    model = hetdpt.trim_(family.build(), family.size)
    printed = digest(model)
    with pytest.raises(ModelError, match="^this model cannot be trimmed: the last FFN, .* the mean, was removed$"):
        hetdpt.prune_(model, Plan(activation=(2,), removal=("skip", "drop")))
    with pytest.raises(ModelError, match="^this model cannot be trimmed: a GELU is between its last block and the "):
        hetdpt.prune_(model, Plan((2,), (2,), removal="authors"))
    assert digest(model) == printed


KINDS = ["vit_tiny_patch16_224", "vit_small_patch16_dinov3 class token", "beit_base_patch16_224 class token"]
KINDS += ["vit_medium_patch16_reg4_gap_256", "hf ViTForImageClassification"]
kinds = pytest.mark.parametrize("label", KINDS)
quick = pytest.mark.parametrize("label", few(KINDS, KINDS[:1]))


def pair(label: str) -> tuple[nn.Module, nn.Module, Tensor]:
    """Return a model, the same trimmed, and images."""
    family = FAMILY[label]
    model = family.build()
    return model, hetdpt.trim_(deepcopy(model), family.size), family.images()


@kinds
def test_inference_mode_and_other_types(label: str) -> None:
    model, trimmed, images = pair(label)
    with torch.inference_mode():
        assert distance(run(trimmed, images), run(model, images)) < ROUNDING
    types = {torch.float64: 1e-13, torch.float16: 1e-2}  # a few roundings
    if runs_bfloat16("cpu"):
        types[torch.bfloat16] = 5e-2
        with torch.autocast("cpu", torch.bfloat16):
            assert distance(run(trimmed, images), run(model, images)) < types[torch.bfloat16]
    for dtype, tolerance in types.items():
        dense = deepcopy(model).to(dtype)
        expected, images = run(dense, images.to(dtype)), images.to(dtype)
        assert distance(run(hetdpt.trim_(dense, FAMILY[label].size), images), expected) < tolerance, dtype
        assert distance(run(deepcopy(trimmed).to(dtype), images), expected) < tolerance, dtype


@quick
def test_compiled_it_computes_the_same(label: str) -> None:
    _, trimmed, images = pair(label)
    torch.compiler.reset()
    compiled = torch.compile(trimmed, backend="eager")
    for batch in (images, images, torch.cat([images, images])):
        assert distance(run(compiled, batch), run(trimmed, batch)) < ROUNDING


@quick
def test_exported_by_torch_for_any_number_of_images(label: str) -> None:
    _, trimmed, images = pair(label)
    program = torch.export.export(trimmed, (images,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    more = torch.cat([images, images.flip(-1)])
    assert distance(answer_tensors(program.module()(more)), run(trimmed, more)) < ROUNDING


@kinds
def test_training_steps_are_those_of_the_whole_model(label: str) -> None:
    """In training mode, with and without gradient checkpoints; patches of the last block get no gradient in either."""
    model, trimmed, images = pair(label)
    found = []
    for one, checkpoints in ((model, False), (trimmed, False), (trimmed, True)):
        one.train().zero_grad()
        if checkpoints:
            checkpointed_(one)
        answer_tensors(one(images))[0].square().sum().backward()
        found.append({name: parameter.grad.clone() for name, parameter in one.named_parameters()})
    for name, gradient in found[0].items():
        scale = gradient.abs().max().clamp(min=1e-3)
        assert (found[1][name] - gradient).abs().max() / scale < 1e-4, name
        assert torch.equal(found[2][name], found[1][name]), name


def checkpointed_(model: nn.Module) -> None:
    """Let timm or transformers compute what is inside blocks a second time in the backward pass."""
    if isinstance(model, PreTrainedModel):
        model.gradient_checkpointing_enable()
    else:
        model.set_grad_checkpointing(True)  # type: ignore[operator]


@kinds
def test_saved_and_loaded_it_is_the_same(label: str, tmp_path: Path) -> None:
    family = FAMILY[label]
    model = hetdpt.trim_(hetdpt.merge_(hetdpt.prune_(family.build(), Plan((2,), (1,)), family.size)))
    loaded = hetdpt.load(hetdpt.save(model, tmp_path / "saved"))
    assert are_equal(run(loaded, family.images()), run(model, family.images()))
    assert digest(loaded) == digest(model)
    assert digest(hetdpt.untrim_(loaded)) == digest(hetdpt.untrim_(model))


@quick
def test_onnx_runtime_agrees(label: str, tmp_path: Path) -> None:
    _, trimmed, _ = pair(label)
    exported = hetdpt.export_onnx(trimmed, tmp_path / "model.onnx", FAMILY[label].size)
    assert exported.relative_difference < 1e-5  # torch and it round otherwise


REDUCED = [(label, way) for label in (KINDS[0], "deit_tiny_distilled_patch16_224", KINDS[4]) for way in ("tome", "gtp")]


@pytest.mark.parametrize(("label", "way"), rows(REDUCED, [*REDUCED[:3], REDUCED[5]]))
def test_fewer_tokens_before_or_after(label: str, way: str, tmp_path: Path) -> None:
    """The last block, which reduces none where it is trimmed, has as many keys, weighted by the sizes of tokens."""
    family, tokens = FAMILY[label], Tokens(way, 3)
    images = family.images()
    whole = reduce_tokens_(hetdpt.prune_(family.build(), Plan((1,)), family.size), tokens)
    one = hetdpt.trim_(deepcopy(whole))
    other = reduce_tokens_(hetdpt.trim_(hetdpt.prune_(family.build(), Plan((1,)), family.size)), tokens)
    assert distance(run(one, images), run(whole, images)) < ROUNDING
    assert are_equal(run(one, images), run(other, images))
    assert count_macs(one, family.size) == count_macs(other, family.size) < count_macs(whole, family.size)
    loaded = hetdpt.load(hetdpt.save(one, tmp_path / "saved"))
    assert are_equal(run(loaded, images), run(one, images))
    before = run(whole, images)
    assert are_equal(run(hetdpt.untrim_(one), images), before)
    hetdpt.trim_(restore_tokens_(other))
    assert distance(run(other, images), run(restore_tokens_(whole), images)) < ROUNDING


def test_gtp_with_sparse_maps_is_not_trimmed(model: nn.Module) -> None:
    """Which entries of a map are largest depends on rows that would not be computed."""
    reduce_tokens_(model, Tokens("gtp", 2, sparsity=0.5))
    with pytest.raises(ModelError, match=r"how it reduces tokens depends on tokens that would not be computed; call "):
        hetdpt.trim_(model)
    hetdpt.trim_(restore_tokens_(model))
    with pytest.raises(ModelError, match=r"how it reduces tokens depends on tokens that would not be computed"):
        reduce_tokens_(model, Tokens("gtp", 2, sparsity=0.5))


@kinds
@pytest.mark.parametrize("removal", ["plain", "calibrated"])
def test_gates_of_a_trimmed_model(label: str, removal: str) -> None:
    """Open gates change nothing, closed ones are what pruning leaves, and it is trimmed no further meanwhile."""
    family = FAMILY[label]
    _, trimmed, images = pair(label)
    before, printed, batches = run(trimmed, images), digest(trimmed), [family.images(8)]
    plan = Plan((2,), (1,), removal=removal)
    gate_fitted_(trimmed, Plan(removal=removal), batches)
    assert are_equal(run(trimmed, images), before)
    with torch.enable_grad():
        assert distance([answer.detach() for answer in answer_tensors(trimmed(images))], before) < ROUNDING
    hetdpt.restore_(trimmed)
    assert digest(trimmed) == printed
    gated = run(gate_fitted_(trimmed, plan, batches), images)
    hetdpt.restore_(trimmed)
    assert are_equal(run(trimmed, images), before)
    if removal == "plain":
        assert distance(gated, run(hetdpt.prune_(trimmed, plan), images)) < ROUNDING


# The tail of a plan


TAILED = ["vit_tiny_patch16_224", "deit_tiny_distilled_patch16_224", "vit_small_patch14_reg4_dinov2 class token"]
TAILED += ["vit_small_patch16_dinov3 class token", "beit_base_patch16_224 class token", "hf ViTForImageClassification"]
TAILED += ["vit_small_patch16_rope_mixed_224 class token", "hf CLIPVisionModelWithProjection"]
FEW = ["vit_tiny_patch16_224", "deit_tiny_distilled_patch16_224", "vit_small_patch16_dinov3 class token"]
FEW += ["hf ViTForImageClassification"]
tailed = pytest.mark.parametrize("label", TAILED)


@tailed
def test_a_tail_of_one_is_trimming(label: str) -> None:
    family = FAMILY[label]
    model, images = family.build(), family.images()
    before, trimmed = run(model, images), hetdpt.trim_(deepcopy(model), family.size)
    hetdpt.prune_(model, Plan(tail=1), family.size)
    assert are_equal(run(model, images), run(trimmed, images))
    assert distance(run(model, images), before) < ROUNDING
    assert count_macs(model, family.size) == count_macs(trimmed, family.size)
    after = run(model, images)
    assert are_equal(run(hetdpt.untrim_(hetdpt.trim_(model)), images), after), "the tail stays"
    assert not hetdpt.Plan(tail=1).needs_images


@pytest.mark.parametrize("label", few(TAILED, FEW))
def test_a_tail_is_cheaper_and_fitted(label: str, tmp_path: Path) -> None:
    """Longer ones cost less; they are saved, and computed the same by whatever runs them."""
    family = FAMILY[label]
    images, batches = family.images(), [family.images(8), family.images(8).flip(-1)]
    before, costs = run(family.build(), images), [count_macs(family.build(), family.size)]
    for tail in (1, 2, 3):
        model = hetdpt.calibrate_(family.build(), Plan(tail=tail), batches)
        costs.append(count_macs(model, family.size))
        fits = require_record(model).plan.fits
        assert [(fit.kind, fit.block) for fit in fits] == [("tail", block) for block in range(4 - tail, 3)]
    assert costs == sorted(costs, reverse=True)
    after = run(model, images)
    assert 1e-6 < distance(after, before) < 1
    assert are_equal(run(deepcopy(model), images), after)
    assert distance(run(unfuse_(deepcopy(model)), images), after) < ROUNDING
    one = [torch.cat(parts) for parts in zip(*(run(model, image[None]) for image in images), strict=True)]
    assert distance(one, after) < ROUNDING, "images do not see each other"
    loaded = hetdpt.load(hetdpt.save(model, tmp_path / "saved"))
    assert are_equal(run(loaded, images), after)
    assert digest(loaded) == digest(model)
    assert require_record(loaded).plan == require_record(model).plan
    assert are_equal(run(hetdpt.trim_(hetdpt.merge_(model)), images), after), "there is nothing to merge or to trim"


def planted(model: nn.Module) -> nn.Module:
    """Make blocks 1 and 2 add nothing to patches, so that what their attention gets is an affine map of LN(x).

    Attention adds nothing and the FFN a constant; the norms before attention have their own weights.
    """
    with torch.no_grad():
        for block in list(model.blocks)[1:]:  # type: ignore[arg-type]
            block.attn.proj.weight.zero_()
            block.attn.proj.bias.zero_()
            block.mlp.fc2.weight.zero_()
            block.mlp.fc2.bias.zero_()
    return model


def test_what_is_linear_is_recovered() -> None:
    """Patches that blocks leave alone have an input of attention that is affine in LN(x); class tokens attend to it."""
    family = FAMILY["vit_tiny_patch16_224"]
    model, images = planted(family.build()).double(), family.images(16).double()
    with torch.no_grad():
        model.blocks[2].attn.proj.weight.normal_(generator=torch.Generator().manual_seed(0))  # type: ignore
    before = run(model, images)
    hetdpt.calibrate_(model, Plan(tail=2), [family.images(64).double()])
    assert all(fit.r2 > 1 - 1e-9 for fit in require_record(model).plan.fits)
    assert distance(run(model, images), before) < 1e-5  # the ridge, which is never 0


@pytest.mark.parametrize("plan", [Plan(tail=3), Plan((1,), (0,), tail=3)], ids=["tail", "and layers"])
def test_a_fit_does_not_depend_on_batches(plan: Plan) -> None:
    family = FAMILY["vit_tiny_patch16_224"]
    images = family.images(24)
    models = [
        hetdpt.calibrate_(family.build().double(), plan, list(images.double().split(size))) for size in (24, 5, 1)
    ]
    for model in models[1:]:
        for (name, one), other in zip(models[0].named_parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-7, atol=1e-9, msg=name)  # sums in another order


COMPOSED = [(TAILED[0], removal) for removal in REMOVALS if removal != "authors"]
COMPOSED += [(label, "calibrated") for label in TAILED[1:6]]
QUICK = [(TAILED[0], removal) for removal in ("norm", ("linear", "calibrated"), ("skip", "calibrated-keep"))]
QUICK += [(TAILED[4], "calibrated"), (TAILED[5], "calibrated")]


@pytest.mark.parametrize(("label", "removal"), rows(COMPOSED, QUICK))
def test_a_tail_composes_with_removed_layers(label: str, removal: Any, tmp_path: Path) -> None:
    """Before the tail, at its first block and inside; calibrating, then merging and trimming, changes nothing."""
    family = FAMILY[label]
    images = family.images()
    for plan in (Plan((0,), (0, 1), tail=2), Plan((1,), (1, 2), tail=2), Plan((2,), (0,), tail=3)):
        model = hetdpt.calibrate_(family.build(), replace(plan, removal=removal), [family.images(16)])
        after = run(model, images)
        assert distance(run(hetdpt.merge_(model), images), after) < 2 * ROUNDING
        assert distance(run(hetdpt.trim_(model), images), after) < 2 * ROUNDING
        loaded = hetdpt.load(hetdpt.save(model, tmp_path / "saved", overwrite=True))
        assert are_equal(run(loaded, images), run(model, images))


@pytest.mark.parametrize("label", few(TAILED, TAILED[:1]))
def test_onnx_runtime_agrees_on_a_tail(label: str, tmp_path: Path) -> None:
    family = FAMILY[label]
    model = hetdpt.calibrate_(family.build(), Plan(tail=3), [family.images(8)])
    assert hetdpt.export_onnx(model, tmp_path / "model.onnx", family.size).relative_difference < 1e-5


@pytest.mark.parametrize("tokens", [Tokens("tome", 2), Tokens("gtp", 2)], ids=["tome", "gtp"])
def test_a_tail_with_fewer_tokens(tokens: Tokens, tmp_path: Path) -> None:
    family = FAMILY["vit_tiny_patch16_224"]
    model, images = hetdpt.calibrate_(family.build(), Plan(tail=2), [family.images(8)]), family.images()
    before, macs = run(model, images), count_macs(model, family.size)
    reduce_tokens_(model, tokens)
    after = run(model, images)
    assert distance(after, before) > 1e-5
    assert count_macs(model, family.size) < macs
    assert are_equal(run(hetdpt.load(hetdpt.save(model, tmp_path / "saved")), images), after)
    assert are_equal(run(restore_tokens_(model), images), before)


@pytest.mark.parametrize("removal", ["plain", "calibrated", ("position", "calibrated")], ids=str)
def test_gates_of_a_model_with_a_tail(removal: Any) -> None:
    family = FAMILY["vit_tiny_patch16_224"]
    model, images = hetdpt.calibrate_(family.build(), Plan(tail=2), [family.images(8)]), family.images()
    before = run(model, images)
    gate_fitted_(model, Plan(removal=removal), [family.images(8)])
    assert are_equal(run(model, images), before)
    model.train()(images).square().sum().backward()
    gates = hetdpt.gates_of(model)
    assert len(gates) == 6
    assert all(gate.importance.grad is not None and gate.importance.grad.isfinite() for gate in gates.values())
    assert all(gate.importance.grad for gate in gates.values())
    for gate in gates.values():
        gate.is_open = False
    closed = run(model.eval(), images)
    assert distance(closed, before) > 1e-4
    assert are_equal(run(hetdpt.restore_(model), images), before)


@tailed
def test_the_maps_of_a_tail_are_trained(label: str) -> None:
    family = FAMILY[label]
    model = hetdpt.calibrate_(family.build(), Plan(tail=3), [family.images(8)]).train()
    maps = {name: parameter for name, parameter in model.named_parameters() if ".tail.maps." in name}
    assert len(maps) == 2
    before = {name: parameter.detach().clone() for name, parameter in maps.items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for checkpoints in (False, True):
        if checkpoints:
            checkpointed_(model)
        answer_tensors(model(family.images()))[0].square().sum().backward()
        gradients = [parameter.grad for parameter in maps.values()]
        assert all(gradient is not None and gradient.isfinite().all() and gradient.any() for gradient in gradients)
        optimizer.step()
        optimizer.zero_grad()
    assert not any(torch.equal(parameter, before[name]) for name, parameter in maps.items())


@SLOW
@tailed
def test_compiled_and_exported_a_tail_computes_the_same(label: str) -> None:
    family = FAMILY[label]
    model, images = hetdpt.calibrate_(family.build(), Plan(tail=2), [family.images(8)]), family.images(3)
    torch.compiler.reset()
    assert distance(run(torch.compile(model, backend="eager"), images), run(model, images)) < ROUNDING
    program = torch.export.export(model, (family.images(),), dynamic_shapes=({0: torch.export.Dim("batch")},))
    assert distance(answer_tensors(program.module()(images)), run(model, images)) < ROUNDING


# Other sizes


SIZED = {"trimmed": Plan(), "tail": Plan(tail=2), "tail and layers": Plan((0,), (2,), tail=3, removal="calibrated")}


RATIOS = [Ratios(0.25, 0.25, 0.0, 0.5), Ratios(hidden=0.5), Ratios(heads=0.34)]
NARROW = [(plan, ratios) for plan in SIZED for ratios in RATIOS]


@pytest.mark.parametrize(
    ("plan", "ratios"), rows(NARROW, [*((plan, RATIOS[0]) for plan in SIZED), ("tail", RATIOS[2])])
)
def test_a_model_on_fewer_tokens_is_made_narrower(plan: str, ratios: Ratios, tmp_path: Path) -> None:
    """As wide as if it had been narrowed before, and saved like any other."""
    family = FAMILY["vit_tiny_patch16_224"]
    images, batches = family.images(), [family.images(16)]
    model = applied(SIZED[plan], family)
    model = hetdpt.trim_(model) if plan == "trimmed" else model
    macs, whole = count_macs(model, family.size), with_all_tokens(model)
    for config in (WidthConfig(importance="l2"), WidthConfig(importance="l2", refits=False)):
        narrow = narrow_(deepcopy(model), ratios, config, batches if config.refits else ())
        assert count_macs(narrow, family.size) < macs
        if plan == "trimmed":
            other = hetdpt.trim_(narrow_(deepcopy(whole), ratios, config, batches if config.refits else ()))
            assert distance(run(narrow, images), run(other, images)) < ROUNDING
        loaded = hetdpt.load(hetdpt.save(narrow, tmp_path / f"saved {config.refits}"))
        assert are_equal(run(loaded, images), run(narrow, images))
        assert digest(loaded) == digest(narrow)


def test_nothing_removed_of_the_width_keeps_the_maps_of_a_tail() -> None:
    family = FAMILY["vit_tiny_patch16_224"]
    model = hetdpt.calibrate_(family.build(), Plan(tail=3), [family.images(8)])
    before = run(model, family.images())
    narrow_(model, Ratios(), WidthConfig(importance="l2", refits=False))
    assert are_equal(run(model, family.images()), before)


@pytest.mark.parametrize("plan", SIZED)
def test_a_model_on_fewer_tokens_takes_images_of_another_size(plan: str, tmp_path: Path) -> None:
    family = FAMILY["vit_tiny_patch16_224"]
    model = applied(SIZED[plan], family)
    model = hetdpt.trim_(model) if plan == "trimmed" else model
    resize_(model, (48, 64))
    images = torch.randn(2, 3, 48, 64, generator=torch.Generator().manual_seed(0))
    after = run(model, images)
    if plan == "trimmed":
        assert distance(after, run(hetdpt.untrim_(deepcopy(model)), images)) < ROUNDING
    assert are_equal(run(hetdpt.load(hetdpt.save(model, tmp_path / "saved")), images), after)


# Relevance


def test_relevance_is_that_of_the_whole_model() -> None:
    model, trimmed, images = pair("vit_tiny_patch16_224")
    for one, other in zip(hetdpt.explain(model, images).maps, hetdpt.explain(trimmed, images).maps, strict=True):
        assert torch.equal(one, other)
    assert steps_of(trimmed)
    hetdpt.calibrate_(model, Plan(tail=2), [FAMILY["vit_tiny_patch16_224"].images(8)])
    with pytest.raises(
        ModelError, match=r"^relevance follows patches through all blocks, but .* last 2 \(its tail\); "
    ):
        hetdpt.explain(model, images)


# Bad input


def refused(error: type[Exception], text: str) -> Any:
    return pytest.raises(error, match=f"^{re.escape(text)}$")


def test_tails_that_cannot_be_are_refused_in_a_sentence(model: nn.Module, images: Tensor) -> None:
    printed = digest(model)
    with refused(PlanError, "the plan has a tail of 4 blocks but this model has 3 blocks; give a tail of at most 3"):
        hetdpt.calibrate_(model, Plan(tail=4), [images])
    for wrong in (-1, 1.5, "2", True, None):
        with refused(PlanError, f"tail of a plan is how many of the last blocks it has, such as 2, not {wrong!r}"):
            Plan(tail=wrong)  # type: ignore[arg-type]
    with refused(
        PlanError,
        "a tail of 2 blocks is fitted on images, but none were given; pass --data, call "
        "hetdpt.calibrate_(model, plan, batches), or use a tail of 1, which is exact",
    ):
        hetdpt.prune_(model, Plan(tail=2))
    with refused(
        DataError,
        "the images are read once to replace layers and once to fit the tail, but got a one-shot iterator; pass a "
        "list or a DataLoader",
    ):
        hetdpt.calibrate_(model, Plan(tail=2), iter([images]))
    with refused(
        PlanError, "removal 'authors' puts a GELU on the stream of patches, which a tail does not have; use 'norm'"
    ):
        hetdpt.prune_(model, Plan((1,), (1,), removal="authors", tail=1))
    assert digest(model) == printed
    assert record_of(model) is None


@pytest.mark.parametrize(
    "label", ["vit_medium_patch16_reg4_gap_256", "hf Dinov2ForImageClassification", "swin_tiny_patch4_window7_224"]
)
def test_a_tail_needs_a_class_token(label: str) -> None:
    family = named(label)
    model = family.build()
    printed = digest(model)
    why = "this model cannot have a tail of 2: its output depends on patches of its last block, and a tail needs a "
    is_swin = label.startswith("swin")
    with pytest.raises(ModelError if is_swin else PlanError, match=SHAPES if is_swin else f"^{why}") as error:
        hetdpt.calibrate_(model, Plan(tail=2), [family.images()])
    assert "\n" not in str(error.value)
    assert digest(model) == printed


def test_a_backbone_has_no_tail() -> None:
    family = next(family for family, _ in OTHERS if family.label == "backbone")
    with pytest.raises(PlanError, match="^this model cannot have a tail of 2: its output depends on patches"):
        hetdpt.calibrate_(family.build(), Plan(tail=2), [family.images()])


def test_a_directory_saved_before_there_were_tails_is_loaded(model: nn.Module, images: Tensor, tmp_path: Path) -> None:
    recipe = hetdpt.save(hetdpt.prune_(model, Plan((1,))), tmp_path / "saved") / RECIPE
    values = read_sealed_json(recipe)
    del values["is_trimmed"], values["plan"]["tail"]
    write_sealed_json(recipe, values)
    assert are_equal(run(hetdpt.load(recipe.parent), images), run(model, images))


def unchanged_after(error: type[Exception], text: str, model: nn.Module, images: Tensor, act: Any) -> None:
    """Check that ``act`` is refused in a sentence that begins with ``text``, and that ``model`` stays as it was."""
    printed, record, before = digest(model), record_of(model), run(model, images)
    with pytest.raises(error, match=f"^{re.escape(text)}") as refusal:
        act()
    assert "\n" not in str(refusal.value)
    assert digest(model) == printed
    assert record_of(model) == record
    assert are_equal(run(model, images), before)


def test_a_tail_of_an_unknown_attention_is_refused_before_layers_are_removed() -> None:
    family = next(family for family, _ in OTHERS if "relpos" in family.label)
    model, text = family.build(), "blocks.2.attn cannot attend to patches that are not computed: its class"
    plan = Plan((0,), tail=1)
    unchanged_after(ModelError, text, model, family.images(), lambda: hetdpt.prune_(model, plan, family.size))


def test_images_that_no_tail_can_be_fitted_on_leave_the_model_unchanged(model: nn.Module, images: Tensor) -> None:
    once = "the images are read once to replace layers and once to fit the tail, but got a one-shot iterator"
    tailed = hetdpt.calibrate_(deepcopy(model), Plan(tail=2), [images])
    unchanged_after(DataError, once, tailed, images, lambda: hetdpt.calibrate_(tailed, Plan((0,)), iter([images])))

    def fit(batch: Tensor) -> Any:
        return lambda: hetdpt.calibrate_(model, Plan(tail=2), [batch])

    one = "a fit is judged on held-out images, but there is only one image; give two or more"
    unchanged_after(DataError, one, model, images, fit(images[:1]))
    finite = "the norm before blocks.2.attn returns values that are not finite; check the weights, or use float32"
    unchanged_after(ModelError, finite, model, images, fit(torch.full_like(images, torch.nan)))


def test_fits_of_attention_that_was_removed_later_are_forgotten(model: nn.Module, images: Tensor) -> None:
    def fitted() -> list[tuple[str, int]]:
        return [(fit.kind, fit.block) for fit in require_record(model).plan.fits]

    hetdpt.calibrate_(model, Plan(tail=3), [images])
    assert fitted() == [("tail", 1), ("tail", 2)]
    hetdpt.prune_(model, Plan((1,)))
    assert fitted() == [("tail", 2)]
    hetdpt.prune_(model, Plan((2,)))
    assert fitted() == []


def test_feature_maps_of_blocks_without_all_tokens_are_refused(model: nn.Module, images: Tensor) -> None:
    expected = model.forward_intermediates(images)[0]  # type: ignore[operator]
    tailed = hetdpt.calibrate_(deepcopy(model), Plan(tail=2), [images])
    both = reduce_tokens_(hetdpt.trim_(deepcopy(model)), Tokens("tome", 2))
    trimmed = "a model that is trimmed, or has a tail, does not have them all; call untrim_(model) before, and use no "
    reduced = "a model that reduces tokens does not have them all; call restore_tokens_(model) before"
    hetdpt.trim_(model)
    for one, why in ((model, trimmed), (tailed, trimmed), (both, reduced), (hetdpt.untrim_(deepcopy(both)), reduced)):
        for name in ("forward_intermediates", "get_intermediate_layers"):
            text = f"{name} reshapes all tokens of a block to images, but {why}"
            unchanged_after(ModelError, text, one, images, lambda one=one, name=name: getattr(one, name)(images))
    restored = restore_tokens_(both)
    unchanged_after(ModelError, "forward_", restored, images, lambda: restored.forward_intermediates(images))  # type: ignore[operator]
    assert torch.equal(hetdpt.untrim_(model).forward_intermediates(images)[0], expected)  # type: ignore[operator]


# Scan


@pytest.mark.slow
def test_a_scan_has_the_milliseconds_that_tails_save(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the prices of blocks, in JSON and in the rows of a spreadsheet."""
    price, dense = Price(0, 0, 1.0), Measurement("latency", 10.0, "ms", "cpu", "float32", 8)
    kept = KeptBlock(Price(0, 0, 2.0), price, price, Price(0, 0, 0.0), Price(0, 0, 0.0))
    prices = Prices(Price(0, 0, 10.0), (price,) * 4, (price,) * 4, kept=(kept,) * 4)
    monkeypatch.setattr(studies, "latency_table", lambda *_, **__: LatencyTable(dense, [], {}, prices))
    family = token("vit_tiny_patch16_224", "deeper", depth=4)
    table = studies.scan(family.build(), [family.images(8)])
    assert [tail.ms_saved for tail in table.tails] == [2.0, 4.0]
    assert studies.ScanTable.from_json(table.to_json()) == table
    rows = [row for row in csv_rows(table) if row["kind"] == "tail"]
    assert [(row["ms_saved"], row["device"], row["batch"]) for row in rows] == [(2.0, "cpu", 8), (4.0, "cpu", 8)]
    untimed = studies.scan(family.build(), [family.images(8)], latency=False)
    assert [tail.ms_saved for tail in untimed.tails] == [None, None]


@pytest.mark.parametrize("plan", [Plan(tail=3), Plan((0,), tail=3), Plan((0, 1), tail=1)], ids=str)
def test_tokens_that_no_block_could_reduce_are_refused(plan: Plan, model: nn.Module, images: Tensor) -> None:
    hetdpt.calibrate_(model, plan, [images])
    text = "no block of this model that updates all its tokens has attention, which reducing tokens needs"
    unchanged_after(ModelError, text, model, images, lambda: reduce_tokens_(model, Tokens("tome", 2)))
