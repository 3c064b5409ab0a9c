"""Token reduction: what the methods do to tokens, and that a model with them is the same model otherwise."""

from __future__ import annotations

import threading
from copy import deepcopy
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from families import named
from torch import Tensor, nn
from transformers import Dinov2Backbone, Dinov2Config

import hetdpt
from hetdpt.adapters.models import build, unfuse_, with_modules
from hetdpt.core.errors import FileError, ModelError, PlanError
from hetdpt.core.modules import digest, tensors_in
from hetdpt.core.plan import Plan
from hetdpt.core.tokens import TOKEN_PAPERS, Tokens
from hetdpt.export.saved import RECIPE
from hetdpt.measurement.agreement import outputs_of
from hetdpt.measurement.costs import count_macs
from hetdpt.reduce.tokens import half_blocks as halves
from hetdpt.reduce.tokens.half_blocks import TokenStep, sparse
from hetdpt.reduce.tokens.methods import (
    AttentionRecord,
    TokenStream,
    beside,
    links,
    match,
    merge,
    merge_alike,
    propagate,
    rank,
)
from hetdpt.reduce.tokens.reduce import TOKEN_METHODS, reduce_tokens_, restore_tokens_
from hetdpt.store.atomic import read_sealed_json, write_sealed_json
from hetdpt.surgery.merge import merge_
from hetdpt.surgery.record import record_of
from hetdpt.surgery.remove import place_, prune_

METHODS = sorted(TOKEN_METHODS)
QUICK = ["vit_tiny_patch16_224", "deit_tiny_distilled_patch16_224", "vit_medium_patch16_reg4_gap_256"]
QUICK += ["vit_base_patch16_siglip_224", "hf ViTForImageClassification", "hf Dinov2WithRegistersForImageClassification"]
SLOW = ["vit_small_patch14_dinov2", "deit3_small_patch16_224", "flexivit_small", "aimv2_large_patch14_224"]
SLOW += ["eva_giant_patch14_224", "vit_base_patch16_clip_quickgelu_224", "vit_tiny_r_s16_p8_224", "hf CLIPVisionModel"]
SLOW += ["hf DeiTForImageClassificationWithTeacher", "hf BeitForImageClassification", "hf SiglipVisionModel"]
SLOW += ["hf Dinov2 SwiGLU"]
REDUCED = [*QUICK, *(pytest.param(label, marks=pytest.mark.slow) for label in SLOW)]
DYNAMIC = {"depth": 2, "embed_dim": 48, "num_heads": 3, "img_size": 32, "patch_size": 8, "dynamic_img_size": True}
REFUSED = {
    "swin_tiny_patch4_window7_224": "blocks all get as many tokens",
    "hf SwinForImageClassification": "blocks all get as many tokens",
    "samvit_base_patch16_224": "blocks all get as many tokens",
    "eva02_tiny_patch14_224": "blocks.0 cannot reduce tokens: it takes other inputs too",
    "hf DINOv3ViTModel": "model.layer.0 cannot reduce tokens: it takes other inputs too",
    "beit_base_patch16_224": "its attention has a bias or a mask",
    "convit_tiny": "does not call torch's scaled_dot_product_attention",
    "xcit_nano_12_p8_224": "not x \\+ attention, then x \\+ FFN and nothing more",
    "naflexvit_base_patch16_gap": "expected the 20 tokens of NaFlexVit to be the patches",
}


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def stream(n: int = 17, protected: int = 1, grid: tuple[int, int] = (4, 4)) -> TokenStream:
    places = torch.arange(n).expand(2, -1)
    return TokenStream(random(2, n, 6), protected, grid, places=places)


def seen(before: TokenStream, seed: int = 1) -> AttentionRecord:
    n = before.tokens.shape[1]
    return AttentionRecord(before.tokens, random(2, 3, n, 4, seed=seed), random(2, 3, n, n, seed=seed).softmax(-1))


@torch.no_grad()
def answers(model: nn.Module, images: Tensor) -> list[Tensor]:
    return outputs_of(model.eval(), images)


def are_equal(some: list[Tensor], others: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(some, others, strict=True))


def steps_of(model: nn.Module) -> list[TokenStep]:
    return [module for module in model.modules() if isinstance(module, TokenStep)]


