"""Fewer tokens from the command line: what is printed and saved, studies that kills do not harm, bad input refused."""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import test_cli
import test_training_cli
import torch
from PIL import Image
from test_cli import SCRIPT, Run
from torch import nn

import hetdpt
from hetdpt.core.errors import FileError, MeasureError, ModelError, PlanError
from hetdpt.core.modules import clone
from hetdpt.core.plan import Plan
from hetdpt.core.tokens import Tokens
from hetdpt.data.sources import open_data
from hetdpt.reduce.tokens.reduce import reduce_tokens_
from hetdpt.report.tokens import draw
from hetdpt.store.atomic import find_sealed_json, write_sealed_json
from hetdpt.studies.tokens import TokensConfig, measure_tokens, tokens_into

run = test_cli.run  # the fixture
DATA = open_data("demo", splits=("val",))
QUICK = ("--data", "demo", "--runs", 2, "--batch", 2, "--workers", 0)
KEYS = {
    "model", "attention", "activation", "method", "r", "schedule", "tokens_left", "macs", "params", "top1", "low",
    "high", "images", "throughput", "throughput_spread", "batch", "device", "dtype", "runs", "speedup", "speedup_low",
    "speedup_high",
}  # fmt: skip
TIMES = ("throughput", "throughput_spread", "speedup", "speedup_low", "speedup_high")
STUDY = "several --r, or a model --beside, make a study of accuracy and speed in a run directory"
TOKENS = 17  # of an image of 16 x 16 in patches of 4 x 4, with the class token


def config(**changes: Any) -> TokensConfig:
    return TokensConfig(**{"r": (0, 2), "batch": 2, "runs": 2, **changes})


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with a model of three blocks, and what two pruned layers leave of it."""
    folder = tmp_path_factory.mktemp("tokens")
    dense = hetdpt.load(test_training_cli.build(folder / "dense"))
    hetdpt.save(hetdpt.merge_(hetdpt.prune_(dense, Plan(attention=(1,), activation=(2,)))), folder / "pruned")
    return folder


@pytest.fixture(scope="module")
def whole(home: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a study that nobody disturbed."""
    out = tmp_path_factory.mktemp("study") / "whole"
    list(tokens_into(out, {name: hetdpt.load(home / name) for name in ("dense", "pruned")}, DATA, config()))
    return out


def points_in(directory: Path) -> list[dict[str, Any]]:
    points: list[dict[str, Any]] = json.loads((directory / "tokens.json").read_text())["points"]
    return points


def untimed(points: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in point.items() if name not in TIMES} for point in points]


# one number of tokens


def test_one_number_is_measured_and_saved(run: Run, home: Path, models: dict[str, nn.Module], tmp_path: Path) -> None:
    result = run("tokens", home / "pruned", "--r", 2, *QUICK, "--out", tmp_path / "fast", "--json")
    assert (result.code, result.err) == (0, "")
    assert result.values["directory"] == str(tmp_path / "fast")
    before, after = result.values["points"]
    assert set(before) == set(after) == KEYS
    assert [(one["r"], one["tokens_left"]) for one in (before, after)] == [(0, TOKENS), (2, TOKENS - 2 * 2)]
    assert after["macs"] < before["macs"]
    assert before["params"] == after["params"] == hetdpt.count_params(models["pruned"])
    assert (before["attention"], before["activation"]) == (1, 1)
    assert (before["speedup"], before["batch"], before["device"], before["runs"]) == (1.0, 2, "cpu", 2)
    saved, images = hetdpt.load(tmp_path / "fast"), torch.randn(2, 3, 16, 16)
    by_hand = reduce_tokens_(clone(models["pruned"]), Tokens("tome", 2))
    with torch.no_grad():
        assert torch.equal(saved(images), by_hand(images))
        assert not torch.equal(saved(images), models["pruned"](images))
    for one, model in ((before, models["pruned"]), (after, saved)):
        scores = hetdpt.evaluate(model, DATA)
        assert (one["top1"], one["low"], one["high"], one["images"]) == (scores.top1, scores.low, scores.high, 360)
        assert one["macs"] == hetdpt.count_macs(model, (3, 16, 16))


