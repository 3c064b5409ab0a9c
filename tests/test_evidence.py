"""The frame of the benchmarks: rows that know their session, pages that say what the rows say, the regression guard."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import regress
import suite
from evidence import RESULTS, Recorder, Results, adopt

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


def test_a_row_is_kept_once_with_its_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmarks/some.py", "--runs", "3"])
    file = tmp_path / "some.json"
    recorder = Recorder(file)
    assert not recorder.has(model="a", batch=8)
    recorder.add({"model": "a", "batch": 8}, speedup=[1.2, 1.1, 1.3])
    recorder.add({"model": "b", "batch": 8}, speedup=1.5)
    assert recorder.has(model="a", batch=8)
    assert not recorder.has(model="a")
    found = Results.read(file)
    assert [row.key["model"] for row in found.where(batch=8)] == ["a", "b"]
    (session,) = found.sessions
    assert session["command"] == "python benchmarks/some.py --runs 3"
    assert {"date", "device", "processor", "threads", "dtype", "commit", "versions"} <= session.keys()


def test_sessions_go_with_their_last_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "some.json"
    for runs, key in (("1", "a"), ("2", "b"), ("3", "a")):
        monkeypatch.setattr(sys, "argv", ["some.py", runs])
        Recorder(file).add({"model": key}, speedup=1.0)
    found = Results.read(file)
    assert [session["command"] for session in found.sessions] == ["python some.py 2", "python some.py 3"]
    assert {row.key["model"]: row.session for row in found.rows} == {"b": 0, "a": 1}


@pytest.mark.slow
def test_pages_say_what_the_results_say_and_render_needs_no_torch() -> None:
    code = """
