"""Which process is this, does it live, and what does it leave behind?  (Both sides.)

Imports neither torch nor IPython.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path

import psutil

ProcessId = tuple[int, float]
"""A process: its pid, and when it began (seconds since 1970), since pids are used again."""


class KernelRequest(StrEnum):
    """A request of the kernel to the fork server: ``op`` of a JSON frame."""

    START_RANK = "start_rank"
    FORWARD = "forward"
    """A ``RankCommand``."""
    SIGNAL = "signal"
    ALLOW_DETACH = "allow_detach"
    DETACH = "detach"
    STOP = "stop"


class ForkServerEvent(StrEnum):
    """What the fork server, or a rank through it, reports to the kernel: ``event`` of a frame."""

    READY = "ready"
    FAILED = "failed"
    STARTED = "started"
    EXITED = "exited"
    ANSWER = "answer"
    ATTACHED = "attached"
    REFUSED = "refused"


class RankCommand(StrEnum):
    """A command of the kernel to a rank's control thread, which is never busy for long."""

    ABORT = "abort"
    STATUS = "status"
    STACK = "stack"
    STOP = "stop"


_SAME_SECONDS = 1.5
"""How far apart two readings of one start may lie: they depend on an adjustable clock."""
_PR_SET_PDEATHSIG = 1


def process_id(pid: int | None = None) -> ProcessId:
    """Return the identity of a process, by default of this one.

    Raises:
        psutil.NoSuchProcess: where it has ended.
    """
    process = psutil.Process(pid)
    return process.pid, process.create_time()


def is_alive(process: ProcessId) -> bool:
    """Return whether a process still runs; one that waits to be reaped does not."""
    pid, began = process
    try:
        found = psutil.Process(pid)
        is_same: bool = abs(found.create_time() - began) < _SAME_SECONDS
        return is_same and bool(found.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def die_with_parent() -> None:
    """Ask Linux to kill this process when its parent ends (prctl(2))."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def atomic_write(
    path: Path,
    content: bytes | memoryview,
    *,
    mode: int = 0o666,
    synced_folders: Iterable[Path] = (),
) -> None:
    """Write a file that is there as a whole, or as it was before, whenever this process ends.

    Args:
        path: the file.
        content: all of it.
        mode: of the file, less the umask.
        synced_folders: where the machine itself may go down: the folder of the file, and those
            above that may be new.  They, and the file, are on the disk when this returns.

    Raises:
        OSError: the disk refuses; nothing is left of it.
    """
    folders = tuple(synced_folders)
    draft = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
        with open(descriptor, "wb") as file:
            file.write(content)
            if folders:
                file.flush()
                os.fsync(file.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
    for folder in folders:
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)  # else the file's name may not be there after a crash
        finally:
            os.close(descriptor)