def test_a_table_without_images_has_no_accuracy(run: Run) -> None:
    result = run("tokens", test_cli.VIT, "--r", 3, "--schedule", "decreasing", *QUICK[2:])
    assert (result.code, result.err) == (0, "")
    assert "accuracy" not in result.out
    assert "tome, decreasing schedule" in result.out
    assert "speedup [95 %]" in result.out
    lines = result.out.splitlines()
    assert "cpu, float32, batch 2, 2 rounds in turns" in lines
    assert lines[-1].startswith("note: the weights are random")


def test_the_model_that_comes_with_hetdpt(run: Run) -> None:
    result = run("tokens", "demo", "--method", "gtp", "--r", 2, "--per-class", 4, *QUICK)
    assert (result.code, result.err) == (0, "")
    assert "gtp, constant schedule" in result.out
    assert "accuracy [95 %]" in result.out
    assert "cpu, float32, batch 2, 2 rounds in turns; accuracy on 40 images" in result.out.splitlines()
    assert "weights are random" not in result.out


# studies


def test_a_study_is_what_each_model_is(whole: Path, models: dict[str, nn.Module]) -> None:
    found = points_in(whole)
    assert [(one["model"], one["r"]) for one in found] == [("dense", 0), ("dense", 2), ("pruned", 0), ("pruned", 2)]
    assert all(set(one) == KEYS for one in found)
    assert [one["tokens_left"] for one in found] == [TOKENS, TOKENS - 3 * 2, TOKENS, TOKENS - 2 * 2]
    assert found[0]["speedup"] == 1.0
    alone = measure_tokens({"pruned": models["pruned"]}, DATA, config(r=(2,)))
    assert untimed([row.to_dict() for row in alone]) == untimed(found[2:])
    with (whole / "tokens.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["model"], float(row["top1"]), float(row["throughput"])) for row in rows] == [
        (one["model"], one["top1"], one["throughput"]) for one in found
    ]
    with Image.open(whole / "tokens.png") as image:
        assert image.format == "PNG"


def test_lines_a_table_and_json_of_a_study(run: Run, home: Path, whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "run")
    command = ("tokens", home / "dense", "--r", "0,2", "--beside", home / "pruned", "--out", tmp_path / "run", *QUICK)
    result, found = run(*command), points_in(whole)
    assert (result.code, result.err) == (0, "")
    lines = result.out.splitlines()
    done = "(done before, or by another process)"
    assert lines[0].startswith(f"{home / 'dense'}, r 0: {found[0]['top1']:.2f} % of 360 images, 17 tokens left, ")
    assert lines[4] == f"timed: 4 models in turns {done}"
    assert all(line.endswith(done) for line in lines[:5])
    assert "pruned, 1 attention layer and 1 activation removed" in result.out
    assert lines[-1] == f"written to {tmp_path / 'run'}: tokens.json, tokens.csv, tokens.png"
    values = run(*command, "--json").values
    assert values.pop("directory") == str(tmp_path / "run")
    assert values["points"] == points_in(tmp_path / "run")
    assert [Path(one.pop("model")).name for one in values["points"]] == [one.pop("model") for one in found]
    assert values["points"] == found  # times too: nothing was measured again


def test_more_is_added_and_all_is_timed_anew(whole: Path, models: dict[str, nn.Module], tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "run")
    done = list(tokens_into(tmp_path / "run", {"dense": models["dense"]}, DATA, config(r=(2, 3))))
    own = [one.subject.r if one.subject else "time" for one in done if one.is_own]
    assert own == [3, "time"]
    found = points_in(tmp_path / "run")
    assert [one["r"] for one in found] == [0, 2, 3]  # 0 always
    assert untimed(found[:2]) == untimed(points_in(whole)[:2])
    fewer = list(tokens_into(tmp_path / "run", {"dense": models["dense"]}, DATA, config(r=(3,))))
    assert not any(one.is_own for one in fewer)


