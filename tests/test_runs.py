"""A run directory: opened anew or again, checkpoints that survive damage and a full disk, numbers written once."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from faults import cut, flip

from hetdpt.core.errors import FileError
from hetdpt.store.atomic import written
from hetdpt.store.checkpoints import Checkpoints
from hetdpt.store.metrics import Metrics
from hetdpt.store.run_directory import Run

ASKED = {"data": "demo", "training.epochs": 2, "training.lr": 0.001, "augmentation.scale": (0.5, 1.0), "teacher": None}


def names(directory: Path) -> list[str]:
    return sorted(file.name for file in directory.iterdir())


# The directory


@pytest.mark.parametrize("place", ["new", "deep/er/new", "empty"])
def test_a_new_run_writes_what_was_asked(tmp_path: Path, place: str) -> None:
    (tmp_path / "empty").mkdir()
    out = tmp_path / place
    run = Run.open(out, ASKED)
    assert names(out) == ["run.json"]
    assert json.loads((out / "run.json").read_text()) == {**ASKED, "augmentation.scale": [0.5, 1.0]}
    assert (run.summary, run.checkpoints.latest(), run.metrics.read("epoch")) == (None, None, [])


def test_the_same_again_goes_on(tmp_path: Path) -> None:
    Run.open(tmp_path / "run", ASKED).checkpoints.keep({"step": 3})
    before = (tmp_path / "run" / "run.json").read_bytes()
    again = Run.open(tmp_path / "run", dict(reversed(ASKED.items())), minutes=3, has_board=True)  # neither decides
    assert again.checkpoints.latest() == {"step": 3}
    assert (tmp_path / "run" / "run.json").read_bytes() == before


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("training.epochs", 5, "training.epochs = 2, not 5"),
        ("training.lr", 0.01, "training.lr = 0.001, not 0.01"),
        ("augmentation.scale", (1, 1), "augmentation.scale = [0.5, 1.0], not [1, 1]"),
        ("teacher", "f" * 64, 'teacher = null, not "' + "f" * 39 + "..."),
        ("new", 1, "new = null, not 1"),
    ],
)
def test_something_else_is_refused_by_name_with_old_and_new(tmp_path: Path, key: str, value: Any, text: str) -> None:
    run = Run.open(tmp_path / "run", ASKED)
    run.checkpoints.keep({"step": 3})
    run.metrics.write("epoch", update=0, number=0)
    before = {file: file.read_bytes() for file in (tmp_path / "run").rglob("*") if file.is_file()}
    with pytest.raises(FileError) as error:
        Run.open(tmp_path / "run", {**ASKED, key: value})
    expected = f"{tmp_path / 'run'} was started with {text}; give the same to resume, or another directory"
    assert str(error.value) == expected
    assert {file: file.read_bytes() for file in (tmp_path / "run").rglob("*") if file.is_file()} == before


@pytest.mark.parametrize("content", [b"", b'{"data": "de', b"\xff\xfe", b"[]", b"5", b"null", b'"data"'])
def test_a_damaged_beginning_is_refused_in_one_sentence(tmp_path: Path, content: bytes) -> None:
    Run.open(tmp_path / "run", ASKED)
    file = tmp_path / "run" / "run.json"
    file.write_bytes(content)
    with pytest.raises(FileError, match=f"{file} cannot be read .*; give another directory") as error:
        Run.open(tmp_path / "run", ASKED)
    assert "\n" not in str(error.value)
    assert file.read_bytes() == content


def test_a_foreign_directory_and_a_file_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    for place in (tmp_path, tmp_path / "notes.txt"):
        with pytest.raises(
            FileError, match=f"{place} (is not empty and is not a .* run directory|exists already); give"
        ):
            Run.open(place, ASKED)
    with pytest.raises(FileError, match="notes.txt is a file, not a directory; give another path"):
        Run.open(tmp_path / "notes.txt" / "run", ASKED)
    assert (names(tmp_path), (tmp_path / "notes.txt").read_text()) == (["notes.txt"], "mine")


def test_killed_before_it_began_the_same_command_begins(tmp_path: Path) -> None:
    (tmp_path / ".run.json.4242").write_text("{")
    Run.open(tmp_path, ASKED)


def test_a_run_that_has_done_nothing_yet_can_be_asked_for_differently(tmp_path: Path) -> None:
    """Without a checkpoint there is nothing to go on from, so nothing is lost."""
    Run.open(tmp_path / "run", ASKED).metrics.write("epoch", update=0, number=0, last=10.0)
    Run.open(tmp_path / "run", {**ASKED, "training.epochs": 5})
    assert json.loads((tmp_path / "run" / "run.json").read_text())["training.epochs"] == 5


def test_the_end_is_a_summary_and_no_checkpoints(tmp_path: Path) -> None:
    run = Run.open(tmp_path / "run", ASKED)
    for step in range(3):
        run.checkpoints.keep({"step": step})
    run.finish({"last": 71.5})
    assert names(tmp_path / "run") == ["checkpoints", "run.json", "summary.json"]
    assert names(tmp_path / "run" / "checkpoints") == []
    assert Run.open(tmp_path / "run", ASKED).summary == {"last": 71.5}


def test_a_damaged_summary_is_refused_in_a_sentence(tmp_path: Path) -> None:
    Run.open(tmp_path / "run", ASKED).finish({"last": 71.5})
    file = tmp_path / "run" / "summary.json"
    file.write_text("{")
    with pytest.raises(FileError, match=str(file)):
        _ = Run.open(tmp_path / "run", ASKED).summary


def test_a_file_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "run.json"
    target.write_text("old")

    def interrupted() -> None:
        with written(target) as scratch:
            scratch.write_text("ne")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert (names(tmp_path), target.read_text()) == (["run.json"], "old")
    with written(target) as scratch:
        scratch.write_text("new")
        assert target.read_text() == "old"
    assert (names(tmp_path), target.read_text()) == (["run.json"], "new")


# Checkpoints


@pytest.fixture
def checkpoints(tmp_path: Path) -> Checkpoints:
    """Return the two that are left of four."""
    kept = Checkpoints(tmp_path / "checkpoints", minutes=10)
    for step in range(1, 5):
        kept.keep({"step": step, "weights": torch.arange(1000.0) + step})
    return kept


def files(checkpoints: Checkpoints) -> list[Path]:
    return sorted(checkpoints.directory.glob("[0-9]*.pt"))


def step_of(checkpoints: Checkpoints) -> int:
    state = checkpoints.latest()
    assert state is not None
    assert torch.equal(state["weights"], torch.arange(1000.0) + state["step"])
    return int(state["step"])


def empty(file: Path) -> None:
    file.write_bytes(b"")


def plant(checkpoints: Checkpoints, content: bytes, number: int = 9) -> Path:
    """Write ``content`` as the newest checkpoint, with a checksum that is right."""
    checkpoints.directory.mkdir(parents=True, exist_ok=True)
    file = checkpoints.directory / f"{number:08d}-{hashlib.sha256(content).hexdigest()}.pt"
    file.write_bytes(content)
    return file


def test_the_newest_two_are_kept_in_order(checkpoints: Checkpoints) -> None:
    assert [file.name[:9] for file in files(checkpoints)] == ["00000003-", "00000004-"]
    assert names(checkpoints.directory) == [file.name for file in files(checkpoints)]  # no scratch is left
    for file in files(checkpoints):
        assert hashlib.sha256(file.read_bytes()).hexdigest() == file.stem.split("-")[1]
    assert step_of(checkpoints) == 4
    assert step_of(Checkpoints(checkpoints.directory, 0)) == 4


def test_a_first_start_has_none(tmp_path: Path) -> None:
    assert Checkpoints(tmp_path / "nowhere", 10).latest() is None
    assert not (tmp_path / "nowhere").exists()


def test_numbers_go_on_after_a_restart_and_past_ten(checkpoints: Checkpoints) -> None:
    again = Checkpoints(checkpoints.directory, 0)
    for step in range(5, 12):
        again.keep({"step": step, "weights": torch.arange(1000.0) + step})
    assert [file.name[:9] for file in files(again)] == ["00000010-", "00000011-"]
    assert step_of(again) == 11


def test_other_files_are_no_checkpoints(checkpoints: Checkpoints) -> None:
    (checkpoints.directory / ".4242.pt").write_bytes(b"cut off by a kill")
    (checkpoints.directory / "99999999-mine.pt").write_bytes(b"mine")
    (checkpoints.directory / "notes.txt").write_text("mine")
    assert step_of(checkpoints) == 4
    checkpoints.keep({"step": 5, "weights": torch.arange(1000.0) + 5})
    assert step_of(checkpoints) == 5
    checkpoints.clear()
    assert {"99999999-mine.pt", "notes.txt"} <= set(names(checkpoints.directory))
    assert files(checkpoints) == [checkpoints.directory / "99999999-mine.pt"]


def test_the_scratch_file_of_a_killed_run_is_cleared_away(checkpoints: Checkpoints) -> None:
    (checkpoints.directory / ".4242.pt").write_bytes(b"cut off by a kill")
    Checkpoints(checkpoints.directory, 10).keep({"step": 5})
    assert ".4242.pt" not in names(checkpoints.directory)


@pytest.mark.parametrize("damage", [flip, cut, empty])
def test_a_damaged_one_is_passed_over_with_a_warning(checkpoints: Checkpoints, damage: Any) -> None:
    newest = files(checkpoints)[-1]
    damage(newest)
    with pytest.warns(UserWarning, match=f"{newest} is damaged; resuming from the checkpoint before it"):
        assert step_of(checkpoints) == 3


def test_after_a_damaged_one_two_sound_ones_are_kept_again(checkpoints: Checkpoints) -> None:
    flip(files(checkpoints)[-1])
    again = Checkpoints(checkpoints.directory, 10)
    with pytest.warns(UserWarning, match="is damaged"):
        assert step_of(again) == 3
    again.keep({"step": 5, "weights": torch.arange(1000.0) + 5})
    flip(files(again)[-1])
    with pytest.warns(UserWarning, match="is damaged"):
        assert step_of(again) == 3


def test_if_none_is_sound_the_run_is_refused(checkpoints: Checkpoints) -> None:
    for file in files(checkpoints):
        flip(file)
    with pytest.warns(UserWarning, match="is damaged"), pytest.raises(FileError, match=str(checkpoints.directory)):
        checkpoints.latest()


class Code:
    """Makes a directory as soon as it is unpickled by anything that trusts it."""

    def __init__(self, mark: Path) -> None:
        self.mark = str(mark)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.mark,)


@pytest.mark.parametrize("is_zip", [True, False])
def test_code_in_a_checkpoint_is_refused_and_not_run(checkpoints: Checkpoints, tmp_path: Path, is_zip: bool) -> None:
    """A checksum that fits shows no damage; what is in the file is looked at all the same."""
    mark, source = tmp_path / "mark", tmp_path / "evil.pt"
    if is_zip:
        torch.save({"step": Code(mark)}, source)
    else:
        source.write_bytes(pickle.dumps({"step": Code(mark)}, protocol=2))
    planted = plant(checkpoints, source.read_bytes())
    with pytest.warns(UserWarning, match=f"the checkpoint {planted} ") as seen:
        assert step_of(checkpoints) == 4
    assert len(seen) == 1
    assert "\n" not in str(seen[0].message)
    assert not mark.exists()
    pickle.loads(pickle.dumps(Code(mark)))
    assert mark.is_dir()  # it was loaded


@pytest.mark.parametrize("content", [b"", b"no checkpoint", pickle.dumps([1], protocol=2)[:5]])
def test_other_things_with_a_right_checksum_are_passed_over(checkpoints: Checkpoints, content: bytes) -> None:
    planted = plant(checkpoints, content)
    with pytest.warns(UserWarning, match=f"the checkpoint {planted} "):
        assert step_of(checkpoints) == 4


@contextmanager
def small_files(largest: int) -> Iterator[None]:
    """Let no file grow beyond ``largest`` bytes, as if the disk were full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_leaves_the_earlier_ones_sound(checkpoints: Checkpoints) -> None:
    before = files(checkpoints)
    with small_files(10_000), pytest.raises((OSError, RuntimeError, FileError)):
        checkpoints.keep({"step": 5, "weights": torch.zeros(1_000_000)})
    assert files(checkpoints) == before
    assert step_of(checkpoints) == 4
    checkpoints.keep({"step": 5, "weights": torch.arange(1000.0) + 5})  # there is room again
    assert step_of(checkpoints) == 5
    assert len(names(checkpoints.directory)) == 2


