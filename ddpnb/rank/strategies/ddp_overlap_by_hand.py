"""Gradients sent while the backward pass goes on, written out (every rank).

    w  <-  w - lr * sum over ranks i of (b_i / B) * g_i(w)

with g_i the gradient of the mean loss over rank i's b_i samples of the global batch of
B: the same update as ``ddp-by-hand``, which sends nothing before the backward pass has ended.
Here a hook on each parameter starts an all-reduce of its gradient as soon as that is there; the
backward pass goes on to earlier layers meanwhile.  All are waited for before the optimizer's step.

Many small messages cost more than a few large ones.  With ``bucket_mb`` gradients are fused:
parameters that follow each other share a bucket, which is sent when its last gradient is there.
Buckets are in reverse order of the parameters, as gradients come, and are sent in that order on
every rank, even where gradients come in another: else ranks would sum different buckets.  ``ddp``
does the same in C++, and finds out in which order gradients really come.

Reference: Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training",
PVLDB 13(12), 2020, sections 3.2.2 (bucketing) and 3.2.3 (overlap).

Messages per step: one all-reduce for each parameter, or for each bucket (and dtype in it).
Bytes sent per step and rank: 2 (N - 1) / N * S, with S the bytes of all gradients.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import final

import torch.distributed as dist
from torch import Tensor, nn

from ddpnb.rank.collectives.flat import FlatBuffer, gradients, num_bytes
from ddpnb.rank.strategies.base import Strategy
from ddpnb.rank.worker import Batch, Worker


@final
class DdpOverlapByHand(Strategy):
    """A hook on each parameter, and an all-reduce for each bucket of gradients."""

    def __init__(self, *, bucket_mb: float = 0.0) -> None:
        self.bucket_mb = bucket_mb

    def setup(self, worker: Worker) -> None:
        """Make the optimizer and the buckets, and hook all parameters."""
        super().setup(worker)
        self.is_last_part = True
        self.buckets = buckets_of(worker.parameters, self.bucket_mb)
        self.flat = [FlatBuffer(bucket) for bucket in self.buckets]
        self.hooks = [
            parameter.register_post_accumulate_grad_hook(partial(self.on_gradient, number))
            for number, bucket in enumerate(self.buckets)
            for parameter in bucket
        ]

    def step(self, batch: Batch) -> Tensor:
        """Train on this rank's slice of one global batch; takes part: every rank."""
        self.num_missing = [len(bucket) for bucket in self.buckets]
        self.sent: list[list[dist.Work | None]] = []
        # forward; backward and, at the same time, agree: ``on_gradient`` is called meanwhile
        loss = self.worker.compute_gradients(batch, weight=batch.weight, unsynced=self.unsynced)
        while len(self.sent) < len(self.buckets):  # a parameter had no part in the loss
            self.send_next()
        # wait: takes part: every rank
        for works, flat, bucket in zip(self.sent, self.flat, self.buckets, strict=True):
            for work in works:
                assert work is not None, "this rank is in the group"
                work.wait()
            flat.scatter(gradients(bucket))
        # update: every rank the same
        self.worker.update(self.optimizer)
        return loss

    def finish(self) -> nn.Module:
        """Remove the hooks."""
        for hook in self.hooks:
            hook.remove()
        return super().finish()

    @contextmanager
    def unsynced(self) -> Iterator[None]:
        """Send nothing yet: gradients of the parts of a batch add up first."""
        self.is_last_part = False
        yield
        self.is_last_part = True

    def on_gradient(self, number: int, _: nn.Parameter) -> None:
        """Send the buckets that are next in order and full.

        Autograd calls it in the backward pass, when a gradient of a bucket is there.
        """
        if not self.is_last_part:
            return
        self.num_missing[number] -= 1
        assert self.num_missing[number] >= 0, "a gradient came again, after it may have been sent"
        while len(self.sent) < len(self.buckets) and self.num_missing[len(self.sent)] == 0:
            self.send_next()

    def send_next(self) -> None:
        """Start to sum the next bucket over all ranks, and return at once; takes part: every rank.

        Zeros are sent where no gradient has come.
        """
        number = len(self.sent)
        self.flat[number].gather(gradients(self.buckets[number]))
        self.sent.append(
            [dist.all_reduce(each, async_op=True) for each in self.flat[number].buffers]
        )


def buckets_of(parameters: Sequence[nn.Parameter], bucket_mb: float) -> list[list[nn.Parameter]]:
    """Return the parameters in buckets of so many MB at most, the last parameters first.

    A parameter that alone has more gets its own bucket; with 0 MB each does.
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
