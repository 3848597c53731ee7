"""The interface of a strategy: ``setup(worker)``, ``step(batch)`` and ``finish()`` (ranks).

Only ``step`` has no default. By default, every rank trains a copy of the model on its slice of
every global batch. A strategy returns numbers, and never prints, measures or publishes. A user's
class needs no base class: see the example in ``own.py``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from ddpnb.protocol.messages import Memory, RankState
from ddpnb.rank.collectives.flat import num_bytes
from ddpnb.rank.servers.queue import WorkQueue
from ddpnb.rank.tasks.batches import Shard, every_step, tensors_of
from ddpnb.rank.worker import Batch, Worker

State = dict[str, Any]
"""The ``state_dict`` of a model."""


class Strategy(ABC):
    """A way to train a model on several workers.

    The constructor's keyword arguments are the options that ``catalogue.STRATEGIES`` lists.
    """

    worker: Worker
    """The worker that ``setup`` received."""
    optimizer: torch.optim.Optimizer
    """The optimizer of this rank's parameters. ``setup`` creates it."""
    queue: WorkQueue | None = None
    """The work queue on rank 0 that hands out the shards of an asynchronous run."""

    def plan(self, state: RankState) -> Plan:
        """Return which ranks take part. By default, all ranks train in lockstep."""
        return Plan(num_ranks=state.world_size, num_workers=state.world_size, synchronous=True)

    def setup(self, worker: Worker) -> None:
        """Prepare the training. Every rank of the plan takes part.

        By default, ``setup`` only creates the optimizer. All ranks already have the same weights.
        """
        self.worker = worker
        self.optimizer = worker.optimizer(worker.parameters)

    def shards(self) -> Iterator[Shard]:
        """Yield the shards that this worker trains on, one for each step."""
        worker = self.worker
        return every_step(worker.num_steps, part=worker.rank, num_parts=worker.num_parts)

    @abstractmethod
    def step(self, batch: Batch) -> Tensor:
        """Train on one batch. Return the mean loss before the update: shape (), detached."""

    def finish(self) -> nn.Module:
        """Return the trained model without wrappers. Every rank of the plan takes part.

        All ranks return the same weights. Running statistics such as BatchNorm's differ between
        ranks. The statistics of rank 0 are used.
        """
        return self.worker.model

    def snapshot(self) -> State:
        """Return the current state of the model, not copied. Every rank takes part.

        In an asynchronous run, only rank 0 takes a snapshot, while the other workers train. Rank 0
        returns the parameters that it read after its latest update.
        """
        state: State = self.worker.model.state_dict()
        return state

    def memory(self) -> Memory:
        """Return the memory that this rank uses at the end of training, before ``finish``."""
        worker, optimizers = self.worker, self.worker.optimizers
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        held = {*worker.model.parameters(), *(each for group in groups for each in group["params"])}
        states = [state for optimizer in optimizers for state in optimizer.state.values()]
        return Memory(
            parameters=num_bytes(held),
            gradients=num_bytes(each.grad for each in held if each.grad is not None),
            optimizer=num_bytes(tensors_of(states)),
            activations=worker.activations.num_bytes,
        )

    @cached_property
    def opened(self) -> ExitStack:
        """Threads, files and sockets that ``close`` releases. Most strategies open none."""
        return ExitStack()

    def close(self) -> None:
        """Release threads, files and sockets. May be called twice, and after any failure."""
        self.opened.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The ranks that take part, and how they train. The plan is known before ``setup``."""

    num_ranks: int
    """The first ``num_ranks`` ranks of the group take part."""
    num_workers: int
    """Number of ranks or replicas that train."""
    synchronous: bool
    """True if all workers make step k together."""
    num_steps_ahead: int | None = 0
    """Steps that one synchronous worker may be ahead of another. 0: each worker waits for all
    others. None: workers never wait, so each worker stops by itself."""
    updates_per_batch: int = 1
    """Updates that one optimizer makes for each global batch."""
    averages_weights: bool = False
    """True if the trained model is the mean of all ranks' models. No worker ran a forward pass with
    these weights, so ddpnb estimates BatchNorm's statistics again."""
    finish_is_timed: bool = True
    """True if ``finish`` is a part of the training. False if ``finish`` only collects the model."""
    sees_exposed: bool = True
    """True if ddpnb can separate exposed communication from the rest of a step."""
    survives_deaths: bool = False
    """True if the others continue after a rank other than 0 dies. The dead rank may join again."""
    num_devices: int | None = None
    """Shares of the CPU on which the workers compute. None: one share for each worker."""
    is_emulated: bool = False
    """True if this machine cannot run the strategy, so ddpnb emulates the strategy."""
    notes: tuple[str, ...] = ()
