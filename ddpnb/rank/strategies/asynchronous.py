"""What asynchronous strategies have in common: shards from one queue, and a life-cycle (ranks)."""

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from torch import nn

from ddpnb.protocol.messages import RankState
from ddpnb.rank.servers.client import Client
from ddpnb.rank.servers.memory import Layout, PackedTensors
from ddpnb.rank.servers.queue import NO_BOUND, WorkQueue
from ddpnb.rank.servers.store import AccessLog, Gradients, UpdateCounter, ignore_access
from ddpnb.rank.strategies.base import Plan, Strategy
from ddpnb.rank.strategies.worker import Worker
from ddpnb.rank.tasks.batches import Shard


class AsynchronousStrategy(Strategy):
    """Workers that wait for each other only to begin and to end.

    The next worker that asks gets the next shard.  A worker that dies costs the shards that it
    holds, and may join anew.

    In its ``setup`` a subclass calls ``begin``, and in each step ``exchange``.

    Args:
        momentum: of the default optimizer, which has it already: ``RunSpec.used_momentum``.
        timeout: seconds in which some worker must make progress.
        log: called, on rank 0, with every read and write of the parameters.
    """

    client: Client
    """Made by ``begin``."""

    def __init__(
        self,
        *,
        momentum: float | None = None,
        timeout: float = 60.0,
        log: AccessLog = ignore_access,
    ) -> None:
        self._timeout = timeout
        self._log = log
        self._opened = contextlib.ExitStack()

    def plan(self, state: RankState) -> Plan:
        """Every rank trains."""
        num = state.world_size
        return Plan(num_ranks=num, num_workers=num, synchronous=False, survives_deaths=True)

    def begin(
        self,
        worker: Worker,
        layout: Layout,
        make_updates: Callable[[Sequence[PackedTensors]], UpdateCounter],
        bound: int = NO_BOUND,
    ) -> None:
        """Connect to rank 0, and wait for all workers; takes part: every rank.

        A worker that joins takes part alone.

        Args:
            worker: this rank's; its parameters then lie in memory of the run.
            layout: of that memory.
            make_updates: makes, on rank 0, what workers read and write, from the copies of the
                parameters.
            bound: steps that a worker may be ahead of the slowest.
        """

        def make_queue(
            copies: Sequence[PackedTensors], find_failed_rank: Callable[[], int]
        ) -> WorkQueue:
            return WorkQueue(
                make_updates(copies),
                num_workers=worker.world_size,
                num_shards=worker.num_steps * worker.world_size,
                timeout_seconds=self._timeout,
                num_prefetched=worker.num_prefetched,
                bound=bound,
                find_failed_rank=find_failed_rank,
            )

        self.worker = worker
        patience = 1.0 if worker.rank == 0 else 1.5  # the queue's own report comes first
        config = worker.worker_config(patience * self._timeout)
        self.client = Client(config, layout, make_queue, joins=worker.joins)
        self._opened.callback(self.client.close)
        self._shard_numbers = deque(self.client.begin())

    def shards(self) -> Iterator[Shard]:
        """The shards that the queue names, until all are handed out."""
        while self._shard_numbers:
            yield self.worker.shard(self._shard_numbers.popleft())

    def exchange(self, weight: float, gradients: Gradients = ()) -> None:
        """Write, read, and get the next shard; note the staleness of what was written.

        Args:
            weight: this worker's share of the global batch.
            gradients: of the mean loss; none where this worker has made the update itself.
        """
        reply = self.client.step(weight, gradients)
        self._shard_numbers.extend(reply.shards)
        self.worker.staleness = reply.staleness

    def finish(self) -> nn.Module:
        """Take the parameters when all workers are done; takes part: every living rank."""
        self.client.finish()
        return self.worker.model

    def num_shards_done(self) -> int | None:
        """Return how many shards all workers have trained on."""
        return self.client.queue.num_shards_done if self.client.queue else None

    def lost_shards(self) -> Sequence[Shard]:
        """Return, on rank 0, the shards of workers that died."""
        lost = self.client.queue.lost_shards if self.client.queue else ()
        return [self.worker.shard(number) for number in lost]

    def close(self) -> None:
        """Disconnect; report a failure unless this worker has finished."""
        self._opened.close()
