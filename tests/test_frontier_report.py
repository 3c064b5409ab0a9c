"""What a frontier shows: the accuracy of its points, the table, the figure and the page."""

from __future__ import annotations

import csv
import json
import re
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any

import pytest
import test_cli
import torch
from run_directories import EVIL, frontier
from test_cli import Run
from test_data import write_folder
from test_moves import some
from test_report import size_of
from test_training import tiny
from test_training_cli import build
from torch import nn

import hetdpt
from hetdpt.core.errors import DataError, ModelError
from hetdpt.core.plan import Plan
from hetdpt.core.tokens import Tokens
from hetdpt.data.images import open_images
from hetdpt.data.sources import Data
from hetdpt.data.streams import Stream
from hetdpt.flow import frontier_accuracy
from hetdpt.flow.frontier_accuracy import Validation, open_validation, with_accuracy
from hetdpt.measurement.accuracy import evaluate
from hetdpt.report.frontier import COLUMNS, FIGURE, PAGE, TABLE, Words, draw, values_of, write_frontier
from hetdpt.results import FrontierPoint, FrontierResult, from_json

run = test_cli.run  # the fixture
WORDS = Words(model=("my model", "--img-size", "32"))


def read(file: Path) -> list[dict[str, str]]:
    with file.open(newline="") as opened:
        return list(csv.DictReader(opened))


# Files


def test_the_table_has_accuracy_and_tokens(tmp_path: Path) -> None:
    found = frontier()
    assert write_frontier(tmp_path, found, WORDS) == (PAGE, FIGURE, TABLE, "plans")
    rows = read(tmp_path / TABLE)
    assert tuple(rows[0]) == COLUMNS
    assert [float(row["accuracy"]) for row in rows] == [97, 94, 89, 82]
    assert [row["tokens"] for row in rows] == ["", "", "", "tome:8"]
    assert rows[2]["features"] == "0:320 7:64"
    for row, point in zip(rows, found.points, strict=True):
        assert Plan.from_json((tmp_path / row["plan"]).read_text()) == point.plan
        assert float(row["low"]) < float(row["accuracy"]) < float(row["high"])


def test_without_labels_there_is_no_accuracy(tmp_path: Path) -> None:
    write_frontier(tmp_path, frontier(is_labelled=False), WORDS)
    assert {row["accuracy"] + row["images"] for row in read(tmp_path / TABLE)} == {""}
    page = (tmp_path / PAGE).read_text()
    assert "accuracy" not in page.partition("<script")[0].partition("</style>")[2].lower()


def test_the_figure_has_a_second_panel_for_accuracy(tmp_path: Path) -> None:
    sizes = []
    for is_labelled in (False, True):
        draw(frontier(is_labelled), tmp_path / "frontier.png")
        sizes.append(size_of(tmp_path / "frontier.png"))
    assert sizes[0][0] < sizes[1][0]
    draw(frontier(), tmp_path / "frontier.svg")
    assert "<svg" in (tmp_path / "frontier.svg").read_text()


def test_a_frontier_without_points_has_neither_figure_nor_page(tmp_path: Path) -> None:
    assert write_frontier(tmp_path, replace(frontier(), points=())) == (TABLE,)
    assert not (tmp_path / PAGE).exists()


def test_the_page_has_all_points_and_their_commands(tmp_path: Path) -> None:
    found = frontier(words=EVIL)
    write_frontier(tmp_path, found, Words(model=(EVIL,)))
    page = (tmp_path / PAGE).read_text()
    assert "<img" not in page
    assert 'alert("x")' not in page
    keys = {f"point-{number:02d}" for number in range(1, 5)}
    assert {*re.findall(r'<article id="([^"]+)"', page)} == {*re.findall(r'data-picks="([^"]+)"', page)} == keys
    words = [unescape(text) for text in re.findall(r"<code>(.*?)</code>", page, re.DOTALL)]
    assert [text.split()[1] for text in words] == ["apply", "recover"] * 4
    assert f"--plan {tmp_path}/plans/04-1.80x.json --data IMAGES --out fast-1.80x" in words[6]
    for text in ("removed: linear", "320 hidden features", "in the last 3 blocks", "tome with r = 8"):
        assert text in page
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page)
    assert json.loads(data) == values_of(found)


