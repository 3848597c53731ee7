"""What does an idle rank hold, against a process that was spawned and imported torch?"""

import subprocess
import sys

import psutil

from benchmarks.measure import Figure
from ddpnb.cluster.cluster import Cluster
from ddpnb.cluster.placement import ClusterSpec

NUM_RANKS = 2
MEGABYTE = 1e6


def pss(pid: int) -> float:
    return psutil.Process(pid).memory_full_info().pss / MEGABYTE


def spawned() -> list[float]:
    """As many fresh interpreters that import what an engine of torch's needs, at once."""
    code = "import torch, torch.distributed, ipyparallel.engine.app; print(1, flush=True); input()"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        for _ in range(NUM_RANKS)
    ]
    try:
        for process in processes:
            process.stdout.readline()
        return [pss(process.pid) for process in processes]
    finally:
        for process in processes:
            process.communicate(b"\n")


def measure() -> list[Figure]:
    cluster = Cluster.start(ClusterSpec(num_ranks=NUM_RANKS, device="cpu"))
    try:
        ours = [pss(state.pid) for state in cluster.states]
    finally:
        cluster.stop()
    return [
        Figure(
            name="memory of an idle rank (PSS) against a spawned process that imported torch",
            unit="MB",
            ours=ours,
            theirs=spawned(),
            limit="<= 0.5",
        )
    ]
