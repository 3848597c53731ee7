"""Elastic averaging: each worker and a centre draw each other now and then (every rank).

    worker i:  g    =   g_i(w_i)
               w_i, c  <-  w_i - a * (w_i - c),  c + a * (w_i - c)      in every T-th step
               w_i  <-  w_i - lr * g

with g_i the gradient of the mean loss over one shard, c the centre, and a = b / N the moving rate
of N workers.  Each worker trains on weights of its own, which may explore; the elastic force
a * (w_i - c) keeps them together.  The centre lies in memory that the ranks share.  A worker moves
it under a lock, whatever the others do: it waits for nothing but this lock, and a faster one takes
more shards.  No gradient is stale: it is applied to the weights that it was computed at.  A single
worker has no centre.

In the end each worker that has trained moves the centre once more; the centre is the trained model.

Reference: Zhang, Choromanska and LeCun, "Deep Learning with Elastic Averaging SGD", NeurIPS 2015,
algorithm 1 (asynchronous EASGD), where b = 0.9.  Each worker has its own optimizer; with Nesterov
momentum it is their EAMSGD, algorithm 2.

Messages per step: none.  Bytes sent per step and rank: S, the bytes of all parameters, in each T-th
step, for what is written into the centre (as many are read there); 0 in the others, and by a
single worker.

A worker that dies costs the shards it holds, and what it has learnt since it last moved the centre.
It may join anew, from the centre.
"""

import contextlib
from typing import Any, final

import torch
from torch import nn

from ddpnb.rank.comm.flat_buffers import num_bytes
from ddpnb.rank.comm.work_queue import SharedWeights
from ddpnb.rank.strategies.base import State
from ddpnb.rank.strategies.hogwild import SharedMemoryStrategy
from ddpnb.rank.strategies.replica import Batch, Memory, Replica, StepReport

_CENTRE = 0
"""The number of the centre's copy, and of its lock."""
_HOLDER = 0
"""The rank that the others reach the centre through, over an emulated link."""


@final
class Easgd(SharedMemoryStrategy):
    """Asynchronous elastic averaging SGD.

    Args:
        every: T, the steps of a worker from one move of the centre to the next.
        beta: b, the moving rate of all workers together.
        timeout: seconds in which some worker must make progress.
    """

    averages_weights = True

    def __init__(self, *, every: int = 8, beta: float = 0.9, timeout: float = 60.0) -> None:
        super().__init__(timeout=timeout)
        self._every = every
        self._beta = beta

    def setup(self, replica: Replica) -> None:
        """Put the centre into shared memory and wait for all; takes part: as in ``open``."""
        self._num_steps = replica.first_step
        self._has_learnt = False
        self._rate = self._beta / replica.world_size if replica.world_size > 1 else 0.0
        self.open(replica, refusal="easgd needs all ranks on one host; compare local-sgd.")
        weights = SharedWeights(self.path, self.copies, self.config)
        self._weights = self._opened.enter_context(contextlib.closing(weights))
        self._centre = self.copies[_CENTRE].tensors
        if replica.joins:
            self._take_centre()
        self._optimizer = replica.optimizer(replica.parameters)
        self.enter()

    def step(self, batch: Batch) -> StepReport:
        """Train on one shard; in every T-th step move and be moved."""
        replica, queue = self._replica, self.queue
        queue.check()
        # forward, backward
        loss = replica.compute_gradients(batch)
        # agree: takes part: this worker alone, in the centre's memory
        self._num_steps += 1
        is_due = self._num_steps % self._every == 0
        num_sent = self._move() if is_due else 0
        # update: its own weights
        replica.update(self._optimizer)
        self._has_learnt = True
        queue.count_update()
        queue.finish_shard()
        return batch.report(loss, num_bytes_sent=num_sent)

    def memory(self) -> Memory:
        """This worker's weights and its optimizer's state; on rank 0 the centre too."""
        centre = self._centre if self._replica.rank == 0 else []
        return Memory.of([*self._replica.model.parameters(), *centre], self._optimizer)

    def finish(self) -> nn.Module:
        """Move the centre once more, wait until all have, and take it; takes part: every rank."""
        if self._rate > 0:
            if self._has_learnt:
                self._move()
            self.queue.leave()
            self._take_centre()
        else:
            self.queue.leave()
        return self._replica.model

    def save(self, replica: Replica) -> State:
        """Return the centre in place of rank 0's weights, and rank 0's optimizer."""
        state = super().save(replica)
        if self._rate == 0:
            return state
        with self._weights.locked(_CENTRE):
            held = {
                id(parameter): centre.clone()
                for parameter, centre in zip(replica.parameters, self._centre, strict=True)
            }
        model: dict[str, Any] = state["model"]
        for name, parameter in replica.model.named_parameters(remove_duplicate=False):
            model[name] = held.get(id(parameter), model[name])
        return state

    @torch.no_grad()
    def _move(self) -> int:
        """Draw this worker and the centre to each other; return the bytes written."""
        replica = self._replica
        if self._rate == 0:
            return 0
        replica.timer.begin("communication")
        if replica.rank != _HOLDER:
            replica.link.swap(replica.rank, _HOLDER, num_bytes(replica.parameters))
        with self._weights.locked(_CENTRE):
            for mine, centre in zip(replica.parameters, self._centre, strict=True):
                force = self._rate * (mine.to(centre.device) - centre)
                centre.add_(force)
                mine.sub_(force.to(mine.device))
        return num_bytes(replica.parameters)

    @torch.no_grad()
    def _take_centre(self) -> None:
        replica = self._replica
        if replica.rank != _HOLDER:
            replica.link.message(_HOLDER, replica.rank, num_bytes(replica.parameters))
        with self._weights.locked(_CENTRE):
            for mine, centre in zip(replica.parameters, self._centre, strict=True):
                mine.copy_(centre)
