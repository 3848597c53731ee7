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

from dataclasses import replace
from functools import partial
from typing import Any, final

from torch import Tensor

from ddpnb.protocol.messages import RankState
from ddpnb.rank.servers.queue import NO_BOUND
from ddpnb.rank.servers.server import ParameterStore
from ddpnb.rank.strategies.asynchronous import AsynchronousStrategy
from ddpnb.rank.strategies.base import Plan
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
        if worker.laboratory is not None and worker.world_size > 1:
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
