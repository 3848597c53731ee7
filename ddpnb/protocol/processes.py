"""Processes: the commands between them, and files that survive their death.

Every process imports it; it imports neither torch nor IPython.
"""

import contextlib
import ctypes
import fcntl
import os
import shutil
import signal
import socket
import struct
import tempfile
from dataclasses import dataclass
from enum import StrEnum
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TextIO

from ddpnb.protocol.errors import UserError


class KernelRequest(StrEnum):
    """A request of the kernel to the fork server: ``op`` of a JSON frame.

    Each has an ``id``, which its ``ForkServerEvent.ANSWER`` repeats.
    """

    START_RANK = "start_rank"
    FORWARD = "forward"
    """A ``RankCommand``."""
    SIGNAL = "signal"
    """To a rank's process: an interrupt, a kill, or SIGCONT."""
    STOP = "stop"
    PREPARE = "prepare"
    """Import torch; answered with the number of GPUs.  An agent also takes the engines' connection
    file."""
    CHECK = "check"
    """For the agent of another host, as the next: describe that host."""
    PROBE = "probe"
    """Connect to the other hosts."""


class ForkServerEvent(StrEnum):
    """What the fork server, or a rank through it, reports to the kernel: ``event`` of a frame."""

    EXITED = "exited"
    ANSWER = "answer"
    """A request's ``value``, or its ``failure``."""


class RankCommand(StrEnum):
    """A command of the kernel to a rank's control thread, which is never busy for long."""

    ABORT = "abort"
    """Answered with how many waits were ended; takes the processes of the host's other ranks."""
    ANSWER = "answer"
    """Give a rank that is debugged the user's line, or None: there is no prompt any more."""
    STATUS = "status"
    """Answered with the fields of a ``RankStatus``."""
    STACK = "stack"
    """Answered with the lines of the user's stack."""
    STOP = "stop"
    """End the run in progress after its current step; not answered with anything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStatus:
    """What one rank is doing at one moment."""

    rank: int
    is_busy: bool
    """Whether it runs a cell or trains."""
    cell: int = 0
    """The ``n`` of the cell ``In [n]`` that it runs; 0 if not known."""
    line: int = 0
    """The line of that cell, or of a script; 0 if not known."""
    file: str = ""
    """The name of that script; empty in a cell."""
    call: str = ""
    """The call of ``torch.distributed`` that it waits in, e.g. ``"all_reduce"``; empty if none."""
    in_backward: bool = False
    """Whether it is inside ``backward()``, where DDP's all-reduces run."""
    tensor: str = ""
    """What that call sends, e.g. ``"Float [3, 4]"``; empty if not known."""
    peer: int | None = None
    """The rank that it sends to or receives from."""
    num_collectives: int = 0
    """Collectives of all ranks that have begun here."""
    num_bytes_between_hosts: int = 0
    """What has come and gone between this rank and those of other hosts."""
    cpu_seconds: float = 0.0
    """Processor time that the process has used; 0 while it waits for a GPU, which takes all."""


def num_cores(system: Path = Path("/sys/devices/system/cpu")) -> int:
    """Return how many cores this process may use; hyper-threads of one core count once."""
    cores = set()
    for cpu in os.sched_getaffinity(0):
        try:
            cores.add((system / f"cpu{cpu}/topology/thread_siblings_list").read_text().strip())
        except OSError:  # not known
            cores.add(str(cpu))
    return len(cores)


def ephemeral_ports() -> range:
    """Return the ports that the system hands out by itself."""
    try:
        text = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text()
    except OSError:
        text = "32768 60999"  # Linux's default
    first, last = map(int, text.split())
    return range(first, last + 1)


def may_have_gpus() -> bool:
    """Return whether this host has a driver of GPUs, its own or that of Windows."""
    return Path("/dev/nvidiactl").exists() or Path("/dev/dxg").exists()


PIPE_SECONDS = 10.0
"""How long the process at the other end of a pipe may take; one that takes longer is given up."""


def limit_waits(
    pipe: Connection, *, write_seconds: float = PIPE_SECONDS, read_seconds: float = 0.0
) -> socket.socket:
    """Have no write to a pipe wait longer for the process at its other end, nor a read.

    0 is no limit.  What takes longer raises BlockingIOError.  The pipe may be of no use then: a
    part of a message may have been passed on.  The pipe's socket, which is returned, can be shut
    down while a thread reads.
    """
    end = as_socket(pipe.fileno())
    for option, seconds in (
        (socket.SO_SNDTIMEO, write_seconds),
        (socket.SO_RCVTIMEO, read_seconds),
    ):
        timeval = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
        end.setsockopt(socket.SOL_SOCKET, option, timeval)
    return end


def as_socket(fd: int) -> socket.socket:
    """Return a copy of an open socket, by its descriptor; an OSError if it has been closed.

    The user may have set a default timeout: with it Python would make the socket non-blocking, for
    all who use it.
    """
    copy, default = os.dup(fd), socket.getdefaulttimeout()
    socket.setdefaulttimeout(None)
    try:
        return socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise
    finally:
        socket.setdefaulttimeout(default)


def die_with_parent() -> None:
    """Ask Linux to kill this process when its parent ends (prctl(2), PR_SET_PDEATHSIG)."""
    ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)


RUN_FOLDER = "ddpnb-"
"""Names of run folders begin so."""


def parent_folder() -> Path:
    """Return the folder that holds this host's run folders: in memory where possible."""
    return Path("/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir())


def private_folder() -> Path:
    """Make a run folder for a cluster, closed to other users (mode 0700)."""
    return Path(tempfile.mkdtemp(prefix=RUN_FOLDER, dir=parent_folder()))


def process_log(folder: Path, member: int | str) -> Path:
    """Return the file in a run folder with what a rank, or the controller, wrote past Python."""
    return folder / f"{member}.log"


SERVER_LOCK = "server.lock"
"""A file of a run folder, locked by its fork server or agent while that lives."""


def hold(folder: Path) -> TextIO:
    """Lock a run folder until the file that is returned is closed or this process has ended.

    The operating system keeps the lock.  So processes see it that share the folder and not their
    process ids, as containers may.
    """
    draft = folder / f"{SERVER_LOCK}.{os.getpid()}"
    file = draft.open("w")
    fcntl.flock(file, fcntl.LOCK_EX)
    draft.replace(folder / SERVER_LOCK)  # it appears as a locked file
    return file


def remove_leftovers() -> list[Path]:
    """Remove and return this user's run folders that no living fork server needs.

    A fork server removes its own, unless it was killed.
    """
    removed = []
    for folder in parent_folder().glob(f"{RUN_FOLDER}*"):
        with contextlib.suppress(OSError):  # removed meanwhile, yet to be locked, or locked
            if folder.lstat().st_uid == os.getuid():
                with (folder / SERVER_LOCK).open() as file:
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                shutil.rmtree(folder)
                removed.append(folder)
    return removed


def working_folder() -> Path:
    """Return the folder in which this process works; a UserError if it has been removed."""
    try:
        return Path.cwd()
    except FileNotFoundError:
        raise UserError(
            "The folder in which this notebook works has been removed: %cd leads to another."
        ) from None


def atomic_write(path: Path, content: bytes | memoryview, *, mode: int = 0o666) -> None:
    """Write a file: whenever this process ends, the file is complete or as it was before."""
    draft = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
        with open(descriptor, "wb") as file:
            file.write(content)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
