"""What does one worker of ``gossip`` do, who waits for nobody?  (Every rank, of one host, on CPUs.)

Its weights lie in memory that all ranks share, where others average theirs with them at any
time.  It trains on a copy, as they were at one moment; its optimizer's step is made in the
memory itself.  ``gossip`` says what is computed.
"""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from random import Random
from typing import final

import torch
import torch.distributed as dist
from torch import nn

from ddpnb.protocol.messages import RankState
from ddpnb.rank.comm.flat_buffers import FlatBuffer, num_bytes
from ddpnb.rank.comm.messages import RunOverError
from ddpnb.rank.comm.parameter_store import Log, no_log
from ddpnb.rank.comm.shared_weights import Weights
from ddpnb.rank.strategies.base import (
    Batch,
    Memory,
    Plan,
    Replica,
    State,
    StepReport,
    Strategy,
    SynchronousStrategy,
)
from ddpnb.rank.strategies.shared_memory_workers import SharedMemoryStrategy
from ddpnb.rank.tasks.batches import Shard


@final
class Pairs(SynchronousStrategy):
    """Averages in pairs that change from step to step: ``gossip:together=on``."""

    def plan(self, state: RankState) -> Plan:
        """Every rank; one is ahead of another by as many steps as it takes news to come by."""
        return replace(super().plan(state), num_prefetched=state.world_size)

    def setup(self, replica: Replica) -> None:
        """Make this rank's own optimizer, and room for both ranks' weights."""
        super().setup(replica)
        self._mine = FlatBuffer(replica.parameters)
        self._theirs = FlatBuffer(replica.parameters)
        self._num_steps = replica.first_step

    def step(self, batch: Batch) -> StepReport:
        """Train on this rank's part of one global batch; takes part: one neighbour."""
        replica = self._replica
        # forward, backward, update: each rank alone
        loss = replica.compute_gradients(batch)
        replica.update(self._optimizer)
        # agree: takes part: this rank and the one that it meets
        neighbour = met_in(self._num_steps, rank=replica.rank, world_size=replica.world_size)
        num_sent = 0 if neighbour is None else self._average_with(neighbour)
        self._num_steps += 1
        return StepReport(loss=loss, num_samples=batch.num_samples, num_bytes_sent=num_sent)

    def finish(self) -> nn.Module:
        """Average over all; takes part: every rank."""
        self._mine.average(self._replica.parameters)
        return self._replica.model

    def _average_with(self, neighbour: int) -> int:
        """Take the mean of both ranks' weights; return the bytes sent."""
        self._replica.timer.begin("communication")
        self._mine.gather(self._replica.parameters)
        both = [
            dist.P2POp(operation, buffer, neighbour)
            for operation, flat in ((dist.isend, self._mine), (dist.irecv, self._theirs))
            for buffer in flat.buffers
        ]
        for work in dist.batch_isend_irecv(both):
            work.wait()
        for mine, theirs in zip(self._mine.buffers, self._theirs.buffers, strict=True):
            torch.add(mine, theirs, out=mine).div_(2)
        self._mine.scatter(self._replica.parameters)
        return self._mine.num_bytes


def met_in(step: int, *, rank: int, world_size: int) -> int | None:
    """Return the rank that a rank meets in a step; None where it rests."""
    place = (rank - step) % world_size
    other = place ^ 1
    return None if other >= world_size else (other + step) % world_size


