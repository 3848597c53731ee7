"""Sums tensors over the ranks of one host in shared memory.  Runs on the ranks.

Sockets are slow if many ranks share few cores.  In shared memory, rank r adds up part r of all
tensors in the order of gloo's ring (``gloo/allreduce.cc``).  The sum is bitwise equal to gloo's
sum.  In gloo's ring, rank r - 1 sends part r to rank r - 2, rank r - 2 adds its numbers, and so on.

Sums alternate between two sets of slots, so no rank overwrites numbers that another rank still
reads.  When a rank begins sum t, all ranks have begun sum t - 1 and therefore finished sum t - 2.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

import torch
from torch import Tensor

from ddpnb.compat import torch_internals
from ddpnb.rank.collectives.board import Board, mapped_file

_SEGMENT_BYTES: Final = 1 << 20


@final
@dataclass(eq=False)
class SharedSums:
    """Sums tensors over the ranks of a group in shared memory."""

    path: Path
    """Path prefix of the files that the ranks share in the run folder."""
    check: Callable[[], None]
    """Function that raises an error if this rank should stop waiting."""

    def __post_init__(self) -> None:
        self._slots: dict[str, Tensor] = {}
        """The slots in each file, as a tensor of shape (ranks, bytes)."""
        self._boards: dict[str, Board] = {}
        self._numbers: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)
        """Counter of the sums of each group."""

    def add(self, group: Any, flat: Tensor) -> None:
        """Sum a tensor over a group, in place.  Every rank of the group takes part.

        Args:
            group: a process group on this host.
            flat: a contiguous CPU tensor of shape (n,), with the same n and dtype on all ranks.

        Raises:
            RuntimeError: a rank of the group has ended.
        """
        own, num_ranks, name = group.rank(), group.size(), group.group_name
        number = next(self._numbers[name])
        slots = self._slots_for(group, flat.nbytes, number)[:, : flat.nbytes].view(flat.dtype)
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
        self._wait_for_sums(group, number)
        for rank in around[:-1]:
            flat[parts[rank]] = slots[rank][parts[rank]]

    def close(self) -> None:
        """Remove the files.  Calling ``close`` twice is safe."""
        for name in self._slots:
            Path(name).unlink(missing_ok=True)
        self._slots.clear()
        for board in self._boards.values():
            board.close()

    def _wait_for_sums(self, group: Any, number: int) -> None:
        """Wait until all ranks have added up their parts.  All parts have the same size."""
        name = group.group_name
        if name not in self._boards:
            path = self.path.with_name(f"{self.path.name}.{name}.sums")
            self._boards[name] = Board(path, group.size(), self.check)
        self._boards[name].post(number, group.rank(), (0.0, 0.0))
        for rank in range(group.size()):
            self._boards[name].read(number, rank)

    def _slots_for(self, group: Any, num_bytes: int, number: int) -> Tensor:
        """Return slots for a tensor, one per rank.  Slot sizes are powers of two."""
        size = 1 << (num_bytes - 1).bit_length()
        name = f"{self.path}.{group.group_name}.{size}.{number % 2}.sum"
        if name not in self._slots:
            mapped = mapped_file(Path(name), group.size() * size)
            self._slots[name] = torch.frombuffer(mapped, dtype=torch.uint8).view(-1, size)
        return self._slots[name]


def _part_bytes(flat: Tensor, num_ranks: int) -> int:
    """Return the size in bytes of the part that one rank adds up, as in gloo's ring."""
    num = max(math.ceil(flat.nbytes / _SEGMENT_BYTES), 2 * num_ranks)
    num_per_rank = math.ceil(num / num_ranks)
    each = math.ceil(flat.nbytes / (num_per_rank * num_ranks))
    element = flat.element_size()
    return num_per_rank * math.ceil(each / element) * element
