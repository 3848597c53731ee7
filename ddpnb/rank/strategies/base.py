"""The interface of a strategy: ``setup(worker)``, ``step(batch)`` and ``finish()``.

A strategy must define ``step``. By default, every rank trains a copy of the model on its slice of
every global batch. A strategy only returns values. A strategy does not print, measure time or send
results to the notebook. A user's strategy needs no base class (see the example in ``own.py``).
Runs on the ranks.
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

    The constructor's keyword arguments are the options that ``catalogue.STRATEGIES`` lists. In this
    class, "every rank" means every rank of the strategy's plan.
    """

    worker: Worker
    """This rank's worker, stored by ``setup``."""
    optimizer: torch.optim.Optimizer
    """The optimizer of this rank's parameters. ``setup`` creates it."""
    queue: WorkQueue | None = None
    """The work queue on rank 0 in an asynchronous run. Otherwise None."""
    thawed: tuple[str, ...] = ()
    """Parameters that a step has unfrozen, but that the strategy does not train (only ``fsdp``)."""

    def plan(self, state: RankState) -> Plan:
        """Return which ranks train, and how they train. By default, all ranks train in lockstep."""
        return Plan(num_ranks=state.world_size, num_workers=state.world_size, synchronous=True)

    def setup(self, worker: Worker) -> None:
        """Prepare the training. Every rank takes part.

        By default, ``setup`` only creates the optimizer. All ranks already have the same weights.
        """
        self.worker = worker
        self.optimizer = worker.optimizer(worker.parameters)

    def shards(self) -> Iterator[Shard]:
        """Yield the shards that this worker trains on, one for each step."""
        worker = self.worker
        return every_step(worker.num_steps, index=worker.rank, num_shards=worker.num_shards)

    @abstractmethod
    def step(self, batch: Batch) -> Tensor:
        """Train on one batch. Return the mean loss before the update, detached, with shape ()."""

    def finish(self) -> nn.Module:
        """Return the trained model without wrappers. Every rank takes part.

        All ranks return the same weights. Buffers, such as BatchNorm's running statistics, may
        differ between ranks. ddpnb uses the buffers of rank 0.
        """
        return self.worker.model

    def snapshot(self) -> State:
        """Return the model's current state without copying the tensors. Every rank takes part.

        In an asynchronous run, only rank 0 takes a snapshot, while the other workers train. The
        snapshot contains the parameters that rank 0 read after its latest update.
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
        """The threads, files and sockets that ``close`` releases (in most strategies, none)."""
        return ExitStack()

    def close(self) -> None:
        """Release threads, files and sockets. Repeated calls and calls after errors are safe."""
        self.opened.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The ranks that take part in a run, and how these ranks train."""

    num_ranks: int
    """Number of ranks that take part, counted from rank 0."""
    num_workers: int
    """Number of ranks or replicas that train."""
    synchronous: bool
    """True if all workers take each step together."""
    in_lockstep: bool = True
    """True if each step of a synchronous worker waits for all other workers."""
    stops_alone: bool = False
    """True if each worker can stop by itself, because no other worker waits for the worker."""
    updates_per_batch: int = 1
    """Number of updates that one optimizer makes for each global batch."""
    averages_weights: bool = False
    """True if the trained model is the mean of all ranks' models. No rank ran a forward pass with
    the mean weights, so ddpnb estimates BatchNorm's statistics again."""
    finish_is_timed: bool = True
    """True if ``finish`` counts as training time. False if ``finish`` only collects the model."""
    sees_exposed: bool = True
    """True if ddpnb can separate exposed communication from the rest of a step."""
    survives_deaths: bool = False
    """True if training continues when a rank other than rank 0 dies. Ranks may rejoin."""
    num_devices: int | None = None
    """Number of devices that the workers use. If None, each worker uses one device."""
    is_emulated: bool = False
    """True if ddpnb emulates the strategy because this machine cannot run it."""
    notes: tuple[str, ...] = ()
