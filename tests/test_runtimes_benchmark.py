"""The runtimes of benchmarks/runtimes.py compute what eager torch computes, and times become the right ratios."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
import runtimes
import torch
from evidence import Recorder, Results
from families import named
from runtimes import RUNTIMES, Runtime, profiled, row_of, times_in
from torch import Tensor, nn

import hetdpt
from hetdpt.core.plan import Plan
from hetdpt.measurement.speed import Rounds


@pytest.fixture(scope="module")
def models() -> dict[str, nn.Module]:
    """A ViT of three blocks, dense, and what a plan that takes some of both kinds makes of it."""
    family, plan = named("vit_tiny_patch16_224"), Plan(attention=(0,), activation=(0, 1))
    return {
        "dense": family.build(),
        "pruned": hetdpt.merge_(hetdpt.prune_(family.build(), plan)),
        "folded": hetdpt.merge_(hetdpt.prune_(family.build(), plan), fold_norms=True),
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The place of ONNX files, which several runtimes read."""
    return tmp_path_factory.mktemp("runtimes")


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNTIMES)
@torch.inference_mode()
def test_every_runtime_computes_what_eager_torch_computes(
    name: str, models: dict[str, nn.Module], folder: Path
) -> None:
    images = named("vit_tiny_patch16_224").images(4)
    expected = {variant: model(images) for variant, model in models.items()}
    assert difference(expected["pruned"], expected["dense"]) > 3 * runtimes.EIGHT_BITS  # so that a mix-up is seen
    some = ("pruned",) if name == "torch.compile" else models  # the compiler takes its time
    for variant in some:
        place = folder / variant
        place.mkdir(exist_ok=True)
        run = RUNTIMES[name].prepare(models[variant], tuple(images.shape), place)
        found = run(images)
        assert difference(found, expected[variant]) <= RUNTIMES[name].tolerance
        assert difference(run(-images), found) > 1e-3  # it looks at the images
    torch.compiler.reset()


def difference(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).abs().max() / expected.abs().max()).item()


def test_int8_is_int8_and_no_rounding_of_float32(models: dict[str, nn.Module], tmp_path: Path) -> None:
    import onnx

    kinds = {node.op_type for node in onnx.load(runtimes.int8_file(models["pruned"], tmp_path)).graph.node}
    assert {"MatMulInteger", "DynamicQuantizeLinear"} <= kinds
    assert "ConvInteger" not in kinds


class Sleeper(nn.Module):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def forward(self, images: Tensor) -> Tensor:
        time.sleep(self.seconds)
        return images


def test_a_runtime_takes_turns_with_eager_torch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def twice_as_fast(model: nn.Module, shape: runtimes.Shape, folder: Path) -> runtimes.Run:
        assert folder.is_dir()
        assert shape == (2, 3, 4, 4)
        return Sleeper(model.seconds / 2)  # type: ignore[operator, return-value]

    monkeypatch.setitem(RUNTIMES, "twice as fast", Runtime(twice_as_fast, 0.0))
    models: dict[str, nn.Module] = {"dense": Sleeper(0.016), "pruned": Sleeper(0.008), "folded": Sleeper(0.008)}
    times = times_in("twice as fast", models, torch.zeros(2, 3, 4, 4), Rounds(7, 1, settle=True), tmp_path)
    assert set(times) == {"dense", "pruned", "folded", "eager dense", "eager pruned"}
    values = row_of(times, {"dense": 160, "pruned": 100, "folded": 100})
    assert values["rounds"] == 7
    assert values["total_speedup"][0] > values["speedup"][0] > 1.3  # 4 and 2 by construction; sleep is not exact
    assert values["dense_runtime_speedup"][0] > 1.3


def test_efficiency_is_the_speedup_over_the_ratio_of_macs() -> None:
    times = {"dense": np.array([0.3, 0.3]), "pruned": np.array([0.2, 0.2]), "folded": np.array([0.15, 0.15])}
    values = row_of(times, {"dense": 160, "pruned": 100, "folded": 80})
    assert values["speedup"] == [1.5, 1.5, 1.5]
    assert values["efficiency"] == [0.9375, 0.9375, 0.9375]
    assert values["folded_efficiency"] == [1.0, 1.0, 1.0]
    assert values["dense_milliseconds"] == [300.0, 300.0, 300.0]
    assert not any(name.startswith("total") for name in values)  # eager torch has nothing to be compared with


def test_the_profile_knows_every_operation(models: dict[str, nn.Module]) -> None:
    rows = dict(profiled(models, named("vit_tiny_patch16_224").images(), runs=1))
    calls = {kind: (row["dense_calls"], row["pruned_calls"], row["folded_calls"]) for kind, row in rows.items()}
    assert calls["GELU"] == (3, 1, 1)
    assert calls["LayerNorm"] == (7, 6, 6)
    assert calls["linear 48 to 48"] == (3, 4, 4)  # what attention ends with, and the merged ones
    assert calls["linear 48 to 192"] == (3, 1, 1)
    assert calls["attention products and softmax"] == (3, 2, 2)
    assert all(row["pruned_milliseconds"] >= 0 for row in rows.values())
    for name, model in models.items():  # no multiply-accumulate is left out
        assert sum(row[f"{name}_macs"] for row in rows.values()) == 2 * hetdpt.count_macs(model, (3, 32, 32))


def test_what_is_measured_is_not_measured_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sizes = {"depth": 3, "embed_dim": 48, "num_heads": 3, "img_size": 32, "patch_size": 8}
    tiny = runtimes.variants_of
    monkeypatch.setitem(runtimes.PLANS, "vit_tiny_patch16_224", Plan(attention=(0,), activation=(1,)))
    monkeypatch.setattr(runtimes, "variants_of", lambda name: tiny(name, **sizes))
    recorder = Recorder(tmp_path / "runtimes.json")
    for _ in range(2):
        runtimes.measure(recorder, "vit_tiny_patch16_224", ["eager"], [1, 2], Rounds(3, 1))
        runtimes.explain(recorder, "vit_tiny_patch16_224", [2], runs=1)
        found = Results.read(recorder.file)
        assert [row.key["batch"] for row in found.where(runtime="eager")] == [1, 2]
        assert found.find(model="vit_tiny_patch16_224", batch=2, operation="all")
        monkeypatch.setattr(runtimes, "times_in", None)  # the second time nothing is to be done
        monkeypatch.setattr(runtimes, "profiled", None)


@torch.no_grad()
def test_weights_of_merged_layers_are_contiguous(models: dict[str, nn.Module]) -> None:
    for variant in ("pruned", "folded"):
        assert all(parameter.is_contiguous() for parameter in models[variant].parameters())
