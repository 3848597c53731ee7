"""Which calls did each rank of a group make last?  In memory that they share.  (Rank side.)

Every rank has a ring of its last calls in one file that all have mapped, and writes there
only.  Of two ranks that write their call of the same number and then look for the other's,
one at least finds it: a lock that is held for each, twice in all, orders memory.
"""

import mmap
import os
import struct
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self, final

NUM_KEPT: Final = 64
"""Calls of a rank that can be compared; who is further behind finds nothing to compare with."""
TEXT_BYTES: Final = 111
SETTLE_SECONDS: Final = 0.05
"""After this what looked different is read again: half written, or refused by its backend."""
_ENTRY: Final = struct.Struct(f"<{TEXT_BYTES}s?IIQ")
_KEY: Final = struct.Struct("<IQ")
_KEY_OFFSET: Final = _ENTRY.size - _KEY.size
_RING_BYTES: Final = NUM_KEPT * _ENTRY.size


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """What one rank has written of one call."""

    place: int
    """The rank in the group."""
    text: bytes
    """What is compared, up to ``TEXT_BYTES``."""
    line: int
    """Where the user's cell called; 0 where that is not known."""
    in_backward: bool


@final
class CollectiveLog:
    """The calls of one group.

    Args:
        shared: the mapped file.
        place: this rank's number in the group.
        ranks: the group's ranks, as the default group numbers them.
    """

    def __init__(self, shared: mmap.mmap, *, place: int, ranks: Sequence[int]) -> None:
        self.place = place
        self.ranks = tuple(ranks)
        self._shared = shared
        self._own = place * _RING_BYTES
        self._others = [n * _RING_BYTES for n in range(len(ranks)) if n != place]
        self._num_calls = 0
        self._lock = threading.Lock()

    @classmethod
    def open(cls, path: Path, *, place: int, ranks: Sequence[int]) -> Self:
        """Map the group's file, made by whoever comes first.

        Raises:
            OSError: there is no room for it.
        """
        size = len(ranks) * _RING_BYTES
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, size)  # else a full disk would end the process
            return cls(mmap.mmap(descriptor, size), place=place, ranks=ranks)
        finally:
            os.close(descriptor)

    def write(self, text: bytes, checksum: int, line: int, in_backward: bool) -> bool:
        """Write this rank's next call; tell whether all others' that are there look the same.

        Args:
            text: what is compared, up to ``TEXT_BYTES``.
            checksum: of the text, 32 bits.
            line: where the user's cell called; 0 where that is not known.
            in_backward: whether DDP calls.
        """
        shared = self._shared
        with self._lock:
            self._num_calls = number = self._num_calls + 1
            start = number % NUM_KEPT * _ENTRY.size
            _ENTRY.pack_into(shared, self._own + start, text, in_backward, line, checksum, number)
        with self._lock:
            for other in self._others:
                seen = _KEY.unpack_from(shared, other + start + _KEY_OFFSET)
                if seen[1] == number and seen[0] != checksum:
                    return False
        return True

    def entries(self) -> list[Entry]:
        """Return the last call here, and of the others those of the same number that are there."""
        time.sleep(SETTLE_SECONDS)
        found = []
        with self._lock:
            for place in range(len(self.ranks)):
                start = place * _RING_BYTES + self._num_calls % NUM_KEPT * _ENTRY.size
                text, in_backward, line, _, number = _ENTRY.unpack_from(self._shared, start)
                if number == self._num_calls:
                    text = text.rstrip(b"\0")
                    found.append(Entry(place=place, text=text, line=line, in_backward=in_backward))
        return found

    def take_back(self) -> None:
        """Undo the last ``write``: the call was refused."""
        with self._lock:
            start = self._own + self._num_calls % NUM_KEPT * _ENTRY.size
            _KEY.pack_into(self._shared, start + _KEY_OFFSET, 0, 0)
            self._num_calls -= 1
