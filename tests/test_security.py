"""No one let in: what hetdpt reads runs no code and reaches no place outside of its directory."""

from __future__ import annotations

import ast
import json
import re
import shutil
import time
from contextlib import suppress
from importlib.metadata import metadata, requires
from pathlib import Path
from typing import Any

import pytest
import test_cli
from hypothesis import given
from hypothesis import strategies as st
from packaging.requirements import Requirement
from run_directories import STAGES, build_run
from test_bad_files import EXAMPLES, TRIED, count  # noqa: F401 - a fixture
from test_cli import Run
from test_training_cli import build

import hetdpt
from hetdpt.core.errors import FileError, HetDPTError, ModelError
from hetdpt.store.atomic import read_sealed_json, write_sealed_json
from hetdpt.store.settings import read_settings
from hetdpt.store.stage_directory import STAGE, StageRecord, held, stage_directory

run = test_cli.run  # the fixture
ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "src").rglob("*.py"))

# The source


FORBIDDEN = {
    "eval", "exec", "compile", "__import__", "os.system", "os.popen", "pickle.load", "pickle.loads", "yaml.load",
    "yaml.unsafe_load", "yaml.full_load", "joblib.load", "dill.load", "marshal.loads", "shelve.open", "tempfile.mktemp",
    "extractall", "unpack_archive",
}  # fmt: skip


