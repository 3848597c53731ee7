"""What can this machine do?  Measured on every rank, in a few seconds (ranks)."""

import copy
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddpnb.protocol.errors import UserError, summary_of
from ddpnb.protocol.machine import MachineQuery, ModelMeasured, RankMeasured
from ddpnb.protocol.messages import RankState
from ddpnb.rank.cancellation import CancellationToken
from ddpnb.rank.servers.rendezvous import WorkerConfig, host_id
from ddpnb.rank.servers.shared_sum import SharedAllReduce

BUDGET_SECONDS: Final = 0.4
"""Of one measurement; the collectives of all ranks make as many as fit on rank 0."""
TIMEOUT_SECONDS: Final = 60.0
NUM_SAMPLES: Final = 64
"""Of an input that is made up."""
NUMBER: Final = 4
"""Bytes."""
PROBE_SECONDS: Final = 0.05
PROBE_TRIPS: Final = 10
"""Messages between two ranks grow until one takes so long, and so many round trips: the first
ones over a long way are slowed down by TCP, which sends more after each answer."""
MAX_PROBE_BYTES: Final = 2**24
NUM_ROUND_TRIPS: Final = 40
TRIPS_SECONDS: Final = 0.2
"""Fewer round trips where they take longer than this, five at least."""


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
    model = _model_measured(query, namespace, device)  # before anything that others wait for
    on_gpu = device.type == "cuda"
    flops_alone = _flops(device) if state.rank == 0 else 0.0
    dist.barrier()  # takes part: every rank; the others have rested
    flops = _flops(device)
    dist.barrier()  # takes part: every rank
    memory = _memory(device)
    size = (1 << 26) if on_gpu else (1 << 22)
    latency = _together(torch.zeros(1, device=device), dist.all_reduce)
    seconds = _together(torch.zeros(size // NUMBER, device=device), dist.all_reduce)
    shared = _shared(query, state, folder, cancellation, size)
    to_device, from_device = _host_copies(device) if on_gpu else (0.0, 0.0)
    dist.barrier()  # takes part: every rank; GPUs of one host copy at the same time before
    between = _between(device) if on_gpu else (0.0, 0.0, False, "")
    return RankMeasured(
        rank=state.rank,
        host=state.host,
        device=state.device,
        device_name=state.device_name,
        backend=state.backend,
        flops=flops,
        flops_alone=flops_alone,
        memory=memory,
        latency=latency,
        all_reduce_bytes=size,
        all_reduce=seconds,
        shared_latency=shared[0],
        shared_all_reduce=shared[1],
        to_device=to_device,
        from_device=from_device,
        between=between[0],
        between_latency=between[1],
        has_peer_access=between[2],
        connection=between[3],
        model=model,
    )


# -- timing --------------------------------------------------------------------------------


def _timed(device: torch.device, work: Callable[[], object]) -> float:
    """Return the seconds of one call, the device's work included."""
    _wait(device)
    begun = time.perf_counter()
    work()
    _wait(device)
    return time.perf_counter() - begun


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _fastest(device: torch.device, work: Callable[[], object]) -> float:
    """Return the shortest of the calls that fit into the budget, but for the first."""
    work()
    found: list[float] = []
    end = time.perf_counter() + BUDGET_SECONDS
    while len(found) < 2 or time.perf_counter() < end:
        found.append(_timed(device, work))
    return min(found)


def _together(tensor: Tensor, exchange: Callable[[Tensor], object]) -> float:
    """Return the median seconds of an exchange; takes part: every rank."""
    first = max(_timed(tensor.device, lambda: exchange(tensor)) for _ in range(3))
    # each rank times its own; all must make as many
    number = torch.tensor([BUDGET_SECONDS / max(first, 1e-6)], device=tensor.device)
    dist.broadcast(number, src=0)
    found = sorted(
        _timed(tensor.device, lambda: exchange(tensor)) for _ in range(int(number.clamp(3, 200)))
    )
    return found[len(found) // 2]


# -- one device ----------------------------------------------------------------------------


def _flops(device: torch.device) -> float:
    size = 8192 if device.type == "cuda" else 768
    one, other = (torch.randn(size, size, device=device) for _ in range(2))
    out = torch.empty_like(one)
    return 2 * float(size) ** 3 / _fastest(device, lambda: torch.mm(one, other, out=out))


def _memory(device: torch.device) -> float:
    """Copy what is larger than any cache."""
    size = (1 << 30) if device.type == "cuda" else (1 << 25)
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    return 2 * size / _fastest(device, lambda: target.copy_(source))


def _host_copies(device: torch.device) -> tuple[float, float]:
    """Return bytes/s to the GPU and back; all ranks at once, as they load batches at once."""
    size = 1 << 28
    on_host = torch.zeros(size, dtype=torch.uint8, device="cpu", pin_memory=True)
    there = torch.zeros(size, dtype=torch.uint8, device=device)
    to = _fastest(device, lambda: there.copy_(on_host, non_blocking=True))
    back = _fastest(device, lambda: on_host.copy_(there, non_blocking=True))
    return size / to, size / back


def _between(device: torch.device) -> tuple[float, float, bool, str]:
    """Return bytes/s and latency to the next GPU of the host, and how the two are connected."""
    number = torch.cuda.device_count()
    own = device.index or 0
    other = (own + 1) % number
    if number < 2 or other == own:
        return 0.0, 0.0, False, ""
    size = 1 << 28
    here = torch.zeros(size, dtype=torch.uint8, device=device)
    there = torch.zeros(size, dtype=torch.uint8, device=torch.device("cuda", other))

    def copy_over(num_bytes: int) -> None:
        there[:num_bytes].copy_(here[:num_bytes])
        torch.cuda.synchronize(other)

    seconds = _fastest(device, lambda: copy_over(size))
    latency = _fastest(device, lambda: copy_over(NUMBER))
    peers = bool(torch.cuda.can_device_access_peer(own, other))
    return size / seconds, latency, peers, _connection(own, other)


def _connection(one: int, other: int) -> str:
    """Return what ``nvidia-smi topo -m`` says lies between two GPUs; empty where it is not known.

    With CUDA_VISIBLE_DEVICES the numbers of its table are others; then nothing is said.
    """
    command = shutil.which("nvidia-smi")
    if command is None or "CUDA_VISIBLE_DEVICES" in os.environ:
        return ""
    try:
        shown = subprocess.run(
            [command, "topo", "-m"], capture_output=True, text=True, timeout=5, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
    return connection_in(shown, one, other)


def connection_in(shown: str, one: int, other: int) -> str:
    """Return the cell of two GPUs in the table of ``nvidia-smi topo -m``; empty if it has none.

    The row of a GPU has an X in its own column, which the row of heads has not.
    """
    for line in shown.splitlines():
        cells = line.split()
        has_both = cells[:1] == [f"GPU{one}"] and len(cells) > max(one, other) + 1
        if has_both and cells[one + 1] == "X":
            return cells[other + 1]
    return ""


# -- shared memory -------------------------------------------------------------------------


def _shared(
    query: MachineQuery,
    state: RankState,
    folder: Path,
    cancellation: CancellationToken,
    size: int,
) -> tuple[float, float]:
    """Return the seconds of all-reduces in shared memory; takes part: every rank."""
    if state.device != "cpu" or state.world_size == 1:
        return 0.0, 0.0
    hosts = [""] * state.world_size
    dist.all_gather_object(hosts, host_id(folder))
    if len(set(hosts)) > 1:
        return 0.0, 0.0
    shared = SharedAllReduce(
        WorkerConfig(
            rank=state.rank,
            world_size=state.world_size,
            folder=folder,
            name=query.name,
            timeout_seconds=TIMEOUT_SECONDS,
            cancellation=cancellation,
        )
    )
    try:
        one = _together(torch.zeros(state.world_size, device="cpu"), shared.all_reduce)
        return one, _together(torch.zeros(size // NUMBER, device="cpu"), shared.all_reduce)
    finally:
        shared.close()


# -- a model -------------------------------------------------------------------------------


def _model_measured(
    query: MachineQuery, namespace: Mapping[str, Any], device: torch.device
) -> ModelMeasured | None:
    if not query.model:
        return None
    found = namespace.get(query.model)
    if not isinstance(found, nn.Module):
        what = "no variable" if found is None else "no model under the name"
        raise UserError(f"The ranks have {what} {query.model}: define it in a %%ddp cell first.")
    inner = getattr(found, "module", found)  # as DDP and DataParallel wrap it
    model = copy.deepcopy(inner if isinstance(inner, nn.Module) else found).to(device)
    batch, is_made_up = _batch(query, namespace, model, device)
    try:
        whole = _fastest(device, lambda: _pass(model, batch))
        fewer = len(batch) // 2
        less = _fastest(device, lambda: _pass(model, batch[:fewer])) if fewer else 0.0
    except Exception as error:
        advice = "name what it is called with, as --input x" if is_made_up else "it was called so"
        raise UserError(
            f"{query.model} cannot be measured ({summary_of(error)}): {advice}."
        ) from error
    trained = [each for each in model.parameters() if each.requires_grad]
    return ModelMeasured(
        num_parameters=sum(each.numel() for each in trained),
        num_bytes=sum(each.numel() * each.element_size() for each in trained),
        num_samples=len(batch),
        seconds=whole,
        num_fewer=fewer,
        fewer_seconds=less,
        is_made_up=is_made_up,
    )


def _batch(
    query: MachineQuery, namespace: Mapping[str, Any], model: nn.Module, device: torch.device
) -> tuple[Tensor, bool]:
    """Return what the model is called with, and whether it is made up."""
    if query.input:
        given = namespace.get(query.input)
        if not isinstance(given, Tensor) or given.dim() == 0 or len(given) == 0:
            raise UserError(f"--input {query.input}: the ranks have no tensor of that name.")
        return given.detach().to(device), False
    for layer in model.modules():
        if isinstance(layer, nn.Embedding):
            return torch.zeros(NUM_SAMPLES, 32, dtype=torch.long, device=device), True
        if isinstance(layer, nn.Linear):
            return torch.randn(NUM_SAMPLES, layer.in_features, device=device), True
        if isinstance(layer, nn.Conv2d):
            return torch.randn(NUM_SAMPLES, layer.in_channels, 32, 32, device=device), True
    raise UserError(
        f"Nobody knows what {query.model} is called with: name a tensor on the ranks, as --input x."
    )


def _pass(model: nn.Module, batch: Tensor) -> None:
    """Make a forward and a backward pass; the gradients are the copy's."""
    output = model(batch)
    while not isinstance(output, Tensor):
        output = next(iter(output.values() if isinstance(output, Mapping) else output))
    output.float().sum().backward()


def measure_links(
    ranks: Sequence[int], device: torch.device
) -> list[tuple[int, int, float, float]]:
    """Measure the connections between ranks, one pair after the other; takes part: every rank.

    Returns:
        For each pair in which this rank is the sender: from, to, seconds one way, bytes per second.
    """
    if dist.get_backend() == "gloo":  # which takes a GPU's address for one of the host's memory
        device = torch.device("cpu")
    rank, found = dist.get_rank(), []
    for one in ranks:
        for other in ranks:
            if one == other:
                continue
            dist.barrier()  # no other pair sends meanwhile
            if rank == one:
                found.append((one, other, *_measure_link(other, device)))
            elif rank == other:
                _answer_link(one, device)
    dist.barrier()
    return found


def _measure_link(peer: int, device: torch.device) -> tuple[float, float]:
    """Measure the connection to a rank that answers."""
    byte, size = torch.zeros(1, dtype=torch.uint8, device=device), 2**16
    trips: list[float] = []
    while not byte.item():
        is_last = len(trips) + 1 >= NUM_ROUND_TRIPS or (
            len(trips) > 3 and sum(trips) > TRIPS_SECONDS
        )
        byte.fill_(is_last)
        began = time.perf_counter()
        dist.send(byte, peer)
        dist.recv(byte, peer)
        byte.cpu()  # until it is there
        trips.append(time.perf_counter() - began)
    trip = min(trips)
    while True:
        content = torch.zeros(size, dtype=torch.uint8, device=device)
        began = time.perf_counter()
        dist.send(content, peer)
        dist.recv(byte, peer)
        byte.cpu()
        seconds = time.perf_counter() - began
        is_long = seconds >= max(PROBE_SECONDS, PROBE_TRIPS * trip)
        is_last = is_long or size >= MAX_PROBE_BYTES
        dist.send(torch.full_like(byte, is_last), peer)
        if is_last:
            return trip / 2, size / max(seconds - trip, 1e-9)
        size *= 4


def _answer_link(peer: int, device: torch.device) -> None:
    """Answer a rank that measures."""
    byte, size = torch.zeros(1, dtype=torch.uint8, device=device), 2**16
    while not byte.item():
        dist.recv(byte, peer)
        dist.send(byte, peer)
    while True:
        dist.recv(torch.empty(size, dtype=torch.uint8, device=device), peer)
        dist.send(byte, peer)
        dist.recv(byte, peer)
        if byte.item():
            return
        size *= 4
