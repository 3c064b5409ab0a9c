"""Removal in one shot, from images to a saved directory: what it leaves behind, and that a kill changes nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import test_cli
import test_training_cli
import torch
from PIL import Image
from safetensors.torch import load_file
from test_cli import SCRIPT, Run
from test_selection import prices_of
from torch import Tensor, nn

import hetdpt
from hetdpt.core.errors import DataError, FileError, PlanError
from hetdpt.core.modules import clone
from hetdpt.core.plan import with_class_token
from hetdpt.core.styles import ClassToken, ClassTokenChoice
from hetdpt.flow import oneshot
from hetdpt.flow.oneshot import OneShotResult, OneShotStep, oneshot_into, partial_of
from hetdpt.measurement.agreement import measure_damage, relative_difference
from hetdpt.results import KeptBlock, Price, Prices, Ratio
from hetdpt.selection import goal as goals
from hetdpt.selection.goal import OneShotConfig
from hetdpt.store.atomic import sha256
from hetdpt.surgery.calibrate import calibrate_, remove_
from hetdpt.surgery.record import require_record

run = test_cli.run  # the fixture
FILES = ["README.md", "config.json", "hetdpt.json", "model.safetensors", "oneshot.json", "plan.json"]
SIZE = (3, 16, 16)
SMALL = ("--data", "demo", "--images", 24, "--judge-images", 12, "--batch-size", 8)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oneshot, "TIMING_SECONDS", 0.0)  # the five rounds that are the least


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with saved models."""
    folder = tmp_path_factory.mktemp("oneshot")
    test_training_cli.build(folder / "dense")
    test_training_cli.build(folder / "headless", num_classes=0)
    return folder


def images(count: int, seed: int = 0) -> list[Tensor]:
    return list(torch.randn(count, *SIZE, generator=torch.Generator().manual_seed(seed)).split(8))


BATCHES, JUDGE = images(24), images(12, seed=1)


def shoot(out: Path, dense: nn.Module, config: OneShotConfig, **options: Any) -> OneShotResult:
    return oneshot_into(out, dense, BATCHES, JUDGE, config, **options)


def names(directory: Path) -> list[str]:
    return sorted(file.name for file in directory.iterdir())


@pytest.mark.parametrize(
    "config",
    [
        OneShotConfig(layers=3),
        OneShotConfig(layers=2, removal=("linear", "calibrated"), kind="attention"),
        OneShotConfig(layers=2, removal=("position", "identity")),
        OneShotConfig(layers=3, removal="plain"),
        OneShotConfig(layers=2, removal="authors", kind="activation"),
    ],
    ids=str,
)
def test_what_is_saved_is_what_was_measured(tmp_path: Path, dense: nn.Module, config: OneShotConfig) -> None:
    found = shoot(tmp_path / "out", dense, config)
    assert names(tmp_path) == ["out"]  # nothing is left beside it
    assert names(tmp_path / "out") == FILES
    loaded = hetdpt.load(tmp_path / "out")
    assert measure_damage(dense, loaded, JUDGE) == found.damage
    assert hetdpt.count_params(loaded) == found.costs["pruned"].params
    assert hetdpt.count_macs(loaded, SIZE) == found.costs["pruned"].macs < found.costs["dense"].macs
    assert found.costs["pruned"].params < found.costs["dense"].params or found.plan.class_token == "keep"
    assert [site for site in hetdpt.sites(dense) if site not in hetdpt.sites(loaded)] == sorted(
        (choice.move for choice in found.choices), key=hetdpt.sites(dense).index
    )
    assert len(found.plan) == config.layers
    plan = hetdpt.Plan.from_json((tmp_path / "out" / "plan.json").read_text())
    assert (plan, plan.fits) == (found.plan, found.plan.fits)
    assert len(plan.fits) == sum(bool(plan.style_of(choice.move.kind).fit) for choice in found.choices)
    written = json.loads((tmp_path / "out" / "oneshot.json").read_text())
    assert written == json.loads(json.dumps(asdict(found)))
    assert (found.images, found.damage_unit) == ({"calibration": 24, "judge": 12}, "nats")


def test_it_is_the_whole_plan_calibrated_in_order_from_the_dense_model(tmp_path: Path, dense: nn.Module) -> None:
    found = shoot(tmp_path / "out", dense, OneShotConfig(layers=3))
    expected = hetdpt.merge_(calibrate_(hetdpt.trim_(dense), found.plan, BATCHES))  # fitted to the tokens that are read
    assert relative_difference(expected, hetdpt.load(tmp_path / "out"), SIZE) == 0