def lengths(model: nn.Module, images: Tensor, blocks: str = "blocks") -> list[int]:
    """Return how many tokens each block of a timm model hands on."""
    found: list[int] = []
    hooks = [b.register_forward_hook(lambda *a: found.append(a[2].shape[1])) for b in model.get_submodule(blocks)]
    answers(model, images)
    for hook in hooks:
        hook.remove()
    return found


# The value


def test_both_schedules_come_to_as_many() -> None:
    for blocks in (1, 2, 3, 7, 12):
        constant, decreasing = Tokens("tome", 5).amounts(blocks), Tokens("tome", 5, "decreasing").amounts(blocks)
        assert constant == (5,) * blocks
        assert sum(decreasing) == sum(constant)
        assert list(decreasing) == sorted(decreasing, reverse=True)
    assert decreasing[0] in (9, 10)  # 2 r, up to rounding
    assert decreasing[-1] == 0


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"method": "tomato"}, "no method of reducing tokens is called 'tomato'; available: tome, gtp"),
        ({"r": -1}, "a whole number such as 8, not -1"),
        ({"r": 2.5}, "a whole number such as 8, not 2.5"),
        ({"r": True}, "a whole number such as 8, not True"),
        ({"schedule": "linear"}, "constant or decreasing, not 'linear'"),
        ({"method": "gtp", "alpha": 2.0}, "alpha and sparsity are from 0 to 1"),
        ({"method": "gtp", "sparsity": 0.0}, "sparsity above 0"),
        ({"method": "gtp", "neighbours": -1}, "neighbours are a whole number"),
        ({"alpha": 0.3}, "alpha is an option of gtp, not of tome"),
    ],
)
def test_values_that_make_no_sense_are_refused(values: dict[str, Any], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        Tokens(**{"method": "tome", "r": 8, **values})


def test_tokens_go_to_json_and_back() -> None:
    tokens = Tokens("gtp", 3, "decreasing", alpha=0.2, neighbours=4, sparsity=0.5)
    assert Tokens.from_dict(asdict(tokens)) == tokens
    with pytest.raises(ValueError, match="beta"):
        Tokens.from_dict({**asdict(tokens), "beta": 1})


def test_a_number_of_tokens_may_be_any() -> None:
    r = 10**310  # no float is as large
    assert Tokens("tome", r, "decreasing").amounts(3) == (2 * r, r, 0)


@pytest.mark.parametrize("tokens", [{}, {"r": 2}, [], {"method": "tome", "r": 2, "beta": 1}], ids=str)
def test_a_saved_model_says_all_of_its_tokens(tokens: Any, model: nn.Module, tmp_path: Path) -> None:
    recipe = hetdpt.save(reduce_tokens_(model, Tokens("tome", 2)), tmp_path / "reduced") / RECIPE
    write_sealed_json(recipe, {**read_sealed_json(recipe), "tokens": tokens})
    with pytest.raises(FileError, match="is not a recipe of hetdpt.save"):
        hetdpt.load(recipe.parent)


def test_every_method_has_its_paper() -> None:
    assert set(TOKEN_METHODS) == set(TOKEN_PAPERS)


# The methods, on tensors


def test_tome_by_hand() -> None:
    """Five patches behind a class token: of A = (0, 2, 4) and B = (1, 3), 2 is like 1 and 4 like 3; 0, like none
    of B but just like the class token, stays."""
    keys = torch.tensor([[1.0, -1.0], [1.0, -1.0], [0.0, 1.0], [0.1, 1.0], [1.0, 1.0], [1.0, 0.9]])[None, None]
    tokens = torch.tensor([9.0, 0.0, 1.0, 2.0, 3.0, 4.0])[None, :, None]
    sizes = torch.tensor([[1.0, 1.0, 2.0, 1.0, 3.0, 1.0]])
    places = torch.arange(6)[None]
    before = TokenStream(tokens, 1, (1, 5), sizes, places)
    after = merge_alike(before, AttentionRecord(tokens, keys, None), 2, Tokens("tome", 2))
    assert after.tokens.flatten().tolist() == pytest.approx([9.0, 0.0, 4 / 3, 13 / 4])
    assert after.sizes is not None
    assert after.sizes.tolist() == [[1.0, 1.0, 3.0, 4.0]]
    assert after.places is not None
    assert after.places.tolist() == [[0, 1, 2, 2, 3, 3]]


def test_tome_takes_the_most_similar_pairs() -> None:
    keys = random(2, 3, 12, 4)
    gone, into = match(keys, 3)
    metric = keys.mean(1) / keys.mean(1).norm(dim=-1, keepdim=True)
    for image in range(2):
        cosines = (metric[image] @ metric[image].T)[::2, 1::2]
        best = sorted(((row.max().item(), 2 * a, 2 * row.argmax().item() + 1) for a, row in enumerate(cosines)))[-3:]
        assert {(a, b) for _, a, b in best} == set(zip(gone[image].tolist(), into[image].tolist(), strict=True))


def test_merging_conserves_the_mean_and_the_number_of_patches() -> None:
    before = now = stream()
    for seed, count in enumerate((5, 4, 2), start=1):
        now = merge_alike(now, seen(now, seed), count, Tokens("tome", count))
        assert now.sizes is not None
        weighted = (now.tokens * now.sizes[..., None]).sum(1)
        torch.testing.assert_close(weighted, before.tokens.sum(1), rtol=1e-12, atol=1e-12)  # float64
        assert now.sizes.sum(1).tolist() == [17, 17]
        assert torch.equal(now.tokens[:, 0], before.tokens[:, 0]), "the class token stays as it is"
        counts = torch.stack([torch.bincount(places, minlength=now.tokens.shape[1]) for places in now.places])
        assert torch.equal(counts.double(), now.sizes)
    assert now.tokens.shape[1] == 17 - 11
    torch.testing.assert_close(now.put_back().sum(1), before.tokens.sum(1), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_merging_is_the_plain_formula(dtype: torch.dtype) -> None:
    """Several tokens of an image merge into the same one; those that do not merge are copied bit for bit."""
    removed, into = torch.tensor([[1, 7, 4], [3, 6, 9]]), torch.tensor([[2, 2, 5], [2, 8, 2]])
    sizes = torch.randint(1, 5, (2, 11), generator=torch.Generator().manual_seed(0)).double()
    tokens, places = random(2, 11, 6).to(dtype), torch.arange(11).expand(2, -1)
    after = merge(TokenStream(tokens, 1, (2, 5), sizes, places), removed, into)
    assert after.sizes is not None
    assert after.places is not None
    for image in range(2):
        pairs = dict(zip(removed[image].tolist(), into[image].tolist(), strict=True))
        kept = [token for token in range(11) if token not in pairs]
        for slot, token in enumerate(kept):
            members = [token, *(source for source, target in pairs.items() if target == token)]
            s, x = sizes[image, members], tokens[image, members].double()
            mean = (s[:, None] * x).sum(0) / s.sum()
            assert after.sizes[image, slot] == s.sum()
            assert after.places[image, members].tolist() == [slot] * len(members)
            if len(members) == 1:
                assert torch.equal(after.tokens[image, slot], tokens[image, token])
            eps = 4 * torch.finfo(dtype).eps  # each token that is added rounds once
            torch.testing.assert_close(after.tokens[image, slot].double(), mean, rtol=eps, atol=eps)


def test_gtp_by_hand() -> None:
    """Four patches in a row; the second is worth least, and each of its two neighbours takes a part of it."""
    attention = torch.eye(5)[None, None] * torch.tensor([1.0, 0.9, 0.1, 0.8, 0.7])
    tokens = torch.tensor([9.0, 1.0, 10.0, 2.0, 4.0])[None, :, None]
    before = TokenStream(tokens, 1, (1, 4), places=torch.arange(5)[None])
    after = propagate(
        before, AttentionRecord(tokens, tokens[:, None], attention), 1, Tokens("gtp", 1, alpha=0.5, neighbours=0)
    )
    part = 1 / 2**0.5, 1 / 2  # edges to degrees 1 and 2 from a patch of degree 2
    taken = [9.0, 1.0 + 0.5 * 10 * part[0], 2.0 + 0.5 * 10 * part[1], 4.0]
    assert after.tokens.flatten().tolist() == pytest.approx(taken)
    assert after.sizes is not None
    assert after.sizes.flatten().tolist() == pytest.approx([1.0, 1.0 + 0.5 * part[0], 1.0 + 0.5 * part[1], 1.0])
    assert after.places is not None
    assert after.places.tolist() == [[0, 1, 1, 2, 3]]
    assert after.graph is not None
    assert after.graph.shape == (1, 3, 3)
    assert after.graph[0, 0].tolist() == [0, 0, 0], "what was its only neighbour is gone"


def test_gtp_ranks_by_what_looks_at_itself_and_is_looked_at() -> None:
    attention = random(2, 3, 9, 9).softmax(-1)
    kept, going = rank(attention, 2, 4)
    worth = attention.diagonal(dim1=-2, dim2=-1).amax(1) * attention.sum(2).amax(1)
    for image in range(2):
        order = sorted(range(7), key=lambda i: worth[image, 2 + i].item())
        assert set(going[image].tolist()) == set(order[:4])
        assert kept[image].tolist() == sorted(order[4:])


def test_links_are_to_what_is_beside_and_what_is_alike() -> None:
    patches = random(2, 12, 5).float()
    spatial = links(patches, (3, 4), 0)
    assert torch.equal(spatial[0] > 0, beside((3, 4)) > 0)
    assert beside((3, 4)).sum(1).tolist() == [3, 5, 5, 3, 5, 8, 8, 5, 3, 5, 5, 3]
    both = links(patches, (3, 4), 2)
    unit = patches / patches.norm(dim=-1, keepdim=True)
    cosines = unit @ unit.mT - 3 * torch.eye(12)
    alike = cosines >= cosines.sort(dim=-1, descending=True).values[..., 1:2]
    assert torch.equal(both > 0, alike | (beside((3, 4)) > 0))
    assert not both.diagonal(dim1=-2, dim2=-1).any()


def test_a_token_without_an_edge_left_goes_to_the_most_similar_key() -> None:
    tokens = torch.arange(4.0)[None, :, None]
    before = TokenStream(tokens, 0, (1, 4), places=torch.arange(4)[None], graph=torch.zeros(1, 4, 4))
    keys = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.9, 0.1], [1.0, 1.0]])[None, None]
    attention = torch.diag(torch.tensor([0.9, 0.8, 0.1, 0.7]))[None, None]
    after = propagate(before, AttentionRecord(tokens, keys, attention), 1, Tokens("gtp", 1))
    assert after.places is not None
    assert after.places.tolist() == [[0, 1, 0, 2]]


