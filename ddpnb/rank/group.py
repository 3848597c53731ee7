"""Joins, leaves and aborts the process group of this rank (ranks)."""

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import destroy_process_group, init_process_group  # torch's own, see torchrun

from ddpnb.compat import torch_internals
from ddpnb.compat.probe import missing_features
from ddpnb.protocol.messages import RankState
from ddpnb.protocol.processes import ephemeral_ports
from ddpnb.rank.cancellation import CancellationToken
from ddpnb.rank.collectives import mismatch
from ddpnb.rank.collectives.mismatch import MismatchCheck
from ddpnb.rank.connections import (
    Address,
    TcpConnection,
    ends_of,
    own_connections,
    shut_down,
    traffic_of,
)

JOIN_TIMEOUT = timedelta(seconds=60)
"""The longest time that ranks wait for each other when they form a group."""
RETURN_TIMEOUT = timedelta(seconds=20)
"""The longest time for a rank to reconnect to the store, while the kernel waits."""
MEET_SECONDS_PER_RANK = 0.001
"""A rank's sleep, per rank of the group, between two checks of whether all ranks are there."""

ABORT_SECONDS = 10.0
"""The longest time that ``Group.abort`` waits for NCCL to abort before it goes on."""

DRAIN_SECONDS = 2.0
"""The longest time that a GPU may work off its queue before the rank leaves a group."""

NCCL_SETTINGS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_ENABLE_TIMING": "1",
}
"""Without the first three settings, NCCL's watchdog ends the process if a group is aborted or waits
ten minutes.  With the last setting, the flight recorder shows the collectives that the GPU reached
(docs.pytorch.org/docs/stable/torch_nccl_environment_variables.html)."""


