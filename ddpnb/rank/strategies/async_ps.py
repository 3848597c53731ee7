"""Asynchronous SGD with a parameter server (every rank; the server on rank 0).

    worker i:  pull w;  push g_i(w)                       g_i: over its b_i samples, on its own
    server:    w  <-  w - (b_i / B) * lr * g_i(w_old)     as soon as it arrives

w_old is what the worker had pulled; the updates made since by others are the gradient's
staleness.  The weight b_i / B is the worker's share of a global batch of B: with it, one pass
over the data moves w as far as synchronous SGD does.  It scales the learning rate, not the
gradient, and so also weight decay and Adam's updates.  The optimizer is the server's: its momentum
is that of all workers together.

Options:

    bound=s     stale synchronous parallel: a worker that is s steps ahead of the slowest waits.
                s = 0 is synchronous: all wait for one update, made of a round's gradients
    compensate=l
                g_i + l * g_i * g_i * (w - w_old)  in place of g_i, with w as it is now
    momentum=m  of the default optimizer, in place of --momentum

References: Dean et al., "Large Scale Distributed Deep Networks" (Downpour SGD),
NeurIPS 2012; Li et al., "Scaling Distributed Machine Learning with the Parameter
Server", OSDI 2014.  Bound: Ho et al., "More Effective
Distributed ML via a Stale Synchronous Parallel Parameter Server", NeurIPS 2013.  Compensation:
Zheng et al., "Asynchronous Stochastic Gradient Descent with Delay Compensation", ICML 2017.

Messages per step and worker: its gradients to the server, the parameters back; and two of
some 50 bytes.  The reply also names the next shard: a faster worker takes more of them.
Bytes sent per step: those of the gradients, P for parameters of P bytes.  (As many come back;
rank 0 hands over its own without a copy.)  Within a host they lie in shared memory; across hosts
TCP carries them.

A worker that dies costs the shards it holds.  A restarted process may join, on the server's host.
Where rank 0, the server, dies, the run is over.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, final

import torch
from torch import Tensor, nn

from ddpnb.protocol.messages import RankState
from ddpnb.rank.collectives.flat import num_bytes
from ddpnb.rank.collectives.link import NO_LINK
from ddpnb.rank.servers.memory import Gradients, PackedTensors
from ddpnb.rank.servers.queue import NO_BOUND, UpdateCounter
from ddpnb.rank.strategies.asynchronous import AsynchronousStrategy, scaled_rate
from ddpnb.rank.strategies.base import Plan
from ddpnb.rank.strategies.worker import Batch, Memory, Worker
from ddpnb.rank.tasks.base import OptimizerFactory

_OWN_WORKER_NOTE = (
    "Rank 0 trains beside the server, which it reaches without a link: over a slow one it takes "
    "most of the samples."
)


@final
class AsyncParameterServer(AsynchronousStrategy):
    """Asynchronous SGD with one parameter server.

    Args:
        bound: steps that a worker may be ahead of the slowest; -1: any number.
        compensate: the lambda of delay compensation; 0: none.
        others: as in ``AsynchronousStrategy``.
    """

    def __init__(self, *, bound: int = NO_BOUND, compensate: float = 0.0, **others: Any) -> None:
        super().__init__(**others)
        self._bound = bound
        self._compensation = compensate

    def plan(self, state: RankState) -> Plan:
        """Every rank trains; rank 0 also serves."""
        num_updates = 1 if self._bound == 0 else state.world_size
        return replace(super().plan(state), updates_per_batch=num_updates)

    def setup(self, worker: Worker) -> None:
        """Start or find the server, and pull for the first time; takes part: every rank."""
        self.begin(
            worker,
            worker.world_size,
            lambda copies: ParameterStore(
                copies,
                worker.optimizer,
                in_rounds=self._bound == 0,
                compensation=self._compensation,
            ),
            self._bound,
        )
        if worker.link is not NO_LINK and worker.world_size > 1:
            worker.notes.append(_OWN_WORKER_NOTE)

    def step(self, batch: Batch) -> Tensor:
        """Train on one shard, with parameters as old as the last pull."""
        worker = self.worker
        # forward, backward
        loss = worker.compute_gradients(batch)
        # agree: with no other rank, unless there is a bound
        # update: by the server (``ParameterStore.write``); the parameters that come back also have
        # the others' updates
        gradients = [parameter.grad for parameter in worker.parameters]
        worker.staleness = self.client.step(batch.weight, gradients)
        return loss

    def memory(self) -> Memory:
        """The copy that this worker trains on; on rank 0 those of all, and the one optimizer."""
        worker = self.worker
        own = Memory.of(worker.model.parameters(), *worker.optimizers)
        num_others = worker.world_size - 1 if worker.rank == 0 else 0
        others = num_others * num_bytes(worker.parameters)
        return replace(own, parameters=own.parameters + others)


@final
class ParameterStore(UpdateCounter):
    """The parameters and their one optimizer, on rank 0.

    There are as many copies of the parameters as workers.  Each worker trains on the copy that was
    the latest when it last read.  A gradient updates the latest copy in place; where another worker
    trains on that, the update is made in a copy that no worker trains on.  So no parameters change
    while a gradient of them is computed.

    Args:
        copies: memory for the parameters, on the CPU: one copy for each worker.  The first one
            holds the first parameters.
        optimizer: makes the optimizer.
        in_rounds: whether gradients are gathered until ``apply`` makes one update of them.
        compensation: the lambda of delay compensation, see ``compensated``; 0: none.
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
        self._latest = 0
        self._trained_on: dict[int, int] = {}
        """Number of the copy that each worker trains on, by rank."""
        self._parameters = [nn.Parameter(tensor) for tensor in self.tensors]
        self._optimizer = optimizer(self._parameters)
        self._in_rounds = in_rounds
        self._compensation = compensation
        self._weight = 0.0
        """Sum over the gradients that have come since the last update."""

    @property
    def tensors(self) -> list[Tensor]:
        """The parameters as they are now."""
        return self.copies[self._latest].tensors

    def read(self, rank: int) -> int:
        """Give a worker the parameters as they are now, until ``release`` or its ``write``."""
        self._trained_on[rank] = self._latest
        super().read(rank)
        return self._latest

    def release(self, rank: int) -> None:
        """Note that a worker no longer trains on any copy; may be called twice."""
        self._trained_on.pop(rank, None)

    def write(self, rank: int, gradients: Gradients, weight: float = 1.0) -> int:
        """Take a worker's gradients; make an update unless they are gathered for a round.

        Args:
            rank: of the worker.
            gradients: of its mean loss, one for each parameter; None: none.
            weight: the worker's share of the global batch.

        Returns:
            Their staleness: updates since the worker's last read.
        """
        trained_on = self._trained_on.pop(rank, self._latest)
        staleness = self._version - self._version_read[rank]
        if self._compensation and staleness > 0:
            old, now = self.copies[trained_on].tensors, self.tensors
            gradients = compensated(gradients, old, now, self._compensation)
        self._weight += weight
        if self._in_rounds:
            self._gather(gradients, weight)
        else:
            for parameter, gradient in zip(self._parameters, gradients, strict=True):
                parameter.grad = gradient
            self.apply()
        return staleness

    def apply(self) -> None:
        """Make an update with the gradients that have come since the last one, if any."""
        if not self._weight:
            return
        if self._latest in self._trained_on.values():
            self._move_to_unused_copy()
        if self._in_rounds:  # from the weighted sum of the gradients to their mean
            for gradient in (p.grad for p in self._parameters if p.grad is not None):
                gradient.div_(self._weight)
        with scaled_rate(self._optimizer, self._weight):
            self._optimizer.step()
        self._version += 1
        self._weight = 0.0
        for parameter in self._parameters:
            parameter.grad = None

    def _move_to_unused_copy(self) -> None:
        """Leave the latest copy to the workers that train on it."""
        previous, used = self.copies[self._latest], set(self._trained_on.values())
        # One is unused: there are as many copies as workers, and the one that writes uses none.
        self._latest = next(number for number in range(len(self.copies)) if number not in used)
        self.copies[self._latest].raw.copy_(previous.raw)
        for parameter, tensor in zip(self._parameters, self.tensors, strict=True):
            parameter.data = tensor

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
    """Return gradients of old parameters, corrected towards those of the parameters as they are.

        g  +  lambda * g * g * (w_now - w_old)

    A Taylor expansion whose Hessian is replaced by the diagonal of g g^T: Zheng et al.,
    "Asynchronous Stochastic Gradient Descent with Delay Compensation", ICML 2017 (DC-ASGD-c).
    """
    return [
        None if g is None else torch.addcmul(g, g * g, mine - theirs, value=strength)
        for g, mine, theirs in zip(gradients, now, old, strict=True)
    ]
