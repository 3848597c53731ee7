"""What a strategy is: ``setup(worker)``, ``step(batch)``, ``finish()`` (ranks).

Everything but ``step`` has a default: every rank trains a copy of the model on its slice of every
global batch.  A strategy returns numbers; it never prints, measures or publishes.  A user's class
needs no base class: ``own.py`` has an example.
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
"""A model's ``state_dict``."""


class Strategy(ABC):
    """One way of training a model on several workers.

    The constructor takes the options that ``catalogue.STRATEGIES`` lists, by name.
    """

    worker: Worker
    """What ``setup`` got."""
    optimizer: torch.optim.Optimizer
    """Of this rank's parameters, from ``setup``."""
    queue: WorkQueue | None = None
    """On rank 0: who hands out the shards of an asynchronous run, and knows which are done."""

    def plan(self, state: RankState) -> Plan:
        """Return which ranks take part: by default all, in lockstep."""
        return Plan(num_ranks=state.world_size, num_workers=state.world_size, synchronous=True)

    def setup(self, worker: Worker) -> None:
        """Get ready to train; takes part: every rank of the plan.

        By default this rank's optimizer is made; all ranks have the same weights already.
        """
        self.worker = worker
        self.optimizer = worker.optimizer(worker.parameters)

    def shards(self) -> Iterator[Shard]:
        """Yield the shards that this worker trains on, each after the step before it."""
        worker = self.worker
        return every_step(worker.num_steps, part=worker.rank, num_parts=worker.num_parts)

    @abstractmethod
    def step(self, batch: Batch) -> Tensor:
        """Train on one batch; return its mean loss before the update: shape (), detached."""

    def finish(self) -> nn.Module:
        """Return the trained plain model; takes part: every rank of the plan.

        All of them return the same weights.  Running statistics such as BatchNorm's differ between
        ranks; rank 0's count.
        """
        return self.worker.model

    def snapshot(self) -> State:
        """Return the state of the model as it is now, not copied; takes part: every rank.

        Of asynchronous workers only rank 0 is asked, while the others train on: it has what it
        read last, after its own latest update.
        """
        state: State = self.worker.model.state_dict()
        return state

    def memory(self) -> Memory:
        """Return what this rank holds when training ends, before ``finish``."""
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
        """Threads, files and sockets that ``close`` releases; most strategies have none."""
        return ExitStack()

    def close(self) -> None:
        """Release what is open; may be called twice, and after any failure."""
        self.opened.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Which ranks take part and how, known before anything is set up."""

    num_ranks: int
    """The first ones of the group take part."""
    num_workers: int
    """Ranks or replicas that train."""
    synchronous: bool
    """Whether all workers make step k together."""
    num_steps_ahead: int | None = 0
    """Steps that one synchronous worker may be ahead of another: 0 where each waits for all; None
    where none ever waits, so that each stops for itself."""
    updates_per_batch: int = 1
    """Updates by one optimizer for each global batch."""
    averages_weights: bool = False
    """Whether the trained model is the mean of all ranks' models.  No forward pass of any worker
    was made with these weights, so BatchNorm's statistics are estimated anew."""
    finish_is_timed: bool = True
    """Whether ``finish`` is a part of the training; otherwise it only collects the model."""
    sees_exposed: bool = True
    """Whether communication that holds up the computing can be distinguished from the rest."""
    survives_deaths: bool = False
    """Whether the others train on where a rank other than 0 dies, and it may join anew."""
    num_devices: int | None = None
    """Shares of the CPU that they compute on; None: one for each worker."""
    is_emulated: bool = False
    """Whether the strategy cannot run here and is emulated; a note says how."""
    notes: tuple[str, ...] = ()
