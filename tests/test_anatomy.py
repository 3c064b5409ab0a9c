"""What is found in a model, what is not offered, and the sentence that says why."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import timm
import torch
import transformers
from families import VIT, named
from torch import Tensor, nn

import hetdpt
from hetdpt.adapters.anatomy import survey
from hetdpt.core.errors import ModelError, PlanError
from hetdpt.store.atomic import read_sealed_json, write_sealed_json


class Toy(nn.Module):
    """A transformer of two blocks written from torch's own parts, known to no library."""

    def __init__(self, *, is_shared: bool = False, narrows: bool = False) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, 16, 8, 8)
        blocks = [ToyBlock(narrows) for _ in range(2)]
        self.blocks = nn.ModuleList([blocks[0], blocks[0]] if is_shared else blocks)

    def forward(self, images: Tensor) -> Tensor:
        x = self.embed(images).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return x.mean(1)


class ToyBlock(nn.Module):
    def __init__(self, narrows: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.ffn = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 16))
        self.narrows = narrows

    def forward(self, x: Tensor) -> Tensor:
        z = self.norm(x)
        query = z[:, :1] if self.narrows else z
        x = x + self.attention(query, z, z, need_weights=False)[0]
        return x + self.ffn(x)


SIZE = (3, 32, 32)


def check_contract(model: nn.Module, plan: hetdpt.Plan) -> None:
    """Gated == pruned == merged on random images; the model is left merged."""
    images = torch.randn(2, *SIZE)
    with torch.no_grad():
        gated = hetdpt.gate_(model, plan, SIZE)(images)
        pruned = hetdpt.prune_(hetdpt.restore_(model), plan, SIZE)(images)
        merged = hetdpt.merge_(model)(images)
    assert torch.equal(gated, pruned)
    torch.testing.assert_close(merged, pruned, rtol=1e-5, atol=1e-6)  # one float32 rounding


class Scaled(nn.Module):
    """One block whose FFN is scaled in a way of its own; ``scale`` gets the output and the parameter."""

    def __init__(self, scale: Callable[[Tensor, Tensor], Tensor], is_shared: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Conv2d(3, 16, 8, 8)  # 16 tokens of width 16, so that no shape tells the axes apart
        self.norm, self.attention = nn.LayerNorm(16), nn.MultiheadAttention(16, 2, batch_first=True)
        self.ffn = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        self.gamma = nn.Parameter(torch.rand(16) + 0.5)
        self.scale, self.is_shared = scale, is_shared

    def forward(self, images: Tensor) -> Tensor:
        x = self.embed(images).flatten(2).transpose(1, 2)
        z = self.norm(x)
        attended = self.attention(z, z, z, need_weights=False)[0]
        x = x + (self.gamma * attended if self.is_shared else attended)
        return x + self.scale(self.ffn(x), self.gamma)


SCALES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "layer scale": lambda f, g: f * g,
    "reshaped": lambda f, g: f * g.view(1, 1, -1),
    "one plus": lambda f, g: f * (1 + g),
    "rolled": lambda f, g: f.roll(1, -1) * g,
    "one number": lambda f, g: f * g[0],
    "transposed": lambda f, g: (f.transpose(1, 2) * g).transpose(1, 2),
    "tokens": lambda f, g: f * g[:, None],
    "squared": lambda f, g: f * f * g,
    "tanh": lambda f, g: f * g.tanh(),
}


@pytest.mark.parametrize("is_shared", [False, True], ids=["own", "shared"])
@pytest.mark.parametrize("name", SCALES)
def test_only_what_is_a_layer_scale_is_folded(name: str, is_shared: bool) -> None:
    model = Scaled(SCALES[name], is_shared).eval()
    check_contract(model, hetdpt.Plan((0,), (0,)))
    is_folded = "gamma" not in dict(model.named_parameters())
    assert is_folded == (name in ("layer scale", "reshaped") and not is_shared)


class Telling(nn.Module):
    """An attention that also returns a number nobody could guess."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, z: Tensor) -> tuple[Tensor, float]:
        return self.inner(z, z, z, need_weights=False)[0], 0.25


class Told(Scaled):
    def __init__(self) -> None:
        super().__init__(SCALES["layer scale"])
        self.attention = Telling()

    def forward(self, images: Tensor) -> Tensor:
        x = self.embed(images).flatten(2).transpose(1, 2)
        attended, number = self.attention(self.norm(x))
        x = x + attended
        return number * (x + self.ffn(x))


def test_what_cannot_be_known_without_running_is_refused() -> None:
    assert "also returns 0.25, which cannot be known without running it" in survey(Told(), SIZE).refusals[0]


SOURCE = """
from functools import lru_cache
import torch
from torch import nn

