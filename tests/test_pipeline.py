"""A run from a dense model to a shipped one: all stages, done once, going on after kills, refusing what has changed."""

from __future__ import annotations

import json
import random
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import test_cli
import test_training_cli
import torch
import transformers
from test_cli import SCRIPT, Run

import hetdpt
from hetdpt.config import RunConfig
from hetdpt.data.sources import open_data
from hetdpt.errors import FileError, PlanError
from hetdpt.measurement.costs import Costs
from hetdpt.pipeline import FLOW
from hetdpt.plan import Plan
from hetdpt.runs.alone import alone, is_in_use
from hetdpt.runs.stages import NOW, STAGES, StageRecord, read_stages, stage_directory
from hetdpt.stages.events import Event
from hetdpt.stages.summary import Summary

run = test_cli.run  # the fixture
SMALL = {"training.epochs": 1, "training.batch_size": 8, "training.lr": 5e-4, "per_class": 4}
CHANGES = {f"{part}.{name}": value for part in ("collection", "search", "recovery") for name, value in SMALL.items()}


def asked(home: Path, **changes: Any) -> RunConfig:
    given = {
        "model": str(home / "dense"), "data": "demo", "out": home / "run", "layers": 2, "rounds": [2, 2, 1],
        "images": 16, "batch": 1, "compare": ["random"],
    }  # fmt: skip
    return RunConfig.resolve(changes={**given, **CHANGES, **changes})


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with a small model."""
    folder = tmp_path_factory.mktemp("pipeline")
    test_training_cli.build(folder / "dense")
    return folder


@pytest.fixture(scope="module")
def events(home: Path) -> list[Event]:
    """Return what a whole run tells, which is then in the directory ``run``."""
    found: list[Event] = []
    summary = hetdpt.run(asked(home), watch=found.append)
    assert isinstance(summary, Summary)
    return found


@pytest.fixture
def done(home: Path, events: list[Event]) -> Path:
    return home / "run"


def kinds(events: list[Event], kind: str) -> list[str]:
    return [event.stage for event in events if event.kind == kind and event.stage]


def results(directory: Path) -> dict[str, Any]:
    """Return all that a run came to but its times."""
    found = {record.name: record.result for record in read_stages(directory)}
    collected, recovered = found["collect"]["samples"], found["recover"]
    for sample in collected:
        del sample["seconds"]
    for epoch in [recovered, *recovered["epochs"]]:
        del epoch["seconds"], epoch["images_per_second"]
    compared = [{"plan": row["plan"], "accuracy": row["accuracy"]} for row in found["compare"]["rows"]]
    measured = {name: found["measure"][name]["accuracy"] for name in ("dense", "pruned")}
    return {
        "collect": collected, "fit": found["fit"]["formula"], "allocate": found["allocate"]["budget"],
        "select": found["select"], "recover": recovered, "compare": compared, "measure": measured,
    }  # fmt: skip


class TestAWholeRun:
    def test_all_stages_are_done_in_order(self, events: list[Event], done: Path) -> None:
        assert kinds(events, "begin") == list(STAGES) == kinds(events, "done")
        assert [record.name for record in read_stages(done) if record.is_done] == list(STAGES)
        assert events[0] == Event("", "begin", ",".join(STAGES))
        assert not list(done.rglob(NOW)), "what says how far a stage is goes when it is done"

    def test_the_saved_model_is_the_one_that_was_measured(self, done: Path) -> None:
        model, summary = hetdpt.load(done / "model"), Summary.read(done)
        assert hetdpt.evaluate(model, "demo").top1 == summary.pruned_accuracy
        assert Costs.of(model, (3, 16, 16)) == Costs(
            summary.params, summary.macs, Costs.of(model, (3, 16, 16)).macs_without_attention_products
        )
        assert hetdpt.evaluate(hetdpt.load(done.parent / "dense"), "demo").top1 == summary.dense_accuracy

    def test_the_summary_has_what_scripts_rely_on(self, done: Path) -> None:
        values = json.loads((done / "summary.json").read_text())
        assert values.keys() >= {"dense_accuracy", "pruned_accuracy", "speedup", "macs", "params", "plan", "device"}
        assert values["macs"] < values["dense_macs"]
        assert values["params"] < values["dense_params"]
        plan = Plan.from_dict(values["plan"])
        assert len(plan) == 2
        assert values["budget"] == {"attention": len(plan.attention), "activation": len(plan.activation)}
        assert values["goal"]["is_met"]
        assert Summary.read(done).to_dict() == values | {"warnings": tuple(values["warnings"])}

    def test_the_same_again_does_nothing_and_says_so(self, home: Path, done: Path) -> None:
        before = {file: file.stat().st_mtime_ns for file in done.rglob("*") if file.is_file()}
        found: list[Event] = []
        hetdpt.run(asked(home), watch=found.append)
        assert kinds(found, "skip") == list(STAGES)
        assert not kinds(found, "begin")
        assert {file: file.stat().st_mtime_ns for file in before} == before

    def test_a_run_can_be_moved(self, home: Path, done: Path, tmp_path: Path) -> None:
        moved = tmp_path / "moved"
        subprocess.run(["cp", "-r", str(done), str(moved)], check=True)
        found: list[Event] = []
        hetdpt.run(asked(home, out=moved), watch=found.append)
        assert kinds(found, "skip") == list(STAGES)

    def test_samples_are_measured_on_training_images_that_are_held_out(self, done: Path) -> None:
        collected = StageRecord.read(stage_directory(done, "collect")).result
        assert collected["measured_on"] == "287 training images that were held out"
        counts = [(sample["attention"], sample["activation"]) for sample in collected["samples"]]
        assert sorted(counts) == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0)]

    def test_merging_and_recovery_are_of_one_model(self, done: Path) -> None:
        student = hetdpt.load(stage_directory(done, "recover") / "work" / "last")
        merged = hetdpt.load(done / "model")
        images = torch.randn(2, 3, 16, 16)
        with torch.no_grad():
            torch.testing.assert_close(merged.eval()(images), student.eval()(images), rtol=1e-4, atol=1e-5)


class TestWhatHasChanged:
    @pytest.mark.parametrize(
        ("changes", "stage", "words"),
        [
            ({"recovery.training.epochs": 2}, "recover", "recovery.training.epochs = 1, not 2"),
            ({"layers": 3}, "allocate", "layers = 2, not 3"),
            ({"removal": "plain"}, "analyse", 'removal = "calibrated", not "plain"'),
            ({"keep": "best"}, "merge", 'keep = "last", not "best"'),
            ({"collection.training.lr": 1e-3}, "collect", "collection.training.lr = 0.0005, not 0.001"),
        ],
    )
    def test_stops_by_name(self, home: Path, done: Path, changes: dict[str, Any], stage: str, words: str) -> None:
        before = (done / "config.yaml").read_text()
        with pytest.raises(FileError, match=f"the stage {stage} of .* was begun with {words}; .*--redo {stage}"):
            hetdpt.run(asked(home, **changes))
        assert (done / "config.yaml").read_text() == before

    def test_so_does_another_model(self, home: Path, done: Path) -> None:
        other = hetdpt.load(home / "dense")
        with torch.no_grad():
            next(other.parameters()).add_(1)
        with pytest.raises(FileError, match="the stage analyse .* was begun with inputs.model = "):
            hetdpt.run(asked(home), inputs=(other, open_data("demo")))

    def test_and_other_images(self, home: Path, done: Path) -> None:
        dense, demo = hetdpt.load(home / "dense"), open_data("demo")
        with pytest.raises(FileError, match=r"inputs.data.images = \[1437, 360\], not \[360, 360\]"):
            hetdpt.run(asked(home), inputs=(dense, replace(demo, train=demo.val)))

    def test_an_edited_result_is_noticed(self, home: Path, done: Path, tmp_path: Path) -> None:
        copy = tmp_path / "run"
        subprocess.run(["cp", "-r", str(done), str(copy)], check=True)
        file = stage_directory(copy, "select") / "stage.json"
        values = json.loads(file.read_text())
        values["result"]["plan"]["attention"] = [0]
        file.write_text(json.dumps(values))
        with pytest.raises(FileError, match="the stage recover .* was begun with inputs.select = "):
            hetdpt.run(asked(home, out=copy))

    def test_redo_does_a_stage_and_those_after_it(self, home: Path, done: Path, tmp_path: Path) -> None:
        copy, found = tmp_path / "run", list[Event]()
        subprocess.run(["cp", "-r", str(done), str(copy)], check=True)
        summary = hetdpt.run(asked(home, out=copy, keep="best"), redo="merge", watch=found.append)
        assert kinds(found, "skip") == list(STAGES[:6])
        assert kinds(found, "begin") == list(STAGES[6:])
        recovered = StageRecord.read(stage_directory(copy, "recover")).result
        assert summary.pruned_accuracy == pytest.approx(recovered["best"])
        assert "keep: best" in (copy / "config.yaml").read_text()

    def test_redo_loses_nothing_where_what_comes_before_is_refused(self, home: Path, done: Path) -> None:
        with pytest.raises(FileError, match="the stage analyse"):
            hetdpt.run(asked(home, removal="plain"), redo="merge")
        assert len(read_stages(done)) == len(STAGES)

    def test_no_such_stage(self, home: Path, done: Path) -> None:
        with pytest.raises(PlanError, match="this run has no stage colect; its stages are analyse, collect, "):
            hetdpt.run(asked(home), redo="colect")

    def test_the_report_alone_is_made_anew_without_a_question(self, home: Path, done: Path, tmp_path: Path) -> None:
        copy, found = tmp_path / "run", list[Event]()
        subprocess.run(["cp", "-r", str(done), str(copy)], check=True)
        subprocess.run(["rm", "-r", str(stage_directory(copy, "compare"))], check=True)
        hetdpt.run(asked(home, out=copy, compare=[]), watch=found.append)
        assert kinds(found, "begin") == ["report"]


class TestOtherWays:
    def test_until_stops_there(self, home: Path, tmp_path: Path) -> None:
        assert hetdpt.run(asked(home, out=tmp_path / "run"), until="analyse") is None
        assert [record.name for record in read_stages(tmp_path / "run")] == ["analyse"]
        assert not (tmp_path / "run" / "summary.json").exists()

    def test_a_method_without_a_split_has_no_samples(self, home: Path, tmp_path: Path) -> None:
        found: list[Event] = []
        config = asked(home, out=tmp_path / "run", method="random", rounds=None, compare=[])
        summary = hetdpt.run(config, watch=found.append)
        assert kinds(found, "done") == [
            name for name in STAGES if name not in ("collect", "fit", "allocate", "compare")
        ]
        assert sum(summary.budget.values()) == 2

    def test_samples_may_be_given(self, home: Path, done: Path, tmp_path: Path) -> None:
        samples = stage_directory(done, "collect") / "work"
        config = asked(home, out=tmp_path / "run", samples=samples, rounds=None, compare=[])
        hetdpt.run(config, until="allocate")
        one, other = (StageRecord.read(stage_directory(out, "fit")).result for out in (done, tmp_path / "run"))
        assert one["formula"] == other["formula"]

    def test_a_missed_speedup_says_by_how_much_and_offers_the_next_budget(
        self, home: Path, done: Path, tmp_path: Path
    ) -> None:
        copy = tmp_path / "run"
        subprocess.run(["cp", "-r", str(done), str(copy)], check=True)
        config = asked(home, out=copy, layers=None, speedup=1.05, compare=[])
        hetdpt.run(config, redo="allocate", until="measure")
        file = stage_directory(copy, "measure") / "stage.json"
        values = json.loads(file.read_text())
        values["result"]["speedup"]["value"] = 1.01  # whatever this machine came to
        file.write_text(json.dumps(values))
        goal = hetdpt.run(config).goal
        assert not goal.is_met
        assert goal.text.startswith("a speedup of 1.05 was wanted and 1.010 measured: missed by 3.8 %")
        before = StageRecord.read(stage_directory(copy, "allocate")).result["budget"]
        if goal.next is not None:
            further = goal.next.budget
            assert further.attention + further.activation > 0
            assert (further.attention, further.activation) != (before["attention"], before["activation"])
            assert "--redo allocate" in goal.next.command
        else:
            assert goal.text.endswith("no further budget is in reach")

    @pytest.mark.parametrize(
        ("goal", "words"),
        [
            ({"layers": 7}, "7 layers are to go, but this model has 6 that can; ask for fewer"),
            (
                {"layers": None, "speedup": 1000.0},
                "speedup 1000 is out of reach: without any of the 6 layers .* ask for less",
            ),
            ({"layers": None, "macs": "1%"}, "macs .* is out of reach: .* it would be .*; ask for less"),
        ],
    )
    def test_a_goal_out_of_reach_is_refused_before_hours_are_spent(
        self, home: Path, tmp_path: Path, goal: dict[str, Any], words: str
    ) -> None:
        with pytest.raises(PlanError, match=words):
            hetdpt.run(asked(home, out=tmp_path / "run", **goal), until="collect")
        hetdpt.run(asked(home, out=tmp_path / "run"), until="analyse")  # and another goal can follow

    def test_a_model_of_transformers(self, tmp_path: Path) -> None:
        config = transformers.ViTConfig(
            hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=32, image_size=16,
            patch_size=4, num_labels=10,
        )  # fmt: skip
        transformers.ViTForImageClassification(config).save_pretrained(tmp_path / "hf")
        changes = {"model": f"hf:{tmp_path / 'hf'}", "out": tmp_path / "run", "method": "te-static", "rounds": None}
        summary = hetdpt.run(asked(tmp_path, **changes, compare=[], onnx=True))
        assert summary.macs < summary.dense_macs
        assert (tmp_path / "run" / "model.onnx").is_file()

    def test_a_directory_of_other_things_is_refused(self, home: Path) -> None:
        with pytest.raises(FileError, match="holds other things than a run"):
            hetdpt.run(asked(home, out=home / "dense"))

    def test_every_stage_of_the_flow_has_its_number(self) -> None:
        assert tuple(stage.name for stage in FLOW) == STAGES


def command(home: Path, out: Path, *more: str) -> list[str]:
    """Return the command that asks for what ``asked`` does."""
    settings = [part for name, value in CHANGES.items() for part in ("--set", f"{name}={value}")]
    return [
        str(SCRIPT), "run", str(home / "dense"), "--data", "demo", "--out", str(out), "--layers", "2",
        "--rounds", "2,2,1",
        "--images", "16", "--batch", "1", "--compare", "random", "--workers", "0", *settings, *more,
    ]  # fmt: skip


class TestKills:
    def test_a_run_that_is_killed_again_and_again_comes_to_the_same(
        self, home: Path, done: Path, tmp_path: Path
    ) -> None:
        out, generator = tmp_path / "run", random.Random(0)
        for _ in range(4):
            process = subprocess.Popen(command(home, out, "--checkpoint-minutes", "0"), stderr=subprocess.PIPE)
            wait_for_work(out, generator.choice(STAGES[1:6]), process)
            time.sleep(generator.random())
            process.send_signal(signal.SIGKILL)
            process.communicate()
        ended = subprocess.run(command(home, out), check=True, capture_output=True, text=True)
        assert results(out) == results(done)
        assert "what it came to" in ended.stdout
        assert not [file for file in out.rglob("*") if ".partial" in file.name]


def wait_for_work(out: Path, stage: str, process: subprocess.Popen[bytes]) -> None:
    """Wait until a run is at a stage, or past it, or done."""
    while process.poll() is None and not (stage_directory(out, stage) / "stage.json").is_file():
        time.sleep(0.05)


class TestTwoProcesses:
    def test_the_second_is_refused_and_harms_nothing(self, home: Path, done: Path, run: Run) -> None:
        before = {file: file.stat().st_mtime_ns for file in done.rglob("*") if file.is_file()}
        with alone(done):
            refused = run(*command(home, done, "--redo", "merge")[1:])
        refused.is_refused(f"{done} is in use by another process; wait for it, or give another directory")
        assert {file: file.stat().st_mtime_ns for file in done.rglob("*") if file.is_file()} == before

    def test_a_kill_lets_the_directory_go(self, home: Path, tmp_path: Path) -> None:
        process = subprocess.Popen(command(home, tmp_path / "run"), stderr=subprocess.DEVNULL)
        wait_for_work(tmp_path / "run", "collect", process)
        assert is_in_use(tmp_path / "run")
        process.kill()
        process.wait()
        assert not is_in_use(tmp_path / "run")


class TestTheCommand:
    def test_prints_a_table_and_where_all_of_it_is(self, home: Path, done: Path) -> None:
        ended = subprocess.run(command(home, done), check=True, capture_output=True, text=True)
        assert "as before" in ended.stderr
        assert re.search(r"dense +│ +\d+\.\d\d %", ended.stdout)
        assert re.search(r"random +│ +\d+\.\d\d %", ended.stdout)
        assert f"report: {done / 'report.html'}" in ended.stdout

    def test_json_is_the_summary(self, home: Path, done: Path, run: Run) -> None:
        found = run(*command(home, done, "--json")[1:]).values
        assert found == {"directory": str(done), **json.loads((done / "summary.json").read_text())}

    def test_the_config_of_a_run_is_that_run(self, home: Path, done: Path, run: Run, tmp_path: Path) -> None:
        moved = tmp_path / "moved"
        subprocess.run(["cp", "-r", str(done), str(moved)], check=True)
        assert run("run", "--config", moved / "config.yaml", "--json").values["directory"] == str(moved)
        again = read_stages(moved)
        assert [stage.begun for stage in again] == [stage.begun for stage in read_stages(done)]


TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "hetdpt"]


@pytest.mark.slow
class TestAGroup:
    def test_trains_what_one_process_has_collected(self, home: Path, tmp_path: Path) -> None:
        out = tmp_path / "run"
        one = [word for word in command(home, out, "--device", "cpu") if word not in ("--compare", "random")]
        refused = subprocess.run([*TORCHRUN, *one[1:]], capture_output=True, text=True, timeout=300)
        assert refused.returncode != 0
        assert (
            "error: the stage collect is done by one process; give the same command without torchrun" in refused.stderr
        )
        subprocess.run([*one, "--until", "collect"], check=True, capture_output=True)
        subprocess.run([*TORCHRUN, *one[1:]], check=True, capture_output=True, timeout=300)
        model, summary = hetdpt.load(out / "model"), Summary.read(out)
        assert hetdpt.evaluate(model, "demo").top1 == summary.pruned_accuracy
        assert [record.name for record in read_stages(out)] == [name for name in STAGES if name != "compare"]
