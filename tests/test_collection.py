"""Samples of accuracy, from a model to a table: what a chain does, that kills and company change nothing."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import test_cli
import test_training_cli
import torch
from test_cli import SCRIPT, Run
from torch import nn

import hetdpt
from hetdpt.adapters.preprocessing import preprocessing_of
from hetdpt.cli import main
from hetdpt.core.errors import FileError, PredictError
from hetdpt.core.plan import KINDS, Budget, Plan
from hetdpt.data.fixed_batches import ImageBatches
from hetdpt.data.sources import open_data
from hetdpt.flow.collection import work
from hetdpt.flow.collection.collect import collect_into, read_run, recheck_into
from hetdpt.flow.collection.work import SampleDone
from hetdpt.flow.execution import Execution
from hetdpt.flow.recipes import quick
from hetdpt.measurement.agreement import relative_difference
from hetdpt.results import Prices, from_json
from hetdpt.selection.predictor.rows import read_order
from hetdpt.selection.predictor.samples import CollectConfig, SampleStep, fine_tune, prune_next
from hetdpt.store.atomic import find_sealed_json
from hetdpt.store.run_directory import share
from hetdpt.surgery.record import require_record
from hetdpt.training.recover import RecoverConfig

run = test_cli.run  # the fixture
BRIEF = {"training.epochs": 1, "training.batch_size": 8, "training.lr": 5e-4, "per_class": 4}
OPTIONS = (
    "--data", "demo", "--epochs", "1", "--batch-size", "8", "--lr", "5e-4", "--per-class", "4", "--images", "24",
    "--rounds", "2,1,1", "--workers", "0", "--batch", "1",
)  # fmt: skip
KEYS = ["dense", "a", "aa", "g", "ag"]


def brief(**changes: Any) -> RecoverConfig:
    return quick().collection.with_settings({**BRIEF, **changes})


def config(**changes: Any) -> CollectConfig:
    return CollectConfig(**{"rounds": (2, 1, 1), "images": 24, "recovery": brief(), **changes})


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with a model of three blocks that has seen the demo images for a moment."""
    folder = tmp_path_factory.mktemp("collection")
    upright = {"augmentation.hflip": 0.0, "augmentation.scale": (1.0, 1.0), "augmentation.ratio": (1.0, 1.0)}
    training = {"training.epochs": 5, "training.lr": 2e-3, **upright}
    return test_training_cli.build_trained(folder, quick().collection.with_settings(training))


@pytest.fixture(scope="module")
def whole(home: Path) -> Path:
    """Return the directory of a collection that nobody disturbed, made by the command line."""
    command = ["hetdpt", "collect", home / "dense", "--out", home / "whole", *OPTIONS, "--quiet"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [*map(str, command)])
        with pytest.raises(SystemExit) as end:
            main()
    assert end.value.code == 0
    return home / "whole"


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def samples(directory: Path) -> dict[str, dict[str, Any]]:
    """Return what is in samples/, without times."""
    files = sorted((directory / "samples").glob("*.json"))
    return {file.stem: {**(find_sealed_json(file, "") or {}), "seconds": 0} for file in files}


def table(directory: Path) -> list[dict[str, str]]:
    with (directory / "samples.csv").open() as file:
        return list(csv.DictReader(file))


def without_times(rows: list[dict[str, str]]) -> list[dict[str, str]]:
    return [{**row, "seconds": ""} for row in rows]


def models_in(directory: Path) -> list[str]:
    """Return the steps of which the model is kept, and make sure that nothing else is."""
    folders = sorted((directory / "steps").iterdir())
    assert all({file.name for file in folder.iterdir()} == {"last", "metrics.jsonl"} for folder in folders)
    return [folder.name for folder in folders]


# what comes out


def test_a_collection_is_complete(whole: Path) -> None:
    assert list(samples(whole)) == sorted(KEYS)
    rows = table(whole)
    assert [(row["attention"], row["activation"]) for row in rows] == [
        ("0", "0"), ("1", "0"), ("2", "0"), ("0", "1"), ("1", "1"),
    ]  # fmt: skip
    assert [row["chain"] for row in rows] == ["dense", "attention", "attention", "activation", "interleaved"]
    assert hetdpt.load(whole / "dense") is not None
    # the ends of the chains, and where one leaves the other
    assert models_in(whole) == ["samples-a", "samples-aa", "samples-ag", "samples-g"]
    prices = hetdpt.Prices.from_json((whole / "prices.json").read_text())
    assert (len(prices.attention), len(prices.activation), prices.measured) == (3, 3, "cpu, float32, batch 1")
    picked = [[int(row["layers"][1:]) for row in rows if row["chain"] == kind] for kind in KINDS]
    order = read_order(whole / "samples.csv")
    assert [[*order[0]][:2], [*order[1]][:1]] == picked
    assert json.loads((whole / "run.json").read_text())["blocks"] == 3
    assert rows[0]["accuracy"] == str(hetdpt.evaluate(hetdpt.load(whole / "dense"), "demo").top1)