def test_its_json_is_read_back(tmp_path: Path) -> None:
    found = frontier()
    assert from_json(FrontierResult, values_of(found), tmp_path) == found


# Accuracy


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "data", per_class=4)


def small() -> nn.Module:
    return tiny(num_classes=3)


def searched() -> FrontierResult:
    """Return a frontier of two points, as a search with the removal style calibrated finds it."""
    plans = Plan(attention=(1,), removal="calibrated"), Plan(attention=(1,), removal="calibrated", features=((0, 64),))
    points = tuple(FrontierPoint(plan, 0.1, cost) for plan, cost in zip(plans, (5.0, 4.0), strict=True))
    return FrontierResult(dense_ms=6.0, measured="cpu", points=points, images={"fit": 8, "judge": 8})


def test_the_accuracy_is_that_of_the_applied_plan(tmp_path: Path, folder: Path) -> None:
    model, batches, found = small(), [some(8)], searched()
    before = hetdpt.core.modules.digest(model)
    data = open_validation(str(folder), model, 1000)
    seen = list[float]()
    scored = with_accuracy(tmp_path, found, model, batches, Validation(data=data), watch=lambda _, x: seen.append(x))
    assert scored.dense_accuracy == evaluate(model, data)
    for point in scored.points:
        plan = hetdpt.merge_(hetdpt.apply_(small(), point.plan, batches))
        assert point.accuracy == evaluate(plan, data)
    assert seen == [1.2, 1.5]
    assert hetdpt.core.modules.digest(model) == before
    assert replace(scored, points=found.points, dense_accuracy=None) == found


