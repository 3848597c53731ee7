"""Which collectives has each rank of a group called, and do they match?  (ranks)

Each rank has a ring of its last calls in one file that all ranks of the host map, and writes to its
own ring only.  When two ranks write their call of the same number and then read the other's, at
least one of them finds the other's: every write and every read holds a lock, which orders memory.
"""

import mmap
import os
import struct
import threading
import time
import zlib
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Final, NamedTuple, final

import torch

from ddpnb.rank.collectives.table import NO_ROOT, Call

FILES: Final = "calls-{generation}-"
"""How the name of a group's file begins."""
NOT_COMPARED = -1
"""Stands for the size if tensors of different sizes may meet."""
NUM_KEPT: Final = 64
"""Calls kept for each rank; a rank further behind finds nothing to compare with."""
TEXT_BYTES: Final = 140
_ENTRY: Final = struct.Struct(f"<{TEXT_BYTES}sIqQ")
"""The text, the checksum, the size and the number of a call."""
_KEY: Final = struct.Struct("<IqQ")
"""Its end, which is compared."""
_RANK_BYTES: Final = NUM_KEPT * _ENTRY.size
POLL_SECONDS = 0.001
SETTLE_SECONDS = 0.05
"""How long a rank that has found another call waits before it raises: that call may be taken back,
and the error also names ranks that come a little later."""


class CollectiveMismatchError(RuntimeError):
    """The ranks of a group make different calls, or one call with tensors that do not match."""


class Entry(NamedTuple):
    """What a rank writes about a call."""

    checksum: int
    """Of its name, root and type."""
    size: int
    """Numbers in its tensors, or ``NOT_COMPARED``: ``[4]`` and ``[2, 2]`` match, as flat memory."""
    text: str
    """For users: ``"broadcast from rank 0 with Float [3]"``."""

    def matches(self, other: "Entry") -> bool:
        """Return whether two ranks' calls may meet."""
        sizes = {self.size, other.size}
        return self.checksum == other.checksum and (len(sizes) == 1 or NOT_COMPARED in sizes)


def entry_of(call: Call, ranks: Sequence[int]) -> Entry:
    """Return what is written about a call; ``ranks`` are the group's."""
    name, tensors = call.name, call.tensors
    if call.root != NO_ROOT:
        name = f"{name} {call.collective.root_is} rank {ranks[call.root]}"
    if not tensors:
        return _entry(name, None, NOT_COMPARED, ())
    size = sum(each.numel() for each in tensors) if call.are_sizes_equal else NOT_COMPARED
    return _entry(name, tensors[0].dtype, size, tensors[0].shape)


@lru_cache(maxsize=1024)
def _entry(name: str, dtype: torch.dtype | None, size: int, shape: tuple[int, ...]) -> Entry:
    if dtype is None:
        return Entry(zlib.crc32(name.encode()), size, name)
    kind = torch.empty(0, dtype=dtype).type().split(".")[-1].removesuffix("Tensor")
    checksum = zlib.crc32(f"{name} {kind}".encode())
    return Entry(checksum, size, f"{name} with {kind} {list(shape)}")


@final
class CollectiveLog:
    """The calls of one group.

    Args:
        path: the group's file; the first rank to come makes it.
        place: this rank's number in the group.
        ranks: the group's ranks, as the default group numbers them.

    Raises:
        OSError: there is no room for the file.
    """

    def __init__(self, path: Path, *, place: int, ranks: Sequence[int]) -> None:
        self.ranks = tuple(ranks)
        self._own = place * _RANK_BYTES
        self._others = [n * _RANK_BYTES for n in range(len(ranks)) if n != place]
        self._num_calls = 0
        self._is_certain = True
        self._lock = threading.Lock()
        size = len(ranks) * _RANK_BYTES
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, size)  # else a full disk would end the process
            self._shared = mmap.mmap(descriptor, size)
        finally:
            os.close(descriptor)

    @property
    def num_made(self) -> int | None:
        """How many calls this rank has made; None: it is not known of one that was interrupted."""
        return self._num_calls if self._is_certain else None

    def write(self, entry: Entry, line: str = "") -> None:
        """Write this rank's next call, and compare it with those of the same number.

        Args:
            entry: what the call is.
            line: where in the user's code it is; empty: not known.

        Raises:
            CollectiveMismatchError: another rank's call differs, even after ``SETTLE_SECONDS``.
        """
        shared, checksum, size = self._shared, entry.checksum, entry.size
        text = f"{entry.text} ({line})" if line else entry.text
        with self._lock:
            self._num_calls = number = self._num_calls + 1
            start = number % NUM_KEPT * _ENTRY.size
            _ENTRY.pack_into(shared, self._own + start, text.encode(), checksum, size, number)
        with self._lock:
            start += TEXT_BYTES
            seen = [_KEY.unpack_from(shared, other + start) for other in self._others]
        for other_checksum, other_size, other_number in seen:
            if other_number == number and (other_checksum != checksum or other_size != size):
                self._settle(entry, number)

    def take_back(self, *, is_certain: bool = True) -> None:
        """Undo the last ``write``: the call was refused, or, not certain, it was interrupted."""
        self._is_certain = self._is_certain and is_certain
        with self._lock:
            start = self._own + self._num_calls % NUM_KEPT * _ENTRY.size
            _KEY.pack_into(self._shared, start + TEXT_BYTES, 0, 0, 0)
            self._num_calls -= 1

    def _settle(self, entry: Entry, number: int) -> None:
        """Return if other ranks take their calls back that differ; else raise."""
        seen: dict[int, Entry] = {}
        deadline = time.monotonic() + SETTLE_SECONDS
        while time.monotonic() < deadline:
            found = self._entries(number)
            if all(entry.matches(each) for each in found.values()):
                return
            seen |= found
            time.sleep(POLL_SECONDS)
        calls: dict[str, list[int]] = {}
        for rank in sorted(seen):
            calls.setdefault(seen[rank].text, []).append(rank)
        parts = [
            f"rank {callers[0]} calls {call}"
            if len(callers) == 1
            else f"ranks {','.join(map(str, callers))} call {call}"
            for call, callers in calls.items()
        ]
        raise CollectiveMismatchError(
            f"the calls of the ranks do not match: {', but '.join(parts)}"
        )

    def _entries(self, number: int) -> dict[int, Entry]:
        """Return by rank the calls of a number that have been written, each with its line."""
        found = {}
        for place, rank in enumerate(self.ranks):
            start = place * _RANK_BYTES + number % NUM_KEPT * _ENTRY.size
            with self._lock:
                text, checksum, size, written = _ENTRY.unpack_from(self._shared, start)
            if written == number:
                found[rank] = Entry(checksum, size, text.rstrip(b"\0").decode(errors="replace"))
        return found