@pytest.mark.slow
def test_killed_it_comes_to_the_same(home: Path, whole: Path, models: dict[str, nn.Module], tmp_path: Path) -> None:
    out = tmp_path / "run"
    command = ("tokens", home / "dense", "--r", "0,2", "--beside", home / "pruned", "--out", out, *QUICK, "--quiet")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    process = subprocess.Popen([str(SCRIPT), *map(str, command)], env=environment, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not list(out.glob("points/[!.]*.json")):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()
    done = {file: file.stat().st_mtime_ns for file in out.glob("points/[!.]*.json")}
    assert len(done) < 4
    assert not (out / "tokens.json").exists()
    list(tokens_into(out, models, DATA, config()))
    assert {file: file.stat().st_mtime_ns for file in done} == done
    assert untimed(points_in(out)) == untimed(points_in(whole))


@pytest.mark.parametrize("high", [0.95, 1.05])
def test_what_is_slower_is_said_to_be(high: float, home: Path, whole: Path, tmp_path: Path, run: Run) -> None:
    """Where the interval holds what the model is with all tokens, nothing is said."""
    shutil.copytree(whole, tmp_path / "run")
    speeds = find_sealed_json(whole / "speed.json", "") or {}
    ratios = [(1.0, 1.0, 1.0), (0.9, 0.8, high), (1.2, 1.1, 1.3), (1.15, 1.0, 1.2)]
    for (_, speed), ratio in zip(sorted(speeds.items()), ratios, strict=True):
        speed["speedup"] = dict(zip(("value", "low", "high"), ratio, strict=True))
    write_sealed_json(tmp_path / "run" / "speed.json", speeds)
    command = ("tokens", home / "dense", "--r", 2, "--beside", home / "pruned", "--out", tmp_path / "run", *QUICK)
    notes = [line for line in run(*command).out.splitlines() if line.startswith("note: ")]
    slow = next(one["model"] for one in points_in(tmp_path / "run") if one["speedup"] == 0.9)
    note = f"note: {slow} is slower here with r 2 than with all tokens; choosing them costs more than it saves"
    assert notes == [note] * (high < 1)


# the figure


def test_the_figure_says_what_it_shows(whole: Path, tmp_path: Path) -> None:
    draw(points_in(whole), tmp_path / "seen.svg")
    text = (tmp_path / "seen.svg").read_text()
    for words in (
        "tome, constant schedule: r tokens fewer by each attention; bars: 95 % intervals, 360 images",
        "throughput [images/s] (cpu, float32, batch 2)",
        "accuracy [%]",
        "pruned, 1 attention layer and 1 activation removed",
        "r 0",
        "r 2",
    ):
        assert words in text, words
    with pytest.raises(FileError, match=r"^a figure is a file that ends in .png or .svg, but seen.gif does not$"):
        draw(points_in(whole), tmp_path / "seen.gif")


def test_places_in_the_figure_are_of_runs_in_turns(whole: Path, tmp_path: Path) -> None:
    """A median of images/s is of another moment for each model; speedups over the first one are not."""

    def places(points: list[dict[str, Any]]) -> list[str]:
        draw(points, tmp_path / "seen.svg")
        return re.findall(r'<use xlink:href="#\w+" x="([\d.]+)"', (tmp_path / "seen.svg").read_text())

    first, *others = points_in(whole)
    known = places([first, *others])
    assert known
    assert places([first, *({**one, "throughput": 2 * one["throughput"]} for one in others)]) == known
    assert places([first, *({**one, "speedup": 2 * one["speedup"]} for one in others)]) != known


# bad input


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--r", "0,4"), f"{STUDY}; give --data, or only one --r"),
        (("--r", "0,4", "--data", "demo"), f"{STUDY}; give --out, or only one --r"),
        (("--r", "4", "--beside", "demo", "--data", "demo"), f"{STUDY}; give --out, or only one --r"),
        (
            ("--r", "0,4", "--data", "demo", "--out", "RUN", "--overwrite"),
            "a study resumes what is in --out and replaces nothing; leave --overwrite out",
        ),
        (("--r", "0"), "--r 0 removes no token; give 1 or more, or several numbers such as 0,4,8"),
        (
            ("--r", "2", "--fraction", "0.5", "--per-class", "4"),
            "accuracy is not measured, but --fraction, --per-class was given; add --data, or leave it out",
        ),
        (
            ("--r", "2", "--download"),
            "accuracy is not measured, but --download was given; add --data, or leave it out",
        ),
        (("--r", "two"), "--r: expected a whole number, got 'two'; hetdpt tokens --help lists all options"),
        (
            ("--r", "2,2", "--data", "demo", "--out", "RUN"),
            "r is (2, 2); one number of tokens or more, each once, was expected, such as (0, 4, 8)",
        ),
        (
            ("--r", "2", "--beside", "vit_tiny_patch16_224", "--data", "demo", "--out", "RUN"),
            "--beside takes a directory saved by hetdpt, or demo, not vit_tiny_patch16_224; save that model first, or "
            "give it as the first model, with --weights",
        ),
        (
            ("--r", "2", "--beside", "demo", "--data", "demo", "--out", "RUN"),
            "demo and demo: each model can be compared only once",
        ),
        (
            ("--r", "0,2", "--data", "demo", "--out", "RUN", "--fraction", "7"),
            "a fraction of the images is above 0 and at most 1, not 7.0",
        ),
    ],
)
def test_bad_options(options: tuple[str, ...], text: str, run: Run, tmp_path: Path) -> None:
    given = [str(tmp_path / "run") if option == "RUN" else option for option in options]
    run("tokens", "demo", *given).is_refused(text)
    assert not (tmp_path / "run").exists()


