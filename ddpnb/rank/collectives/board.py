"""A board in shared memory, on which a host's ranks post the virtual times of their calls.

Each process group has a file: a ring buffer with one place for each call and rank.  A place holds a
call's number and two times (see ``Ready``).  If all ranks take part in a call, the real exchange
makes all writes visible.  Otherwise, a rank waits until the place holds the call's number.
Runs on the ranks.
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
"""Maximum number of calls by which one rank may be ahead of another rank."""
_PLACE: Final = struct.Struct("<qdd")
_NUMBER: Final = struct.Struct("<q")
_POLL_SECONDS: Final = 5e-5


def mapped_file(path: Path, num_bytes: int) -> mmap.mmap:
    """Map a file that several ranks share.  The first rank creates the file."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, num_bytes)  # without it, a full disk kills the rank
        return mmap.mmap(descriptor, num_bytes)
    finally:
        os.close(descriptor)


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
        """Write the times at which a rank was ready for a call."""
        offset = self._offset(number, place)
        _PLACE.pack_into(self._map, offset, 0, *ready)
        _NUMBER.pack_into(self._map, offset, number + 1)

    def read(self, number: int, place: int) -> Ready:
        """Wait until a rank has posted the times at which it was ready, and return these times."""
        offset = self._offset(number, place)
        while _NUMBER.unpack_from(self._map, offset)[0] != number + 1:
            self._check()
            time.sleep(_POLL_SECONDS)
        _, first, last = _PLACE.unpack_from(self._map, offset)
        return first, last

    def close(self) -> None:
        """Remove the file.  Calling ``close`` twice is safe."""
        if not self._map.closed:
            self._map.close()
            self._path.unlink(missing_ok=True)

    def _offset(self, number: int, place: int) -> int:
        return (number % NUM_CALLS * self._num_places + place) * _PLACE.size
