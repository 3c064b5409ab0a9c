"""One small model per family: the rows of the contract suite. Sizes are cut down where the family allows it."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from hetdpt.adapters.models import Base, build
from hetdpt.core.plan import Plan, Site


@dataclass(frozen=True)
class Family:
    """A row: how to build the model, its image side, and how many sites of each kind it must offer."""

    label: str
    base: Base
    side: int
    attention: int
    activation: int
    removal: Any = "plain"

    @property
    def size(self) -> tuple[int, int, int]:
        return 3, self.side, self.side

    def make(self) -> nn.Module:
        return build(self.base)

    def build(self) -> nn.Module:
        """Return the model with random values in every parameter, so that no branch is zero by initialisation."""
        model = self.make()
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in model.parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                is_matrix = parameter.ndim > 1
                parameter.copy_(noise / parameter[0].numel() ** 0.5 if is_matrix else 0.5 + 0.1 * noise)
        return model.eval()

    def images(self, batch: int = 2) -> torch.Tensor:
        return torch.randn(batch, *self.size, generator=torch.Generator().manual_seed(1))

    def plan(self, sites: list[Site]) -> Plan:
        """Return a plan that takes every second layer of each kind."""
        attention = [site.block for site in sites if site.kind == "attention"]
        activation = [site.block for site in sites if site.kind == "activation"]
        return Plan(tuple(attention[::2]), tuple(activation[::2]), removal=self.removal)


VIT = {"depth": 3, "embed_dim": 48, "num_heads": 3, "img_size": 32, "patch_size": 8}
SWIN = {"img_size": 64, "depths": (2, 2), "embed_dim": 24, "num_heads": (2, 4), "window_size": 4}
FOUR_STAGES = {"embed_dims": (16, 32, 32, 32), "num_heads": (1, 2, 2, 2), "depths": (1, 1, 2, 1)}
GATED = ("skip", "drop")


def _timm(name: str, side: int, attention: int, activation: int, removal: Any = "plain", **arguments: Any) -> Family:
    return Family(name, Base("timm", name, {"num_classes": 10, **arguments}), side, attention, activation, removal)


PLAIN_VITS = (
    "vit_tiny_patch16_224",
    "vit_small_patch14_dinov2",
    "vit_medium_patch16_reg4_gap_256",
    "vit_base_patch16_clip_quickgelu_224",
    "vit_betwixt_patch16_rope_reg4_gap_256",
    "flexivit_small",
    "deit_tiny_patch16_224",
    "deit_tiny_distilled_patch16_224",
    "deit3_small_patch16_224",
    "beit_base_patch16_224",
    "beitv2_base_patch16_224",
    "eva_giant_patch14_224",
    "vit_small_patch16_dinov3",
    "vit_relpos_small_patch16_224",
    "vit_srelpos_small_patch16_224",
    "xcit_nano_12_p8_224",
    "convit_tiny",
)
TIMM = [
    *(_timm(name, 32, 3, 3, **VIT) for name in PLAIN_VITS),
    _timm("vit_base_patch16_siglip_224", 32, 3, 4, **VIT),
    _timm("aimv2_large_patch14_224", 32, 3, 3, GATED, **VIT),
    _timm("eva02_tiny_patch14_224", 32, 3, 3, GATED, **VIT),
    _timm("cait_xxs24_224", 32, 3, 5, **VIT),
    _timm("swin_tiny_patch4_window7_224", 64, 4, 4, **SWIN),
    _timm("swinv2_tiny_window8_256", 64, 4, 4, **SWIN),
    _timm("swinv2_cr_tiny_224", 64, 4, 4, **SWIN),
    _timm("twins_svt_small", 64, 5, 5, img_size=64, **FOUR_STAGES),
    _timm("twins_pcpvt_small", 64, 5, 5, img_size=64, **FOUR_STAGES),
    _timm("pvt_v2_b0", 64, 5, 0, **FOUR_STAGES),
    _timm("volo_d1_224", 64, 18, 20, img_size=64),
    _timm("pit_ti_224", 64, 4, 4, img_size=64, base_dims=(16, 16, 16), depth=(1, 2, 1)),
    _timm("crossvit_tiny_240", 240, 15, 15),
    _timm("mvitv2_tiny", 64, 7, 10, img_size=64),
    _timm("davit_tiny", 64, 10, 10, **FOUR_STAGES),
    _timm("hiera_tiny_224", 64, 3, 6, img_size=(64, 64), embed_dim=16, stages=(1, 2, 2, 1)),
    _timm("hieradet_small", 64, 3, 6, embed_dim=16, stages=(1, 2, 2, 1), num_heads=1),
    _timm("naflexvit_base_patch16_gap", 64, 3, 3, depth=3, embed_dim=48, num_heads=3),
    _timm("samvit_base_patch16_224", 32, 3, 3, global_attn_indexes=(1,), **VIT),
    _timm("vit_tiny_r_s16_p8_224", 64, 3, 3, img_size=64, depth=3, embed_dim=48, num_heads=3),
    _timm("tnt_s_patch16_224", 32, 4, 4, depth=2, embed_dim=48, num_heads_outer=3, img_size=32),
    _timm("nest_tiny", 64, 12, 12, img_size=64),
    _timm("visformer_tiny", 64, 4, 4, img_size=64, depth=(2, 2, 2), embed_dim=48),
    _timm("gcvit_xxtiny", 64, 6, 12, img_size=64),
    _timm("maxvit_pico_rw_256", 64, 22, 22, img_size=64),
    _timm("coatnet_nano_rw_224", 64, 7, 9, img_size=64),
    _timm("levit_128s", 64, 4, 0, img_size=64, embed_dim=(32, 48, 64), num_heads=(2, 2, 2), depth=(1, 2, 1)),
    _timm("tiny_vit_5m_224", 224, 10, 10),
    _timm("efficientformer_l1", 224, 1, 1, depths=(1, 1, 1, 2), embed_dims=(16, 24, 32, 48)),
    _timm("efficientformerv2_s0", 224, 4, 0),
    _timm("efficientvit_b0", 64, 4, 0),
    _timm("edgenext_xx_small", 64, 3, 4, depths=(1, 2, 2, 2)),
    _timm("mobilevit_xxs", 64, 9, 9),
    _timm("nextvit_small", 64, 4, 20),
    _timm("coat_lite_tiny", 64, 8, 8, img_size=64),
    _timm("fastvit_sa12", 64, 2, 12),
    _timm("shvit_s1", 64, 9, 0),
    _timm("iformer_t", 64, 5, 0),
    _timm("lowformer_b0", 64, 7, 7),
    _timm("cpubone_nano", 64, 3, 3),
    _timm("csatv2", 64, 4, 18),
    _timm("vitamin_small_224", 64, 14, 14, GATED, img_size=64),
    _timm("qwen3_vit_88m", 64, 3, 3, depth=3, embed_dim=48, num_heads=3),
    _timm("gemma4_vit_167m", 96, 2, 2, GATED, depth=2, embed_dim=48, num_heads=3),
    _timm("convnext_atto", 64, 0, 5, depths=(1, 1, 2, 1)),
    _timm("poolformerv2_s12", 64, 0, 4),
]

_SIZES = {"hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 96}
_HF = {**_SIZES, "image_size": 32, "patch_size": 8}
_HF_SWIN = {"image_size": 64, "patch_size": 4, "embed_dim": 24, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4}
_DINO = {**_HF, "mlp_ratio": 2}


def _hf(name: str, side: int, attention: int, activation: int, removal: Any = "plain", **config: Any) -> Family:
    return Family(f"hf {name}", Base("transformers", name, config), side, attention, activation, removal)


HF = [
    _hf("ViTForImageClassification", 32, 3, 3, **_HF),
    _hf("DeiTForImageClassification", 32, 3, 3, **_HF),
    _hf("DeiTForImageClassificationWithTeacher", 32, 3, 3, **_HF),
    _hf("SwinForImageClassification", 64, 4, 4, **_HF_SWIN),
    _hf("Swinv2ForImageClassification", 64, 4, 4, **_HF_SWIN),
    _hf("Dinov2ForImageClassification", 32, 3, 3, **_DINO),
    _hf("Dinov2WithRegistersForImageClassification", 32, 3, 3, **_DINO),
    _hf("DINOv3ViTModel", 32, 3, 3, **_HF),
    _hf("BeitForImageClassification", 32, 3, 3, **_HF),
    _hf("CLIPVisionModel", 32, 3, 3, **_HF),
    _hf("CLIPVisionModelWithProjection", 32, 3, 3, projection_dim=16, **_HF),
    _hf("SiglipVisionModel", 32, 3, 4, **_HF),
]
GATED_HF = [
    Family(
        "hf Dinov2 SwiGLU",
        Base("transformers", "Dinov2ForImageClassification", {**_DINO, "use_swiglu_ffn": True}),
        *(32, 3, 3, GATED),
    )
]

FAMILIES = [*TIMM, *HF, *GATED_HF]


class Encoder(nn.Module):
    """A model of no library, around torch's own encoder, whose layers have a fast path that calls no module."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, **{"activation": nn.GELU(), **options})
        self.embed = nn.Conv2d(3, 16, 8, 8)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.tokens_at = 1 if layer.self_attn.batch_first else 0

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        tokens = self.embed(images).flatten(2).movedim(2, self.tokens_at)
        return self.encoder(tokens).mean(self.tokens_at)


