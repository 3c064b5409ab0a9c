"""How many bad inputs were tried, of each sort; a traceback ends the script with the test that has it.

    python benchmarks/bad_input.py [--examples 300] [--out benchmarks/results/bad_input.json]

Runs the tests that try them, slow ones too, with so many made-up examples each, and writes what they counted.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

from evidence import RESULTS, Recorder

TESTS = ("test_bad_arguments.py", "test_bad_files.py", "test_security.py", "test_foreign_models.py")
PREFIX = "tried: "


def count(report: Path) -> Counter[str]:
    """Return what the tests of a report say that they have tried."""
    found: Counter[str] = Counter()
    for one in ElementTree.parse(report).iter("property"):
        if (name := one.get("name", "")).startswith(PREFIX):
            found[name.removeprefix(PREFIX)] += int(one.get("value", "0"))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=300)
    parser.add_argument("--out", type=Path, default=RESULTS / "bad_input.json")
    options = parser.parse_args()
    tests = [str(Path(__file__).parents[1] / "tests" / name) for name in TESTS]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        how = ("-q", "-n", "2", "-m", "slow or not slow", "-o", "junit_family=xunit1", f"--junitxml={report}")
        command = [sys.executable, "-m", "pytest", *how, *tests]
        done = subprocess.run(command, env={**os.environ, "HETDPT_EXAMPLES": str(options.examples)})
        if done.returncode:
            sys.exit("a bad input is not refused as it should be; the test above says which")
        recorder = Recorder(options.out, forget=True)
        for what, tried in sorted(count(report).items()):
            recorder.add({"what": what}, tried=tried)


if __name__ == "__main__":
    main()