def test_the_model_is_trimmed_unless_that_is_turned_off(tmp_path: Path, dense: nn.Module) -> None:
    trimmed, whole = (shoot(tmp_path / str(on), dense, OneShotConfig(layers=2, trim=on)) for on in (True, False))
    models = [hetdpt.load(tmp_path / str(on)) for on in (True, False)]
    assert [require_record(model).is_trimmed for model in models] == [True, False]
    assert trimmed.plan == whole.plan
    assert trimmed.costs["pruned"].macs == hetdpt.count_macs(models[0], SIZE) < whole.costs["pruned"].macs
    assert relative_difference(*models, SIZE) < 1e-5  # float32 rounding of four blocks


def test_a_model_that_cannot_be_trimmed_is_saved_with_a_note(tmp_path: Path) -> None:
    dense = hetdpt.load(test_training_cli.build(tmp_path / "dense", global_pool="max"))
    found = shoot(tmp_path / "out", dense, OneShotConfig(layers=1))
    [note] = found.notes
    assert note.startswith("not trimmed: this model cannot be trimmed: its output depends on patches")
    assert not require_record(hetdpt.load(tmp_path / "out")).is_trimmed


@pytest.mark.parametrize("class_token", ["auto", "keep", "share"])
def test_the_class_token_keeps_its_ffn_where_that_does_less_damage(
    tmp_path: Path, dense: nn.Module, class_token: ClassTokenChoice
) -> None:
    found = shoot(tmp_path / "out", dense, OneShotConfig(layers=2, kind="activation", class_token=class_token))
    damages = {
        choice: measure_damage(
            dense,
            remove_(clone(dense), replace(found.plan, removal=with_class_token("calibrated", choice)), BATCHES),
            JUDGE,
        )
        for choice in get_args(ClassToken)
    }
    best = min(damages, key=damages.__getitem__)
    assert found.plan.class_token == (best if class_token == "auto" else class_token)
    assert found.damage == pytest.approx(damages[found.plan.class_token], rel=1e-4)


def test_a_model_without_a_head_is_judged_by_its_features(tmp_path: Path, home: Path) -> None:
    dense = hetdpt.load(home / "headless")
    found = shoot(tmp_path / "out", dense, OneShotConfig(layers=2))
    with torch.no_grad():
        pairs = [(dense(batch), hetdpt.load(tmp_path / "out")(batch)) for batch in JUDGE]
    lost = sum((one - other).double().square().sum() for one, other in pairs)
    assert found.damage == pytest.approx(float(lost / sum(one.double().square().sum() for one, _ in pairs)), rel=1e-5)
    assert found.damage_unit == "relative squared error"


def test_a_pruned_model_can_lose_more(tmp_path: Path, dense: nn.Module) -> None:
    first = shoot(tmp_path / "one", dense, OneShotConfig(layers=1))
    second = shoot(tmp_path / "two", hetdpt.load(tmp_path / "one"), OneShotConfig(layers=2))
    assert {*first.plan.attention} <= {*second.plan.attention}
    assert (len(second.plan), len(second.choices)) == (3, 2)
    with pytest.raises(PlanError, match="pruned with removal .*calibrated.* and the plan says 'plain'; use the same"):
        shoot(tmp_path / "three", hetdpt.load(tmp_path / "one"), OneShotConfig(layers=2, removal="plain"))
    assert names(tmp_path) == ["one", "two"]


class KillError(Exception):
    """Stands for a kill."""


def stopped(out: Path, dense: nn.Module, config: OneShotConfig, after: int) -> list[OneShotStep]:
    """Begin, and end after so many choices."""
    steps: list[OneShotStep] = []

    def watch(step: OneShotStep) -> None:
        steps.append(step)
        if len(steps) == after:
            raise KillError

    with pytest.raises(KillError):
        shoot(out, dense, config, watch=watch)
    return steps


def tail_prices(*_: Any, **__: Any) -> Prices:
    """Return prices by which one more block of a tail saves 20 of 100 ms, and a layer 4."""
    four, nothing = Price(0, 0, 4.0), Price(0, 0, 0.0)
    kept = tuple(KeptBlock(Price(0, 0, 20.0), nothing, nothing, nothing, nothing) for _ in range(3))
    return Prices(Price(1, 1, 100.0), (four,) * 3, (four,) * 3, "cpu, float32, batch 8", kept)