class EncoderFamily(Family):
    def make(self) -> nn.Module:
        return Encoder(**self.base.arguments)


class TorchvisionFamily(Family):
    """A Swin transformer of torchvision, whose masks of shifted windows are written part by part in each pass."""

    def make(self) -> nn.Module:
        from torchvision.models import swin_transformer as swin

        is_second = self.base.name.endswith("V2")
        block = swin.SwinTransformerBlockV2 if is_second else swin.SwinTransformerBlock
        merging = swin.PatchMergingV2 if is_second else swin.PatchMerging
        return swin.SwinTransformer(**self.base.arguments, block=block, downsample_layer=merging, num_classes=10)


_SHAPE = {"patch_size": [4, 4], "embed_dim": 24, "depths": [2, 2], "num_heads": [2, 4], "window_size": [4, 4]}
TORCHVISION = [
    TorchvisionFamily(f"torchvision {name}", Base("torchvision", name, _SHAPE), 64, 4, 4) for name in ("Swin", "SwinV2")
]

ENCODERS = [
    EncoderFamily(f"torch {label}", Base("torch", "TransformerEncoder", options), 32, 3, activation)
    for label, activation, options in [
        ("images first", 3, {"batch_first": True, "norm_first": True}),
        ("images first, norms last", 3, {"batch_first": True}),
        ("images first, activation a function", 0, {"batch_first": True, "activation": "gelu"}),
        ("tokens first", 3, {"norm_first": True}),
        ("tokens first, norms last", 3, {}),
    ]
]
LARGE = [  # that cannot be cut down
    "volo_d1_224",
    "crossvit_tiny_240",
    "mvitv2_tiny",
    "davit_tiny",
    "nest_tiny",
    "gcvit_xxtiny",
    "maxvit_pico_rw_256",
    "coatnet_nano_rw_224",
    "tiny_vit_5m_224",
    "efficientformerv2_s0",
    "mobilevit_xxs",
    "nextvit_small",
    "fastvit_sa12",
    "shvit_s1",
    "lowformer_b0",
    "csatv2",
    "vitamin_small_224",
]
SMALL = {family.label for family in FAMILIES} - {*LARGE}
KINDS = [  # a few that are built differently
    *("vit_tiny_patch16_224", "vit_small_patch14_dinov2", "beit_base_patch16_224", "eva02_tiny_patch14_224"),
    *("cait_xxs24_224", "swin_tiny_patch4_window7_224", "swinv2_tiny_window8_256"),
    *("hf ViTForImageClassification", "hf Swinv2ForImageClassification", "hf Dinov2 SwiGLU"),
]


def by_label(family: Family) -> str:
    return family.label


def sparing(families: list[Family], quick: Container[str]) -> list[Any]:
    """Return the rows of a test that takes long: slow but for those that ``quick`` names."""
    return [
        pytest.param(family, id=family.label, marks=[] if family.label in quick else [pytest.mark.slow])
        for family in families
    ]


def named(label: str) -> Family:
    return next(family for family in FAMILIES if family.label == label)
