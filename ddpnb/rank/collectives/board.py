"""A board in shared memory, on which a host's ranks post the virtual times of their calls.

Each process group has a file: a ring buffer with one place for each call and rank.  A place holds a
call's number, two times (see ``Ready``) and a checksum.  A rank waits until the place holds the
call's number and the checksum is right, because some processors, such as aarch64, change the order
of writes.  Runs on the ranks.
"""

import mmap
import os
import struct
import threading
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Final, final

from ddpnb.protocol.costs import Ready
from ddpnb.protocol.processes import portable

NUM_CALLS: Final = 512
"""Maximum number of calls by which one rank may be ahead of another rank."""
_POSTED: Final = struct.Struct("<qdd")
_PLACE: Final = struct.Struct("<qddI")
_POLL_SECONDS: Final = 5e-5


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
