"""Faults put on a real command: nothing is lost. ``benchmarks/faults.py`` puts all of them on all long commands."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "faults.py"


@pytest.mark.slow
@pytest.mark.parametrize("job", ["oneshot", "recover", "select"])
def test_nothing_is_lost(tmp_path: Path, job: str) -> None:
    out = tmp_path / "faults.json"
    disks = ("full", "read-only") if os.geteuid() == 0 and sys.platform == "linux" else ()
    faults = ("kill", "terminate", "interrupt", *disks, "damage", "foreign")
    command = [sys.executable, SCRIPT, "--jobs", job, "--faults", *faults, "--points", "2", "--out", out]
    subprocess.run(command, check=True, capture_output=True, timeout=1200)
    rows = json.loads(out.read_text())["rows"]
    lost = [(row["key"], row["values"]) for row in rows if row["values"]["outcome"] == "lost"]
    assert lost == []
    tried = Counter(row["key"]["fault"] for row in rows)
    assert tried.keys() == set(faults)
    assert all(row["values"]["said"].startswith("stopped by ") for row in rows if row["key"]["fault"] == "interrupt")