import sys, render
print(*[page.name for page, text in render.pages() if page.read_text() != text])
sys.exit("torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=BENCHMARKS, stdout=subprocess.PIPE, text=True)
    assert (done.returncode, done.stdout) == (0, "\n"), "pages named here are stale; run python benchmarks/render.py"


# The others were written by commands of hetdpt itself, or before there were sessions.
OURS = [file for file in sorted(RESULTS.glob("*.json")) if "sessions" in json.loads(file.read_text())]


@pytest.mark.parametrize("file", OURS, ids=lambda file: file.stem)
def test_numbers_know_how_they_were_obtained(file: Path) -> None:
    values = json.loads(file.read_text())
    assert values["rows"]
    for session in values["sessions"]:
        assert re.match(r"python benchmarks/\w+\.py", session["command"])
        assert re.match(r"\d{4}-\d\d-\d\d$", session["date"])
        script = BENCHMARKS.parent / session["command"].split()[1]
        assert script.is_file(), f"{file.name} says it was made by {script.name}, which is gone"


def results(tmp_path: Path, name: str, rows: list[dict[str, object]]) -> Path:
    file = tmp_path / name
    file.write_text(json.dumps({"benchmark": "x", "sessions": [{}], "rows": [{**row, "session": 0} for row in rows]}))
    return file


def guard(*files: Path | str) -> tuple[int, str]:
    done = subprocess.run([sys.executable, BENCHMARKS / "regress.py", *files], capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


BEFORE = {
    "speedup": [1.30, 1.28, 1.32],
    "accuracy": 70.0,
    "images": 1000,
    "macs": 1000,
    "seconds": 10.0,
    "plan": "a",
}


@pytest.mark.parametrize(
    ("changed", "worse"),
    [
        ({}, None),
        ({"speedup": [1.20, 1.18, 1.22]}, "speedup"),
        ({"speedup": [1.27, 1.25, 1.29]}, None),  # the intervals meet
        ({"speedup": [1.50, 1.48, 1.52]}, None),
        ({"accuracy": 60.0}, "accuracy"),
        ({"accuracy": 68.0}, None),  # 1,000 images cannot tell
        ({"macs": 1001}, "macs"),  # counted: to stay as it is
        ({"macs": 999}, "macs"),
        ({"seconds": 11.0}, "seconds"),
        ({"seconds": 10.2}, None),
        ({"plan": "b"}, None),
    ],
)
def test_the_guard_names_what_got_worse(changed: dict[str, object], worse: str | None, tmp_path: Path) -> None:
    key = {"key": {"model": "m"}}
    before = results(tmp_path, "before.json", [{**key, "values": BEFORE}])
    after = results(tmp_path, "after.json", [{**key, "values": {**BEFORE, **changed}}])
    code, said = guard(before, after)
    assert code == (1 if worse else 0)
    assert ("worse: " in said) is (worse is not None)
    assert worse is None or f"worse: model m: {worse} " in said
    assert f"4 values compared, {1 if worse else 0} worse, 0 rows missing" in said


@pytest.mark.parametrize(("others", "is_worse"), [(25, True), (3, False)])
def test_the_guard_compares_image_by_image(others: int, is_worse: bool, tmp_path: Path) -> None:
    """2.5 points of 1,000 images are nothing where other images are wrong, and much where no other is right."""
    before = {"accuracy": 70.0, "images": 1000, "right": "1" * 700 + "0" * 300}
    after = {"accuracy": 70.0 - others / 10, "images": 1000, "right": "1" * (700 - others) + "0" * (300 + others)}
    key = {"key": {"model": "m"}}
    files = [
        results(tmp_path, f"{name}.json", [{**key, "values": values}])
        for name, values in (("before", before), ("after", after))
    ]
    assert guard(*files)[0] == is_worse


def test_the_guard_names_what_is_lost(tmp_path: Path) -> None:
    before, after = (
        results(tmp_path, f"{outcome}.json", [{"key": {"job": "run"}, "values": {"outcome": outcome}}])
        for outcome in ("equal", "lost")
    )
    assert guard(before, after)[0] == 1
    assert "no longer works: job run" in guard(before, after)[1]
    assert guard(after, after)[0] == 0


def test_what_is_measured_again_takes_the_place_of_its_row_alone(tmp_path: Path) -> None:
    file = tmp_path / "some.json"
    for name, speedup in (("a", 1.0), ("b", 2.0)):
        Recorder(file).add({"model": name}, speedup=speedup)
    again = Recorder(file, redo=True)
    assert not again.has(model="a")
    again.add({"model": "a"}, speedup=3.0)
    assert again.has(model="a")
    assert {row.key["model"]: row.values["speedup"] for row in Results.read(file).rows} == {"a": 3.0, "b": 2.0}
    assert not Recorder(file, forget=True).has(model="a")
    assert not file.exists()


def test_rows_of_one_file_take_their_places_in_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [tmp_path / "old.json", tmp_path / "new.json"]
    for file, models in zip(files, ("ab", "bc"), strict=True):
        monkeypatch.setattr(sys, "argv", [file.stem])
        for model in models:
            Recorder(file).add({"model": model}, speedup=1.0)
    adopt(files[1], files[0])
    found = Results.read(files[0])
    commands = {row.key["model"]: found.sessions[row.session]["command"] for row in found.rows}
    assert commands == {"a": "python old", "b": "python new", "c": "python new"}


def test_the_guard_misses_rows_that_are_gone(tmp_path: Path) -> None:
    rows = [{"key": {"model": name}, "values": BEFORE} for name in "ab"]
    files = results(tmp_path, "before.json", rows), results(tmp_path, "after.json", rows[:1])
    code, said = guard(*files)
    assert (code, "missing: model b" in said) == (1, True)
    assert guard(*files, "--common")[0] == 0


def test_the_guard_refuses_other_files(tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    other.write_text('{"a": 1}')
    code, said = guard(other, other)
    assert code == 2
    assert "is not a results file" in said
    assert guard(tmp_path / "none.json", other)[0] == 2


@pytest.mark.parametrize(("name", "expected"), [("accuracy", 1), ("dense_milliseconds", -1), ("right", 0), ("r2", 0)])
def test_directions(name: str, expected: int) -> None:
    assert regress.direction(name) == expected


@pytest.mark.parametrize("step", suite.SUITE, ids=lambda step: " ".join([step.script, *step.full]))
def test_every_step_of_the_suite_can_be_asked_for(step: suite.Step) -> None:
    """Its script knows every option that it is given."""
    text = (BENCHMARKS / step.script).read_text()
    given = [argument for argument in (*step.full, *(step.quick or ())) if argument.startswith("--")]
    assert all(f'"{option}"' in text for option in (*given, "--out"))
    assert step.results in text or step.results.startswith("paper_")
