"""The last collectives of each rank of a group, in memory that the ranks share (ranks).

Each rank has a ring of its last calls in one file that all ranks map, and writes to its own
ring only.  When two ranks write their call of the same number and then read the other's, at
least one of them finds the other's: every write and every read holds a lock, which orders
memory.

A call is WRITTEN first.  It is ACCEPTED when the backend has taken it.  It is DISPUTED while its
rank holds it back because another rank's call differs.
"""

import mmap
import os
import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from typing import Final, Self, final

NUM_KEPT: Final = 64
"""Calls kept for each rank; a rank further behind finds nothing to compare with."""
TEXT_BYTES: Final = 111
_ENTRY: Final = struct.Struct(f"<{TEXT_BYTES}s?IIQ")
_KEY: Final = struct.Struct("<IQ")
_KEY_OFFSET: Final = _ENTRY.size - _KEY.size
_NUMBER: Final = struct.Struct("<Q")
_ACCEPTED: Final = NUM_KEPT * _ENTRY.size
"""Behind the ring: the number of the last call that the backend accepted."""
_DISPUTED: Final = _ACCEPTED + _NUMBER.size
"""Behind that: the number of the call that is in dispute; 0 if there is none."""
_RANK_BYTES: Final = _DISPUTED + _NUMBER.size


class CallState(Enum):
    """How far a call has come."""

    WRITTEN = auto()
    DISPUTED = auto()
    ACCEPTED = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """What one rank has written about one call."""

    place: int
    """The rank in the group."""
    text: bytes
    """What is compared, up to ``TEXT_BYTES``."""
    line: int
    """The line of the user's cell that made the call; 0 if it is not known."""
    in_backward: bool
    state: CallState


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
        self._own = place * _RANK_BYTES
        self._others = [n * _RANK_BYTES for n in range(len(ranks)) if n != place]
        self._num_calls = 0
        self._lock = threading.Lock()

    @classmethod
    def open(cls, path: Path, *, place: int, ranks: Sequence[int]) -> Self:
        """Map the group's file; the first rank to come makes it.

        Raises:
            OSError: there is no room for it.
        """
        size = len(ranks) * _RANK_BYTES
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, size)  # else a full disk would end the process
            return cls(mmap.mmap(descriptor, size), place=place, ranks=ranks)
        finally:
            os.close(descriptor)

    def write(self, text: bytes, checksum: int, line: int, in_backward: bool) -> tuple[int, bool]:
        """Write this rank's next call.

        Args:
            text: what is compared, up to ``TEXT_BYTES``.
            checksum: of the text, 32 bits.
            line: the line of the user's cell that makes the call; 0 if it is not known.
            in_backward: whether DDP's backward pass makes the call.

        Returns:
            The call's number, and whether no other rank has written another call under it.
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
                    return number, False
        return number, True

    def accept(self, number: int) -> None:
        """Note that the backend has taken a call of this rank."""
        with self._lock:
            _NUMBER.pack_into(self._shared, self._own + _ACCEPTED, number)

    def take_back(self) -> None:
        """Undo the last ``write``: the call was refused."""
        self.set_disputed(0)
        with self._lock:
            start = self._own + self._num_calls % NUM_KEPT * _ENTRY.size
            _KEY.pack_into(self._shared, start + _KEY_OFFSET, 0, 0)
            self._num_calls -= 1

    def set_disputed(self, number: int) -> None:
        """Note which call this rank holds back; 0: none."""
        with self._lock:
            _NUMBER.pack_into(self._shared, self._own + _DISPUTED, number)

    def entries(self, number: int) -> list[Entry]:
        """Return the calls of a number that have been written."""
        found = []
        for place in range(len(self.ranks)):
            state = self._state(place, number)  # before the entry, which may be replaced until then
            start = place * _RANK_BYTES + number % NUM_KEPT * _ENTRY.size
            with self._lock:
                text, in_backward, line, _, written = _ENTRY.unpack_from(self._shared, start)
            if written == number:
                found.append(
                    Entry(
                        place=place,
                        text=text.rstrip(b"\0"),
                        line=line,
                        in_backward=in_backward,
                        state=state,
                    )
                )
        return found

    def _state(self, place: int, number: int) -> CallState:
        start = place * _RANK_BYTES
        with self._lock:
            (accepted,) = _NUMBER.unpack_from(self._shared, start + _ACCEPTED)
            (disputed,) = _NUMBER.unpack_from(self._shared, start + _DISPUTED)
        if accepted >= number:
            return CallState.ACCEPTED
        return CallState.DISPUTED if disputed == number else CallState.WRITTEN
