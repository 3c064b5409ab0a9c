"""Models that a stranger describes: no code is run, no file outside is opened, nothing is fetched."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import transformers
from families import FAMILIES
from safetensors.torch import load_file, save_file
from test_bad_files import TRIED, count  # noqa: F401 - a fixture
from test_training_cli import build

import hetdpt
from hetdpt.adapters.allowed import FAMILIES as ALLOWED
from hetdpt.adapters.allowed import LABELS, model_class, require_allowed, settings_of, timm_names
from hetdpt.adapters.guard import guarded
from hetdpt.adapters.models import Base, base_of, create, rebuild
from hetdpt.adapters.preprocessing import preprocessing_of
from hetdpt.core.errors import FileError, HetDPTError, ModelError
from hetdpt.store.atomic import read_sealed_json, sha256, write_sealed_json

CANARY = "canary.bin"
"""A pickle that leaves a file behind when it is loaded, and must not even be opened."""
WITH_FILE = {"checkpoint_path": CANARY}
HUB = "hf-hub:evil/x"
NESTED = json.loads("[" * 600 + "]" * 600)

ATTACKS: dict[str, dict[str, Any]] = {
    "nested checkpoint": {
        "library": "transformers",
        "name": "TimmWrapperModel",
        "arguments": {"architecture": "test_vit", "num_classes": 2, "model_args": WITH_FILE},
    },
    "nested checkpoint of a classifier": {
        "library": "transformers",
        "name": "TimmWrapperForImageClassification",
        "arguments": {"architecture": "test_vit", "num_classes": 2, "model_args": WITH_FILE},
    },
    "backbone from the hub": {"library": "transformers", "name": "TimmBackbone", "arguments": {"backbone": HUB}},
    "backbone under a decoder": {
        "library": "transformers",
        "name": "DPTForDepthEstimation",
        "arguments": {"backbone": "evil/x", "use_timm_backbone": False, "is_hybrid": False},
    },
    "config of a backbone from the hub": {
        "library": "transformers",
        "name": "DPTForDepthEstimation",
        "arguments": {"backbone_config": {"model_type": "timm_backbone", "backbone": HUB}},
    },
    "config of a wrapper in a backbone": {
        "library": "transformers",
        "name": "DepthAnythingForDepthEstimation",
        "arguments": {"backbone_config": {"model_type": "timm_wrapper", "model_args": WITH_FILE}},
    },
    "no type of a backbone": {
        "library": "transformers",
        "name": "DepthAnythingForDepthEstimation",
        "arguments": {"backbone_config": {"model_type": ["dinov2"]}},
    },
    "kernels for a part": {
        "library": "transformers",
        "name": "CLIPForImageClassification",
        "arguments": {"attn_implementation": {"vision_config": "flash_attention_2"}},
    },
    "kernels in a list": {
        "library": "transformers",
        "name": "ViTForImageClassification",
        "arguments": {"attn_implementation": ["flash_attention_2"]},
    },
    "image processor from the hub": {
        "library": "transformers",
        "name": "ViTForImageClassification",
        "arguments": {"name_or_path": "evil/x"},
    },
    "code of others": {
        "library": "transformers",
        "name": "ViTForImageClassification",
        "arguments": {"auto_map": {"AutoModel": "evil/x--model.Evil"}},
    },
    "quantization": {
        "library": "transformers",
        "name": "ViTForImageClassification",
        "arguments": {"quantization_config": {"quant_method": "gptq", "dataset": CANARY}},
    },
    "checkpoint of timm": {"library": "timm", "name": "test_vit", "arguments": WITH_FILE},
    "configuration of timm": {
        "library": "timm",
        "name": "test_vit",
        "arguments": {"pretrained_cfg": {"file": CANARY}, "pretrained": True},
    },
    "recipe inside of a recipe": {
        "library": "timm",
        "name": "hetdpt",
        "arguments": {"recipe": {}, "pretrained_cfg": {"file": CANARY}, "pretrained": True},
    },
    "directory of timm": {"library": "timm", "name": "local-dir:.", "arguments": {}},
    "model of the hub": {"library": "timm", "name": HUB, "arguments": {}},
    "billions of classes": {
        "library": "transformers",
        "name": "ViTForImageClassification",
        "arguments": {"num_labels": 10**9},
    },
    "billions of blocks": {"library": "timm", "name": "test_vit", "arguments": {"depth": 10**9}},
    "many blocks": {"library": "timm", "name": "test_vit", "arguments": {"depth": 10**5}},
    "lists in lists": {"library": "timm", "name": "test_vit", "arguments": {"depth": NESTED}},
    "a number that is none": {"library": "timm", "name": "test_vit", "arguments": {"drop_path_rate": float("inf")}},
}


class Planted:
    """What a pickle would do to whoever loads it."""

    def __reduce__(self) -> Any:
        return Path("executed").touch, ()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("foreign") / "model")


@pytest.fixture
def plant(saved: Path, tmp_path: Path) -> Callable[[str], Path]:
    """Return a function that makes a saved model whose base is that of an attack, sealed as if it were sound."""

    def planted(name: str) -> Path:
        directory = Path(shutil.copytree(saved, tmp_path / name.replace(" ", "_")))
        values = read_sealed_json(directory / "hetdpt.json")
        values["base"] = ATTACKS[name]
        values["preprocessing"] = None  # so that the model is asked
        write_sealed_json(directory / "hetdpt.json", values)
        return directory

    return planted


@pytest.mark.parametrize("name", ATTACKS)
def test_a_crafted_base_is_refused_before_anything_is_built(plant: Callable[[str], Path], name: str) -> None:
    TRIED["saved model, sealed again"] += 1
    words = "cannot be built from a file|not among the classes|timm's own models|timm has no model called|modules"
    with pytest.raises(ModelError, match=words):
        hetdpt.load(plant(name))


ALONE = """
import json, sys

