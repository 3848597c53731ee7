"""Where the ranks of a host post the virtual times of their calls: shared memory (ranks).

Each process group has a file with a ring of places, one for each call and rank.  A place holds the
number of the call and two times.  The real exchange has ordered memory between the ranks wherever
all of them take part; elsewhere a rank waits until the place has the number that it looks for.
"""

import mmap
import os
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, final

from ddpnb.protocol.costs import Ready

NUM_CALLS: Final = 512
"""Calls that one rank may be ahead of another."""
_PLACE: Final = struct.Struct("<qdd")
_NUMBER: Final = struct.Struct("<q")
_POLL_SECONDS: Final = 5e-5


def mapped_file(path: Path, num_bytes: int) -> mmap.mmap:
    """Map a file that several ranks share; the first to come makes it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, num_bytes)  # else a full disk would end the process
        return mmap.mmap(descriptor, num_bytes)
    finally:
        os.close(descriptor)


@final
class Board:
    """The times of one group's calls.

    Args:
        path: of a file that the group's ranks share.
        num_places: ranks, or ordered pairs of ranks.
        check: raises where this rank should no longer wait.
    """

    def __init__(self, path: Path, num_places: int, check: Callable[[], None]) -> None:
        self._path = path
        self._num_places = num_places
        self._check = check
        self._map = mapped_file(path, NUM_CALLS * num_places * _PLACE.size)

    def post(self, number: int, place: int, ready: Ready) -> None:
        """Write when a rank was ready for a call."""
        offset = self._offset(number, place)
        _PLACE.pack_into(self._map, offset, 0, *ready)
        _NUMBER.pack_into(self._map, offset, number + 1)

    def read(self, number: int, place: int) -> Ready:
        """Return when a rank was ready for a call, once it has posted that."""
        offset = self._offset(number, place)
        while _NUMBER.unpack_from(self._map, offset)[0] != number + 1:
            self._check()
            time.sleep(_POLL_SECONDS)
        _, first, last = _PLACE.unpack_from(self._map, offset)
        return first, last

    def close(self) -> None:
        """Remove the file; may be called twice."""
        if not self._map.closed:
            self._map.close()
            self._path.unlink(missing_ok=True)

    def _offset(self, number: int, place: int) -> int:
        return (number % NUM_CALLS * self._num_places + place) * _PLACE.size