def test_a_sparse_map_keeps_its_largest_entries() -> None:
    attention = random(2, 3, 4, 4).softmax(-1)
    half = sparse(attention, 0.5)
    assert ((half > 0).flatten(2).sum(-1) == 8).all()
    assert (half.flatten(2).sum(-1) > attention.flatten(2).sum(-1) / 2).all()
    assert sparse(attention, 1.0) is attention


# One contract for every method and family


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("label", REDUCED)
def test_contract(label: str, method: str) -> None:
    """r = 0 changes nothing, r = 2 something; shapes stay, costs go down, undoing it is exact."""
    family = named(label)
    model, images = family.build(), family.images()
    before, whole, printed = answers(model, images), count_macs(model, family.size), digest(model)
    names = list(model.state_dict())
    reduce_tokens_(model, Tokens(method, 0), family.size)
    assert are_equal(answers(model, images), before)
    assert digest(model) != printed
    restore_tokens_(model)

    reduce_tokens_(model, Tokens(method, 2), family.size)
    assert not any(module.training for module in model.modules())
    after = answers(model, images)
    assert [a.shape for a in after] == [b.shape for b in before]
    assert all(a.isfinite().all() for a in after)
    assert max((a - b).abs().max().item() for a, b in zip(after, before, strict=True)) > 1e-4
    assert count_macs(model, family.size) < whole
    assert list(model.state_dict()) == names
    assert are_equal(answers(deepcopy(model), images), after)
    torch.testing.assert_close(answers(unfuse_(deepcopy(model)), images), after, rtol=1e-4, atol=1e-5)  # other kernels
    one = [torch.cat(parts) for parts in zip(*(answers(model, image[None]) for image in images), strict=True)]
    torch.testing.assert_close(one, after, rtol=1e-4, atol=1e-5)  # images do not see each other

    restore_tokens_(model)
    assert are_equal(answers(model, images), before)
    assert digest(model) == printed
    assert not steps_of(model)


