"""An exported script trains like the notebook, on the live ranks and under torchrun.

``tests/cluster/test_torchrun_hosts.py`` tests a worker's death under torchrun.
"""

import json
import os
import re
import subprocess
import sys

import pytest

from tests.kernel.client import Kernel

GENERAL = """
import torch
from torch import nn
from torch.utils.data import DataLoader

class Text(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.last = nn.EmbeddingBag(20, 8), nn.Linear(8, 2)
        self.dropout, self.unused = nn.Dropout(0.5), nn.Linear(1, 1)
    def forward(self, words, starts):
        return self.last(self.dropout(self.words(words, starts)))

vocabulary = {}

def model():
    return Text()

def data(split):
    vocabulary.update({"a": 1})
    assert rank < world_size and str(device) == "cpu"
    length = torch.randint(1, 6, (90,)).tolist()
    return DataLoader([(list(range(n)), n % 2) for n in length], batch_size=3)

def collate_fn(items):
    texts, labels = zip(*items)
    starts = torch.tensor([0, *map(len, texts)]).cumsum(0)[:-1]
    return {"words": torch.tensor(sum(texts, [])), "starts": starts, "y": torch.tensor(labels)}

def training_step(model, batch):
    assert vocabulary
    scores = model(batch["words"], batch["starts"])
    return {"loss": nn.functional.cross_entropy(scores, batch["y"]), "mean": scores.mean()}

def validation_step(model, batch):
    scores = model(batch["words"], batch["starts"])
    return {"right": (scores.argmax(1) == batch["y"]).double().mean()}

def optimizer(model, num_steps):
    groups = [{"params": [p for n, p in model.named_parameters() if "bias" in n], "lr": 0.02},
              {"params": [p for n, p in model.named_parameters() if "bias" not in n]}]
    made = torch.optim.SGD(groups, lr=0.05, momentum=0.9)
    return made, torch.optim.lr_scheduler.OneCycleLR(made, max_lr=0.5, total_steps=num_steps)
"""
ROWS = """
import numpy as np
import torch
from torch import nn

def model():
    return nn.Linear(4, 2)

def data(split):
    x = torch.from_numpy(np.random.randn(101, 4)).float()
    return (x, (x.sum(1) > 0).long().numpy())

def metric(outputs, targets):
    return {"right": (outputs.argmax(1) == targets).double().mean()}
"""
CASES = {
    "general": ("ddp:find_unused_parameters=on --epochs 2.5 --batch-size 14", GENERAL),
    "rows": (
        "ddp --epochs 2 --accumulate 3 --amp bf16 --clip 0.5 --momentum 0.9 --batch-per-worker 16",
        ROWS,
    ),
    "digits": ("ddp --task digits --epochs 1 --batch-size 256 --eval-samples 10000", ""),
}


def exported(kernel: Kernel, name: str, line: str, cell: str) -> str:
    """Run a comparison, export it, and return the command that runs the script."""
    magic = "%%ddp_compare" if cell else "%ddp_compare"
    compare = f"{magic} {line} --no-baseline --seed 3 --name {name}{cell}"
    assert kernel.run(compare, timeout=240).passed
    written = kernel.run(f"import ddpnb\n%ddp_export {name} {name}.py").passed
    (command,) = re.findall(r"^    (TORCH.* torchrun .*\.py)$", written.stdout, re.MULTILINE)
    assert command in (kernel.folder / f"{name}.py").read_text()
    return str(command)


def run(kernel: Kernel, command: str) -> str:
    """Run a shell command in the notebook's folder, and return its output."""
    environment = {name: os.environ[name] for name in os.environ if name != "PYTHONPATH"}
    environment |= {"OMP_NUM_THREADS": "1"}
    # This is the module of the command torchrun.
    command = command.replace("torchrun", f"{sys.executable} -m torch.distributed.run")
    options = {"cwd": kernel.folder, "env": environment, "timeout": 180}
    ended = subprocess.run(command, shell=True, capture_output=True, text=True, **options)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def check_losses(kernel: Kernel, name: str, printed: str) -> None:
    """Compare all numbers that a script printed with the notebook's means over the ranks."""
    kernel.run(
        f"import json\nresult = ddpnb.load({name!r})\n"
        "losses = result.steps().groupby('step').loss.mean()\n"
        "report = result.comparison.runs[0].reports[0]\n"
        "numbers = {'loss': report.held_out_loss, **report.held_out_metrics}"
    )
    losses, numbers = (
        json.loads(kernel.value(f"json.dumps({each})")) for each in ("list(losses)", "numbers")
    )
    steps = {int(n): float(x) for n, x in re.findall(r"step (\d+) of \d+: loss (\S+)", printed)}
    assert max(steps) == len(losses)
    assert steps == pytest.approx({step: losses[step - 1] for step in steps}, abs=1e-6)
    found = {key: float(x) for key, x in re.findall(r"held-out (\w+) (\S+)", printed)}
    assert found == pytest.approx(numbers, abs=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_a_script_has_the_losses_of_the_notebook(kernel: Kernel, name: str):
    command = exported(kernel, name, *CASES[name])
    ran = kernel.run(f"%ddp_run {name}.py").passed
    check_losses(kernel, name, "\n".join(ran.by_rank[0]))
    if name == "rows":
        (kernel.folder / f"{name}.pt").unlink()  # its checkpoint
        check_losses(kernel, name, run(kernel, command))
    assert "ddpnb" not in (kernel.folder / f"{name}.py").read_text()
