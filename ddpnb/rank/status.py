"""What is this rank doing right now?  (ranks, in the control thread)

There are three sources.  The main thread's Python stack shows the cell and its line, and a call
of ``torch.distributed`` or a shared-memory all-reduce in progress.  Torch's flight recorder lists
the collectives that have begun and not ended, including DDP's own.  The operating system shows
whether the thread sleeps on a lock, as it does in a collective of gloo.  A thread that waits for
a GPU keeps polling: there NCCL's entries in the flight recorder show what the GPU waits in.
"""

import contextlib
import inspect
import os
import platform
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed as dist

from ddpnb.compat import torch_internals
from ddpnb.protocol.messages import RankStatus
from ddpnb.rank.collectives.link import is_exchanging
from ddpnb.rank.group import Group
from ddpnb.rank.stack import BACKWARD, outward

FUTEX = {"x86_64": "202", "aarch64": "98"}
"""The number of Linux's system call that waits for a lock."""

DISTRIBUTED = inspect.unwrap(dist.all_reduce).__code__.co_filename
"""The file of torch with the calls in which several ranks take part."""
SHARED_ALL_REDUCE = os.path.join("ddpnb", "rank", "servers", "shared_sum.py")
TRAINING = os.path.join("ddpnb", "rank", "training", "loop.py")

GPU_SECONDS = 1.0
"""A collective that a GPU has been in for so long waits for another rank."""

OWN_FOLDER = str(Path(__file__).parents[1])

POINT_TO_POINT = {"send": "dst", "isend": "dst", "recv": "src", "irecv": "src"}
"""Calls between two ranks, each with the argument that names the other."""


def rank_status(group: Group, shell: Any) -> RankStatus:
    """Return what this rank is doing; ``shell`` is None while the engine starts."""
    frames = list(main_thread_frames())
    call, peer = distributed_call(frames)
    may_wait = call or sleeps_on_lock()
    may_wait = may_wait and not any(map(is_shared_sum, frames))
    pending = torch_internals.pending_collective(group.joined_ns) if may_wait else None
    on_gpu = None
    if group.backend == "nccl":
        on_gpu = torch_internals.collective_on_gpu(group.joined_ns, GPU_SECONDS)
        pending = on_gpu or pending
    if not call and pending is not None:
        call = pending.name
    if is_exchanging():  # which ends by itself, however slow the emulated link is
        call = ""
    cell, line, file = (0, 0, "") if shell is None else users_line(frames, shell)
    return RankStatus(
        rank=group.rank,
        is_busy=line > 0 or any(map(is_training, frames)),
        cell=cell,
        line=line,
        file=file,
        call=call,
        in_backward=bool(call) and any(each.f_code.co_filename == BACKWARD for each in frames),
        tensor=pending.tensor if call and pending else "",
        peer=peer,
        num_collectives=num_collectives(),
        num_bytes_between_hosts=group.num_bytes_between_hosts(),
        cpu_seconds=time.process_time() if on_gpu is None else 0.0,
    )


def users_line(frames: list[FrameType], shell: Any) -> tuple[int, int, str]:
    """Return the cell, the line and the script that the main thread has reached, if any."""
    for frame in frames:
        if is_users(frame, shell):
            path = frame.f_code.co_filename
            cell = cell_number(shell, path)
            return cell, frame.f_lineno, "" if cell else Path(path).name
    return 0, 0, ""


def cell_number(shell: Any, filename: str) -> int:
    """Return ``n`` if IPython uses this file name for the code of ``In [n]``; 0 if it does not."""
    label, name = shell.compile.format_code_name(filename) or ("", "")
    number = name.removeprefix("In[").removesuffix("]")
    return int(number) if label == "Cell" and number.isdecimal() else 0


def users_stack(shell: Any) -> list[str]:
    """Return the main thread's stack, one string a frame.

    It begins at the user's outermost frame, or else at the training loop's.
    """
    frames = list(main_thread_frames())
    users = [n for n, frame in enumerate(frames, 1) if shell and is_users(frame, shell)]
    users = users or [n for n, frame in enumerate(frames, 1) if is_training(frame)]
    return traceback.format_stack(frames[0])[-users[-1] :] if users else []


def main_thread_frames() -> Iterator[FrameType]:
    """Yield the frames of the main thread, innermost first."""
    yield from outward(sys._current_frames().get(threading.main_thread().ident or 0))


def is_users(frame: FrameType, shell: Any) -> bool:
    """Return whether a frame runs a cell or a script.

    ipyparallel's own call runs in the cells' namespace too, and Python runs a process's first
    module, the fork server's, as it runs a script.
    """
    path, names = frame.f_code.co_filename, frame.f_globals
    is_script = names.get("__name__") == "__main__" and not path.startswith(OWN_FOLDER)
    return (names is shell.user_ns or is_script) and path != "<string>"


def is_training(frame: FrameType) -> bool:
    """Return whether a frame trains or checks a comparison's run."""
    return frame.f_code.co_filename.endswith(TRAINING)


def is_shared_sum(frame: FrameType) -> bool:
    """Return whether a frame sums in shared memory."""
    return frame.f_code.co_filename.endswith(SHARED_ALL_REDUCE)


def distributed_call(frames: list[FrameType]) -> tuple[str, int | None]:
    """Return the call of several ranks that is in progress, and its peer if it has one."""
    inside = [frame for frame in frames if frame.f_code.co_filename.endswith(DISTRIBUTED)]
    if not inside:
        return "all_reduce" if any(map(is_shared_sum, frames)) else "", None
    outermost = inside[-1]
    name = outermost.f_code.co_name
    peer = outermost.f_locals.get(POINT_TO_POINT.get(name, ""))
    return name, peer if isinstance(peer, int) else None


def num_collectives() -> int:
    """Return how many collectives of all ranks have begun on this rank."""
    with contextlib.suppress(RuntimeError):
        return torch_internals.num_collectives()
    return 0


def sleeps_on_lock() -> bool:
    """Return whether the main thread sleeps on a lock; True if the system does not show it."""
    number = FUTEX.get(platform.machine())
    try:
        call = Path(f"/proc/self/task/{os.getpid()}/syscall").read_text()
    except OSError:
        return True
    return number is None or call.split(" ", 1)[0] == number
