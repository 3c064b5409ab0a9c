"""The README is true: its Python and its commands run."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from hetdpt.cli import app

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "README.md").read_text()
PARSER = app


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", TEXT, re.DOTALL)


def commands() -> list[list[str]]:
    """Return the words of every command."""
    lines = [line for block in blocks("sh") for line in block.splitlines()]
    return [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("hetdpt ")]


def test_there_are_commands() -> None:
    assert {words[0] for words in commands()} >= {"run", "status", "report", "oneshot", "recover", "compare"}


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_every_command_is_understood(words: list[str]) -> None:
    command, (name, *rest) = PARSER.commands[words[0]], words
    if hasattr(command, "commands"):  # detect and segment have commands of their own
        command, (name, *rest) = command.commands[rest[0]], rest
    assert command.make_context(name, rest).params


@pytest.mark.slow
def test_the_python_runs(tmp_path: Path) -> None:
    for block in blocks("python"):
        subprocess.run([sys.executable, "-c", block], cwd=tmp_path, check=True)
    assert (tmp_path / "runs/python/model/model.safetensors").is_file()
    assert (tmp_path / "runs/deit_small-8/model.safetensors").is_file()


@pytest.mark.slow
def test_the_commands_run_in_order(tmp_path: Path) -> None:
    for words in commands():
        subprocess.run([sys.executable, "-m", "hetdpt", *words], cwd=tmp_path, check=True)
    for name in ("first/report.html", "first.html", "small.onnx", "recovered/best/model.safetensors", "plan.json"):
        assert (tmp_path / "runs" / name).is_file(), name
    for name in ("plus/model", "narrow", "fewer"):
        assert (tmp_path / "runs" / name / "model.safetensors").is_file(), name
    for name in ("probed/results.json", "detector/best/task.json", "segmenter/best/task.json"):
        assert (tmp_path / "runs" / name).is_file(), name


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^make (\w+)", "\n".join(blocks("sh")), re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
