"""How do workers on shared memory come together, share out the work, and part?  (Every rank.)

Rank 0 makes two files in the run's folder, which all map: a ``Board``, and memory for the
parameters.  Whoever asks next gets the next share.  A worker that dies costs the share that it
trained on, and those being fetched ahead for it.
"""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from ddpnb.protocol.errors import UserError
from ddpnb.protocol.messages import RankState
from ddpnb.rank.comm.messages import RunOverError
from ddpnb.rank.comm.packed_tensors import PackedTensors, create_shared, map_copies, num_bytes
from ddpnb.rank.comm.parameter_store import Access, Log, no_log
from ddpnb.rank.comm.rendezvous import Rendezvous, this_host
from ddpnb.rank.comm.work_queue import WorkQueue
from ddpnb.rank.strategies.base import Plan, Replica, Strategy
from ddpnb.rank.tasks.batches import Shard

_MEMORY = "memory"


class SharedMemoryStrategy(Strategy):
    """A strategy on memory that all ranks share.

    In its ``setup`` a subclass calls ``open``, and ``enter`` when it is ready.

    Args:
        timeout: seconds in which at least one worker must make progress.
        log: is notified of every read and update of this worker.
    """

    queue: WorkQueue
    copies: list[PackedTensors]
    """Of the parameters, in the memory of all; at first each is what rank 0 brought."""

    def __init__(self, *, timeout: float = 60.0, log: Log = no_log) -> None:
        self._timeout = timeout
        self._log = log
        self._opened = contextlib.ExitStack()
        self._rendezvous: Rendezvous | None = None

    def plan(self, state: RankState) -> Plan:
        """Every rank trains."""
        num = state.world_size
        return Plan(num_ranks=num, num_workers=num, synchronous=False, survives_deaths=True)

    def open(self, replica: Replica, *, num_copies: int = 1, elsewhere: str) -> None:
        """Make the files, or map those that rank 0 has made; takes part: every rank.

        A rank that joins takes part alone.

        Args:
            replica: this worker's.
            num_copies: how often the parameters lie in the memory.
            elsewhere: what a user reads where the ranks share no memory.

        Raises:
            UserError: the ranks share no memory.
            RunOverError: there is nothing to join.
        """
        self._replica = replica
        if not replica.joins:
            self._meet(num_copies, elsewhere)
        try:
            self.queue = WorkQueue(
                self._path("b"),
                rank=replica.rank,
                world_size=replica.world_size,
                num_shards=self._num_shards,
                timeout_seconds=self._timeout,
                cancellation=replica.cancellation,
            )
            self._opened.callback(self.queue.close)
            self.copies = map_copies(self.path, replica.parameters, num_copies)
        except (FileNotFoundError, RuntimeError) as error:
            raise RunOverError from error

    def enter(self) -> None:
        """Say that this worker is ready, and wait for all; who joins waits for nobody."""
        self.queue.enter(self._rendezvous.absent if self._rendezvous else None)

    def shards(self) -> Iterator[Shard]:
        """Whatever share is next, until all are handed out."""
        while (number := self.queue.take()) is not None:
            yield self._replica.shard(number)

    def note(self, *, is_write: bool, version: int) -> None:
        """Log a read or an update of this worker."""
        self._log(Access(rank=self._replica.rank, is_write=is_write, version=version))

    def lost_shards(self) -> Sequence[Shard]:
        """Return, on rank 0, what was handed out to workers that died."""
        if self._replica.rank != 0:
            return ()
        return [self._replica.shard(number) for number in self.queue.lost_shards()]

    def close(self) -> None:
        """Say that this worker failed, if it has not finished; remove the files."""
        self._opened.close()

    def _meet(self, num_copies: int, elsewhere: str) -> None:
        """Make the files, or wait until rank 0 has."""
        replica = self._replica
        self._rendezvous = rendezvous = Rendezvous(
            replica.name, replica.rank, replica.folder, self._timeout, replica.cancellation
        )
        if replica.rank != 0:
            if rendezvous.read(_MEMORY, of_rank=0) != this_host(replica.folder):
                raise UserError(elsewhere)
            return
        self._opened.callback(rendezvous.forget, _MEMORY)
        for kind in "wb":
            self._opened.callback(self._path(kind).unlink, missing_ok=True)
        size = num_copies * num_bytes(replica.parameters)
        create_shared(self.path, size)
        WorkQueue.create(
            self._path("b"), world_size=replica.world_size, num_shards=self._num_shards
        )
        for copied in map_copies(self.path, replica.parameters, num_copies):
            for slot, parameter in zip(copied.tensors, replica.parameters, strict=True):
                slot.copy_(parameter.detach())
        rendezvous.tell(_MEMORY, this_host(replica.folder))

    @property
    def path(self) -> Path:
        """The file of the memory, as long as rank 0 is here."""
        return self._path("w")

    @property
    def _num_shards(self) -> int:
        return self._replica.num_steps * self._replica.world_size

    def _path(self, kind: str) -> Path:
        """Return a file of this run: w, the parameters, or b, the board; gone with rank 0."""
        return self._replica.folder / f"{self._replica.name}.{kind}"
