"""Reports what this rank is doing right now.  Runs on the ranks, in the control thread.

The report has three sources:

- The Python stack of the main thread shows the cell and the line.  The stack also shows a call of
  ``torch.distributed`` or a shared-memory all-reduce in progress.
- Torch's flight recorder lists the collectives in progress, including the collectives of DDP.  The
  recorder's entries for NCCL show the collective in which a GPU waits.
- The operating system shows whether the main thread sleeps on a lock.  A thread sleeps on a lock
  during a collective of gloo.  While a thread waits for a GPU, it polls instead of sleeping.
"""

import inspect
import os
import platform
import sys
import threading
import time
import traceback
from pathlib import Path
from types import FrameType

import torch.distributed as dist

from ddpnb.compat import torch_internals
from ddpnb.compat.asyncio_internals import awaiting
from ddpnb.protocol.processes import RankStatus
from ddpnb.rank.collectives.shared_memory import SharedSums
from ddpnb.rank.group import Group
from ddpnb.rank.stack import BACKWARD, CELL_NUMBERS, is_users, linked, with_cell_names
from ddpnb.rank.training import loop

FUTEX = {"x86_64": "202", "aarch64": "98"}
"""Number of the Linux system call that waits for a lock, for each type of machine."""

DISTRIBUTED = inspect.unwrap(dist.all_reduce).__code__.co_filename
"""Path of the torch file that defines collectives, sends and receives."""

GPU_SECONDS = 1.0
"""Seconds after which a collective on a GPU counts as waiting for another rank."""

POINT_TO_POINT = {"send": "dst", "isend": "dst", "recv": "src", "irecv": "src"}
"""Maps each call between two ranks to the name of the argument that gives the other rank."""


def rank_status(group: Group) -> RankStatus:
    """Return the status of this rank."""
    frames = main_thread_frames()
    in_shared_sum = any(frame.f_code is SharedSums.add.__code__ for frame in frames)
    call, peer = distributed_call(frames)
    pending = None
    if not in_shared_sum and (call or sleeps_on_lock()):
        pending = torch_internals.pending_collective(group.joined_ns)
    on_gpu = None
    if group.backend == "nccl":
        on_gpu = torch_internals.pending_collective(group.joined_ns, seconds_on_gpu=GPU_SECONDS)
    name, tensor = on_gpu or pending or ("", "")
    call = call or ("all_reduce" if in_shared_sum else name)
    users = next(filter(is_users, [*frames, *awaiting(frames)]), None)
    path = users.f_code.co_filename if users else ""
    cell = CELL_NUMBERS.get(path, 0)
    return RankStatus(
        rank=group.rank,
        is_busy=users is not None or in_file(frames, loop.__file__),
        cell=cell,
        line=users.f_lineno if users else 0,
        file="" if cell else Path(path).name,
        call=call,
        in_backward=bool(call) and in_file(frames, BACKWARD),
        tensor=tensor if call else "",
        peer=peer,
        num_collectives=group.collective_checks.num_made,
        num_bytes_between_hosts=group.num_bytes_between_hosts(),
        cpu_seconds=time.process_time() if on_gpu is None else 0.0,
    )


def users_stack() -> list[str]:
    """Return the main thread's stack, one string per frame.

    The stack begins at the outermost frame of the user's code.  If no frame runs the user's code,
    the stack begins at the training loop.
    """
    frames = main_thread_frames()
    users = [n for n, frame in enumerate(frames, 1) if is_users(frame)]
    users = users or [n for n, frame in enumerate(frames, 1) if in_file([frame], loop.__file__)]
    stack = traceback.format_stack(frames[0])[-users[-1] :] if users else []
    return [with_cell_names(each) for each in stack]


def main_thread_frames() -> list[FrameType]:
    """Return the frames of the main thread, innermost first."""
    return [*linked(sys._current_frames().get(threading.main_thread().ident or 0), "f_back")]


def in_file(frames: list[FrameType], path: str) -> bool:
    """Return True if any of the frames runs code from the file ``path``."""
    return any(frame.f_code.co_filename == path for frame in frames)


def distributed_call(frames: list[FrameType]) -> tuple[str, int | None]:
    """Return the name of the ``torch.distributed`` call in progress, and the other rank if known.

    The name is empty if no call is in progress.  Only sends and receives have another rank.
    """
    inside = [frame for frame in frames if frame.f_code.co_filename == DISTRIBUTED]
    if not inside:
        return "", None
    outermost = inside[-1]
    name = outermost.f_code.co_name
    peer = outermost.f_locals.get(POINT_TO_POINT.get(name, ""))
    return name, peer if isinstance(peer, int) else None


def sleeps_on_lock() -> bool:
    """Return True if the main thread sleeps on a lock, or if the current system call is unknown."""
    number = FUTEX.get(platform.machine())
    try:
        call = Path(f"/proc/self/task/{os.getpid()}/syscall").read_text()
    except OSError:
        return True
    return number is None or call.split(" ", 1)[0] == number
