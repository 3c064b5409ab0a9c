"""What is saved comes back bit-equal, and nothing else comes back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import timm
import torch
from families import named
from torch import Tensor, nn

import hetdpt
from hetdpt.adapters.models import Base, build
from hetdpt.adapters.preprocessing import preprocessing_of
from hetdpt.core.errors import FileError, HetDPTError, ModelError
from hetdpt.core.plan import Plan
from hetdpt.store.atomic import read_sealed_json, write_sealed_json

PLAN = Plan(attention=(0,), activation=(1,))


@pytest.fixture
def saved(model: nn.Module, tmp_path: Path) -> Path:
    return hetdpt.save(hetdpt.merge_(hetdpt.prune_(model, PLAN)), tmp_path / "saved")


def run(model: nn.Module, images: Tensor) -> Tensor:
    with torch.no_grad():
        return model(images)


def test_a_model_whose_images_are_not_resized_is_saved_without_preprocessing(tmp_path: Path) -> None:
    sizes = {
        "image_size": 16,
        "patch_size": 1,
        "embed_dim": 12,
        "depths": [1, 1],
        "num_heads": [2, 2],
        "window_size": 8,
    }
    model = build(Base("transformers", "Swin2SRForImageSuperResolution", sizes))
    hetdpt.prune_(model, PLAN)
    with pytest.raises(ModelError, match="Swin2SRImageProcessorPil does not resize all images to one size"):
        preprocessing_of(model)
    loaded = hetdpt.load(hetdpt.save(model, tmp_path / "saved"))
    images = torch.randn(1, 3, 16, 16)
    assert torch.equal(run(loaded, images).reconstruction, run(model, images).reconstruction)


@pytest.mark.parametrize("state", ["dense", "pruned", "merged", "norms folded", "half", "authors"])
def test_every_state_comes_back(model: nn.Module, images: Tensor, tmp_path: Path, state: str) -> None:
    if state != "dense":
        hetdpt.prune_(model, Plan((0,), (0, 1), removal="authors") if state == "authors" else PLAN)
    if state in ("merged", "norms folded"):
        hetdpt.merge_(model, fold_norms=state == "norms folded")
    if state == "half":
        model, images = model.half(), images.half()
    loaded = hetdpt.load(hetdpt.save(model, tmp_path / "saved"))
    assert torch.equal(run(loaded, images), run(model, images))
    assert not loaded.training
    assert next(loaded.parameters()).requires_grad


def test_a_loaded_model_goes_on(saved: Path, images: Tensor, tmp_path: Path) -> None:
    loaded = hetdpt.load(saved)
    hetdpt.merge_(hetdpt.prune_(loaded, Plan(attention=(2,))))
    again = hetdpt.load(hetdpt.save(loaded, tmp_path / "again"))
    assert torch.equal(run(again, images), run(loaded, images))
    assert len(hetdpt.sites(again)) == 3


def test_saving_leaves_the_model_as_it_was(model: nn.Module, tmp_path: Path) -> None:
    model.train()
    model.blocks[0].eval()
    pointers = [parameter.data_ptr() for parameter in model.parameters()]
    hetdpt.save(model, tmp_path / "saved")
    assert model.training
    assert not model.blocks[0].training
    assert [parameter.data_ptr() for parameter in model.parameters()] == pointers


def test_models_made_by_timm_directly_say_how_they_were_made(tmp_path: Path) -> None:
    model = timm.create_model("test_vit", num_classes=7, img_size=64).eval()
    hetdpt.save(hetdpt.prune_(model, PLAN), tmp_path / "saved")
    images = torch.randn(1, 3, 64, 64)
    assert torch.equal(run(hetdpt.load(tmp_path / "saved"), images), run(model, images))


def test_arguments_that_do_not_show_must_be_given(tmp_path: Path) -> None:
    arguments = {"num_classes": 7, "act_layer": "relu"}
    model = timm.create_model("test_vit", **arguments).eval()
    with pytest.raises(ModelError, match=r"cannot be saved: .* pass base=hetdpt.Base"):
        hetdpt.save(model, tmp_path / "saved")
    assert not (tmp_path / "saved").exists()
    hetdpt.save(model, tmp_path / "saved", base=hetdpt.Base("timm", "test_vit", arguments))
    images = torch.randn(1, 3, 160, 160)
    assert torch.equal(run(hetdpt.load(tmp_path / "saved"), images), run(model, images))


def comes_back(model: nn.Module, directory: Path, channels: int = 3) -> bool:
    loaded = hetdpt.load(directory)
    images = torch.randn(1, channels, 160, 160)
    return str(loaded) == str(model) and torch.equal(run(loaded, images), run(model, images))


@pytest.mark.parametrize("arguments", [{"drop_path_rate": 0.2}, {"dynamic_img_size": True}, {"in_chans": 1}], ids=str)
def test_arguments_that_show_are_found(arguments: dict, tmp_path: Path) -> None:
    model = timm.create_model("test_vit", **arguments).eval()
    hetdpt.save(hetdpt.prune_(model, PLAN), tmp_path / "saved")
    assert comes_back(model, tmp_path / "saved", arguments.get("in_chans", 3))


@pytest.mark.parametrize("arguments", [{"global_pool": "avg"}, {"qkv_bias": False}, {"proj_drop_rate": 0.1}], ids=str)
def test_arguments_that_do_not_are_asked_for(arguments: dict, tmp_path: Path) -> None:
    model = hetdpt.prune_(timm.create_model("test_vit", **arguments).eval(), PLAN)
    with pytest.raises(ModelError, match="pass base=hetdpt.Base"):
        hetdpt.save(model, tmp_path / "saved")
    assert not (tmp_path / "saved").exists()
    hetdpt.save(model, tmp_path / "saved", base=hetdpt.Base("timm", "test_vit", arguments))
    assert comes_back(model, tmp_path / "saved")


def test_a_new_head_is_saved_with_its_classes(saved: Path, tmp_path: Path) -> None:
    loaded = hetdpt.load(saved)
    loaded.reset_classifier(7)
    again = hetdpt.load(hetdpt.save(loaded, tmp_path / "again"))
    assert run(again, torch.zeros(1, 3, 32, 32)).shape == (1, 7)


def test_eager_attention_of_huggingface_comes_back(tmp_path: Path) -> None:
    family = named("hf ViTForImageClassification")
    base = hetdpt.Base("transformers", family.base.name, {**family.base.arguments, "attn_implementation": "eager"})
    model = hetdpt.adapters.models.build(base)
    vars(model).pop("_hetdpt_base")
    loaded = hetdpt.load(hetdpt.save(hetdpt.prune_(model, PLAN), tmp_path / "saved"))
    assert loaded.config._attn_implementation == "eager"


def test_a_model_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="has no weights"):
        hetdpt.save(hetdpt.create("test_vit", is_empty=True), tmp_path / "saved")


def test_a_recipe_names_no_files(saved: Path) -> None:
    base = read_sealed_json(saved / "hetdpt.json")["base"]
    harmful = {**base, "arguments": {**base["arguments"], "checkpoint_path": "evil.pth"}}
    write_sealed_json(saved / "hetdpt.json", {**read_sealed_json(saved / "hetdpt.json"), "base": harmful})
    with pytest.raises(ModelError, match="cannot be built from a file with checkpoint_path='evil.pth'; "):
        hetdpt.load(saved)


def test_a_model_of_nowhere_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="does not show how it was built"):
        hetdpt.save(nn.Sequential(nn.Linear(2, 2)), tmp_path / "saved")


def test_gates_are_not_saved(model: nn.Module, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="has gates on its layers"):
        hetdpt.save(hetdpt.gate_(model), tmp_path / "saved")


def test_an_existing_directory_is_refused_unless_meant(saved: Path, model: nn.Module) -> None:
    with pytest.raises(FileError, match="saved exists already"):
        hetdpt.save(model, saved)
    hetdpt.save(model, saved, overwrite=True)
    assert sorted(path.name for path in saved.parent.iterdir()) == ["saved"]


def test_what_lies_there(saved: Path) -> None:
    assert {path.name for path in saved.iterdir()} == {"README.md", "config.json", "hetdpt.json", "model.safetensors"}
    values = json.loads((saved / "hetdpt.json").read_text())
    assert values["base"]["name"] == "vit_tiny_patch16_224"
    assert values["plan"]["attention"] == [0]
    assert values["merged"] == [1]
    assert values["versions"]["timm"] == timm.__version__
    assert "| attention | 0 |" in (saved / "README.md").read_text()


class TestDamage:
    @pytest.mark.parametrize("name", ["hetdpt.json", "model.safetensors"])
    @pytest.mark.parametrize("kind", ["truncated", "altered", "missing", "empty"])
    def test_a_damaged_file_is_refused_by_name(self, saved: Path, name: str, kind: str) -> None:
        path = saved / name
        content = bytearray(path.read_bytes())
        if kind == "truncated":
            content = content[: len(content) * 2 // 3]
        elif kind == "altered":
            content[len(content) // 2] ^= 1
        path.write_bytes(b"" if kind == "empty" else bytes(content))
        if kind == "missing":
            path.unlink()
        with pytest.raises(FileError, match=name):
            hetdpt.load(saved)

    def test_every_flipped_byte_of_the_recipe_is_noticed(self, saved: Path) -> None:
        path = saved / "hetdpt.json"
        content = path.read_bytes()
        whole = run(hetdpt.load(saved), torch.zeros(1, 3, 32, 32))
        for position in range(0, len(content), 97):
            path.write_bytes(content[:position] + bytes([content[position] ^ 4]) + content[position + 1 :])
            try:
                loaded = hetdpt.load(saved)
            except HetDPTError:
                continue
            assert torch.equal(run(loaded, torch.zeros(1, 3, 32, 32)), whole)  # white space between values

    def reseal(self, saved: Path, **changes: object) -> None:
        values = read_sealed_json(saved / "hetdpt.json")
        write_sealed_json(saved / "hetdpt.json", {**values, **changes})

    def test_weights_of_another_model(self, saved: Path) -> None:
        base = read_sealed_json(saved / "hetdpt.json")["base"]
        self.reseal(saved, base={**base, "arguments": {**base["arguments"], "num_classes": 11}})
        with pytest.raises(FileError, match=r"safetensors does not fit the model: head.weight should be \(11, 48\)"):
            hetdpt.load(saved)

    def test_a_format_of_the_future(self, saved: Path) -> None:
        self.reseal(saved, format=99)
        with pytest.raises(FileError, match="has format 99; this version reads 1"):
            hetdpt.load(saved)

    @pytest.mark.parametrize("name", ["os", "AutoModel", "__import__", "pipeline"])
    def test_a_class_that_is_no_model_is_not_called(self, saved: Path, name: str) -> None:
        self.reseal(saved, base={"library": "transformers", "name": name, "arguments": {}})
        with pytest.raises(ModelError, match="has no model class called"):
            hetdpt.load(saved)

    def test_a_library_we_do_not_know(self, saved: Path) -> None:
        self.reseal(saved, base={"library": "os", "name": "system", "arguments": {}})
        with pytest.raises(ModelError, match="models come from timm or transformers, not from 'os'"):
            hetdpt.load(saved)

    def test_a_recipe_that_lacks_a_part(self, saved: Path) -> None:
        values = read_sealed_json(saved / "hetdpt.json")
        del values["plan"]
        write_sealed_json(saved / "hetdpt.json", values)
        with pytest.raises(FileError, match="is not a recipe of hetdpt.save"):
            hetdpt.load(saved)


def test_huggingface_models_come_back_with_their_class(tmp_path: Path) -> None:
    family = named("hf DeiTForImageClassificationWithTeacher")
    model = hetdpt.prune_(family.build(), PLAN)
    loaded = hetdpt.load(hetdpt.save(model, tmp_path / "saved"))
    assert type(loaded) is type(model)
    assert not (tmp_path / "saved" / "config.json").exists()
    with torch.no_grad():
        assert torch.equal(loaded(family.images()).distillation_logits, model(family.images()).distillation_logits)


def test_a_saved_model_remembers_what_its_images_are_to_be(model: nn.Module, tmp_path: Path) -> None:
    model.pretrained_cfg = {**model.pretrained_cfg, "mean": (0.1, 0.2, 0.3), "interpolation": "bilinear"}
    loaded = hetdpt.load(hetdpt.save(model, tmp_path / "saved"))
    assert preprocessing_of(loaded) == preprocessing_of(model)
    assert preprocessing_of(loaded).mean == (0.1, 0.2, 0.3)