seen = []

def watch(event, arguments):
    if event.startswith("socket.") or event.startswith("subprocess.") or event == "os.fork":
        seen.append(f"{event} {arguments}")
    if event == "open" and "canary.bin" in str(arguments[0]):
        seen.append(f"open {arguments[0]}")

import hetdpt
import hetdpt.export.hub
from hetdpt.adapters.huggingface import import_transformers
from hetdpt.adapters.preprocessing import preprocessing_of
from hetdpt.core.errors import HetDPTError

import_transformers()
sys.addaudithook(watch)
outcomes = {}
for directory in sys.argv[1:]:
    try:
        preprocessing_of(hetdpt.load(directory))
        outcomes[directory] = "loaded"
    except HetDPTError as error:
        outcomes[directory] = f"refused: {error}"
    except Exception as error:
        outcomes[directory] = f"{type(error).__name__}: {error}"
print(json.dumps([outcomes, seen]))
"""


@pytest.mark.slow
def test_a_process_without_a_network_opens_no_canary(plant: Callable[[str], Path], tmp_path: Path) -> None:
    """As SECURITY.md promises: every attack in one process that is watched, in a folder with the file they name."""
    directories = [str(plant(name)) for name in ATTACKS]
    (tmp_path / CANARY).write_bytes(pickle.dumps(Planted()))
    alone = ["unshare", "-rn"] if _can_unshare() else []  # else only the watch tells of sockets
    command = [*alone, sys.executable, "-c", ALONE, *directories]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    outcomes, seen = json.loads(result.stdout.splitlines()[-1])
    assert seen == []
    assert {each: text for each, text in outcomes.items() if not text.startswith("refused: ")} == {}
    assert not (tmp_path / "executed").exists()


def _can_unshare() -> bool:
    tool = shutil.which("unshare")
    return tool is not None and subprocess.run([tool, "-rn", "true"], capture_output=True).returncode == 0


def test_the_canary_would_sing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    pickle.loads(pickle.dumps(Planted()))
    assert Path("executed").exists()


HOSTILE: dict[str, Any] = {
    "path": "evil/w.bin",
    "absolute path": "/etc/passwd",
    "hub": HUB,
    "address": "https://evil.example/w.bin",
    "line": "a\nb",
    "long": "x" * 65,
    "table": {"checkpoint_path": "evil"},
    "table in a list": [{"checkpoint_path": "evil"}],
    "path in a list": [["evil/w.bin"]],
}


def image_classes() -> Iterator[str]:
    """Yield every class of transformers that can be built from a file."""
    for family in sorted(ALLOWED):
        for name in dir(import_module(f"transformers.models.{family}")):
            with suppress(HetDPTError):
                model_class(name)
                yield name


def timm_models() -> list[str]:
    """Return the names of timm's own models; another test may have registered ours."""
    return [name for name in timm.list_models() if name != "hetdpt"]


