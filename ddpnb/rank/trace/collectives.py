"""One collective, run for show: what each rank has before and after, time and bytes (ranks).

The tensor of rank r holds 10 (r + 1) + 0, 1, 2 ..., so that each number shows where it comes from.
Bytes are those that the kernel has sent on this process's TCP connections, gloo's headers included.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor

from ddpnb.protocol.connections import own_connections, traffic_of
from ddpnb.protocol.trace import CHUNKED, Chunks, CollectiveShown, CollectiveSpec

NUM_TIMED = 7
"""Calls of which the median is shown; one before is not timed."""
SETTLE_SECONDS = 1.0
"""How long the last bytes of a call may be on their way."""
NUMBER_BYTES = 4
FEW_CELLS = 8
"""Numbers of a tensor that are shown."""
OPS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.AVG,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "product": dist.ReduceOp.PRODUCT,
}
NO_AVG = "gloo has no avg: the ranks add up, then each divides by their number."


@final
@dataclass(slots=True)
class _Call:
    """One call of a collective, and the tensors that it reads and writes."""

    given: Tensor | None
    """None: this rank gives nothing."""
    got: Tensor | None
    """None: this rank gets nothing."""
    make: Callable[[], object]


def show(spec: CollectiveSpec, *, device: torch.device) -> CollectiveShown | None:
    """Run a collective, time it and count its bytes.  Takes part: every rank of the cluster.

    Returns:
        None on a rank that is not among the ``spec``'s.
    """
    world = tuple(range(dist.get_world_size()))
    group = dist.group.WORLD if spec.ranks == world else dist.new_group(list(spec.ranks))
    rank = dist.get_rank()
    if rank not in spec.ranks:
        return None
    assert group is not None
    try:
        return _shown(spec, group, rank, device)
    finally:
        if spec.ranks != world:
            dist.destroy_process_group(group)


def _shown(
    spec: CollectiveSpec, group: dist.ProcessGroup, rank: int, device: torch.device
) -> CollectiveShown:
    num_chunks = len(spec.ranks) if spec.name in CHUNKED else 1
    num = max(spec.num_bytes // NUMBER_BYTES // num_chunks, 1) * num_chunks
    if not spec.num_bytes:
        num = 2 * num_chunks if spec.name in (*CHUNKED, "scatter") else 4
    backend = dist.get_backend(group)
    is_divided = spec.op == "avg" and backend == "gloo"
    op = dist.ReduceOp.SUM if is_divided else OPS[spec.op]

    first = _call(spec, group, rank, num, op, device)
    before = _chunks(first.given, len(spec.ranks) if spec.name == "scatter" else num_chunks)
    dist.barrier(group)  # connections are made, and nobody is late
    sent = bytes_sent()
    first.make()
    _synchronize(device)
    sent_after = bytes_sent()
    counted = None if sent is None or sent_after is None else sent_after - sent
    if is_divided and first.got is not None:
        first.got /= len(spec.ranks)
    gathers = spec.name in ("gather", "all_gather", "all_to_all")
    after = _chunks(first.got, len(spec.ranks) if gathers else 1)

    return CollectiveShown(
        rank=rank,
        before=before,
        after=after,
        num_given=0 if first.given is None else first.given.numel(),
        num_got=0 if first.got is None else first.got.numel(),
        seconds=_median(spec, group, rank, num, op, device),
        small_seconds=_median(spec, group, rank, num_chunks, op, device),
        num_bytes_sent=counted if backend == "gloo" else None,
        backend=backend,
        notes=(NO_AVG,) if is_divided else (),
    )


def _call(
    spec: CollectiveSpec,
    group: dist.ProcessGroup,
    rank: int,
    num: int,
    op: dist.ReduceOp.RedOpType,
    device: torch.device,
) -> _Call:
    """Return a call with new tensors; it changes ``got`` in place."""
    ranks, root = spec.ranks, spec.from_rank
    own = numbers(rank, num, device)
    is_root = rank == root
    match spec.name:
        case "all_reduce":
            got = own.clone()
            return _Call(own, got, lambda: dist.all_reduce(got, op, group))
        case "broadcast":
            got = own.clone() if is_root else torch.zeros_like(own)
            given = own if is_root else None
            return _Call(given, got, lambda: dist.broadcast(got, root, group))
        case "reduce":
            got = own.clone()
            shown = got if is_root else None
            return _Call(own, shown, lambda: dist.reduce(got, root, op, group))
        case "scatter":
            every = numbers(rank, num * len(ranks), device) if is_root else None
            parts = None if every is None else list(every.chunk(len(ranks)))
            got = torch.zeros_like(own)
            return _Call(every, got, lambda: dist.scatter(got, parts, root, group))
        case "gather":
            whole = own.new_zeros(len(ranks), num) if is_root else None
            rows = None if whole is None else list(whole)
            return _Call(own, whole, lambda: dist.gather(own, rows, root, group))
        case "all_gather":
            whole = own.new_zeros(len(ranks), num)
            return _Call(own, whole, lambda: dist.all_gather(list(whole), own, group))
        case "reduce_scatter":
            got = own.new_zeros(num // len(ranks))
            chunks = list(own.chunk(len(ranks)))
            return _Call(own, got, lambda: dist.reduce_scatter(got, chunks, op, group))
        case "all_to_all":
            got = torch.zeros_like(own)
            return _Call(own, got, lambda: dist.all_to_all_single(got, own, group=group))
        case "barrier":
            return _Call(None, None, lambda: dist.barrier(group))
    to = ranks[(ranks.index(root) + 1) % len(ranks)]
    if rank == root:
        return _Call(own, own, lambda: _send(own, to, group) if to != root else None)
    if rank == to:
        got = torch.zeros_like(own)
        return _Call(None, got, lambda: _receive(got, root, group))
    return _Call(None, None, lambda: None)


def _send(tensor: Tensor, to: int, group: dist.ProcessGroup) -> None:
    """Send a tensor; gloo takes a GPU's address for one of the host's memory."""
    dist.send(tensor.cpu() if dist.get_backend(group) == "gloo" else tensor, to, group)


def _receive(tensor: Tensor, source: int, group: dist.ProcessGroup) -> None:
    """Receive what ``_send`` sends."""
    buffer = tensor.cpu() if dist.get_backend(group) == "gloo" else tensor
    dist.recv(buffer, source, group)
    tensor.copy_(buffer)


def numbers(rank: int, num: int, device: torch.device) -> Tensor:
    """Return what a rank gives: its tens show the rank, its ones the place."""
    return 10.0 * (rank + 1) + torch.arange(num, device=device) % 10


def _median(
    spec: CollectiveSpec,
    group: dist.ProcessGroup,
    rank: int,
    num: int,
    op: dist.ReduceOp.RedOpType,
    device: torch.device,
) -> float:
    """Return how long a call takes here, when all ranks begin together."""
    call, times = _call(spec, group, rank, num, op, device), []
    if call.got is not None and spec.name not in ("send", "recv"):
        call.got.zero_()  # else products grow beyond all numbers
    for _ in range(NUM_TIMED + 1):
        dist.barrier(group)
        _synchronize(device)
        began = time.perf_counter()
        call.make()
        _synchronize(device)
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _chunks(tensor: Tensor | None, num_chunks: int) -> Chunks:
    """Return the first numbers of each chunk of a tensor."""
    if tensor is None:
        return ()
    num_each = max(1, FEW_CELLS // num_chunks)
    return tuple(tuple(chunk[:num_each].tolist()) for chunk in tensor.flatten().chunk(num_chunks))


def bytes_sent() -> int | None:
    """Return how many bytes this process has sent on its TCP connections; None: not known.

    Waits until all that is on its way has arrived.
    """
    deadline = time.monotonic() + SETTLE_SECONDS
    while True:
        sockets = {each.inode: each.fd for each in own_connections()}
        found = [each for fd in sockets.values() if (each := traffic_of(fd))]
        if sockets and not found:
            return None
        arrived = all(each.num_segments_under_way == 0 for each in found)
        if arrived or time.monotonic() > deadline:
            return sum(each.num_bytes_acked for each in found)
        time.sleep(0.001)
