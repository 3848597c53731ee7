"""How does this rank join, leave and free its process group?  (Rank side.)"""

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

from ddpnb.compat import torch_internals
from ddpnb.protocol.messages import RankState
from ddpnb.protocol.processes import atomic_write
from ddpnb.rank.cancellation import CancellationToken
from ddpnb.rank.collective_checks import CollectiveChecker

JOIN_TIMEOUT = timedelta(seconds=60)
"""How long the ranks wait for each other when they form a group."""

ABORT_SECONDS = 10.0
"""How long NCCL may take to abort before what else frees a rank goes on without it."""

SETTLE_SECONDS = 2.0
"""How long a GPU may still be at what it was given before a group is left."""

NCCL_SETTINGS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}
"""NCCL's watchdog ends a process whose group was aborted or waits for ten minutes, unless told."""


@dataclass(kw_only=True, slots=True)
class Group:
    """This rank's place in the default process group of ``torch.distributed``.

    The ranks of one host meet in a ``FileStore`` inside the private run folder:
    no port is opened for it, and it outlives every single rank.  Each time the
    group is formed anew, under the next generation's key prefix, so that no key
    of a dead group is ever read.
    """

    rank: int
    local_rank: int
    world_size: int
    backend: str
    device: torch.device
    shares_device: bool
    folder: Path
    generation: int = field(default=-1)
    joined_ns: int = 0
    """``time.time_ns()`` when this generation's group had been formed."""
    cancellation: CancellationToken = field(default_factory=CancellationToken)
    """Frees this rank from waits that are not the group's own; a new one with each group."""
    collective_checks: CollectiveChecker = field(default_factory=CollectiveChecker)
    """Refuses collectives that do not match the other ranks'."""

    def join(self, generation: int, *, is_checked: bool = False) -> None:
        """Form the group; takes part: every rank.  Returns after a finished all-reduce.

        Args:
            generation: how many groups there were before.
            is_checked: whether torch compares order, shape and type of the collectives of
                all ranks at each call (``DebugLevel.DETAIL``); that makes them slow.

        Raises:
            RuntimeError: where a rank did not come within ``JOIN_TIMEOUT``.
        """
        self.leave()
        store = dist.FileStore(str(self.folder / f"group-{generation}"), self.world_size)
        store.set_timeout(JOIN_TIMEOUT)
        for name, value in NCCL_SETTINGS.items():
            os.environ.setdefault(name, value)
        level = dist.DebugLevel.DETAIL if is_checked else dist.DebugLevel.OFF
        dist.set_debug_level(level)
        self.collective_checks.begin(self.folder, generation)
        dist.init_process_group(
            self.backend, store=store, rank=self.rank, world_size=self.world_size
        )
        self.generation = generation
        self.cancellation = CancellationToken()
        self.joined_ns = time.time_ns()
        self.announce()
        total = torch.ones(1, device=self.device)
        dist.all_reduce(total)
        assert total.item() == self.world_size

    def leave(self) -> None:
        """Leave the group, if there is one.

        Raises:
            RuntimeError: it can neither be left nor aborted.
        """
        if not dist.is_initialized():
            return
        if self.is_aborted_to_end:  # its own good-bye would wait for ranks that may be gone
            if self.device.type == "cuda" and not self.cancellation.is_aborted:
                ends_in_time([lambda: torch.cuda.synchronize(self.device)], SETTLE_SECONDS)
            if not abort_groups(ABORT_SECONDS):
                raise RuntimeError(f"{self.backend} did not abort: start this rank anew.")
        with contextlib.suppress(RuntimeError):  # a cut group cannot say good-bye
            dist.destroy_process_group()

    @property
    def is_aborted_to_end(self) -> bool:
        """Whether waits in this backend end by an abort: in all but gloo, which has none."""
        return self.backend != "gloo"

    def announce(self) -> None:
        """Tell the other ranks of this host which process this rank is."""
        atomic_write(self.folder / f"rank-{self.rank}.pid", str(os.getpid()).encode())

    def peers(self) -> list[psutil.Process]:
        """Return the living processes of the other ranks on this host."""
        found = []
        for path in self.folder.glob("rank-*.pid"):
            with contextlib.suppress(psutil.NoSuchProcess, ValueError):
                if (pid := int(path.read_text())) != os.getpid():
                    found.append(psutil.Process(pid))
        return found

    def abort(self) -> int:
        """Free this rank from every wait for another rank; return how many waits were cut.

        Shuts down the TCP connections between this process and its peers, in
        whatever group they were opened; the waiting call then raises
        ``RuntimeError``.  Gloo itself offers no way to end a wait.  Called from
        another thread than the one that waits.  The group is dead afterwards:
        ``join`` forms the next.  NCCL's communicators are aborted first, before its own
        sockets are among those shut down.  What waits without the group holds the ``lifeline``.
        """
        if self.is_aborted_to_end and dist.is_initialized() and not abort_groups(ABORT_SECONDS):
            print(f"{self.backend} did not abort in {ABORT_SECONDS:g} s.", file=sys.stderr)
        num_aborted = self.cancellation.abort()
        theirs = set()
        for peer in self.peers():
            with contextlib.suppress(psutil.Error):
                theirs |= {(c.laddr, c.raddr) for c in peer.net_connections("tcp") if c.raddr}
        for mine in psutil.Process().net_connections("tcp"):
            if mine.raddr and (mine.raddr, mine.laddr) in theirs:
                num_aborted += shut_down(mine.fd)
        return num_aborted

    def state(self) -> RankState:
        """Describe where this rank lives."""
        on_gpu = self.device.type == "cuda"
        return RankState(
            rank=self.rank,
            local_rank=self.local_rank,
            world_size=self.world_size,
            pid=os.getpid(),
            host=socket.gethostname(),
            device=str(self.device),
            device_name=torch.cuda.get_device_name(self.device) if on_gpu else "CPU",
            num_threads=torch.get_num_threads(),
            backend=self.backend,
            shares_device=self.shares_device,
            missing=(
                *torch_internals.missing_features(can_abort=self.is_aborted_to_end),
                *self.collective_checks.missing_features(),
            ),
        )


def abort_groups(seconds: float) -> bool:
    """Abort all process groups of this rank, sub-groups too; tell whether that was done in time.

    What waits in them ends: on the CPU with an error, on a GPU with a tensor that means
    nothing.  The groups stay known, so that the next call says that they were aborted;
    torch's ``_abort_process_group`` forgets them, in the midst of what another thread does with
    them.  Each abort may take as long as its group's timeout and wait for another's, so each
    has a thread of its own.
    """
    groups = torch_internals.process_groups()
    return ends_in_time([group.abort for group in groups], seconds)


def ends_in_time(calls: Sequence[Callable[[], object]], seconds: float) -> bool:
    """Make all calls at once; tell whether they have ended when so many seconds are over."""
    threads = [threading.Thread(target=call, name="ddpnb-bounded", daemon=True) for call in calls]
    deadline = time.monotonic() + seconds
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return not any(thread.is_alive() for thread in threads)


def shut_down(descriptor: int) -> bool:
    """Shut a connected socket down without closing it; tell whether that was done."""
    try:
        with socket.socket(fileno=os.dup(descriptor)) as connection:
            connection.getpeername()
            connection.shutdown(socket.SHUT_RDWR)
    except OSError:  # closed in the meantime, or not connected: nothing waits in it
        return False
    return True
