"""How do workers train that never wait for each other?  (Every rank; the server on rank 0.)

    worker i:  pull w;  push (b_i / B) * g_i(w)           g_i: over its b_i samples, on its own
    server:    w  <-  w - lr * (b_i / B) * g_i(w_old)     as soon as it arrives

w_old is what the worker had pulled; the updates made since by others are the
gradient's staleness.  The weight b_i / B, the worker's share of a global batch of B,
lets one pass over the data move w as far as synchronous SGD does.

References: Dean et al., "Large Scale Distributed Deep Networks" (Downpour SGD),
NeurIPS 2012; Li et al., "Scaling Distributed Machine Learning with the Parameter
Server", OSDI 2014.

Messages per step and worker: its gradients to the server, the parameters back, both
through shared memory; and two of some 30 bytes through a socket.  The answer also names
the next share to train on: a faster worker takes more of them.
"""

import contextlib
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import TypeVar, final

import torch
import torch.distributed as dist
from torch import nn

from ddpnb.rank.order import Share
from ddpnb.rank.strategies.base import Batch, Plan, Replica, StepReport, Strategy
from ddpnb.rank.transport.link import Link
from ddpnb.rank.transport.master import Log, Master, no_log
from ddpnb.rank.transport.message import KEY_BYTES, NO_SHARE, RankLostError
from ddpnb.rank.transport.server import Server
from ddpnb.wire import RankState

Answer = TypeVar("Answer")

_WEIGHT_NOTE = (
    "Gradients are weighted by their share of the global batch; staleness adds to momentum, "
    "so a smaller learning rate suits it."
)


@final
class AsyncParameterServer(Strategy):
    """Asynchronous SGD with one parameter server.

    Args:
        timeout_seconds: how long the server waits where no worker makes progress.
        log: is told of every read and write that the server serves; rank 0's is used.
    """

    def __init__(self, *, timeout_seconds: float = 60.0, log: Log = no_log) -> None:
        self._timeout = timeout_seconds
        self._log = log
        self._server: Server | None = None
        self._opened = contextlib.ExitStack()

    def plan(self, state: RankState) -> Plan:
        """Every rank trains; rank 0 also serves."""
        num = state.world_size
        notes = (_WEIGHT_NOTE,) if num > 1 else ()
        return Plan(num_ranks=num, num_workers=num, synchronous=False, notes=notes)

    def setup(self, replica: Replica) -> None:
        """Start the server, connect to it, and pull for the first time; takes part: every rank."""
        self._replica = replica
        if replica.rank == 0:
            self._server = self._opened.enter_context(closing(self._make_server(replica)))
            self._server.start()
        key = self._exchange_key()
        self._link = self._opened.enter_context(closing(self._make_link(replica, key)))
        self._reply = self._ask(self._link.begin)

    def shares(self) -> Iterator[Share]:
        """Whatever share the server names next, until all are handed out."""
        num_parts = self._replica.world_size
        while self._reply.share != NO_SHARE:
            step, part = divmod(self._reply.share, num_parts)
            yield Share(step=step, part=part, num_parts=num_parts)

    def step(self, batch: Batch) -> StepReport:
        """Train on one share, with parameters as old as the last pull."""
        # forward; backward, with the weight in the loss
        loss = self._replica.compute_gradients(batch, weight=batch.weight)
        # agree: with nobody; push, and the server applies it now
        # update: made by the server; what comes back has it, and what others pushed meanwhile
        self._replica.timer.begin("communication")
        self._reply = self._ask(self._link.push)
        return StepReport(
            loss=loss,
            num_samples=batch.num_samples,
            staleness=self._reply.staleness,
        )

    def finish(self) -> nn.Module:
        """Pull once more when all workers are done; takes part: every rank."""
        self._ask(self._link.finish)
        if self._server is not None:
            self._server.wait()
        return self._replica.model

    def close(self) -> None:
        """Hang up, end the server, remove its files."""
        self._opened.close()

    def _make_server(self, replica: Replica) -> Server:
        return Server(
            folder=replica.folder,
            name=replica.name,
            master=Master(replica.parameters, replica.optimizer, self._log),
            num_workers=replica.world_size,
            num_shares=replica.num_steps * replica.world_size,
            timeout_seconds=self._timeout,
        )

    def _make_link(self, replica: Replica, key: bytes) -> Link:
        return Link(
            folder=replica.folder,
            name=replica.name,
            key=key,
            rank=replica.rank,
            parameters=replica.parameters,
            timeout_seconds=1.5 * self._timeout,  # the server's word on who is lost comes first
        )

    def _exchange_key(self) -> bytes:
        """Return the server's secret; takes part: every rank.  Rank 0's server listens by then."""
        on_gpu = dist.get_backend() == "nccl"
        key = torch.zeros(
            KEY_BYTES, dtype=torch.uint8, device=self._replica.device if on_gpu else "cpu"
        )
        if self._server is not None:
            key.copy_(torch.tensor(list(self._server.key), dtype=torch.uint8))
        dist.broadcast(key, src=0)
        return bytes(key.tolist())

    def _ask(self, call: Callable[[], Answer]) -> Answer:
        """Ask the server; where it failed in this very process, raise what it failed of."""
        try:
            return call()
        except RankLostError as lost:
            cause = self._server.error if self._server else None
            if cause is None or isinstance(cause, RankLostError):
                raise
            raise cause from lost