def test_a_chain_is_prune_fine_tune_and_evaluate(whole: Path, dense: nn.Module) -> None:
    """Algorithm 1 by hand: each step takes the site of least TE from what the step before came to."""
    data, found = open_data("demo"), samples(whole)
    assert data.train is not None
    images = ImageBatches(data.train, preprocessing_of(dense), count=24)
    student = dense
    for key in ("a", "aa"):
        offered = [site for site in hetdpt.sites(student) if site.kind == "attention"]
        entropies = hetdpt.transfer_entropy(student, images, sites=offered, removal="calibrated")
        student, pick = prune_next(student, "attention", images)
        assert pick.te == min(entropies.values()) == entropies[pick.site]
        start = deepcopy(student)
        before, after = [accuracy for _, accuracy in fine_tune(student, dense, data, brief())]
        step = from_json(SampleStep, found[key], whole)
        assert (step.picks, step.before, step.accuracy) == ((pick,), before, max(before, after))
        assert step.is_start == (after < before)
        student = start if step.is_start else student
    assert require_record(student).plan.removal == "calibrated"
    assert len(require_record(student).plan.attention) == 2
    assert found["aa"]["accuracy"] != found["a"]["accuracy"]


def test_a_fine_tuning_that_does_harm_is_undone(run: Run, home: Path, dense: nn.Module, tmp_path: Path) -> None:
    """At such a learning rate nothing is left of the model; the next step starts from what there was before."""
    options = (*OPTIONS, "--rounds", "2,0,0", "--set", "training.lr=10.0", "--set", "training.warmup_epochs=0")
    result = run("collect", home / "dense", "--out", tmp_path / "run", *options)
    found = samples(tmp_path / "run")
    for key in ("a", "aa"):
        assert found[key]["is_start"]
        assert found[key]["accuracy"] == found[key]["before"] > 20, "a tenth is chance"
    left = hetdpt.load(tmp_path / "run/steps/samples-aa/last")
    assert hetdpt.evaluate(left, "demo").top1 == found["aa"]["accuracy"]
    assert result.out.count("worse after the fine-tuning, so kept from before it") == 2


def test_a_training_that_does_harm_keeps_the_start_as_best_and_says_so(run: Run, home: Path, tmp_path: Path) -> None:
    options = ("--data", "demo", "--workers", 0, "--batch-size", 16, "--per-class", 4, "--epochs", 1, "--lr", 10)
    result = run("train", home / "dense", *test_training_cli.PLAIN, *options, "--out", tmp_path / "run")
    found = json.loads((tmp_path / "run/summary.json").read_text())
    assert (found["best_epoch"], found["best"]) == (0, found["start"])
    assert found["last"] < found["start"]
    assert result.err.startswith("warning: training did not help: ")
    assert result.err.endswith("; the model from before training is kept as best\n")
    assert hetdpt.evaluate(hetdpt.load(tmp_path / "run/best"), "demo").top1 == found["start"]


def test_the_chain_inherits_the_weights(whole: Path, dense: nn.Module) -> None:
    """Pruned from the dense model instead, the second step would begin with another model."""
    data, found = open_data("demo"), samples(whole)
    assert data.train is not None
    images = ImageBatches(data.train, preprocessing_of(dense), count=24)
    student, _ = prune_next(hetdpt.load(whole / "steps" / "samples-a" / "last"), "attention", images)
    assert hetdpt.evaluate(student, "demo").top1 == found["aa"]["before"]
    fresh = hetdpt.calibrate_(dense, Plan(attention=require_record(student).plan.attention), images)
    assert relative_difference(student, fresh, require_record(student).survey.input_size, batch=8) > 1e-3