@pytest.mark.parametrize("removal", ["calibrated", "plain"])
def test_a_tail_may_be_given(tmp_path: Path, dense: nn.Module, removal: str) -> None:
    found = shoot(tmp_path / "out", dense, OneShotConfig(layers=1, tail=2, removal=removal))
    loaded = hetdpt.load(tmp_path / "out")
    assert (found.plan.tail, len(found.plan), found.plan.is_any_fitted) == (2, 1, removal == "calibrated")
    assert relative_difference(loaded, remove_(dense, found.plan, BATCHES), SIZE) < 1e-5  # trimmed and merged


def test_an_impossible_tail_is_refused_at_once(tmp_path: Path, dense: nn.Module) -> None:
    with pytest.raises(PlanError, match=r"tail of 9 blocks but this model has 3 blocks; give a tail of at most 3"):
        shoot(tmp_path / "out", dense, OneShotConfig(layers=1, tail=9))
    mean = hetdpt.load(test_training_cli.build(tmp_path / "mean", global_pool="avg"))
    with pytest.raises(PlanError, match="this model cannot have a tail of 2: its output depends on patches"):
        shoot(tmp_path / "out", mean, OneShotConfig(layers=1, tail=2))
    with pytest.raises(PlanError, match="tail of a plan is how many of the last blocks it has, such as 2, not -1"):
        OneShotConfig(layers=1, tail=-1)
    assert names(tmp_path) == ["mean"]


@pytest.mark.parametrize("after", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_going_on_gives_the_same_model(tmp_path: Path, dense: nn.Module, after: int) -> None:
    config = OneShotConfig(layers=4)
    whole = shoot(tmp_path / "whole", dense, config)
    steps = stopped(tmp_path / "out", dense, config, after)
    assert names(tmp_path) == ["out.partial", "whole"]
    later: list[OneShotStep] = []
    found = shoot(tmp_path / "out", dense, config, watch=later.append)
    assert names(tmp_path) == ["out", "whole"]
    assert [step.number for step in steps + later] == [1, 2, 3, 4]
    assert (found.plan, found.choices, found.damage) == (whole.plan, whole.choices, whole.damage)
    assert sha256(tmp_path / "out" / "model.safetensors") == sha256(tmp_path / "whole" / "model.safetensors")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"layers": 3}, "layers = 4, not 3"),
        ({"removal": ("linear", "calibrated")}, 'removal = "calibrated", not ["linear", "calibrated"]'),
        ({"kind": "attention"}, 'kind = null, not "attention"'),
    ],
)
def test_something_else_is_not_gone_on_with(
    tmp_path: Path, dense: nn.Module, change: dict[str, Any], sentence: str
) -> None:
    config = OneShotConfig(layers=4)
    stopped(tmp_path / "out", dense, config, 1)
    with pytest.raises(FileError) as error:
        shoot(tmp_path / "out", dense, replace(config, **change))
    partial = partial_of(tmp_path / "out")
    rest = "give the same to resume, or another directory"
    assert str(error.value) == f"{partial} was started with {sentence}; {rest}"


def test_other_images_or_weights_are_not_gone_on_with(tmp_path: Path, dense: nn.Module, home: Path) -> None:
    config = OneShotConfig(layers=2)
    stopped(tmp_path / "out", dense, config, 1)
    with pytest.raises(FileError, match=r'judge images = "12 with checksum \w+", not "24 with checksum \w+"; give the'):
        oneshot_into(tmp_path / "out", dense, BATCHES, BATCHES, config)
    nn.init.ones_(dense.get_parameter("head.bias"))
    with pytest.raises(FileError, match=r"was started with model = .*; give the same to resume, or another"):
        shoot(tmp_path / "out", dense, config)


def test_refusals_leave_nothing_behind(tmp_path: Path, dense: nn.Module) -> None:
    with pytest.raises(PlanError, match="the goal is 7 layers removed, but this model has 6 that can be removed"):
        shoot(tmp_path / "out", dense, OneShotConfig(layers=7))
    with pytest.raises(DataError, match="once for each layer, but got a one-shot iterator"):
        oneshot_into(tmp_path / "out", dense, BATCHES, iter(JUDGE), OneShotConfig(layers=1))
    assert names(tmp_path) == []


