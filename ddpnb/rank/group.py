"""Joins, leaves and aborts the process group of this rank.  Runs on the ranks."""

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
from ddpnb.protocol.processes import ephemeral_ports, gpu_driver, missing_here
from ddpnb.rank.cancellation import CancellationToken
from ddpnb.rank.collectives import mismatch
from ddpnb.rank.collectives.mismatch import MismatchCheck
from ddpnb.rank.connections import (
    Address,
    ends_of,
    own_connections,
    shut_down,
    traffic_of,
)

JOIN_TIMEOUT = timedelta(seconds=60)
"""Maximum time that ranks wait for each other when they form a process group."""
RETURN_TIMEOUT = timedelta(seconds=20)
"""Maximum time for a rank to reconnect to the store.  The kernel waits during this time."""
MEET_SECONDS_PER_RANK = 0.001
"""Seconds between two checks that all ranks are ready, divided by the number of ranks."""

ABORT_SECONDS = 10.0
"""Maximum time in seconds that ``Group.abort`` waits for NCCL to abort."""

KERNELS_SECONDS = 2.0
"""Maximum time in seconds for a GPU to finish its queued work before the rank leaves a group."""

NCCL_SETTINGS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_ENABLE_TIMING": "1",
}
"""Environment variables for NCCL.  Without the first three variables, NCCL's watchdog ends the
process if a group is aborted or waits for ten minutes.  With the last variable, the flight recorder
shows which collectives the GPU has reached
(docs.pytorch.org/docs/stable/torch_nccl_environment_variables.html)."""


