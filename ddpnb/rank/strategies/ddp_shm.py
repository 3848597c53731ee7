"""DDP with an all-reduce in shared memory.  Every rank takes part, on the CPUs of one host.

    w  <-  w - lr * sum over ranks i of (b_i / B) * g_i(w)

g_i is the gradient of the mean loss over rank i's b_i samples. The global batch has B samples. The
update is the same as in ``ddp``. Only the all-reduce differs from ``ddp``: a communication hook
sums gradients in the host's shared memory. (In ``ddp``, gloo uses TCP on the loopback interface.)
Each of N ranks writes its gradients, sums an N-th part of all ranks' gradients, and reads the other
sums. The backward pass waits until each bucket is summed, so no communication is hidden.

Reference: Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training",
PVLDB 13(12), 2020. The code that computes the sums is in ``collectives/sums.py``.

- Messages per step, for each 4 MB of gradients: one barrier, then one flag that each rank writes to
  shared memory. If the model has buffers (BatchNorm's statistics), rank 0 also broadcasts them.
- Bytes sent per step and rank: S, the size of all gradients. Each rank writes its gradients once
  for all other ranks, and receives 2 (N - 1) / N * S bytes. If N = 1, the rank sends 0 bytes.
"""

from functools import partial
from typing import Final, final
from weakref import proxy

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import GradBucket

from ddpnb.rank.collectives.sums import SharedSums
from ddpnb.rank.strategies.ddp import DdpStrategy
from ddpnb.rank.worker import Worker

CHUNK_BYTES: Final = 1 << 22
"""Number of bytes that are summed at once. With 2 ranks, 4 MB is faster than 1 MB and 8 MB."""


@final
class DdpShm(DdpStrategy):
    """Torch's ``DistributedDataParallel`` with a communication hook that sums in shared memory."""

    def setup(self, worker: Worker) -> None:
        """Wrap the model in DDP and register the hook. Every rank takes part."""
        super().setup(worker)
        waiting = partial(worker.meter.communicating, "waiting")
        path = worker.folder / worker.name
        self.sums = SharedSums(path, worker.cancellation.check, waiting)
        self.opened.callback(self.sums.close)
        self.wrap(worker)
        self.ddp.register_comm_hook(proxy(self), DdpShm.all_reduce)  # C++ code keeps the hook
        self.divisor = 1  # the hook returns the sum, and DDP does not divide it

    def all_reduce(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Sum a bucket over all ranks. DDP calls this hook. Every rank takes part."""
        num_ranks, meter, flat = self.worker.world_size, self.worker.meter, bucket.buffer()
        if num_ranks > 1:
            with meter.communicating():
                for piece in flat.split(CHUNK_BYTES // flat.element_size()):
                    self.sums.add(dist.group.WORLD, piece)
            meter.count(sent=flat.nbytes, received=2 * (num_ranks - 1) * flat.nbytes // num_ranks)
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(flat)
        return done
