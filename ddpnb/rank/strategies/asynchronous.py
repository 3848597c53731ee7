"""The base class of asynchronous strategies, and the parameter store.  Runs on the ranks."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn

from ddpnb.protocol.messages import RankState
from ddpnb.rank.servers.client import Client, MakeUpdates
from ddpnb.rank.servers.memory import Gradients, PackedTensors, pack
from ddpnb.rank.servers.queue import NO_BOUND, UpdateCounter
from ddpnb.rank.strategies.base import Plan, Strategy
from ddpnb.rank.tasks.base import OptimizerFactory
from ddpnb.rank.tasks.batches import Shard
from ddpnb.rank.worker import Worker


class AsynchronousStrategy(Strategy):
    """The base class of strategies in which workers wait only at the start and at the end.

    The queue gives the next shard to the first worker that asks. If a worker dies, its unfinished
    shards are lost, and the restarted worker may join again. A subclass calls ``begin`` in its
    ``setup``, and ``client.step`` in each step.

    Args:
        momentum: Momentum of the default optimizer, read through ``RunSpec.used_momentum``.
        timeout: Maximum number of seconds during which no worker makes progress.
    """

    client: Client
    """This worker's access to the queue. ``begin`` creates it."""

    def __init__(self, *, momentum: float | None = None, timeout: float = 60.0) -> None:
        self.timeout = timeout

    def plan(self, state: RankState) -> Plan:
        """Return a plan to train on every rank."""
        num = state.world_size
        return Plan(num_ranks=num, num_workers=num, synchronous=False, survives_deaths=True)

    def begin(
        self, worker: Worker, num_copies: int, make_updates: MakeUpdates, bound: int = NO_BOUND
    ) -> None:
        """Connect to the queue and wait for all workers. Every rank takes part.

        A restarted worker joins without the other ranks. See ``Client`` for the arguments.
        """
        self.client = Client(
            worker,
            num_copies,
            make_updates,
            self.opened,
            timeout_seconds=self.timeout,
            bound=bound,
        )
        self.opened.callback(self.client.close)
        self.worker, self.queue = worker, self.client.queue
        self.client.begin()

    def shards(self) -> Iterator[Shard]:
        """Return the shards that this worker gets from the queue, until no shard is left."""
        return map(self.worker.shard, self.client.shards())

    def finish(self) -> nn.Module:
        """Wait for all workers, and return the final model. Every rank takes part."""
        self.client.finish()
        return self.worker.model


@contextlib.contextmanager
def scaled_rate(optimizer: torch.optim.Optimizer, fraction: float) -> Iterator[None]:
    """Multiply the learning rate by a fraction, for one optimizer step in this context.

    Scaling the learning rate scales the whole update. Scaling the gradient would scale neither
    weight decay nor Adam's updates, because Adam divides by the gradient's size. Other hooks may
    set the learning rate during the step, so the hook that scales the rate runs last.
    """
    rates: list[Any] = []

    def scale(*_: object) -> None:
        for group in [] if rates else optimizer.param_groups:  # super().step() calls the hook again
            rates.append(group["lr"])
            group["lr"] = group["lr"] * fraction

    hook = optimizer.register_step_pre_hook(scale)
    try:
        yield
    finally:
        hook.remove()
        for group, rate in zip(optimizer.param_groups, rates, strict=False):
            group["lr"] = rate


@final
class ParameterStore(UpdateCounter):
    """The server's parameters and their optimizer, on rank 0.

    Each worker trains on a copy of the parameters. Only ``read`` changes a worker's copy.

    Args:
        copies: One copy of the parameters for each rank, on the CPU. The first copy has the initial
            parameters.
        optimizer: Function that creates the optimizer.
        in_rounds: If True, ``write`` only collects gradients, and ``apply`` makes the update.
        compensation: The factor lambda in ``compensated``. If 0, gradients are not compensated.
    """

    def __init__(
        self,
        copies: Sequence[PackedTensors],
        optimizer: OptimizerFactory,
        *,
        in_rounds: bool = False,
        compensation: float = 0.0,
    ) -> None:
        super().__init__()
        self.copies = copies
        self._now = pack(copies[0].tensors)
        self._now.raw.copy_(copies[0].raw)
        self._parameters = [nn.Parameter(tensor) for tensor in self.tensors]
        self._optimizer = optimizer(self._parameters)
        self._in_rounds = in_rounds
        self._compensation = compensation
        self._weight = 0.0
        """Sum of the weights of the gradients that arrived since the last update."""

    @property
    def tensors(self) -> list[Tensor]:
        """The current parameters."""
        return self._now.tensors

    def read(self, rank: int) -> None:
        """Copy the current parameters to a worker's copy."""
        super().read(rank)
        self.copies[rank].raw.copy_(self._now.raw)

    def write(self, rank: int, gradients: Gradients, weight: float = 1.0) -> int:
        """Apply a worker's gradients, or collect them until ``apply``. Return the staleness."""
        staleness = self.version - self._version_read[rank]
        if self._compensation and staleness > 0:
            old = self.copies[rank].tensors
            gradients = compensated(gradients, old, self.tensors, self._compensation)
        self._weight += weight
        if self._in_rounds:
            self._gather(gradients, weight)
        else:
            for parameter, gradient in zip(self._parameters, gradients, strict=True):
                parameter.grad = gradient
            self.apply()
        return staleness

    def apply(self) -> None:
        """Make one update with the gradients that arrived since the last update, if any arrived."""
        if not self._weight:
            return
        if self._in_rounds:  # turn the weighted sum of the gradients into their mean
            for gradient in (p.grad for p in self._parameters if p.grad is not None):
                gradient.div_(self._weight)
        with scaled_rate(self._optimizer, self._weight):
            self._optimizer.step()
        self.version += 1
        self._weight = 0.0
        for parameter in self._parameters:
            parameter.grad = None

    @torch.no_grad()
    def _gather(self, gradients: Gradients, weight: float) -> None:
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            if gradient is None:
                continue
            if parameter.grad is None:
                parameter.grad = gradient * weight
            else:
                parameter.grad.add_(gradient, alpha=weight)


def compensated(
    gradients: Gradients, old: Sequence[Tensor], now: Sequence[Tensor], strength: float
) -> list[Tensor | None]:
    """Return stale gradients, corrected for the change of the parameters from ``old`` to ``now``.

        g  +  lambda * g * g * (w_now - w_old)

    The formula is a Taylor expansion, with the diagonal of g g^T instead of the Hessian. See Zheng
    et al., "Asynchronous Stochastic Gradient Descent with Delay Compensation", 2017 (DC-ASGD-c).
    """
    return [
        None if g is None else torch.addcmul(g, g * g, mine - theirs, value=strength)
        for g, mine, theirs in zip(gradients, now, old, strict=True)
    ]