@dataclass(kw_only=True, slots=True)
class Group:
    """This rank's membership in the default process group of ``torch.distributed``.

    The ranks of one host form a group through a ``FileStore`` inside the private run folder.  Each
    group has a new generation and a new file, so that ranks never read a dead group's keys.  The
    ranks of several hosts use a ``TCPStore`` in rank 0's process, with a prefix per generation.
    """

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    master: Address
    """The address of the store for several hosts; a cell may change the environment's address."""
    backend: str
    device: torch.device
    folder: Path
    host: str = ""
    """The host's name as the user wrote it; if empty, the host's own name is used."""
    peers: frozenset[str] = frozenset()
    """The addresses of the other hosts."""
    server: dist.TCPStore | None = None
    """The store of the ranks of several hosts; only in rank 0's process."""
    joined_ns: int = 0
    """``time.time_ns()`` when the group was formed."""
    cancellation: CancellationToken = field(default_factory=CancellationToken)
    """Ends waits outside the group; each group has a new token."""
    collective_checks: MismatchCheck = field(default_factory=MismatchCheck)
    """Raises an error if a collective does not match the other ranks' collectives."""

    def join(self, generation: int, *, is_checked: bool = False) -> None:
        """Form the group.  Takes part: every rank.  Returns after a finished all-reduce.

        Args:
            generation: the number of earlier groups.
            is_checked: True if torch compares order, shape and type of all ranks' collectives at
                each call (``DebugLevel.DETAIL``), which makes the collectives slow.

        Raises:
            RuntimeError: a rank did not join within ``JOIN_TIMEOUT``.
            ConsequenceError: the group was aborted before it was formed.
        """
        self.leave()
        self.cancellation = CancellationToken()
        store = self._store(generation)
        store.set_timeout(JOIN_TIMEOUT)
        for name, value in NCCL_SETTINGS.items():
            os.environ.setdefault(name, value)
        level = dist.DebugLevel.DETAIL if is_checked else dist.DebugLevel.OFF
        dist.set_debug_level(level)
        self.collective_checks.start(self.folder, generation, is_exact=is_checked)
        if generation:  # a rank that dies while the first group is formed ends the start
            self._meet(store)
        init_process_group(
            self.backend,
            store=store,
            rank=self.rank,
            world_size=self.world_size,
            # With device_id, torch forms communicators at once and splits sub-groups off them, and
            # a barrier knows its GPU (torch's documentation of init_process_group and barrier).
            device_id=self.device if self.backend == "nccl" else None,
        )
        self.cancellation.check()  # an earlier abort could not close these connections
        self.joined_ns = time.time_ns()
        total = torch.ones(1, device=self.device, dtype=torch.float32)  # default dtypes may differ
        dist.all_reduce(total)
        assert total.item() == self.world_size

    def _meet(self, store: dist.Store) -> None:
        """Wait until all ranks are about to form the group; only this part can be aborted."""
        if store.add("here", 1) == self.world_size:
            store.set("all here", "")
        deadline = time.monotonic() + JOIN_TIMEOUT.total_seconds()
        while not store.check(["all here"]):
            self.cancellation.check()
            if time.monotonic() > deadline:
                raise RuntimeError("Not all ranks came to form a new process group.")
            time.sleep(MEET_SECONDS_PER_RANK * self.world_size)

    def _store(self, generation: int) -> dist.Store:
        """Return the store through which the ranks form a new group."""
        if not self.peers:
            return dist.FileStore(str(self.folder / f"group-{generation}"), self.world_size)
        if self.rank == 0 and self.server is None:
            self.server = store_server(*self.master)
        # Each generation needs a new connection, because an abort ends all connections.
        timeout = RETURN_TIMEOUT if generation else JOIN_TIMEOUT
        store = dist.TCPStore(
            *self.master, is_master=False, wait_for_workers=False, timeout=timeout
        )
        return dist.PrefixStore(f"group-{generation}", store)

    def leave(self) -> None:
        """Leave the group, if there is one; raise ``RuntimeError`` if its abort takes too long."""
        if not dist.is_initialized():
            return
        if self.can_abort:  # destroying the group would wait for ranks that may have ended
            if self.device.type == "cuda" and not self.cancellation.is_aborted:
                ends_in_time([lambda: torch.cuda.synchronize(self.device)], DRAIN_SECONDS)
            if not abort_groups(ABORT_SECONDS):
                raise RuntimeError(f"{self.backend} did not abort. Restart this rank.")
        with contextlib.suppress(RuntimeError):  # the connections of an aborted group are closed
            destroy_process_group()

    @property
    def can_abort(self) -> bool:
        """True if the backend can abort a wait, as all backends except gloo can."""
        return self.backend != "gloo"

    def abort(self, peers: Collection[int] = ()) -> int:
        """Release this rank from every wait for another rank; return how many waits ended.

        ``peers``: the processes of this host's other ranks.

        Call it from a thread that does not wait.  NCCL's communicators are aborted first.  Gloo
        cannot end a wait, so this shuts down all TCP connections between this process and its
        peers, of every group.  The waiting call then raises ``RuntimeError``.  Afterwards the
        group is dead, and ``join`` forms the next group.
        """
        if self.can_abort and dist.is_initialized() and not abort_groups(ABORT_SECONDS):
            print(f"{self.backend} did not abort within {ABORT_SECONDS:g} s.", file=sys.stderr)
        num_aborted = self.cancellation.abort()
        theirs = ends_of(peers)
        for own in own_connections():
            if (own.raddr, own.laddr) in theirs or self._leads_to_peer(own):
                num_aborted += shut_down(own.fd)
        return num_aborted

    def _leads_to_peer(self, connection: TcpConnection) -> bool:
        """Return True if a connection probably leads to a rank of another host.

        A host that is gone cannot report its ranks' connections.  So a connection to another host
        counts if both ports are ports that the system hands out.  A service that the user reaches
        there has a fixed port outside that range.
        """
        if connection.raddr.ip not in self.peers:
            return False
        known = ephemeral_ports()
        ports = (connection.laddr.port, connection.raddr.port)
        return all(port in known or port == self.master.port for port in ports)

    def num_bytes_between_hosts(self) -> int:
        """Return how many bytes this rank has exchanged with ranks of other hosts so far."""
        if not self.peers:
            return 0
        store = self.master.port  # excluded, because waiting ranks poll the store
        found = [
            traffic_of(own.fd)
            for own in own_connections()
            if own.raddr.ip in self.peers and store not in (own.laddr.port, own.raddr.port)
        ]
        return sum(each.num_bytes_acked + each.num_bytes_received for each in found if each)

    def state(self) -> RankState:
        """Describe this rank's host, process and device."""
        on_gpu = self.device.type == "cuda"
        own, num_gpus = self.device.index or 0, torch.cuda.device_count() if on_gpu else 0
        return RankState(
            rank=self.rank,
            world_size=self.world_size,
            pid=os.getpid(),
            host=self.host or socket.gethostname(),
            device=str(self.device),
            device_name=torch.cuda.get_device_name(self.device) if on_gpu else "",
            num_threads=torch.get_num_threads(),
            backend=self.backend,
            # The ranks of a host take its GPUs in turn.
            shares_device=on_gpu and own + num_gpus < self.local_world_size,
            has_peer_access=torch.cuda.can_device_access_peer(own, (own + 1) % num_gpus)
            if num_gpus > 1
            else None,
            local_world_size=self.local_world_size,
            missing=(*missing_features(), *mismatch.missing_features()),
        )


def store_server(address: str, port: int) -> dist.TCPStore:
    """Return a store that listens at one address; torch's own store listens at every address."""
    listener = socket.create_server((address, port), backlog=1024)
    return dist.TCPStore(
        address,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=JOIN_TIMEOUT,
        master_listen_fd=listener.detach(),
    )


def abort_groups(seconds: float) -> bool:
    """Abort all process groups of this rank with sub-groups; return True if all ended in time.

    A wait on the CPU then raises an error.  A wait on a GPU leaves a meaningless tensor.  The
    groups stay registered, so the next call reports that they were aborted.  Torch's own
    ``_abort_process_group`` would remove them while another thread uses them.  Each abort has a
    thread, because it may take as long as its group's timeout or wait for another group's abort.
    """
    groups = torch_internals.process_groups()
    return ends_in_time([group.abort for group in groups], seconds)


def ends_in_time(calls: Sequence[Callable[[], object]], seconds: float) -> bool:
    """Make all calls at once, in threads; return True if all succeed within ``seconds``.

    Python prints the exceptions of these threads.
    """
    ended: list[object] = []

    def make(call: Callable[[], object]) -> None:
        ended.append(call())

    threads = [
        threading.Thread(target=make, args=(call,), name="ddpnb-bounded", daemon=True)
        for call in calls
    ]
    deadline = time.monotonic() + seconds
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return len(ended) == len(calls)
