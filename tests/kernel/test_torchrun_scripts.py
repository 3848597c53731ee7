"""An exported script trains under torchrun as the notebook did, also after a worker's death."""

import json
import os
import re
import subprocess
import sys

import pytest

from tests.kernel.client import Cell, Kernel

CELL = """%%ddp_compare {line} --no-baseline --seed 3 --name {name}
import os, signal
import torch
from pathlib import Path
from sklearn.datasets import load_digits
from torch import nn

def model():
    return nn.Sequential(
        nn.Linear(64, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 10)
    )

def data(split):
    images, labels = load_digits(return_X_y=True)
    few = slice(0, 205) if split == "train" else slice(205, 300)
    return torch.tensor(images[few] / 16).float(), torch.tensor(labels[few])

calls = 0

def loss(outputs, targets):
    global calls
    calls += outputs.requires_grad
    dying = Path("dying")
    if calls == 14 and int(os.environ["RANK"]) == 1 and dying.exists():
        dying.unlink()
        os.kill(os.getpid(), signal.SIGKILL)
    return nn.functional.cross_entropy(outputs, targets)
"""
STRATEGIES = [
    "ddp",
    "zero",
    "fsdp",
    "local-sgd:every=3,after=2",
    "ddp:hook=fp16,bucket_cap_mb=0.001",
    "ddp:hook=bf16,static_graph=on",
    "ddp:hook=powersgd,powersgd_rank=2",
]
OPTIONS = (
    "--accumulate 2 --amp bf16 --clip 0.5 --lr-warmup 0.5 --momentum 0.9 --batch-per-worker 16 "
    "--lr-scaling linear"
)


def compare(kernel: Kernel, name: str, line: str) -> Cell:
    cell = kernel.run(CELL.format(name=name, line=line), timeout=240)
    assert not cell.error, cell.error_text
    return kernel.run("import ddpnb")


@pytest.fixture(scope="module")
def compared(kernel_of_module: Kernel) -> Cell:
    line = f"{' '.join(STRATEGIES)} --epochs 2.5 --batch-size 40 --lr 0.2 --momentum 0.5"
    return compare(kernel_of_module, "plain", line)


def torchrun(kernel: Kernel, *words: str) -> "subprocess.CompletedProcess[str]":
    """Run a script of the notebook's folder with two processes, without ddpnb."""
    environment = {name: os.environ[name] for name in os.environ if name != "PYTHONPATH"}
    return subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", *words],
        cwd=kernel.folder,
        env=environment | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=180,
    )


def export(kernel: Kernel, words: str) -> str:
    cell = kernel.run(f"%ddp_export {words}")
    assert not cell.error, cell.error_text
    return cell.stdout


def losses(kernel: Kernel, name: str, strategy: str) -> list[float]:
    """Those of rank 0 in the notebook, then the final ones."""
    kernel.run(
        f"result = ddpnb.load({name!r})\nframe = result.steps()\n"
        f"frame = frame[(frame.strategy == {strategy!r}) & (frame['rank'] == 0)]\n"
        f"run = next(r for r in result.comparison.runs if r.name == {strategy!r}).reports[0]"
    )
    code = "__import__('json').dumps([*frame.loss, run.final_loss, run.held_out_loss])"
    found: list[float] = json.loads(kernel.value(code))
    return found


def printed(text: str) -> dict[int, float]:
    """The losses that a script has printed, by step."""
    return {
        int(n): float(x) for n, x in re.findall(r"^step (\d+) of \d+: loss ([\d.]+)", text, re.M)
    }


def finals(text: str) -> list[float]:
    return [float(x) for x in re.findall(r"^(?:final training|held-out) loss ([\d.]+)", text, re.M)]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_each_strategy_has_the_losses_of_the_notebook(
    compared: Cell, kernel: Kernel, strategy: str
):
    file = f"{re.sub('[^a-z0-9]+', '-', strategy)}.py"
    export(kernel, f"plain {file} --strategy {strategy}")
    ended = torchrun(kernel, "--nproc-per-node", "2", file, "--log-every", "1")
    assert ended.returncode == 0, ended.stderr
    *steps, final, held_out = losses(kernel, "plain", strategy)
    assert [*printed(ended.stdout).values()] == pytest.approx(steps, abs=1e-6)
    if not strategy.startswith("local-sgd"):  # its BatchNorm is estimated anew in the notebook
        assert finals(ended.stdout) == pytest.approx([final, held_out], abs=1e-6)
    assert "ddpnb" not in (kernel.folder / file).read_text()