@pytest.mark.parametrize("removal", ["plain", pytest.param(("linear", "calibrated"), marks=pytest.mark.slow)])
def test_every_removal_style(removal: Any, dense: nn.Module, tmp_path: Path) -> None:
    found = list(collect_into(tmp_path / "run", dense, "demo", config(removal=removal, rounds=(1, 1, 0))))
    assert [done.subject.key for done in found] == ["dense", "a", "g"]
    assert all(done.is_own for done in found)


def test_without_fine_tuning_a_sample_is_what_the_removal_leaves(dense: nn.Module, tmp_path: Path) -> None:
    done = [*collect_into(tmp_path / "run", dense, "demo", config(fine_tunes=False, rounds=(1, 0, 0)))][-1]
    assert done.result.accuracy == done.result.before
    assert models_in(tmp_path / "run") == ["samples-a"]


@pytest.mark.slow
def test_one_chain_alone(home: Path, whole: Path, tmp_path: Path, run: Run) -> None:
    options = ("--out", tmp_path / "run", *OPTIONS, "--json", "--chain")
    activation = run("collect", home / "dense", *options, "activation")
    assert [step["key"] for step in activation.values["samples"]] == ["dense", "g"]
    interleaved = run("collect", home / "dense", *options, "interleaved")
    assert [step["key"] for step in interleaved.values["samples"]] == ["dense", "a", "ag"]
    run("collect", home / "dense", *options[:-1])
    assert samples(tmp_path / "run") == samples(whole)


@pytest.mark.slow
def test_more_rounds_go_on_from_the_ends_of_the_chains(home: Path, whole: Path, tmp_path: Path, run: Run) -> None:
    """The predictor warns of splits beyond the samples; then there is more to sample, not all of it again."""
    options = ("--out", tmp_path / "run", *OPTIONS, "--json", "--rounds")
    run("collect", home / "dense", *options, "1,1,0")
    assert models_in(tmp_path / "run") == ["samples-a", "samples-g"]
    more = run("collect", home / "dense", *options, "2,1,1").values["samples"]
    assert [step["key"] for step in more if step["is_own"]] == ["aa", "ag"]
    assert (samples(tmp_path / "run"), models_in(tmp_path / "run")) == (samples(whole), models_in(whole))


@pytest.mark.slow
@pytest.mark.parametrize(
    "rounds", [("2,1,0", "2,1,1"), pytest.param(("0,1,0", "2,0,0", "0,0,1"), marks=pytest.mark.slow)]
)
def test_chains_may_come_one_after_another(
    rounds: tuple[str, ...], home: Path, whole: Path, tmp_path: Path, run: Run
) -> None:
    """A chain that begins within another finds the model it needs, and the table has what is there of all of them."""
    for part in rounds:
        assert run("collect", home / "dense", "--out", tmp_path / "run", *OPTIONS, "--json", "--rounds", part).code == 0
    assert samples(tmp_path / "run") == samples(whole)
    assert without_times(table(tmp_path / "run")) == without_times(table(whole))


# kills and company


def start(home: Path, out: Path) -> subprocess.Popen[str]:
    command = [str(part) for part in (SCRIPT, "collect", home / "dense", "--out", out, *OPTIONS, "--json")]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([*command, "--checkpoint-minutes", "0"], env=environment(), text=True, **pipes)  # type: ignore[call-overload,no-any-return]


def finish(process: subprocess.Popen[str]) -> dict[str, Any]:
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return json.loads(out)


def kill_when(process: subprocess.Popen[str], is_time: Any) -> None:
    deadline = time.monotonic() + 120
    while not is_time():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.communicate()


