"""Measures how much ``%%ddp --trace`` slows a training down, during the trace and afterwards.

Two kernels with two ranks train in turns: the first with and without a trace, the second without.
"""

import textwrap

from benchmarks.kernel import Kernel, kernel
from benchmarks.measure import Figure
from benchmarks.work import rate_in

NUM_ROUNDS = 15
NUM_STEPS = 100
NUM_SAMPLES = 128
"""The samples of one rank in a step, for a global batch of 256."""

PREPARE = "%%ddp\n" + textwrap.dedent(
    f"""
    import time
    import torch, torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel
    from ddpnb.rank.tasks.digits import model

    torch.manual_seed(0)
    net = DistributedDataParallel(model())
    sgd = torch.optim.SGD(net.parameters(), lr=0.01)
    images, targets = torch.randn({NUM_SAMPLES}, 1, 8, 8), torch.randint(0, 10, ({NUM_SAMPLES},))

    def rate():
        dist.barrier()
        began = time.perf_counter()
        for _ in range({NUM_STEPS}):
            sgd.zero_grad()
            nn.functional.cross_entropy(net(images), targets).backward()
            sgd.step()
        dist.barrier()
        seconds = time.perf_counter() - began
        if dist.get_rank() == 0:
            print("rate", {NUM_STEPS * NUM_SAMPLES} * dist.get_world_size() / seconds, flush=True)
    """
)


def measure() -> list[Figure]:
    on, off, never = [], [], []
    with kernel() as traced, kernel() as untraced:
        for running in (traced, untraced):
            running.run("%load_ext ddpnb\n%ddp_start -n 2")
            running.run(PREPARE)
        for _ in range(1 + NUM_ROUNDS):
            never.append(_rate(untraced, "%%ddp"))
            on.append(_rate(traced, "%%ddp --trace"))
            off.append(_rate(traced, "%%ddp"))
        for running in (traced, untraced):
            running.run("%ddp_stop")
    return [
        Figure(
            name=f"samples/s of a DDP loop {when} a trace, compared with ranks that never traced "
            "(digits CNN, global batch 256)",
            unit="samples/s",
            ours=ours[1:],
            theirs=never[1:],
            limit=limit,
        )
        for when, ours, limit in (("during", on, ">= 0.90"), ("after", off, ">= 0.99"))
    ]


def _rate(running: Kernel, magic: str) -> float:
    return rate_in(running.run(f"{magic}\nrate()"))
