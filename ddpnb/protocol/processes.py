"""The commands between processes, and the files of run folders.

Every process imports this file, which imports neither torch nor IPython.
"""

import contextlib
import ctypes
import fcntl
import os
import re
import shutil
import signal
import socket
import struct
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TextIO

import psutil

from ddpnb.protocol.errors import UserError

VERSION = "0.3.0"
"""The version of this code.  Another version may have been installed after the import."""


def portable() -> bool:
    """Return True if ddpnb may use only the system calls that macOS also has.

    This is the case on every system except Linux.  ``DDPNB_PORTABLE=1`` chooses it on Linux.
    """
    return sys.platform != "linux" or os.environ.get("DDPNB_PORTABLE") == "1"


def missing_here() -> tuple[str, ...]:
    """Return a sentence about the features that ddpnb lacks in the portable way, if any."""
    lost = "each rank imports torch, so ranks start more slowly; bytes are computed, not counted"
    return (f"no forks on this system: {lost}",) if portable() else ()


def own_package() -> str:
    """Return the version and the folder of the ddpnb that this process imported."""
    return f"ddpnb {VERSION} in {Path(__file__).resolve().parents[1]}"


class KernelRequest(StrEnum):
    """A request from the kernel to the fork server: the ``op`` of a JSON frame.

    Each request has an ``id``.  The answer, a ``ForkServerEvent.ANSWER``, has the same ``id``.
    """

    START_RANK = "start_rank"
    FORWARD = "forward"
    """Send a ``RankCommand`` to a rank."""
    SIGNAL = "signal"
    """Send a signal to a rank's process: an interrupt, a kill, or SIGCONT."""
    STOP = "stop"
    PREPARE = "prepare"
    """Import torch, and answer with the number of GPUs.  An agent also writes the engines'
    connection file."""
    CHECK = "check"
    """Describe the host.  Only an agent accepts ``CHECK`` and ``PROBE``."""
    PROBE = "probe"


class ForkServerEvent(StrEnum):
    """A report from the fork server or a rank to the kernel: the ``event`` of a JSON frame."""

    EXITED = "exited"
    ANSWER = "answer"
    """The answer to a request: a ``value``, or a ``failure`` if the request failed."""


class RankCommand(StrEnum):
    """A command from the kernel to a rank's control thread, which is never busy for long."""

    ABORT = "abort"
    """End all waits for other ranks; answer with the number of waits that ended."""
    ANSWER = "answer"
    """Send the user's input to a rank that waits for input.  Send None if the prompt is gone."""
    STATUS = "status"
    STACK = "stack"
    """Answer with the lines of the stack of the user's code."""
    STOP = "stop"
    """End the run after its current step.  The rank does not answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStatus:
    """The current activity of one rank."""

    rank: int
    is_busy: bool
    """True if the rank runs a cell or trains."""
    cell: int = 0
    """The ``n`` of the cell ``In [n]`` that the rank runs; 0 if unknown."""
    line: int = 0
    """The line of the cell or script that the rank runs; 0 if unknown."""
    file: str = ""
    """The name of the script that the rank runs; empty in a cell."""
    call: str = ""
    """The call in which the rank waits, such as ``"all_reduce"``; empty if it does not wait."""
    in_backward: bool = False
    """True if the rank is inside ``backward()``, in which DDP calls its all-reduces."""
    tensor: str = ""
    """The tensor that ``call`` sends, such as ``"Float [3, 4]"``; empty if unknown."""
    peer: int | None = None
    """The rank to which ``call`` sends, or from which ``call`` receives."""
    num_collectives: int = 0
    """The number of collectives of the default group that have begun on this rank."""
    num_bytes_between_hosts: int = 0
    """The bytes sent and received between this rank and the ranks of other hosts."""
    cpu_seconds: float = 0.0
    """CPU time of the process; 0 while it waits for a GPU, because this wait also uses CPU time."""


def ephemeral_ports() -> range:
    """Return the ports that the system assigns automatically."""
    try:
        text = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text()
    except OSError:
        text = "32768 65535"  # includes the defaults of Linux and macOS
    first, last = map(int, text.split())
    return range(first, last + 1)


def may_have_gpus(root: Path = Path("/")) -> bool:
    """Return True if this host has a GPU driver, from Linux or from Windows (WSL)."""
    signs = ("dev/nvidiactl", "proc/driver/nvidia/version", "dev/dxg")  # the first may be late
    return any((root / sign).exists() for sign in signs)


def gpu_driver(root: Path = Path("/")) -> str:
    """Return the version of NVIDIA's driver on Linux; ``""`` if it is unknown."""
    file = root / "proc/driver/nvidia/version"
    found = re.search(r" (\d+\.[\d.]+) ", file.read_text()) if file.exists() else None
    return found[1] if found else ""


PIPE_SECONDS = 10.0
"""Maximum seconds to wait for the process at the other end of a pipe."""


def limit_waits(
    pipe: Connection, *, write_seconds: float = PIPE_SECONDS, read_seconds: float = 0.0
) -> socket.socket:
    """Limit how long reads from a pipe and writes to it wait for the process at the other end.

    0 means no limit.  A longer wait raises BlockingIOError.  The pipe may then be unusable,
    because only a part of a message may have been sent.  Another thread can shut down the returned
    socket to end a read.
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
    """Return a copy of an open socket, given its descriptor; raise OSError if the socket is closed.

    The user's default timeout is turned off during this call.  With a default timeout, Python would
    make the socket non-blocking for every process that uses the socket.
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
    if not portable():  # elsewhere, closed pipes and the controller end the processes
        ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)