@lru_cache
def positions(count: int) -> torch.Tensor:
    return torch.arange(count) / count

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.ffn = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))

    def forward(self, x):
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return x + self.ffn(x)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Conv2d(3, 16, 8, 8)
        self.blocks = nn.Sequential(Block(), Block())

    def forward(self, images):
        tokens = self.embed(images).flatten(2).mT
        return self.blocks(tokens + positions(tokens.shape[1])[:, None]).mean(1)
"""


@pytest.mark.parametrize("way", ["file", "exec"])
def test_a_class_whose_module_was_not_imported(way: str, tmp_path: Path) -> None:
    if way == "file":
        (tmp_path / "mymodel.py").write_text(SOURCE)
        spec = importlib.util.spec_from_file_location("mymodel", tmp_path / "mymodel.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        names = vars(module)
    else:
        names = {"__name__": "mymodel"}
        exec(SOURCE, names)
    model = names["Model"]().eval()
    assert len(hetdpt.sites(model, SIZE)) == 4
    assert names["positions"].cache_info().currsize == 0  # no fake tensor stays in it
    check_contract(model, hetdpt.Plan((0,), (1,)))


class Failing(Toy):
    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def forward(self, images: Tensor) -> Tensor:
        raise self.error


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (AssertionError("expected 48"), "Failing does not take images of 3 x 32 x 32: expected 48; for another size"),
        (
            KeyError("mymodel"),
            "expected to run as model.images., but fails on images of 3 x 32 x 32 with KeyError: 'my",
        ),
        (TypeError("missing mask"), "but fails on images of 3 x 32 x 32 with TypeError: missing mask"),
        (ModelError("own words"), "^own words$"),
    ],
)
def test_not_every_failure_is_a_wrong_size(error: Exception, sentence: str) -> None:
    with pytest.raises(ModelError, match=sentence):
        hetdpt.sites(Failing(error), SIZE)


class Choosing(Toy):
    """How many tokens there are depends on their values."""

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.embed(images).flatten(2).mT
        kept = tokens[:, (tokens[0, :, 0] < torch.inf).nonzero().flatten()]
        for block in self.blocks:
            kept = block(kept)
        return kept.mean(1)


def test_a_model_that_needs_values_is_run_on_some() -> None:
    assert len(hetdpt.sites(Choosing(), SIZE)) == 4


def test_a_model_that_keeps_a_value_of_a_pass_with_gradients() -> None:
    family = named("levit_128s")  # it keeps its attention biases between calls
    model = family.build()
    model(family.images())
    assert len(hetdpt.sites(model, family.size)) == family.attention


TEXT = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 9}
VISION = {**TEXT, "image_size": 32, "patch_size": 8}
BOTH = {"text_config": {**TEXT, "model_type": "llama"}, "vision_config": {**VISION, "model_type": "clip_vision_model"}}
SOUND = {"num_hidden_layers": 1, "conv_dim": [8], "conv_kernel": [4], "conv_stride": [2], "num_feat_extract_layers": 1}


def _hf(name: str, arguments: dict) -> nn.Module:
    model_class = getattr(transformers, name)
    return model_class(model_class.config_class(**arguments))


@pytest.mark.parametrize("size", [None, SIZE])
@pytest.mark.parametrize(
    ("name", "arguments", "given"),
    [
        ("BertModel", TEXT, "input_ids"),
        ("CLIPTextModel", TEXT, "input_ids"),
        ("Wav2Vec2Model", {**TEXT, **SOUND}, "input_values"),
        ("VideoMAEModel", VISION, "video"),
    ],
)
def test_models_of_text_sound_and_video(name: str, arguments: dict, given: str, size: tuple[int, int, int]) -> None:
    with pytest.raises(ModelError, match=f"{name} is not an image model: expected pixel_values, but it takes {given}"):
        hetdpt.sites(_hf(name, arguments), size)


@pytest.mark.parametrize("size", [None, SIZE])
@pytest.mark.parametrize(
    ("name", "arguments", "tower"),
    [
        ("CLIPModel", {"text_config": TEXT, "vision_config": VISION}, "vision_model"),
        ("SiglipModel", {"text_config": TEXT, "vision_config": VISION}, "vision_model"),
        ("AltCLIPModel", {"text_config": TEXT, "vision_config": VISION}, "vision_model"),
        ("ChineseCLIPModel", {"text_config": TEXT, "vision_config": VISION}, "vision_model"),
        ("BlipModel", {"text_config": TEXT, "vision_config": VISION}, "vision_model"),
        ("BlipForConditionalGeneration", {"text_config": TEXT, "vision_config": VISION}, "vision_model"),
        ("OwlViTForObjectDetection", {"text_config": TEXT, "vision_config": VISION}, "owlvit.vision_model"),
        ("LlavaForConditionalGeneration", BOTH, "model.vision_tower"),
    ],
)
def test_the_vision_tower_is_named_and_will_do(
    name: str, arguments: dict, tower: str, size: tuple[int, int, int] | None
) -> None:
    model = _hf(name, arguments)
    with pytest.raises(ModelError, match=rf"{name} .*use its vision tower[:,] model\.{tower}$"):
        hetdpt.sites(model, size)
    kinds = [site.kind for site in hetdpt.sites(model.get_submodule(tower), SIZE)]
    assert set(kinds) == {"attention", "activation"}


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("hf:bert", "BertModel is not an image model"),
        ("hf:wav2vec2", "Wav2Vec2Model is not an image model"),
    ],
)
def test_names_of_models_that_take_no_images(name: str, sentence: str) -> None:
    with pytest.raises(ModelError, match=sentence):
        hetdpt.create(name, is_empty=True)


@pytest.mark.parametrize("name", ["clip", "siglip", "altclip", "chinese_clip", "blip", "owlvit", "llava"])
def test_names_of_models_with_a_vision_tower_make_the_tower(name: str) -> None:
    assert type(hetdpt.create(f"hf:{name}", is_empty=True)).__name__.endswith("VisionModel")


def test_a_model_that_does_not_say_its_image_size() -> None:
    with pytest.raises(ModelError, match="Toy does not have an image size, as a vision model would"):
        hetdpt.sites(Toy())


class InPlace(Scaled):
    def forward(self, images: Tensor) -> Tensor:
        x = self.embed(images).flatten(2).transpose(1, 2)
        z = self.norm(x)
        attended = self.attention(z, z, z, need_weights=False)[0]
        attended += x
        return attended + self.ffn(attended)


def test_a_sum_into_the_branch_is_refused() -> None:
    found = survey(InPlace(SCALES["layer scale"]), SIZE)
    assert found.anatomy.attention == ()
    assert "the stream is added into its output in place" in found.refusals[0]


class Padded(nn.Module):
    """Torch's encoder with a mask for tokens that are padding."""

    def __init__(self, **options: bool) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, activation=nn.GELU(), batch_first=True)
        self.embed, self.encoder = nn.Conv2d(3, 16, 8, 8), nn.TransformerEncoder(layer, 2, **options)

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.embed(images).flatten(2).mT
        padding = torch.arange(tokens.shape[1]).expand(tokens.shape[:2]) > 12
        return self.encoder(tokens, src_key_padding_mask=padding).mean(1)


