"""Asynchronous SGD with a parameter server (every rank; the server on rank 0).

    worker i:  pull w;  push g_i(w)                       g_i: over its b_i samples, on its own
    server:    w  <-  w - (b_i / B) * lr * g_i(w_old)     as soon as it arrives

w_old is what the worker had pulled; the updates made since by others are the gradient's
staleness.  The weight b_i / B is the worker's share of a global batch of B: with it, one pass
over the data moves w as far as synchronous SGD does.  It scales the learning rate, not the
gradient, and so also weight decay and Adam's updates.  The optimizer is the server's: its momentum
is that of all workers together.

Options:

    period=k    the server makes one update of k gradients, from whichever workers: with their
                mean, at the sum of their weights.  k = N makes a global batch's worth, and no
                worker waits for it
    bound=s     stale synchronous parallel: a worker that is s steps ahead of the slowest waits.
                s = 0 is synchronous: all wait for one update, made of a round's gradients
    damping=on  g_i * (1 + s') / (1 + s)  in place of g_i, with s its staleness and
                s' = (N - 1) / k that of equally fast workers.  By plain SGD with k = 1 a gradient
                so moves w by lr * g_i / (1 + s)
    compensate=l
                g_i + l * g_i * g_i * (w - w_old)  in place of g_i, with w as it is now
    momentum=m  of the default optimizer, in place of --momentum

References: Dean et al., "Large Scale Distributed Deep Networks" (Downpour SGD),
NeurIPS 2012; Li et al., "Scaling Distributed Machine Learning with the Parameter
Server", OSDI 2014.  Period (n-softsync) and damping: Zhang et al., "Staleness-aware
Async-SGD for Distributed Deep Learning", IJCAI 2016.  Bound: Ho et al., "More Effective
Distributed ML via a Stale Synchronous Parallel Parameter Server", NeurIPS 2013.  Compensation:
Zheng et al., "Asynchronous Stochastic Gradient Descent with Delay Compensation", ICML 2017.

Messages per step and worker: its gradients to the server, the parameters back; and two of
some 30 bytes.  The reply also names the next shard: a faster worker takes more of them.
Bytes sent per step: those of the gradients, P for parameters of P bytes.  (As many come back;
rank 0 hands over its own without a copy.)

A worker that dies costs the shards it holds.  A restarted process may join.  Where rank 0, the
server, dies, the run is over.
"""

import contextlib
from collections import deque
from collections.abc import Iterator, Sequence
from typing import final

from torch import Tensor, nn

from ddpnb.protocol.errors import UserError
from ddpnb.protocol.messages import RankState
from ddpnb.rank.comm.client import ParameterClient, connect, join, start_server
from ddpnb.rank.comm.flat_buffers import PackedTensors, num_bytes
from ddpnb.rank.comm.link import NO_LINK
from ddpnb.rank.comm.parameter_server import NO_BOUND, ParameterServer
from ddpnb.rank.comm.parameter_store import WHOLE_ROUND, AccessLog, ParameterStore, ignore_access
from ddpnb.rank.comm.transport import Drain
from ddpnb.rank.strategies.base import Plan, State, Strategy
from ddpnb.rank.strategies.replica import Batch, Memory, Replica, StepReport
from ddpnb.rank.tasks.batches import Shard

_WEIGHT_NOTE = "Gradients are weighted by their share of the global batch."

_OWN_WORKER_NOTE = (
    "Rank 0 trains beside the server, which it reaches without a link: over a slow one it takes "
    "most of the samples."
)


