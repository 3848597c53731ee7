"""Run benchmarks and keep their figures: ``python -m benchmarks [start memory cells ...]``.

A benchmark that takes options has them after a colon: ``claims:num=20,part=power``.
"""

import importlib
import itertools
import json
import os
import platform
import re
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import torch

from benchmarks.measure import HEAD, Figure

ALL = (
    "start",
    "memory",
    "sharded",
    "cells",
    "variables",
    "loop",
    "comparison",
    "log",
    "strategies",
    "asynchronous",
    "draw",
    "wire",
    "monitor",
)
"""Those that need no GPU and end soon.  Others, such as ``claims``, are asked for by name."""
RESULTS = Path(__file__).parent / "results"


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


def main(names: list[str]) -> None:
    figures: list[Figure] = []
    print(HEAD)
    for word in names or ALL:
        name, _, given = word.partition(":")
        options = dict(part.split("=", 1) for part in given.split(",") if part)
        for figure in _measure(name, options):
            print(figure.row(), flush=True)
            figures.append(figure)
    if not figures:
        return
    content = {"machine": machine(), "figures": [figure.to_json() for figure in figures]}
    called = "-".join(re.sub(r"[:=,]", "-", word) for word in names) or "all"
    path = free_path(f"{time.strftime('%Y-%m-%d')}-{called}")
    path.write_text(json.dumps(content, indent=1) + "\n")
    print(f"\n{path}")


def _measure(name: str, options: dict[str, str]) -> list[Figure]:
    """Measure one; options are of the types that its function names."""
    function = importlib.import_module(f"benchmarks.{name}").measure
    kinds = function.__annotations__
    return list(function(**{key: kinds[key](value) for key, value in options.items()}))


def free_path(stem: str) -> Path:
    """Return where no earlier figures lie: those of another machine may be of the same day."""
    RESULTS.mkdir(exist_ok=True)
    names = itertools.chain([stem], (f"{stem}-{number}" for number in itertools.count(2)))
    return next(path for name in names if not (path := RESULTS / f"{name}.json").exists())


main(sys.argv[1:])
