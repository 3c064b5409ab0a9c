"""Backbones: the maps of a model keep the habits of its library after surgery, merging, saving and a change of size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from families import Family, by_label, named
from torch import Tensor, nn
from torch.nn import functional

import hetdpt
import hetdpt.export.hub  # registers the entry point of timm
from hetdpt.adapters.features import answers_with_maps, feature_maps
from hetdpt.adapters.models import Base, base_of, input_size_of
from hetdpt.adapters.preprocessing import preprocessing_of
from hetdpt.core.errors import DataError, ModelError
from hetdpt.core.plan import Plan
from hetdpt.export.features import as_features
from hetdpt.measurement.costs import count_macs
from hetdpt.surgery.calibrate import calibrate_
from hetdpt.surgery.record import record_of
from hetdpt.surgery.resize import resize_
from hetdpt.tasks.backbone import Backbone, ChannelNorm, SimplePyramid

ROUNDING = 2e-6  # of the largest value: float32 rounding of one merged matrix, through three blocks
SWIN = named("swin_tiny_patch4_window7_224")
VIT = named("vit_tiny_patch16_224")


def variant(label: str, name: str, like: str, **arguments: Any) -> Family:
    """Return a row of another class, as large as the family ``like`` is."""
    row = named(like)
    base = Base(row.base.library, name, {**row.base.arguments, **arguments})
    return Family(label, base, row.side, row.attention, row.activation, row.removal)


GETTER = variant("timm features_only", VIT.base.name, VIT.label, features_only=True, out_indices=[0, 2])
LIST = variant("timm features_only, stages", SWIN.base.name, SWIN.label, features_only=True, out_indices=[0, 1])
DINO = variant("hf Dinov2Backbone", "Dinov2Backbone", "hf Dinov2ForImageClassification", out_indices=[1, 3])
SWIN_BACKBONE = variant("hf SwinBackbone", "SwinBackbone", "hf SwinForImageClassification", out_indices=[1, 2])
FAMILIES = [
    *(VIT, SWIN, GETTER, DINO, named("hf ViTForImageClassification")),
    *(named(label) for label in ("deit_tiny_distilled_patch16_224", "vit_medium_patch16_reg4_gap_256")),
    *(named(label) for label in ("eva_giant_patch14_224", "beit_base_patch16_224")),
]
FAMILIES_TOO = [
    *(LIST, SWIN_BACKBONE, named("vit_small_patch14_dinov2")),
    *(named(f"hf {name}ForImageClassification") for name in ("Dinov2WithRegisters", "Swin", "Swinv2")),
]


def slow(families: list[Family]) -> list[Any]:
    return [pytest.param(family, marks=pytest.mark.slow) for family in families]


def library_maps(model: Any, images: Tensor) -> list[Tensor]:
    """Return the maps as one who has never heard of hetdpt asks for them."""
    if answers_with_maps(model):
        answer = model(images)
        return list(getattr(answer, "feature_maps", answer))
    if not hasattr(model, "config"):
        return model.forward_intermediates(images, norm=True, intermediates_only=True)
    states = model(images, output_hidden_states=True).hidden_states[1:]
    side = images.shape[-1] // model.config.patch_size
    return [state[:, -(side**2) :].transpose(1, 2).unflatten(2, (side, side)) for state in states]


@torch.no_grad()
def maps_of(model: nn.Module, images: Tensor) -> list[Tensor]:
    return feature_maps(model, images)


def distance(ones: list[Tensor], others: list[Tensor]) -> float:
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in zip(ones, others, strict=True))


def are_equal(ones: list[Tensor], others: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ones, others, strict=True))


@pytest.mark.parametrize("family", [*FAMILIES, *slow(FAMILIES_TOO)], ids=by_label)
def test_gated_is_pruned_is_merged_is_loaded_and_none_is_dense(family: Family, tmp_path: Path) -> None:
    model, images = family.build(), family.images()
    dense = maps_of(model, images)
    plan = family.plan(hetdpt.sites(model, family.size))
    gated = maps_of(hetdpt.gate_(model, plan, family.size), images)
    assert are_equal(maps_of(hetdpt.restore_(model), images), dense)
    pruned = maps_of(hetdpt.prune_(model, plan, family.size), images)
    assert are_equal(gated, pruned)
    assert min(distance([a], [b]) for a, b in zip(pruned, dense, strict=True)) > 1e-3
    merged = maps_of(hetdpt.merge_(model), images)
    assert distance(merged, pruned) < ROUNDING
    loaded = hetdpt.load(hetdpt.save(model, tmp_path / "saved"))
    assert are_equal(maps_of(loaded, images), merged)
    assert all(one.ndim == 4 and len(one) == len(images) for one in merged)


@pytest.mark.parametrize("family", [one for one in FAMILIES if one is not SWIN], ids=by_label)
@torch.no_grad()
def test_with_nothing_removed_maps_are_the_library_s_own(family: Family) -> None:
    model, images = hetdpt.prune_(family.build(), Plan(), family.size), family.images()
    own, maps = library_maps(model, images), feature_maps(model, images)
    is_unnormed = own[0].ndim == 4 and hasattr(model, "config") and not answers_with_maps(model)
    end = -1 if is_unnormed else len(own)  # hidden states of transformers are those before the last norm
    assert are_equal([one.contiguous() for one in own[:end]], maps[:end])
    assert not is_unnormed or torch.equal(maps[-1].flatten(2).mT, last_state(model, images, maps[-1]))


def last_state(model: Any, images: Tensor, like: Tensor) -> Tensor:
    state: Tensor = model.base_model(images).last_hidden_state
    return state[:, -like.shape[2:].numel() :]


@torch.no_grad()
def test_stages_of_transformers_are_those_before_the_next_begins() -> None:
    family = named("hf SwinForImageClassification")
    model: Any = family.build()
    maps = feature_maps(model, family.images())
    answer = model.swin(family.images(), output_hidden_states=True, output_hidden_states_before_downsampling=True)
    assert torch.equal(maps[0], answer.reshaped_hidden_states[1])
    assert torch.equal(maps[1].flatten(2).mT, answer.last_hidden_state)
    after = model(family.images(), output_hidden_states=True).reshaped_hidden_states
    assert after[1].shape == maps[1].shape  # and nothing stays on the model


@torch.no_grad()
def test_timm_s_stages_without_channels_first_are_turned() -> None:
    model = LIST.build()
    for given, turned in zip(model(LIST.images()), feature_maps(model, LIST.images()), strict=True):
        assert torch.equal(given, turned.permute(0, 2, 3, 1))


@torch.no_grad()
def test_layers_come_in_the_order_asked_for(model: nn.Module, images: Tensor) -> None:
    own = model.forward_intermediates(images, norm=True, intermediates_only=True)
    assert are_equal(feature_maps(model, images, (-1, 0, -1)), [own[2], own[0], own[2]])
    with pytest.raises(ModelError, match=r"has maps of layers 0-2, not of layer 3"):
        feature_maps(model, images, (3,))
    with pytest.raises(ModelError, match="at least one layer"):
        feature_maps(model, images, ())


def test_habits_of_huggingface_backbones_stay() -> None:
    for family, channels in ((DINO, [48, 48]), (SWIN_BACKBONE, [24, 48])):
        model: Any = hetdpt.merge_(hetdpt.prune_(family.build(), Plan((0,), (1,))))
        answer = model.forward_with_filtered_kwargs(family.images(), output_hidden_states=True, output_attentions=False)
        assert model.channels == channels == [one.shape[1] for one in answer.feature_maps]
        assert len(model.out_features) == len(answer.feature_maps) == 2
        assert len(answer.hidden_states) == len(model.stage_names)


@torch.no_grad()
def test_hidden_states_are_those_behind_the_gelu_of_the_authors() -> None:
    family = named("hf ViTForImageClassification")
    model: Any = family.build()
    model(family.images(), output_hidden_states=True)  # from now on transformers watches the blocks
    hetdpt.prune_(model, Plan((1,), (1,), removal="authors"))
    states = model(family.images(), output_hidden_states=True).hidden_states
    assert states[2].min() > -0.2  # the least that GELU gives
    assert states[1].min() < -0.2


@torch.no_grad()
def test_merging_leaves_the_maps_that_are_answered_with() -> None:
    model, images = GETTER.build(), GETTER.images()
    calibrate_(model, Plan((1,), (2,), removal="calibrated"), [GETTER.images(8)])
    before = maps_of(model, images)
    assert distance(maps_of(hetdpt.merge_(model), images), before) < ROUNDING
    classifier = calibrate_(VIT.build(), Plan((1,), (), removal="calibrated"), [VIT.images(8)])
    with pytest.raises(ModelError, match="the replacement of attention 1 into block 0, which changes its map"):
        as_features(hetdpt.merge_(classifier), (0, 1))


class TestFeaturesOnly:
    def test_timm_says_how_its_wrapper_was_made(self, tmp_path: Path) -> None:
        model = timm.create_model("test_vit", features_only=True, out_indices=(-4, 2), img_size=64).eval()
        hetdpt.merge_(hetdpt.prune_(model, Plan((0,), (1,))))
        loaded = hetdpt.load(hetdpt.save(model, tmp_path / "saved"))
        images = torch.randn(1, 3, 64, 64)
        with torch.no_grad():
            assert are_equal(loaded(images), model(images))
        assert base_of(model).arguments["out_indices"] == [2, 2]
        assert input_size_of(loaded) == (3, 64, 64)

    @torch.no_grad()
    def test_a_saved_classifier_is_opened_by_timm_as_features(self, tmp_path: Path, images: Tensor) -> None:
        model: Any = hetdpt.merge_(hetdpt.prune_(VIT.build(), Plan((0, 2), (1,))))
        hetdpt.save(model, tmp_path / "saved")
        options = {"features_only": True, "out_indices": (0, 1)}
        net = timm.create_model(f"local-dir:{tmp_path / 'saved'}", pretrained=True, **options).eval()
        assert are_equal(net(images), model.forward_intermediates(images, indices=[0, 1], intermediates_only=True))
        assert [site.path for site in hetdpt.sites(net)] == ["model.blocks.0.mlp.act", "model.blocks.1.attn"]
        hetdpt.prune_(net, Plan(attention=(1,)))
        loaded = hetdpt.load(hetdpt.save(net, tmp_path / "net"))
        assert are_equal(loaded(images), net(images))
        assert record_of(loaded) == record_of(net)

    def test_what_cannot_be_is_refused(self) -> None:
        with pytest.raises(ModelError, match="is for timm models, but ViTForImageClassification is of transformers"):
            as_features(named("hf ViTForImageClassification").build())
        with pytest.raises(ModelError, match="has gates on its layers"):
            as_features(hetdpt.gate_(VIT.build()))
        with pytest.raises(ModelError, match="ConVit has no feature maps"):
            Backbone(named("convit_tiny").build())


RESIZED = [VIT, GETTER, named("eva_giant_patch14_224"), named("hf ViTForImageClassification")]
RESIZED_TOO = [
    *(SWIN, DINO, SWIN_BACKBONE, named("deit_tiny_distilled_patch16_224"), named("swinv2_tiny_window8_256")),
    *(
        named(label)
        for label in ("xcit_nano_12_p8_224", "davit_tiny", "vit_small_patch16_dinov3", "hf CLIPVisionModel")
    ),
    *(named(f"hf {name}ForImageClassification") for name in ("Beit", "Swin", "Swinv2", "Dinov2WithRegisters")),
]


class TestSize:
    @pytest.mark.parametrize("family", [*RESIZED, *slow(RESIZED_TOO)], ids=by_label)
    @torch.no_grad()
    def test_a_pruned_model_takes_another_and_is_saved_with_it(self, family: Family, tmp_path: Path) -> None:
        model = family.build()
        dense = resize_(family.build(), (family.side, 2 * family.side))
        plan = family.plan(hetdpt.sites(model, family.size))
        resize_(hetdpt.merge_(hetdpt.prune_(model, plan, family.size)), (family.side, 2 * family.side))
        size, images = (3, family.side, 2 * family.side), torch.randn(2, 3, family.side, 2 * family.side)
        same = maps_of(hetdpt.merge_(hetdpt.prune_(dense, plan)), images)
        assert distance(maps_of(model, images), same) < ROUNDING  # which comes first makes no difference
        loaded = hetdpt.load(hetdpt.save(model, tmp_path / "saved"))
        assert are_equal(maps_of(loaded, images), maps_of(model, images))
        assert input_size_of(loaded) == input_size_of(model) == size
        for one in (model, loaded):
            assert record_of(one).survey.input_size == size
            assert layouts(one) == layouts(dense)
        assert count_macs(loaded, size) == count_macs(dense, size)

    def test_what_a_model_wants_of_its_images_follows(self, tmp_path: Path) -> None:
        for family in (VIT, named("hf ViTForImageClassification")):
            model = hetdpt.load(hetdpt.save(family.build(), tmp_path / family.label))
            resize_(model, 64)
            loaded = hetdpt.load(hetdpt.save(model, tmp_path / f"{family.label} 64"))
            assert preprocessing_of(loaded).input_size == preprocessing_of(model).input_size == (3, 64, 64)

    @torch.no_grad()
    def test_a_constant_in_the_embedding_of_positions_stays(self, tmp_path: Path) -> None:
        family, images = named("hf ViTForImageClassification"), torch.randn(2, 3, 64, 32)
        model = calibrate_(family.build(), Plan((0,), (), removal="calibrated"), [family.images(8)])
        before = maps_of(resize_(model, (64, 32)), images)
        hetdpt.merge_(model)
        assert record_of(model).folded_constants == (0,)
        assert distance(maps_of(model, images), before) < ROUNDING
        assert are_equal(maps_of(hetdpt.load(hetdpt.save(model, tmp_path / "saved")), images), maps_of(model, images))

    def test_a_narrowed_model_stays_narrow(self, tmp_path: Path) -> None:
        plain = hetdpt.WidthConfig(importance="l2", refits=False)
        model = hetdpt.prune_(VIT.build(), Plan((0,), ()))
        hetdpt.narrow_(model, hetdpt.Ratios(embedding=0.25, hidden=0.5), plain)
        resize_(model, 48)
        loaded = hetdpt.load(hetdpt.save(model, tmp_path / "saved"))
        images = torch.randn(1, 3, 48, 48)
        assert are_equal(maps_of(loaded, images), maps_of(model, images))
        assert Backbone(loaded).channels == (256,) * 4
        assert maps_of(loaded, images)[-1].shape == (1, 36, 6, 6)

    def test_what_is_frozen_stays_frozen(self, model: nn.Module) -> None:
        model.pos_embed.requires_grad_(False)
        resize_(model, 64)
        assert model.pos_embed.shape == (1, 65, 48)
        assert [name for name, p in model.named_parameters() if not p.requires_grad] == ["pos_embed"]

    @pytest.mark.parametrize("size", [0, -8, "64", 64.0, (32, 64, 96), (32,), (32, 0), None])
    def test_a_size_is_one_side_or_two(self, model: nn.Module, size: Any) -> None:
        with pytest.raises(ModelError, match="an image size is a side in pixels or a pair"):
            resize_(model, size)

    def test_what_is_tied_to_tokens_is_refused(self, model: nn.Module) -> None:
        with pytest.raises(ModelError, match="image size 50 is not a multiple of the patch size 8; use 48 or 56"):
            resize_(model, 50)
        hetdpt.reduce_tokens_(model, hetdpt.Tokens("tome", 2))
        with pytest.raises(ModelError, match=r"reduces its tokens, .* call restore_tokens_"):
            resize_(model, 64)
        with pytest.raises(ModelError, match="forward_intermediates reshapes all tokens"):
            Backbone(model)
        hetdpt.restore_tokens_(model)
        calibrate_(model, Plan((0,), (), removal=("position", "identity")), [VIT.images(8)])
        for one in (model, hetdpt.merge_(model)):
            with pytest.raises(ModelError, match=r"removal style 'position'.*cannot change"):
                resize_(one, 64)
        assert input_size_of(model) == (3, 32, 32)

    def test_fewer_tokens_of_huggingface_are_no_map(self) -> None:
        model = hetdpt.reduce_tokens_(named("hf ViTForImageClassification").build(), hetdpt.Tokens("tome", 2))
        with pytest.raises(ModelError, match="a map of 4 x 4 has a token for each patch, but this model has 15"):
            Backbone(model)

    @pytest.mark.parametrize("family", [named("beit_base_patch16_224"), LIST], ids=by_label)
    def test_a_model_of_one_size_says_so_and_stays_as_it_is(self, family: Family) -> None:
        model = family.build()
        before = maps_of(model, family.images())
        with pytest.raises(ModelError, match=r"does not take images of 128 x 64: .* when it is built"):
            resize_(model, (128, 64))
        assert are_equal(maps_of(model, family.images()), before)
        assert input_size_of(model) == family.size


def layouts(model: nn.Module) -> list[tuple[Any, Any]]:
    handles = record_of(model).survey.handles
    return [(handle.parts.core_layout, handle.parts.gate_layout) for handle in handles if handle.parts]


class TestBackbone:
    def test_a_plain_vit_has_a_pyramid_and_stages_have_none(self) -> None:
        plain, swin = Backbone(VIT.build(), size=(32, 64), width=16), Backbone(SWIN.build())
        assert (plain.channels, plain.strides) == ((16,) * 4, (2.0, 4.0, 8.0, 16.0))
        assert (swin.channels, swin.strides, swin.pyramid) == ((24, 48), (4.0, 8.0), None)
        for backbone, (height, width) in ((plain, (32, 64)), (swin, (64, 64))):
            shapes = [tuple(one.shape) for one in backbone(torch.zeros(1, 3, height, width))]
            places = zip(backbone.channels, backbone.strides, strict=True)
            assert shapes == [(1, count, height / stride, width / stride) for count, stride in places]

    def test_of_many_strides_the_coarsest_four_count(self) -> None:
        assert Backbone(timm.create_model("test_resnet")).strides == (4.0, 8.0, 16.0, 32.0)

    @pytest.mark.parametrize(
        ("label", "size", "places"),
        [
            (SWIN.label, (44, 52), [(11, 13), (6, 7)]),
            pytest.param("davit_tiny", (36, 60), [(9, 15), (5, 8), (3, 4), (2, 2)], marks=pytest.mark.slow),
        ],
    )
    def test_strides_are_whole_where_sides_are_no_multiples_of_them(
        self, label: str, size: tuple[int, int], places: list[tuple[int, int]]
    ) -> None:
        """Before they halve a map, these models fill it up to an even side."""
        backbone = Backbone(named(label).build(), size=size)
        assert [tuple(one.shape[2:]) for one in backbone(torch.zeros(1, 3, *size))] == places
        assert backbone.strides == (4.0, 8.0, 16.0, 32.0)[: len(places)]

    @pytest.mark.parametrize("size", [8, (8, 64), (64, 8)])
    def test_one_patch_is_no_map_to_make_a_pyramid_of(self, size: Any) -> None:
        sentence = r"needs 2 x 2 patches or more, but images of .* pixels have .*1.*; use images of at least 16 x 16"
        with pytest.raises(ModelError, match=sentence):
            Backbone(VIT.build(), size=size, width=16)
        Backbone(VIT.build(), size=16, width=16)(torch.zeros(1, 3, 16, 16))

    def test_surgery_on_its_model_is_surgery_on_it(self) -> None:
        backbone, images = Backbone(VIT.build(), width=16).eval(), VIT.images()
        with torch.no_grad():
            dense = backbone(images)
            hetdpt.prune_(backbone.model, Plan((0,), (1,)))
            pruned = backbone(images)
            hetdpt.merge_(backbone.model)
            assert distance([*backbone(images)], [*pruned]) < ROUNDING
            assert distance([*pruned], [*dense]) > 1e-3

    def test_gradients_reach_model_and_pyramid(self) -> None:
        backbone = Backbone(hetdpt.prune_(VIT.build(), Plan((0,), (1,))), width=16).train()
        sum(one.square().mean() for one in backbone(VIT.images())).backward()
        idle = {name for name, parameter in backbone.named_parameters() if parameter.grad is None}
        assert idle == {"model.head.weight", "model.head.bias"}
        assert all(p.grad.abs().max() > 0 for p in backbone.pyramid.parameters())

    def test_other_images_are_refused(self) -> None:
        backbone = Backbone(VIT.build(), width=16)
        with pytest.raises(DataError, match=r"takes images of 3 x 32 x 32, but got 3 x 64 x 32: .* with size="):
            backbone(torch.zeros(1, 3, 64, 32))
        with pytest.raises(DataError, match=r"expected a batch of images \(B, C, H, W\), but got \(3, 32, 32\)"):
            backbone(torch.zeros(3, 32, 32))
        with pytest.raises(ModelError, match="at least 1 channel, not 0"):
            Backbone(VIT.build(), width=0)

    def test_upernet_of_transformers_takes_it(self) -> None:
        from transformers import ResNetConfig, UperNetConfig, UperNetForSemanticSegmentation
        from transformers.models.upernet.modeling_upernet import UperNetHead

        sizes = {"hidden_size": 8, "num_labels": 3, "pool_scales": [1, 2], "use_auxiliary_head": False}
        stages = ResNetConfig(embedding_size=4, hidden_sizes=[4] * 4, depths=[1] * 4, out_indices=[1, 2, 3, 4])
        task = UperNetForSemanticSegmentation(UperNetConfig(backbone_config=stages, **sizes))
        task.backbone = Backbone(hetdpt.prune_(VIT.build(), Plan((0,), (1,))), width=16)
        task.decode_head = UperNetHead(task.config, in_channels=list(task.backbone.channels))
        answer = task(VIT.images(), labels=torch.ones(2, 32, 32, dtype=torch.long))
        assert answer.logits.shape == (2, 3, 32, 32)
        answer.loss.backward()
        assert task.backbone.model.patch_embed.proj.weight.grad.abs().max() > 0


class TestPyramid:
    @torch.no_grad()
    def test_the_last_place_of_an_odd_map_is_kept(self) -> None:
        pyramid, one = SimplePyramid(8, 4).eval(), torch.randn(1, 8, 5, 7)
        other = one.clone()
        other[:, :, 4, 6] += 100  # so that max-pooling takes it
        before, after = pyramid(one), pyramid(other)
        assert [tuple(each.shape[2:]) for each in before] == [(20, 28), (10, 14), (5, 7), (3, 4)]
        assert (before[-1] != after[-1])[..., 2, 3].any()

    @torch.no_grad()
    def test_a_place_is_seen_around_itself_on_every_map(self) -> None:
        pyramid = SimplePyramid(8, 4).eval()
        one = torch.randn(1, 8, 8, 8)
        other = one.clone()
        other[:, :, 2, 5] += 100  # in every channel, so that max-pooling takes it
        seen = []
        for a, b in zip(pyramid(one), pyramid(other), strict=True):
            rows, columns = (a != b).any(1)[0].nonzero().unbind(1)
            seen.append((rows.min().item(), rows.max().item(), columns.min().item(), columns.max().item()))
        # the place 2, 5 on maps of 4, 2, 1 and 1/2 the side, and one more around it by the 3 x 3 convolution
        assert seen == [(7, 12, 19, 24), (3, 6, 9, 12), (1, 3, 4, 6), (0, 2, 1, 3)]

    @torch.no_grad()
    def test_the_finest_map_by_hand(self) -> None:
        """Enlarged, normed, GELU, enlarged; then a 1 x 1 and a 3 x 3 convolution, each normed, and nothing else."""
        level, one = SimplePyramid(8, 4).double().levels[0], torch.randn(2, 8, 3, 5, dtype=torch.double)
        first, second = (layer for layer in level if isinstance(layer, nn.ConvTranspose2d))
        narrow, wide = (layer for layer in level if isinstance(layer, nn.Conv2d))

        def normed(maps: Tensor) -> Tensor:
            mean, variance = maps.mean(1, keepdim=True), maps.var(1, unbiased=False, keepdim=True)
            return (maps - mean) / (variance + 1e-5).sqrt()

        finest = second(functional.gelu(normed(first(one))))
        torch.testing.assert_close(level(one), normed(wide(normed(narrow(finest)))))

    def test_the_norm_is_that_of_each_place(self) -> None:
        maps = ChannelNorm(6)(torch.randn(2, 6, 3, 4) * 5 + 1)
        assert torch.allclose(maps.mean(1), torch.zeros(2, 3, 4), atol=1e-6)
        assert torch.allclose(maps.var(1, unbiased=False), torch.ones(2, 3, 4), atol=1e-4)  # eps in the norm


@pytest.mark.parametrize("family", [VIT, SWIN], ids=by_label)
def test_finer_maps_may_be_left_out(family: Family) -> None:
    """The maps that stay are the same, bit for bit, and what made the others is gone."""
    whole = Backbone(family.build().eval(), width=8).eval()
    images = torch.randn(1, *whole.input_size)
    with torch.no_grad():
        all_maps, count = whole(images), sum(p.numel() for p in whole.parameters())
        coarse = whole.coarsest_(2)
        maps = coarse(images)
    assert [torch.equal(one, other) for one, other in zip(maps, all_maps[-2:], strict=True)] == [True, True]
    assert coarse.channels == tuple(one.shape[1] for one in maps)
    assert coarse.strides == tuple(whole.input_size[1] / one.shape[2] for one in maps)
    assert (sum(p.numel() for p in coarse.parameters()) < count) is (coarse.pyramid is not None)
    with pytest.raises(ModelError, match="the backbone has 2 maps, not 3; set maps to at least 1"):
        coarse.coarsest_(3)


def test_a_trimmed_model_becomes_a_whole_backbone_and_a_tail_is_refused() -> None:
    model = hetdpt.create("vit_tiny_patch16_224", img_size=32, num_classes=10)
    expected = Backbone(hetdpt.create("vit_tiny_patch16_224", img_size=32, num_classes=10), width=16).channels
    assert Backbone(hetdpt.trim_(model), width=16).channels == expected
    with_tail = hetdpt.calibrate_(model, hetdpt.Plan(tail=2), [torch.randn(8, 3, 32, 32)])
    with pytest.raises(ModelError, match="a backbone returns maps of patches, which a model with a tail does not"):
        Backbone(with_tail)