@pytest.fixture
def silence() -> Iterator[list[str]]:
    """Return the sockets and the files called evil that were opened since."""
    seen: list[str] = []
    watched.append(seen)
    yield seen
    watched.remove(seen)


watched: list[list[str]] = []


def _watch(event: str, arguments: Any) -> None:
    if watched and (event.startswith("socket.") or (event == "open" and "evil" in str(arguments[0]))):
        watched[-1].append(f"{event} {arguments}")


sys.addaudithook(_watch)


def refusals(library: str, name: str, names: Iterator[str]) -> int:
    """Try every hostile value in every argument; return how many were refused."""
    TRIED["model that a file describes"] += 1
    return sum(_is_refused(Base(library, name, {each: value})) for each in names for value in HOSTILE.values())


def test_no_class_of_transformers_is_given_a_hostile_value(silence: list[str]) -> None:
    names = list(image_classes())
    assert len(names) > 100
    classes = {model_class(name).config_class: name for name in names}
    for config_class, name in classes.items():
        known = {*config_class().to_dict(), "backbone", "checkpoint_path", "model_args", "auto_map"}
        own = {each for each, value in config_class().to_dict().items() if isinstance(value, dict)}
        known -= LABELS | (own - config_class.sub_configs.keys())  # tables of plain values, as rotary positions have
        assert refusals("transformers", name, iter(sorted(known))) == len(known) * len(HOSTILE), name
    assert silence == []


def _is_refused(base: Base) -> bool:
    try:
        require_allowed(base)
    except ModelError:
        return True
    return False


def test_no_model_of_timm_is_given_a_hostile_value(silence: list[str]) -> None:
    entries: dict[str, str] = {}
    for name in timm_models():
        entries.setdefault(timm.model_entrypoint(name).__module__, name)
    assert len(entries) > 80
    for name in entries.values():
        known = {*timm_names(name), "pretrained", "checkpoint_path", "pretrained_cfg", "cache_dir", "scriptable"}
        assert refusals("timm", name, iter(sorted(known))) == len(known) * len(HOSTILE), name
    assert silence == []


@pytest.mark.parametrize("argument", ["pretrained", "checkpoint_path", "cache_dir", "pretrained_cfg_overlay", "url"])
def test_arguments_of_files_are_known_of_no_model(argument: str) -> None:
    for name in timm_models():
        assert argument not in timm_names(name)


def test_plain_values_lead_nowhere_whatever_they_are(silence: list[str]) -> None:
    """Values that pass are given to the constructor, whatever it makes of them, and it opens and calls nothing."""
    for argument in ("hidden_act", "image_size", "num_hidden_layers", "problem_type", "dtype", "id2label"):
        for value in ("evil", -1, 2.5, None, True, [], [[1]], {"0": "evil/w.bin"}):
            base = Base("transformers", "ViTForImageClassification", {"num_hidden_layers": 1, argument: value})
            with suppress(HetDPTError):
                rebuild(base, is_empty=True)
    assert silence == []


# What is ours is allowed


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.label)
def test_every_family_is_built_from_its_own_base(family: Any) -> None:
    if family.base.library == "timm" and not timm.is_model(family.base.name):
        pytest.skip(f"timm {timm.__version__} has no {family.base.name}")
    base = base_of(family.build()) if family.base.library == "transformers" else family.base
    require_allowed(base)


def test_settings_that_a_class_does_not_have_are_not_saved() -> None:
    config = transformers.ViTConfig(num_hidden_layers=2, some_old_setting="evil/x", id2label={0: "cat, tabby/cat"})
    settings = settings_of(config)
    assert "some_old_setting" not in settings
    require_allowed(Base("transformers", "ViTForImageClassification", json.loads(json.dumps(settings))))


# The guard


