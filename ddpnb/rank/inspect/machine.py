"""What can this machine do?  Measured on every rank, in a few seconds (ranks)."""

import contextlib
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor

from ddpnb.protocol.machine import RankMeasured
from ddpnb.protocol.messages import RankState
from ddpnb.rank.cancellation import CancellationToken
from ddpnb.rank.meter import synchronize
from ddpnb.rank.servers.rendezvous import WorkerConfig, hosts_of
from ddpnb.rank.servers.shared_sum import SharedAllReduce

BUDGET_SECONDS: Final = 0.4
"""Of one measurement; the collectives of all ranks make as many as fit on rank 0."""
TIMEOUT_SECONDS: Final = 60.0
NUMBER_BYTES: Final = 4


def measure(state: RankState, folder: Path, cancellation: CancellationToken) -> RankMeasured:
    """Measure this rank's device and what lies between the ranks.  Takes part: every rank."""
    device = torch.device(state.device)
    flops_alone = _flops(device) if state.rank == 0 else 0.0
    dist.barrier()  # takes part: every rank; the others have rested
    flops = _flops(device)
    dist.barrier()  # takes part: every rank
    size = 2**26 if device.type == "cuda" else 2**22
    config = WorkerConfig(
        rank=state.rank,
        world_size=state.world_size,
        folder=folder,
        name="machine",
        timeout_seconds=TIMEOUT_SECONDS,
        cancellation=cancellation,
    )
    return RankMeasured(
        rank=state.rank,
        host=state.host,
        device=state.device,
        device_name=state.device_name,
        backend=state.backend,
        flops=flops,
        flops_alone=flops_alone,
        latency=_together(torch.zeros(1, device=device), dist.all_reduce),
        all_reduce_bytes=size,
        all_reduce=_together(torch.zeros(size // NUMBER_BYTES, device=device), dist.all_reduce),
        shared_all_reduce=_shared(config, size) if state.device == "cpu" else 0.0,
        has_peer_access=_has_peer_access(device),
    )


def _timed(device: torch.device, work: Callable[[], object]) -> float:
    """Return the seconds of one call, the device's work included."""
    synchronize(device)
    begun = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - begun


def _together(tensor: Tensor, exchange: Callable[[Tensor], object]) -> float:
    """Return the median seconds of an exchange; takes part: every rank."""
    first = max(_timed(tensor.device, lambda: exchange(tensor)) for _ in range(3))
    # each rank times its own; all must make as many
    number = torch.tensor([BUDGET_SECONDS / max(first, 1e-6)], device=tensor.device)
    dist.broadcast(number, src=0)
    num = int(number.clamp(3, 200))
    return statistics.median(_timed(tensor.device, lambda: exchange(tensor)) for _ in range(num))


def _flops(device: torch.device) -> float:
    """Return the operations per second of the fastest product that fits into the budget."""
    size = 8192 if device.type == "cuda" else 768
    one, other = (torch.randn(size, size, device=device) for _ in range(2))
    out = torch.empty_like(one)
    end, seconds = time.perf_counter() + BUDGET_SECONDS, list[float]()
    while len(seconds) < 3 or time.perf_counter() < end:
        seconds.append(_timed(device, lambda: torch.mm(one, other, out=out)))
    return 2 * float(size) ** 3 / min(seconds)


def _has_peer_access(device: torch.device) -> bool | None:
    """Return whether this GPU reads the memory of the host's next one; None: there is none."""
    num = torch.cuda.device_count() if device.type == "cuda" else 0
    own = device.index or 0
    return torch.cuda.can_device_access_peer(own, (own + 1) % num) if num > 1 else None


def _shared(config: WorkerConfig, size: int) -> float:
    """Return the seconds of an all-reduce in shared memory; takes part: every rank."""
    if config.world_size == 1 or len(set(hosts_of(config))) > 1:
        return 0.0
    with contextlib.closing(SharedAllReduce(config)) as shared:
        return _together(torch.zeros(size // NUMBER_BYTES, device="cpu"), shared.all_reduce)
