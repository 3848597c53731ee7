"""Hogwild: workers train on the same memory without locks (every rank, of one host, on CPUs).

    worker i:  w  <-  w - (b_i / B) * lr * g_i(w_old)     w: the one copy, in shared memory

Each worker reads the parameters while others write them, and updates them without asking;
w_old may be a mixture of states.  Each has its own optimizer: momentum is local.  Staleness
comes from a shared counter of updates: those by others between the forward pass and the update.
The weight b_i / B, a share of the global batch of B, is that of ``async``.

Option:

    momentum=m  of the default optimizer, in place of --momentum

Reference: Niu, Recht, Re and Wright, "Hogwild!: A Lock-Free Approach to Parallelizing
Stochastic Gradient Descent", NeurIPS 2011.

Messages per step: none.  Workers take the next shard and count updates in shared memory, under
a file lock; a faster worker takes more shards.  Bytes sent per step: P for parameters of P
bytes, written to the memory of all.

A worker that dies costs the shards it holds; it may join anew.  GPUs cannot share such memory.
"""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import final

from torch import nn

from ddpnb.protocol.errors import UserError
from ddpnb.protocol.messages import RankState
from ddpnb.rank.comm.flat_buffers import (
    PackedTensors,
    create_shared_file,
    map_copies,
    num_bytes,
    packed_num_bytes,
)
from ddpnb.rank.comm.parameter_store import AccessLog, ParameterAccess, ScaledStep, ignore_access
from ddpnb.rank.comm.rendezvous import Rendezvous, RunOverError, WorkerConfig, host_id
from ddpnb.rank.comm.work_queue import WorkQueue
from ddpnb.rank.strategies.base import Plan, Strategy
from ddpnb.rank.strategies.replica import Batch, Memory, Replica, StepReport
from ddpnb.rank.tasks.batches import Shard

_MEMORY = "memory"


class SharedMemoryStrategy(Strategy):
    """The base of strategies without a server: workers on memory that all ranks share.

    Rank 0 creates two files in the run's folder, which all ranks map: a ``WorkQueue``, and memory
    for the parameters.  The next worker that asks gets the next shard.  A worker that dies costs
    the shards it holds: the one it trains on and those that are prefetched.

    In its ``setup`` a subclass calls ``open``, and ``enter`` when it is ready.

    Args:
        timeout: seconds in which some worker must make progress.
        log: called with every read and update of this worker.
    """

    config: WorkerConfig
    queue: WorkQueue
    path: Path
    """The file of the parameters, which is there as long as rank 0 is."""
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
        self.config = replica.worker_config(self._timeout)
        self.path = self.config.path("w")
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

    @contextlib.contextmanager
    def rehearsal(self) -> Iterator[None]:
        """Count no shard, and in the end no update."""
        with self.queue.rehearsal():
            yield

    def log_access(self, *, is_write: bool, version: int) -> None:
        """Log a read or an update of this worker."""
        self._log(ParameterAccess(rank=self._replica.rank, is_write=is_write, version=version))

    def num_shards_done(self) -> int | None:
        """Return how many updates there have been: one for each shard."""
        return self.queue.num_updates

    def lost_shards(self) -> Sequence[Shard]:
        """Return, on rank 0, the shards of workers that died."""
        if self._replica.rank != 0:
            return ()
        return [self._replica.shard(number) for number in self.queue.lost_shards()]

    def close(self) -> None:
        """Report a failure unless this worker has finished; remove the files."""
        self._opened.close()

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


@final
class Hogwild(SharedMemoryStrategy):
    """Asynchronous SGD on shared memory.

    Args:
        momentum: of the default optimizer, which has it already: ``RunSpec.used_momentum``.
        timeout: seconds in which some worker must make progress.
        log: called with every read and update of this worker.
    """

    def __init__(
        self,
        *,
        momentum: float | None = None,
        timeout: float = 60.0,
        log: AccessLog = ignore_access,
    ) -> None:
        super().__init__(timeout=timeout, log=log)

    def plan(self, state: RankState) -> Plan:
        """Every rank trains.

        Raises:
            UserError: the ranks are on GPUs.
        """
        if not state.device.startswith("cpu"):
            raise UserError(
                "hogwild needs ranks on CPUs, whose memory processes can share: "
                "%ddp_start --device cpu, or compare async."
            )
        return super().plan(state)

    def setup(self, replica: Replica) -> None:
        """Move the parameters to shared memory and wait for all; takes part: as in ``open``."""
        self.open(replica, refusal="hogwild needs all ranks on one host; compare async.")
        self._num_bytes = num_bytes(replica.parameters)
        for tensor, parameter in zip(self.copies[0].tensors, replica.parameters, strict=True):
            parameter.data = tensor
        self._make_step = ScaledStep(replica.optimizer(replica.parameters))
        self.enter()

    def step(self, batch: Batch) -> StepReport:
        """Train on one shard, on parameters that others change meanwhile."""
        self.queue.check()
        version_read = self.queue.num_updates
        self.log_access(is_write=False, version=version_read)
        # forward, backward
        loss = self._replica.compute_gradients(batch)
        # agree: with no other rank
        # update: in the memory of all, while others do the same
        self._replica.timer.begin("optimizer")
        self._make_step(batch.weight)
        version = self.queue.count_update()
        self.queue.finish_shard()
        self.log_access(is_write=True, version=version)
        staleness = version - 1 - version_read
        return batch.report(loss, staleness=staleness, num_bytes_sent=self._num_bytes)

    def memory(self) -> Memory:
        """The one copy of the parameters, which all ranks share, and its own optimizer's state."""
        return Memory.of(self._replica.model.parameters(), *self._replica.optimizers)

    def finish(self) -> nn.Module:
        """Wait until all are done, and copy the parameters; takes part: every living rank."""
        self.queue.leave()
        for parameter in self._replica.parameters:
            parameter.data = parameter.data.clone()
        return self._replica.model
