"""Training in real processes: killed and resumed, on damaged checkpoints, two at once, sharded."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import timm
import torch
from safetensors.torch import load_file

import hetdpt
from hetdpt.store.run_directory import summary_of

DATA = ("--data", "demo")
SMALL = (
    "--epochs", "2", "--batch-size", "8", "--per-class", "4", "--lr", "1e-3", "--workers", "0",
    "--checkpoint-minutes", "0", "--recipe", "brief",
)  # fmt: skip
# Everything random at once: augmentation, mixing, dropped paths; and a moving average.
RANDOM = (
    "--set", "training.mixup=0.8", "--set", "training.cutmix=1.0", "--set", "training.ema_decay=0.9",
    "--set", "drop_path=0.3", "--set", "augmentation.erasing=0.25",
    "--set", "augmentation.auto_augment=rand-m9-mstd0.5-inc1",
)  # fmt: skip
NO_MIX = ("--set", "training.mixup=0", "--set", "training.cutmix=0")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
# accelerate itself calls it so; with --cpu it would start one process
LAUNCH = [
    sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1",
    "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0",
]  # fmt: skip
SHARDED = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_TRANSFORMER_CLS_TO_WRAP": "Block",
}
PLAIN = ("--set", "augmentation.scale=[1,1]", "--set", "augmentation.ratio=[1,1]", "--set", "augmentation.hflip=0")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with a saved dense model and a pruned one."""
    folder = tmp_path_factory.mktemp("processes")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        dense = timm.create_model(
            "vit_tiny_patch16_224", img_size=16, patch_size=4, embed_dim=32, depth=3, num_heads=2, num_classes=10
        )
    base = hetdpt.Base(
        "timm",
        "vit_tiny_patch16_224",
        {"img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 3, "num_heads": 2, "num_classes": 10},
    )
    hetdpt.save(dense.eval(), folder / "dense", base=base)
    (folder / "plan.json").write_text(hetdpt.Plan(attention=(1,), activation=(2,)).to_json())
    return folder


def recovery(home: Path, out: Path, *options: str) -> list[str]:
    plan = ("--plan", str(home / "plan.json"))
    return ["-m", "hetdpt", "recover", str(home / "dense"), *plan, *DATA, "--out", str(out), *SMALL, *options]


def environment(**variables: str) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **variables}


def finish(command: list[str], **variables: str) -> subprocess.CompletedProcess[str]:
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env=environment(**variables), check=False
    )
    assert result.returncode == 0, result.stderr
    return result


