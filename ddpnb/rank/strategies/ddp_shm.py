"""DistributedDataParallel with an all-reduce in shared memory (every rank, of one host, on CPUs).

    w  <-  w - lr * sum over ranks i of (b_i / B) * g_i(w)

with g_i the gradient of the mean loss over rank i's b_i samples of the global batch of
B: the same update as ``ddp``.  Only the all-reduce differs: a communication hook sums gradients
in the shared memory of the host, where gloo uses TCP on the loopback interface: each rank writes
its tensor and sums an N-th of all of them, which the others read.  Nothing hides behind the
backward pass, which waits until each bucket is summed.

Reference: Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel
Training", PVLDB 13(12), 2020; the sum is in ``collectives/sums.py``.

Messages per step: for each 4 MB of gradients one barrier, and a sign in shared memory that a part
is summed; with buffers (BatchNorm's statistics) also one broadcast.
Bytes sent per step and rank: S, those of all gradients, written once for the others to read; 0 by
a single rank.  Received: 2 (N - 1) / N * S, read of what others wrote.
"""

from functools import partial
from typing import Final, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import GradBucket

from ddpnb.rank.collectives.sums import SharedSums
from ddpnb.rank.strategies.ddp import DdpStrategy
from ddpnb.rank.worker import Worker

CHUNK_BYTES: Final = 1 << 22
"""Of a tensor that is summed at once: the fastest of 1, 4 and 8 MB, with 2 ranks."""


@final
class DdpShm(DdpStrategy):
    """Torch's ``DistributedDataParallel`` with an all-reduce in shared memory."""

    def setup(self, worker: Worker) -> None:
        """Wrap the model; takes part: every rank."""
        super().setup(worker)
        waiting = partial(worker.meter.communicating, "waiting")
        path = worker.folder / worker.name
        self.sums = SharedSums(path, worker.cancellation.check, waiting)
        self.opened.callback(self.sums.close)
        self.wrap(worker)
        self.ddp.register_comm_hook(None, self.all_reduce)
        self.divisor = 1  # the hook sums, and nothing divides

    def all_reduce(self, _: None, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Sum a bucket over all ranks, as DDP's communication hook; takes part: every rank."""
        num_ranks, meter, flat = self.worker.world_size, self.worker.meter, bucket.buffer()
        if num_ranks > 1:
            with meter.communicating():
                for piece in flat.split(CHUNK_BYTES // flat.element_size()):
                    self.sums.add(dist.group.WORLD, piece)
            meter.count(sent=flat.nbytes, received=2 * (num_ranks - 1) * flat.nbytes // num_ranks)
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(flat)
        return done
