"""The command line: every command on a tiny model, and every bad input as one sentence with exit code 2."""

from __future__ import annotations

import json
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import timm
import torch
from families import named
from safetensors.torch import save_file

import hetdpt
from hetdpt.cli import main
from hetdpt.core.modules import clone
from hetdpt.core.plan import Plan
from hetdpt.surgery.record import require_record

VIT = "test_vit"  # the smallest vision transformer of timm: 6 blocks of width 64, images of 160 x 160
PLAN = hetdpt.Plan(attention=(1, 4), activation=(2, 3))
SCRIPT = Path(sys.executable).with_name("hetdpt")


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str

    @property
    def values(self) -> dict[str, Any]:
        """What ``--json`` printed: one object and nothing else."""
        return json.loads(self.out)

    def is_refused(self, text: str) -> None:
        """Assert one sentence, ``text``, on stderr, nothing on stdout, and exit code 2."""
        assert self == Result(2, "", f"error: {text}\n")

    def is_refused_like(self, pattern: str) -> None:
        """The same where a library says part of the sentence."""
        assert (self.code, self.out) == (2, "")
        assert re.fullmatch(f"error: {pattern}\n", self.err), self.err


Run = Callable[..., Result]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*arguments: object) -> Result:
        monkeypatch.setattr(sys, "argv", ["hetdpt", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            main()
        return Result(end.value.code, *capsys.readouterr())  # type: ignore[arg-type]

    return call


def run_script(*arguments: object) -> Result:
    command = [str(SCRIPT), *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    return Result(result.returncode, result.stdout, result.stderr)


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    path.write_text(PLAN.to_json())
    return path


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "written.json"
    path.write_text(text)
    return path


@pytest.fixture(scope="module")
def state() -> dict[str, torch.Tensor]:
    return timm.create_model(VIT).state_dict()


@pytest.fixture(scope="module")
def weights(state: dict[str, torch.Tensor], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("weights") / "vit.safetensors"
    save_file(state, path)
    return path


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pruned model as ``apply`` leaves it."""
    model = hetdpt.merge_(hetdpt.prune_(hetdpt.create(VIT), PLAN))
    return hetdpt.save(model, tmp_path_factory.mktemp("saved") / "pruned")


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A HuggingFace directory with a ViT of three blocks."""
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 64}
    directory = tmp_path_factory.mktemp("hf")
    ViTForImageClassification(ViTConfig(image_size=32, patch_size=8, **sizes)).save_pretrained(directory)
    return f"hf:{directory}"


@pytest.fixture
def hf_plan(tmp_path: Path) -> Path:
    return written(tmp_path, hetdpt.Plan(attention=(1,), activation=(2,)).to_json())


# What the commands do


def test_inspect_shows_every_site_and_the_costs(run: Run) -> None:
    result = run("inspect", VIT)
    assert (result.code, result.err) == (0, "")
    for block in range(6):
        assert re.search(rf"│ {block} +│ +blocks.{block}.attn │ +blocks.{block}.mlp.act │", result.out)
    assert re.search(r"│ dense │ 371.24 k │ 37.64 M │ +29.80 M │", result.out)
    assert "pruned" not in result.out


def test_inspect_marks_what_a_plan_removes(run: Run, plan: Path) -> None:
    out = run("inspect", VIT, "--plan", plan).out
    removed = re.findall(r"(\S+) REMOVED", out)
    assert sorted(removed) == ["blocks.1.attn", "blocks.2.mlp.act", "blocks.3.mlp.act", "blocks.4.attn"]
    assert re.search(r"│ pruned  │ \d\d\d.\d\d k │", out)
    assert re.search(r"\n1\.\d{3}x fewer MACs, 1\.\d{3}x fewer parameters\n", out)


def test_inspect_as_json(run: Run, plan: Path) -> None:
    values = run("inspect", VIT, "--plan", plan, "--json").values
    dense = hetdpt.create(VIT)
    sites = hetdpt.sites(dense)
    assert [(site["kind"], site["block"], site["path"]) for site in values["sites"]] == [
        (site.kind, site.block, site.path) for site in sites
    ]
    assert [site["removed"] for site in values["sites"]] == [PLAN.removes(site) for site in sites]
    pruned = hetdpt.merge_(hetdpt.prune_(hetdpt.create(VIT), PLAN))
    small = hetdpt.trim_(clone(pruned))
    for name, model in {"dense": dense, "pruned": pruned, "trimmed": small}.items():
        assert values["costs"][name]["params"] == hetdpt.count_params(model)
        assert values["costs"][name]["macs"] == hetdpt.count_macs(model, (3, 160, 160))
    assert values["costs"]["trimmed"]["macs"] < values["costs"]["pruned"]["macs"] < values["costs"]["dense"]["macs"]
    assert (values["model"], values["blocks"], values["input_size"]) == (VIT, 6, [3, 160, 160])
    assert (values["refusals"], values["latency"]) == ([], None)


def test_inspect_takes_a_plan_of_the_paper_by_name(run: Run) -> None:
    values = run("inspect", "deit_small_distilled_patch16_224", "--plan", "paper/deit_small-8", "--json").values
    costs = {"params": 15933008, "macs": 3219068928, "macs_without_attention_products": 2978199552}  # reference.json
    assert values["costs"]["pruned"] == costs


def test_inspect_obeys_classes_and_image_size(run: Run) -> None:
    values = run("inspect", VIT, "--num-classes", 10, "--img-size", 32, "--json").values
    assert values["input_size"] == [3, 32, 32]
    assert values["costs"]["dense"]["params"] == hetdpt.count_params(
        timm.create_model(VIT, num_classes=10, img_size=32)
    )


def test_inspect_measures_latency(run: Run, hf: str) -> None:
    values = run("inspect", hf, "--latency", "--batch", 1, "--json").values["latency"]
    sites = {(saving["site"]["kind"], saving["site"]["block"]) for saving in values["savings"]}
    assert sites == {(kind, block) for kind in ("attention", "activation") for block in range(3)}
    units = {value["unit"] for value in (values["dense"], *(saving["saved"] for saving in values["savings"]))}
    assert units == {"ms"}
    assert (values["dense"]["device"], values["dense"]["dtype"], values["dense"]["batch"]) == ("cpu", "float32", 1)
    assert {"attention", "FFN linear", "activation", "norm", "other"} == set(values["breakdown"])


def test_inspect_shows_latency(run: Run, hf: str) -> None:
    out = run("inspect", hf, "--latency", "--batch", 1).out
    assert re.search(r"│ 2 +│ +\S+ │ +-?\d+\.\d\d │ +\S+mlp\S+ │ +-?\d+\.\d\d │", out)
    assert re.search(r"latency \S+ ± \S+ ms \(cpu, float32, batch 1\)", out)
    assert re.search(r"│ FFN linear +│ +\d+\.\d\d │ +\d+ % │", out)


def test_inspect_reads_a_saved_model(run: Run, saved: Path) -> None:
    values = run("inspect", saved, "--json").values
    assert len(values["sites"]) == 12 - len(PLAN)
    assert values["costs"]["dense"]["params"] == hetdpt.count_params(hetdpt.load(saved))


def test_bench_as_json(run: Run, plan: Path) -> None:
    values = run(
        "bench", VIT, "--plan", plan, "--runs", 5, "--batch", 1, "--device", "cpu", "--img-size", 32, "--json"
    ).values
    assert set(values) == {"throughput", "speedup", "mac_ratio"}
    assert list(values["throughput"]) == ["dense", "pruned"]
    assert all(value["value"] > 0 and value["runs"] == 5 for value in values["throughput"].values())
    assert values["throughput"]["dense"]["unit"] == "img/s"
    assert values["speedup"]["low"] <= values["speedup"]["value"] <= values["speedup"]["high"]
    assert values["mac_ratio"] > 1


def test_bench_prints_the_ratio_with_its_interval(run: Run, plan: Path) -> None:
    out = run("bench", VIT, "--plan", plan, "--runs", 5, "--batch", 1, "--device", "cpu", "--img-size", 32).out
    assert re.search(r"\ndense: throughput \S+ ± \S+ img/s \(cpu, float32, batch 1\)\npruned: throughput ", out)
    assert re.search(r"\nspeedup [\d.]+x \[[\d.]+, [\d.]+\] measured, 1\.\d{3}x fewer MACs\n$", out)


def test_apply_saves_what_prune_and_merge_make(run: Run, plan: Path, weights: Path, tmp_path: Path) -> None:
    out = tmp_path / "new" / "pruned"
    result = run("apply", VIT, "--plan", plan, "--weights", weights, "--out", out)
    assert (result.code, result.err) == (0, "")
    difference = re.search(
        r"\nmerging changed the outputs by (\S+) of the largest one \(float rounding\)\n", result.out
    )
    assert difference
    assert 0 < float(difference[1]) < 1e-5  # the bound of the issue: float32 rounding of merged matrices
    assert result.out.endswith(f"\nsaved to {out}; load it with hetdpt.load({str(out)!r})\n")
    assert "random" not in result.out
    expected = hetdpt.trim_(hetdpt.merge_(hetdpt.prune_(hetdpt.create(VIT, weights=weights), PLAN)))
    images = torch.randn(2, 3, 160, 160, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(hetdpt.load(out)(images), expected(images))


def test_apply_as_json_overwrites_on_purpose(run: Run, plan: Path, tmp_path: Path) -> None:
    out = tmp_path / "pruned"
    out.mkdir()
    (out / "hetdpt.json").write_text("")  # ours, of an earlier time
    (out / "mine").write_text("")
    values = run("apply", VIT, "--plan", plan, "--out", out, "--img-size", 32, "--overwrite", "--json").values
    assert set(values) == {"directory", "costs", "merge_difference"}
    assert values["directory"] == str(out)
    assert 0 <= values["merge_difference"] < 1e-5  # as above
    assert values["costs"]["pruned"]["params"] == hetdpt.count_params(hetdpt.load(out))
    assert not (out / "mine").exists()


def test_apply_says_when_weights_are_random(run: Run, plan: Path, tmp_path: Path) -> None:
    out = run("apply", VIT, "--plan", plan, "--out", tmp_path / "pruned", "--img-size", 32).out
    assert "\nnote: the weights are random; give --weights FILE or --pretrained to use a trained model\n" in out


def test_apply_and_bench_trim_unless_that_is_turned_off(run: Run, plan: Path, tmp_path: Path) -> None:
    macs, ratios, words = {}, {}, ("--plan", plan, "--img-size", 32, "--json")
    for option in ("--trim", "--no-trim"):
        out = tmp_path / option
        macs[option] = run("apply", VIT, *words, "--out", out, option).values["costs"]["pruned"]["macs"]
        assert macs[option] == hetdpt.count_macs(hetdpt.load(out), (3, 32, 32))
        ratios[option] = run("bench", VIT, *words, "--runs", 1, "--batch", 1, option).values["mac_ratio"]
    assert macs["--trim"] < macs["--no-trim"]
    assert ratios["--trim"] / ratios["--no-trim"] == pytest.approx(macs["--no-trim"] / macs["--trim"])


def test_apply_says_why_a_model_is_not_trimmed(run: Run, tmp_path: Path) -> None:
    hetdpt.save(named("swin_tiny_patch4_window7_224").build(), tmp_path / "swin")
    plan = written(tmp_path, '{"activation": [3]}')
    result = run("apply", tmp_path / "swin", "--plan", plan, "--out", tmp_path / "out")
    assert result.code == 0
    assert result.out.count("not trimmed: ") == 1


def test_apply_folds_norms_if_asked(run: Run, plan: Path, tmp_path: Path) -> None:
    params = {}
    for option in ([], ["--fold-norms"]):
        out = tmp_path / f"pruned{len(option)}"
        values = run("apply", VIT, "--plan", plan, "--out", out, "--img-size", 32, "--json", *option).values
        params[len(option)] = values["costs"]["pruned"]["params"]
    assert params[0] - params[1] == 2 * 2 * 64  # weight and bias of two norms of width 64


def test_apply_goes_on_with_a_saved_model(run: Run, saved: Path, tmp_path: Path) -> None:
    more = written(tmp_path, '{"attention": [0]}')
    out = run("apply", saved, "--plan", more, "--out", tmp_path / "more").out
    assert "random" not in out
    left = {(site.kind, site.block) for site in hetdpt.sites(hetdpt.load(tmp_path / "more"))}
    assert left == {("attention", block) for block in (2, 3, 5)} | {("activation", block) for block in (0, 1, 4, 5)}


def test_apply_keeps_the_weights_of_a_huggingface_directory(run: Run, hf: str, hf_plan: Path, tmp_path: Path) -> None:
    result = run("apply", hf, "--plan", hf_plan, "--out", tmp_path / "pruned")
    assert (result.code, result.err) == (0, "")
    assert "random" not in result.out
    expected = hetdpt.prune_(hetdpt.create(hf), hetdpt.Plan(attention=(1,), activation=(2,)))
    expected = hetdpt.trim_(hetdpt.merge_(expected))
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(hetdpt.load(tmp_path / "pruned")(images).logits, expected(images).logits)


def test_export_writes_onnx_once(run: Run, saved: Path, tmp_path: Path) -> None:
    import onnxruntime

    target = tmp_path / "model.onnx"
    result = run("export", saved, "--out", target)
    assert result.code == 0
    said = re.fullmatch(
        rf"wrote {target} \(1\.\d MiB\); ONNX Runtime differs from torch by at most (\S+)\n", result.out
    )
    assert said
    images = torch.randn(5, 3, 160, 160, generator=torch.Generator().manual_seed(1))  # a batch it was not traced with
    session = onnxruntime.InferenceSession(str(target), providers=["CPUExecutionProvider"])
    (got,) = session.run(None, {"images": images.numpy()})
    with torch.no_grad():
        expected = hetdpt.load(saved)(images)
    tolerance = 1e-4  # float32 rounding through six blocks, in another order of additions
    torch.testing.assert_close(torch.from_numpy(got), expected, rtol=tolerance, atol=tolerance)
    assert float(said[1]) < tolerance
    again = run("export", saved, "--out", target)
    again.is_refused(f"{target} exists already; give another path, or allow overwriting")


@pytest.mark.slow
def test_export_as_json(run: Run, saved: Path, tmp_path: Path) -> None:
    values = run("export", saved, "--out", tmp_path / "model.onnx", "--json").values
    assert set(values) == {"path", "largest_difference", "relative_difference"}
    assert values["path"] == str(tmp_path / "model.onnx")


@pytest.mark.slow
def test_demo_prunes_saves_and_loads(run: Run, tmp_path: Path) -> None:
    result = run("demo", "--runs", 1, "--out", tmp_path / "demo")
    assert (result.code, result.err) == (0, "")
    assert result.out.startswith(
        "deit_small_distilled_patch16_224 under paper/deit_small-8 (random weights: speed and size, not accuracy)\n"
    )
    assert re.search(r"│ dense +│ 22\.44 M │ 4\.62 G │ +4\.26 G │", result.out)  # reference.json
    assert re.search(r"│ pruned │ 15\.93 M │ 3\.22 G │ +2\.98 G │", result.out)
    assert re.search(r"\nspeedup [\d.]+x \[[\d.]+, [\d.]+\] measured, 1\.436x fewer MACs\n", result.out)
    assert result.out.endswith(f"saved to {tmp_path / 'demo'} and loaded again: difference 0.0e+00\n")
    assert len(hetdpt.sites(hetdpt.load(tmp_path / "demo"))) == 24 - 8


def test_no_arguments_show_the_commands(run: Run) -> None:
    result = run()
    shown = result.out + result.err
    assert all(
        re.search(rf"\n  {name} +[A-Z]", shown) for name in ("inspect", "bench", "apply", "export", "push", "demo")
    )


# What is wrong with a plan


def test_a_plan_index_out_of_range(run: Run, tmp_path: Path) -> None:
    path = written(tmp_path, '{"attention": [1, 6]}')
    for command in (["inspect", VIT], ["bench", VIT], ["apply", VIT, "--out", tmp_path / "out"]):
        result = run(*command, "--plan", path)
        result.is_refused("the plan removes attention 6 but this model has blocks 0-5; was it made for a deeper model?")
    assert not (tmp_path / "out").exists()


def test_a_plan_for_another_model(run: Run) -> None:
    run("inspect", VIT, "--plan", "paper/deit_base-10").is_refused(
        "the plan was made for a model with 12 blocks of width 768 with 12 attention and 12 activation sites, but this "
        "one has 6 blocks of width 64 with 6 attention and 6 activation sites; make a plan for this model, or delete "
        "'anatomy' from the plan to apply it anyway"
    )


def test_a_plan_the_paper_does_not_have(run: Run) -> None:
    run("inspect", VIT, "--plan", "paper/deit_base-11").is_refused(
        "the paper has no plan called 'paper/deit_base-11'; it has 18, such as paper/deit_base-10, "
        "paper/deit_base-8, paper/deit_base-10/map+te"
    )


def test_an_empty_plan(run: Run, tmp_path: Path) -> None:
    path = written(tmp_path, "{}")
    text = f"the plan {path} removes nothing; list block numbers under 'attention' or 'activation', or give a 'tail'"
    for command in (["inspect", VIT], ["bench", VIT], ["apply", VIT, "--out", tmp_path / "out"]):
        run(*command, "--plan", path).is_refused(text)
    assert not (tmp_path / "out").exists()


def test_a_plan_of_a_tail_alone(run: Run, tmp_path: Path) -> None:
    path, out = written(tmp_path, '{"tail": 2}'), tmp_path / "out"
    run("apply", VIT, "--plan", path, "--out", out).is_refused_like(".*tail of 2.*images.*")
    assert not out.exists()
    run("apply", VIT, "--plan", path, "--data", "demo", "--images", "8", "--out", out)
    assert require_record(hetdpt.load(out)).plan.tail == 2


def test_a_plan_that_is_missing_or_cannot_be_read(run: Run, tmp_path: Path) -> None:
    hint = "give a JSON file or a name such as paper/deit_base-10"
    missing = tmp_path / "none.json"
    text = f"the plan {missing} cannot be read: [Errno 2] No such file or directory: '{missing}'; {hint}"
    run("inspect", VIT, "--plan", missing).is_refused(text)
    text = f"the plan {tmp_path} cannot be read: [Errno 21] Is a directory: '{tmp_path}'; {hint}"
    run("inspect", VIT, "--plan", tmp_path).is_refused(text)
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    result = run("inspect", VIT, "--plan", tmp_path / "binary")
    result.is_refused_like(rf"the plan {tmp_path / 'binary'} cannot be read: 'utf-8' codec can't decode .*; {hint}")


def test_a_plan_that_is_no_plan(run: Run, tmp_path: Path) -> None:
    run("inspect", VIT, "--plan", written(tmp_path, "attention: [1]")).is_refused(
        "a plan is a JSON object, but got invalid JSON (Expecting value: line 1 column 1 (char 0)); see Plan.to_json"
    )
    run("inspect", VIT, "--plan", written(tmp_path, '{"atention": [1]}')).is_refused(
        f"a plan has the keys {', '.join(sorted(field.name for field in fields(Plan)))}, not atention"
    )


def test_a_removal_that_needs_images(run: Run, tmp_path: Path) -> None:
    path = written(tmp_path, '{"attention": [1], "removal": "calibrated"}')
    run("apply", VIT, "--plan", path, "--out", str(tmp_path / "out")).is_refused(
        "removal style 'constant' is fitted on images, but none were given; pass --data, call "
        "hetdpt.calibrate_(model, plan, batches), or use removal 'plain'"
    )
    assert "REMOVED" in run("inspect", VIT, "--plan", path).out  # what it will cost is known without images


# What is wrong with a model


def test_an_unknown_model_name(run: Run) -> None:
    kinds = "(models of HuggingFace start with hf:, saved ones are directories)"
    text = f"timm has no model called 'tset_vit'; did you mean test_vit, test_vit4, test_vit3? {kinds}"
    run("inspect", "tset_vit").is_refused(text)
    run("inspect", "zzzzzz").is_refused(f"timm has no model called 'zzzzzz'; timm.list_models() lists them {kinds}")


def test_a_device_that_is_not_there(run: Run, plan: Path) -> None:
    text = r"device 'tpu' is not available; available: (cuda, |mps, )*cpu"
    run("bench", VIT, "--plan", plan, "--device", "tpu").is_refused_like(text)
    run("inspect", VIT, "--latency", "--device", "tpu").is_refused_like(text)


def test_a_model_without_sites(run: Run, plan: Path, tmp_path: Path) -> None:
    text = (
        "ResNet has no removable layers: looked for residual branches around attention and around Linear - activation "
        "- Linear, found neither; give a vision transformer of timm or HuggingFace"
    )
    for command in (["inspect", "resnet18"], ["apply", "resnet18", "--plan", plan, "--out", tmp_path / "out"]):
        run(*command).is_refused(text)


def test_an_image_size_that_is_not_divisible(run: Run, hf: str) -> None:
    run("inspect", VIT, "--img-size", 100).is_refused(
        "image size 100 is not a multiple of the patch size 16; use 96 or 112"
    )
    run("inspect", VIT, "--img-size", 10).is_refused("image size 10 is not a multiple of the patch size 16; use 16")
    run("inspect", hf, "--img-size", 33).is_refused("image size 33 is not a multiple of the patch size 8; use 32 or 40")


def test_sizes_that_do_not_fit_the_weights_of_a_huggingface_directory(run: Run, hf: str) -> None:
    directory = re.escape(hf.removeprefix("hf:"))
    run("inspect", hf, "--num-classes", 7).is_refused_like(rf".*{directory}.* num_classes.*")
    run("inspect", hf, "--img-size", 40).is_refused_like(rf".*{directory}.* img_size.*")


def test_a_huggingface_directory_without_whole_weights(run: Run, hf: str, tmp_path: Path) -> None:
    source = Path(hf.removeprefix("hf:"))
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    run("inspect", f"hf:{tmp_path}").is_refused_like(rf"hf:{tmp_path} cannot be loaded: .+")
    (tmp_path / "model.safetensors").write_bytes((source / "model.safetensors").read_bytes()[:500])
    run("inspect", f"hf:{tmp_path}").is_refused_like(rf"hf:{tmp_path} cannot be loaded: .+")


def test_a_saved_model_brings_its_own_sizes(run: Run, saved: Path, plan: Path, weights: Path, tmp_path: Path) -> None:
    text = f"{saved} is a saved model with its own weights and sizes; leave out"
    run("inspect", saved, "--num-classes", 7).is_refused(f"{text} num_classes")
    options = ("--weights", weights, "--img-size", 32)
    run("apply", saved, "--plan", plan, "--out", tmp_path / "out", *options).is_refused(f"{text} weights, img_size")


def test_a_directory_without_a_recipe(run: Run, tmp_path: Path) -> None:
    text = f"{tmp_path} is a directory without hetdpt.json; give one written by hetdpt.save, or a model's name"
    run("inspect", tmp_path).is_refused(text)
    run("export", tmp_path, "--out", tmp_path / "model.onnx").is_refused(text)
    run("push", tmp_path, "someone/pruned").is_refused(
        f"{tmp_path} has no hetdpt.json; save the model with hetdpt.save first"
    )
    assert list(tmp_path.iterdir()) == []


def test_a_saved_model_that_was_altered(run: Run, saved: Path, tmp_path: Path) -> None:
    for file in saved.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    recipe = tmp_path / "hetdpt.json"
    recipe.write_text(
        recipe.read_text().replace('"num_classes": 1000', '"num_classes": 10').replace("test_vit", "test_vit2")
    )
    text = f"{recipe} was altered or damaged since it was saved; save the model again"
    run("export", tmp_path, "--out", tmp_path / "model.onnx").is_refused(text)


def test_no_huggingface_model(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)  # read from the environment on import
    result = run("inspect", "hf:vitt")
    result.is_refused_like(
        r"hf:vitt is neither a directory with a config.json, nor a model type \(did you mean hf:vit\?\), nor available "
        r"from the hub: .+"
    )


# What is wrong with a checkpoint


class Code:
    """Pickled, it writes a file when a careless reader loads it."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.write_text, (self.trace, "executed")


def test_a_checkpoint_of_other_shapes(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "seven.pth"
    torch.save(timm.create_model(VIT, num_classes=7).state_dict(), path)
    run("inspect", VIT, "--weights", path).is_refused(
        f"{path} does not fit the model: head.weight should be (1000, 64) and is (7, 64); "
        "check the model's name, number of classes and image size"
    )
    assert run("inspect", VIT, "--weights", path, "--num-classes", 7).code == 0


def test_a_checkpoint_of_another_model(run: Run, state: dict[str, torch.Tensor], tmp_path: Path) -> None:
    path = tmp_path / "state.pth"
    torch.save({"a": torch.zeros(1)}, path)
    missing = f"{path} does not fit the model: cls_token is missing; was it saved from another model?"
    run("inspect", VIT, "--weights", path).is_refused(missing)
    torch.save(state | {"extra": torch.zeros(1)}, path)
    run("inspect", VIT, "--weights", path).is_refused(
        f"{path} does not fit the model: it has extra, which the model lacks"
    )


def test_a_checkpoint_that_is_missing(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "none.pth"
    run("inspect", VIT, "--weights", path).is_refused(
        f"the checkpoint {path} does not exist; give a .safetensors or .pth file"
    )


@pytest.mark.parametrize("suffix", ["safetensors", "pth"])
@pytest.mark.parametrize("kept", [0.0, 0.5, 0.99])
def test_a_truncated_checkpoint(
    run: Run, state: dict[str, torch.Tensor], tmp_path: Path, suffix: str, kept: float
) -> None:
    path = tmp_path / f"vit.{suffix}"
    save_file(state, path) if suffix == "safetensors" else torch.save(state, path)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(kept * len(whole))])
    run("inspect", VIT, "--weights", path).is_refused_like(rf"the checkpoint {path} cannot be read: .+")


@pytest.mark.parametrize("suffix", ["safetensors", "pth"])
def test_text_is_no_checkpoint(run: Run, tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"text.{suffix}"
    path.write_text("hello, I am no checkpoint")
    run("inspect", VIT, "--weights", path).is_refused_like(rf"the checkpoint {path} cannot be read: .+")


@pytest.mark.parametrize("content", [[1, 2, 3], torch.zeros(3), 1, {"cls_token": 3}, {"state_dict": [1]}], ids=str)
def test_other_things_are_no_checkpoint(run: Run, tmp_path: Path, content: Any) -> None:
    path = tmp_path / "thing.pth"
    torch.save(content, path)
    run("inspect", VIT, "--weights", path).is_refused_like(rf"the checkpoint {path} .+")


@pytest.mark.parametrize("protocol", [None, 2, 4])
def test_code_in_a_checkpoint_is_not_run(run: Run, tmp_path: Path, protocol: int | None) -> None:
    path, trace = tmp_path / "code.pth", tmp_path / "trace"
    pickle.loads(pickle.dumps(Code(trace)))
    trace.unlink()  # it was there: the code would have run
    if protocol is None:
        torch.save({"state_dict": Code(trace)}, path)
    else:
        path.write_bytes(pickle.dumps({"state_dict": Code(trace)}, protocol))
    result = run("inspect", VIT, "--weights", path)
    assert not trace.exists()
    result.is_refused_like(rf"the checkpoint {path} cannot be read: .+")
    assert "weights_only" not in result.err  # the user has no such option, and should not be told to trust the file


# What is wrong with the place to write to


def test_an_output_directory_that_exists(run: Run, plan: Path, tmp_path: Path) -> None:
    text = f"{tmp_path} exists already; give another path, or allow overwriting"
    run("apply", "no_such_model", "--plan", plan, "--out", tmp_path).is_refused(text)  # before any work
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


def test_an_output_place_below_a_file(run: Run, plan: Path, saved: Path) -> None:
    for command in (
        ["apply", VIT, "--plan", plan, "--out", plan / "out"],
        ["export", saved, "--out", plan / "out.onnx"],
    ):
        run(*command).is_refused(
            f"{command[-1]} cannot be written, because {plan} is a file, not a directory; give another path"
        )


def test_the_installed_command_says_one_sentence_and_no_traceback(tmp_path: Path) -> None:
    path = written(tmp_path, '{"activation": [6]}')
    result = run_script("apply", VIT, "--plan", path, "--out", tmp_path / "out")
    result.is_refused("the plan removes activation 6 but this model has blocks 0-5; was it made for a deeper model?")
    assert not (tmp_path / "out").exists()


def test_an_option_out_of_range_is_refused_with_a_hint(run: Run) -> None:
    result = run("inspect", VIT, "--num-classes", 0)
    assert result.code == 2
    assert result.err.startswith("error: --num-classes: expected at least 1, got 0; hetdpt inspect --help ")
