"""Stores the newest figures of each benchmark, and writes the table of promises in README.md."""

import json
import os
import platform
import subprocess
import time
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure import HEAD, Figure

RESULTS = Path(__file__).with_name("results")
README = Path(__file__).with_name("README.md")
BEGIN, END = "<!-- what follows is written by: python -m benchmarks table -->\n", "<!-- end -->\n"


def machine() -> dict[str, str]:
    model = subprocess.run(
        ["sh", "-c", "grep -m1 'model name' /proc/cpuinfo | cut -d: -f2"],
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip()
    return {
        "cpu": model or platform.processor(),
        "cores": str(len(os.sched_getaffinity(0))),
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "ipyparallel", "ipykernel")},
        **gpus(),
    }


def gpus() -> dict[str, str]:
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    if not names:
        return {}
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return {"gpus": ", ".join(names), "cuda": str(torch.version.cuda), "nccl": nccl}


def keep(name: str, figures: Sequence[Figure]) -> Path:
    """Replace the stored figures of a benchmark, and write the table."""
    lines = ",\n".join(f"  {json.dumps(asdict(figure))}" for figure in figures)
    head = f'"date": "{time.strftime("%Y-%m-%d")}",\n "machine": {json.dumps(machine())}'
    path = RESULTS / f"{name}.json"
    path.write_text(f'{{\n {head},\n "figures": [\n{lines}\n ]\n}}\n')
    write()
    return path


def write() -> None:
    README.write_text(with_table(README.read_text()))


def with_table(text: str) -> str:
    """Return the text with a new table of promises between its two marks."""
    return between(text, BEGIN, END, table())


def between(text: str, begin: str, end: str, content: str) -> str:
    """Return the text with new content between two marks."""
    before, _, rest = text.partition(begin)
    return f"{before}{begin}{content}{end}{rest.partition(end)[2]}"


def measured_on(stored: dict[str, Any]) -> str:
    """Return the date and the processor of stored results."""
    cpu = stored["machine"]["cpu"].replace("(R)", "").partition(" Processor")[0]
    return f"{stored['date']}, {cpu}"


def table() -> str:
    """Return the table: one row for each figure that has a promise."""
    rows = [HEAD]
    for path in sorted(RESULTS.glob("*.json")):
        content = json.loads(path.read_text())
        found = [Figure(**each) for each in content.get("figures", [])]
        rows += [f"{each.row()} {measured_on(content)} |" for each in found if each.limit]
    return "\n".join(rows) + "\n"
