"""What can this machine do?  Measured on every rank, in a few seconds (ranks)."""

import contextlib
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from ddpnb.protocol.errors import UserError, summary_of
from ddpnb.protocol.inspection import InspectSpec
from ddpnb.protocol.machine import MachineQuery, ModelMeasured, RankMeasured
from ddpnb.protocol.messages import RankState
from ddpnb.rank.cancellation import CancellationToken
from ddpnb.rank.collectives.flat import num_bytes
from ddpnb.rank.inspect.subject import num_rows, subject_of
from ddpnb.rank.meter import synchronize
from ddpnb.rank.servers.rendezvous import WorkerConfig, hosts_of
from ddpnb.rank.servers.shared_sum import SharedAllReduce
from ddpnb.rank.tasks.batches import moved

BUDGET_SECONDS: Final = 0.4
"""Of one measurement; the collectives of all ranks make as many as fit on rank 0."""
TIMEOUT_SECONDS: Final = 60.0
NUMBER_BYTES: Final = 4


def measure(
    query: MachineQuery,
    state: RankState,
    folder: Path,
    cancellation: CancellationToken,
    namespace: Mapping[str, Any],
) -> RankMeasured:
    """Measure this rank's device and what lies between the ranks; takes part: every rank.

    Nothing in the namespace changes: a model is copied first.

    Raises:
        UserError: the model cannot be measured as it was named.
    """
    device = torch.device(state.device)
    # before anything that others wait for
    model = _model_measured(query, state, namespace) if query.model else None
    flops_alone = _flops(device) if state.rank == 0 else 0.0
    dist.barrier()  # takes part: every rank; the others have rested
    flops = _flops(device)
    dist.barrier()  # takes part: every rank
    size = 2**26 if device.type == "cuda" else 2**22
    latency = _together(torch.zeros(1, device=device), dist.all_reduce)
    seconds = _together(torch.zeros(size // NUMBER_BYTES, device=device), dist.all_reduce)
    config = WorkerConfig(
        rank=state.rank,
        world_size=state.world_size,
        folder=folder,
        name=query.name,
        timeout_seconds=TIMEOUT_SECONDS,
        cancellation=cancellation,
    )
    shared = _shared(config, size) if state.device == "cpu" else (0.0, 0.0)
    return RankMeasured(
        rank=state.rank,
        host=state.host,
        device=state.device,
        device_name=state.device_name,
        backend=state.backend,
        flops=flops,
        flops_alone=flops_alone,
        latency=latency,
        all_reduce_bytes=size,
        all_reduce=seconds,
        shared_latency=shared[0],
        shared_all_reduce=shared[1],
        has_peer_access=_has_peer_access(device),
        model=model,
    )


def _timed(device: torch.device, work: Callable[[], object]) -> float:
    """Return the seconds of one call, the device's work included."""
    synchronize(device)
    begun = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - begun


def _fastest(device: torch.device, work: Callable[[], object]) -> float:
    """Return the shortest of the calls that fit into the budget, but for the first."""
    work()
    end, found = time.perf_counter() + BUDGET_SECONDS, list[float]()
    while len(found) < 2 or time.perf_counter() < end:
        found.append(_timed(device, work))
    return min(found)


def _together(tensor: Tensor, exchange: Callable[[Tensor], object]) -> float:
    """Return the median seconds of an exchange; takes part: every rank."""
    first = max(_timed(tensor.device, lambda: exchange(tensor)) for _ in range(3))
    # each rank times its own; all must make as many
    number = torch.tensor([BUDGET_SECONDS / max(first, 1e-6)], device=tensor.device)
    dist.broadcast(number, src=0)
    num = int(number.clamp(3, 200))
    return statistics.median(_timed(tensor.device, lambda: exchange(tensor)) for _ in range(num))


# -- one device, and shared memory ---------------------------------------------------------


def _flops(device: torch.device) -> float:
    size = 8192 if device.type == "cuda" else 768
    one, other = (torch.randn(size, size, device=device) for _ in range(2))
    out = torch.empty_like(one)
    return 2 * float(size) ** 3 / _fastest(device, lambda: torch.mm(one, other, out=out))


def _has_peer_access(device: torch.device) -> bool | None:
    """Return whether this GPU reads the memory of the host's next one; None: there is none."""
    num = torch.cuda.device_count() if device.type == "cuda" else 0
    own = device.index or 0
    return torch.cuda.can_device_access_peer(own, (own + 1) % num) if num > 1 else None


def _shared(config: WorkerConfig, size: int) -> tuple[float, float]:
    """Return the seconds of all-reduces in shared memory; takes part: every rank."""
    if config.world_size == 1 or len(set(hosts_of(config))) > 1:
        return 0.0, 0.0
    with contextlib.closing(SharedAllReduce(config)) as shared:
        one = _together(torch.zeros(config.world_size, device="cpu"), shared.all_reduce)
        return one, _together(torch.zeros(size // NUMBER_BYTES, device="cpu"), shared.all_reduce)


# -- a model -------------------------------------------------------------------------------


def _model_measured(
    query: MachineQuery, state: RankState, namespace: Mapping[str, Any]
) -> ModelMeasured:
    """Time forward and backward pass of a copy, with the whole and with half of its input."""
    spec = InspectSpec(inspection_id=query.name, model=query.model, batch=query.input)
    subject, device = subject_of(spec, state, namespace), torch.device(state.device)
    model, batch = subject.make()[0].to(device), moved(subject.batch, device)
    num_samples = num_rows(batch) or 0
    num_fewer = num_samples // 2 if isinstance(batch, Tensor) else 0

    def seconds(part: Any) -> float:
        return _fastest(device, lambda: subject.loss_of(model, part).backward())

    try:
        whole, less = seconds(batch), seconds(batch[:num_fewer]) if num_fewer else 0.0
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"{query.model} cannot be measured with {query.input} ({summary_of(error)}): "
            "name with --input what it is called with."
        ) from error
    trained = [each for each in model.parameters() if each.requires_grad]
    return ModelMeasured(
        num_parameters=sum(each.numel() for each in trained),
        num_bytes=num_bytes(trained),
        num_samples=num_samples,
        seconds=whole,
        num_fewer=num_fewer,
        fewer_seconds=less,
    )