@pytest.mark.parametrize(
    "act",
    [
        lambda: Path("outside").read_text(),
        lambda: Path("outside").write_text("harm"),
        lambda: os.remove("outside"),
        lambda: os.rename("outside", "elsewhere"),
        lambda: os.mkdir("new"),
        lambda: socket.socket().close(),
        lambda: socket.getaddrinfo("localhost", 80),
        lambda: subprocess.run(["true"]),
        lambda: os.system("true"),
        lambda: pickle.loads(pickle.dumps(Planted())),
    ],
)  # fmt: skip
def test_the_guard_refuses(act: Callable[[], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "outside").write_text("secret")
    with guarded(tmp_path / "inside"), pytest.raises(ModelError, match="^building this model would (open|call) "):
        act()
    assert (tmp_path / "outside").read_text() == "secret"
    act()  # it ends with its block


def test_the_guard_leaves_libraries_directories_and_other_threads_alone(tmp_path: Path) -> None:
    (tmp_path / "inside").mkdir()
    (tmp_path / "outside").write_text("of another thread")
    read: list[str] = []
    with guarded(tmp_path / "inside"):
        (tmp_path / "inside" / "file").write_text("")
        Path(json.__file__).read_text()
        thread = threading.Thread(target=lambda: read.append((tmp_path / "outside").read_text()))
        thread.start()
        thread.join()
    assert read == ["of another thread"]


def test_a_link_does_not_lead_out_of_the_guard(tmp_path: Path) -> None:
    (tmp_path / "inside").mkdir()
    (tmp_path / "outside").write_text("secret")
    (tmp_path / "inside" / "link").symlink_to(tmp_path / "outside")
    with guarded(tmp_path / "inside"), pytest.raises(ModelError, match="would open"):
        (tmp_path / "inside" / "link").read_text()


# Directories of transformers


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "timm_wrapper", "architecture": "test_vit", "num_classes": 2, "model_args": WITH_FILE},
        {"model_type": "timm_backbone", "backbone": HUB, "architectures": ["TimmBackbone"]},
        {"model_type": "dpt", "backbone": "evil/x", "use_timm_backbone": False, "is_hybrid": False},
        {"model_type": "evil", "auto_map": {"AutoConfig": "evil.EvilConfig", "AutoModel": "evil.EvilModel"}},
    ],
    ids=["wrapper", "backbone", "decoder", "code"],
)
def test_a_directory_of_transformers_leads_nowhere_else(
    config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, silence: list[str]
) -> None:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    (tmp_path / CANARY).write_bytes(pickle.dumps(Planted()))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(HetDPTError):
        create(f"hf:{directory}")
    assert [event for event in silence if event.startswith("socket.")] == []
    assert not (tmp_path / "executed").exists()


