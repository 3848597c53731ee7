"""Memory that the ranks of one host share: boards with the times of calls, and sums of tensors.

Each process group has a board: a ring buffer with one place for each call and rank.  A place holds
a call's number, two times (see ``Ready``) and a checksum.  A rank waits until the place holds the
call's number and the checksum is right, because some processors, such as aarch64, change the order
of writes.

Sockets are slow if many ranks share few cores.  In shared memory, rank r adds up chunk r of all
tensors in the order of gloo's ring (``gloo/allreduce.cc``).  The sum is bitwise equal to gloo's
sum.  In gloo's ring, rank r - 1 sends chunk r to rank r - 2, rank r - 2 adds its numbers, and so
on.  Runs on the ranks.
"""

import itertools
import math
import mmap
import os
import struct
import threading
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

import torch
from torch import Tensor

from ddpnb.compat import torch_internals
from ddpnb.protocol.costs import Ready
from ddpnb.protocol.processes import portable

NUM_CALLS: Final = 512
"""Maximum number of calls by which one rank may be ahead of another rank."""
_POSTED: Final = struct.Struct("<qdd")
_PLACE: Final = struct.Struct("<qddI")
_POLL_SECONDS: Final = 5e-5
_SEGMENT_BYTES: Final = 1 << 20


def mapped_file(path: Path, num_bytes: int) -> mmap.mmap:
    """Map a file that several ranks share.  The first rank creates the file."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        if portable():
            os.ftruncate(descriptor, num_bytes)
        else:  # otherwise a full disk would kill the rank later
            os.posix_fallocate(descriptor, 0, num_bytes)
        return mmap.mmap(descriptor, num_bytes)
    finally:
        os.close(descriptor)


_lock = threading.Lock()


def keep_order() -> None:
    """Keep the order of this thread's accesses to memory before and after this call.

    The release of a lock completes all accesses before it.  No access after the next acquisition
    begins before that acquisition.
    """
    for _ in range(2):
        with _lock:
            pass


@final
class Board:
    """The virtual times of one group's calls.

    Args:
        path: the file that the group's ranks share.
        num_places: the number of ranks, or the number of ordered pairs of ranks.
        check: function that raises an error if this rank should stop waiting.
    """

    def __init__(self, path: Path, num_places: int, check: Callable[[], None]) -> None:
        self._path = path
        self._num_places = num_places
        self._check = check
        self._map = mapped_file(path, NUM_CALLS * num_places * _PLACE.size)

    def post(self, number: int, place: int, ready: Ready) -> None:
        """Write the times at which a rank was ready for a call.

        A rank that reads the times also sees all that this rank wrote to shared memory before.
        """
        checksum = zlib.crc32(_POSTED.pack(number + 1, *ready))
        keep_order()
        _PLACE.pack_into(self._map, self._offset(number, place), number + 1, *ready, checksum)

    def read(self, number: int, place: int) -> Ready:
        """Wait until a rank has posted the times at which it was ready, and return these times."""
        offset = self._offset(number, place)
        while True:
            found = self._map[offset : offset + _PLACE.size]
            posted, first, last, checksum = _PLACE.unpack(found)
            if posted == number + 1 and checksum == zlib.crc32(found[: _POSTED.size]):
                keep_order()
                return first, last
            self._check()
            time.sleep(_POLL_SECONDS)

    def close(self) -> None:
        """Remove the file.  Calling ``close`` twice is safe."""
        if not self._map.closed:
            self._map.close()
            self._path.unlink(missing_ok=True)

    def _offset(self, number: int, place: int) -> int:
        return (number % NUM_CALLS * self._num_places + place) * _PLACE.size


@final
@dataclass(eq=False)
class SharedSums:
    """Sums tensors over the ranks of a group in shared memory.

    Sums alternate between two sets of slots, so no rank overwrites numbers that another rank still
    reads.  When a rank begins sum t, all ranks have begun sum t - 1 and finished sum t - 2.
    """

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
        """Sum a tensor over a group on this host, in place.  Every rank of the group takes part.

        ``flat`` is a contiguous CPU tensor of shape (n,), with the same n and dtype on all ranks.
        If a rank of the group has ended, raise ``RuntimeError``.
        """
        own, num_ranks, name = group.rank(), group.size(), group.group_name
        number = next(self._numbers[name])
        slots = self._slots_for(group, flat.nbytes, number)[:, : flat.nbytes].view(flat.dtype)
        chunk = _chunk_bytes(flat, num_ranks) // flat.element_size()
        chunks = [slice(rank * chunk, (rank + 1) * chunk) for rank in range(num_ranks)]
        slots[own] = flat
        torch_internals.wait_for_all(group)
        around = [(own - 1 - place) % num_ranks for place in range(num_ranks)]
        mine = flat[chunks[own]]
        mine.copy_(slots[around[0]][chunks[own]])
        for rank in around[1:]:
            mine += slots[rank][chunks[own]]
        slots[own][chunks[own]] = mine
        self._wait_for_sums(group, number)
        for rank in around[:-1]:
            flat[chunks[rank]] = slots[rank][chunks[rank]]

    def close(self) -> None:
        """Remove the files.  Calling ``close`` twice is safe."""
        for name in self._slots:
            Path(name).unlink(missing_ok=True)
        self._slots.clear()
        for board in self._boards.values():
            board.close()

    def _wait_for_sums(self, group: Any, number: int) -> None:
        """Wait until all ranks have added up their chunks.  All chunks have the same size."""
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


def _chunk_bytes(flat: Tensor, num_ranks: int) -> int:
    """Return the size in bytes of the chunk that one rank adds up, as in gloo's ring."""
    num = max(math.ceil(flat.nbytes / _SEGMENT_BYTES), 2 * num_ranks)
    num_per_rank = math.ceil(num / num_ranks)
    each = math.ceil(flat.nbytes / (num_per_rank * num_ranks))
    element = flat.element_size()
    return num_per_rank * math.ceil(each / element) * element
