"""Gossip: each rank averages its weights with one neighbour at a time (every rank).

    worker i:  g    =   g_i(w_old)                     w_old: w_i as i has read it
               w_i, w_j  <-  (w_i + w_j) / 2           j: any other, chosen at random
               w_i  <-  w_i - lr * g

with g_i the gradient of the mean loss over one shard.  The run's seed, the worker and its step
decide which j it is.  All weights lie in memory that the ranks share.  Worker i averages under the
locks of both, whatever j is doing, and makes its step before it releases its own lock.  Workers
wait for nothing but locks, and a faster worker takes more shards.  Others may have averaged with
w_i since it was read as w_old: staleness counts the updates by others in between.

Reference: Lian, Zhang, Zhang and Liu, "Asynchronous Decentralized Parallel Stochastic Gradient
Descent", ICML 2018 (AD-PSGD), algorithm 1; the graph is complete.  Each worker has its own
optimizer, momentum included, which the paper leaves out.

Messages per step: none.  Bytes sent per step and rank: S, the bytes of all parameters, for the
mean that is written into the neighbour's memory (as many are read there); 0 by a single rank.

A worker that dies costs the shards it holds.  It may join anew, with the mean of the others'
weights.  All end with the mean of all living workers' weights.

With ``together=on``, and on GPUs, which share no such memory, the ranks meet in pairs step by
step, and each waits for its partner:

    w_i'  =   w_i - lr * g_i(w_i)          on each rank i
    w_i  <-   (w_i' + w_j') / 2            j: the partner of i in this step

The ranks form a ring, the same for every seed; in step k ranks k, k + 2, ... each meet the next
one, so that each rank meets its left and its right neighbour in turn.  Of an odd number one rests,
another in each step.  Weights agree only nearly; their mean moves as in synchronous SGD.

Reference: Lian et al., "Can Decentralized Algorithms Outperform Centralized Algorithms?",
NeurIPS 2017 (D-PSGD); here the pairs change from step to step.

Messages per step and rank: all weights to the partner, and its own back (for each dtype); at
the end one all-reduce of all weights.  Bytes sent per step and rank: S; 0 by a rank that rests.
"""

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from random import Random
from typing import final

import torch
import torch.distributed as dist
from torch import nn

from ddpnb.protocol.messages import RankState
from ddpnb.rank.comm.flat_buffers import FlatBuffer, num_bytes
from ddpnb.rank.comm.link import all_reduce
from ddpnb.rank.comm.parameter_store import AccessLog, ignore_access
from ddpnb.rank.comm.rendezvous import RunOverError
from ddpnb.rank.comm.work_queue import SharedWeights
from ddpnb.rank.strategies.base import Plan, State, Strategy, SynchronousStrategy
from ddpnb.rank.strategies.hogwild import SharedMemoryStrategy
from ddpnb.rank.strategies.replica import Batch, Memory, Replica, StepReport

_PAIRS_NOTE = "On GPUs gossip meets in pairs, step by step: they share no memory (together=on)."


@final
class Gossip(SharedMemoryStrategy):
    """Averages with one neighbour at a time, whenever a gradient is ready.

    Args:
        together: whether ranks meet in pairs even where they could share memory.
        timeout: seconds in which some worker must make progress.
        log: called with every read and update of this worker.
    """

    averages_weights = True

    def __init__(
        self, *, together: bool = False, timeout: float = 60.0, log: AccessLog = ignore_access
    ) -> None:
        super().__init__(timeout=timeout, log=log)
        self._together = together

    def on(self, device: str) -> Strategy:
        """Return gossip in pairs where that is asked for, and on GPUs."""
        if self._together or not device.startswith("cpu"):
            return PairwiseGossip(() if self._together else (_PAIRS_NOTE,))
        return self

    def setup(self, replica: Replica) -> None:
        """Put all weights into shared memory and wait for all; takes part: as in ``open``.

        A rank that joins begins with the mean of the living.
        """
        self._num_steps = replica.first_step
        self._has_finished = False
        self.open(
            replica,
            num_copies=replica.world_size + 1,  # the last one for the final mean
            refusal="gossip needs all ranks on one host; compare gossip:together=on.",
        )
        weights = SharedWeights(self.path, self.copies, self.config)
        self._weights = self._opened.enter_context(contextlib.closing(weights))
        self._mine = [nn.Parameter(tensor) for tensor in self.copies[replica.rank].tensors]
        if replica.joins:
            mean = self._mean()
            with weights.locked(replica.rank):
                _copy(mean, self._mine)
        self._optimizer = replica.optimizer(self._mine)
        self.enter()

    def step(self, batch: Batch) -> StepReport:
        """Train on one shard; average with a random worker, whatever it is doing."""
        replica, queue = self._replica, self.queue
        queue.check()
        # read: the weights that the gradient is computed at, under their lock
        replica.timer.begin("communication")
        version_read = queue.num_updates
        with self._weights.locked(replica.rank):
            _copy(self._mine, replica.parameters)
        self.log_access(is_write=False, version=version_read)
        # forward, backward
        loss = replica.compute_gradients(batch)
        queue.check()
        # agree: takes part: this worker alone, in its own memory and the peer's
        replica.timer.begin("communication")
        peer = choose_peer(replica.seed, replica.rank, self._num_steps, queue.living())
        if peer is not None:
            replica.link.swap(replica.rank, peer, num_bytes(replica.parameters))
        with self._weights.averaged(replica.rank, peer):
            for mine, parameter in zip(self._mine, replica.parameters, strict=True):
                mine.grad = parameter.grad
            replica.update(self._optimizer)
            for mine in self._mine:
                mine.grad = None
            version = queue.count_update()
        self.log_access(is_write=True, version=version)
        queue.finish_shard()
        self._num_steps += 1
        staleness = version - 1 - version_read
        num_sent = 0 if peer is None else num_bytes(replica.parameters)
        return batch.report(loss, staleness=staleness, num_bytes_sent=num_sent)

    def memory(self) -> Memory:
        """The copy that is trained on, the weights that others see, and the optimizer's state."""
        return Memory.of([*self._replica.model.parameters(), *self._mine], self._optimizer)

    def finish(self) -> nn.Module:
        """Wait until all are done, and take the mean; takes part: every living rank."""
        final_mean = self.copies[-1].tensors
        self.queue.leave(lambda: _copy(self._mean(), final_mean))
        size, num_ranks = num_bytes(self._replica.parameters), self._replica.world_size
        with self._replica.link.lasting(all_reduce(size, num_ranks)):  # what a mean of all takes
            pass
        _copy(final_mean, self._replica.parameters)
        self._has_finished = True
        return self._replica.model

    def save(self, replica: Replica) -> State:
        """Return the current mean of all weights, and rank 0's optimizer."""
        if not self._has_finished:  # the next step reads this rank's own weights anew
            _copy(self._mean(), replica.parameters)
        return super().save(replica)

    def _mean(self) -> list[torch.Tensor]:
        """Return the mean of all living workers' weights."""
        living = self.queue.living()
        if not living:
            raise RunOverError
        return self._weights.mean(living)