def offences(source: str) -> list[str]:
    """Return the calls in ``source`` that could run code, or write where an archive says."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        name, given = ast.unparse(node.func), {word.arg: ast.unparse(word.value) for word in node.keywords}
        last = name.rpartition(".")[2]
        if name in FORBIDDEN or last in ("extractall", "unpack_archive"):
            found.append(name)
        if name == "torch.load" and given.get("weights_only") != "True":
            found.append("torch.load without weights_only=True")
        if given.get("shell") == "True" or given.get("trust_remote_code") == "True":
            found.append(f"{name} of foreign code")
        if given.get("allow_pickle") == "True":
            found.append(f"{name} with pickle")
    return found


@pytest.mark.parametrize(
    "planted",
    [
        "eval('1')", "import pickle\npickle.loads(b'')", "yaml.load(text, Loader)", "torch.load(file)",
        "torch.load(file, weights_only=False)", "subprocess.run('ls', shell=True)", "np.load(file, allow_pickle=True)",
        "AutoModel.from_pretrained(name, trust_remote_code=True)", "tarfile.open(name).extractall(folder)",
    ],
)  # fmt: skip
def test_offences_are_found(planted: str) -> None:
    assert offences(planted)


def test_the_source_has_none() -> None:
    found = {str(file): some for file in FILES if (some := offences(file.read_text()))}
    assert len(FILES) > 100
    assert found == {}


# Saved models


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("security") / "model")


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "model"))


def doctor(directory: Path, change: Any) -> None:
    """Change the recipe of a saved model, and seal it again, as one would who means harm."""
    file = directory / "hetdpt.json"
    values = read_sealed_json(file)
    change(values)
    write_sealed_json(file, values)


HARMFUL: dict[str, Any] = {
    "a foreign library": lambda values: values["base"].update(library="os"),
    "no model of timm": lambda values: values["base"].update(name="../../etc/passwd"),
    "a name that timm would fetch": lambda values: values["base"].update(name="hf-hub:some/one"),
    "a directory that timm would read": lambda values: values["base"].update(name="local-dir:/tmp"),
    "no model of transformers": lambda values: values["base"].update(library="transformers", name="Trainer"),
    "an attribute with dots": lambda values: values["base"].update(library="transformers", name="os.system"),
    "a file of weights": lambda values: values["base"]["arguments"].update(checkpoint_path="/tmp/evil.pth"),
    "a download of weights": lambda values: values["base"]["arguments"].update(pretrained=True),
    "kernels to fetch": lambda values: values["base"].update(
        library="transformers", name="ViTModel", arguments={"attn_implementation": "some/kernels"}
    ),
    "kernels to fetch, further in": lambda values: values["base"].update(
        library="transformers", name="ViTModel", arguments={"vision": {"_attn_implementation": "some/kernels:run"}}
    ),
    "a dtype that is a function": lambda values: values.update(dtype="load"),
    "a dtype that is a module": lambda values: values.update(dtype="hub"),
    "no weights at all": lambda values: values.update(weights=None),
    "another format": lambda values: values.update(format=99),
    "a plan for blocks that are not there": lambda values: values["plan"].update(attention=[999]),
    "sizes of nothing": lambda values: values.update(input_size=[3, 0, 0]),
}  # fmt: skip


@pytest.mark.parametrize("harm", HARMFUL)
def test_a_doctored_recipe_is_refused(copy: Path, harm: str) -> None:
    doctor(copy, HARMFUL[harm])
    TRIED["saved model, sealed again"] += 1
    with pytest.raises(HetDPTError):
        hetdpt.load(copy)


def test_kernels_are_named_in_the_refusal(copy: Path) -> None:
    doctor(copy, HARMFUL["kernels to fetch"])
    with pytest.raises(ModelError, match="^ViTModel cannot be built from a file with attn_implementation='some"):
        hetdpt.load(copy)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)


@EXAMPLES
@given(data=st.data(), value=JSON)
def test_any_entry_of_a_recipe_may_be_anything(saved: Path, data: st.DataObject, value: Any) -> None:
    """Whatever stands in a sealed recipe, loading it ends in a model or in a sentence."""
    file = saved / "hetdpt.json"
    before, values = file.read_bytes(), read_sealed_json(file)
    table: Any = values
    while isinstance(table[key := data.draw(st.sampled_from(sorted(table)))], dict) and table[key]:
        if data.draw(st.booleans()):
            break
        table = table[key]
    table[key] = value
    write_sealed_json(file, values)
    TRIED["saved model, sealed again"] += 1
    try:
        with suppress(HetDPTError):
            hetdpt.load(saved)
    finally:
        file.write_bytes(before)


def test_a_link_in_the_place_of_weights_reads_nothing(copy: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("of someone else")
    (copy / "model.safetensors").unlink()
    (copy / "model.safetensors").symlink_to(secret)
    with pytest.raises(FileError, match="was altered or truncated") as refused:
        hetdpt.load(copy)
    assert "someone" not in str(refused.value)


def test_overwriting_a_link_leaves_what_it_leads_to(copy: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(copy)
    before = {file.name: file.read_bytes() for file in copy.iterdir()}
    hetdpt.save(hetdpt.load(copy), link, overwrite=True)
    assert {file.name: file.read_bytes() for file in copy.iterdir()} == before
    assert not link.is_symlink()


# Run directories


@pytest.mark.parametrize("name", ["../precious", "/tmp/precious", "..", ".", "", "report/../../precious"])
def test_a_stage_removes_nothing_outside_of_its_run(tmp_path: Path, name: str) -> None:
    directory = build_run(tmp_path / "run")
    precious = tmp_path / "precious"
    precious.mkdir()
    file = stage_directory(directory, "report") / STAGE
    values = json.loads(file.read_text())
    values["result"]["files"] = {name: None}
    del values["checksum"]
    file.write_text(json.dumps(values))
    with pytest.raises(FileError, match="is damaged"):
        StageRecord.read(file.parent)
    with held(directory, STAGES, "", {}, redo="report"):
        pass
    assert precious.is_dir()


@pytest.mark.parametrize("name", ["model", "data", "recovery"])
def test_a_bomb_of_aliases_is_refused_at_once(tmp_path: Path, name: str, run: Run) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]
    file = tmp_path / "config.yaml"
    file.write_text("\n".join([*lines, f"{name}: *a11"]))
    begun = time.monotonic()
    with pytest.raises(FileError, match="aliases are not supported, write out the value in line 2"):
        read_settings(file)
    run("run", "--config", file).is_refused_like(".* are damaged .*; correct them")
    assert time.monotonic() - begun < 10


def test_yaml_makes_no_objects(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("model: !!python/object/apply:os.system ['echo harm']")
    with pytest.raises(FileError, match="could not determine a constructor"):
        read_settings(file)


# Dependencies

PERMISSIVE = re.compile(
    r"MIT|BSD|Apache|PSF|Python Software Foundation|MPL|Mozilla|ISC|HPND|CNRI|Zlib|Unlicense|0BSD", re.I
)
COPYLEFT = re.compile(r"\bA?GPL|GNU (Affero|General)|non-?commercial|CC-BY-NC", re.I)


def licence_of(package: str) -> str:
    """Return what a package says of its licence, in the words of its metadata."""
    found: Any = metadata(package)
    named = [line.rpartition(" :: ")[2] for line in found.get_all("Classifier") or () if line.startswith("License ::")]
    text = found.get("License-Expression") or " or ".join(named) or (found.get("License") or "").strip().split("\n")[0]
    return str(text)


def direct() -> list[str]:
    """Return the packages that are installed with hetdpt, without its extras."""
    needed = [Requirement(line) for line in requires("hetdpt") or ()]
    return sorted(one.name for one in needed if one.marker is None or one.marker.evaluate({"extra": ""}))


def all_needed() -> set[str]:
    """Return those and what they need in turn, but for what torch's builds for GPUs bring from their makers."""
    found, left = set[str](), direct()
    while left:
        name = left.pop()
        if name.lower() in found or name.startswith(("nvidia", "cuda", "triton")):
            continue
        found.add(name.lower())
        for line in requires(name) or ():
            one = Requirement(line)
            if one.marker is None or one.marker.evaluate({"extra": ""}):
                left.append(one.name)
    return found


def test_all_that_is_installed_with_hetdpt_may_be_used_by_anyone() -> None:
    licences = {name: licence_of(name) for name in all_needed()}
    assert len(licences) > len(direct())
    doubtful = {name: text for name, text in licences.items() if not PERMISSIVE.search(text) or COPYLEFT.search(text)}
    assert doubtful == {}


def test_the_page_of_dependencies_names_each_with_its_licence() -> None:
    rows = dict(re.findall(r"^\| ([\w-]+) \| ([^|]+) \|", (ROOT / "docs" / "dependencies.md").read_text(), re.M))
    assert {name: rows.get(name) for name in direct()} == {name: licence_of(name) for name in direct()}
