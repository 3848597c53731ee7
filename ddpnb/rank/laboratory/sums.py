"""Sums of the tensors of emulated devices, in memory that their ranks share (ranks).

Where time is computed, an exchange need not go through sockets, which on few cores takes most of a
step of many ranks.  Rank r adds up part r of all tensors, in the order of gloo's ring, so that the
sum has the same bits: rank r - 1 sends its own numbers of that part, r - 2 adds its own, and so on
around the ring to r (``gloo/allreduce.cc``).
"""

import math
import mmap
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, final

import torch
from torch import Tensor

from ddpnb.compat import torch_internals
from ddpnb.rank.collectives.table import Call
from ddpnb.rank.laboratory.board import Board

LEAST_BYTES: Final = 1 << 14
"""Of a tensor: gloo sums a smaller one as fast."""
_SEGMENT_BYTES: Final = 1 << 20


@final
class SharedSums:
    """Memory for the sums of each group.

    Args:
        path: prefix of the files in the run folder that the ranks share.
        check: raises where this rank should no longer wait.
    """

    def __init__(self, path: Path, check: Callable[[], None]) -> None:
        self._path = path
        self._check = check
        self._slots: dict[str, Tensor] = {}
        """Of each file: shape (ranks, bytes)."""
        self._boards: dict[str, Board] = {}
        self._num_sums: Counter[str] = Counter()

    def make(self, call: Call) -> Any:
        """Sum a call's tensor over its group; takes part: every rank of the group.

        Returns:
            The work of the call, which is done; None where the backend is to make it.

        Raises:
            RuntimeError: a rank has left.
        """
        tensors = call.tensors
        if call.name != "all_reduce" or len(tensors) != 1 or not _fits(tensors[0]):
            return None
        if len(call.arguments) < 2 or not torch_internals.is_sum(call.arguments[1]):
            return None
        self._sum(call.group, tensors[0].detach().view(-1))
        return torch_internals.lone_group().allreduce(tensors)

    def close(self) -> None:
        """Remove the files; may be called twice."""
        for name in self._slots:
            Path(name).unlink(missing_ok=True)
        self._slots.clear()
        for board in self._boards.values():
            board.close()

    def _sum(self, group: Any, flat: Tensor) -> None:
        own, num_ranks = group.rank(), group.size()
        slots = self._slots_for(group, flat.nbytes)[:, : flat.nbytes].view(flat.dtype)
        part = _part_bytes(flat, num_ranks) // flat.element_size()
        parts = [slice(rank * part, (rank + 1) * part) for rank in range(num_ranks)]
        slots[own] = flat
        torch_internals.wait_for_all(group)
        around = [(own - 1 - place) % num_ranks for place in range(num_ranks)]
        mine = flat[parts[own]]
        mine.copy_(slots[around[0]][parts[own]])
        for rank in around[1:]:
            mine += slots[rank][parts[own]]
        slots[own][parts[own]] = mine
        self._wait_for_sums(group)
        for rank in around[:-1]:
            flat[parts[rank]] = slots[rank][parts[rank]]

    def _wait_for_sums(self, group: Any) -> None:
        """Wait until all ranks have added up their parts, which takes all the same time."""
        name = group.group_name
        if name not in self._boards:
            path = self._path.with_name(f"{self._path.name}.{name}.sums")
            self._boards[name] = Board(path, group.size(), self._check)
        number = self._num_sums[name]
        self._num_sums[name] += 1
        self._boards[name].post(number, group.rank(), (0.0, 0.0))
        for rank in range(group.size()):
            self._boards[name].read(number, rank)

    def _slots_for(self, group: Any, num_bytes: int) -> Tensor:
        """Return memory for the tensors of all ranks, mapped anew for the next power of two."""
        size = 1 << (num_bytes - 1).bit_length()
        name = f"{self._path}.{group.group_name}.{size}.sum"
        if name not in self._slots:
            descriptor = os.open(name, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                os.posix_fallocate(descriptor, 0, group.size() * size)  # else SIGBUS on a full disk
                mapped = mmap.mmap(descriptor, group.size() * size)
            finally:
                os.close(descriptor)
            self._slots[name] = torch.frombuffer(mapped, dtype=torch.uint8).view(-1, size)
        return self._slots[name]


def _fits(tensor: Tensor) -> bool:
    is_plain = tensor.device.type == "cpu" and tensor.layout == torch.strided
    is_exact = tensor.dtype in (torch.float32, torch.float64)
    return is_plain and is_exact and tensor.is_contiguous() and tensor.nbytes >= LEAST_BYTES


def _part_bytes(flat: Tensor, num_ranks: int) -> int:
    """Return the bytes that one rank adds up: the segments that are its in gloo's ring."""
    num = max(math.ceil(flat.nbytes / _SEGMENT_BYTES), 2 * num_ranks)
    num_per_rank = math.ceil(num / num_ranks)
    each = math.ceil(flat.nbytes / (num_per_rank * num_ranks))
    element = flat.element_size()
    return num_per_rank * math.ceil(each / element) * element