def kill_at(command: list[str], out: Path, checkpoint: int) -> None:
    """Start ``command`` and kill it as soon as it has written the given checkpoint."""
    process = subprocess.Popen(command, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 120
    while newest(out) < checkpoint:
        assert process.poll() is None, process.stderr.read().decode()  # type: ignore[union-attr]
        assert time.monotonic() < deadline
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stderr.close()  # type: ignore[union-attr]


def newest(out: Path) -> int:
    return max((int(file.name.split("-")[0]) for file in (out / "checkpoints").glob("0*.pt")), default=0)


def record(out: Path) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl without times, and without their checksums."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    times = ("seconds", "images_per_second", "checksum")
    return [{name: value for name, value in line.items() if name not in times} for line in lines]


def same_end(one: Path, other: Path) -> None:
    assert record(one) == record(other)
    for name in ("best", "last", "ema"):
        first, second = (load_file(out / name / "model.safetensors") for out in (one, other))
        assert first.keys() == second.keys()
        assert all(torch.equal(first[key], second[key]) for key in first), name


@pytest.fixture(scope="module")
def whole(home: Path) -> Path:
    """Return the directory of a run that nobody interrupted; five updates an epoch."""
    finish([sys.executable, *recovery(home, home / "whole", *RANDOM)])
    return home / "whole"


@pytest.mark.slow
@pytest.mark.parametrize("kills", [(3,), (1, 4), (5, 7, 9)], ids=str)
def test_killed_and_resumed_ends_bit_equal(home: Path, whole: Path, kills: tuple[int, ...], tmp_path: Path) -> None:
    out = tmp_path / "run"
    command = [sys.executable, *recovery(home, out, *RANDOM)]
    for checkpoint in kills:
        kill_at(command, out, checkpoint)
        assert not (out / "summary.json").exists()
    assert "resuming" in finish(command).stdout
    same_end(whole, out)


@pytest.mark.slow
def test_a_damaged_checkpoint_is_passed_over(home: Path, whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    command = [sys.executable, *recovery(home, out, *RANDOM)]
    kill_at(command, out, 4)
    last = max((out / "checkpoints").glob("0*.pt"))
    content = bytearray(last.read_bytes())
    content[len(content) // 2] ^= 1
    last.write_bytes(content)
    result = finish(command)
    assert f"warning: the checkpoint {last} is damaged; resuming from the checkpoint before it" in result.stderr
    same_end(whole, out)


@pytest.mark.slow
def test_a_finished_run_is_told_and_another_wish_is_refused(home: Path, whole: Path) -> None:
    before = record(whole)
    result = finish([sys.executable, *recovery(home, whole, *RANDOM)])
    assert "is already done" in result.stdout
    assert record(whole) == before
    other = subprocess.run(
        [sys.executable, *recovery(home, whole, *RANDOM, "--seed", "7")],
        capture_output=True,
        text=True,
        env=environment(),
        check=False,
    )
    assert other.returncode == 2
    assert "was started with training.seed = 0, not 7" in other.stderr


@pytest.mark.slow
@pytest.mark.parametrize("hold_out", ["0", "0.25"])
def test_two_processes_with_half_the_batch_equal_one(home: Path, tmp_path: Path, hold_out: str) -> None:
    one, two, more = tmp_path / "one", tmp_path / "two", (*PLAIN, "--set", f"hold_out={hold_out}")
    finish([sys.executable, *recovery(home, one, *more)])
    finish([*TORCHRUN, *recovery(home, two, *more, "--batch-size", "4")])
    ours, theirs = (summary_of(out).get("validation") for out in (one, two))  # by all processes, after training
    assert (ours is None) == (hold_out == "0")
    assert ours == theirs or ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4)
    first, second = (load_file(out / "last" / "model.safetensors") for out in (one, two))
    start = load_file(home / "dense" / "model.safetensors")
    for key in first:
        torch.testing.assert_close(first[key], second[key], rtol=1e-3, atol=2e-5)  # sums in another order
    assert not torch.equal(first["patch_embed.proj.weight"], start["patch_embed.proj.weight"])
    for ours, theirs in list(zip(record(one), record(two), strict=True))[1:]:
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4)


@pytest.mark.slow
def test_two_processes_find_the_rate_that_one_finds(home: Path, tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    found = ("--set", "training.lr=null")
    finish([sys.executable, *recovery(home, one, *PLAIN, *found)])
    finish([*TORCHRUN, *recovery(home, two, *PLAIN, *found, "--batch-size", "4")])
    first, second = (json.loads((out / "summary.json").read_text()) for out in (one, two))
    assert first["lr_found"] == second["lr_found"] is not None
    for ours, theirs in list(zip(record(one), record(two), strict=True))[1:]:
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("cache", [(), ("--cache-teacher", "--views", "2")], ids=["asked", "cached"])
def test_two_processes_learn_hidden_states_as_one_does(home: Path, tmp_path: Path, cache: tuple[str, ...]) -> None:
    """With random views, which are the same for one process and for two; each fills its part of the cache."""
    one, two = tmp_path / "one", tmp_path / "two"
    hidden = ("--set", "distillation.hidden=5", *NO_MIX, *cache)
    first = finish([sys.executable, *recovery(home, one, *hidden)])
    second = finish([*TORCHRUN, *recovery(home, two, *hidden, "--batch-size", "4")])
    for result, out in ((first, one), (second, two)):
        lines = [line for line in result.stdout.splitlines() if line.startswith("caching the teacher")]
        assert len(lines) == bool(cache), "one process says so"
        assert not (out / "teacher").exists()
    ours, theirs = (load_file(out / "last" / "model.safetensors") for out in (one, two))
    for key in ours:
        torch.testing.assert_close(ours[key], theirs[key], rtol=1e-3, atol=5e-5)  # sums in another order
    for line, other in list(zip(record(one), record(two), strict=True))[1:]:
        assert line["loss"] == pytest.approx(other["loss"], rel=1e-4)


def kill_all_at(command: list[str], out: Path, checkpoint: int, **variables: str) -> None:
    """Start ``command`` and kill it with all the processes it started, once it has written the given checkpoint."""
    process = psutil.Popen(command, env=environment(**variables), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while newest(out) < checkpoint:
        assert process.poll() is None
        time.sleep(0.005)
    family = [process, *process.children(recursive=True)]  # torchrun gives its workers sessions of their own
    assert len(family) >= 3
    for member in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    psutil.wait_procs(family, timeout=30)


@pytest.mark.slow
def test_two_processes_resume(home: Path, tmp_path: Path) -> None:
    """Several processes look at the clock every ten updates: the kill comes within the first epoch of twenty."""
    outs = tmp_path / "one", tmp_path / "two"
    for out in outs:
        command = [*TORCHRUN, *recovery(home, out, *RANDOM, "--batch-size", "1", *NO_MIX)]
        if out == outs[1]:
            kill_all_at(command, out, 1)
            assert newest(out) == 1
        finish(command)
    same_end(*outs)


@pytest.mark.slow
def test_evaluation_counts_every_image_once_in_two_processes(home: Path) -> None:
    options = ["-m", "hetdpt", "eval", str(home / "dense"), *DATA, "--batch-size", "50", "--workers", "0", "--json"]
    one = finish([sys.executable, *options])
    two = finish([*LAUNCH, *options])
    first, second = json.loads(one.stdout), json.loads(two.stdout)
    assert first.pop("loss") == pytest.approx(second.pop("loss"), rel=1e-5)
    assert first == second
    assert first["count"] == 360


@pytest.mark.slow
def test_accelerate_launch_trains_as_torchrun_does(home: Path, tmp_path: Path) -> None:
    """A model of random weights: all processes must begin with the same ones."""
    outs = tmp_path / "torchrun", tmp_path / "accelerate"
    sizes = ("--num-classes", "10", "--img-size", "32", "--batch-size", "4", "--epochs", "1")
    for launcher, out in zip((TORCHRUN, LAUNCH), outs, strict=True):
        train = ["-m", "hetdpt", "train", "vit_tiny_patch16_224", *DATA, "--out", str(out)]
        finish([*launcher, *train, *SMALL, *sizes, "--per-class", "1"])
        assert json.loads((out / "run.json").read_text())["processes"] == 2
    assert record(outs[0]) == record(outs[1])


@pytest.mark.slow
def test_sharded_over_two_processes_and_killed_once(home: Path, tmp_path: Path) -> None:
    """FSDP through accelerate, as docs/training.md says, on two CPU processes."""
    plain, sharded = tmp_path / "plain", tmp_path / "sharded"
    finish([*TORCHRUN, *recovery(home, plain, *PLAIN, "--batch-size", "4")])
    command = [*TORCHRUN, *recovery(home, sharded, *PLAIN, "--batch-size", "4")]
    kill_all_at(command, sharded, 1, **SHARDED)
    finish(command, **SHARDED)
    first, second = (load_file(out / "last" / "model.safetensors") for out in (plain, sharded))
    for key in first:
        torch.testing.assert_close(first[key], second[key], rtol=1e-3, atol=2e-5)
    assert record(plain)[-1]["last"] == record(sharded)[-1]["last"]


@pytest.mark.slow
def test_an_unpruned_model_trains_sharded(home: Path, tmp_path: Path) -> None:
    train = ["-m", "hetdpt", "train", str(home / "dense"), *DATA, "--out", str(tmp_path / "run"), *SMALL]
    finish([*TORCHRUN, *train, "--epochs", "1", "--set", "drop_path=0.1"], **SHARDED)
    assert hetdpt.load(tmp_path / "run" / "last")