@pytest.mark.parametrize("label", REFUSED)
def test_what_cannot_be_is_refused_and_left_alone(label: str) -> None:
    family = named(label)
    model = family.build()
    printed = digest(model)
    with pytest.raises(ModelError, match=REFUSED[label]):
        reduce_tokens_(model, Tokens("tome", 2), family.size)
    assert digest(model) == printed
    assert record_of(model) is None


# A model that reduces tokens


def test_images_of_another_size(images: Tensor) -> None:
    """ToMe takes them; the graph of GTP is that of one grid."""
    model = build(hetdpt.Base("timm", "vit_tiny_patch16_224", DYNAMIC))
    wide = torch.cat([images, images], -1)
    reduce_tokens_(model, Tokens("tome", 3))
    assert lengths(model, wide) == [30, 27]
    restore_tokens_(model)
    reduce_tokens_(model, Tokens("gtp", 3))
    assert "gtp: 3 removed, alpha=0.2, neighbours=8, sparsity=1.0" in str(model)
    with pytest.raises(ModelError, match="gtp expected the tokens of 4 x 4 patches, but got 32"):
        model(wide)


def test_each_block_hands_on_fewer_tokens(model: nn.Module, images: Tensor) -> None:
    reduce_tokens_(model, Tokens("tome", 3))
    assert lengths(model, images) == [14, 11, 8]
    restore_tokens_(model)
    reduce_tokens_(model, Tokens("tome", 3, "decreasing"))
    assert lengths(model, images) == [11, 8, 8]
    restore_tokens_(model)
    reduce_tokens_(model, Tokens("tome", 100))
    assert lengths(model, images) == [9, 5, 3], "half of what may go, at the most"