@pytest.fixture
def local(tmp_path: Path) -> Path:
    """Return a directory of transformers with its weights."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.ViTConfig(image_size=16, patch_size=8, **sizes)
    transformers.ViTForImageClassification(config).save_pretrained(tmp_path / "models" / "mine")
    return tmp_path / "models" / "mine"


@pytest.mark.parametrize("name", ["{outside}", "../../outside.safetensors"])
def test_an_index_names_no_weights_elsewhere(local: Path, name: str) -> None:
    outside = local.parents[1] / "outside.safetensors"
    names = list(load_file(local / "model.safetensors"))
    (local / "model.safetensors").rename(outside)
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, name.format(outside=outside))}
    (local / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match="names weights outside of its directory"):
        create(f"hf:{local}")


def test_weights_are_no_links_to_elsewhere(local: Path) -> None:
    outside = local.parents[1] / "outside.safetensors"
    (local / "model.safetensors").rename(outside)
    (local / "model.safetensors").symlink_to(outside)
    with pytest.raises(ModelError, match="is a link to a file outside of its directory"):
        create(f"hf:{local}")


def test_a_snapshot_in_the_cache_of_the_hub_is_opened(local: Path) -> None:
    """Its files are links to a folder beside the snapshots."""
    blobs, snapshot = local.parent / "blobs", local.parent / "snapshots" / "abc"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    for number, file in enumerate(sorted(local.iterdir())):
        file.rename(blobs / str(number))
        (snapshot / file.name).symlink_to(blobs / str(number))
    assert create(f"hf:{snapshot}") is not None


@pytest.mark.parametrize(
    "change",
    [
        {"num_labels": 10**9}, {"num_labels": "many"}, {"architectures": 5}, {"architectures": [5]}, {"id2label": 5},
        {"hidden_size": "evil"}, {"dtype": []}, {"auto_map": 5}, {"hidden_size": 10**9}, {"num_hidden_layers": 10**5},
        {"vision_config": {"num_labels": 10**9}}, {"hidden_act": "evil"},
    ],
    ids=str,
)  # fmt: skip
def test_a_config_that_is_wrong_ends_in_a_model_or_a_sentence(local: Path, change: dict[str, Any]) -> None:
    file = local / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    TRIED["directory of transformers"] += 1
    with suppress(HetDPTError):
        create(f"hf:{local}")


@pytest.mark.parametrize(
    "change", [{"image_mean": ["a", "b", "c"]}, {"resample": 99}, {"resample": -1}, {"image_std": [0, 0, 0]}], ids=str
)
def test_an_image_processor_that_is_wrong_is_a_sentence(local: Path, change: dict[str, Any]) -> None:
    transformers.ViTImageProcessorPil().save_pretrained(local)
    file = local / "preprocessor_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    model = create(f"hf:{local}")
    with pytest.raises(ModelError):
        preprocessing_of(model)


# Other entries, and other files, of a saved model


USUAL = {"mean": [0, 0, 0], "std": [1, 1, 1]}
ENTRIES: dict[str, dict[str, Any]] = {
    "merged": {"merged": [float("inf")]},
    "folded norms": {"folded_norms": [float("inf")]},
    "huge images": {"input_size": [3, 10**30, 10**30]},
    "infinite images": {"input_size": [3, float("inf"), 32]},
    "resized": {"resized": [float("inf"), 1]},
    "deep widths": {"widths": {"shapes": [], "stream": None, "attributes": [["a", "b", NESTED]]}},
    "no sides": {"preprocessing": {**USUAL, "input_size": [3]}},
    "sides of text": {"preprocessing": {**USUAL, "input_size": [3, "a", None]}},
    "huge views": {"preprocessing": {**USUAL, "input_size": [3, 60000, 60000]}},
    "a long number": {"preprocessing": {**USUAL, "input_size": [3, 8, 8], "mean": [10**400, 0, 0]}},
    "no preprocessing": {"preprocessing": {}},
    "a long plan": {
        "plan": {"attention": [*range(10**5)], "activation": [], "removal": "plain", "anatomy": None, "fits": []}
    },
}


@pytest.mark.parametrize("entry", ENTRIES)
def test_an_entry_that_is_wrong_is_a_sentence(saved: Path, tmp_path: Path, entry: str) -> None:
    directory = Path(shutil.copytree(saved, tmp_path / "model"))
    values = read_sealed_json(directory / "hetdpt.json")
    write_sealed_json(directory / "hetdpt.json", values | ENTRIES[entry])
    TRIED["saved model, sealed again"] += 1
    with pytest.raises(HetDPTError) as refused:
        hetdpt.load(directory)
    assert len(str(refused.value)) < 1000


@pytest.mark.parametrize("kind", [torch.int64, torch.bool, torch.complex64])
def test_weights_are_of_the_kind_that_the_model_has(saved: Path, tmp_path: Path, kind: torch.dtype) -> None:
    directory = Path(shutil.copytree(saved, tmp_path / "model"))
    weights = directory / "model.safetensors"
    save_file({name: tensor.to(kind) for name, tensor in load_file(weights).items()}, weights)
    values = read_sealed_json(directory / "hetdpt.json")
    values["weights"]["sha256"] = sha256(weights)
    write_sealed_json(directory / "hetdpt.json", values)
    with pytest.raises(FileError, match=f"should be torch.float32 and is {kind}"):
        hetdpt.load(directory)


@pytest.mark.parametrize("name", ["hetdpt.json", "model.safetensors"])
@pytest.mark.parametrize("place", ["/dev/zero", "."])
def test_what_is_no_file_is_not_read(saved: Path, tmp_path: Path, name: str, place: str) -> None:
    directory = Path(shutil.copytree(saved, tmp_path / "model"))
    (directory / name).unlink()
    (directory / name).symlink_to(place)
    with pytest.raises(FileError, match="is missing"):
        hetdpt.load(directory)
