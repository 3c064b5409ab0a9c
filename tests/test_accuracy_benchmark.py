"""The benchmark of methods: every model that is trained becomes a row, and one that is there is not trained again."""

from __future__ import annotations

import argparse
from pathlib import Path

import accuracy
import pytest
from accuracy import Case
from evidence import Recorder, Results

from hetdpt.export.saved import open_model


def small() -> Case:
    """A few updates of the model that comes with hetdpt."""
    brief = accuracy.demo().recovery.with_settings({"training.epochs": 1, "training.batch_size": 8, "per_class": 1})
    return Case(
        model=lambda: open_model("demo"),
        data="demo",
        layers=(2,),
        images=8,
        recovery=brief,
        search=brief,
        collection=None,
    )


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> argparse.Namespace:
    monkeypatch.setitem(accuracy.CASES, "small", small)
    return argparse.Namespace(methods="attention-only,random", layers=None, seeds=1, work=tmp_path / "work")


@pytest.mark.slow
def test_every_model_becomes_a_row_and_nothing_is_trained_twice(options: argparse.Namespace, tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "accuracy.json")
    for removal in ("plain", "calibrated"):
        accuracy.compare("small", removal, recorder, options)
    found = Results.read(recorder.file)
    assert {(row.key["removal"], row.key["method"]) for row in found.rows} == {
        (removal, method) for removal in ("plain", "calibrated") for method in ("dense", "attention-only", "random")
    }
    for row in found.rows:
        assert row.values["right"].count("1") == pytest.approx(row.values["accuracy"] * row.values["images"] / 100)
    only_attention = found.where(method="attention-only")
    assert all(len(row.values["attention"]) == 2 and not row.values["activation"] for row in only_attention)
    accuracy.compare("small", "plain", recorder, argparse.Namespace(**{**vars(options), "work": tmp_path / "none"}))
    assert not (tmp_path / "none").exists()  # all of it is there, though the directory is gone
    models = {file: file.stat().st_mtime_ns for file in tmp_path.glob("work/*/models/*")}
    again = Recorder(tmp_path / "again.json")
    accuracy.compare("small", "plain", again, options)
    assert {str(row.key): row.values for row in Results.read(again.file).rows} == {
        str(row.key): row.values for row in found.where(removal="plain")
    }
    assert {file: file.stat().st_mtime_ns for file in tmp_path.glob("work/*/models/*")} == models


def test_the_demo_collects_its_own_samples(options: argparse.Namespace) -> None:
    config = accuracy.config_of(accuracy.CASES["demo"](), "calibrated", options)
    assert len(config.layers) == 4
    assert config.collection is not None
