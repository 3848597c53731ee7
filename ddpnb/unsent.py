"""What had a rank done, but not yet sent, when its process died?  (Both sides.)

A rank that trains writes each step also into a ring in the cluster's run folder.  That
outlives the process: a rank that is killed loses no step that it had finished.  Beside the
ring stands when it was killed, where that was on purpose.
"""

import contextlib
import math
import mmap
import os
import struct
from pathlib import Path
from typing import Final, Self, final

from ddpnb.wire import ROW_BYTES, Mark, MarkKind

NUM_KEPT: Final = 4096
"""Steps that are kept: those of half a second, and more, of any training."""
_HEAD: Final = struct.Struct("<32sqdQ")
"""The run's id; which worker died, and when (NaN: none did); how many steps there were in all."""
_DEATH: Final = struct.Struct("<qd")
_NUM_STEPS: Final = struct.Struct("<Q")
_NUM_STEPS_OFFSET: Final = _HEAD.size - _NUM_STEPS.size
_DEATH_OFFSET: Final = _NUM_STEPS_OFFSET - _DEATH.size
_FILE_BYTES: Final = _HEAD.size + NUM_KEPT * ROW_BYTES


@final
class UnsentSteps:
    """One rank's last steps of one run, in a file.

    Args:
        path: the file.
        shared: it, mapped.
    """

    def __init__(self, path: Path, shared: mmap.mmap) -> None:
        self._path = path
        self._shared = shared
        self._num_steps = 0

    @classmethod
    def open(cls, folder: Path, *, rank: int, run_id: str) -> Self | None:
        """Begin with none; return None where there is no room.

        Args:
            folder: the cluster's run folder.
            rank: whose steps.
            run_id: the run that they are of.
        """
        path = _path(folder, rank)
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
            try:
                os.posix_fallocate(descriptor, 0, _FILE_BYTES)  # else a full disk ends the process
                shared = mmap.mmap(descriptor, _FILE_BYTES)
            finally:
                os.close(descriptor)
            _HEAD.pack_into(shared, 0, run_id.encode(), rank, math.nan, 0)
            return cls(path, shared)
        return None

    def add(self, row: bytes) -> None:
        """Write a step, as ``wire.pack_step`` makes it: the step first, then that it is there."""
        start = _HEAD.size + self._num_steps % NUM_KEPT * ROW_BYTES
        self._shared[start : start + ROW_BYTES] = row
        self._num_steps += 1
        _NUM_STEPS.pack_into(self._shared, _NUM_STEPS_OFFSET, self._num_steps)

    def add_death(self, mark: Mark) -> None:
        """Write that this process is about to be killed."""
        _DEATH.pack_into(self._shared, _DEATH_OFFSET, mark.rank, mark.seconds)

    def close(self) -> None:
        """Remove the file: all has been sent.  May be called twice."""
        self._path.unlink(missing_ok=True)


def read_unsent(folder: Path, *, rank: int, run_id: str) -> bytes:
    """Return the last steps of a rank whose process has died, as rows, those already sent too.

    Args:
        folder: the cluster's run folder.
        rank: whose steps.
        run_id: the run that they are of; there are none of any other.
    """
    data = _read(folder, rank, run_id)
    if not data:
        return b""
    num_steps = _HEAD.unpack_from(data)[-1]
    rows = data[_HEAD.size :]
    if num_steps <= NUM_KEPT:
        return rows[: num_steps * ROW_BYTES]
    oldest = num_steps % NUM_KEPT * ROW_BYTES
    return rows[oldest:] + rows[:oldest]


def read_death(folder: Path, *, rank: int, run_id: str) -> Mark | None:
    """Return when a rank's process was killed on purpose, and which of its workers was meant.

    Args:
        folder: the cluster's run folder.
        rank: whose process.
        run_id: the run that it trained.
    """
    data = _read(folder, rank, run_id)
    if not data:
        return None
    worker, seconds = _DEATH.unpack_from(data, _DEATH_OFFSET)
    if math.isnan(seconds):
        return None
    return Mark(rank=worker, seconds=seconds, kind=MarkKind.KILLED)


def _read(folder: Path, rank: int, run_id: str) -> bytes:
    """Return the whole file; nothing where there is none, or one of another run."""
    try:
        data = _path(folder, rank).read_bytes()
    except OSError:
        return b""
    if len(data) < _FILE_BYTES:
        return b""
    return data if _HEAD.unpack_from(data)[0].rstrip(b"\0") == run_id.encode() else b""


def _path(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.steps"