def test_a_full_disk_is_told_in_a_sentence(checkpoints: Checkpoints) -> None:
    with small_files(10_000), pytest.raises((FileError, OSError), match=str(checkpoints.directory)):
        checkpoints.keep({"step": 5, "weights": torch.zeros(1_000_000)})


def test_a_checkpoint_is_due_when_its_time_has_come(tmp_path: Path) -> None:
    assert Checkpoints(tmp_path, minutes=0).is_due()
    kept = Checkpoints(tmp_path, minutes=0.1 / 60)
    assert not kept.is_due()
    time.sleep(0.1)
    assert kept.is_due()
    kept.keep({})
    assert not kept.is_due()


# Numbers


def lines(file: Path) -> list[dict[str, Any]]:
    """Return what the lines say, without their checksums."""
    found = [json.loads(line) for line in file.read_text().splitlines()]
    assert all(line.pop("checksum") for line in found)
    return found


def write_all(metrics: Metrics, *marks: tuple[str, int], by: str = "first") -> None:
    for kind, update in marks:
        metrics.write(kind, update=update, by=by, **({"number": update // 100} if kind == "epoch" else {}))


RECORD = (
    ("epoch", 0),
    ("update", 50),
    ("update", 100),
    ("epoch", 100),
    ("update", 150),
    ("update", 200),
    ("epoch", 200),
)


def test_lines_have_kind_update_and_numbers(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path / "metrics.jsonl")
    metrics.write("epoch", update=0, number=0, last=10.0, loss=None, unreadable=("a.png",))
    metrics.write("update", update=50, loss=2.5)
    first, second = lines(tmp_path / "metrics.jsonl")
    assert first == {"kind": "epoch", "update": 0, "number": 0, "last": 10.0, "loss": None, "unreadable": ["a.png"]}
    assert second == {"kind": "update", "update": 50, "loss": 2.5}
    assert (metrics.read("epoch"), metrics.read("update"), metrics.read("x")) == ([first], [second], [])


@pytest.mark.parametrize("resumed", range(len(RECORD)))
@pytest.mark.parametrize("killed", range(1, len(RECORD) + 1))
def test_going_on_anywhere_writes_every_line_once(tmp_path: Path, killed: int, resumed: int) -> None:
    """Killed after some lines, a run goes on from a checkpoint before or at them: the record has no gap, no twin."""
    file = tmp_path / "metrics.jsonl"
    write_all(Metrics(file), *RECORD[:killed])
    write_all(Metrics(file), *RECORD[min(resumed, killed) :], by="second")
    record = lines(file)
    assert [(line["kind"], line["update"]) for line in record] == list(RECORD)
    assert [line["by"] for line in record].count("first") == min(resumed, killed)
    assert names(tmp_path) == ["metrics.jsonl"]


@pytest.mark.parametrize("torn", ['{"kind": "epo', '{"kind": "epoch", "update": 200', "{", "\n", '{"kind": "epoch"}x'])
def test_a_line_cut_off_by_a_kill_is_forgotten(tmp_path: Path, torn: str) -> None:
    file = tmp_path / "metrics.jsonl"
    write_all(Metrics(file), *RECORD[:6])
    with file.open("a") as end:
        end.write(torn)
    again = Metrics(file)
    assert len(again.read("epoch")) == 2
    write_all(again, RECORD[6], by="second")
    assert [(line["kind"], line["update"]) for line in lines(file)] == list(RECORD)


@pytest.mark.parametrize("at", range(3))
@pytest.mark.parametrize("spoil", [lambda line: line.replace("first", "fjrst"), lambda line: line[:-9], lambda _: "[]"])
def test_a_damaged_line_is_refused(tmp_path: Path, at: int, spoil: Callable[[str], str]) -> None:
    file = tmp_path / "metrics.jsonl"
    write_all(Metrics(file), *RECORD[:3])
    record = file.read_text().splitlines()
    file.write_text("".join(f"{spoil(line) if number == at else line}\n" for number, line in enumerate(record)))
    way_out = f"restore the file, or remove {tmp_path} to start again"
    for use in (lambda: Metrics(file).read("epoch"), lambda: write_all(Metrics(file), RECORD[3])):
        with pytest.raises(FileError, match=f"^line {at + 1} of {file} is damaged; {way_out}$"):
            use()


@pytest.mark.parametrize("kept", range(4))
def test_epochs_that_are_gone_are_noticed(tmp_path: Path, kept: int) -> None:
    """The end of the record is gone, or all of it, and the run goes on after its second epoch."""
    file = tmp_path / "metrics.jsonl"
    write_all(Metrics(file), *RECORD[:4])
    file.write_text("".join(file.read_text().splitlines(True)[:kept]))
    again = Metrics(file)
    write_all(again, *RECORD[4:6])
    with pytest.raises(FileError, match=f"lacks epochs: after {min(kept, 1)} of them number 2 follows; restore the"):
        write_all(again, RECORD[6])


def test_reading_changes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    write_all(Metrics(file), *RECORD)
    before = file.read_bytes()
    assert len(Metrics(file).read("update")) == 4
    assert file.read_bytes() == before


def test_the_numbers_for_tensorboard_are_those_of_the_last_run(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for loss in (1.0, 2.0):  # the second goes on at update 2 of the first
        metrics = Metrics(tmp_path / "metrics.jsonl", tmp_path / "board")
        for update in range(1, 5) if loss == 1 else range(2, 5):
            metrics.write("update", update=update, loss=loss, name="not a number")
        time.sleep(1.1)  # the name of an event file has its second
    board = EventAccumulator(str(tmp_path / "board"))
    board.Reload()
    assert board.Tags()["scalars"] == ["update/loss"]
    assert [(e.step, e.value) for e in board.Scalars("update/loss")] == [(1, 1.0), (2, 2.0), (3, 2.0), (4, 2.0)]
    assert [line["loss"] for line in lines(tmp_path / "metrics.jsonl")] == [1.0, 2.0, 2.0, 2.0]


def test_two_at_once_are_refused(tmp_path: Path) -> None:
    run = Run.open(tmp_path / "run", {"data": "demo"})
    with run.alone():
        with pytest.raises(FileError, match="is in use by another process; wait for it"):
            Run.open(tmp_path / "run", {"data": "demo"})
        Run.open(tmp_path / "run", {"data": "demo"}, is_first=False)  # another process of the same training
    Run.open(tmp_path / "run", {"data": "demo"})
