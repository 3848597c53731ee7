"""The base of strategies without a server: workers on shared memory (every rank).

Rank 0 creates two files in the run's folder, which all ranks map: a ``WorkQueue``, and memory
for the parameters.  The next worker that asks gets the next shard.  A worker that dies costs
the shards it holds: the one it trains on and those that are prefetched.
"""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from ddpnb.protocol.errors import UserError
from ddpnb.protocol.messages import RankState
from ddpnb.rank.comm.flat_buffers import (
    PackedTensors,
    create_shared_file,
    map_copies,
    packed_num_bytes,
)
from ddpnb.rank.comm.parameter_store import AccessLog, ParameterAccess, ignore_access
from ddpnb.rank.comm.rendezvous import Rendezvous, RunOverError, WorkerConfig, host_id
from ddpnb.rank.comm.work_queue import WorkQueue
from ddpnb.rank.strategies.base import Plan, Replica, Strategy
from ddpnb.rank.tasks.batches import Shard

_MEMORY = "memory"


class SharedMemoryStrategy(Strategy):
    """A strategy on memory that all ranks share.

    In its ``setup`` a subclass calls ``open``, and ``enter`` when it is ready.

    Args:
        timeout: seconds in which some worker must make progress.
        log: called with every read and update of this worker.
    """

    config: WorkerConfig
    queue: WorkQueue
    copies: list[PackedTensors]
    """Of the parameters, in shared memory; at first each holds rank 0's values."""

    def __init__(self, *, timeout: float = 60.0, log: AccessLog = ignore_access) -> None:
        self._timeout = timeout
        self._log = log
        self._opened = contextlib.ExitStack()
        self._rendezvous: Rendezvous | None = None

    def plan(self, state: RankState) -> Plan:
        """Every rank trains."""
        num = state.world_size
        return Plan(num_ranks=num, num_workers=num, synchronous=False, survives_deaths=True)

    def open(self, replica: Replica, *, num_copies: int = 1, refusal: str) -> None:
        """Create the files, or map those that rank 0 has created; takes part: every rank.

        A rank that joins takes part alone.

        Args:
            replica: this worker's.
            num_copies: of the parameters in shared memory.
            refusal: the error's text where the ranks share no memory.

        Raises:
            UserError: the ranks share no memory.
            RunOverError: there is no run to join.
        """
        self._replica = replica
        self.config = WorkerConfig(
            rank=replica.rank,
            world_size=replica.world_size,
            folder=replica.folder,
            name=replica.name,
            timeout_seconds=self._timeout,
            cancellation=replica.cancellation,
        )
        if not replica.joins:
            self._rendezvous = Rendezvous(self.config)
            if replica.rank == 0:
                self._create_files(self._rendezvous, num_copies)
            elif self._rendezvous.get(_MEMORY, from_rank=0) != host_id(replica.folder):
                raise UserError(refusal)
        try:
            self.queue = WorkQueue(self.config, self._num_shards)
            self._opened.callback(self.queue.close)
            self.copies = map_copies(self.path, replica.parameters, num_copies)
        except (FileNotFoundError, RuntimeError) as error:
            raise RunOverError from error

    def enter(self) -> None:
        """Report that this worker is ready, and wait for all; one that joins does not wait."""
        self.queue.enter(self._rendezvous.find_failed_rank if self._rendezvous else None)

    def shards(self) -> Iterator[Shard]:
        """The next shard of the queue, until all are handed out."""
        while (number := self.queue.take_shard()) is not None:
            yield self._replica.shard(number)

    def log_access(self, *, is_write: bool, version: int) -> None:
        """Log a read or an update of this worker."""
        self._log(ParameterAccess(rank=self._replica.rank, is_write=is_write, version=version))

    def lost_shards(self) -> Sequence[Shard]:
        """Return, on rank 0, the shards of workers that died."""
        if self._replica.rank != 0:
            return ()
        return [self._replica.shard(number) for number in self.queue.lost_shards()]

    def close(self) -> None:
        """Report a failure unless this worker has finished; remove the files."""
        self._opened.close()

    @property
    def path(self) -> Path:
        """The file of the parameters, which is there as long as rank 0 is."""
        return self.config.path("w")

    def _create_files(self, rendezvous: Rendezvous, num_copies: int) -> None:
        replica = self._replica
        self._opened.callback(rendezvous.delete, _MEMORY)
        create_shared_file(self.path, num_copies * packed_num_bytes(replica.parameters))
        self._opened.callback(self.path.unlink, missing_ok=True)
        queue_path = WorkQueue.create(self.config, self._num_shards)
        self._opened.callback(queue_path.unlink, missing_ok=True)
        for copied in map_copies(self.path, replica.parameters, num_copies):
            for tensor, parameter in zip(copied.tensors, replica.parameters, strict=True):
                tensor.copy_(parameter.detach())
        rendezvous.set(_MEMORY, host_id(replica.folder))

    @property
    def _num_shards(self) -> int:
        return self._replica.num_steps * self._replica.world_size
