"""What models want their images to be: read off timm and transformers, checked against what these do themselves."""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
import transformers
from PIL import Image
from torch import nn

from hetdpt.adapters.models import create, num_classes_of
from hetdpt.adapters.preprocessing import (
    PREPROCESSING,
    Preprocessing,
    _default_processor,
    _of_processor,
    preprocessing_of,
)
from hetdpt.core.errors import ModelError
from hetdpt.data.augmentation import evaluation_transform

HALF, THIRD = (0.5, 0.5, 0.5), (1 / 3, 1 / 3, 1 / 3)


def small_vit(folder: Path) -> str:
    config = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, image_size=32, patch_size=8
    )
    transformers.ViTForImageClassification(config).save_pretrained(folder)
    return f"hf:{folder}"


def photo() -> Image.Image:
    """An image that is smooth, so that one pixel more or less in a crop shows little."""
    rows, columns = np.mgrid[0:300, 0:400] / 400
    waves = [np.sin(7 * rows + 3 * columns), np.cos(5 * columns), rows * columns]
    return Image.fromarray(np.uint8(np.stack(waves, -1) * 100 + 120))


def test_timm_says_it_by_its_config() -> None:
    wanted = preprocessing_of(timm.create_model("vit_tiny_patch16_224"))
    assert wanted == Preprocessing(
        input_size=(3, 224, 224), mean=HALF, std=HALF, interpolation="bicubic", crop_pct=0.9, crop_mode="center"
    )
    assert wanted.resized_to == (248, 248)
    assert preprocessing_of(create("deit_tiny_patch16_224", is_empty=True)).mean == (0.485, 0.456, 0.406)


def test_the_size_is_the_models_own_and_grey_images_have_one_mean() -> None:
    model = timm.create_model("deit_tiny_patch16_224", img_size=96, in_chans=1)
    wanted = preprocessing_of(model)
    assert wanted.input_size == (1, 96, 96)
    assert wanted.mean == (pytest.approx((0.485 + 0.456 + 0.406) / 3),)
    assert evaluation_transform(wanted)(photo().convert("L")).shape == (1, 96, 96)


@pytest.mark.parametrize(
    ("name", "processor"),
    [
        ("vit", "ViTImageProcessorPil"),
        ("deit", "DeiTImageProcessorPil"),
        ("swin", "ViTImageProcessorPil"),
        ("beit", "BeitImageProcessorPil"),
        ("clip_vision_model", "CLIPImageProcessorPil"),
        ("siglip_vision_model", "SiglipImageProcessorPil"),
        ("dinov2", "BitImageProcessorPil"),
        ("dinov2_with_registers", "BitImageProcessorPil"),
    ],
)
def test_transforms_equal_the_image_processors_of_transformers(name: str, processor: str) -> None:
    model = create(f"hf:{name}", is_empty=True)
    ours = evaluation_transform(preprocessing_of(model))(photo())
    theirs = torch.as_tensor(getattr(transformers, processor)()(photo())["pixel_values"][0])
    # Both resize with PIL; a crop may begin one pixel later, which moves this smooth image by less than 0.05.
    assert (ours - theirs).abs().max() < 0.05


PROCESSORS = transformers.models.auto.image_processing_auto.IMAGE_PROCESSOR_MAPPING_NAMES


def test_every_image_processor_is_understood_or_refused() -> None:
    for kind in PROCESSORS.keys() - {"timm_wrapper"}:  # which has no default
        with contextlib.suppress(ModelError):
            assert _of_processor(_default_processor(transformers, kind)(), (3, 64, 64)).input_size == (3, 64, 64)


def test_the_processor_beside_the_weights_comes_first(tmp_path: Path) -> None:
    name = small_vit(tmp_path)
    assert preprocessing_of(create(name)).mean == HALF
    facts = {
        "feature_extractor_type": "DeiTFeatureExtractor",  # as old repositories say it
        "size": 40,
        "crop_size": 32,
        "do_center_crop": True,
        "do_normalize": True,
        "image_mean": THIRD,
        "image_std": HALF,
        "resample": 3,
    }
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(facts))
    wanted = preprocessing_of(create(name))
    assert wanted.mean == THIRD
    assert (wanted.interpolation, wanted.crop_mode, wanted.resized_to) == ("bicubic", "squash", (40, 40))


def test_a_damaged_processor_is_an_error(tmp_path: Path) -> None:
    model = create(small_vit(tmp_path))
    (tmp_path / "preprocessor_config.json").write_text("{")
    with pytest.raises(ModelError, match="^the image processor of hf:.* fails: .* not a valid JSON file"):
        preprocessing_of(model)


def test_what_was_noted_on_the_model_wins() -> None:
    model = timm.create_model("vit_tiny_patch16_224")
    noted = Preprocessing(input_size=(3, 32, 32), mean=THIRD, std=HALF)
    vars(model)[PREPROCESSING] = noted
    assert preprocessing_of(model) is noted


def test_it_survives_a_trip_through_json() -> None:
    wanted = preprocessing_of(timm.create_model("vit_tiny_patch16_224"))
    assert Preprocessing.from_dict(json.loads(json.dumps(asdict(wanted)))) == wanted


TEXT = {"input_size": [3, 8, 8], "mean": ["a", "b", "c"], "std": [1, 1, 1]}


@pytest.mark.parametrize("values", [None, [], {}, {"mean": 1}, {"input_size": [], "mean": [0.5], "std": [0.5]}, TEXT])
def test_what_is_no_preprocessing_is_refused(values: Any) -> None:
    with pytest.raises(ModelError, match="cannot be read from"):
        Preprocessing.from_dict(values)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"input_size": (4, 8, 8)}, "images have 1 or 3 channels, but the model takes 4"),
        ({"mean": (0.5,)}, "a mean and a std for each of 3 channels"),
        ({"std": (0.5, 0.5, 0.0)}, "must be above 0"),
        ({"crop_pct": 0.0}, "crop_pct at least 0.001, not .* and 0.0"),
        ({"crop_pct": float("nan")}, "must be finite, not .*nan"),
        ({"mean": (0.5, 0.5, float("inf"))}, "must be finite, not .*inf"),
        ({"interpolation": "cubic"}, "interpolation is one of nearest, .* not 'cubic'"),
        ({"crop_mode": "middle"}, "crop_mode is center, squash or border, not 'middle'"),
    ],
)
def test_contradictions_are_refused(changes: dict[str, Any], text: str) -> None:
    facts: dict[str, Any] = {"input_size": (3, 8, 8), "mean": HALF, "std": HALF}
    with pytest.raises(ModelError, match=text):
        Preprocessing(**{**facts, **changes})


def test_models_that_do_not_say_it_are_refused() -> None:
    model = nn.Linear(2, 2)
    vars(model)["img_size"] = 8
    with pytest.raises(ModelError, match="Linear does not specify its preprocessing"):
        preprocessing_of(model)
    with pytest.raises(ModelError, match="expects BGR images"):
        preprocessing_of(create("hf:mobilevit", is_empty=True))


def test_classes_of_the_head(tmp_path: Path) -> None:
    assert num_classes_of(timm.create_model("vit_tiny_patch16_224", num_classes=7)) == 7
    assert num_classes_of(create("hf:vit", num_classes=5, is_empty=True)) == 5
    text = "has no classification head; expected a classifier"
    for headless in (
        timm.create_model("vit_tiny_patch16_224", num_classes=0),
        create("hf:clip_vision_model", is_empty=True),
        nn.Linear(2, 2),
    ):
        with pytest.raises(ModelError, match=text):
            num_classes_of(headless)