def test_what_is_there_is_not_overwritten_by_chance(tmp_path: Path, dense: nn.Module) -> None:
    shoot(tmp_path / "out", dense, OneShotConfig(layers=1))
    before = sha256(tmp_path / "out" / "oneshot.json")
    with pytest.raises(FileError, match="out exists already; give another path, or allow overwriting"):
        shoot(tmp_path / "out", dense, OneShotConfig(layers=2))
    assert (names(tmp_path), sha256(tmp_path / "out" / "oneshot.json")) == (["out"], before)
    shoot(tmp_path / "out", dense, OneShotConfig(layers=2), overwrite=True)
    assert len(hetdpt.sites(hetdpt.load(tmp_path / "out"))) == 4


# layers until a speedup is reached; test_mixed.py has what is removed if more than layers may be

BY_SPEED: dict[str, Any] = {"trim": False}  # of models that are not trimmed layers alone are removed


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch, dense: nn.Module) -> list[float]:
    """Return the speedups that will be measured, one after another; each site saves 10 of 100 ms."""
    measured: list[float] = []
    measure = oneshot.measure_throughput

    def timed(models: dict[str, nn.Module], *args: Any, **options: Any) -> Any:
        value = measured.pop(0)
        return replace(measure(models, *args, **options), speedup={"pruned": Ratio(value, value, value)})

    monkeypatch.setattr(goals, "measure_prices", lambda *_, **__: prices_of([10.0] * 3, [10.0] * 3))
    monkeypatch.setattr(oneshot, "measure_throughput", timed)
    return measured


def test_a_speedup_that_is_measured_at_once(tmp_path: Path, dense: nn.Module, clock: list[float]) -> None:
    clock += [1.3]
    steps: list[OneShotStep] = []
    found = shoot(tmp_path / "out", dense, OneShotConfig(speedup=1.2, **BY_SPEED), watch=steps.append)
    assert [(step.number, step.wanted) for step in steps] == [(1, 1.2), (2, 1.2)]
    assert [step.reached for step in steps] == pytest.approx([100 / 90, 100 / 80])
    assert (found.wanted_speedup, found.speed.speedup["pruned"].value, len(found.plan)) == (1.2, 1.3, 2)


def test_where_less_is_measured_more_layers_go(tmp_path: Path, dense: nn.Module, clock: list[float]) -> None:
    clock += [1.1, 1.25]  # 100 / 1.1 - 100 / 1.2 is 7.6 ms, one layer more
    found = shoot(tmp_path / "out", dense, OneShotConfig(speedup=1.2, **BY_SPEED))
    assert len(found.plan) == len(found.choices) == 3
    assert len(found.plan.fits) == 3
    assert clock == []


def test_after_a_few_attempts_what_is_measured_is_said(tmp_path: Path, dense: nn.Module, clock: list[float]) -> None:
    clock += [1.1, 1.15, 1.19]
    found = shoot(tmp_path / "out", dense, OneShotConfig(speedup=1.2, **BY_SPEED))
    assert (clock, len(found.plan), found.speed.speedup["pruned"].value) == ([], 4, 1.19)


