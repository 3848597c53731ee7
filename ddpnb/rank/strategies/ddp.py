"""DistributedDataParallel (every rank).

    w  <-  w - lr * sum over ranks i of (b_i / B) * g_i(w)

with g_i the gradient of the mean loss over rank i's b_i samples of the global batch
of B: exactly the gradient of the mean loss over the whole batch, unless a hook compresses it.

With ``hook`` torch's own hooks compress gradients before they are sent:

    fp16        as float16: half the bytes of float32; values above 65504 become infinite
    bf16        as bfloat16: half the bytes, the range of float32, 8 bits of precision

Reference: Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel
Training", PVLDB 13(12), 2020.

Messages per step: one all-reduce for each bucket of gradients (25 MB), sent while
the backward pass still works on the next; with buffers (BatchNorm's statistics)
also one broadcast from rank 0.
Bytes sent per step and rank: 2 (N - 1) / N * S, with S the bytes of all gradients as they are
sent; buffers are not counted.
"""

from typing import Any, Final, final

from torch import Tensor
from torch.distributed import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    bf16_compress_hook,
    fp16_compress_hook,
)
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from ddpnb.rank.strategies.base import Strategy
from ddpnb.rank.worker import Batch, Worker

DEFAULT_CAP_MB: Final = 25.0
"""Torch's: then the first bucket has 1 MB, so that sending begins early."""


class DdpStrategy(Strategy):
    """Trains through torch's ``DistributedDataParallel``, which a subclass's ``setup`` wraps."""

    divisor: int
    """By what DDP divides the sum over ranks before it becomes the gradient."""

    def wrap(self, worker: Worker, **options: Any) -> None:
        """Wrap the model, which broadcasts rank 0's weights; takes part: every rank."""
        device_ids = [worker.device] if worker.device.type == "cuda" else None
        self.ddp = DistributedDataParallel(worker.model, device_ids=device_ids, **options)
        self.divisor = worker.world_size

    def step(self, batch: Batch) -> Tensor:
        """Train on this rank's slice of one global batch; takes part: every rank."""
        # forward; backward and, at the same time, agree: DDP averages the gradients bucket by
        # bucket.  It divides by the number of ranks; the weight makes that a mean over samples.
        loss = self.worker.compute_gradients(
            batch, weight=self.divisor * batch.weight, model=self.ddp, unsynced=self.ddp.no_sync
        )
        # update: every rank the same (in zero each its part, which it then sends)
        self.worker.update(self.optimizer)
        return loss


@final
class Ddp(DdpStrategy):
    """Torch's own ``DistributedDataParallel``, over the default process group.

    Args:
        bucket_cap_mb: MB of gradients in one message.
        hook: how gradients are compressed.
        find_unused_parameters: whether a step need not use all parameters.
    """

    def __init__(
        self,
        *,
        bucket_cap_mb: float = DEFAULT_CAP_MB,
        hook: str = "none",
        find_unused_parameters: bool = False,
    ) -> None:
        self.cap_mb = None if bucket_cap_mb == DEFAULT_CAP_MB else bucket_cap_mb
        self.hook = hook
        self.finds_unused = find_unused_parameters

    def setup(self, worker: Worker) -> None:
        """Wrap the model, which broadcasts rank 0's weights; takes part: every rank."""
        super().setup(worker)
        self.wrap(worker, bucket_cap_mb=self.cap_mb, find_unused_parameters=self.finds_unused)
        if self.hook != "none":
            self.ddp.register_comm_hook(None, fp16_compress_hook if self.hook == "fp16" else _bf16)


def _bf16(state: Any, bucket: GradBucket) -> Future[Tensor]:
    """Call torch's hook; under its own name DDP refuses it on gloo, which can add bfloat16."""
    return bf16_compress_hook(state, bucket)
