"""Asynchronous SGD with a parameter server.  Every rank takes part.  The server is on rank 0.

    worker i:  pull w;  push g_i(w)                       g_i: the gradient over its b_i samples
    server:    w  <-  w - (b_i / B) * lr * g_i(w_old)     as soon as it arrives

w_old are the parameters that the worker pulled. The gradient's staleness is the number of updates
by other workers since the worker pulled w_old. The weight b_i / B is the worker's share of a global
batch of B samples. With this weight, one pass over the data moves w as far as a pass of synchronous
SGD does. The weight scales the learning rate instead of the gradient, so weight decay and Adam's
updates are scaled too. Only the server has an optimizer, so all workers share one momentum.

Options:

    bound=s         a worker waits if it is more than s steps ahead of the slowest worker. If s = 0,
                    the server makes one update in each round, so training is synchronous
    compensate=l    the server uses g_i + l * g_i * g_i * (w - w_old) with its current w
    momentum=m      momentum of the default optimizer, replaces --momentum

References: Dean et al., "Large Scale Distributed Deep Networks" (Downpour SGD), NeurIPS 2012; Li et
al., "Scaling Distributed Machine Learning with the Parameter Server", OSDI 2014. For ``bound``: Ho
et al., "More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server", NeurIPS
2013. For ``compensate``: Zheng et al., "Asynchronous Stochastic Gradient Descent with Delay
Compensation", ICML 2017.

- Messages per step and worker: gradients to the server, parameters from the server, and two
  messages of about 50 bytes. The server's reply contains the number of the next shard, so faster
  workers get more shards.
- Bytes sent per step and worker: P, the size of the gradients. The worker receives P bytes of
  parameters. Rank 0's worker gives its gradients to the server without copying them. Other workers
  on rank 0's host use shared memory. Workers on other hosts use TCP.

If a worker dies, its unfinished shards are lost. A restarted worker on rank 0's host may join the
run again. If rank 0 (the server) dies, the run ends.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn

from ddpnb.protocol.messages import RankState
from ddpnb.rank.servers.queue import NO_BOUND, Gradients, UpdateCounter
from ddpnb.rank.servers.server import PackedTensors, pack
from ddpnb.rank.strategies.asynchronous import AsynchronousStrategy, scaled_rate
from ddpnb.rank.strategies.base import Plan
from ddpnb.rank.tasks.base import OptimizerFactory
from ddpnb.rank.worker import Batch, Worker

_OWN_WORKER_NOTE = (
    "The server is on rank 0, so rank 0 needs no link to reach the server. If the other "
    "ranks' links are slow, rank 0 trains on most of the samples."
)


@final
class AsyncParameterServer(AsynchronousStrategy):
    """Asynchronous SGD with one parameter server."""

    def __init__(self, *, bound: int = NO_BOUND, compensate: float = 0.0, **others: Any) -> None:
        super().__init__(**others)
        self._bound = bound
        self._compensation = compensate

    def plan(self, state: RankState) -> Plan:
        """Return a plan to train on every rank. Rank 0 is also the server."""
        num_updates = 1 if self._bound == 0 else state.world_size
        return replace(super().plan(state), updates_per_batch=num_updates)

    def setup(self, worker: Worker) -> None:
        """Start the server or connect to it, and pull parameters. Every rank takes part."""
        make_store = partial(
            ParameterStore,
            optimizer=worker.optimizer,
            in_rounds=self._bound == 0,
            compensation=self._compensation,
        )
        self.begin(worker, worker.world_size, make_store, bound=self._bound)
        if worker.emulation is not None and worker.world_size > 1:
            worker.notes.append(_OWN_WORKER_NOTE)

    def step(self, batch: Batch) -> Tensor:
        """Train on one shard, with the parameters that this worker pulled last."""
        worker = self.worker
        worker.model.zero_grad()
        for micro_batch in worker.micro_batches(batch):
            loss = worker.loss(micro_batch)  # forward
            (micro_batch.share * loss).backward()
        # communicate: only with the server. If there is a bound, also wait for slower workers
        # update: the server updates the parameters (``ParameterStore.push``) and returns them.
        # They also contain the updates by other workers
        gradients = [parameter.grad for parameter in self.trained]
        self.exchange(batch.weight, gradients)
        return worker.mean_loss


@final
class ParameterStore(UpdateCounter):
    """The server's parameters and their optimizer, on rank 0.

    Each worker trains on a copy of the parameters. Only ``pull`` changes a worker's copy.

    Args:
        copies: One copy of the parameters for each rank, on the CPU. The first copy has the initial
            parameters.
        optimizer: Function that creates the optimizer.
        in_rounds: If True, ``push`` only collects gradients, and ``update`` makes the update.
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
        self.tensors = self._now.tensors
        """The current parameters."""
        self._parameters = [nn.Parameter(tensor) for tensor in self.tensors]
        self._optimizer = optimizer(self._parameters)
        self._in_rounds = in_rounds
        self._compensation = compensation
        self._weight = 0.0
        """Sum of the weights of the gradients that arrived since the last update."""

    def pull(self, rank: int) -> None:
        """Copy the current parameters to a worker's copy."""
        super().pull(rank)
        self.copies[rank].raw.copy_(self._now.raw)

    def push(self, rank: int, gradients: Gradients, weight: float = 1.0) -> int:
        """Apply a worker's gradients, or collect them until ``update``. Return the staleness."""
        staleness = self.version - self._pulled[rank]
        if self._compensation and staleness > 0:
            old = self.copies[rank].tensors
            gradients = compensated(gradients, old, self.tensors, self._compensation)
        self._weight += weight
        if self._in_rounds:
            self._gather(gradients, weight)
        else:
            for parameter, gradient in zip(self._parameters, gradients, strict=True):
                parameter.grad = gradient
            self.update()
        return staleness

    def update(self) -> None:
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
