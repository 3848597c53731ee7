"""Run benchmarks and keep their figures: ``python -m benchmarks [start memory cells ...]``.

A benchmark that takes options has them after a colon: ``claims:num=20,part=power``.
``python -m benchmarks table`` measures nothing: it writes the table of README.md.
"""

import importlib
import os
import platform
import re
import subprocess
import sys
from importlib.metadata import version

import torch

from benchmarks.measure import HEAD, Figure
from benchmarks.table import keep, write

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


def main(words: list[str]) -> None:
    print(HEAD)
    for word in words or ALL:
        name, _, given = word.partition(":")
        options = dict(part.split("=", 1) for part in given.split(",") if part)
        figures = _measure(name, options)
        for figure in figures:
            print(figure.row(), flush=True)
        if figures:
            print(keep(re.sub(r"[:=,]", "-", word), machine(), figures))


def _measure(name: str, options: dict[str, str]) -> list[Figure]:
    """Measure one; options are of the types that its function names."""
    function = importlib.import_module(f"benchmarks.{name}").measure
    kinds = function.__annotations__
    return list(function(**{key: kinds[key](value) for key, value in options.items()}))


if sys.argv[1:] == ["table"]:
    write()
else:
    main(sys.argv[1:])
