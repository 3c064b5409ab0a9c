"""Relevance maps: the formula by hand, planted truths, windows in their places, a model left as it was, the command."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import test_cli
import timm
import torch
from families import Family, named
from PIL import Image
from scipy.stats import spearmanr
from test_cli import Run
from torch import Tensor, nn
from torch.nn import functional as F

import hetdpt
from hetdpt.adapters.heads import class_names, find_class, logits_of
from hetdpt.adapters.maps import MapWatch, look
from hetdpt.adapters.models import unfuse_
from hetdpt.adapters.preprocessing import preprocessing_of
from hetdpt.adapters.windows import find_windows
from hetdpt.core.errors import DataError, FileError, HetDPTError, ModelError
from hetdpt.core.modules import bytes_of
from hetdpt.core.plan import Plan, Site
from hetdpt.core.tokens import Tokens
from hetdpt.data.images import as_seen, picture_files, prepared
from hetdpt.reduce.tokens.reduce import reduce_tokens_
from hetdpt.reduce.width.choice import Ratios
from hetdpt.reduce.width.narrow import WidthConfig, narrow_
from hetdpt.report.relevance import Layer, Picture, draw, verdict
from hetdpt.studies.explain import ExplainConfig, explain_into
from hetdpt.studies.relevance import (
    Pair,
    Relevance,
    _of_windows,
    contrast,
    explain,
    neighbours,
    ranks,
    rollout,
    similarity,
)
from hetdpt.surgery.gate import gate_
from hetdpt.surgery.merge import merge_
from hetdpt.surgery.record import survey_of
from hetdpt.surgery.remove import prune_
from hetdpt.tasks.backbone import Backbone

run = test_cli.run  # the fixture
ROUNDING = {"rtol": 1e-4, "atol": 1e-7}  # float32 through a few blocks and back, in another order

# Whose rows a map is of, and the grids of the blocks.
ROWS = {
    "vit_tiny_patch16_224": "class token",
    "vit_small_patch14_dinov2": "class token",
    "deit_tiny_distilled_patch16_224": "class token",
    "vit_medium_patch16_reg4_gap_256": "patches",
    "vit_base_patch16_siglip_224": "patches",
    "beit_base_patch16_224": "patches",
    "eva02_tiny_patch14_224": "patches",
    "vit_small_patch16_dinov3": "patches",
    "cait_xxs24_224": "patches",
    "swin_tiny_patch4_window7_224": "windows",
    "swinv2_tiny_window8_256": "windows",
    "hf ViTForImageClassification": "class token",
    "hf DeiTForImageClassificationWithTeacher": "class token",
    "hf Dinov2WithRegistersForImageClassification": "class token",
    "hf BeitForImageClassification": "patches",
    "hf SwinForImageClassification": "windows",
    "hf Swinv2ForImageClassification": "windows",
}


def logits(model: nn.Module, images: Tensor) -> Tensor:
    with torch.no_grad():
        answer = model(images)
    return answer if isinstance(answer, Tensor) else answer.logits


def there(found: Relevance) -> list[Tensor]:
    """Return the maps of a model that has lost none."""
    assert None not in [each if each is None else 0 for each in found.maps]
    return [each for each in found.maps if each is not None]


@pytest.mark.parametrize("label", ROWS)
def test_every_family_shows_what_its_head_reads_and_stays_as_it_was(label: str) -> None:
    family = named(label)
    model, images = family.build(), family.images()
    before = logits(model, images)
    found = explain(model, images, 0)
    assert torch.equal(logits(model, images), before)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert found.rows == ROWS[label]
    assert len(found.maps) == family.attention
    sides = [(16, 16), (16, 16), (8, 8), (8, 8)] if found.rows == "windows" else [(4, 4)] * 3
    assert [tuple(each.shape) for each in there(found)] == [(2, *side) for side in sides]
    assert all((each >= 0).all() and each.std() > 0 for each in there(found))
    assert (found.whole is None) == (found.rows == "windows")
    assert (found.classes, found.answers) == ((0, 0), tuple(before.argmax(1).tolist()))
    probabilities = torch.tensor([found.probabilities, found.answer_probabilities])
    expected = before.softmax(1)
    torch.testing.assert_close(probabilities, torch.stack([expected[:, 0], expected.amax(1)]), rtol=1e-4, atol=1e-5)


def by_hand(model: Any, images: Tensor, target: int) -> tuple[list[Tensor], Tensor]:
    """Return the maps of a plain ViT of timm, written out: its forward from its weights, gradients by autograd."""
    patches = model.patch_embed.proj(images).flatten(2).mT
    x = torch.cat([model.cls_token.expand(len(images), -1, -1), patches], 1) + model.pos_embed
    seen = []
    for block in model.blocks:
        q, k, v = block.attn.qkv(block.norm1(x)).reshape(*x.shape[:2], 3, 3, 16).permute(2, 0, 3, 1, 4)
        attention = torch.exp(q @ k.mT / 4)
        attention = attention / attention.sum(-1, keepdim=True)
        attention.retain_grad()
        seen.append(attention)
        x = x + block.attn.proj((attention @ v).transpose(1, 2).flatten(2))
        x = x + block.mlp(block.norm2(x))
    for answer in model.head(model.norm(x)[:, 0])[:, target]:
        answer.backward(retain_graph=True)
    maps, paths = [], torch.eye(x.shape[1]).expand(len(images), -1, -1)
    for attention in seen:
        assert attention.grad is not None
        positive = torch.relu(attention.detach() * attention.grad)
        bar = sum(positive[:, head] for head in range(3)) / 3
        maps.append(bar[:, 0, 1:].reshape(-1, 4, 4))
        mixed = torch.eye(x.shape[1]) + bar
        paths = torch.einsum("bij,bjk->bik", mixed / mixed.sum(-1)[..., None], paths)
    model.zero_grad()
    return maps, paths[:, 0, 1:].reshape(-1, 4, 4)


def test_maps_are_the_formula_written_out(model: nn.Module, images: Tensor) -> None:
    maps, whole = by_hand(model, images, target=4)
    found = explain(model, images, 4)
    assert found.whole is not None
    for ours, theirs in zip(there(found), maps, strict=True):
        torch.testing.assert_close(ours, theirs, **ROUNDING)
    torch.testing.assert_close(found.whole, whole, **ROUNDING)


def test_rows_of_the_rollout_sum_to_one_and_the_last_block_comes_last() -> None:
    relevance = [torch.rand(2, 5, 5) * 3 for _ in range(4)]
    assert torch.allclose(rollout(relevance).sum(-1), torch.ones(2, 5))
    first, second = torch.tensor([[[0.0, 1.0], [0.0, 0.0]]]), torch.tensor([[[0.0, 0.0], [3.0, 0.0]]])
    expected = torch.tensor([[[0.5, 0.5], [0.375, 0.625]]])  # (S2 S1): row 1 is 3/4 of row 0 of S1 and 1/4 of row 1
    assert torch.allclose(rollout([first, second]), expected)


def test_images_do_not_see_each_other_nor_their_batch(model: nn.Module, vit: Family) -> None:
    images = vit.images(5)
    whole, parts = explain(model, images, batch_size=8), explain(model, images, batch_size=2)
    alone = explain(model, images[3:4])
    assert whole.classes == parts.classes
    for one, other, single in zip(there(whole), there(parts), there(alone), strict=True):
        torch.testing.assert_close(one, other, **ROUNDING)
        torch.testing.assert_close(one[3:4], single, **ROUNDING)


def test_with_max_pooling_an_image_has_rows_of_its_own() -> None:
    torch.manual_seed(0)
    sizes: Any = {"img_size": 32, "patch_size": 8, "embed_dim": 4, "num_heads": 1, "depth": 2, "num_classes": 5}
    model = timm.create_model("vit_tiny_patch16_224", global_pool="max", class_token=False, **sizes).eval()
    images = torch.randn(4, 3, 32, 32)
    together, alone = explain(model, images, batch_size=4), explain(model, images, batch_size=1)
    assert together.rows == alone.rows == "patches"
    assert together.whole is not None
    assert alone.whole is not None
    torch.testing.assert_close(together.whole, alone.whole, **ROUNDING)
    for one, other in zip(there(together), there(alone), strict=True):
        torch.testing.assert_close(one, other, **ROUNDING)


def test_another_class_gives_another_map(model: nn.Module, images: Tensor) -> None:
    usual = explain(model, images)
    same = explain(model, images, usual.classes)
    other = explain(model, images, [(number + 1) % 10 for number in usual.classes])
    assert (same.classes, same.probabilities) == (usual.classes, usual.probabilities)
    assert other.answers == usual.answers
    assert all(torch.equal(a, b) for a, b in zip(there(usual), there(same), strict=True))
    for one, two in zip([*there(usual), usual.whole], [*there(other), other.whole], strict=True):
        assert one is not None
        assert two is not None
        assert (one - two).abs().max() > 0.01 * one.max()


COLOURS = {0: (0, 5), 1: (2,)}  # class 0 looks at red patches, class 1 at green ones; by number of the patch


def planted() -> tuple[nn.Module, Tensor]:
    """Return a ViT whose head h attends to colour h and speaks for class h alone, and an image of coloured patches."""
    model: Any = timm.create_model(
        "vit_tiny_patch16_224", depth=1, embed_dim=4, num_heads=2, img_size=12, patch_size=4, num_classes=2
    ).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        block = model.blocks[0]
        block.norm1 = model.norm = nn.Identity()
        model.cls_token[..., 3] = 1.0  # the class token asks, patches do not
        for colour in (0, 1):
            model.patch_embed.proj.weight[colour, colour] = 1 / 16  # channels 0 and 1: how red, how green
            start = 2 * colour  # of this head's two dimensions
            block.attn.qkv.weight[start, 3] = 3.0  # query
            block.attn.qkv.weight[4 + start, colour] = 3.0  # key
            block.attn.qkv.weight[8 + start, colour] = 1.0  # value
            block.attn.proj.weight[colour, start] = 1.0
            model.head.weight[colour, colour] = 1.0
    image = torch.zeros(1, 3, 3, 3)
    for colour, patches in COLOURS.items():
        for patch in patches:
            image[0, colour, patch // 3, patch % 3] = 1.0
    return model, image.repeat_interleave(4, 2).repeat_interleave(4, 3)


@pytest.mark.parametrize("target", COLOURS)
def test_patches_light_up_that_the_class_was_made_to_look_at(target: int) -> None:
    model, image = planted()
    found = explain(model, image, target)
    for each in (there(found)[0], found.whole):
        assert each is not None
        lit = each.flatten() > 0.5 * each.max()
        assert lit.nonzero().flatten().tolist() == list(COLOURS[target])
        assert each.flatten()[~lit].max() == 0  # dy/dA is the value, which other patches do not have


@pytest.mark.parametrize("label", ["vit_tiny_patch16_224", "beit_base_patch16_224", "hf ViTForImageClassification"])
def test_fused_attention_gives_the_same_maps_and_stays_fused(label: str) -> None:
    family = named(label)
    model, images = family.build(), family.images()
    settings = [(vars(m).get("fused_attn"), getattr(vars(m).get("config"), "_attn_implementation", None))
                for m in model.modules()]  # fmt: skip
    fused = explain(model, images)
    assert settings == [(vars(m).get("fused_attn"), getattr(vars(m).get("config"), "_attn_implementation", None))
                        for m in model.modules()]  # fmt: skip
    assert {True, "sdpa"} & {value for pair in settings for value in pair}, "the model has fused attention"
    for one, other in zip(there(fused), there(explain(unfuse_(model), images)), strict=True):
        torch.testing.assert_close(one, other, **ROUNDING)


@pytest.mark.parametrize("mask", [None, torch.randn(2, 1, 5, 5), torch.eye(5) + torch.eye(5).roll(1, 1) > 0])
def test_attention_in_two_products_is_what_the_fused_operator_computes(mask: Tensor | None) -> None:
    query, key, value = (torch.randn(2, 3, 5, 4) for _ in range(3))
    watch = MapWatch()
    watch.begin("here")
    with watch:
        ours = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=0.9)
    theirs = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=0.9)
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(watch.maps["here"][0] @ value, theirs)


def test_an_error_leaves_the_model_as_it_was(model: nn.Module, images: Tensor) -> None:
    weights = {name: bytes_of(tensor) for name, tensor in model.state_dict().items()}
    modes = [module.training for module in model.train().modules()]
    with pytest.raises(DataError, match="got class 10, but this model has the classes 0-9"):
        explain(model, images, 10)
    assert [module.training for module in model.modules()] == modes
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert {name: bytes_of(tensor) for name, tensor in model.state_dict().items()} == weights
    assert torch.is_grad_enabled()


def test_frozen_checkpointed_and_without_gradients_it_is_the_same(model: Any, images: Tensor) -> None:
    usual = there(explain(model, images))
    model.requires_grad_(False).set_grad_checkpointing(True)
    with torch.no_grad():
        found = there(explain(model, images))
    assert all(torch.equal(one, other) for one, other in zip(usual, found, strict=True))
    assert model.grad_checkpointing


def test_removed_attention_has_no_map_and_gated_pruned_and_merged_agree(vit: Family) -> None:
    images, plan = vit.images(), Plan(attention=(1,), activation=(0,))
    found = [explain(change(vit.build()), images, 2) for change in (
        lambda model: gate_(model, plan), lambda model: prune_(model, plan),
        lambda model: merge_(prune_(model, plan)))]  # fmt: skip
    dense = explain(vit.build(), images, 2)
    for one in found:
        assert [each is None for each in one.maps] == [False, True, False]
        assert [site.block for site in one.sites] == [0, 1, 2]
        for number in (0, 2):
            ours, first, unpruned = one.maps[number], found[0].maps[number], dense.maps[number]
            assert ours is not None
            assert unpruned is not None
            torch.testing.assert_close(ours, first, **ROUNDING)
            assert (ours - unpruned).abs().max() > 0.01 * unpruned.max()


def test_resized_and_narrowed_models_have_maps_of_their_own(vit: Family) -> None:
    plan, ratios = Plan(attention=(1,)), Ratios(embedding=0.25, hidden=0.5, heads=0.34)
    model = narrow_(prune_(vit.build(), plan), ratios, WidthConfig(importance="l2", refits=False))
    narrowed = explain(model, vit.images(), 2)
    resized = explain(Backbone(merge_(model), size=(24, 40), width=8).model, torch.randn(2, 3, 24, 40), 2)
    for found, grid in ((narrowed, (4, 4)), (resized, (3, 5))):
        first, gone, last = found.maps
        assert gone is None
        for each in (first, last, found.whole):
            assert each is not None
            assert each.shape == (2, *grid)
            assert each.std() > 0


def hand_places(sides: tuple[int, int], shift: int, is_padded_first: bool) -> Tensor:
    """Return the place of each token of each window of 4 x 4 by the rule of Swin; -1 for padding."""
    rows, columns = sides
    field = torch.full((-(-rows // 4) * 4, -(-columns // 4) * 4), -1)
    numbers = torch.arange(rows * columns).view(sides)
    if is_padded_first:  # transformers pads, then rolls; timm rolls, then pads
        field[:rows, :columns] = numbers
        field = field.roll((-shift, -shift), (0, 1))
    else:
        field[:rows, :columns] = numbers.roll((-shift, -shift), (0, 1))
    corners = [(i, j) for i in range(0, len(field), 4) for j in range(0, field.shape[1], 4)]
    return torch.stack([field[i : i + 4, j : j + 4].flatten() for i, j in corners])


@pytest.mark.parametrize("sides", [(16, 24), (18, 18)])  # 18 is no multiple of the window
@pytest.mark.parametrize("label", ["swin_tiny_patch4_window7_224", "hf SwinForImageClassification"])
def test_windows_are_found_where_swin_cuts_them(label: str, sides: tuple[int, int]) -> None:
    family, size = named(label), [4 * side for side in sides]
    name = "img_size" if family.base.library == "timm" else "image_size"
    model = replace(family, base=replace(family.base, arguments={**family.base.arguments, name: size})).build()
    handles = [h for h in survey_of(model, (3, *size)).handles if h.site.kind == "attention"]
    windows = find_windows(model, handles, torch.randn(2, 3, *size))
    for number, shift in enumerate((0, 2)):
        expected = hand_places(sides, shift, is_padded_first=name == "image_size")
        assert torch.equal(windows[number].places, expected)
        assert windows[number].grid == sides
    relevance = torch.rand(2 * len(expected), 16, 16)
    found = _of_windows(handles[1], relevance, windows[1], 2)
    window, token = (expected == 1).nonzero()[0].tolist()  # beside the corner, where windows wrap around the edge
    rows = [row for row in range(16) if expected[window, row] >= 0]
    by_rule = sum(relevance[len(expected) + window, row, token] for row in rows) / len(rows)
    torch.testing.assert_close(found[1, 0, 1], by_rule)


@pytest.mark.parametrize("label", ["deit_tiny_distilled_patch16_224", "hf Dinov2WithRegistersForImageClassification"])
def test_of_several_tokens_that_the_head_reads_the_class_token_counts(label: str) -> None:
    family = named(label)
    model, images = family.build(), family.images()
    handles = [h for h in survey_of(model).handles if h.site.kind == "attention"]
    seen = look(model, handles, images)
    gradients = torch.autograd.grad(logits_of(seen.answer)[:, 1].sum(), seen.maps)
    for ours, attention, gradient in zip(there(explain(model, images, 1)), seen.maps, gradients, strict=True):
        row = (attention * gradient).relu().mean(1)[:, 0, -16:]
        torch.testing.assert_close(ours, row.detach().view(2, 4, 4), **ROUNDING)


def set_planted_swin(model: Any, embed: nn.Module, blocks: Any, parts: dict[str, str], head: nn.Linear) -> None:
    """Make the second block attend, in each window, to what is bright, and add it to what the head reads."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        embed.weight[0] = 1.0  # type: ignore[index]  # channel 0: how bright
        attention = blocks[1].get_submodule(parts["attention"])
        width = head.in_features
        if "qkv" in parts:
            attention.qkv.bias[:width] = 0.1
            attention.qkv.weight[width : 2 * width, 0] = 0.1
            attention.qkv.weight[2 * width :, 0] = 0.1
        else:
            attention.q_proj.bias[:] = 0.1
            attention.k_proj.weight[:, 0] = 0.1
            attention.v_proj.weight[:, 0] = 0.1
        attention.get_submodule(parts["out"]).weight[:] = 1.0
        head.weight[0] = 1.0


