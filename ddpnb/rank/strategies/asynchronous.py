"""What asynchronous strategies have in common: shards from one queue, and a life-cycle (ranks)."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ddpnb.protocol.messages import RankState
from ddpnb.rank.servers.client import Client
from ddpnb.rank.servers.memory import PackedTensors
from ddpnb.rank.servers.queue import NO_BOUND, UpdateCounter, WorkQueue
from ddpnb.rank.strategies.base import Plan, Strategy
from ddpnb.rank.strategies.worker import Worker
from ddpnb.rank.tasks.batches import Shard


class AsynchronousStrategy(Strategy):
    """Workers that wait for each other only to begin and to end.

    The next worker that asks gets the next shard.  A worker that dies costs the shards that it
    holds, and may join anew.

    In its ``setup`` a subclass calls ``begin``, and in each step ``client.step``.

    Args:
        momentum: of the default optimizer, which has it already: ``RunSpec.used_momentum``.
        timeout: seconds in which some worker must make progress.
    """

    client: Client
    """From ``begin``."""

    def __init__(self, *, momentum: float | None = None, timeout: float = 60.0) -> None:
        self._timeout = timeout
        self._opened = contextlib.ExitStack()

    def plan(self, state: RankState) -> Plan:
        """Every rank trains."""
        num = state.world_size
        return Plan(num_ranks=num, num_workers=num, synchronous=False, survives_deaths=True)

    def begin(
        self,
        worker: Worker,
        num_copies: int,
        make_updates: Callable[[Sequence[PackedTensors]], UpdateCounter],
        bound: int = NO_BOUND,
    ) -> None:
        """Connect to rank 0, and wait for all workers; takes part: every rank.

        A worker that joins takes part alone.

        Args:
            worker: this rank's; its parameters then lie in memory of the run.
            num_copies: of the parameters: one for each worker, or one that all update.
            make_updates: makes, on rank 0, what workers read and write, from these copies.
            bound: steps that a worker may be ahead of the slowest.
        """

        def make_queue(copies: Sequence[PackedTensors]) -> WorkQueue:
            return WorkQueue(
                make_updates(copies),
                num_workers=worker.world_size,
                num_shards=worker.num_steps * worker.world_size,
                timeout_seconds=self._timeout,
                num_prefetched=worker.num_prefetched,
                bound=bound,
            )

        self.worker = worker
        patience = 1.0 if worker.rank == 0 else 1.5  # the queue's own report comes first
        config = worker.worker_config(patience * self._timeout)
        client = Client(config, num_copies, make_queue, joins=worker.joins)
        self.client = self._opened.enter_context(contextlib.closing(client))
        self.client.begin()

    def shards(self) -> Iterator[Shard]:
        """The shards that the queue names, until all are handed out."""
        return map(self.worker.shard, self.client.shards())

    def finish(self) -> nn.Module:
        """Take the parameters when all workers are done; takes part: every living rank."""
        self.client.finish()
        return self.worker.model

    def num_shards_done(self) -> int | None:
        """Return, on rank 0, how many shards all workers have trained on."""
        return None if self.client.queue is None else self.client.queue.num_shards_done

    def lost_shards(self) -> Sequence[Shard]:
        """Return, on rank 0, the shards of workers that died."""
        lost = () if self.client.queue is None else self.client.queue.lost_shards
        return [self.worker.shard(number) for number in lost]

    def close(self) -> None:
        """Disconnect; report a failure unless this worker has finished."""
        self._opened.close()


@contextlib.contextmanager
def scaled_rate(optimizer: torch.optim.Optimizer, fraction: float) -> Iterator[None]:
    """Have the optimizer's step in this context made at a fraction of its learning rate.

    This scales the whole update, including weight decay and Adam's division by the gradient's
    size.  To scale the gradient would leave those as they are.  A hook of the optimizer may set
    the learning rate in the step itself, so that it is scaled in a hook behind all others.
    """
    rates: list[Any] = []

    def scale(*_: object) -> None:
        for group in [] if rates else optimizer.param_groups:  # super().step calls hooks again
            rates.append(group["lr"])
            group["lr"] = group["lr"] * fraction

    hook = optimizer.register_step_pre_hook(scale)
    try:
        yield
    finally:
        hook.remove()
        for group, rate in zip(optimizer.param_groups, rates, strict=False):
            group["lr"] = rate