def test_two_halves_are_the_block(model: nn.Module, images: Tensor) -> None:
    """The FFN after the attention, each in a copy of the block without the other, is bit for bit the block."""
    reduce_tokens_(model, Tokens("tome", 2))
    block, step, x = model.blocks[1], steps_of(model)[1], random(2, 17, 48).float()
    whole = type(block).forward(block, x)
    first = type(block).forward(with_modules(block, step.without_ffn), x)
    second = type(block).forward(with_modules(block, step.without_attention), first)
    assert torch.equal(second, whole)
    assert not torch.equal(first, whole)


def test_attention_minds_the_sizes(model: nn.Module, images: Tensor) -> None:
    """A token of size s counts as s tokens: merging equal tokens changes nothing."""
    with torch.no_grad():
        model.pos_embed[:, 1:] = 0
    images = images[..., :8, :8].repeat(1, 1, 4, 4)  # every patch is the same
    before = answers(model, images)
    reduce_tokens_(model, Tokens("tome", 5))
    torch.testing.assert_close(answers(model, images), before, rtol=1e-4, atol=1e-5)
    assert lengths(model, images) == [12, 7, 4]


def test_places_are_filled_for_those_who_read_patches() -> None:
    family = named("vit_medium_patch16_reg4_gap_256")
    model = family.build()
    reduce_tokens_(model, Tokens("tome", 3))
    assert lengths(model, family.images()) == [17, 14, 20]
    patches = model.forward_features(family.images())[0, 4:]  # type: ignore[operator]
    assert len(patches.unique(dim=0)) == 16 - 9
    plain = reduce_tokens_(named("vit_tiny_patch16_224").build(), Tokens("tome", 3))
    assert plain.forward_features(family.images()).shape[1] == 17 - 9  # type: ignore[operator]


@pytest.mark.parametrize("method", METHODS)
def test_blocks_without_attention_are_passed_over(model: nn.Module, images: Tensor, method: str) -> None:
    prune_(model, Plan(attention=(1,), activation=(0,)))
    pruned = answers(model, images)
    reduce_tokens_(model, Tokens(method, 3))
    assert lengths(model, images) == [14, 14, 11]
    reduced = answers(model, images)
    assert not are_equal(reduced, pruned)
    merge_(model)
    torch.testing.assert_close(answers(model, images), reduced, rtol=1e-4, atol=1e-5)  # merging rounds once
    restore_tokens_(model)
    torch.testing.assert_close(answers(model, images), pruned, rtol=1e-4, atol=1e-5)


