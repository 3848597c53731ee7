"""Which calls did each rank of a group make last?  In memory that they share.  (Rank side.)

Every rank has a ring of its last calls in one file that all have mapped, and writes there
only.  Of two ranks that write their call of the same number and then look for the other's,
one at least finds it: between the two each holds a lock, which orders memory.
"""

import mmap
import os
import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self, final

NUM_KEPT: Final = 64
"""Calls of a rank that can be compared; who is further behind finds nothing to compare with."""
TEXT_BYTES: Final = 112
_NUMBER: Final = struct.Struct("<Q")
_CALL: Final = struct.Struct(f"<I?3x{TEXT_BYTES}s")
_ENTRY_BYTES: Final = _NUMBER.size + _CALL.size


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """What one rank has written of one call."""

    place: int
    """The rank in the group."""
    text: bytes
    """What is compared: ``TEXT_BYTES`` long."""
    line: int
    """Where the user's cell called; 0 where that is not known."""
    in_backward: bool


@final
class Ledger:
    """The calls of one group.

    Args:
        shared: the mapped file.
        place: this rank's number in the group.
        ranks: the group's ranks, as the default group numbers them.
    """

    def __init__(self, shared: mmap.mmap, *, place: int, ranks: Sequence[int]) -> None:
        self.ranks = tuple(ranks)
        self._shared = shared
        self._place = place
        self._others = [other for other in range(len(ranks)) if other != place]
        self._num_calls = 0
        self._lock = threading.Lock()

    @classmethod
    def open(cls, path: Path, *, place: int, ranks: Sequence[int]) -> Self:
        """Map the group's file, made by whoever comes first.

        Raises:
            OSError: there is no room for it.
        """
        size = len(ranks) * NUM_KEPT * _ENTRY_BYTES
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, size)  # else a full disk would end the process
            return cls(mmap.mmap(descriptor, size), place=place, ranks=ranks)
        finally:
            os.close(descriptor)

    def write(self, text: bytes, line: int, in_backward: bool) -> int:
        """Write this rank's next call; return its number, which counts from 1."""
        with self._lock:
            self._num_calls = number = self._num_calls + 1
            start = self._start(self._place, number)
            _NUMBER.pack_into(self._shared, start, 0)
        with self._lock:
            _CALL.pack_into(self._shared, start + _NUMBER.size, line, in_backward, text)
        with self._lock:
            _NUMBER.pack_into(self._shared, start, number)
        return number

    def take_back(self) -> None:
        """Undo the last ``write``: the call was refused."""
        with self._lock:
            _NUMBER.pack_into(self._shared, self._start(self._place, self._num_calls), 0)
            self._num_calls -= 1

    def others(self, number: int) -> list[Entry]:
        """Return the other ranks' calls of that number, of those that have come so far."""
        with self._lock:
            starts = [(place, self._start(place, number)) for place in self._others]
            return [
                self._entry(place, start)
                for place, start in starts
                if _NUMBER.unpack_from(self._shared, start)[0] == number
            ]

    def is_there(self, entry: Entry, number: int) -> bool:
        """Tell whether a call is still written as it was read, or was being written over."""
        with self._lock:
            start = self._start(entry.place, number)
            return bool(_NUMBER.unpack_from(self._shared, start)[0] == number)

    def _entry(self, place: int, start: int) -> Entry:
        line, in_backward, text = _CALL.unpack_from(self._shared, start + _NUMBER.size)
        return Entry(place=place, text=text, line=line, in_backward=in_backward)

    def _start(self, place: int, number: int) -> int:
        return (place * NUM_KEPT + number % NUM_KEPT) * _ENTRY_BYTES