@dataclass(kw_only=True, slots=True)
class Group:
    """This rank's membership in the default process group of ``torch.distributed``.

    On one host, the ranks form a group through a ``FileStore`` inside the private run folder.  Each
    group has a new generation number and a new file, so ranks never read the keys of an old group.
    On several hosts, the ranks use a ``TCPStore`` in rank 0's process.  In this store, the prefix
    of each key contains the group's generation number.
    """

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    master: Address
    """Address of the multi-host store.  A cell's ``MASTER_ADDR`` does not change this address."""
    backend: str
    device: torch.device
    folder: Path
    host: str = ""
    """This host's name as the user wrote it.  If empty, the system's host name is used."""
    peers: frozenset[str] = frozenset()
    """Addresses of the other hosts."""
    server: dist.TCPStore | None = None
    """The store for ranks on several hosts.  Only rank 0's process has this store."""
    joined_ns: int = 0
    """Time at which the group was formed, from ``time.time_ns()``."""
    cancellation: CancellationToken = field(default_factory=CancellationToken)
    """Ends this rank's waits outside the process group.  Each process group gets a new token."""
    collective_checks: MismatchCheck = field(default_factory=MismatchCheck)
    """Raises an error if a collective does not match the other ranks' collectives."""

    def join(self, generation: int, *, is_checked: bool = False) -> None:
        """Form the process group, and test it with an all-reduce.  Every rank takes part.

        Args:
            generation: the number of process groups that the ranks formed before this group.
            is_checked: if True, torch compares the order, shape and type of collectives between
                ranks at each call (``DebugLevel.DETAIL``).  This check makes collectives slow.

        Raises:
            RuntimeError: if a rank did not join within ``JOIN_TIMEOUT``.
            ConsequenceError: if the group was aborted before it was formed.
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
        if generation:  # not for the first group, because a rank's death then ends the start
            self._meet(store)
        init_process_group(
            self.backend,
            store=store,
            rank=self.rank,
            world_size=self.world_size,
            # With device_id, torch forms communicators at once, splits them for sub-groups, and
            # knows the GPU of a barrier (torch's docs of init_process_group and barrier).
            device_id=self.device if self.backend == "nccl" else None,
        )
        self.cancellation.check()  # an abort before this line has not closed the new connections
        self.joined_ns = time.time_ns()
        total = torch.ones(1, device=self.device, dtype=torch.float32)  # default dtypes may differ
        dist.all_reduce(total)
        assert total.item() == self.world_size

    def _meet(self, store: dist.Store) -> None:
        """Wait until all ranks are ready to form the group.  ``abort`` can end this wait."""
        if store.add("here", 1) == self.world_size:
            store.set("all here", "")
        deadline = time.monotonic() + JOIN_TIMEOUT.total_seconds()
        while not store.check(["all here"]):
            self.cancellation.check()
            if time.monotonic() > deadline:
                raise RuntimeError("Not all ranks joined the new process group in time.")
            time.sleep(MEET_SECONDS_PER_RANK * self.world_size)

    def _store(self, generation: int) -> dist.Store:
        """Return the store through which the ranks form a new process group."""
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
        """Leave the group, if there is one; raise ``RuntimeError`` if NCCL cannot abort in time."""
        if not dist.is_initialized():
            return
        if self.can_abort:  # destroying the group would wait for ranks that may have ended
            if self.device.type == "cuda" and not self.cancellation.is_aborted:
                ends_in_time([lambda: torch.cuda.synchronize(self.device)], KERNELS_SECONDS)
            if not abort_groups(ABORT_SECONDS):
                raise RuntimeError(f"{self.backend} could not abort the group. Restart this rank.")
        with contextlib.suppress(RuntimeError):  # the connections of an aborted group are closed
            destroy_process_group()

    @property
    def can_abort(self) -> bool:
        """True if the backend can abort a wait.  All backends except gloo can abort waits."""
        return self.backend != "gloo"

    def abort(self, peers: Collection[int] = ()) -> int:
        """Release this rank from all waits for other ranks; return the number of waits that ended.

        ``peers``: process ids of the other ranks on this host.

        Call this method from a thread that does not wait for other ranks.  NCCL's communicators are
        aborted first.  Gloo cannot end a wait, so ``abort`` shuts down all groups' TCP connections
        to the peers.  Calls that wait for a peer then raise ``RuntimeError``.
        Afterwards the group is unusable, until ``join`` forms the next group.
        """
        if self.can_abort and dist.is_initialized() and not abort_groups(ABORT_SECONDS):
            print(f"{self.backend} did not abort within {ABORT_SECONDS:g} s.", file=sys.stderr)
        num_aborted = self.cancellation.abort()
        if not torch_internals.gloo_notices_ends.works:
            return num_aborted
        theirs = ends_of(peers)
        for fd, (own, other) in own_connections():
            if (other, own) in theirs or self._leads_to_peer(own, other):
                num_aborted += shut_down(fd)
        return num_aborted

    def _leads_to_peer(self, own: Address, other: Address) -> bool:
        """Return True if a connection probably leads to a rank on another host.

        A lost host cannot report the connections of its ranks.  So a connection to another host
        counts as a rank's connection if the system chose both ports (ephemeral ports).  Services to
        which the user's code connects have fixed ports, so these connections do not count.
        """
        (_, own_port), (ip, port) = own, other
        if ip not in self.peers:
            return False
        known = ephemeral_ports()
        return all(each in known or each == self.master[1] for each in (own_port, port))

    def num_bytes_between_hosts(self) -> int:
        """Return the number of bytes that this rank has exchanged with other hosts' ranks."""
        if not self.peers:
            return 0
        _, store = self.master  # excluded, because waiting ranks poll the store
        found = [
            traffic_of(fd) or (0, 0)
            for fd, ((_, own_port), (ip, port)) in own_connections()
            if ip in self.peers and store not in (own_port, port)
        ]
        return sum(acked + received for acked, received, *_ in found)

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
            gpu_software=gpu_software() if on_gpu else "",
            num_threads=torch.get_num_threads(),
            backend=self.backend,
            # A host's ranks are assigned to its GPUs in turn.
            shares_device=on_gpu and own + num_gpus < self.local_world_size,
            has_peer_access=torch.cuda.can_device_access_peer(own, (own + 1) % num_gpus)
            if num_gpus > 1
            else None,
            local_world_size=self.local_world_size,
            missing=(*missing_features(), *mismatch.missing_checks(), *missing_here()),
            can_be_released=self.can_abort or torch_internals.gloo_notices_ends.works,
        )


def gpu_software(root: Path = Path("/")) -> str:
    """Return the versions of CUDA, NCCL and the GPU's driver, if they are known."""
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    known = {"CUDA": torch.version.cuda, "NCCL": nccl, "driver": gpu_driver(root)}
    return ", ".join(f"{name} {version}" for name, version in known.items() if version)


def store_server(address: str, port: int) -> dist.TCPStore:
    """Return a store that listens only at ``address``.  Torch's store listens at all addresses."""
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
    """Abort all process groups and sub-groups of this rank; return True if all aborts end in time.

    A collective that waits on the CPU then raises an error.  A collective that waits on a GPU ends
    with a meaningless tensor.  Aborted groups stay registered, so the next call reports the abort.
    Torch's ``_abort_process_group`` would remove groups while another thread uses them.  Each abort
    runs in a thread, because an abort may last until the group's timeout or wait for another abort.
    """
    return ends_in_time([each.abort for each in torch_internals.abortable()], seconds)


def ends_in_time(calls: Sequence[Callable[[], object]], seconds: float) -> bool:
    """Run all calls at once, in threads; return True if all calls succeed within ``seconds``.

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