@pytest.mark.slow
def test_killed_again_and_again_it_comes_to_the_same(home: Path, whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    moments = {
        # signed: a claim that a kill leaves unsigned is of an unknown machine, which is given two minutes
        "before the dense model": lambda: any(file.stat().st_size for file in out.glob("claims/*.claim")),
        "after it": lambda: (out / "dense").is_dir(),
        "once a layer is chosen": lambda: (out / "steps" / "samples-a" / "start").is_dir(),
        "in the fine-tuning": lambda: any((out / "steps" / "samples-aa" / "checkpoints").glob("0*.pt")),
        "between two steps": lambda: (out / "samples" / "aa.json").is_file(),
    }
    for is_time in moments.values():
        kill_when(start(home, out), is_time)
    checkpoints = out / "steps" / "samples-g"
    kill_when(start(home, out), lambda: len(list(checkpoints.glob("checkpoints/0*.pt"))) == 2)
    kill_when(start(home, out), lambda: (out / "samples" / "ag.json").is_file())  # the last; not yet in the table
    finish(start(home, out))
    assert samples(out) == samples(whole)
    assert models_in(out) == models_in(whole)
    assert without_times(table(out)) == without_times(table(whole))
    assert not list(out.glob(".dense.*"))  # halves of models that a kill left


@pytest.mark.slow
def test_a_killed_step_goes_on_from_its_checkpoint(
    home: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, trained = tmp_path / "run", list[int]()
    folder = out / "steps" / "samples-a" / "checkpoints"
    kill_when(start(home, out), lambda: len(list(folder.glob("0*.pt"))) == 2)
    picks = folder.parent / "start" / "picks.json"
    whole_picks = picks.read_text()
    picks.write_text(whole_picks.replace("attention", "attentiom"))
    with pytest.raises(FileError, match=f"{picks} is damaged .*; remove {picks.parent} to have it made again"):
        list(collect(out, hetdpt.load(home / "dense")))
    picks.write_text(whole_picks)

    def watcher(execution: Execution, text: str) -> Any:
        return lambda now: trained.append(now.update)

    monkeypatch.setattr(Execution, "watcher", watcher)
    step = next(done.result for done in collect(out, hetdpt.load(home / "dense")) if done.subject.key == "a")
    assert trained[0] > 1  # updates that the killed process did are not done again
    assert replace(step, seconds=0) == from_json(SampleStep, samples(whole)["a"], whole)


def collect(out: Path, model: nn.Module) -> Iterator[SampleDone]:
    return collect_into(out, model, "demo", config(), Execution(minutes=0, batch=1))


@pytest.mark.slow
def test_processes_share_the_steps(home: Path, whole: Path, tmp_path: Path) -> None:
    """Three at once: all see all steps, each step was taken once, and it is what one alone comes to."""
    out = tmp_path / "run"
    answers = [finish(process) for process in [start(home, out) for _ in range(3)]]
    for answer in answers:
        assert sorted(step["key"] for step in answer["samples"]) == sorted(KEYS)
    taken = [step["key"] for answer in answers for step in answer["samples"] if step["is_own"]]
    assert sorted(taken) == sorted(KEYS)
    assert samples(out) == samples(whole)


@pytest.mark.slow
def test_a_step_of_another_process_is_waited_for(home: Path, whole: Path, tmp_path: Path) -> None:
    """One has the whole chain from its first step; a second one that wants the step after it waits, then goes on."""
    out = tmp_path / "run"
    first = start(home, out)
    while not (out / "steps" / "samples-a").is_dir():
        assert first.poll() is None, first.communicate()
        time.sleep(0.005)
    told: list[str] = []
    place = Execution(minutes=0, batch=1, progress=lambda stage, *_: told.append(stage))
    found = [*collect_into(out, hetdpt.load(home / "dense"), "demo", config(), place, chain="interleaved")]
    assert f"waiting for pid {first.pid}" in " ".join(told)
    assert [done.is_own for done in found if done.subject.key == "a"] == [False]
    finish(first)
    assert samples(out) == samples(whole)


@pytest.mark.slow
def test_processes_of_one_group_are_refused(home: Path, tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "hetdpt"]
    command = [*torchrun, "collect", home / "dense", "--out", tmp_path / "run", *OPTIONS, "--device", "cpu"]
    result = subprocess.run([*map(str, command)], env=environment(), capture_output=True, text=True, check=False)
    assert result.returncode != 0
    assert "start the same command several times, each with its own --device" in result.stderr
    assert not (tmp_path / "run").exists()


BEGIN = """
import os, sys
from pathlib import Path
from hetdpt.store.run_directory import share

def begin():
    if child := os.fork():
        return child
    share(Path(sys.argv[1]), {"a": 1})
    os._exit(0)

assert [os.waitpid(child, 0)[1] for child in [begin() for _ in range(8)]] == [0] * 8
"""


def test_many_begin_a_shared_directory_at_once(tmp_path: Path) -> None:
    """Whoever is first decides; the others join if they ask for the same."""
    command = [sys.executable, "-c", BEGIN, str(tmp_path / "run")]
    assert subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=60, check=True).stderr == ""
    assert [file.name for file in (tmp_path / "run").iterdir()] == ["run.json"]
    with pytest.raises(FileError, match="was started with a = 1, not 2"):
        share(tmp_path / "run", {"a": 2})


# measured again


def test_splits_are_measured_again(whole: Path, tmp_path: Path) -> None:
    budgets = [Budget(1, 1), Budget(0, 2)]
    found = list(recheck_into(whole, budgets, "demo", Execution(minutes=0), epochs=2))
    assert [done.result.budget for done in found] == budgets
    assert [done.subject.kinds for done in found] == [("attention", "activation"), ("activation", "activation")]
    assert all(len(done.result.picks) == 2 and done.is_own for done in found)
    assert all(done.result.speedup and done.result.speedup > 0 for done in found)  # measured, not predicted
    again = list(recheck_into(whole, budgets, "demo", epochs=2))
    assert [(done.result, done.is_own) for done in again] == [(done.result, False) for done in found]
    assert list(samples(whole)) == sorted(KEYS)  # they are no samples: those have fewer epochs
    assert {file.name for file in (whole / "recheck").iterdir()} == {"1-1-epochs-2.json", "0-2-epochs-2.json"}


def test_a_recheck_is_longer_by_itself(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def stop(student: nn.Module, teacher: nn.Module, data: object, config: RecoverConfig, **_: object) -> Iterator[Any]:
        seen.append(config.training.epochs)
        raise KeyboardInterrupt

    monkeypatch.setattr(work, "fine_tune", stop)
    with pytest.raises(KeyboardInterrupt):
        list(recheck_into(whole, [Budget(1, 0)], "demo"))
    assert seen == [3]


def test_predict_measures_the_best_splits_again(run: Run, whole: Path) -> None:
    options = ("predict", whole, "--layers", 2, "--json")
    guessed = run(*options).values
    decided = run(*options, "--recheck", 2, "--data", "demo", "--epochs", 2, "--workers", 0).values
    rows = [row for row in decided["table"] if row["measured"] is not None]
    measured = {(row["attention"], row["activation"]): row["measured"] for row in rows}
    assert list(measured) == [(row["attention"], row["activation"]) for row in guessed["table"][:2]]
    assert tuple(decided["budget"].values()) == max(measured, key=measured.__getitem__)
    assert [{**row, "measured": None} for row in decided["table"]] == guessed["table"]
    files = {file.stem: json.loads(file.read_text()) for file in (whole / "recheck").glob("*-epochs-2.json")}
    assert {files[f"{a}-{g}-epochs-2"]["accuracy"] for a, g in measured} == set(measured.values())


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--layers", 2, "--data", "demo"), "nothing is measured again, but --data was given; add --recheck 3"),
        (("--recheck", 2), "--recheck chooses between splits of a budget; give one, such as --layers 8"),
        (("--layers", 2, "--recheck", 2), "--recheck trains; give --data, the same as for hetdpt collect"),
    ],
)
def test_a_recheck_that_cannot_be(options: tuple[object, ...], text: str, run: Run, whole: Path) -> None:
    run("predict", whole, *options).is_refused(text)


