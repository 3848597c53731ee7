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
from typing import final

from torch import Tensor

from ddpnb.protocol.errors import UserError
from ddpnb.protocol.messages import RankState
from ddpnb.rank.collectives.link import NO_LINK
from ddpnb.rank.servers.memory import PackedTensors
from ddpnb.rank.servers.queue import NO_BOUND
from ddpnb.rank.servers.store import AccessLog, ParameterStore, ignore_access
from ddpnb.rank.strategies.asynchronous import AsynchronousStrategy
from ddpnb.rank.strategies.base import Plan, State
from ddpnb.rank.strategies.worker import Batch, Memory, Worker

_WEIGHT_NOTE = "Gradients are weighted by their share of the global batch."
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
        momentum: of the default optimizer, which has it already: ``RunSpec.used_momentum``.
        timeout: seconds that the server waits where no worker makes progress.
        log: called with every read and write that the server serves.
    """

    _store: ParameterStore | None = None
    """Rank 0's."""

    def __init__(
        self,
        *,
        bound: int = NO_BOUND,
        compensate: float = 0.0,
        momentum: float | None = None,
        timeout: float = 60.0,
        log: AccessLog = ignore_access,
    ) -> None:
        super().__init__(timeout=timeout, log=log)
        self._bound = bound
        self._compensation = compensate

    def plan(self, state: RankState) -> Plan:
        """Every rank trains; rank 0 also serves.

        Raises:
            UserError: compensation together with a bound of 0.
        """
        is_round = self._bound == 0
        if is_round and self._compensation:
            raise UserError("With bound=0 no gradient is stale: leave compensate out.")
        num = state.world_size
        return replace(
            super().plan(state),
            updates_per_batch=1.0 if is_round else num,
            notes=(_WEIGHT_NOTE,) if num > 1 and not is_round else (),
        )

    def setup(self, worker: Worker) -> None:
        """Start or find the server, and pull for the first time; takes part: every rank."""
        self.begin(worker, worker.world_size, self._make_store, self._bound)
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

    def snapshot(self) -> State:
        """Return the model with the server's parameters at one moment, copied."""
        assert self._store is not None, "only rank 0 does"
        assert self.client.queue is not None, "only rank 0 does"
        with self.client.queue.lock:
            parameters = [tensor.clone() for tensor in self._store.tensors]
        return self.worker.state_with(parameters)

    def memory(self) -> Memory:
        """The copy that this worker trains on; on rank 0 those of all, and the one optimizer."""
        held: list[Tensor] = list(self.worker.model.parameters())
        if self._store is not None:  # the model's trained parameters lie in one of the copies
            held = [parameter for parameter in held if not parameter.requires_grad]
            held += [tensor for copied in self._store.copies for tensor in copied.tensors]
        return Memory.of(held, *self.worker.optimizers)

    def _make_store(self, copies: Sequence[PackedTensors]) -> ParameterStore:
        self._store = ParameterStore(
            copies,
            self.worker.optimizer,
            self._log,
            in_rounds=self._bound == 0,
            compensation=self._compensation,
        )
        return self._store
