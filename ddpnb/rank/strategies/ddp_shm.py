"""DistributedDataParallel with an all-reduce in shared memory (every rank, of one host, on CPUs).

    w  <-  w - lr * sum over ranks i of (b_i / B) * g_i(w)

with g_i the gradient of the mean loss over rank i's b_i samples of the global batch of
B: the same update as ``ddp``.  Only the all-reduce differs: a communication hook sums gradients
in the shared memory of the host, where gloo uses TCP on the loopback interface.  Nothing hides
behind the backward pass, which waits until each bucket is summed.

Reference: Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel
Training", PVLDB 13(12), 2020; the sum is in ``servers/shared_sum.py``.

Messages per step: for each MB of gradients two of one byte from each rank to each other; with
buffers (BatchNorm's statistics) also one broadcast.
Bytes sent per step and rank: S, those of all gradients, written once for the others to read; 0 by
a single rank.  Received: 2 (N - 1) / N * S, read of what others wrote.
"""

from typing import final

import torch
from torch import Tensor
from torch.distributed import GradBucket
from torch.distributed.constants import default_pg_timeout

from ddpnb.rank.servers.shared_sum import SharedAllReduce
from ddpnb.rank.strategies.ddp import DdpStrategy
from ddpnb.rank.worker import Worker


@final
class DdpShm(DdpStrategy):
    """Torch's ``DistributedDataParallel`` with an all-reduce in shared memory."""

    _sum: SharedAllReduce | None = None

    def setup(self, worker: Worker) -> None:
        """Wrap the model, and open the shared memory; takes part: every rank."""
        super().setup(worker)
        self._sum = SharedAllReduce(worker, default_pg_timeout.total_seconds())
        self.wrap(worker)
        self.ddp.register_comm_hook(self._sum, _all_reduce_bucket)
        self.divisor = 1  # the hook sums, and nothing divides

    def close(self) -> None:
        """Disconnect, so that no other rank waits for this one."""
        if self._sum is not None:
            self._sum.close()


def _all_reduce_bucket(shared: SharedAllReduce, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Sum a bucket over all ranks, as DDP's communication hook."""
    buffer = bucket.buffer()
    shared.all_reduce(buffer)
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(buffer)
    return done
