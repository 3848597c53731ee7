"""DistributedDataParallel with an all-reduce in shared memory (every rank).

    w  <-  w - lr * sum over ranks i of (b_i / B) * g_i(w)

with g_i the gradient of the mean loss over rank i's b_i samples of the global batch of
B: the same update as ``ddp``.  Only the all-reduce differs: a communication hook sums gradients
in the shared memory of the host, where gloo uses TCP on the loopback interface.  Nothing hides
behind the backward pass, which waits until each bucket is summed.

Reference: Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel
Training", PVLDB 13(12), 2020; the sum is in ``comm/shared_all_reduce.py``.

Messages per step: for each MB of gradients one byte from each rank to each other, with three
ranks or more two; with buffers (BatchNorm's statistics) also one broadcast.
Bytes sent per step and rank: S, the bytes of all gradients, written once for the others to
read (0 where there are no others); received, 2 (N - 1) / N * S, read of what others wrote.  Where
ranks cannot share memory: as ``ddp``.
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
from ddpnb.rank.comm.shared_all_reduce import SharedAllReduce
from ddpnb.rank.strategies.base import Plan
from ddpnb.rank.strategies.ddp import DdpStrategy, observe, observe_buffers
from ddpnb.rank.strategies.replica import Replica, Timer

_NO_SHARING_NOTE = "ddp-shm: the ranks cannot share memory here; gradients went through gloo."
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
        self._shared: SharedAllReduce | None = None
        self._is_shared = True

    def plan(self, state: RankState) -> Plan:
        """Every rank."""
        return replace(super().plan(state), notes=() if state.device == "cpu" else (_GPU_NOTE,))

    def setup(self, replica: Replica) -> None:
        """Wrap the model, and open the shared memory; takes part: every rank."""
        super().setup(replica)
        on_cpu = replica.device.type == "cpu"
        self.wrap(replica, gradient_as_bucket_view=self._bucket_view)
        self._num_bytes = num_bytes(replica.parameters)
        self._is_shared = not on_cpu or _share_memory(replica)
        if on_cpu and self._is_shared:
            self._open(replica)
        else:
            self.report_overlap = observe(self._ddp, replica.timer)

    def notes(self) -> tuple[str, ...]:
        """Report where shared memory could not be used."""
        return () if self._is_shared else (_NO_SHARING_NOTE,)

    def close(self) -> None:
        """Disconnect, so that no other rank waits for this one."""
        if self._shared is not None:
            self._shared.close()

    def num_bytes_sent(self) -> int:
        """Return the gradients' bytes; where memory is not shared, those of an all-reduce."""
        num = self._replica.world_size
        if self._shared is None:
            return all_reduce_bytes(self._num_bytes, num)
        return self._num_bytes if num > 1 else 0

    def num_bytes_received(self, num_sent: int) -> int:
        """Return what it reads of the others: as much as in any all-reduce."""
        return all_reduce_bytes(self._num_bytes, self._replica.world_size)

    def _open(self, replica: Replica) -> None:
        self._shared = SharedAllReduce(replica.worker_config(self._timeout))

        def on_wait(is_waiting: bool) -> None:
            replica.timer.begin("waiting" if is_waiting else "communication")

        self._shared.on_wait = on_wait
        observe_buffers(self._ddp, replica.timer)
        self._ddp.register_comm_hook((self._shared, replica.timer), _all_reduce_bucket)
        self._divisor = 1  # nothing divides the sum of the hook
        self.report_overlap = lambda: None  # the hook itself has timed it


def _all_reduce_bucket(
    state: tuple[SharedAllReduce, Timer], bucket: GradBucket
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


def _share_memory(replica: Replica) -> bool:
    """Return whether all ranks share one folder, and so memory; takes part: every rank."""
    hosts = [""] * replica.world_size
    dist.all_gather_object(hosts, host_id(replica.folder))
    return len(set(hosts)) == 1