def test_the_times_of_layers_are_kept_for_going_on(
    tmp_path: Path, dense: nn.Module, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock += [1.3]
    config = OneShotConfig(speedup=1.3, **BY_SPEED)
    stopped(tmp_path / "out", dense, config, 1)
    monkeypatch.setattr(goals, "measure_prices", None)  # would not be called in vain
    assert len(shoot(tmp_path / "out", dense, config).plan) == 3


def test_speed_of_this_device(tmp_path: Path, dense: nn.Module) -> None:
    found = shoot(tmp_path / "out", dense, OneShotConfig(speedup=1.01, **BY_SPEED))
    assert {choice.gain > 0 for choice in found.choices} == {True}  # milliseconds
    with pytest.raises(
        PlanError, match=r"a speedup of 99 is out of reach: by the costs .* all 6 layers .* give a speedup"
    ):
        shoot(tmp_path / "far", dense, OneShotConfig(speedup=99, **BY_SPEED))
    assert names(tmp_path) == ["out"]


# the command


def test_oneshot_in_words(run: Run, home: Path, tmp_path: Path) -> None:
    result = run("oneshot", home / "dense", *SMALL, "--layers", 2, "--out", tmp_path / "out")
    assert (result.code, result.err) == (0, "")
    lines = result.out.splitlines()
    chosen = json.loads((tmp_path / "out" / "oneshot.json").read_text())["choices"]
    for number, choice in enumerate(chosen, 1):
        layer = f"{choice['move']['kind']} {choice['move']['block']}"
        assert lines[number - 1] == f"{number}/2: {layer}, damage {choice['damage']:.3g}"
        assert sum(choice["move"]["path"] in line for line in lines) == 1
    assert "damage so far" in result.out
    assert "x fewer MACs" in result.out
    assert "(cpu, float32, batch 8)" in result.out
    assert f"saved to {tmp_path / 'out'} after " in lines[-1]
    assert " nats on 12 images" in lines[-2]


def test_oneshot_as_json(run: Run, home: Path, tmp_path: Path) -> None:
    options = ("--layers", 1, "--removal", "linear,calibrated", "--kind", "attention", "--json")
    result = run("oneshot", home / "dense", *SMALL, *options, "--out", tmp_path / "out")
    assert (result.code, result.err) == (0, "")
    written = json.loads((tmp_path / "out" / "oneshot.json").read_text())
    assert result.values == {"directory": str(tmp_path / "out"), **written}
    assert (written["plan"]["removal"], len(written["plan"]["attention"])) == (["linear", "calibrated"], 1)
    assert written["plan"]["fits"][0]["style"] == "linear"


def test_oneshot_by_speed_in_words(run: Run, home: Path, tmp_path: Path, clock: list[float], dense: nn.Module) -> None:
    clock += [1.11, 1.15, 1.17]
    result = run("oneshot", home / "dense", *SMALL, "--speedup", 1.2, "--no-trim", "--out", tmp_path / "out")
    assert (result.code, result.err) == (0, "")
    assert ", 1.111x of 1.2x by the time of each layer\n2: " in result.out
    assert "\nnote: the goal was a speedup of 1.2, but 1.170 was reached\n" in result.out


def test_a_folder_of_images_without_labels_one_of_them_damaged(run: Run, home: Path, tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 255, (20, 20, 24, 3), dtype=np.uint8)
    (tmp_path / "images").mkdir()
    for number, image in enumerate(pixels):
        Image.fromarray(image).save(tmp_path / "images" / f"{number:02d}.png")
    (tmp_path / "images" / "03.png").write_bytes(b"no image")
    options = ("--data", tmp_path / "images", "--layers", 1, "--out", tmp_path / "out")
    result = run("oneshot", home / "dense", *options)
    assert result.code == 0
    line = "20 images are too few for 256 and 128 others; damage is measured on the same images"
    assert result.out.splitlines()[0] == line
    assert json.loads((tmp_path / "out" / "oneshot.json").read_text())["images"] == {"calibration": 19, "judge": 19}


@pytest.mark.slow
def test_a_kill_loses_no_choice(run: Run, home: Path, tmp_path: Path) -> None:
    options = ("oneshot", home / "dense", "--data", "demo", "--images", 400, "--layers", 4)
    command = [str(SCRIPT), *map(str, options), "--out", str(tmp_path / "out")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}) as it:
        assert it.stdout is not None
        line = it.stdout.readline()
        os.kill(it.pid, signal.SIGKILL)
    assert line.startswith("1/4: ")
    assert names(tmp_path) == ["out.partial"]
    result = run(*options, "--out", tmp_path / "out")
    assert result.code == 0
    assert result.out.splitlines()[0] == f"resuming {tmp_path / 'out'}.partial"
    assert "\n1/4: " not in result.out
    assert run(*options, "--out", tmp_path / "whole", "--quiet").out.startswith(line)
    assert names(tmp_path) == ["out", "whole"]
    plans = [(tmp_path / name / "plan.json").read_text() for name in ("out", "whole")]
    assert plans[0] == plans[1]
    weights = [load_file(tmp_path / name / "model.safetensors") for name in ("out", "whole")]
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ((), "expected exactly one goal, --layers 8 or --speedup 1.5; got none"),
        (
            ("--layers", 2, "--speedup", 1.5),
            "expected exactly one goal, --layers 8 or --speedup 1.5; got layers and speedup",
        ),
        (("--layers", 7), "the goal is 7 layers removed, but this model has 6 that can be removed"),
        (("--layers", 1, "--kind", "norm"), "kind is 'norm'; expected attention or activation"),
        (
            ("--layers", 1, "--removal", "none"),
            "removal is one of plain, norm, authors, calibrated or a pair (attention style of skip, norm, constant, "
            "position, linear; activation style of identity, calibrated, identity-keep, calibrated-keep, drop), "
            "not 'none'",
        ),
    ],
)
def test_bad_requests_are_one_sentence(
    run: Run, home: Path, tmp_path: Path, options: tuple[object, ...], sentence: str
) -> None:
    run("oneshot", home / "dense", *SMALL, *options, "--out", tmp_path / "out").is_refused(sentence)
    assert names(tmp_path) == []