def test_a_recheck_needs_the_model(run: Run, whole: Path) -> None:
    file = whole / "samples.csv"
    result = run("predict", file, "--blocks", 3, "--layers", 2, "--recheck", 2, "--data", "demo")
    result.is_refused(f"--recheck needs the model too; give a directory of hetdpt collect, not {file}")


# bad input


def test_something_else_is_not_mixed_in(whole: Path, home: Path, dense: nn.Module, tmp_path: Path) -> None:
    before = samples(whole)
    with pytest.raises(FileError, match="was started with config.images = 24, not 25"):
        list(collect_into(whole, dense, "demo", config(images=25)))
    with pytest.raises(FileError, match="was started with config.recovery.training.lr = 0.0005, not 0.001"):
        list(collect_into(whole, dense, "demo", config(recovery=brief(**{"training.lr": 1e-3}))))
    with pytest.raises(FileError, match="was started with batch = 1, not 3"):
        list(collect_into(whole, dense, "demo", config(), Execution(batch=3)))
    with torch.no_grad():
        dense.head.bias += 1
    with pytest.raises(FileError, match="was started with model ="):
        list(collect_into(whole, dense, "demo", config(), Execution(batch=1)))
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(FileError, match="is not empty and is not a hetdpt run directory"):
        list(collect_into(tmp_path, hetdpt.load(home / "dense"), "demo", config()))
    assert samples(whole) == before


