"""``eval``, ``train`` and ``recover`` from the command line: what they leave behind, and every bad input refused."""

from __future__ import annotations

import io
import json
import math
import os
import pty
import re
import subprocess
import sys
import threading
from contextlib import redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import test_cli
import timm
import torch
from PIL import Image
from test_cli import Result, Run

import hetdpt
from hetdpt.cli import live, main
from hetdpt.data.sources import open_data
from hetdpt.store.run_directory import summary_of as kept_summary

run = test_cli.run  # the fixture

SIZES = {"img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 3, "num_heads": 2, "num_classes": 10}
PLAN = hetdpt.Plan(attention=(1,), activation=(2,))
DEMO = ("--data", "demo", "--workers", 0)
PLAIN = ("--recipe", "brief")  # no probe, no images held out, no hidden states
SMALL = (*DEMO, *PLAIN, "--epochs", 2, "--batch-size", 8, "--per-class", 4, "--lr", 1e-3)
SCORES = {"top1", "top5", "loss", "count", "low", "high", "unreadable"}
EPOCH = {
    "kind", "update", "number", "epochs", "loss", "lr", "last", "best", "ema", "is_best", "seconds",
    "divergence", "images_per_second", "unreadable", "lr_found", "notes",
}  # fmt: skip

UNHELPFUL = r"(warning: training did not help: .* % before, .* % after it; the model from before .* is kept as best\n)?"


def build(directory: Path, **changes: Any) -> Path:
    """Save a small ViT, the same at every call, and return its directory."""
    sizes = {**SIZES, **changes}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = timm.create_model("vit_tiny_patch16_224", **sizes)
    return hetdpt.save(model.eval(), directory, base=hetdpt.Base("timm", "vit_tiny_patch16_224", sizes))


def build_trained(folder: Path, config: hetdpt.RecoverConfig, data: Any = "demo", **changes: Any) -> Path:
    """Train a small ViT for a moment, save it as ``folder/dense``, and return ``folder``."""
    model = hetdpt.load(build(folder / "raw", **changes))
    for _ in hetdpt.recover(model, None, data, config):
        pass
    hetdpt.save(model, folder / "dense")
    return folder


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with saved models and plans."""
    folder = tmp_path_factory.mktemp("training")
    build(folder / "dense")
    build(folder / "three", num_classes=3)
    build(folder / "large", img_size=32)
    (folder / "plan.json").write_text(PLAN.to_json())
    (folder / "deep.json").write_text(hetdpt.Plan(attention=(7,)).to_json())
    return folder


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """Return a folder of three classes: six images of each to train, four to validate."""
    pixels = np.random.default_rng(0).integers(0, 255, (30, 20, 24, 3), dtype=np.uint8)
    for number, image in enumerate(pixels):
        place = tmp_path / "images" / ("train" if number < 18 else "val") / f"class{number % 3}"
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(place / f"{number:02d}.png")
    return tmp_path / "images"


def spoil(images: Path, pattern: str, count: int | None = None) -> list[str]:
    """Make files unreadable and return their names."""
    files = sorted(images.glob(pattern))[:count]
    for file in files:
        file.write_bytes(b"no image")
    return [str(file) for file in files]


def recovery(home: Path, out: Path, *options: object) -> tuple[object, ...]:
    return ("recover", home / "dense", "--plan", home / "plan.json", "--out", out, *SMALL, *options)


def lines(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def names(directory: Path) -> list[str]:
    return sorted(file.name for file in directory.iterdir())


# eval


def test_eval_as_json(run: Run, home: Path) -> None:
    result = run("eval", home / "dense", *DEMO, "--json")
    assert (result.code, result.err) == (0, "")
    values = result.values
    assert values.keys() == SCORES
    scores = hetdpt.evaluate(hetdpt.load(home / "dense"), "demo")
    assert (values["top1"], values["top5"], values["count"]) == (scores.top1, scores.top5, 360)
    assert values["loss"] == pytest.approx(scores.loss)
    assert 0 <= values["low"] < values["top1"] < values["high"] < 100  # percent
    assert 1 < values["top1"] < values["top5"]
    assert values["unreadable"] == []


def test_eval_in_words(run: Run, home: Path) -> None:
    result = run("eval", home / "dense", *DEMO)
    values = run("eval", home / "dense", *DEMO, "--json").values
    expected = (
        f"top-1 {values['top1']:.2f} % (95 % interval {values['low']:.1f} to {values['high']:.1f}), "
        f"top-5 {values['top5']:.2f} %, loss {values['loss']:.4f}, 360 images\n"
    )
    assert result == Result(0, expected, "")


def test_eval_of_a_part(run: Run, home: Path) -> None:
    assert run("eval", home / "dense", *DEMO, "--fraction", 0.1, "--json").values["count"] == 36
    assert run("eval", home / "dense", *DEMO, "--per-class", 3, "--batch-size", 7, "--json").values["count"] == 30
    both = run("eval", home / "dense", *DEMO, "--fraction", 0.1, "--per-class", 3)
    both.is_refused("a subset is a fraction (0.1) or a count per class (3), not both")
    for fraction in (0, 1.5, -1):
        refused = run("eval", home / "dense", *DEMO, "--fraction", fraction)
        refused.is_refused(f"a fraction of the images is above 0 and at most 1, not {float(fraction)}")
    refused = run("eval", home / "dense", *DEMO, "--per-class", 36)
    refused.is_refused("class 2 has only 35 images, fewer than 36 per class; use at most 35")


def test_eval_with_weights_from_a_file(run: Run, home: Path) -> None:
    weights = home / "dense" / "model.safetensors"
    model = ("test_vit", "--num-classes", 10)
    refused = run("eval", *model, "--weights", weights, *DEMO)
    assert (refused.code, refused.out, refused.err.count("\n")) == (2, "", 1)
    assert str(weights) in refused.err
    torch.save(timm.create_model("test_vit", num_classes=10).state_dict(), home / "test_vit.pth")
    values = run("eval", *model, "--weights", home / "test_vit.pth", *DEMO, "--per-class", 1, "--json").values
    assert values.keys() == SCORES


def test_eval_of_fewer_than_five_classes(run: Run, home: Path, images: Path) -> None:
    values = run("eval", home / "three", "--data", images, "--workers", 0, "--json").values
    assert (values["count"], values["top5"]) == (12, 100.0)


@pytest.mark.parametrize("workers", [0, 1])
def test_eval_names_and_counts_unreadable_images(run: Run, home: Path, images: Path, workers: int) -> None:
    bad = spoil(images, "val/*/*.png", 2)
    options = ("eval", home / "three", "--data", images, "--workers", workers)
    result = run(*options)
    assert result.code == 0
    assert result.out.endswith(", 10 images\n")
    assert result.err == f"warning: 2 files could not be read: {bad[0]}, {bad[1]}\n"
    values = run(*options, "--json").values
    assert (values["count"], values["unreadable"]) == (10, bad)


def test_eval_names_ten_of_many_unreadable_images(run: Run, home: Path, images: Path) -> None:
    bad = spoil(images, "val/*/*.png", 11)
    result = run("eval", home / "three", "--data", images, "--workers", 0)
    shown = ", ".join(bad[:10])
    assert result.err == f"warning: 11 files could not be read: {shown}, ...\n"


def test_eval_where_nothing_can_be_read(run: Run, home: Path, images: Path) -> None:
    bad = spoil(images, "val/*/*.png")
    result = run("eval", home / "three", "--data", images, "--workers", 0)
    result.is_refused(f"none of the images can be read, for example {bad[0]}; check the files")


def test_eval_of_data_that_does_not_fit_or_is_not_there(run: Run, home: Path, images: Path, tmp_path: Path) -> None:
    run("eval", home / "three", *DEMO).is_refused(
        "the data has 10 classes but the model's head has 3; build the model with --num-classes 10 "
        "or give the data it was trained on"
    )
    run("eval", home / "three", "--data", tmp_path / "nowhere").is_refused(
        f"there is no folder {tmp_path / 'nowhere'}; data is a folder with train/ and val/, torch/NAME, hfds/NAME, "
        "wds/FOLDER or demo"
    )
    (images / "val").rename(images / "held_out")
    run("eval", home / "three", "--data", images).is_refused(
        f"{images} has no val split: looked for val, validation, valid, eval, test, found held_out, train"
    )
    result = run("eval", home / "three")
    assert (result.code, result.out) == (2, "")
    assert "--data" in result.err


# train and recover: what they leave


@pytest.fixture(scope="module")
def finished(home: Path) -> tuple[Path, Result]:
    """Return the directory of a recovery of a hundred updates with everything on, and what it printed."""
    out, err = io.StringIO(), io.StringIO()
    command = recovery(home, home / "run", "--per-class", 40, "--set", "training.ema_decay=0.9", "--tensorboard")
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(sys, "argv", ["hetdpt", *map(str, command)])
        with pytest.raises(SystemExit) as end:
            main()
    return home / "run", Result(end.value.code, out.getvalue(), err.getvalue())  # type: ignore[arg-type]


def summary_of(finished: tuple[Path, Result]) -> dict[str, Any]:
    values: dict[str, Any] = kept_summary(finished[0])
    return values


def test_a_run_leaves_its_models_and_numbers(finished: tuple[Path, Result]) -> None:
    out, _ = finished
    files = ["best", "checkpoints", "ema", "last", "metrics.jsonl", "run.json", "start", "summary.json"]
    assert names(out) == [*files, "tensorboard"]
    assert names(out / "checkpoints") == []
    asked = json.loads((out / "run.json").read_text())
    assert (asked["data"], asked["processes"], asked["per_class"]) == (open_data("demo").identity, 1, 40)
    assert (asked["training.lr"], asked["training.lr_batch"], asked["training.ema_decay"]) == (1e-3, None, 0.9)
    assert len(asked["student"]) == len(asked["teacher"]) == 64
    assert asked["student"] == asked["teacher"]  # the student unpruned
    assert (asked["plan"]["removal"], asked["calibration"]) == ("calibrated", 256)


def test_its_lines_are_epochs_and_every_fiftieth_update(finished: tuple[Path, Result]) -> None:
    record = lines(finished[0])
    marks = [(line["kind"], line["update"]) for line in record]
    assert marks == [("epoch", 0), ("update", 50), ("epoch", 50), ("update", 100), ("epoch", 100)]
    for line in record:
        named = EPOCH if line["kind"] == "epoch" else {"kind", "update", "loss", "lr"}
        assert line.keys() == {*named, "checksum"}
        assert all(math.isfinite(number) for number in line.values() if isinstance(number, float))
    first, *others = (line for line in record if line["kind"] == "epoch")
    assert (first["number"], first["loss"], first["images_per_second"]) == (0, None, None)
    for updates, epoch in zip((line for line in record if line["kind"] == "update"), others, strict=True):
        assert updates["loss"] == pytest.approx(epoch["loss"])  # the mean of the same updates
        assert epoch["images_per_second"] == pytest.approx(400 / epoch["seconds"])


def test_its_summary_names_the_accuracies(finished: tuple[Path, Result]) -> None:
    summary = summary_of(finished)
    epochs = [line for line in lines(finished[0]) if line["kind"] == "epoch"]
    lasts = [epoch["last"] for epoch in epochs]
    assert (summary["start"], summary["last"], summary["best"]) == (lasts[0], lasts[-1], max(lasts))
    assert (summary["ema"], summary["best_epoch"]) == (epochs[-1]["ema"], lasts.index(max(lasts)))
    assert summary["seconds"] == pytest.approx(sum(epoch["seconds"] for epoch in epochs))
    assert (summary["epochs"], summary["unreadable"]) == (2, [])


@pytest.mark.parametrize("name", ["best", "last", "ema"])
def test_its_models_are_as_good_as_it_says(run: Run, finished: tuple[Path, Result], name: str) -> None:
    model = hetdpt.load(finished[0] / name)
    removed = {site.path for site in hetdpt.sites(hetdpt.load(finished[0].parent / "dense"))}
    assert removed - {site.path for site in hetdpt.sites(model)} == {"blocks.1.attn", "blocks.2.mlp.act"}
    one_image = 100 / 360 + 1e-6  # merging rounds
    assert hetdpt.evaluate(model, "demo").top1 == pytest.approx(summary_of(finished)[name], abs=one_image)
    values = run("eval", finished[0] / name, *DEMO, "--json").values
    assert values["top1"] == pytest.approx(summary_of(finished)[name], abs=one_image)


def test_it_prints_plain_lines_where_nobody_watches(finished: tuple[Path, Result]) -> None:
    out, result = finished
    summary = summary_of(finished)
    number, speed = r"\d+\.\d\d %", r"\d+\.\d images/s, \d+ s"
    before, *epochs, accuracy, saved = result.out.splitlines()
    assert result.code == 0
    assert re.fullmatch(UNHELPFUL, result.err)  # half a minute lies between two lines of progress
    assert before == f"before training: accuracy {summary['start']:.2f} %"
    assert len(epochs) == 2
    for epoch, line in enumerate(epochs, 1):
        pattern = rf"epoch {epoch}/2: loss \d\.\d{{4}}, last {number}, best {number}, ema {number}, {speed}"
        assert re.fullmatch(pattern, line), line
    shown = ", ".join(f"{name} {summary[name]:.2f} %" for name in ("start", "last", "best", "ema"))
    assert accuracy == f"accuracy of 360 validation images: {shown}"
    assert saved == f"saved to {out}: last, best, ema"


def test_its_numbers_are_those_of_tensorboard(finished: tuple[Path, Result]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(finished[0] / "tensorboard"))
    board.Reload()
    record = lines(finished[0])
    for tag in ("update/loss", "update/lr", "epoch/last", "epoch/ema", "epoch/loss"):
        kind, name = tag.split("/")
        expected = [(line["update"], line[name]) for line in record if line["kind"] == kind and line[name] is not None]
        found = [(event.step, event.value) for event in board.Scalars(tag)]
        assert found == [(update, pytest.approx(value)) for update, value in expected]


def test_done_again_it_says_so_and_changes_nothing(run: Run, home: Path, finished: tuple[Path, Result]) -> None:
    out = finished[0]
    before = {file: file.stat().st_mtime_ns for file in out.rglob("*")}
    again = recovery(home, out, "--per-class", 40, "--set", "training.ema_decay=0.9")
    assert run(*again).out.splitlines() == [f"{out} is already done", *finished[1].out.splitlines()[-2:]]
    result = run(*again, "--json")
    assert (result.code, result.err) == (0, "")
    assert result.values == {"directory": str(out), **summary_of(finished)}
    other = run(*again, "--seed", 5)
    assert other.code == 2
    assert other.err == (
        f"error: {out} was started with training.seed = 0, not 5; give the same to resume, or another directory\n"
    )
    assert {file: file.stat().st_mtime_ns for file in out.rglob("*")} == before


def test_train_as_json_prints_one_object(run: Run, home: Path, tmp_path: Path) -> None:
    result = run("train", home / "dense", "--out", tmp_path / "run", *SMALL, "--json")
    assert (result.code, result.err) == (0, "")
    assert result.values == {
        "directory": str(tmp_path / "run"),
        **kept_summary(tmp_path / "run"),
    }
    assert result.values["ema"] is None
    assert names(tmp_path / "run") == ["best", "checkpoints", "last", "metrics.jsonl", "run.json", "summary.json"]
    assert json.loads((tmp_path / "run" / "run.json").read_text())["teacher"] is None
    last = hetdpt.load(tmp_path / "run" / "last")
    assert len(hetdpt.sites(last)) == 6  # nothing was pruned
    assert hetdpt.evaluate(last, "demo").top1 == result.values["last"]


def test_progress_in_lines_unless_quiet(run: Run, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "EVERY", 0.0)
    result = run("train", home / "dense", "--out", tmp_path / "run", *SMALL)
    told = [line for line in result.err.splitlines() if not line.startswith("warning: ")]
    assert len(told) == 10  # one for each update
    for update, line in enumerate(told, 1):
        what = rf"epoch {1 + (update > 5)}/2, loss \d\.\d{{4}}, \d+\.\d images/s, update {update}/10"
        assert re.fullmatch(rf"{what}, \d:\d\d:\d\d left", line), line
    quiet = run("train", home / "dense", "--out", tmp_path / "quiet", *SMALL, "--quiet")
    assert quiet.code == 0
    assert re.fullmatch(UNHELPFUL, quiet.err)
    assert len(quiet.out.splitlines()) == 5


def show_in_a_terminal(command: tuple[object, ...], patch: pytest.MonkeyPatch, *streams: str) -> str:
    """Run a command with ``streams`` of sys as a terminal; return what it shows there."""
    master, slave = pty.openpty()
    shown = bytearray()

    def listen() -> None:
        with suppress(OSError):  # how Linux says that nobody writes any more
            while part := os.read(master, 65536):
                shown.extend(part)

    listener = threading.Thread(target=listen, daemon=True)
    listener.start()
    patch.setattr(sys, "argv", ["hetdpt", *map(str, command)])
    patch.setenv("TERM", "xterm")
    patch.setenv("COLUMNS", "160")
    with open(slave, "w") as terminal, patch.context() as inner:
        for stream in streams:
            inner.setattr(sys, stream, terminal)
        with pytest.raises(SystemExit) as end:
            main()
    listener.join(timeout=10)
    os.close(master)
    assert end.value.code == 0
    return shown.decode()


def test_progress_in_a_terminal_is_a_bar_with_the_time_left(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ("train", home / "dense", "--out", tmp_path / "run", *SMALL)
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", show_in_a_terminal(command, monkeypatch, "stderr"))
    assert "━━━━━━━━━━" in text
    assert re.search(r"epoch 1/2, loss \d\.\d{4}, \d+\.\d images/s\s+━+.* \d+/10, \d:\d\d:\d\d left", text), text
    out = capsys.readouterr().out
    assert len(out.splitlines()) == 5
    assert "\x1b[" not in out


def test_a_line_in_a_terminal_does_not_begin_behind_the_bar(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ("train", home / "dense", "--out", tmp_path / "run", *SMALL)
    shown = show_in_a_terminal(command, monkeypatch, "stdout", "stderr")
    lines = re.findall(r"[^\r\n]*(?:before training|epoch \d/2): [^\r\n]*", shown)
    assert len(lines) == 3
    assert all(re.fullmatch(r"(\x1b\[[0-9;?]*[a-zA-Z])*(before|epoch) .*", line) for line in lines), lines


def test_recovery_without_a_teacher(run: Run, home: Path, tmp_path: Path) -> None:
    alone = ("recover", home / "dense", "--out", tmp_path / "run", *SMALL)
    run(*alone).is_refused("the student needs a teacher; give --teacher MODEL, or --distill none")
    assert not (tmp_path / "run").exists()
    assert run(*alone, "--distill", "none").code == 0
    asked = json.loads((tmp_path / "run" / "run.json").read_text())
    assert (asked["teacher"], asked["distillation.kind"]) == (None, "none")


def test_recovery_begins_calibrated_unless_told_otherwise(run: Run, home: Path, tmp_path: Path) -> None:
    begun = {}
    for removal in (None, "plain", "linear,calibrated"):
        out = tmp_path / str(removal)
        options = ("--removal", removal) if removal else ()
        assert run(*recovery(home, out, *options, "--calibration-images", 64)).code == 0
        assert (out / "start").is_dir() == (removal != "plain")
        begun[removal] = json.loads((out / "summary.json").read_text())["start"]
        plan = json.loads((out / "last" / "hetdpt.json").read_text())["plan"]
        assert plan["removal"] == (
            ["linear", "calibrated"] if removal == "linear,calibrated" else removal or "calibrated"
        )
        assert len(plan["fits"]) == (0 if removal == "plain" else 2)
    start = hetdpt.load(tmp_path / "None" / "start")
    assert hetdpt.evaluate(start, "demo").top1 == begun[None]


@pytest.mark.slow
def test_the_calibrated_start_is_made_once(run: Run, home: Path, tmp_path: Path) -> None:
    """Killed before the first checkpoint, a recovery begins from what was saved, unless another start is asked for."""
    command = recovery(home, tmp_path / "out")
    assert run(*command).code == 0
    first = json.loads((tmp_path / "out" / "summary.json").read_text())
    weights = tmp_path / "out" / "start" / "model.safetensors"
    before = weights.stat().st_mtime_ns
    for name in ("summary.json", "metrics.jsonl"):
        (tmp_path / "out" / name).unlink()
    assert run(*command).code == 0
    assert weights.stat().st_mtime_ns == before
    again = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert [again[name] for name in ("start", "last", "best")] == [first[name] for name in ("start", "last", "best")]
    (tmp_path / "out" / "summary.json").unlink()
    assert run(*command, "--calibration-images", 64).code == 0
    assert weights.stat().st_mtime_ns > before


def test_removals_that_are_none(run: Run, home: Path, tmp_path: Path) -> None:
    run(
        "recover", home / "dense", "--teacher", home / "dense", "--removal", "plain", "--out", tmp_path / "out", *SMALL
    ).is_refused("--removal says what replaces the layers of a plan; add --plan")
    run(*recovery(home, tmp_path / "out", "--removal", "skipp")).is_refused(
        "removal is one of plain, norm, authors, calibrated or a pair (attention style of skip, norm, constant, "
        "position, linear; activation style of identity, calibrated, identity-keep, calibrated-keep, drop), not 'skipp'"
    )
    assert not (tmp_path / "out").exists()


def test_apply_fits_on_images(run: Run, home: Path, images: Path, tmp_path: Path) -> None:
    """Labels are not looked at: three classes for a model of ten."""
    plan = ("--plan", home / "plan.json", "--data", images)
    assert run("apply", home / "dense", *plan, "--out", tmp_path / "fitted").code == 0
    assert run("apply", home / "dense", *plan, "--removal", "plain", "--out", tmp_path / "plain").code == 0
    plans = [json.loads((tmp_path / name / "hetdpt.json").read_text())["plan"] for name in ("fitted", "plain")]
    assert [plan["removal"] for plan in plans] == ["calibrated", "plain"]
    assert [fit["style"] for fit in plans[0]["fits"]] == ["constant", "calibrated"]


def test_recovery_of_a_saved_student(run: Run, home: Path, tmp_path: Path) -> None:
    plan = ("--plan", home / "plan.json")
    assert run("apply", home / "dense", *plan, "--out", tmp_path / "student").code == 0
    given = run(
        "recover", tmp_path / "student", "--teacher", home / "dense", "--out", tmp_path / "one", *SMALL, "--json"
    )
    pruned = run(*recovery(home, tmp_path / "two", "--removal", "plain", "--train-merged", "--json"))
    assert given.code == pruned.code == 0
    same = [{key: line[key] for key in ("loss", "last")} for line in lines(tmp_path / "one")]
    assert [{key: line[key] for key in ("loss", "last")} for line in lines(tmp_path / "two")] == [
        {"loss": line["loss"] and pytest.approx(line["loss"], rel=1e-4), "last": line["last"]} for line in same
    ]  # both train the merged student of the same teacher


@pytest.mark.parametrize("distill", ["hard", pytest.param("soft", marks=pytest.mark.slow)])
def test_the_cached_teacher_trains_as_the_teacher_does(run: Run, home: Path, tmp_path: Path, distill: str) -> None:
    fixed = ("--set", "augmentation.views=1", "--distill", distill)
    assert run(*recovery(home, tmp_path / "asked", *fixed)).code == 0
    assert run(*recovery(home, tmp_path / "cached", "--cache-teacher", "--distill", distill)).code == 0
    for one, other in zip(lines(tmp_path / "asked"), lines(tmp_path / "cached"), strict=True):
        assert one["loss"] == other["loss"] or one["loss"] == pytest.approx(other["loss"], rel=1e-5)
        assert one["last"] == other["last"]


def test_unreadable_images_of_training_are_named(run: Run, home: Path, images: Path, tmp_path: Path) -> None:
    bad = spoil(images, "train/class1/*.png", 1)
    options = ("--data", images, "--workers", 0, "--epochs", 1, "--batch-size", 18, "--out", tmp_path / "run")
    result = run("train", home / "three", *PLAIN, *options)
    assert result.code == 0
    assert re.fullmatch(rf"{UNHELPFUL}warning: 1 file could not be read: {bad[0]}\n", result.err)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["unreadable"] == bad


def test_unreadable_images_of_validation_are_named_in_training_too(
    run: Run, home: Path, images: Path, tmp_path: Path
) -> None:
    bad = spoil(images, "val/class1/*.png", 2)
    options = ("--data", images, "--workers", 0, "--epochs", 1, "--batch-size", 18, "--out", tmp_path / "run")
    result = run("train", home / "three", *PLAIN, *options)
    assert result.code == 0
    assert all(name in result.err for name in bad)


# What is refused: one sentence, exit code 2, nothing left behind


def test_models_that_do_not_fit(run: Run, home: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    deep = ("recover", home / "dense", "--plan", home / "deep.json", "--out", out, *SMALL)
    run(*deep).is_refused("the plan removes attention 7 but this model has blocks 0-2; was it made for a deeper model?")
    assert not out.exists()
    run(*recovery(home, out, "--teacher", home / "nowhere")).is_refused_like(
        f"timm has no model called '{home}/nowhere'.*"
    )
    assert not out.exists()


def test_teachers_and_data_that_do_not_fit(run: Run, home: Path, tmp_path: Path) -> None:
    run(*recovery(home, tmp_path / "1", "--teacher", home / "three")).is_refused(
        "the student has 10 classes but the teacher has 3; use the model that was pruned as teacher"
    )
    run(*recovery(home, tmp_path / "2", "--teacher", home / "large")).is_refused(
        "the student takes images of (3, 16, 16) but the teacher of (3, 32, 32); they must be the same"
    )
    run("train", home / "three", "--out", tmp_path / "3", *SMALL).is_refused(
        "the data has 10 classes but the model's head has 3; build the model with --num-classes 10 "
        "or give the data it was trained on"
    )
    run(*recovery(home, tmp_path / "4", "--data", tmp_path / "nowhere")).is_refused_like(
        f"there is no folder {tmp_path / 'nowhere'}; .*"
    )


def test_weights_of_a_teacher_that_is_not_given(run: Run, home: Path, tmp_path: Path) -> None:
    result = run(*recovery(home, tmp_path / "run", "--teacher-weights", tmp_path / "nowhere.pth"))
    assert result.code == 2
    assert "teacher" in result.err


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--set", "training.epochz=3"), r"unknown setting training.epochz; did you mean training.epochs\?"),
        (("--set", "training=3"), "training is 3, but it is a table of settings, such as training.epochs; set those"),
        (
            ("--set", "training.epochs"),
            "--set takes NAME=VALUE, such as training.weight_decay=0.05, not 'training.epochs'",
        ),
        (("--set", "training.schedule=sine"), "schedule is 'sine'; choose from cosine, constant, poly, step"),
        (("--set", "augmentation.scale=[0.5,2]"), "scale is two increasing fractions of the area.*"),
        (("--set", "augmentation.auto_augment=x"), "timm does not know the augmentation 'x'.*"),
        (("--recipe", "quik"), "there is no recipe 'quik'; did you mean quick.*"),
        (("--lr", "0"), "lr is 0.0; it must be above 0"),
        (("--lr", "-1"), "lr is -1.0; it must be above 0"),
        (("--lr", "nan"), "--lr: expected a number, got 'nan'; hetdpt recover --help lists all options"),
        (("--clip-grad", "-1"), "clip_grad is -1.0; it must be above 0, or left out"),
        (("--precision", "int8"), "precision is 'int8'; choose from auto, float32, bfloat16, float16"),
        (("--precision", "float16", "--device", "cpu"), "float16 training needs a GPU, .*; use --precision float32"),
        (("--distill", "medium"), "distillation is 'medium'; choose from none, hard, soft"),
        (("--alpha", "2"), "alpha is 2.0; it must be between 0 and 1"),
        (("--temperature", "0"), "temperature is 0.0; it must be above 0"),
        (("--batch-size", "2000"), "40 images do not fill a batch of 2000; use a batch size of at most 40"),
        (
            ("--accumulate", "100"),
            "one epoch has 5 batches but an update takes 100; lower --accumulate or --batch-size",
        ),
        (("--fraction", "0.5"), r"a subset is a fraction \(0.5\) or a count per class \(4\), not both"),
        (
            ("--cache-teacher", "--set", "training.mixup=0.8"),
            "cache_teacher needs fixed views: .*",
        ),
        (("--cache-teacher", "--distill", "none"), "cache_teacher has no effect without distillation; leave it out"),
        (
            ("--cache-teacher", "--recipe", "deit_small_imagenet"),
            "fixed views repeated 3 times would be the same view; set repeats to 1",
        ),
    ],
)
def test_settings_without_sense(run: Run, home: Path, tmp_path: Path, options: tuple[str, ...], text: str) -> None:
    run(*recovery(home, tmp_path / "run", *options)).is_refused_like(text)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.parametrize("option", ["--epochs", "--batch-size", "--accumulate", "--per-class"])
def test_counts_below_one(run: Run, home: Path, tmp_path: Path, option: str) -> None:
    result = run(*recovery(home, tmp_path / "run", option, 0))
    assert (result.code, result.out) == (2, "")
    assert f"error: {option}: expected" in result.err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "setting",
    [
        "training.epochs=abc",
        "training.epochs=1.5",
        "training.epochs=true",
        "training.epochs=null",
        "training.batch_size=8.5",
        "training.seed=1.5",
        "training.lr=fast",
        "training.lr==3",
        "training.mixup={}",
        "training.optimizer=5",
        "training.ema_warmup=maybe",
        "augmentation.scale=5",
        "augmentation.scale=[1]",
        'augmentation.scale=["a","b"]',
        "augmentation.color_jitter=x",
        "augmentation.repeats=1.5",
        "distillation.alpha=x",
        "drop_path=x",
        "train_merged=yes",
        "per_class=1.5",
    ],
)
def test_values_of_the_wrong_type(run: Run, home: Path, tmp_path: Path, setting: str) -> None:
    name, _, value = setting.partition("=")
    result = run(*recovery(home, tmp_path / "run", "--set", setting))
    assert (result.code, result.out) == (2, "")
    assert re.fullmatch(r"error: [^\n]+\n", result.err), result.err
    assert name.rpartition(".")[2] in result.err
    assert value.strip('"[{}]=') in result.err or value in ("null", "true", '["a","b"]')
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("setting", ["training.optimizer=nonsense", "training.smoothing=1"])
def test_values_that_timm_does_not_take(run: Run, home: Path, tmp_path: Path, setting: str) -> None:
    result = run(*recovery(home, tmp_path / "run", "--set", setting))
    assert result.code == 2
    assert setting.partition("=")[2] in result.err


def test_a_refused_command_does_not_bar_the_way_for_the_right_one(run: Run, home: Path, tmp_path: Path) -> None:
    """The advice is followed, in the same directory."""
    run(*recovery(home, tmp_path / "run", "--batch-size", 2000)).is_refused_like(".* use a batch size of at most 40")
    assert run(*recovery(home, tmp_path / "run", "--batch-size", 40)).code == 0


def test_after_a_loss_that_is_no_number_the_advice_can_be_followed(run: Run, home: Path, tmp_path: Path) -> None:
    result = run(*recovery(home, tmp_path / "run", "--lr", 1e30, "--set", "training.clip_grad=null"))
    assert result.code == 2
    assert re.fullmatch(
        r"error: the loss is not finite at update \d+ \(epoch 1, .*\); start again .* with a lower --lr, .*\n",
        result.err,
    )
    assert run(*recovery(home, tmp_path / "run", "--lr", 1e-3)).code == 0


def test_an_output_place_that_is_taken(run: Run, home: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    for place in (tmp_path, tmp_path / "notes.txt"):
        run(*recovery(home, place)).is_refused_like(
            f"{place} (is not empty and is not a hetdpt run directory|exists already); give .*"
        )
    run(*recovery(home, tmp_path / "notes.txt" / "run")).is_refused(
        f"{tmp_path / 'notes.txt' / 'run'} cannot be written, because {tmp_path / 'notes.txt'} is a file, not a "
        "directory; give another path"
    )
    assert (names(tmp_path), (tmp_path / "notes.txt").read_text()) == (["notes.txt"], "mine")


def test_an_output_place_where_nothing_can_be_written(run: Run, home: Path) -> None:
    place = "/proc/hetdpt"  # not even root may
    run(*recovery(home, Path(place))).is_refused_like(f".*{place}.*; give another path")


@pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has what is not to be had elsewhere")
@pytest.mark.parametrize("device", ["cuda", "cuda:7", "mps", "xpu", "meta", "nonsense"])
def test_a_device_that_is_not_there(run: Run, home: Path, tmp_path: Path, device: str) -> None:
    text = f"device {device!r} is not available; available: cpu"
    run(*recovery(home, tmp_path / "run", "--device", device)).is_refused(text)
    run("eval", home / "dense", *DEMO, "--device", device).is_refused(text)
    assert not (tmp_path / "run").exists()


def test_bfloat16_where_it_would_end_the_process(run: Run, home: Path, tmp_path: Path) -> None:
    result = run(*recovery(home, tmp_path / "run", "--precision", "bfloat16", "--device", "cpu"))
    if result.code == 0:
        pytest.skip("this CPU multiplies in bfloat16")
    result.is_refused("this machine's cpu does not support bfloat16; use --precision float32")
    assert not (tmp_path / "run").exists()


def test_images_that_cannot_be_read_stop_a_training(run: Run, home: Path, images: Path, tmp_path: Path) -> None:
    spoil(images, "train/*/*.png")
    options = ("--data", images, "--workers", 0, "--epochs", 1, "--batch-size", 6, "--out", tmp_path / "run")
    result = run("train", home / "three", *PLAIN, *options)
    assert result.code == 2
    assert re.fullmatch(r"error: \S+\.png cannot be read, nor can the \d+ images after it\n", result.err)


# A batch that does not fit

# In a process of its own: some commands, each with so many megabytes more than the process has already.
LIMITED = """
import contextlib, io, json, resource, sys
from hetdpt.cli import main

def call(arguments):
    out, err = io.StringIO(), io.StringIO()
    sys.argv = ["hetdpt", *arguments]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            main()
    except SystemExit as end:
        return end.code, out.getvalue(), err.getvalue()
    except BaseException as error:
        return 1, out.getvalue(), f"traceback: {error!r}"

warm, *commands = json.loads(sys.argv[1])
call(warm)  # everything is imported, and has its threads
hard = resource.getrlimit(resource.RLIMIT_AS)[1]
results = []
for megabytes, arguments in commands:
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + megabytes * 2**20, hard))
    results.append(call(arguments))
    resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