@final
class Neighbours(SharedMemoryStrategy):
    """Averages with one neighbour at a time, whenever a gradient is ready."""

    def setup(self, replica: Replica) -> None:
        """Put all weights into shared memory and wait for all; takes part: every rank.

        A rank that joins takes part alone, and begins with the mean of the living.

        Raises:
            UserError: the ranks share no memory.
            RunOverError: there is nothing to join.
        """
        self._num_steps = 0
        self._has_ended = False
        self.open(
            replica,
            num_copies=replica.world_size + 1,  # the last one for what all end with
            elsewhere="gossip needs all ranks on one host; compare gossip:together=on.",
        )
        weights = Weights(self.path, self.copies, self._timeout, replica.cancellation)
        self._weights = self._opened.enter_context(contextlib.closing(weights))
        self._mine = [nn.Parameter(slot) for slot in self.copies[replica.rank].tensors]
        if replica.joins:
            mean = self._mean()
            with weights.locked(replica.rank):
                _copy(mean, self._mine)
        self._optimizer = replica.optimizer(self._mine)
        self.enter()

    def step(self, batch: Batch) -> StepReport:
        """Train on one share; average with whoever is chosen, at whatever it is."""
        replica, queue = self._replica, self.queue
        queue.check()
        # read: the weights that the gradient is of, while nobody changes them
        replica.timer.begin("communication")
        read = queue.num_updates
        with self._weights.locked(replica.rank):
            _copy(self._mine, replica.parameters)
        self.note(is_write=False, version=read)
        # forward, backward
        loss = replica.compute_gradients(batch)
        queue.check()
        # agree: takes part: this worker alone, in its own memory and the neighbour's
        replica.timer.begin("communication")
        neighbour = chosen_by(replica.rank, self._num_steps, queue.living())
        with self._weights.averaged(replica.rank, neighbour):
            self._update()
            version = queue.count_update()
        self.note(is_write=True, version=version)
        queue.settle()
        self._num_steps += 1
        return StepReport(
            loss=loss,
            num_samples=batch.num_samples,
            staleness=version - 1 - read,
            num_bytes_sent=0 if neighbour is None else num_bytes(replica.parameters),
        )

    def memory(self) -> Memory:
        """The copy that is trained on, the weights that others see, and the optimizer's state."""
        return Memory.of([*self._replica.model.parameters(), *self._mine], self._optimizer)

    def finish(self) -> nn.Module:
        """Wait until all are done, and take the mean; takes part: every living rank."""
        shared = self.copies[-1].tensors
        self.queue.part(lambda: _copy(self._mean(), shared))
        _copy(shared, self._replica.parameters)
        self._has_ended = True
        return self._replica.model

    def save(self, replica: Replica) -> State:
        """Return the mean of all weights now, and rank 0's optimizer."""
        if not self._has_ended:  # the next step reads its own weights anew
            _copy(self._mean(), replica.parameters)
        return super().save(replica)

    def _update(self) -> None:
        """Make the optimizer's step on the weights in shared memory."""
        for slot, parameter in zip(self._mine, self._replica.parameters, strict=True):
            slot.grad = parameter.grad
        self._replica.update(self._optimizer)
        for slot in self._mine:
            slot.grad = None

    def _mean(self) -> list[torch.Tensor]:
        """Return the mean of the weights of all who live."""
        living = self.queue.living()
        if not living:
            raise RunOverError
        return self._weights.mean(living)


def chosen_by(rank: int, step: int, living: Sequence[int]) -> int | None:
    """Return whom a rank averages with in its step: of the living any other, all as likely.

    The same at any time, whatever the run's seed; None where there is no other.
    """
    others = [other for other in living if other != rank]
    return Random(f"{rank} {step}").choice(others) if others else None


@torch.no_grad()
def _copy(values: Iterable[torch.Tensor], into: Iterable[torch.Tensor]) -> None:
    for value, tensor in zip(values, into, strict=True):
        tensor.copy_(value)


_TOGETHER_NOTE = "On GPUs gossip meets in pairs, step by step: they share no memory (together=on)."


@final
class Gossip(Strategy):
    """Gossip in the way that the ranks allow.

    Args:
        together: whether ranks meet in pairs, step by step, also where they could share memory.
        timeout: seconds in which at least one worker must make progress, where none waits.
        log: is told of every read and update of this worker, where none waits.
    """

    def __init__(self, *, together: bool = False, timeout: float = 60.0, log: Log = no_log) -> None:
        self._way: Strategy = Pairs() if together else Neighbours(timeout=timeout, log=log)

    def plan(self, state: RankState) -> Plan:
        """Every rank trains."""
        if state.device.startswith("cpu") or isinstance(self._way, Pairs):
            return self._way.plan(state)
        return replace(Pairs().plan(state), notes=(_TOGETHER_NOTE,))

    def setup(self, replica: Replica) -> None:
        """Get ready in that way; takes part: every rank, or the one that joins.

        Raises:
            UserError: the ranks share no memory.
            RunOverError: there is nothing to join.
        """
        if replica.device.type != "cpu":
            self._way = Pairs()
        self._way.setup(replica)

    def shards(self) -> Iterator[Shard]:
        """Whatever share is next; together: this rank's part of every global batch."""
        return self._way.shards()

    def step(self, batch: Batch) -> StepReport:
        """Train on one share; takes part: this rank, and together its neighbour."""
        return self._way.step(batch)

    def memory(self) -> Memory:
        """What that way holds."""
        return self._way.memory()

    def finish(self) -> nn.Module:
        """Take the mean; takes part: every living rank."""
        return self._way.finish()

    def save(self, replica: Replica) -> State:
        """Return what that way needs."""
        return self._way.save(replica)

    def load(self, replica: Replica, state: State) -> None:
        """Go on from there."""
        self._way.load(replica, state)

    def lost_shards(self) -> Sequence[Shard]:
        """Return, on rank 0, what was handed out to workers that died; together: nothing."""
        return self._way.lost_shards()

    def close(self) -> None:
        """Close it."""
        self._way.close()
