"""An exported script, even with a killed worker, trains under torchrun like the notebook."""

import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ddpnb.reports.export.script import write_script
from tests.cluster.rig import DYNAMO, prepared, started, wait_until
from tests.cluster.two_hosts import TwoHosts

SECONDS = 200.0
"""The longest wait on a busy machine. On an idle machine the test takes 20 s."""

CELL = """
import os, time
from pathlib import Path
import torch
from torch import nn

def model():
    return nn.Sequential(
        nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 2)
    )

def data(split):
    x = torch.randn(200, 8, generator=torch.Generator().manual_seed(len(split)))
    return x, (x.sum(dim=1) > 0).long()

folder, calls = Path({folder!r}), 0

def loss(outputs, targets):
    global calls
    calls += outputs.requires_grad
    (folder / f"calls-{{os.environ['RANK']}}").write_text(str(calls))
    if calls == 13 and os.environ["RANK"] == "1" and (folder / "hold").exists():
        (folder / "held.tmp").write_text(str(os.getpid()))
        (folder / "held.tmp").rename(folder / "held")
        time.sleep({seconds})
    return nn.functional.cross_entropy(outputs, targets)
"""
"""Five steps and one checkpoint per epoch. Rank 1 waits in step 13 if the file ``hold`` exists."""


def test_a_worker_killed_under_torchrun_costs_one_interval(hosts, tmp_path):
    folder = tmp_path / "project"
    folder.mkdir()
    losses, held_out = trained_and_exported(folder)
    (folder / "hold").touch()
    running = [torchrun(hosts, host, folder) for host in "ab"]
    try:
        wait_until(
            lambda: (folder / "held").exists() or any(each.poll() is not None for each in running),
            "step 13",
            timeout=SECONDS,
        )
        if (folder / "held").exists():
            assert (folder / "train.pt").exists()
            os.kill(int((folder / "held").read_text()), signal.SIGKILL)
        texts = [each.communicate(timeout=SECONDS)[0] for each in running]
    finally:
        for each in running:
            each.kill()
    errors = [(folder / f"{host}.err").read_text() for host in "ab"]
    assert [each.returncode for each in running] == [0, 0], "\n".join([*texts, *errors])
    text = "".join(texts)  # after the restart rank 0 may be on the other host
    found = re.findall(r"^step (\d+) of 15: loss ([\d.]+)", text, re.MULTILINE)
    assert [int(step) for step, _ in found] == [5, 10, 15]
    assert [float(loss) for _, loss in found] == pytest.approx(losses, abs=1e-6)
    (last,) = re.findall(r"^held-out loss ([\d.]+)", text, re.MULTILINE)
    assert float(last) == pytest.approx(held_out, abs=1e-6)
    for rank in range(2):  # the checkpoint had 10 of 15 steps
        assert (folder / f"calls-{rank}").read_text() == "5"
    wait_until(lambda: not any(map(hosts.processes, "ab")), "hosts without processes")


def trained_and_exported(folder: Path) -> tuple[list[float], float]:
    """Return the notebook's loss in the last step of each epoch, and the held-out loss."""
    source = CELL.format(folder=str(folder), seconds=SECONDS)
    options = {"source": source, "num_epochs": 3, "batch_size": 40, "seed": 3}
    with started(2, environment=DYNAMO) as cluster:
        comparison = prepared(cluster, folder / "data", "ddp", **options).run().comparison
    (run,) = comparison.runs
    assert run.status == "finished"
    write_script(comparison, folder / "train.py")
    losses = [run.events["loss"][run.events["step"] == step].mean() for step in (4, 9, 14)]
    return losses, run.reports[0].held_out_loss


def torchrun(hosts: TwoHosts, host: str, folder: Path) -> "subprocess.Popen[str]":
    """Run the commands of docs/hosts.md on one host over ssh, with one rank per host.

    Both hosts have this machine's host name, so neither can be reached by that name.
    """
    text = (Path(__file__).parents[2] / "docs/hosts.md").read_text()
    exports = re.findall(r"^(export .*)$", text, re.MULTILINE)
    (line,) = re.findall(r"^torchrun (--nnodes 2 .*)$", text, re.MULTILINE)
    line = line.replace("HOST:29400", f"{hosts.address('a')}:29400")
    line = line.replace("--nproc-per-node 2", "--nproc-per-node 1")
    line = line.replace("--max-restarts 3", "--max-restarts 1")
    own = f"--local-addr {hosts.address(host)}" + " --rdzv-conf is_host=1" * (host == "a")
    lines = [
        f"cd {shlex.quote(str(folder))}",
        f"export PATH={Path(sys.executable).parent}:$PATH",
        *(each.replace("eth0", "net0") for each in exports),
        f"torchrun {own} {line}",
    ]
    with (folder / f"{host}.err").open("w") as errors:
        return subprocess.Popen(
            ["ssh", host, "\n".join(lines)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