print(json.dumps(results))
"""


@pytest.fixture(scope="module")
def too_large(home: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    """Return what commands say whose batches do not fit; a batch of n images takes n megabytes in an FFN.

    There are two of them, as the teacher computes the last one for the class token alone.
    """
    if not sys.platform.startswith("linux"):
        pytest.skip("only Linux obeys the limit")
    fat = str(build(home / "fat", embed_dim=16, depth=2, num_heads=1, mlp_ratio=1000))
    outs = tmp_path_factory.mktemp("memory")
    common = ["--data", "demo", "--workers", "0"]
    large = [*PLAIN, "--epochs", "1", "--batch-size", "1400", *common]
    commands: dict[str, tuple[int, list[str]]] = {
        "update": (1000, ["train", fat, "--out", str(outs / "1"), *large]),  # 360 images can be evaluated
        "evaluation": (200, ["train", fat, "--out", str(outs / "2"), *large]),
        "answers": (1000, ["recover", fat, "--teacher", fat, "--cache-teacher", "--out", str(outs / "3"), *large]),
        "eval": (200, ["eval", fat, "--batch-size", "360", *common]),
    }
    warm = ["train", str(home / "dense"), "--out", str(outs / "0"), *PLAIN, "--per-class", "4", *common]
    argument = json.dumps([[*warm, "--batch-size", "8"], *commands.values()])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run(
        [sys.executable, "-c", LIMITED, argument],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    answers = json.loads(result.stdout.splitlines()[-1])
    return {name: Result(*answer) for name, answer in zip(commands, answers, strict=True)}


@pytest.mark.slow
def test_a_batch_that_does_not_fit_is_answered_with_one_that_might(too_large: dict[str, Result]) -> None:
    result = too_large["update"]
    assert result.code == 2, result.err
    assert result.err == (
        "error: a batch of 1400 images does not fit in memory; try --batch-size 700 --accumulate 2, which trains "
        "the same way\n"
    )


@pytest.mark.parametrize(
    "where",
    [
        "evaluation",
        "eval",
        "answers",
    ],
)
def test_a_batch_that_does_not_fit_elsewhere_is_told_too(too_large: dict[str, Result], where: str) -> None:
    result = too_large[where]
    assert result.code == 2, result.err
    assert re.fullmatch(r"error: [^\n]* not fit in memory; [^\n]*--batch-size[^\n]*\n", result.err), result.err
