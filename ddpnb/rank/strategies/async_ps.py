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
    "Rank 0 trains beside the server, which it reaches without a link: over a slow one it takes "
    "most of the samples."
)


@final
class AsyncParameterServer(AsynchronousStrategy):
    """Asynchronous SGD with one parameter server."""

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
