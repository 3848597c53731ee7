"""Asynchronous SGD with a parameter server (every rank; the server on rank 0).

    worker i:  pull w;  push g_i(w)                       g_i: the gradient over its b_i samples
    server:    w  <-  w - (b_i / B) * lr * g_i(w_old)     as soon as it arrives

w_old is the w that the worker pulled. The gradient's staleness is the number of updates that other
workers made since then. The weight b_i / B is the worker's share of a global batch of B samples.
With this weight, one pass over the data moves w as far as synchronous SGD does. The weight scales
the learning rate instead of the gradient, so weight decay and Adam's updates are scaled too. The
server has the only optimizer, so all workers share one momentum.

Options:

    bound=s         stale synchronous parallel: a worker that is s steps ahead of the slowest waits.
                    s = 0 is synchronous: the server makes one update of each round's gradients
    compensate=l    uses g_i + l * g_i * g_i * (w - w_old) instead of g_i, with the current w
    momentum=m      momentum of the default optimizer, instead of --momentum

References: Dean et al., "Large Scale Distributed Deep Networks" (Downpour SGD), NeurIPS 2012; Li et
al., "Scaling Distributed Machine Learning with the Parameter Server", OSDI 2014. Bound: Ho et al.,
"More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server", NeurIPS 2013.
Compensation: Zheng et al., "Asynchronous Stochastic Gradient Descent with Delay Compensation", ICML
2017.

- Messages per step and worker: its gradients to the server, the parameters back, and two messages
  of about 50 bytes. The reply also names the next shard, so a faster worker gets more shards.
- Bytes sent per step: P, the bytes of the gradients. The worker receives P bytes of parameters.
  Rank 0 passes its gradients without a copy. Within a host, workers use shared memory. Between
  hosts, workers use TCP.

If a worker dies, the shards that it holds are lost. A restarted process may join, on the server's
host. If rank 0 (the server) dies, the run ends.
"""

from dataclasses import replace
from functools import partial
from typing import Any, final

from torch import Tensor

from ddpnb.protocol.messages import RankState
from ddpnb.rank.servers.queue import NO_BOUND
from ddpnb.rank.strategies.asynchronous import AsynchronousStrategy, ParameterStore
from ddpnb.rank.strategies.base import Plan
from ddpnb.rank.worker import Batch, Worker

_OWN_WORKER_NOTE = (
    "Rank 0 reaches the server without a link. If the link is slow, rank 0 trains on most of the "
    "samples."
)


@final
class AsyncParameterServer(AsynchronousStrategy):
    """Asynchronous SGD with one parameter server."""

    def __init__(self, *, bound: int = NO_BOUND, compensate: float = 0.0, **others: Any) -> None:
        super().__init__(**others)
        self._bound = bound
        self._compensation = compensate

    def plan(self, state: RankState) -> Plan:
        """Plan to train on every rank. Rank 0 is also the server."""
        num_updates = 1 if self._bound == 0 else state.world_size
        return replace(super().plan(state), updates_per_batch=num_updates)

    def setup(self, worker: Worker) -> None:
        """Start or find the server, and pull for the first time. Every rank takes part."""
        make_store = partial(
            ParameterStore,
            optimizer=worker.optimizer,
            in_rounds=self._bound == 0,
            compensation=self._compensation,
        )
        self.begin(worker, worker.world_size, make_store, bound=self._bound)
        if worker.laboratory is not None and worker.world_size > 1:
            worker.notes.append(_OWN_WORKER_NOTE)

    def step(self, batch: Batch) -> Tensor:
        """Train on one shard, with parameters from the last pull."""
        worker = self.worker
        # forward, backward
        loss = worker.compute_gradients(batch)
        # communicate: with the server only; with a bound, also wait for slower workers
        # update: the server updates (``ParameterStore.write``) and returns the parameters, which
        # also include the updates by other workers
        gradients = [parameter.grad for parameter in worker.parameters]
        worker.staleness = self.client.step(batch.weight, gradients)
        return loss
