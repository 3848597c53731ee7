"""Runs all tests and benchmarks for GPUs on this machine: ``make gpu``.

Every test with the marker ``gpu`` and every benchmark runs in a separate process with a time limit.
A step that hangs or crashes does not stop the next step.  The results are ``report.html`` and
``report.json`` in ``build/gpu``.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path

from benchmarks.table import machine
from ddpnb.reports.kit import page

FOLDER = Path("build/gpu")
LIMIT_SECONDS = 300
TAIL = 8000
"""The number of characters that the report keeps of a step's output."""


@dataclass(frozen=True)
class Step:
    """A command with its time limit in seconds."""

    name: str
    command: Sequence[str]
    limit: float = LIMIT_SECONDS
    num_gpus: int = 1
    """The number of GPUs that the step needs."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of a step: ``passed``, ``skipped: ...`` or ``failed: ...``."""

    name: str
    state: str
    seconds: float = 0.0
    output: str = ""


def run(step: Step, num_gpus: int) -> Outcome:
    """Run a step and return its outcome; after the time limit, kill its process group."""
    if num_gpus < step.num_gpus:
        return Outcome(step.name, "skipped: " + ("no GPU" if num_gpus == 0 else "needs two GPUs"))
    began = time.monotonic()
    process = subprocess.Popen(
        step.command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=step.limit)
        state = _state(process.returncode, output)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        state = f"failed: not within {step.limit:g} s"
    return Outcome(step.name, state, time.monotonic() - began, output[-TAIL:])


def _state(code: int, output: str) -> str:
    if code == 0:
        skipped = re.search(r"^SKIPPED .*?: (.*)", output, re.MULTILINE)
        return f"skipped: {skipped[1]}" if skipped else "passed"
    return f"failed: died of {signal.Signals(-code).name}" if code < 0 else f"failed: exit {code}"


def steps() -> Iterator[Step]:
    """Yield one step for each test, then the benchmarks."""
    pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist"]
    collect = [*pytest, "-m", "gpu", "--collect-only"]
    listed = subprocess.run(collect, capture_output=True, text=True, check=False, timeout=120)
    for name in listed.stdout.splitlines():
        if "::" in name:
            yield Step(name.partition("::")[2], [*pytest, "-rs", name])
    yield Step("benchmarks on GPUs", [sys.executable, "-m", "benchmarks", "gpu"], 1800)
    on_cpu = ["env", "CUDA_VISIBLE_DEVICES="]
    quick = [*on_cpu, sys.executable, "-m", "benchmarks", "versus:quick=1"]
    yield Step("comparison with other tools, on this machine's CPU", quick, 900)


def report(outcomes: Sequence[Outcome], about: dict[str, str]) -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    content = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": about,
        "steps": [asdict(each) for each in outcomes],
    }
    (FOLDER / "report.json").write_text(json.dumps(content, indent=1) + "\n")
    rows = "".join(
        f"<tr><td>{escape(each.name)}</td><td>{escape(each.state)}</td>"
        f"<td>{each.seconds:.1f} s</td><td><details><summary>output</summary>"
        f"<pre>{escape(each.output)}</pre></details></td></tr>"
        for each in outcomes
    )
    stated = escape(", ".join(f"{key} {value}" for key, value in about.items()))
    body = f"<h1>ddpnb on GPUs</h1><p>{content['date']}: {stated}</p><table>{rows}</table>"
    (FOLDER / "report.html").write_text(page("ddpnb on GPUs", body))


def main(todo: Sequence[Step], num_gpus: int, about: dict[str, str]) -> list[Outcome]:
    """Run all steps, and write the report after each step."""
    outcomes: list[Outcome] = []
    for step in todo:
        outcomes.append(run(step, num_gpus))
        print(f"{outcomes[-1].state:12} {step.name}", flush=True)
        report(outcomes, about)
    print(f"The report is {FOLDER / 'report.html'}. Please commit report.json.")
    return outcomes


if __name__ == "__main__":
    import torch

    found = main(list(steps()), torch.cuda.device_count(), machine())
    sys.exit(any(each.state.startswith("failed") for each in found))
