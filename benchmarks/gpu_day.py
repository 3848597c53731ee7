"""Runs all tests and benchmarks for GPUs on this machine: ``make gpu``.

Every test in ``tests/gpu`` and every benchmark runs in a separate process with a time limit, so a
step that hangs or crashes does not stop the next step.  No step needs a network.  After each step,
``build/gpu/report.json`` has the outcomes of all steps so far.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.peers import PEERS, is_installed
from benchmarks.table import machine

REPORT = Path("build/gpu/report.json")
LIMIT_SECONDS = 120
LEAST_SECONDS = 10
"""A step does not begin if less time is left."""
TAIL = 8000
"""The number of characters that the report keeps of a step's output."""


@dataclass(frozen=True)
class Step:
    """A command with its time limit in seconds."""

    name: str
    command: Sequence[str]
    limit: float = LIMIT_SECONDS


@dataclass(frozen=True)
class Outcome:
    """The outcome of a step: ``passed``, ``skipped: ...`` or ``failed: ...``."""

    name: str
    state: str
    seconds: float = 0.0
    output: str = ""


def run(step: Step, seconds_left: float) -> Outcome:
    """Run a step and return its outcome; after the time limit, kill its process group."""
    if seconds_left < LEAST_SECONDS:
        return Outcome(step.name, "skipped: no time left")
    began, limit = time.monotonic(), min(step.limit, seconds_left)
    with tempfile.TemporaryFile("w+", errors="replace") as file:
        process = subprocess.Popen(
            step.command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            code = None
        file.seek(0)
        output = file.read()
    state = f"failed: not within {limit:.0f} s" if code is None else _state(code, output)
    return Outcome(step.name, state, time.monotonic() - began, output[-TAIL:])


def _state(code: int, output: str) -> str:
    if code == 0:
        skipped = re.search(r"^SKIPPED .*?: (.*)", output, re.MULTILINE)
        return f"skipped: {skipped[1]}" if skipped else "passed"
    return f"failed: died of {signal.Signals(-code).name}" if code < 0 else f"failed: exit {code}"


def steps() -> Iterator[Step]:
    """Yield one step for each test, then the benchmarks."""
    pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist"]
    collect = [*pytest, "--collect-only", "tests/gpu"]
    listed = subprocess.run(collect, capture_output=True, text=True, check=False, timeout=120)
    if listed.returncode:
        sys.exit(listed.stdout)
    for name in listed.stdout.splitlines():
        if "::" in name:
            yield Step(name.partition("::")[2], [*pytest, "-rs", name])
    benchmarks = [sys.executable, "-m", "benchmarks"]
    yield Step("benchmarks on GPUs", [*benchmarks, "gpu"], 1800)
    peers = "+".join(each.name for each in PEERS if is_installed(each) and "," not in each.name)
    quick = ["env", "CUDA_VISIBLE_DEVICES=", *benchmarks, f"versus:quick=1,peers={peers}"]
    yield Step("comparison with other tools, on this machine's CPU", quick, 900)


def main(
    todo: Iterable[Step], num_gpus: int, about: dict[str, str], minutes: float = 14.0
) -> list[Outcome]:
    """Run all steps that fit into so many minutes, and write the report after each step."""
    end = time.monotonic() + 60 * minutes
    outcomes: list[Outcome] = []
    content = {"date": time.strftime("%Y-%m-%d"), "machine": about}
    REPORT.parent.mkdir(parents=True, exist_ok=True)
    for step in todo:
        skipped = Outcome(step.name, "skipped: no GPU")
        outcomes.append(run(step, end - time.monotonic()) if num_gpus else skipped)
        print(f"{outcomes[-1].state:12} {step.name}", flush=True)
        written = json.dumps(content | {"steps": [asdict(each) for each in outcomes]}, indent=1)
        REPORT.write_text(f"{written}\n")
    print(f"The report is {REPORT}.")
    return outcomes


if __name__ == "__main__":
    import torch

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=14.0, help="maximum time of all steps")
    minutes = parser.parse_args().minutes
    found = main(steps(), torch.cuda.device_count(), machine(), minutes)
    sys.exit(any(each.state.startswith("failed") for each in found))
