"""All benchmarks, one after another, then the pages that are rendered from them.

    python benchmarks/suite.py            every figure of docs/results.md; hours, and goes on where it was stopped
    python benchmarks/suite.py --quick    a part of each, in ten minutes on two cores, beside the committed results

Both measure anew, in runs/bench/full or runs/bench/quick, and name what is worse than in the committed results. The
quick version changes nothing else; the full one puts its rows in the place of these, once all is done, and renders the
pages. What needs the real ViT-Tiny that lies in ``../shared/data`` is left out, by name, where that is absent.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from evidence import IMAGENET, RESULTS, adopt

HERE = Path(__file__).parent
QUICK, FULL = Path("runs/bench/quick"), Path("runs/bench/full")


@dataclass(frozen=True)
class Step:
    """A script with its arguments, and those of the quick version; None where it has none."""

    script: str
    full: tuple[str, ...]
    quick: tuple[str, ...] | None
    results: str
    """The name of its file."""
    needs_data: bool = False
    processes: int = 1
    """That share the work of the full version, one core each."""


# What needs no search of many layers.
QUICK_PEERS = ("one-shot", "--targets", "0.84", "--peers", "block drop", "ToMe", "truncate", "--work", f"{QUICK}/peers")
QUICK_METHODS = ("demo", "--removal", "calibrated", "--layers", "4", "--methods", "hetdpt,random", "--work", f"{QUICK}")
QUICK_FAULTS = ("--jobs", "oneshot", "--faults", "kill", "interrupt", "--points", "2")
FEW_MACS = ("--targets", "0.5", "0.4", "--peers", "ToMe", "hetdpt + ToMe")  # what layers alone do not come down to
SUITE = (
    Step("paper.py", ("costs",), ("costs", "--quick"), "paper_costs"),
    Step("paper.py", ("speed",), ("speed", "--quick"), "paper_speed"),
    Step("paper.py", ("trim",), ("trim", "--quick"), "paper_trim"),
    Step("tail.py", ("accuracy",), None, "tail", needs_data=True),
    Step("tail.py", ("speed",), ("speed", "--cases", "vit-tiny", "--runs", "5"), "tail"),
    Step("frontier.py", ("search",), None, "frontier", needs_data=True),
    Step("frontier.py", ("speed",), None, "frontier", needs_data=True),
    Step("runtimes.py", (), ("--quick",), "runtimes"),
    Step("effort.py", (), ("--quick",), "effort"),
    Step("peers.py", (), QUICK_PEERS, "peers", needs_data=True, processes=2),
    Step("peers.py", FEW_MACS, None, "peers", needs_data=True, processes=2),
    Step("peers.py", ("speed",), None, "peers", needs_data=True),
    Step("peers.py", ("speed", *FEW_MACS), None, "peers", needs_data=True),
    Step("accuracy.py", ("demo", "--seeds", "3"), QUICK_METHODS, "accuracy", processes=2),
    Step("accuracy.py", ("vit-tiny", "--seeds", "3"), None, "accuracy", needs_data=True, processes=2),
    Step("faults.py", (), QUICK_FAULTS, "faults"),
    Step("bad_input.py", (), None, "bad_input"),
    Step("scale.py", (), None, "scale"),
)


def take(step: Step, is_quick: bool) -> bool:
    """Run one step and return whether all went well; what several processes share they do on a core each."""
    file = (QUICK if is_quick else FULL) / f"{step.results}.json"
    arguments = (*((step.quick or ()) if is_quick else step.full), "--out", str(file))
    count = 1 if is_quick else step.processes
    environment = {**os.environ, "OMP_NUM_THREADS": "1"} if count > 1 else None
    command = [sys.executable, str(HERE / step.script), *arguments]
    running = [subprocess.Popen(command, env=environment) for _ in range(count)]
    codes = [process.wait() for process in running]
    return not any(codes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    if options.quick:
        shutil.rmtree(QUICK, ignore_errors=True)
    failed: list[str] = []
    for step in SUITE:
        name = shlex.join([step.script, *((step.quick or ()) if options.quick else step.full)])
        if options.quick and step.quick is None:
            continue
        if step.needs_data and not IMAGENET.is_dir():
            print(f"{name}: skipped, because {IMAGENET} does not exist", flush=True)
            continue
        begun = time.monotonic()
        print(name, flush=True)
        if not take(step, options.quick):
            failed.append(name)
        print(f"{name}: {time.monotonic() - begun:.0f} s", flush=True)
    for file in sorted((QUICK if options.quick else FULL).glob("*.json")):
        subprocess.run([sys.executable, HERE / "regress.py", RESULTS / file.name, file, "--common"])
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")
    if not options.quick:
        for file in FULL.glob("*.json"):
            adopt(file, RESULTS / file.name)
        subprocess.run([sys.executable, HERE / "render.py"], check=True)


if __name__ == "__main__":
    main()
