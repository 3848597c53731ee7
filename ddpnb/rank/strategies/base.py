"""What a data-parallel strategy is: its base classes (ranks).

A strategy is asked for its ``plan``, gets a ``Replica`` in ``setup``, trains on one ``Batch`` in
each ``step``, and returns the trained model from ``finish``.  It returns numbers; it never
prints, logs or publishes.  A new one usually extends ``SynchronousStrategy`` and writes ``step``.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from ddpnb.protocol.messages import RankState
from ddpnb.rank.strategies.replica import Batch, Memory, Replica, StepReport
from ddpnb.rank.tasks.batches import Shard

State = dict[str, Any]
"""What a checkpoint keeps: tensors, numbers and texts, in dicts and lists."""


class Strategy(ABC):
    """One way of training a model on several workers.

    The constructor takes the options that ``catalogue.STRATEGIES`` lists, by name.
    """

    wraps_model: ClassVar[bool] = False
    """Whether the task's step gets a wrapper with a ``forward`` alone, and not the model."""
    needs_all_gradients: bool = False
    """Whether each parameter must have a part in each loss."""
    averages_weights: bool = False
    """Whether the trained model's weights are averages over workers: no forward pass of any
    worker was made with them, so BatchNorm's statistics are estimated anew."""
    is_mean: ClassVar[bool] = False
    """Whether the trained model is the mean of all ranks' ``snapshot``."""

    ends_in_finish: ClassVar[bool] = True
    """Whether ``finish`` is a part of the training, which is timed; otherwise it only collects the
    model for its evaluation."""
    can_rewind: ClassVar[bool] = True
    """Whether what its steps change can be put back: its attributes, ``held`` and ``rehearsal``."""

    def on(self, device: str) -> Strategy:
        """Return the strategy for such a device: this one, unless it has a variant for it."""
        return self

    @abstractmethod
    def plan(self, state: RankState) -> Plan:
        """Return which ranks take part, given this rank and its group."""

    def fewest_samples(self, num_samples: int, plan: Plan, accumulate: int) -> int:
        """Return the fewest samples that the model is called with in one step.

        Args:
            num_samples: of the global batch; at least one for each worker.
            plan: this strategy's.
            accumulate: parts that each worker splits its shard into.
        """
        shard_size = num_samples // plan.num_workers
        return shard_size // min(accumulate, shard_size)

    def check(self, replica: Replica) -> None:  # noqa: B027  most train any model
        """Refuse what this strategy cannot train, before anything trains; nothing is sent.

        Args:
            replica: a throwaway; its model has made a step.

        Raises:
            UserError: what cannot be trained, and what to do.
        """

    @abstractmethod
    def setup(self, replica: Replica) -> None:
        """Get ready to train; all ranks that take part call it together."""

    @abstractmethod
    def shards(self) -> Iterator[Shard]:
        """Yield the shards that this worker trains on, each after the step before it."""

    @abstractmethod
    def step(self, batch: Batch) -> StepReport:
        """Train on one batch."""

    def held(self) -> Iterable[object]:
        """Return what it holds besides its own attributes and its steps change: see ``Kept``."""
        return ()

    @contextlib.contextmanager
    def rehearsal(self) -> Iterator[None]:
        """Make steps in this context that leave no trace in what ranks share.

        No rank makes a step before all have entered it, nor after one has left it.
        """
        yield

    def notes(self) -> tuple[str, ...]:
        """Return notes for the results that only ``setup`` could discover."""
        return ()

    def sees_exposed(self) -> bool:
        """Return, after ``setup``, whether communication that holds up the computing is marked."""
        return True

    def memory(self) -> Memory:
        """Return what this rank holds when training ends, before ``finish``."""
        return Memory()

    @abstractmethod
    def finish(self) -> nn.Module:
        """Return the trained plain model, with the same weights on all ranks that take part.

        All of them call it together.  Running statistics such as BatchNorm's differ between
        ranks; rank 0's count.
        """

    def save(self, replica: Replica) -> State:
        """Return what this rank needs to continue from here, after any step.

        A strategy that holds more than the model and its optimizers adds it.  Of asynchronous
        workers only rank 0 saves, while the others train on.

        Args:
            replica: the one from ``setup``.
        """
        return {
            "model": replica.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in replica.optimizers],
        }

    def snapshot(self, replica: Replica) -> State:
        """Return the state of the model as it is now, not copied; called as ``save`` is."""
        model: State = self.save(replica)["model"]
        return model

    def num_shards_done(self) -> int | None:
        """Return how many shards all workers of an asynchronous run have trained on; None: unknown.

        Rank 0 alone is asked.
        """
        return None

    def load(self, replica: Replica, state: State) -> None:
        """Continue from what ``save`` returned, after ``setup``.

        A ``"model"`` in the state has also been loaded before ``setup``, so that a copy of the
        model made there is right.
        """
        replica.model.load_state_dict(state["model"])
        for mine, theirs in zip(replica.optimizers, state["optimizers"], strict=False):
            mine.load_state_dict(theirs)  # a rank may have made none

    def lost_shards(self) -> Sequence[Shard]:
        """Return, on rank 0, the shards of workers that died before they had trained on them."""
        return ()

    def close(self) -> None:  # noqa: B027  most hold none
        """Release threads, files and sockets; may be called twice, and after any failure."""


class SynchronousStrategy(Strategy):
    """Every rank trains a copy of the model on its part of every global batch, in lockstep.

    A subclass writes ``step`` and overrides what else differs.
    """

    _replica: Replica
    _optimizer: torch.optim.Optimizer

    def plan(self, state: RankState) -> Plan:
        """Every rank."""
        return Plan(num_ranks=state.world_size, num_workers=state.world_size, synchronous=True)

    def setup(self, replica: Replica) -> None:
        """Make this rank's optimizer; all ranks have the same weights already."""
        self._replica = replica
        self._optimizer = replica.optimizer(replica.parameters)

    def shards(self) -> Iterator[Shard]:
        """This rank's part of every global batch."""
        return self._replica.shards()

    def memory(self) -> Memory:
        """All parameters, and the optimizer's state."""
        return Memory.of(self._replica.model.parameters(), self._optimizer)

    def finish(self) -> nn.Module:
        """Return the model, which is the same on all ranks after the last step."""
        return self._replica.model


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Which ranks take part and how, known before anything is set up."""

    num_ranks: int
    """The first ones of the group take part."""
    num_workers: int
    """Ranks or replicas that train."""
    synchronous: bool
    """Whether all workers make step k together."""
    num_steps_ahead: int = 0
    """Steps that one synchronous worker may be ahead of another: 0 where each waits for all."""
    updates_per_batch: float = 1.0
    """Updates by one optimizer for each global batch."""
    survives_deaths: bool = False
    """Whether the others train on where a rank other than 0 dies, and it may join anew."""
    num_devices: int | None = None
    """Shares of the CPU that they compute on; None: one for each worker."""
    num_threads: int | None = None
    """Threads of each worker; None: those of a rank."""
    is_emulated: bool = False
    """Whether the strategy cannot run here and is emulated; a note says how."""
    notes: tuple[str, ...] = ()