def choose_peer(seed: int, rank: int, step: int, living: Sequence[int]) -> int | None:
    """Return the rank to average with: any other of the living, all equally likely.

    The choice depends on the arguments alone.  None: there is no other.
    """
    others = [other for other in living if other != rank]
    return Random(f"{seed} {rank} {step}").choice(others) if others else None


@torch.no_grad()
def _copy(values: Iterable[torch.Tensor], into: Iterable[torch.Tensor]) -> None:
    for value, tensor in zip(values, into, strict=True):
        tensor.copy_(value)


@final
class PairwiseGossip(SynchronousStrategy):
    """Averages in pairs that change from step to step: ``gossip:together=on``.

    Args:
        notes: of its plan.
    """

    averages_weights = True
    is_mean = True

    def __init__(self, notes: tuple[str, ...]) -> None:
        self._notes = notes

    def plan(self, state: RankState) -> Plan:
        """Every rank; as the waits pass on around the ring, ranks are up to N steps apart."""
        return replace(super().plan(state), num_steps_ahead=state.world_size, notes=self._notes)

    def setup(self, replica: Replica) -> None:
        """Make this rank's own optimizer, and buffers for both ranks' weights."""
        super().setup(replica)
        self._mine = FlatBuffer(replica.parameters)
        self._theirs = FlatBuffer(replica.parameters)
        self._num_steps = replica.first_step

    def step(self, batch: Batch) -> StepReport:
        """Train on this rank's part of one global batch; takes part: this rank and its partner."""
        replica = self._replica
        # forward, backward, update: each rank alone
        loss = replica.compute_gradients(batch)
        replica.update(self._optimizer)
        # agree: takes part: this rank and its partner
        partner = partner_in_step(self._num_steps, rank=replica.rank, world_size=replica.world_size)
        num_sent = 0 if partner is None else self._average_with(partner)
        self._num_steps += 1
        return batch.report(loss, num_bytes_sent=num_sent)

    def finish(self) -> nn.Module:
        """Average over all; takes part: every rank."""
        self._mine.average(self._replica.parameters)
        return self._replica.model

    def _average_with(self, partner: int) -> int:
        """Take the mean of both ranks' weights; return the bytes sent."""
        self._replica.timer.begin("communication")
        self._mine.gather(self._replica.parameters)
        exchange = [
            dist.P2POp(operation, buffer, partner)
            for operation, flat in ((dist.isend, self._mine), (dist.irecv, self._theirs))
            for buffer in flat.buffers
        ]
        for work in dist.batch_isend_irecv(exchange):
            work.wait()
        for mine, theirs in zip(self._mine.buffers, self._theirs.buffers, strict=True):
            torch.add(mine, theirs, out=mine).div_(2)
        self._mine.scatter(self._replica.parameters)
        return self._mine.num_bytes


def partner_in_step(step: int, *, rank: int, world_size: int) -> int | None:
    """Return the rank that a rank meets in a step; None where it rests."""
    position = (rank - step) % world_size
    other = position ^ 1
    return None if other >= world_size else (other + step) % world_size
