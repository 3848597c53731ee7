"""Demonstrates one collective, with its tensors before and after, its time and its bytes.

The tensor of rank r holds 10 (r + 1) + 0, 1, 2, ..., so each number shows its rank.  The Linux
kernel counts the bytes that this process sends over TCP, including gloo's headers.
Runs on the ranks.
"""

import statistics
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from ddpnb.protocol.trace import NUMBER_BYTES, Chunks, CollectiveShown, CollectiveSpec
from ddpnb.rank.connections import bytes_sent
from ddpnb.rank.device import synchronize, timed

NUM_TIMED = 7
"""Number of timed calls, after one untimed call.  ddpnb shows the median time."""
CHUNKED = ("reduce_scatter", "all_to_all")
"""Collectives that divide each rank's input into chunks, one chunk for each receiver."""
FEW_CELLS = 8
"""Approximate number of elements that ddpnb shows for each tensor."""


def run_collective(spec: CollectiveSpec, *, device: torch.device) -> CollectiveShown | None:
    """Run a collective, time it and count its bytes.  On ranks outside the group, return None.

    Every rank of the cluster takes part.
    """
    group = dist.new_group(list(spec.ranks))
    if dist.get_rank() not in spec.ranks:
        return None
    try:
        return _shown(spec, group, device)
    finally:
        dist.destroy_process_group(group)


def _shown(spec: CollectiveSpec, group: dist.ProcessGroup, device: torch.device) -> CollectiveShown:
    num_ranks, backend = len(spec.ranks), dist.get_backend(group)
    num_chunks = num_ranks if spec.name in CHUNKED else 1
    num = max(spec.num_bytes // NUMBER_BYTES // num_chunks, 1) * num_chunks
    if not spec.num_bytes:
        num = 2 * num_chunks if spec.name in (*CHUNKED, "scatter") else 4

    given, got, call = _call(spec, group, num, device)
    before = _chunks(given, num_ranks if spec.name == "scatter" else num_chunks)
    dist.barrier(group)  # opens the connections, and lets all ranks begin together
    sent = bytes_sent()
    call()
    synchronize(device)
    sent_after = bytes_sent()
    counted = None if sent is None or sent_after is None else sent_after - sent
    gathers = spec.name in ("gather", "all_gather", "all_to_all")
    return CollectiveShown(
        rank=dist.get_rank(),
        before=before,
        after=_chunks(got, num_ranks if gathers else 1),
        num_given=0 if given is None else given.numel(),
        num_got=0 if got is None else got.numel(),
        seconds=_median(spec, group, num, device),
        small_seconds=_median(spec, group, num_chunks, device),
        num_bytes_sent=counted if backend == "gloo" else None,
        backend=backend,
    )


def _call(
    spec: CollectiveSpec, group: dist.ProcessGroup, num: int, device: torch.device
) -> tuple[Tensor | None, Tensor | None, Callable[[], object]]:
    """Return a call's input and output with ``num`` elements, and a function that makes the call.

    The input or output is None if this rank has none.
    """
    rank, num_ranks, root, name = dist.get_rank(), len(spec.ranks), spec.from_rank, spec.name
    is_root, op = rank == root, getattr(dist.ReduceOp, spec.op.upper())
    places = torch.arange(num * num_ranks if name == "scatter" else num, device=device)
    given = 10.0 * (rank + 1) + places % 10
    parts, got, rows = list(given.chunk(num_ranks)), given.clone(), []
    if name in ("scatter", "reduce_scatter"):
        got = torch.zeros_like(parts[0])
    elif name in ("gather", "all_gather"):
        got = given.new_zeros(num_ranks, num)
        rows = list(got)

    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(got, op, group),
        "broadcast": lambda: dist.broadcast(got, root, group),
        "reduce": lambda: dist.reduce(got, root, op, group),
        "scatter": lambda: dist.scatter(got, parts if is_root else None, root, group),
        "gather": lambda: dist.gather(given, rows if is_root else None, root, group),
        "all_gather": lambda: dist.all_gather(rows, given, group),
        "reduce_scatter": lambda: dist.reduce_scatter(got, parts, op, group),
        "all_to_all": lambda: dist.all_to_all_single(got, given, group=group),
        "barrier": lambda: dist.barrier(group),
    }
    gives = name != "barrier" and (is_root or name not in ("broadcast", "scatter"))
    gets = name != "barrier" and (is_root or name not in ("reduce", "gather"))
    return given if gives else None, got if gets else None, calls[name]


def _median(
    spec: CollectiveSpec, group: dist.ProcessGroup, num: int, device: torch.device
) -> float:
    """Return a call's median time on this rank.  All ranks begin each call together."""
    times, (_, got, call) = [], _call(spec, group, num, device)
    if got is not None:
        got.zero_()  # otherwise repeated products would overflow
    for _ in range(NUM_TIMED + 1):
        dist.barrier(group)
        times.append(timed(call, device))
    return statistics.median(times[1:])


def _chunks(tensor: Tensor | None, num_chunks: int) -> Chunks:
    """Return the first elements of each chunk of a tensor."""
    if tensor is None:
        return ()
    num_each = max(1, FEW_CELLS // num_chunks)
    return tuple(tuple(chunk[:num_each].tolist()) for chunk in tensor.flatten().chunk(num_chunks))
