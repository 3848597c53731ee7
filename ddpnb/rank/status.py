"""Where does this rank stand right now?  (Rank side, in the control thread.)

Three sources: the main thread's Python stack (``sys._current_frames``) tells which line
of which cell it is at, and a call of ``torch.distributed``, or a sum in shared memory, that
it is in (DDP's hooks run there too, where it trains on the CPU); torch's flight
recorder tells which collectives have begun and not ended, DDP's own among them; and the
operating system tells whether the thread sleeps on a lock, as it does in a collective of
gloo's.  A thread that waits for a GPU is busy asking: it is not known to wait.
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

import torch
import torch.distributed as dist

from ddpnb.compat import torch_internals
from ddpnb.protocol.messages import RankStatus
from ddpnb.rank.process_group import Group

FUTEX = {"x86_64": "202", "aarch64": "98"}
"""Linux's number of the system call in which a thread waits for a lock."""

DISTRIBUTED = inspect.unwrap(dist.all_reduce).__code__.co_filename
"""Torch's file of the calls that take several ranks."""
SHARED_ALL_REDUCE = os.path.join("ddpnb", "rank", "comm", "shared_all_reduce.py")
TRAINING = os.path.join("ddpnb", "rank", "training", "loop.py")
BACKWARD = torch.autograd.backward.__code__.co_filename
"""Torch's file of what computes gradients."""

POINT_TO_POINT = {"send": "dst", "isend": "dst", "recv": "src", "irecv": "src"}
"""Calls between two ranks, each with the argument that names the other."""


def rank_status(group: Group, shell: Any) -> RankStatus:
    """Tell where this rank stands; costs nothing until it is asked.

    Args:
        group: this rank's process group.
        shell: the engine's IPython; None while the engine starts.
    """
    frames = list(main_thread_frames())
    call, peer = distributed_call(frames)
    is_asked = call or sleeps_on_lock()
    pending = torch_internals.pending_collective(group.joined_ns) if is_asked else None
    if not call and pending is not None:
        call = pending.name
    cell, line = (0, 0) if shell is None else place(frames, shell)
    return RankStatus(
        rank=group.rank,
        is_busy=line > 0 or any(map(is_training, frames)),
        cell=cell,
        line=line,
        call=call,
        in_backward=bool(call) and any(map(is_backward, frames)),
        tensor=pending.tensor if call and pending else "",
        peer=peer,
        num_collectives=num_collectives(),
        cpu_seconds=time.process_time(),
    )


def place(frames: list[FrameType], shell: Any) -> tuple[int, int]:
    """Return the cell, and its line, that the main thread is at; zeros if in none."""
    for frame in frames:
        if is_users(frame, shell):
            return cell_number(shell, frame.f_code.co_filename), frame.f_lineno
    return 0, 0


def cell_number(shell: Any, filename: str) -> int:
    """Return the ``n`` of the cell ``In [n]`` whose code IPython calls so; 0 if it is none."""
    label, name = shell.compile.format_code_name(filename) or ("", "")
    number = name.removeprefix("In[").removesuffix("]")
    return int(number) if label == "Cell" and number.isdecimal() else 0


def users_stack(shell: Any) -> list[str]:
    """Return the main thread's stack, one string a frame.

    From the user's outermost frame on, or in a training from its own.
    """
    frames = list(main_thread_frames())
    users = [n for n, frame in enumerate(frames, 1) if shell and is_users(frame, shell)]
    users = users or [n for n, frame in enumerate(frames, 1) if is_training(frame)]
    return traceback.format_stack(frames[0])[-users[-1] :] if users else []


def main_thread_frames() -> Iterator[FrameType]:
    """Yield the frames of the main thread, innermost first."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        yield frame
        frame = frame.f_back


def is_users(frame: FrameType, shell: Any) -> bool:
    """Tell whether a frame runs a cell; ipyparallel's own call runs in its namespace too."""
    return frame.f_globals is shell.user_ns and frame.f_code.co_filename != "<string>"


def is_training(frame: FrameType) -> bool:
    """Tell whether a frame trains a comparison's run, or checks one."""
    return frame.f_code.co_filename.endswith(TRAINING)


def is_backward(frame: FrameType) -> bool:
    """Tell whether a frame is torch's ``backward``."""
    return frame.f_code.co_filename.endswith(BACKWARD)


def distributed_call(frames: list[FrameType]) -> tuple[str, int | None]:
    """Return the call that is in progress and takes several ranks, and its peer if it has one."""
    inside = [frame for frame in frames if frame.f_code.co_filename.endswith(DISTRIBUTED)]
    if not inside:
        adds = any(frame.f_code.co_filename.endswith(SHARED_ALL_REDUCE) for frame in frames)
        return "all_reduce" if adds else "", None
    outermost = inside[-1]
    name = outermost.f_code.co_name
    peer = outermost.f_locals.get(POINT_TO_POINT.get(name, ""))
    return name, peer if isinstance(peer, int) else None


def num_collectives() -> int:
    """Return how many collectives of the default group have begun on this rank."""
    with contextlib.suppress(RuntimeError):
        return torch_internals.num_collectives()
    return 0


def sleeps_on_lock() -> bool:
    """Tell whether the main thread sleeps on a lock; True where the system does not tell."""
    number = FUTEX.get(platform.machine())
    try:
        call = Path(f"/proc/self/task/{os.getpid()}/syscall").read_text()
    except OSError:
        return True
    return number is None or call.split(" ", 1)[0] == number