@pytest.mark.parametrize("library", ["timm", "transformers"])
@pytest.mark.parametrize("place", [(1, 14), (9, 6)])  # the first is in a window that wraps around the edge
def test_a_bright_patch_lights_up_in_its_place_through_shifted_windows(library: str, place: tuple[int, int]) -> None:
    sizes: Any = {"embed_dim": 24, "window_size": 4}
    if library == "timm":
        model: Any = timm.create_model(
            "swin_tiny_patch4_window7_224", img_size=64, depths=(2,), num_heads=(2,), num_classes=2, **sizes
        )
        model.patch_embed.norm = model.norm = nn.Identity()
        blocks, embed, head = model.layers[0].blocks, model.patch_embed.proj, model.head.fc
        parts = {"attention": "attn", "out": "proj", "qkv": "qkv"}
        blocks[1].norm1 = nn.Identity()
    else:
        import transformers

        config = transformers.SwinConfig(image_size=64, patch_size=4, depths=[2], num_heads=[2], num_labels=2, **sizes)
        model = transformers.SwinForImageClassification(config)
        model.swin.embeddings.norm = model.swin.layernorm = nn.Identity()
        blocks, head = model.swin.encoder.layers[0].blocks, model.classifier
        embed = model.swin.embeddings.patch_embeddings.projection
        parts = {"attention": "attention", "out": "o_proj"}
        blocks[1].layernorm_before = nn.Identity()
    set_planted_swin(model.eval(), embed, blocks, parts, head)
    image = torch.zeros(1, 3, 64, 64)
    image[:, :, 4 * place[0] : 4 * place[0] + 4, 4 * place[1] : 4 * place[1] + 4] = 1.0
    found = there(explain(model, image, 0))[1][0]
    assert divmod(int(found.argmax()), 16) == place
    assert found.flatten().topk(2).values[1] < 0.01 * found.max()


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "no head": (
        lambda: named("hf CLIPVisionModel").build(),
        "relevance is for a class, but CLIPVisionModel has no classification head; build it with one .*",
    ),
    "timm without head": (
        lambda: timm.create_model("vit_tiny_patch16_224", depth=1, img_size=32, patch_size=8, num_classes=0),
        "relevance is for a class, but VisionTransformer has no classification head; build it with one .*",
    ),
    "no attention left": (
        lambda: prune_(named("vit_tiny_patch16_224").build(), Plan(attention=(0, 1, 2))),
        "relevance is read off attention layers, but VisionTransformer has none left; explain the dense model instead",
    ),
    "no attention": (
        lambda: timm.create_model("convnext_atto", depths=(1, 1, 1, 1), num_classes=4),
        "relevance is read off attention layers, but ConvNeXt has none, or none in a residual branch of its own",
    ),
    "reduced tokens": (
        lambda: reduce_tokens_(named("vit_tiny_patch16_224").build(), Tokens("tome", 2)),
        r"this model reduces its tokens by tome, and those left have no position in the image; call restore_tokens_.*",
    ),
    "keys of fewer tokens": (
        lambda: timm.create_model("pvt_v2_b0", depths=(1, 1, 1, 1), embed_dims=(8, 8, 8, 8), num_heads=(1, 1, 1, 1)),
        "stages.0.blocks.0.attn was expected to attend from all tokens to all tokens, or in windows .*",
    ),
    "two softmaxes": (
        lambda: named("convit_tiny").build(),
        "blocks.0.attn was expected to compute one softmax, or one call of torch's fused operator, but has 2; .*",
    ),
    "no convolution": (
        lambda: named("naflexvit_base_patch16_gap").build(),
        "the 8 tokens of blocks.0 were expected to be the patches that a convolution makes .*",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_models_without_such_maps_are_refused(name: str) -> None:
    build, sentence = REFUSED[name]
    with pytest.raises(HetDPTError, match=f"^{sentence}$"):
        explain(build().eval(), torch.randn(1, 3, 32, 32))


def test_wrong_images_and_classes_are_refused(model: nn.Module, images: Tensor) -> None:
    with pytest.raises(DataError, match="3 classes were given for 2 images; give one, or one for each"):
        explain(model, images, [1, 2, 3])
    with pytest.raises(DataError, match="got class -1, but this model has the classes 0-9"):
        explain(model, images, [1, -1])
    with pytest.raises(DataError, match="relevance needs images"):
        explain(model, images[:0])
    with pytest.raises(HetDPTError, match="^VisionTransformer does not take images of 3 x 20 x 20: .*"):
        explain(prune_(model, Plan(attention=(0,))), torch.randn(1, 3, 20, 20))


def of(*maps: Tensor | None) -> Relevance:
    sites = tuple(Site("attention", block, f"blocks.{block}.attn") for block in range(len(maps)))
    return Relevance(sites, maps, None, "windows", (0,), (1.0,), (0,), (1.0,))


def test_neighbours_are_compared_by_angle_and_rank() -> None:
    generator = torch.Generator().manual_seed(0)
    one, other = (torch.rand(2, 4, 4, generator=generator).round(decimals=1) for _ in range(2))  # with ties
    [pair] = neighbours(of(one, None, other))
    assert pair.blocks == (0, 2)
    for number in range(2):
        x, y = one[number].flatten().numpy(), other[number].flatten().numpy()
        assert pair.cosines[number] == pytest.approx(x @ y / np.linalg.norm(x) / np.linalg.norm(y), rel=1e-5)
        assert pair.ranks[number] == pytest.approx(spearmanr(x, y).statistic)
    fine = one.repeat_interleave(2, 1).repeat_interleave(2, 2)
    assert neighbours(of(fine, one))[0].cosines == pytest.approx((1.0, 1.0))
    assert np.isnan(neighbours(of(one, torch.zeros(2, 4, 4)))[0].cosines).all()
    assert torch.equal(ranks(torch.tensor([[5.0, 5.0, 1.0]])), torch.tensor([[1.5, 1.5, 0.0]]))


def test_removed_layers_are_contrasted_with_the_kept_ones() -> None:
    values = ((0.9, 0.8), (0.7, 0.8), (0.1, 0.2))
    pairs = [Pair((block, block + 1), 5 * each, ()) for block, each in enumerate(values)]  # of ten images
    alike = similarity(pairs, "cosines")
    assert alike[1] == pytest.approx([0.8] * 10)
    assert alike[3] == pytest.approx([0.1, 0.2] * 5)
    best = contrast(alike, {0})
    assert best is not None
    assert (best.removed, best.kept) == pytest.approx((0.85, (0.8 + 0.45 + 0.15) / 3))
    assert best.as_alike == 0.25, "of four layers none but itself"
    differences = [0.9 - (0.8 + 0.4 + 0.1) / 3, 0.8 - (0.8 + 0.5 + 0.2) / 3] * 5
    error = 1.96 * np.std(differences, ddof=1) / 10**0.5
    assert (best.low, best.high) == pytest.approx((best.difference - error, best.difference + error))
    worst = contrast(alike, {3})
    assert worst is not None
    assert (worst.as_alike, worst.difference < 0) == (1.0, True)
    few = contrast({block: each[:9] for block, each in alike.items()}, {0})
    assert few is not None
    assert few.low is None
    assert contrast(alike, ()) is None
    assert contrast(alike, range(4)) is None
    assert contrast(similarity(pairs[:2], "cosines"), {0}) is not None
    assert contrast(similarity(pairs[:1], "cosines"), {0}) is None, "of one pair both layers are as alike"


def drawn(path: Path, layers: list[Layer], maps: tuple[Any, ...]) -> Any:
    image = np.full((8, 8, 3), 0.5)
    draw([Picture("one", image, (("whole model", np.eye(4)),), maps)], layers, path)
    with Image.open(path) as figure:
        pixels = np.asarray(figure.convert("RGB")).reshape(-1, 3)
    return int((pixels == (0xD0, 0, 0)).all(1).sum())  # pixels of our red


def test_removed_layers_are_framed_and_lost_activations_marked(tmp_path: Path) -> None:
    kept, other = Layer(0, False, False), Layer(1, False, False)
    plain = drawn(tmp_path / "plain.png", [kept, other], (np.eye(4), np.eye(4)))
    marked = drawn(tmp_path / "mark.png", [kept, replace(other, loses_activation=True)], (np.eye(4), np.eye(4)))
    framed = drawn(tmp_path / "frame.png", [kept, replace(other, is_removed=True)], (np.eye(4), np.eye(4)))
    assert plain == 0 < marked < framed
    with pytest.raises(FileError, match=r"a figure is a file that ends in .png or .svg, but maps.jpg does not"):
        drawn(tmp_path / "maps.jpg", [kept], (np.eye(4),))


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_names_are_drawn_as_they_are_spelled(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"maps{suffix}"
    name = r"a$\bad{$b.png"  # as a formula, an error
    draw([Picture(name, np.full((8, 8, 3), 0.5), ((name, np.eye(4)),), (np.eye(4),))], [Layer(0, False, False)], path)
    assert path.stat().st_size > 0


PLAN = Plan(attention=(1,), activation=(2,))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a model of three blocks, what a pruned layer leaves of it, a plan, and pictures."""
    home = tmp_path_factory.mktemp("explain")
    model = named("vit_tiny_patch16_224").build()
    hetdpt.save(model, home / "dense")
    hetdpt.save(merge_(prune_(model, Plan(attention=(0,)))), home / "pruned")
    (home / "plan.json").write_text(PLAN.to_json())
    (home / "pictures").mkdir()
    random = np.random.default_rng(0)
    for number in range(3):
        pixels = random.integers(0, 256, (40, 60, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(home / "pictures" / f"{number}.png")
    (home / "text.jpg").write_text("no image")
    return home


def test_the_command_writes_figure_and_numbers(run: Run, folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "deep" / "maps.png"
    command = ("explain", folder / "dense", "--image", folder / "pictures", "--plan", folder / "plan.json")
    result = run(*command, "--first", 2, "--class", 3, "--out", out, "--quiet")
    assert (result.code, result.err) == (0, "")
    assert f"written to {out} and {out.with_suffix('.json')}" in result.out
    assert "like their neighbours" in result.out
    with Image.open(out) as figure:
        height = figure.height
    values = json.loads(out.with_suffix(".json").read_text())
    assert [Path(one["file"]).name for one in values["images"]] == ["0.png", "1.png"]
    assert [one["sha256"] for one in values["images"]] == [
        hetdpt.store.atomic.sha256(folder / "pictures" / name) for name in ("0.png", "1.png")
    ]
    assert all(one["class"] == 3 and one["pruned"]["probability"] != one["probability"] for one in values["images"])
    assert [layer["is_removed"] for layer in values["layers"]] == [False, True, False]
    assert [layer["loses_activation"] for layer in values["layers"]] == [False, False, True]
    assert [pair["blocks"] for pair in values["pairs"]] == [[0, 1], [1, 2]]
    cosines = [value for pair in values["pairs"] for value in pair["cosines"]]
    assert values["contrast"]["cosine"]["removed"] == pytest.approx(sum(cosines) / 4)
    again = run(*command, "--first", 2, "--class", 3, "--out", out)
    again.is_refused(f"{out} exists already; give another path, or allow overwriting")
    printed = run(*command, "--first", 2, "--class", 3, "--drawn", 1, "--out", out, "--overwrite", "--json")
    assert printed.values == {"figure": str(out), **values}, "drawing fewer changes no number"
    with Image.open(out) as figure:
        assert figure.height < 0.7 * height


def test_calibrated_removal_and_a_model_that_is_pruned_already(folder: Path, tmp_path: Path) -> None:
    image, plan = folder / "pictures" / "0.png", replace(PLAN, removal="calibrated")
    fitted, none, pruned = (
        explain_into(tmp_path / f"{name}.svg", hetdpt.load(folder / model), image, config)
        for name, model, config in (
            ("fitted", "dense", ExplainConfig(plan=plan, data=str(folder / "pictures"), name="mine")),
            ("none", "dense", ExplainConfig(plan=Plan(attention=(0, 1, 2)))),
            ("pruned", "pruned", None),
        )
    )
    values = fitted.record()
    assert json.loads((tmp_path / "fitted.json").read_text()) == json.loads(json.dumps(values))
    assert (values["model"], values["plan"]["removal"]) == ("mine", "calibrated")
    assert none.pruned is None, "without any attention left there are no maps"
    assert fitted.found.probabilities == none.found.probabilities
    plain = prune_(hetdpt.load(folder / "dense"), PLAN)
    other = explain(plain, prepared([image], preprocessing_of(plain)), fitted.found.classes)
    assert fitted.pruned is not None
    assert fitted.pruned.probabilities != other.probabilities
    assert [layer.is_removed for layer in fitted.layers] == [False, True, False]
    values = pruned.record()
    assert (values["model"], values["plan"]) == ("VisionTransformer", None)
    assert [layer["is_removed"] for layer in values["layers"]] == [True, False, False]
    assert values["layers"][0]["cosine"] is None
    assert values["contrast"] == {"cosine": None, "rank": None}
    assert "removed" in (tmp_path / "pruned.svg").read_text()
    assert list(tmp_path.glob(".*")) == [], "no scratch file stays"


def test_bad_input_is_one_sentence(run: Run, folder: Path, tmp_path: Path) -> None:
    image, out = folder / "pictures" / "0.png", tmp_path / "maps.png"
    command = ("explain", folder / "dense", "--image")
    run(*command, "cat.jpg", "--out", out).is_refused("cat.jpg does not exist; give an image or a folder of images")
    run(*command, image, "--class", -1, "--out", out).is_refused("got class -1, but this model has the classes 0-9")
    run(*command, image, "--class=--1", "--out", out).is_refused(
        "the names of this model's classes are not known; give the number of a class, not '--1'"
    )
    run(*command, image, "--data", "demo", "--out", out).is_refused(
        "--data and --removal say what replaces the layers of a plan; add --plan"
    )
    run(*command, image, "--out", "maps.jpg").is_refused(
        "a figure is a file that ends in .png or .svg, but maps.jpg does not"
    )
    assert not out.exists()


def test_what_is_read_is_not_written_over(run: Run, folder: Path, tmp_path: Path) -> None:
    plan, image = tmp_path / "plan.json", tmp_path / "cat.png"
    plan.write_text(PLAN.to_json())
    shutil.copy(folder / "pictures" / "0.png", image)
    before = {file: file.read_bytes() for file in (plan, image)}
    command = ("explain", folder / "dense", "--image", image, "--plan", plan, "--overwrite", "--out")
    says = "would be overwritten, but it is an input; give the figure another name"
    run(*command, plan.with_suffix(".png")).is_refused(f"{plan} {says}")
    run(*command, image).is_refused(f"{image} {says}")
    with pytest.raises(FileError, match=rf"cat.png {says}"):
        explain_into(image, hetdpt.load(folder / "dense"), tmp_path, ExplainConfig(overwrite=True))
    assert {file: file.read_bytes() for file in tmp_path.iterdir()} == before


@pytest.mark.parametrize("suffix", [".png", ".json"])
def test_a_directory_in_the_place_of_a_file_leaves_nothing_new(suffix: str, folder: Path, tmp_path: Path) -> None:
    (tmp_path / f"maps{suffix}").mkdir()
    with pytest.raises(FileError, match=rf"maps{suffix} is a directory, but a file is to be written; give the figure"):
        explain_into(tmp_path / "maps.png", hetdpt.load(folder / "dense"), folder / "pictures" / "0.png")
    assert [file.name for file in tmp_path.iterdir()] == [f"maps{suffix}"]


def test_a_plan_that_cannot_be_is_refused_before_any_image_is_looked_at(folder: Path, tmp_path: Path) -> None:
    model, image, looks = hetdpt.load(folder / "dense"), folder / "pictures" / "0.png", list[tuple[int, int]]()
    calibrated = replace(PLAN, removal="calibrated")
    for config in (ExplainConfig(plan=calibrated), ExplainConfig(plan=Plan(attention=(7,)))):
        with pytest.raises(HetDPTError):
            explain_into(tmp_path / "maps.png", model, image, config, lambda *done: looks.append(done))
    assert looks == []
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_question_is_refused(folder: Path, tmp_path: Path) -> None:
    model, image = hetdpt.load(folder / "dense"), folder / "pictures" / "0.png"
    with pytest.raises(HetDPTError, match="data is to fit replacements of removed layers, but no layer is removed; .*"):
        ExplainConfig(data="demo")
    with pytest.raises(DataError, match="drawn is 0; a number of images, 1 or more, was expected"):
        ExplainConfig(drawn=0)
    with pytest.raises(DataError, match="no image was given; give one or more files or folders of images"):
        explain_into(tmp_path / "maps.png", model, [])
    with pytest.raises(ModelError, match="relevance is for a class, but Backbone has no classification head; .*"):
        explain_into(tmp_path / "maps.png", Backbone(model, width=8), image)
    (tmp_path / "maps.json").write_text("{}")
    with pytest.raises(FileError, match=r"maps.json exists already; give another path, or allow overwriting"):
        explain_into(tmp_path / "maps.png", model, image)
    with pytest.raises(FileError, match=r"^/proc/maps/maps.png cannot be written: .*; give another path$"):
        explain_into("/proc/maps/maps.png", model, image)


def test_classes_have_names_where_the_library_knows_them(model: nn.Module) -> None:
    imagenet = class_names(timm.create_model("test_vit"))
    assert imagenet is not None
    assert find_class("tabby", imagenet) == find_class("Tabby cat", imagenet) == 281
    assert find_class("golden retr", imagenet) == 207
    assert (find_class("12", None), find_class("-3", imagenet), class_names(model)) == (12, -3, None)
    with pytest.raises(DataError, match=r"no single class is called 'terrier'; did you mean 153 \(Maltese"):
        find_class("terrier", imagenet)
    with pytest.raises(DataError, match=r"no single class is called 'golden retreiver'; did you mean 207 \(golden ret"):
        find_class("golden retreiver", imagenet)
    with pytest.raises(DataError, match="no single class is called 'qqq'; give its number"):
        find_class("qqq", imagenet)
    with pytest.raises(DataError, match="the names of this model's classes are not known; .* not 'cat'"):
        find_class("cat", None)
    labelled = named("hf ViTForImageClassification").build()
    assert class_names(labelled) is None
    labelled.config.id2label = {0: "cat", 1: "dog"}  # type: ignore[union-attr]
    assert class_names(labelled) == ("cat", "dog")
    for numbers in ((1, 2), (0, 2)):  # as configs on the hub have it, numbered from 1 or with a gap
        labelled.config.id2label = dict(zip(numbers, ("cat", "dog"), strict=True))  # type: ignore[union-attr]
        assert class_names(labelled) is None


def test_an_image_is_drawn_as_the_model_saw_it(folder: Path) -> None:
    prepare = replace(preprocessing_of(named("vit_tiny_patch16_224").build()), crop_pct=1.0)
    file = folder / "pictures" / "0.png"
    seen = as_seen(prepared([file], prepare), prepare)[0]
    with Image.open(file) as picture:
        expected = picture.resize((48, 32), Image.Resampling.BICUBIC).crop((8, 0, 40, 32))
    assert np.abs(seen - np.asarray(expected) / 255).max() < 1e-5  # the same bytes, there and back in float32
    with pytest.raises(DataError, match=r"text.jpg cannot be read as an image: cannot identify .*"):
        prepared([folder / "text.jpg"], prepare)


def test_files_come_as_they_are_called_and_folders_by_name(folder: Path) -> None:
    pictures = folder / "pictures"
    files = picture_files([str(pictures / "2.png"), pictures], 2)
    assert files == [pictures / name for name in ("2.png", "0.png", "1.png")]
    with pytest.raises(DataError, match=r"dense has no images; files that end in .*"):
        picture_files([folder / "dense"], 2)


def test_the_verdict_says_which_are_more_alike_and_whether_that_is_sure() -> None:
    found = {"removed": 0.5, "kept": 0.4, "difference": 0.1, "low": 0.05, "high": 0.15, "as_alike": 0.25}
    sure = (
        "removed layers are more like their neighbours than kept ones: 0.500 against 0.400 (+0.100, 95 % over 12 images"
    )
    assert sure in verdict("cosine", found, 12)
    assert "25 % of all choices" in verdict("cosine", found, 12)
    assert "neither more nor less" in verdict("cosine", {**found, "low": -0.01}, 12)
    assert "neither more nor less" in verdict("cosine", {**found, "difference": 4e-4, "low": 3e-4, "high": 5e-4}, 12)
    few = {**found, "low": None, "high": None}
    for difference, how in ((-0.1, "less"), (6e-4, "more"), (4e-4, "neither more nor less")):
        said = verdict("cosine", {**few, "difference": difference}, 3)
        assert said.startswith(f"cosine: too few images to be sure; in these, removed layers are {how} like their")
