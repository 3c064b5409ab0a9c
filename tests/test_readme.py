"""The README is true: its Python and its commands run."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", TEXT, re.DOTALL)


@pytest.mark.slow
def test_the_python_runs(tmp_path: Path) -> None:
    for block in blocks("python"):
        subprocess.run([sys.executable, "-c", block], cwd=tmp_path, check=True)
    assert (tmp_path / "runs/deit_small-8/model.safetensors").is_file()


@pytest.mark.slow
def test_the_commands_run_in_order(tmp_path: Path) -> None:
    lines = [line for block in blocks("sh") for line in block.splitlines() if line.startswith("hetdpt ")]
    assert len(lines) == 4
    for line in lines:
        subprocess.run([sys.executable, "-m", *line.split()], cwd=tmp_path, check=True)
    assert (tmp_path / "runs/small.onnx").is_file()


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^make (\w+)", "\n".join(blocks("sh")), re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
