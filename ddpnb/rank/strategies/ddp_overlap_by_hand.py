"""Send gradients during the backward pass, in a few lines of code.  Every rank takes part.

    w  <-  w - lr * sum over ranks i of (b_i / B) * g_i(w)

g_i is the gradient of the mean loss over rank i's b_i samples. The global batch has B samples. The
update is the same as in ``ddp-by-hand``, which sends gradients only after the backward pass. Here,
a hook on each parameter starts an all-reduce as soon as the parameter's gradient is ready.
The backward pass continues meanwhile. The rank waits for all sums before the optimizer's step.

Many small messages cost more than a few large messages. With ``bucket_mb``, neighbouring parameters
share a bucket. A rank sends a bucket when the bucket's last gradient is ready. The first bucket has
the last parameters, because the backward pass usually computes their gradients first. Every rank
sends the buckets in the same order, even if gradients become ready in another order. If the
orders differed, ranks would sum different buckets. Torch's DDP works in the same way, in C++. DDP
also adapts the order of its buckets to the actual order of the gradients.

Reference: Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training",
PVLDB 13(12), 2020, sections 3.2.2 (bucketing) and 3.2.3 (overlap).

- Messages per step: one all-reduce per parameter, or per bucket and dtype with ``bucket_mb``.
- Bytes sent per step and rank, with N ranks: 2 (N - 1) / N * S. S is the size of all gradients and
  of one flag per parameter. If no rank has a gradient for a parameter, the update skips it.
"""

from collections.abc import Sequence
from functools import partial
from typing import final

import torch.distributed as dist
from torch import Tensor, nn

from ddpnb.rank.collectives.flat import FlatBuffer, num_bytes
from ddpnb.rank.strategies.base import Strategy
from ddpnb.rank.worker import Batch, Worker


@final
class DdpOverlapByHand(Strategy):
    """Data parallelism with hooks that start an all-reduce for each bucket of gradients."""

    def __init__(self, *, bucket_mb: float = 0.0) -> None:
        self.bucket_mb = bucket_mb

    def setup(self, worker: Worker) -> None:
        """Create the optimizer and the buckets, and install the hooks."""
        super().setup(worker)
        self.buckets = buckets_of(worker.parameters, self.bucket_mb)
        self.flat = [FlatBuffer(bucket, has_flags=True) for bucket in self.buckets]
        self.hooks = [
            parameter.register_post_accumulate_grad_hook(partial(self.on_gradient, number))
            for number, bucket in enumerate(self.buckets)
            for parameter in bucket
        ]

    def step(self, batch: Batch) -> Tensor:
        """Train on this rank's slice of one global batch. Every rank takes part."""
        worker = self.worker
        self.num_missing = [len(bucket) for bucket in self.buckets]
        self.sent: list[list[dist.Work | None]] = []
        worker.model.zero_grad()
        for micro_batch in worker.micro_batches(batch):
            loss = worker.loss(micro_batch)  # forward
            # backward; at the same time, communicate: autograd calls ``on_gradient``
            self.is_last = micro_batch.is_last
            (batch.weight * micro_batch.share * loss).backward()
        while len(self.sent) < len(self.buckets):  # if the loss does not use all parameters
            self.send_next()
        # wait for all sums: every rank takes part
        for works, flat, bucket in zip(self.sent, self.flat, self.buckets, strict=True):
            for work in works:
                assert work is not None, "this rank is in the group"
                work.wait()
            flat.unpack_gradients(bucket)
        # update: the same on every rank
        self.optimizer.step()
        return worker.mean_loss

    def finish(self) -> nn.Module:
        """Remove the hooks, and return the model."""
        for hook in self.hooks:
            hook.remove()
        return super().finish()

    def on_gradient(self, number: int, _: nn.Parameter) -> None:
        """Send the next buckets if all their gradients are ready.

        In the backward pass, autograd calls this hook for each gradient of bucket ``number``.
        """
        if not self.is_last:  # the gradients of other micro-batches are only added up
            return
        self.num_missing[number] -= 1
        assert self.num_missing[number] >= 0, "a gradient arrived twice, perhaps after it was sent"
        while len(self.sent) < len(self.buckets) and self.num_missing[len(self.sent)] == 0:
            self.send_next()

    def send_next(self) -> None:
        """Start the all-reduce of the next bucket without waiting for it. Every rank takes part.

        The rank sends zeros for parameters without a gradient.
        """
        flat = self.flat[len(self.sent)]
        flat.pack_gradients()
        self.sent.append([dist.all_reduce(each, async_op=True) for each in flat.buffers])


def buckets_of(parameters: Sequence[nn.Parameter], bucket_mb: float) -> list[list[nn.Parameter]]:
    """Divide the parameters, in reverse order, into buckets of at most ``bucket_mb`` MB.

    A larger parameter has a separate bucket. If ``bucket_mb`` is 0, no parameters share a bucket.
    """
    buckets: list[list[nn.Parameter]] = []
    room = 0.0
    for parameter in reversed(parameters):
        size = num_bytes([parameter])
        if not buckets or size > room:
            buckets.append([])
            room = bucket_mb * 2**20
        buckets[-1].append(parameter)
        room -= size
    return buckets
