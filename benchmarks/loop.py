"""Does a DDP loop in a ``%%ddp`` cell run as fast as the same loop under ``torchrun``?"""

import re
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

from benchmarks.kernel import Kernel, kernel
from benchmarks.measure import Figure, in_turns

LOOP = textwrap.dedent(
    """
    import time
    import torch, torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(4),
        nn.Flatten(), nn.Linear(1024, 10),
    )
    net = DistributedDataParallel(net)
    sgd = torch.optim.SGD(net.parameters(), lr=0.01)
    images, targets = torch.randn(64, 3, 32, 32), torch.randint(0, 10, (64,))

    def steps(num):
        for _ in range(num):
            sgd.zero_grad()
            nn.functional.cross_entropy(net(images), targets).backward()
            sgd.step()

    steps(20)
    dist.barrier()
    began = time.perf_counter()
    steps(200)
    dist.barrier()
    rate = 200 * 64 * dist.get_world_size() / (time.perf_counter() - began)
    if dist.get_rank() == 0:
        print("rate", rate, flush=True)
    """
)
SCRIPT = f"import torch.distributed as d\nd.init_process_group('gloo')\n{LOOP}"


def rate_in(text: str) -> float:
    return float(re.findall(r"rate ([\d.]+)", text)[-1])


def torchrun_rate(script: Path) -> float:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return rate_in(done.stdout)


def cell_rate(running: Kernel) -> float:
    return rate_in(running.run(f"%%ddp\n{LOOP}"))


def measure() -> list[Figure]:
    with kernel() as running, tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "script.py"
        script.write_text(SCRIPT)
        running.run("%load_ext ddpnb\n%ddp_start -n 2")
        ours, theirs = in_turns(lambda: cell_rate(running), lambda: torchrun_rate(script), 9)
        running.run("%ddp_stop")
    return [
        Figure(
            name="a DDP loop in a %%ddp cell against torchrun, 2 ranks",
            unit="samples/s",
            ours=ours,
            theirs=theirs,
            limit=">= 0.98",
        )
    ]