def test_what_no_predictor_could_be_fitted_to_is_not_begun(tmp_path: Path) -> None:
    """By itself it would go for hours before anybody knows; who asks for a part of the chains gets it."""
    gated = hetdpt.create("eva02_tiny_patch14_224", num_classes=10, img_size=28)
    with pytest.raises(PredictError, match="'plain' this model gives .* of the chains attention, but 5 of both kinds"):
        list(collect_into(tmp_path / "run", gated, "demo", config(removal="plain", rounds=None)))
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_no_attention_is_left_to_choose_by(dense: nn.Module, tmp_path: Path) -> None:
    found = collect_into(tmp_path / "run", dense, "demo", config(rounds=(0, 0, 3), fine_tunes=False, removal="plain"))
    with pytest.raises(PredictError, match="^no activation layer can be chosen: the model has the same output for all"):
        list(found)


def test_a_damaged_sample_is_named(dense: nn.Module, tmp_path: Path) -> None:
    list(collect_into(tmp_path / "run", dense, "demo", config(rounds=(1, 0, 0), fine_tunes=False)))
    file = tmp_path / "run" / "samples" / "a.json"
    file.write_text("{}")
    with pytest.raises(FileError, match=r"a\.json is damaged .* remove it to have it made again"):
        list(collect_into(tmp_path / "run", dense, "demo", config(rounds=(1, 0, 0), fine_tunes=False)))
    file.unlink()
    (tmp_path / "run" / "prices.json").unlink()
    assert len(list(collect_into(tmp_path / "run", dense, "demo", config(rounds=(1, 0, 0), fine_tunes=False)))) == 2
    Prices.from_json((tmp_path / "run" / "prices.json").read_text())  # measured again


CHAINS = "attention, activation, interleaved"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            ("--rounds", "2,1"),
            "--rounds: expected 3 values with commas between, got '2,1'; hetdpt collect --help lists all options",
        ),
        (
            ("--rounds", "0,0,0"),
            f"rounds is (0, 0, 0); expected one number for each of the chains {CHAINS}, 0 for none, such as 5,5,3",
        ),
        (
            ("--rounds", "4,1,1"),
            "4 rounds of the chain attention remove 4 attention layers, but this model has 3 that can be removed; "
            "give fewer rounds",
        ),
        (
            ("--rounds", "2,1,0", "--chain", "interleaved"),
            "the chain interleaved has no rounds; those that have are attention, activation",
        ),
        (("--chain", "both"), f"the chain both has no rounds; those that have are {CHAINS}"),
    ],
)
def test_bad_options(options: tuple[str, ...], text: str, run: Run, home: Path, tmp_path: Path) -> None:
    run("collect", home / "dense", "--out", tmp_path / "run", *OPTIONS, *options).is_refused(text)
    assert not (tmp_path / "run").exists()


def test_a_recheck_needs_a_collection_and_its_data(whole: Path, tmp_path: Path) -> None:
    with pytest.raises(FileError, match="is not a run directory of hetdpt collect"):
        list(recheck_into(tmp_path, [Budget(1, 0)], "demo"))
    demo = open_data("demo")
    with pytest.raises(PredictError, match=r"on other data: data.images = \[1437, 360\], not \[360, 360\]"):
        list(recheck_into(whole, [Budget(1, 0)], replace(demo, train=demo.val)))
    assert read_run(whole)["data"] == demo.identity


def test_the_command_tells_what_it_does(run: Run, home: Path, whole: Path) -> None:
    result = run("collect", home / "dense", "--out", whole, *OPTIONS)
    assert result.code == 0
    assert "dense: accuracy" in result.out
    assert "(done before, or by another process)" in result.out
    assert f"hetdpt predict {whole} --layers" in result.out


@pytest.mark.parametrize(
    ("rounds", "layers", "offered", "interleaved"),
    [
        (None, 0, Budget(12, 12), 6),
        (None, 5, Budget(12, 12), 6),  # the paper's reach so far
        (None, 13, Budget(12, 12), 14),
        (None, 24, Budget(12, 12), 22),  # some attention stays
        ((8, 8, 3), 13, Budget(12, 12), 6),  # as was asked
    ],
)
def test_both_kinds_go_in_turn_until_so_many_are_gone(
    rounds: tuple[int, int, int] | None, layers: int, offered: Budget, interleaved: int
) -> None:
    chains = CollectConfig(recovery=RecoverConfig(), rounds=rounds).chains(12, offered, layers)
    assert {chain: len(kinds) for chain, kinds in chains.items()} == {
        "attention": 8, "activation": 8, "interleaved": interleaved,
    }  # fmt: skip
