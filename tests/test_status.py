"""How far a run is, read from its directory: every state of a stage, and directories that are no runs."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import test_cli
import yaml
from run_directories import STAGES, USUAL, compared, write_flow
from test_cli import Run

from hetdpt.store.lock import alone
from hetdpt.store.stage_directory import CONFIG, NOW, STAGE, Clock, begin, stage_directory

run = test_cli.run  # the fixture

SCORES = {"top1": 98.06, "top5": 100.0, "loss": 0.1, "count": 360, "low": 96.0, "high": 99.1, "unreadable": []}
SIDE = {"accuracy": SCORES, "params": 610000, "macs": 41000000, "ms": 4.0, "throughput": 2000.0}
MACHINE = {"device": "cpu", "processor": "Xeon", "threads": 2, "dtype": "float32"}
PLAN = {"attention": [1, 3], "activation": [2], "removal": "calibrated"}
SPLIT = {"budget": {"attention": 2, "activation": 1}, "accuracy": 97.0, "low": 96.0, "high": 98.0, "is_beyond": False}
RATIOS = {"embedding": 0.31, "hidden": 0.31, "heads": 0.31, "head_dims": 0.155}
COSTS = {"macs": 3.19e7, "params": 4.97e5}
CANDIDATE = {"budget": {"attention": 0, "activation": 0}, "predicted": 97.0, "ratios": RATIOS, **COSTS, "start": 60.0}
CANDIDATE |= {"accuracy": 95.0, "speedup": 1.5}
EPOCHS = [
    {"number": number, "epochs": 2, "last": last, "best": last + 0.1 * number}
    for number, last in ((0, 90.0), (2, 97.0))
]
FIT = {"blocks": 4, "degree": 2, "mae": 0.413, "rmse": 0.5, "explained": 0.9, "formula": "P", "pruned_formula": "p"}
FIT |= {"coefficients": {}, "pruned_coefficients": {}, "tried": []}
PRICES: dict[str, Any] = {"dense": {"macs": 1, "params": 1}, "attention": [], "activation": []}
RESULTS: dict[str, dict[str, Any]] = {
    "analyse": {
        "model": "demo",
        **MACHINE,
        "blocks": 4,
        "input_size": [3, 24, 24],
        "classes": 10,
        "sites": [],
        "accuracy": SCORES,
        "params": 1,
        "macs": 1,
        "prices": PRICES,
    },
    "collect": {
        "samples": [{"budget": {"attention": 0, "activation": 1}, "accuracy": 97.0}] * 7,
        "measured_on": "held out",
    },
    "fit": {**FIT, "samples": [], "surface": [], "prices": PRICES},
    "allocate": {
        "wanted": {"layers": 3},
        "budget": {"attention": 2, "activation": 1},
        "share": 0.4,
        "speedup": 1.4,
        "table": [SPLIT],
        "frontier": [],
    },
    "balance": {
        "target": {"macs": 3.2e7},
        "candidates": [CANDIDATE, {**CANDIDATE, "budget": {"attention": 2, "activation": 1}, "accuracy": 96.5}],
        "budget": {"attention": 2, "activation": 1},
        "why": "it is the most accurate",
        "measured_on": "held out",
        "images": 287,
    },
    "select": {"method": "hetdpt", "plan": PLAN, "picks": []},
    "narrow": {"target": {"macs": 3.2e7}, "ratios": RATIOS, **COSTS, "tried": 9},
    "recover": {
        "start": 90.0,
        "last": 97.0,
        "best": 97.2,
        "ema": None,
        "best_epoch": 1,
        "epochs": EPOCHS,
        "seconds": 1.0,
        "images_per_second": 1.0,
    },
    "merge": {"merged": 1, "difference": 1e-6},
    "reduce": {"tokens": {"method": "tome", "r": 8, "schedule": "constant"}},
    "measure": {
        "dense": SIDE,
        "pruned": {**SIDE, "accuracy": {**SCORES, "top1": 97.22}},
        "speedup": {"value": 1.432, "low": 1.4, "high": 1.46},
        **MACHINE,
        "batch": 8,
    },
    "save": {"model": "model", "exports": {"model.onnx": 1e-6}, "bytes": 123},
    "compare": {"rows": [{**compared("random"), "accuracy": 95.0}], "images": 360},
    "report": {},
}
WORDS = {
    "analyse": "98.06 % of 360 images, 4 blocks",
    "collect": "7 samples",
    "fit": "degree 2, wrong by 0.41 points on average",
    "allocate": "2 attention + 1 activation",
    "balance": "2 attention + 1 activation, then width: 96.50 %",
    "select": "attention 1 3, activation 2",
    "narrow": "less embedding 31 %, hidden 31 %, heads 31 %, head dims 16 %; 31.9 M MACs, 497 k parameters",
    "recover": "90.00 % before, 97.00 % after 2 epochs, best 97.20 %",
    "merge": "1 FFN merged",
    "reduce": "8 tokens fewer after each attention (tome)",
    "measure": "97.22 %, 1.43× (cpu (Xeon, 2 threads), float32, batch 8)",
    "save": "model, model.onnx",
    "compare": "random 95.00 %",
    "report": "",
}


def make(directory: Path, done: tuple[str, ...], at_work: str | None = None, flow: tuple[str, ...] = USUAL) -> Path:
    """Write a run with those stages done, and one begun."""
    directory.mkdir()
    (directory / CONFIG).write_text(yaml.safe_dump({"model": "demo", "data": "demo", "method": "hetdpt"}))
    write_flow(directory, flow)
    for name in (*done, *([at_work] if at_work else [])):
        clock = Clock(begin(directory, name, {"settings": {"layers": 3}, "inputs": {}}, {"python": "3"}))
        clock.note("fine-tuning", 40, 230)
        if name in done:
            clock.finish(RESULTS[name])
    return directory


def states(run: Run, directory: Path) -> dict[str, str]:
    """Return the states of the stages, by name."""
    return {stage["stage"]: stage["state"] for stage in run("status", directory, "--json").values["stages"]}


def test_a_finished_run(run: Run, tmp_path: Path) -> None:
    directory = make(tmp_path / "run", STAGES, flow=STAGES)
    values = run("status", directory, "--json").values
    assert (values["directory"], values["is_done"], values["is_running"]) == (str(directory), True, False)
    assert {stage["stage"]: stage["words"] for stage in values["stages"]} == WORDS
    assert [stage["stage"] for stage in values["stages"]] == list(STAGES)
    assert {stage["state"] for stage in values["stages"]} == {"done"}
    assert all(0 < stage["seconds"] < 10 for stage in values["stages"])
    shown = run("status", directory)
    assert (shown.code, shown.err) == (0, "")
    lines = shown.out.splitlines()
    assert lines[-1] == "done"
    for name, words in WORDS.items():
        assert any(f" {name} " in line and " done " in line and f"{words} " in line for line in lines), name


def test_a_run_at_work_tells_how_far_it_is(run: Run, tmp_path: Path) -> None:
    directory = make(tmp_path / "run", USUAL[:5], "recover")
    with alone(directory):
        values = run("status", directory, "--json").values
        table = run("status", directory).out
    assert (values["is_done"], values["is_running"]) == (False, True)
    found = {stage["stage"]: stage for stage in values["stages"]}
    assert [found[name]["state"] for name in USUAL] == ["done"] * 5 + ["running"] + ["left"] * 5
    at_work = found["recover"]
    assert 0 <= at_work["seconds"] < 10
    assert at_work["words"].startswith("fine-tuning, 40/230, 0.")
    assert at_work["words"].endswith(" s ago")
    assert "fine-tuning, 40/230, " in table
    assert table.splitlines()[-1] == "a process is working here"


def test_a_run_that_was_killed_is_interrupted_and_can_go_on(run: Run, tmp_path: Path) -> None:
    directory = make(tmp_path / "my run [1]", USUAL[:5], "recover")
    now = stage_directory(directory, "recover") / NOW
    now.write_text(json.dumps({**json.loads(now.read_text()), "time": time.time() - 7265}))
    assert states(run, directory)["recover"] == "interrupted"
    lines = run("status", directory).out.splitlines()
    assert lines[0].strip() == str(directory)
    assert any("interrupted" in line and "fine-tuning, 40/230, 2 h 1 min ago" in line for line in lines)
    command = f"hetdpt run --config '{directory / CONFIG}' --out '{directory}'"
    assert lines[-1] == f"no process is working here; {command} resumes it"
    now.write_text("{")  # says nothing any more, and nothing is lost
    assert states(run, directory)["recover"] == "interrupted"


@pytest.mark.parametrize(
    "not_needed", [[], ["compare"], ["allocate"], ["collect", "fit", "allocate", "balance", "narrow"]], ids=" ".join
)
def test_stages_without_a_directory_are_left_or_not_needed(not_needed: list[str], run: Run, tmp_path: Path) -> None:
    flow = tuple(name for name in STAGES if name not in not_needed)
    found = states(run, make(tmp_path / "run", ("analyse",), flow=flow))
    assert found.pop("analyse") == "done"
    assert [name for name, state in found.items() if state == "not needed"] == not_needed
    assert {state for name, state in found.items() if name not in not_needed} == {"left"}


def test_nothing_is_written(run: Run, tmp_path: Path) -> None:
    directory = make(tmp_path / "run", USUAL[:5], "recover")

    def look() -> dict[Path, tuple[int, int]]:
        return {file: (file.stat().st_mtime_ns, file.stat().st_ino) for file in [directory, *directory.rglob("*")]}

    before = look()
    assert run("status", directory).code == run("status", directory, "--json").code == 0
    assert look() == before


@pytest.mark.parametrize("what", ["nothing", "a file", "an empty directory"])
def test_what_is_no_run(what: str, run: Run, tmp_path: Path) -> None:
    place = tmp_path / "place"
    if what == "a file":
        place.write_text("")
    if what == "an empty directory":
        place.mkdir()
    run("status", place).is_refused(f"{place} is not a directory of hetdpt run: it has no {CONFIG}; give one that has")


@pytest.mark.parametrize("damage", ["cut", "changed", "other"])
def test_a_damaged_stage_is_named(damage: str, run: Run, tmp_path: Path) -> None:
    directory = make(tmp_path / "run", USUAL[:5])
    file = stage_directory(directory, "fit") / STAGE
    text = file.read_text()
    changed = {
        "cut": text[:-9],
        "changed": text.replace('"layers": 3', '"layers": 4'),
        "other": text.replace("mae", "m"),
    }
    file.write_text(changed[damage])
    assert file.read_text() != text
    run("status", directory).is_refused_like(rf"{file} [^\n]*; [^\n]*")


def test_a_damaged_config_is_named(run: Run, tmp_path: Path) -> None:
    directory = make(tmp_path / "run", ("analyse",))
    (directory / CONFIG).write_text("[")
    run("status", directory).is_refused_like(rf"the settings {directory / CONFIG} are damaged [^\n]*; [^\n]*")


def test_it_needs_no_torch(tmp_path: Path) -> None:
    directory = make(tmp_path / "run", USUAL)
    code = f"""
import sys
from pathlib import Path
from hetdpt.cli.report import StatusOptions, status
status(StatusOptions(run=Path({str(directory)!r}), as_json=True))
assert not {{"torch", "timm", "numpy", "scipy", "matplotlib"}} & sys.modules.keys()
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(found.stdout)["is_done"]