def test_places_are_filled_behind_blocks_without_attention() -> None:
    family = named("vit_medium_patch16_reg4_gap_256")
    model = prune_(family.build(), Plan(attention=(2,)))
    reduce_tokens_(model, Tokens("tome", 3))
    assert lengths(model, family.images()) == [17, 14, 20]
    assert [step.count for step in steps_of(model)] == [3, 3, 0]
    assert "then all positions restored" in str(model)


def test_what_was_done_before_may_forbid_it(model: nn.Module) -> None:
    with pytest.raises(ModelError, match="call restore_\\(model\\) before reducing"):
        reduce_tokens_(hetdpt.gate_(deepcopy(model)), Tokens("tome", 2))
    with pytest.raises(ModelError, match="no block of this model has attention"):
        reduce_tokens_(prune_(deepcopy(model), Plan(attention=(0, 1, 2))), Tokens("tome", 2))
    with pytest.raises(ModelError, match="values for each position in the image"):
        reduce_tokens_(
            place_(deepcopy(model), Plan(attention=(1,), removal=("position", "identity"))), Tokens("gtp", 2)
        )
    reduce_tokens_(model, Tokens("tome", 2))
    with pytest.raises(ModelError, match="reduces its tokens already; call restore_tokens_"):
        reduce_tokens_(model, Tokens("tome", 2))
    with pytest.raises(PlanError, match="call restore_tokens_\\(model\\), remove layers"):
        prune_(model, Plan(attention=(0,)))


@pytest.mark.parametrize("options", [{}, {"class_token": False, "global_pool": "avg"}], ids=["class token", "mean"])
def test_no_token_fewer_is_the_very_model(options: dict[str, Any]) -> None:
    model = build(hetdpt.Base("timm", "vit_tiny_patch16_224", {**DYNAMIC, "depth": 4, **options}))
    images = random(6, 3, 32, 32).float()
    before = answers(model, images)
    assert are_equal(answers(reduce_tokens_(model, Tokens("tome", 0)), images), before)


@pytest.mark.parametrize("name", ["forward_intermediates", "get_intermediate_layers"])
def test_maps_of_tokens_that_are_gone_are_refused(model: nn.Module, images: Tensor, name: str) -> None:
    """timm would make an image of 4 x 4 tokens of those that are left, with fewer channels."""
    before = tensors_in(getattr(model, name)(images))
    reduce_tokens_(model, Tokens("tome", 4))
    for reduced in (model, deepcopy(model)):
        with pytest.raises(ModelError, match=f"^{name} reshapes all tokens .* call restore_tokens_"):
            getattr(reduced, name)(images)
    restore_tokens_(model)
    assert are_equal(tensors_in(getattr(model, name)(images)), before)
    assert name not in vars(model)