def test_what_is_there_is_not_replaced(run: Run, home: Path) -> None:
    place = home / "pruned"
    text = f"{place} exists already; give another path, or allow overwriting"
    run("tokens", home / "dense", "--r", 2, "--out", place).is_refused(text)


def test_an_unknown_method_or_schedule_is_refused() -> None:
    with pytest.raises(PlanError):
        config(method="wild")
    with pytest.raises(PlanError):
        config(schedule="wild")


def test_something_else_is_not_mixed_in(whole: Path, models: dict[str, nn.Module]) -> None:
    before = (whole / "tokens.json").read_text()
    with pytest.raises(FileError, match='was started with config.schedule = "constant", not "decreasing"'):
        list(tokens_into(whole, models, DATA, config(schedule="decreasing")))
    with pytest.raises(FileError, match="was started with model ="):
        list(tokens_into(whole, {"pruned": models["pruned"]}, DATA, config()))
    assert (whole / "tokens.json").read_text() == before


def test_models_that_cannot_be_compared(models: dict[str, nn.Module], tmp_path: Path) -> None:
    large = hetdpt.load(test_training_cli.build(tmp_path / "large", img_size=32))
    with pytest.raises(ModelError, match="^dense takes images of 3 x 16 x 16, but large of 3 x 32 x 32; models are "):
        measure_tokens({"dense": models["dense"], "large": large}, None, config())
    with pytest.raises(MeasureError, match="^one and two are not all different models; give each once$"):
        measure_tokens({"one": models["dense"], "two": models["dense"]}, None, config())
    with pytest.raises(MeasureError, match="no model was given"):
        measure_tokens({}, None, config())
    reduce_tokens_(models["dense"], Tokens("tome", 2))
    text = r"^dense reduces its tokens already \(tome, r 2, constant\); give the model it was before$"
    with pytest.raises(ModelError, match=text):
        measure_tokens({"dense": models["dense"]}, None, config())


def test_a_damaged_result_is_named(whole: Path, models: dict[str, nn.Module], tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "run")
    (tmp_path / "run" / "speed.json").write_text("{")
    with pytest.raises(FileError, match=r"speed\.json is damaged .*; remove it to have it made again"):
        list(tokens_into(tmp_path / "run", models, DATA, config()))