def test_layers_that_get_nested_tensors_are_not_offered() -> None:
    with pytest.raises(ModelError, match="nested tensors; build nn.TransformerEncoder with enable_nested_tensor=False"):
        hetdpt.sites(Padded().eval(), SIZE)
    check_contract(Padded(enable_nested_tensor=False).eval(), hetdpt.Plan((0, 1), (0, 1)))


def test_a_model_of_no_library_is_found_by_its_structure() -> None:
    model = Toy().eval()
    sites = hetdpt.sites(model, SIZE)
    assert [(site.kind, site.block, site.path) for site in sites] == [
        ("attention", 0, "blocks.0.attention"),
        ("activation", 0, "blocks.0.ffn.1"),
        ("attention", 1, "blocks.1.attention"),
        ("activation", 1, "blocks.1.ffn.1"),
    ]
    check_contract(model, hetdpt.Plan((0,), (1,)))


def test_shared_blocks_are_not_offered() -> None:
    with pytest.raises(ModelError, match="Toy has no removable layers"):
        hetdpt.sites(Toy(is_shared=True), SIZE)


def test_attention_that_changes_the_token_count_is_not_offered() -> None:
    found = survey(Toy(narrows=True), SIZE)
    assert found.anatomy.attention == ()
    assert found.anatomy.activation == (0, 1)
    assert any("not in a residual branch of its own that keeps the shape" in refusal for refusal in found.refusals)


@pytest.mark.parametrize(
    ("name", "arguments", "sentence"),
    [
        (
            "resnet18",
            {},
            "ResNet has no removable layers: looked for residual branches around .* found neither",
        ),
        ("vit_base_patch16_xp_224", VIT, "the block itself computes it, and exactly one module must, to be replaced"),
        (
            "vit_small_patch16_18x2_224",
            VIT,
            "2 modules of the branch hold it, and exactly one module must, to be replaced",
        ),
        ("efficientvim_m1", {}, "its output is still changed by sub before the sum"),
    ],
)
def test_refused_models(name: str, arguments: dict, sentence: str) -> None:
    with pytest.raises(ModelError, match=sentence):
        hetdpt.sites(timm.create_model(name, **arguments), (3, 224, 224) if not arguments else SIZE)