def adopt_orphans() -> None:
    """Ask Linux to make this process the parent of its descendants' orphans.

    See prctl(2), PR_SET_CHILD_SUBREAPER.
    """
    if not portable():
        ctypes.CDLL(None, use_errno=True).prctl(36, 1)


RUN_FOLDER = "ddpnb-"
"""The prefix of the names of run folders."""


PATH_BYTES = (107 if sys.platform == "linux" else 103) - 52
"""Maximum length of the path of a run folder's parent.  The system limits the paths of sockets."""

ENOUGH_BYTES = 2**28
"""The free space that a run folder should have.  Docker's ``/dev/shm`` of 64 MB is too small."""


def parent_folders() -> list[Path]:
    """Return all folders that can hold run folders, the best first: in memory, with free space."""
    found = ["/dev/shm", "/tmp", "/var/tmp"]
    with contextlib.suppress(FileNotFoundError):  # the user can write to no temporary folder
        found.insert(1, tempfile.gettempdir())
    usable = [
        Path(each)
        for each in dict.fromkeys(found)
        if os.access(each, os.W_OK) and len(os.fsencode(each)) <= PATH_BYTES
    ]
    return sorted(usable, key=lambda each: -min(shutil.disk_usage(each).free, ENOUGH_BYTES))


def parent_folder() -> Path:
    """Return the folder in which a new run folder belongs."""
    if not (found := parent_folders()):
        raise UserError(
            "ddpnb finds no folder for its sockets. Set TMPDIR to a folder that you can write to, "
            f"with at most {PATH_BYTES} characters in its path."
        )
    return found[0]


def private_folder() -> Path:
    """Create a cluster's run folder, which other users cannot open (mode 0700)."""
    return Path(tempfile.mkdtemp(prefix=RUN_FOLDER, dir=parent_folder()))


def remove_folder(folder: Path) -> None:
    """Remove a run folder.  If this process has no free descriptor, only remove an empty folder."""
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):
        folder.rmdir()


MARK = "IPYTHONDIR"
"""The environment variable that has the run folder in each process of a cluster."""
KEEP = "DDPNB_KEEP"
"""ddpnb does not kill a program in a session of its own that has this environment variable."""


def kill_programs(folder: Path, descendants: Iterable[psutil.Process] = ()) -> bool:
    """Kill all programs that a cluster has started, also in other sessions, except this process.

    ``descendants`` are further processes to kill.  Return True if a process was killed.
    """
    found = {each.pid: each for each in descendants}
    for each in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # it has ended, or it belongs to another user
            environment = each.environ()
            if KEEP in environment:
                found.pop(each.pid, None)
            elif environment.get(MARK) == str(folder):
                found[each.pid] = each
    found.pop(os.getpid(), None)
    for process in found.values():
        with contextlib.suppress(psutil.Error):
            process.kill()
    return bool(found)


def process_log(folder: Path, member: int | str) -> Path:
    """Return the file for output that bypasses Python on a rank or in the controller."""
    return folder / f"{member}.log"


SERVER_LOCK = "server.lock"
"""A file of a run folder that the fork server or agent locks while it runs.

If the file is missing, the run folder was removed or emptied.
"""


def hold(folder: Path) -> TextIO:
    """Lock a run folder until the returned file is closed or this process has ended.

    The operating system keeps the lock.  So the lock also works between containers that share the
    folder but have separate process ids.
    """
    draft = folder / f"{SERVER_LOCK}.{os.getpid()}"
    file = draft.open("w")
    fcntl.flock(file, fcntl.LOCK_EX)
    draft.replace(folder / SERVER_LOCK)  # the file appears already locked
    return file


def remove_leftovers() -> list[Path]:
    """Remove this user's run folders that have no running fork server; return their paths.

    A fork server that is killed leaves its run folder behind.
    """
    removed = []
    for folder in (each for parent in parent_folders() for each in parent.glob(f"{RUN_FOLDER}*")):
        with contextlib.suppress(OSError):  # already removed, not locked yet, or locked
            if folder.lstat().st_uid == os.getuid():
                with (folder / SERVER_LOCK).open() as file:
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                shutil.rmtree(folder)
                removed.append(folder)
    return removed


def working_folder() -> Path:
    """Return this process's working folder; raise UserError if the folder no longer exists."""
    try:
        return Path.cwd()
    except FileNotFoundError:
        raise UserError(
            "The notebook's working folder no longer exists. Change to another folder with %cd."
        ) from None


def refuse_fork(pid: int) -> None:
    """Raise UserError if this process is a forked child of the kernel, whose id is ``pid``."""
    if os.getpid() != pid:
        raise UserError(
            f"Process {os.getpid()} was forked from the kernel (process {pid}), and only the "
            "kernel can use ddpnb. Call ddpnb in a cell, and pass the result to the other process."
        )


def atomic_write(path: Path, content: bytes | memoryview, *, mode: int = 0o666) -> None:
    """Write a file; if this process is killed, the file has either the old or the new content."""
    draft = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
        with open(descriptor, "wb") as file:
            file.write(content)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
