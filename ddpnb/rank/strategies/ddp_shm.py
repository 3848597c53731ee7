"""DistributedDataParallel with an all-reduce in shared memory (every rank).

    w  <-  w - lr * sum over ranks i of (b_i / B) * g_i(w)

with g_i the gradient of the mean loss over rank i's b_i samples of the global batch of
B: the same update as ``ddp``.  Only the all-reduce differs: a communication hook sums gradients
in the shared memory of the host, where gloo uses TCP on the loopback interface.  Nothing hides
behind the backward pass, which waits until each bucket is summed.

On H hosts the all-reduce is hierarchical: each host sums in its memory, its first rank, the leader,
sums with the other leaders through gloo, and the others read the result in the memory.  So the
network between hosts carries each gradient once for a host, however many ranks it has.

Reference: Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel
Training", PVLDB 13(12), 2020; the sum is in ``comm/shared_all_reduce.py``.

Messages per step: for each MB of gradients one byte from each rank to each other on its host, with
three ranks or more two, on several hosts one more; with several hosts also one all-reduce between
the leaders for each bucket; with buffers (BatchNorm's statistics) also one broadcast.
Bytes sent per step and rank, with S the bytes of all gradients and n the ranks of its host:

    within its host    S, written once for the others to read, 0 where n = 1; a leader of several
                       hosts writes the result too, a second S
    to other hosts     2 (H - 1) / H * S by a leader, else 0

Received: 2 (n - 1) / n * S, read of what others wrote; on several hosts also 2 (H - 1) / H * S by a
leader, and S by the others.  Where no two ranks can share memory: as ``ddp``.
"""

from dataclasses import replace
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import GradBucket
from torch.distributed.constants import default_pg_timeout

from ddpnb.protocol.messages import RankState
from ddpnb.rank.comm.flat_buffers import all_reduce_bytes, num_bytes
from ddpnb.rank.comm.rendezvous import host_id
from ddpnb.rank.comm.shared_all_reduce import HierarchicalAllReduce, SharedAllReduce
from ddpnb.rank.strategies.base import Plan
from ddpnb.rank.strategies.ddp import DdpStrategy, observe, observe_buffers
from ddpnb.rank.strategies.replica import Replica, Timer

_NO_SHARING_NOTE = "the ranks cannot share memory here; gradients went through gloo."
_HOSTS_NOTE = (
    "gradients were summed in shared memory on each of {num} hosts, "
    "and through gloo between their first ranks."
)
_GPU_NOTE = "ddp-shm is for CPU ranks; on GPUs gradients went through the group's own backend."


@final
class DdpShm(DdpStrategy):
    """Torch's ``DistributedDataParallel`` with an all-reduce in shared memory.

    Args:
        bucket_view: as in ``ddp``.
        timeout_seconds: how long a rank waits for another that is alive, by default as long as
            torch does.  A rank that dies or leaves is noticed at once.
    """

    def __init__(
        self,
        *,
        bucket_view: bool = False,
        timeout_seconds: float = default_pg_timeout.total_seconds(),
    ) -> None:
        self._bucket_view = bucket_view
        self._timeout = timeout_seconds
        self._shared: SharedAllReduce | HierarchicalAllReduce | None = None
        self._notes: tuple[str, ...] = ()

    def plan(self, state: RankState) -> Plan:
        """Every rank."""
        return replace(super().plan(state), notes=() if state.device == "cpu" else (_GPU_NOTE,))

    def setup(self, replica: Replica) -> None:
        """Wrap the model, and open the shared memory; takes part: every rank."""
        super().setup(replica)
        self.wrap(replica, gradient_as_bucket_view=self._bucket_view)
        size, num = num_bytes(replica.parameters), replica.world_size
        self._num_sent = self._num_received = all_reduce_bytes(size, num)
        hosts = _hosts(replica) if replica.device.type == "cpu" else []
        if len(set(hosts)) == 1:
            self._shared = shared = SharedAllReduce(replica.worker_config(self._timeout))
            self._num_sent = size if num > 1 else 0
            self._observe(shared)
        elif len(set(hosts)) < len(hosts):
            self._open_hierarchical(hosts, size)
        else:
            self._notes = (_NO_SHARING_NOTE,) if hosts else ()
            self.report_overlap = observe(self._ddp, replica.timer)

    def notes(self) -> tuple[str, ...]:
        """Report where gradients went by other ways than shared memory."""
        return self._notes

    def close(self) -> None:
        """Disconnect, so that no other rank waits for this one."""
        if self._shared is not None:
            self._shared.close()

    def num_bytes_sent(self) -> int:
        """Return what it has written for other ranks of its host, and sent to other hosts."""
        return self._num_sent

    def num_bytes_received(self, num_sent: int) -> int:
        """Return what it has read of the others, and got from other hosts."""
        return self._num_received

    def _open_hierarchical(self, hosts: list[str], size: int) -> None:
        """Sum over several hosts; takes part: every rank."""
        self._shared = shared = HierarchicalAllReduce(
            self._replica.worker_config(self._timeout), hosts
        )
        within = size if shared.num_here > 1 else 0
        between = all_reduce_bytes(size, shared.num_hosts)
        self._num_sent = 2 * within + between if shared.is_leader else within
        self._num_received = all_reduce_bytes(size, shared.num_here)
        self._num_received += between if shared.is_leader else size
        self._notes = (_HOSTS_NOTE.format(num=shared.num_hosts),)
        self._observe(shared.here)

    def _observe(self, here: SharedAllReduce) -> None:
        """Have the hook sum gradients, and time it."""
        timer = self._replica.timer

        def on_wait(is_waiting: bool) -> None:
            timer.begin("waiting" if is_waiting else "communication")

        here.on_wait = on_wait
        observe_buffers(self._ddp, timer)
        self._ddp.register_comm_hook((self._shared, timer), _all_reduce_bucket)
        self._divisor = 1  # nothing divides the sum of the hook
        self.report_overlap = lambda: None  # the hook itself has timed it


def _all_reduce_bucket(
    state: tuple[SharedAllReduce | HierarchicalAllReduce, Timer], bucket: GradBucket
) -> torch.futures.Future[Tensor]:
    """Sum a bucket over all ranks, as DDP's communication hook."""
    shared, timer = state
    buffer = bucket.buffer()
    timer.begin("communication")
    shared.all_reduce(buffer)
    timer.begin("backward")
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(buffer)
    return done


def _hosts(replica: Replica) -> list[str]:
    """Return the host of each rank, alike where they share memory; takes part: every rank."""
    hosts = [""] * replica.world_size
    dist.all_gather_object(hosts, host_id(replica.folder))
    return hosts