@pytest.mark.parametrize(
    ("label", "sentence"),
    [
        (
            "pvt_v2_b0",
            "as the only way out, or a gated FFN; found LayerNorm - Linear - Conv2d - GELU - Linear",
        ),
        ("levit_128s", "found Linear - BatchNorm1d - Hardswish - Linear - BatchNorm1d"),
        ("cait_xxs24_224", "attention in blocks_token_only.0.attn: not in a residual branch of its own"),
        ("xcit_nano_12_p8_224", r"cls_attn_blocks.0.attn turns \(2, 17, 48\) into \(2, 1, 48\)"),
        ("edgenext_xx_small", "activation in stages.1.blocks.1: its residual branch holds another one"),
        ("hiera_tiny_224", "attention in blocks.1.attn: not in a residual branch of its own that keeps the shape"),
    ],
)
def test_what_is_not_offered_has_a_sentence(label: str, sentence: str) -> None:
    family = named(label)
    found = survey(family.build(), family.size)
    assert any(re.search(sentence, refusal) for refusal in found.refusals), found.refusals


def test_blocks_pair_only_what_belongs_together() -> None:
    family = named("edgenext_xx_small")  # its attention stands in front of an FFN that is not offered
    anatomy = survey(family.build(), family.size).anatomy
    assert not set(anatomy.attention) & set(anatomy.activation)


def test_tracing_leaves_no_trace() -> None:
    family = named("levit_128s")  # it keeps its attention biases between calls
    model, images = family.build(), family.images()
    with torch.no_grad():
        expected = family.build()(images)
        hetdpt.sites(model)
        assert torch.equal(model(images), expected)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_training_mode_and_device_do_not_matter(model: nn.Module) -> None:
    expected = hetdpt.sites(model)
    model.train()
    assert hetdpt.sites(model) == expected
    assert model.training
    assert hetdpt.sites(model.half()) == expected
    assert hetdpt.sites(model.to("meta")) == expected


MAPS = {  # models whose attention works on maps (C, H, W), and their channels in the end
    "efficientvit_b0": 128,
    "levit_conv_128s": 384,
    "shvit_s1": 320,
    "efficientformerv2_s0": 176,
    "mobilenetv4_hybrid_medium": 256,
    "iformer_t": 256,
    "efficientvit_m0": 192,
}


@pytest.mark.parametrize("name", MAPS)
def test_width_is_of_channels_whatever_the_size_of_images(name: str) -> None:
    small, large = ((3, side, side) for side in (224, 256))
    model = hetdpt.create(name, is_empty=True)
    anatomy = survey(model, small).anatomy
    assert anatomy.width == MAPS[name]
    if name in ("efficientformerv2_s0", "levit_conv_128s", "efficientvit_m0"):  # they take the size they are built for
        model = hetdpt.create(name, img_size=256, is_empty=True)
    plan = hetdpt.Plan(anatomy.attention[:1], anatomy=anatomy)
    assert len(hetdpt.sites(hetdpt.prune_(model, plan, large))) == len(anatomy.attention) + len(anatomy.activation) - 1


def test_plans_with_the_side_of_a_map_for_a_width_are_still_accepted(tmp_path: Path) -> None:
    """As they were written before 0.2, also in saved models."""
    family = named("efficientvit_b0")
    model = family.build()
    plan = family.plan(hetdpt.sites(model, family.size))
    written = replace(plan, anatomy=replace(survey(model, family.size).anatomy, width=2))
    assert hetdpt.prune_(model, written, family.size)
    recipe = hetdpt.save(model, tmp_path / "saved") / "hetdpt.json"
    values = read_sealed_json(recipe)
    assert values["plan"]["anatomy"]["width"] == 128
    values["plan"]["anatomy"]["width"] = 2
    write_sealed_json(recipe, values)
    assert hetdpt.sites(hetdpt.load(recipe.parent)) == hetdpt.sites(model)
    with pytest.raises(PlanError, match="made for a model with .* blocks of width 7"):
        hetdpt.prune_(family.build(), replace(plan, anatomy=replace(written.anatomy, width=7)), family.size)


def test_blocks_are_numbered_as_the_model_counts_them() -> None:
    sites = hetdpt.sites(named("swin_tiny_patch4_window7_224").build())
    assert [site.path for site in sites if site.block == 2] == ["layers.1.blocks.0.attn", "layers.1.blocks.0.mlp.act"]