def test_a_kill_loses_one_model(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, measured = small(), list[Data]()
    data = open_validation(str(folder), model, 1000)

    def score(network: nn.Module, data: Data, **words: Any) -> Any:
        measured.append(data)
        if len(measured) == 2:
            raise KeyboardInterrupt
        return evaluate(network, data, **words)

    monkeypatch.setattr(frontier_accuracy, "evaluate", score)
    words = (tmp_path, searched(), model, [some(8)])
    with pytest.raises(KeyboardInterrupt):
        with_accuracy(*words, Validation(data=data))
    scored = with_accuracy(*words, Validation(data=data))
    assert len(measured) == 4, "the dense model is not measured again"
    assert with_accuracy(*words, Validation(data=data)) == scored
    assert len(measured) == 4
    fewer = with_accuracy(*words, Validation(data=open_validation(str(folder), model, 3)))
    assert fewer.dense_accuracy
    assert fewer.dense_accuracy.count == 3, "other images are measured on"


def test_images_of_validation_are_not_fitted_on(folder: Path) -> None:
    fitted, val = open_images(str(folder)), open_validation(str(folder), small(), 1000).val
    assert val is not None
    assert not isinstance(fitted, Stream)
    assert not isinstance(val, Stream)
    assert not {fitted.name_of(i) for i in range(len(fitted))} & {val.name_of(i) for i in range(len(val))}
    assert len(val) == 9


@pytest.mark.parametrize("count", [1, 3, 8, 9])
def test_as_many_validation_images_as_wanted(folder: Path, count: int) -> None:
    val = open_validation(str(folder), small(), count).val
    assert val is not None
    assert len(val) == count


def test_what_accuracy_cannot_be_measured_on(folder: Path) -> None:
    with pytest.raises(DataError, match="3 classes but the model's head has 10"):
        open_validation(str(folder), tiny(), 9)
    with pytest.raises(ModelError, match="has no classification head"):
        open_validation(str(folder), tiny(num_classes=0), 9)
    (folder / "train").rename(folder / "other")
    with pytest.raises(DataError, match="has no train split"):
        open_validation(str(folder), small(), 9)


# The command


class TestCommand:
    """``hetdpt frontier`` in a labelled folder, in others, and what its commands do."""

    @pytest.fixture
    def dense(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.setattr("hetdpt.flow.frontier.frontier_into", _searched)
        return build(tmp_path / "dense", num_classes=3)

    def words(self, dense: Path, data: Path, out: Path) -> tuple[object, ...]:
        return ("frontier", dense, "--data", data, "--images", 6, "--judge-images", 3, "--out", out)

    def test_a_labelled_folder_gives_accuracy(self, run: Run, dense: Path, folder: Path, tmp_path: Path) -> None:
        out = tmp_path / "run"
        result = run(*self.words(dense, folder, out))
        assert result.code == 0
        assert "on 9 validation images, dense " in result.out
        assert len(re.findall(r"^1\.[25]0×, accuracy ", result.out, re.MULTILINE)) == 2
        assert f"written to {out}: frontier.html, frontier.png, frontier.csv, plans" in result.out
        assert [row["images"] for row in read(out / TABLE)] == ["9", "9"]
        again = json.loads(run(*self.words(dense, folder, out), "--json").out)
        assert [point["accuracy"]["count"] for point in again["points"]] == [9, 9]
        assert again["dense_accuracy"]["count"] == 9
        assert [point["file"] for point in again["points"]] == [row["plan"] for row in read(out / TABLE)]
        none = run(*self.words(dense, folder, tmp_path / "none"), "--accuracy-images", 0)
        assert "accuracy" not in none.out

    def test_why_it_is_not_measured(self, run: Run, dense: Path, folder: Path, tmp_path: Path) -> None:
        flat = run(*self.words(dense, folder / "train" / "cat", tmp_path / "flat"))
        assert flat.code == 0
        assert "accuracy" not in flat.out, "there are no labels"
        other = run(*self.words(build(tmp_path / "ten"), folder, tmp_path / "other"))
        assert other.code == 0
        assert "accuracy is not measured: the data has 3 classes but the model's head has 10" in other.out
        (folder / "train").rename(folder / "elsewhere")
        whole = run(*self.words(dense, folder, tmp_path / "whole"))
        assert whole.code == 0
        assert "accuracy is not measured: " in whole.out
        assert "has no train split" in whole.out

    @pytest.mark.slow
    def test_its_commands_work(self, run: Run, dense: Path, folder: Path, tmp_path: Path) -> None:
        run(*self.words(dense, folder, tmp_path / "run"))
        texts = re.findall(r"<code>hetdpt (.*?)</code>", (tmp_path / "run" / PAGE).read_text())
        apply, recover = (text.split()[:-1] for text in texts[2:4])
        assert run(*apply, tmp_path / "fast").code == 0
        assert hetdpt.load(tmp_path / "fast")(some(1)).shape == (1, 3)
        assert run(*recover, tmp_path / "recovered", "--epochs", 1, "--batch-size", 4).code == 0


def _searched(directory: Path, *_: Any, **__: Any) -> FrontierResult:
    directory.mkdir(exist_ok=True)
    return searched()


@pytest.mark.slow
def test_a_plan_that_only_reduces_tokens_is_applied_and_recovered(run: Run, tmp_path: Path) -> None:
    dense, plan = build(tmp_path / "dense"), tmp_path / "plan.json"
    plan.write_text(Plan(tokens=Tokens("tome", 2)).to_json())
    where = (dense, "--plan", plan, "--data", "demo")
    assert run("apply", *where, "--out", tmp_path / "fast").code == 0
    assert not torch.equal(hetdpt.load(tmp_path / "fast")(some(2)), hetdpt.load(dense)(some(2)))
    assert run("recover", *where, "--out", tmp_path / "run", "--epochs", 1, "--fraction", 0.05).code == 0