def test_a_backbone_gives_maps_of_its_last_block_alone() -> None:
    options = {"hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 3, "image_size": 32, "patch_size": 8}

    def backbone(*names: str) -> nn.Module:
        return Dinov2Backbone(Dinov2Config(**options, out_features=list(names))).eval()

    reduce_tokens_(backbone("stage3"), Tokens("tome", 4), (3, 32, 32))
    model = backbone("stage2", "stage3")
    with pytest.raises(ModelError, match="returns outputs of blocks before the last one, whose shapes would be "):
        reduce_tokens_(model, Tokens("tome", 4), (3, 32, 32))
    assert not steps_of(model)


@pytest.mark.parametrize("method", ["tome", pytest.param("gtp", marks=pytest.mark.slow)])
def test_compiled_it_computes_the_same(method: str) -> None:
    model = build(hetdpt.Base("timm", "vit_tiny_patch16_224", DYNAMIC))
    images = random(2, 3, 32, 32).float()
    expected = answers(reduce_tokens_(model, Tokens(method, 2)), images)
    torch.compiler.reset()
    compiled = torch.compile(model, backend="eager")
    for _ in range(2):
        torch.testing.assert_close(answers(compiled, images), expected, rtol=1e-5, atol=1e-6)  # the same kernels


@pytest.mark.parametrize("method", METHODS)
def test_gradients_flow(model: nn.Module, images: Tensor, method: str) -> None:
    reduce_tokens_(model, Tokens(method, 2)).train()
    model(images).square().sum().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert all(grad is not None and grad.isfinite().all() and grad.any() for grad in gradients.values())


def test_half_precision_keeps_sizes_in_float32(model: nn.Module, images: Tensor) -> None:
    reduce_tokens_(model.half(), Tokens("tome", 2))
    sizes: list[torch.dtype] = []
    blocks = model.get_submodule("blocks")
    hook = blocks[1].register_forward_pre_hook(lambda *_: sizes.append(halves._CURRENT.stream.sizes.dtype))  # type: ignore
    assert answers(model, images.half())[0].dtype == torch.float16
    hook.remove()
    assert sizes == [torch.float32]


def test_two_threads_do_not_see_each_other(model: nn.Module, images: Tensor) -> None:
    """One pass stops in the middle until another one, on other images and as many tokens, has come to its end."""
    reduce_tokens_(model, Tokens("tome", 2))
    others = images.flip(-1) * 2
    expected = answers(model, images), answers(model, others)
    may_go, is_there = threading.Event(), threading.Event()
    got: list[list[Tensor]] = []

    def wait(*_: Any) -> None:
        if threading.current_thread() is slow:
            is_there.set()
            assert may_go.wait(30)

    hook = model.get_submodule("blocks.1").register_forward_pre_hook(wait)
    slow = threading.Thread(target=lambda: got.append(answers(model, images)))
    slow.start()
    assert is_there.wait(30)
    got.append(answers(model, others))
    may_go.set()
    slow.join()
    hook.remove()
    assert are_equal(got[0], expected[1])
    assert are_equal(got[1], expected[0])


def test_an_error_in_the_middle_leaves_nothing_behind(model: nn.Module, images: Tensor) -> None:
    reduce_tokens_(model, Tokens("tome", 2))
    expected = answers(model, images)

    def stop(*_: Any) -> None:
        raise RuntimeError("enough")

    hook = model.get_submodule("blocks.1.mlp").register_forward_pre_hook(stop)
    with pytest.raises(RuntimeError, match="enough"):
        model(images)
    assert halves._CURRENT.stream is None
    hook.remove()
    with pytest.raises(ModelError, match="call the whole model"):
        model.get_submodule("blocks.1")(random(2, 15, 48).float())
    assert are_equal(answers(model, images), expected)
    assert halves._CURRENT.stream is None


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("label", ["vit_tiny_patch16_224", "hf Dinov2WithRegistersForImageClassification"])
def test_saved_and_loaded_it_computes_the_same(label: str, method: str, tmp_path: Path) -> None:
    family = named(label)
    model = prune_(family.build(), Plan(attention=(1,), activation=(2,)), family.size)
    tokens = Tokens(method, 2, "decreasing")
    merge_(reduce_tokens_(model, tokens))
    loaded = hetdpt.load(hetdpt.save(model, tmp_path / "reduced"))
    assert are_equal(answers(loaded, family.images()), answers(model, family.images()))
    record = record_of(loaded)
    assert record is not None
    assert record.tokens == tokens
    assert str(loaded) == str(model)


@pytest.mark.slow
def test_onnx_runtime_agrees(tmp_path: Path) -> None:
    model = build(hetdpt.Base("timm", "vit_tiny_patch16_224", {**DYNAMIC, "dynamic_img_size": False}))
    reduce_tokens_(model, Tokens("tome", 2))
    assert hetdpt.export_onnx(model, tmp_path / "model.onnx").relative_difference < 1e-5  # torch and it round otherwise


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [Tokens("tome", 2), Tokens("gtp", 2), Tokens("gtp", 2, sparsity=0.5)], ids=str)
@pytest.mark.parametrize("label", QUICK)
def test_onnx_runtime_agrees_in_every_family(label: str, tokens: Tokens, tmp_path: Path) -> None:
    family = named(label)
    model = reduce_tokens_(family.build(), tokens, family.size)
    assert hetdpt.export_onnx(model, tmp_path / "model.onnx").relative_difference < 1e-5
