"""The losses that every synchronous strategy must compute, however its code is written.

``golden.json`` holds them.  To write them anew, where a change of the numbers is meant:

    python -m tests.rank.golden --write

Left out, for their losses depend on which rank is faster: ``async``, ``hogwild``; and
``single:threads=all``, whose sums depend on the number of cores.
"""

import contextlib
import io
import json
import os
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import ddpnb
from ddpnb.protocol.catalogue import STRATEGIES as catalogue  # noqa: N811

Golden = dict[str, dict[str, Any]]

VALUES = Path(__file__).with_name("golden.json")

PINNED = {
    "ATEN_CPU_CAPABILITY": "avx2",
    "MKL_CBWR": "AVX2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "DDPNB_PRELOAD": "torch._dynamo",  # the ranks' first optimizer would import it
}
"""Environment in which sums have one order, on whatever processor."""

OPTIONS = {"local-sgd": "local-sgd:every=2", "diloco": "diloco:every=2"}
STRATEGIES = (
    *(OPTIONS.get(name, name) for name, each in catalogue.items() if not each.is_asynchronous),
    "ddp:bucket_cap_mb=0.01",
    "ddp:find_unused_parameters=on",
    "ddp:hook=fp16",
    "ddp:hook=bf16",
    "ddp-overlap-by-hand:bucket_mb=0.01",
    "fsdp:reshard=off",
)

FEATURED = ("ddp", "fsdp", "dp")
"""Between them they have every way in which the loop treats a synchronous strategy."""

CELL = """
import torch
from torch import nn

def model():
    return nn.Sequential(nn.Linear(6, 16), {layer}, nn.Linear(16, 3))

def data(split):
    generator = torch.Generator().manual_seed(len(split))
    inputs = torch.randn(100, 6, generator=generator)
    return inputs, inputs[:, :3].argmax(1)
"""

SCHEDULED_ADAMW = """
def optimizer(params, num_steps):
    made = torch.optim.AdamW(params, lr=1e-2)
    return made, torch.optim.lr_scheduler.OneCycleLR(made, max_lr=5e-2, total_steps=num_steps)
"""

FINAL = ("final_loss", "held_out_loss", "held_out_accuracy")
EVALUATION = ("num_samples", "loss", "accuracy")

WEAK = {"task": "digits", "epochs": 0.5, "batch_per_worker": 100, "lr": 0.1}
OWN = {"source": CELL.format(layer="nn.Tanh()"), "epochs": 2, "batch_size": 31, "lr": 0.1}

CASES: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "cell": (STRATEGIES, OWN),
    "digits": (
        FEATURED,
        {"task": "digits", "epochs": 1, "batch_size": 255, "lr": 0.02, "momentum": 0.9},
    ),
    "synthetic": (("single",), {"task": "synthetic:samples=128", "epochs": 1, "batch_size": 31}),
    "weak scaling": (("ddp",), WEAK),
    "evaluated": (("ddp", "fsdp", "gossip"), OWN | {"eval_every": 0.5}),
    "accumulate": (FEATURED, OWN | {"accumulate": 3}),
    "clip": ((*FEATURED, "zero"), OWN | {"clip": 0.2}),
    "bf16": (FEATURED, OWN | {"amp": "bf16"}),
    "adamw": (
        (*FEATURED, "zero", "central", "diloco:every=2"),
        OWN | {"source": CELL.format(layer="nn.Tanh()") + SCHEDULED_ADAMW},
    ),
    "dropout": (("ddp",), OWN | {"source": CELL.format(layer="nn.Tanh(), nn.Dropout(0.3)")}),
    "batchnorm": (
        (*FEATURED, "local-sgd:every=2"),
        OWN | {"source": CELL.format(layer="nn.BatchNorm1d(16)")},
    ),
}
"""Strategies, and the options of ``ddpnb.compare`` with which they train."""


def compute() -> Golden:
    """Train all cases on two ranks; return their numbers by case and strategy."""
    os.environ.update(PINNED)
    with tempfile.TemporaryDirectory(prefix="ddpnb-golden-") as folder:
        os.chdir(folder)
        ddpnb.start(2, device="cpu", threads=1)
        try:
            return {
                case: {each: _numbers(each, options) for each in strategies}
                for case, (strategies, options) in CASES.items()
            }
        finally:
            ddpnb.stop()
            os.chdir("/")


def _numbers(strategy: str, options: dict[str, Any]) -> dict[str, Any]:
    """Train one strategy; return its numbers."""
    with contextlib.redirect_stdout(io.StringIO()):
        result = ddpnb.compare(
            strategy, baseline=False, **{"eval_every": 0, "eval_samples": 10_000} | options
        )
    steps = result.steps().sort_values("step")
    (run,) = result.to_frame().to_dict("records")
    # without copies of the model on the way, the trained one alone was evaluated: it is "final"
    evaluations = result.evaluations().to_dict("records") if "eval_every" in options else []
    return {
        "losses": {f"rank {rank}": _rounded(each.loss) for rank, each in steps.groupby("rank")},
        "final": _rounded(run[name] for name in FINAL),
        "evaluations": [_rounded(each[name] for name in EVALUATION) for each in evaluations],
    }


def _rounded(values: Iterable[float]) -> list[float]:
    return [round(float(value), 8) for value in values]


def main() -> None:
    """Write the numbers to the file that is named, or to ``golden.json``."""
    (target,) = sys.argv[1:]
    path = VALUES if target == "--write" else Path(target).resolve()
    lines = []
    for case, found in compute().items():
        inner = ",\n".join(f"  {json.dumps(each)}: {json.dumps(found[each])}" for each in found)
        lines.append(f"{json.dumps(case)}: {{\n{inner}\n }}")
    path.write_text("{\n " + ",\n ".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
