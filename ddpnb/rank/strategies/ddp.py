"""Average gradients with torch's DistributedDataParallel (DDP).  Every rank takes part.

    w  <-  w - lr * sum over ranks i of (b_i / B) * g_i(w)

g_i is the gradient of the mean loss over rank i's b_i samples. The global batch has B samples. If
no hook compresses gradients, the sum is exactly the gradient of the global batch's mean loss.

With ``hook``, one of torch's hooks compresses the gradients before DDP sends them:

    fp16        sends float16: half the bytes of float32, but values above 65504 become infinite
    bf16        sends bfloat16: half the bytes and the range of float32, 8 bits of precision

Reference: Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training",
PVLDB 13(12), 2020 (arXiv:2006.15704).

- Messages per step: one all-reduce for each bucket of gradients. DDP sends a bucket while the
  backward pass computes the next bucket. By default, DDP closes the first bucket at 1 MB and the
  others at 25 MB. With ``find_unused_parameters``, DDP also sends one number per parameter. If the
  model has buffers (BatchNorm's statistics), rank 0 also broadcasts these buffers.
- Bytes sent per step and rank, with N ranks: 2 (N - 1) / N * S. S is the size of all gradients in
  bytes, after compression. Bytes of buffers are not counted.
"""

from contextlib import nullcontext
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
"""Torch's default bucket size in MB. With this size, DDP limits the first bucket to 1 MB."""


class DdpStrategy(Strategy):
    """The base class of strategies that train a model wrapped in ``DistributedDataParallel``."""

    def wrap(self, worker: Worker, **options: Any) -> None:
        """Wrap the model in DDP. DDP broadcasts rank 0's weights. Every rank takes part."""
        device_ids = [worker.device] if worker.device.type == "cuda" else None
        self.ddp = DistributedDataParallel(worker.model, device_ids=device_ids, **options)

    def step(self, batch: Batch) -> Tensor:
        """Train on this rank's slice of one global batch. Every rank takes part."""
        worker, ddp = self.worker, self.ddp
        # DDP averages over the ranks. The weight turns this mean into a mean over samples.
        weight = worker.world_size * batch.weight
        ddp.zero_grad()
        for micro_batch in worker.micro_batches(batch):
            with nullcontext() if micro_batch.is_last else ddp.no_sync():
                loss = worker.loss(micro_batch, ddp)  # forward
                # backward; at the same time, communicate: DDP all-reduces each bucket of gradients
                (weight * micro_batch.share * loss).backward()
        # update: the same on every rank (in zero, each rank updates its part and sends it)
        self.optimizer.step()
        return worker.mean_loss


@final
class Ddp(DdpStrategy):
    """Torch's ``DistributedDataParallel`` on the default process group.

    Args:
        bucket_cap_mb: DDP closes a bucket if it has this many MB. A bucket may be larger.
        hook: Compression of the gradients: ``none``, ``fp16`` or ``bf16``.
        find_unused_parameters: True if some parameters may be unused in a step.
    """

    def __init__(
        self,
        *,
        bucket_cap_mb: float = DEFAULT_CAP_MB,
        hook: str = "none",
        find_unused_parameters: bool = False,
    ) -> None:
        # None: the first bucket closes at 1 MB. 25.0 would let it grow to 25 MB.
        self.cap_mb = None if bucket_cap_mb == DEFAULT_CAP_MB else bucket_cap_mb
        self.hook = hook
        self.finds_unused = find_unused_parameters

    def setup(self, worker: Worker) -> None:
        """Wrap the model in DDP and register the hook. Every rank takes part."""
        super().setup(worker)
        self.wrap(worker, bucket_cap_mb=self.cap_mb, find_unused_parameters=self.finds_unused)
        if self.hook != "none":
            self.ddp.register_comm_hook(None, fp16_compress_hook if self.hook == "fp16" else _bf16)


def _bf16(state: Any, bucket: GradBucket) -> Future[Tensor]:
    """Call torch's hook. DDP rejects the hook's own name if torch has no NCCL."""
    return bf16_compress_hook(state, bucket)