@final
class AsyncParameterServer(Strategy):
    """Asynchronous SGD with one parameter server.

    Args:
        period: gradients that make one update.
        bound: steps that a worker may be ahead of the slowest; -1: any number.
        damping: whether gradients are scaled by their staleness.
        compensate: the lambda of delay compensation; 0: none.
        momentum: of the default optimizer, which has it already: ``RunSpec.used_momentum``.
        timeout: seconds that the server waits where no worker makes progress.
        log: called with every read and write that the server serves; rank 0's is used.

    Raises:
        UserError: a period, damping or compensation together with a bound of 0, which implies a
            period and no staleness.
    """

    def __init__(
        self,
        *,
        period: int = 1,
        bound: int = NO_BOUND,
        damping: bool = False,
        compensate: float = 0.0,
        momentum: float | None = None,
        timeout: float = 60.0,
        log: AccessLog = ignore_access,
    ) -> None:
        if bound == 0 and period != 1:
            raise UserError("With bound=0 an update is made of a whole round: leave period out.")
        if bound == 0 and damping:
            raise UserError("With bound=0 no gradient is stale: leave damping out.")
        if bound == 0 and compensate:
            raise UserError("With bound=0 no gradient is stale: leave compensate out.")
        self._period = WHOLE_ROUND if bound == 0 else period
        self._bound = bound
        self._is_damped = damping
        self._compensation = compensate
        self._timeout = timeout
        self._log = log
        self._server: ParameterServer | None = None
        self._drain: Drain | None = None
        self._opened = contextlib.ExitStack()

    def plan(self, state: RankState) -> Plan:
        """Every rank trains; rank 0 also serves."""
        num = state.world_size
        notes = (_WEIGHT_NOTE,) if num > 1 and self._bound != 0 else ()
        return Plan(
            num_ranks=num,
            num_workers=num,
            synchronous=False,
            updates_per_batch=1.0 if self._period == WHOLE_ROUND else num / self._period,
            survives_deaths=True,
            notes=notes,
        )

    def setup(self, replica: Replica) -> None:
        """Start or find the server, and pull for the first time; takes part: every rank.

        A rank that joins takes part alone.
        """
        self._replica = replica
        self._num_bytes = num_bytes(replica.parameters)
        self._client = self._connect(replica)
        self._reply = self._client.begin()
        self._shard_numbers = deque(self._reply.shards)

    def notes(self) -> tuple[str, ...]:
        """Report what a link does not slow down."""
        has_link = self._replica.link is not NO_LINK and self._replica.world_size > 1
        return (_OWN_WORKER_NOTE,) if has_link else ()

    def shards(self) -> Iterator[Shard]:
        """The shards that the server names, until all are handed out."""
        while self._shard_numbers:
            yield self._replica.shard(self._shard_numbers.popleft())

    def step(self, batch: Batch) -> StepReport:
        """Train on one shard, with parameters as old as the last pull."""
        # forward, backward
        loss = self._replica.compute_gradients(batch)
        # agree: with no other rank, unless there is a bound
        # update: by the server; the parameters that come back also have the others' updates
        self._exchange(batch.weight)
        return batch.report(loss, staleness=self._reply.staleness, num_bytes_sent=self._num_bytes)

    def finish(self) -> nn.Module:
        """Pull once more when all workers are done; takes part: every living rank."""
        self._client.finish()
        if self._drain is not None:
            self._drain()
        return self._replica.model

    @contextlib.contextmanager
    def rehearsal(self) -> Iterator[None]:
        """Have the server take gradients without handing out shards; then rewind it."""
        if self._server is None:
            yield
            return
        with self._server.rehearsal():
            yield

    def memory(self) -> Memory:
        """The copy that this worker trains on; on rank 0 those of all, and the one optimizer."""
        held: list[Tensor] = list(self._replica.model.parameters())
        if self._server is not None:  # the model's trained parameters lie in one of the copies
            frozen = [parameter for parameter in held if not parameter.requires_grad]
            copies = self._server.store.copies
            held = [*frozen, *(tensor for copied in copies for tensor in copied.tensors)]
        return Memory.of(held, *self._replica.optimizers)

    def save(self, replica: Replica) -> State:
        """Return the server's state at one moment, while other workers train on."""
        assert self._server is not None, "only rank 0 saves"
        parameters, optimizer = self._server.snapshot()
        return {"model": replica.state_with(parameters), "optimizers": [optimizer]}

    def snapshot(self, replica: Replica) -> State:
        """Return the model with the server's parameters at one moment, copied."""
        assert self._server is not None, "only rank 0 does"
        return replica.state_with(self._server.copied_parameters())

    def num_shards_done(self) -> int | None:
        """Return how many gradients the server has taken."""
        return None if self._server is None else self._server.num_shards_done

    def lost_shards(self) -> Sequence[Shard]:
        """Return, on rank 0, the shards of workers that died."""
        lost = self._server.lost_shards if self._server else ()
        return [self._replica.shard(number) for number in lost]

    def close(self) -> None:
        """Disconnect, end the server, remove its files."""
        self._opened.close()

    def _exchange(self, weight: float) -> None:
        """Push and pull; time the wait for other workers apart, where the clock is the host's."""
        timer = self._replica.timer
        timer.begin("communication")
        pushed = timer.moment()
        self._reply = self._client.push(weight)
        self._shard_numbers.extend(self._reply.shards)
        if isinstance(pushed, float) and self._reply.waited_seconds > 0:
            timer.begin("waiting", at=pushed)
            timer.begin("communication", at=pushed + self._reply.waited_seconds)

    def _connect(self, replica: Replica) -> ParameterClient:
        # a worker waits longer than the server, so that the server's report comes first
        slack = 1.0 if replica.rank == 0 else 1.5
        config = replica.worker_config(slack * self._timeout)
        if replica.joins:
            return join(config, self._opened)
        if replica.rank != 0:
            return connect(config, self._opened)
        self._server, self._drain, client = start_server(config, self._make_server, self._opened)
        return client

    def _make_server(self, copies: Sequence[PackedTensors]) -> ParameterServer:
        store = ParameterStore(
            self._replica.parameters,
            self._replica.optimizer,
            self._log,
            copies=copies,
            period=self._period,
            is_damped=self._is_damped,
            compensation=self._compensation,
        )
        return ParameterServer(
            store=store,
            num_workers=self._replica.world_size,
            num_shards=self._replica.num_steps * self._replica.world_size,
            num_prefetched=self._replica.num_prefetched,
            bound=self._bound,
            timeout_seconds=self._timeout,
        )
