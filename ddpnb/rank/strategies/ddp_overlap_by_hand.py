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

import contextlib
from collections.abc import Iterator, Sequence
from functools import partial
from typing import final

import torch.distributed as dist
from torch import Tensor, nn

from ddpnb.protocol.errors import UserError
from ddpnb.rank.collectives.flat import FlatBuffer, gradients, num_bytes
from ddpnb.rank.strategies.base import Strategy
from ddpnb.rank.strategies.worker import Batch, Worker

_TWICE = (
    "A parameter had its gradient twice in one backward pass, as one that is shared by two "
    "checkpointed layers has: call torch's checkpoint with use_reentrant=False, or leave "
    "ddp-overlap-by-hand out."
)


@final
class DdpOverlapByHand(Strategy):
    """A hook on each parameter, and an all-reduce for each bucket of gradients.

    Args:
        bucket_mb: MB of gradients in one message; 0: one message for each parameter.
    """

    _num_started: int
    """Buckets of this step that are on their way: the first ones."""

    def __init__(self, *, bucket_mb: float = 0.0) -> None:
        self._bucket_mb = bucket_mb
        self._opened = contextlib.ExitStack()

    def setup(self, worker: Worker) -> None:
        """Make the optimizer and the buckets, and hook all parameters."""
        super().setup(worker)
        self._is_last_part = True
        self._buckets = [_Bucket(each) for each in buckets_of(worker.parameters, self._bucket_mb)]
        for bucket in self._buckets:
            for parameter in bucket.parameters:
                hook = partial(self._on_gradient, bucket)
                handle = parameter.register_post_accumulate_grad_hook(hook)
                self._opened.callback(handle.remove)

    def step(self, batch: Batch) -> Tensor:
        """Train on this rank's slice of one global batch; takes part: every rank."""
        for bucket in self._buckets:
            bucket.begin_step()
        self._num_started = 0
        # forward; backward and, at the same time, agree: ``_on_gradient`` is called meanwhile
        loss = self.worker.compute_gradients(batch, weight=batch.weight, unsynced=self._unsynced)
        while self._num_started < len(self._buckets):  # a parameter had no part in the loss
            self._send_next()
        # wait: takes part: every rank
        for bucket in self._buckets:
            bucket.wait()
        # update: every rank the same
        self.worker.update(self.optimizer)
        return loss

    def finish(self) -> nn.Module:
        """Remove the hooks."""
        self.close()
        return super().finish()

    def close(self) -> None:
        """Remove the hooks; may be called twice."""
        self._opened.close()

    @contextlib.contextmanager
    def _unsynced(self) -> Iterator[None]:
        """Send nothing yet: gradients of the parts of a batch add up first."""
        self._is_last_part = False
        try:
            yield
        finally:
            self._is_last_part = True

    def _on_gradient(self, bucket: "_Bucket", _: nn.Parameter) -> None:
        """Send the buckets that are next in order and full.

        Autograd calls it in the backward pass, when a parameter's gradient is there.

        Raises:
            UserError: it came a second time, after it may have been sent.
        """
        if not self._is_last_part:
            return
        bucket.num_missing -= 1
        if bucket.num_missing < 0:
            raise UserError(_TWICE)
        while self._num_started < len(self._buckets) and self._next.num_missing == 0:
            self._send_next()

    @property
    def _next(self) -> "_Bucket":
        return self._buckets[self._num_started]

    def _send_next(self) -> None:
        """Send the next bucket; takes part: every rank."""
        self._next.send()
        self._num_started += 1


class _Bucket:
    """Gradients that are sent in one message (for each dtype)."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = parameters
        self.num_missing = 0
        """Gradients that have yet to come in this step."""
        self._flat = FlatBuffer(parameters)
        self._sent: list[dist.Work] = []

    def begin_step(self) -> None:
        """Expect all gradients."""
        self.num_missing = len(self.parameters)
        self._sent = []

    def send(self) -> None:
        """Start to sum the gradients over all ranks, and return at once; zeros where none came."""
        self._flat.gather(gradients(self.parameters))
        for buffer in self._flat.buffers:
            work = dist.all_reduce(buffer, async_op=True)
            assert work is not None, "this rank is in the group"
            self._sent.append(work)

    def wait(self) -> None:
        """Wait for the sums, and take them as the gradients."""
        for work in self._sent:
            work.wait()
        self._flat.scatter(gradients(self.parameters))


def buckets_of(parameters: Sequence[nn.Parameter], bucket_mb: float) -> list[list[nn.Parameter]]:
    """Return the parameters in buckets, the last parameters first.

    Args:
        parameters: all that are trained, in the model's order.
        bucket_mb: MB that a bucket may hold, unless one parameter alone has more; 0: each
            parameter has its own.
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
