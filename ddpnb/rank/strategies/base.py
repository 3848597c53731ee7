"""What must every data-parallel strategy be able to do?  (Every rank.)

A strategy is told where it stands (``setup``), is given batches (``step``), and
hands back the trained model (``finish``).  It returns numbers; it never prints,
logs or publishes.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ddpnb.protocol.messages import RankState
from ddpnb.rank.cancellation import CancellationToken
from ddpnb.rank.comm.flat_buffers import num_bytes
from ddpnb.rank.strategies.timer import NullTimer, Timer
from ddpnb.rank.tasks.base import LossFunction, OptimizerFactory
from ddpnb.rank.tasks.batches import Shard, every_step

State = dict[str, Any]
"""What a checkpoint keeps: tensors, numbers and texts, in dicts and lists."""


def no_delay() -> None:
    """Take no time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Who takes part in a strategy, known before anything is set up."""

    num_ranks: int
    """Ranks that take part: the first ones of the group."""
    num_workers: int
    """Ranks or replicas that train."""
    synchronous: bool
    """Whether all workers make step k together."""
    num_prefetched: int = 0
    """Steps that one synchronous worker may be ahead of another: 0 where each waits for all."""
    updates_per_batch: float = 1.0
    """Updates that one optimizer makes for each global batch."""
    survives_deaths: bool = False
    """Whether the others train on where a rank other than 0 dies; it may join where it can."""
    is_emulated: bool = False
    """Whether this only stands for the strategy, which cannot run here; a note says how."""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """What one rank brings to a strategy: its copy of the model and its place in the group."""

    model: nn.Module
    """Plain, on ``device``, in training mode; the same weights on every rank."""
    loss: LossFunction
    optimizer: OptimizerFactory
    """Makes an optimizer that scales its learning rate, warms up and clips by itself."""
    device: torch.device
    rank: int
    world_size: int
    num_steps: int
    """Global batches to train on."""
    first_step: int = 0
    """Global batches that the run to resume was trained on."""
    folder: Path
    """A directory that all ranks of this host, and nobody else, can reach."""
    name: str
    """What names of files in ``folder`` begin with: no two trainings share it."""
    timer: Timer = field(default_factory=NullTimer)
    accumulate: int = 1
    """Parts that each batch is cut into, one after the other."""
    amp: torch.dtype | None = None
    """What the forward pass computes in where that is safe; None: as the model is."""
    transport: str = "auto"
    """One of ``training.TRANSPORTS``."""
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)
    """Those that the factory has made, in order."""
    num_prefetched: int = 0
    """Shares that are asked for, to be fetched, before the first of them is trained on."""
    delay: Callable[[], None] = no_delay
    """Called in each step between the forward and the backward pass, at least once: returns at
    once, unless this worker is to be slow on purpose."""
    joins: bool = False
    """Whether the others train already: this rank is in no group with them."""
    cancellation: CancellationToken = field(default_factory=CancellationToken)
    """Frees whoever holds it from waiting for other ranks."""

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters that are trained, in the model's order."""
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def shards(self) -> Iterator[Shard]:
        """Yield this rank's part of every global batch."""
        return every_step(self.num_steps, part=self.rank, num_parts=self.world_size)

    def shard(self, number: int) -> Shard:
        """Return the share of a number, where workers are handed out all parts in one order."""
        step, part = divmod(number, self.world_size)
        return Shard(step=step, part=part, num_parts=self.world_size)

    def whole_batches(self) -> Iterator[Shard]:
        """Yield every global batch, for one rank that trains on all of it."""
        return every_step(self.num_steps, part=0, num_parts=1)

    def autocast(self) -> AbstractContextManager[object]:
        """Return the context in which the model and the loss are computed."""
        if self.amp is None:
            return nullcontext()
        return torch.autocast(self.device.type, self.amp)

    def compute_gradients(
        self,
        batch: "Batch",
        *,
        weight: float = 1.0,
        model: nn.Module | None = None,
        unsynced: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> Tensor:
        """Run forward and backward on a batch, part by part if gradients are accumulated.

        Afterwards each parameter's ``grad`` is ``weight`` times the gradient of the mean loss.

        Args:
            batch: what to train on.
            weight: e.g. this worker's share of the global batch.
            model: what to call in place of the plain model: a wrapper of it.
            unsynced: the context for all parts but the last, e.g. DDP's ``no_sync``.

        Returns:
            The mean loss over the batch, before any update; shape (), detached.
        """
        called = self.model if model is None else model
        called.zero_grad()
        parts = batch.split(self.accumulate)
        total = torch.zeros((), device=self.device)
        for number, part in enumerate(parts, start=1):
            shard = part.num_samples / batch.num_samples
            with unsynced() if number < len(parts) else nullcontext():
                self.timer.begin("forward")
                with self.autocast():
                    loss = self.loss(called(part.inputs), part.targets)
                self.delay()
                self.timer.begin("backward")
                (loss * (weight * shard)).backward()
            total += shard * loss.detach()
        return total

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """Have the optimizer make its step, as a part of its own."""
        self.timer.begin("optimizer")
        optimizer.step()


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One worker's share of a global batch, on its device."""

    inputs: Tensor
    targets: Tensor
    num_samples: int
    num_global: int
    """Samples in the whole global batch, over all workers."""
    most_parts: int | None = None
    """Into how many it may be cut, where the model meets the other ranks in each: as many as
    the smallest of their shares has samples.  None: one for each sample."""

    @property
    def weight(self) -> float:
        """This worker's share of the global batch."""
        return self.num_samples / self.num_global

    def split(self, num_parts: int) -> list["Batch"]:
        """Return as many parts, or ``most_parts`` where these are fewer."""
        if num_parts == 1:
            return [self]
        num = min(num_parts, self.most_parts or self.num_samples)
        cut = zip(self.inputs.tensor_split(num), self.targets.tensor_split(num), strict=True)
        return [
            Batch(inputs=i, targets=t, num_samples=len(i), num_global=self.num_global)
            for i, t in cut
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """What one step of one worker was."""

    loss: Tensor
    """Mean loss over the worker's samples before the update; shape (), on the device, detached."""
    num_samples: int
    staleness: int | None = None
    """Updates by others between the pull of the parameters and the use of the gradient."""
    num_bytes_sent: int = 0
    """What this worker handed over for others, by the formula in the strategy's docstring."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """What one rank holds, in bytes; 0 where that is not known."""

    parameters: int = 0
    optimizer: int = 0
    """The optimizer's state: momentum and the like."""

    @classmethod
    def of(cls, parameters: Iterable[Tensor], *optimizers: torch.optim.Optimizer) -> "Memory":
        """Return what parameters and the states of optimizers take on this rank."""
        states = [state for optimizer in optimizers for state in optimizer.state.values()]
        held = [value for state in states for value in state.values() if isinstance(value, Tensor)]
        return cls(parameters=num_bytes(parameters), optimizer=num_bytes(held))


class Strategy(ABC):
    """One way of training a model on several workers.

    The constructor takes the options that ``catalogue.STRATEGIES`` lists, by name.
    """

    @abstractmethod
    def plan(self, state: RankState) -> Plan:
        """Return who takes part where a rank and its group are as ``state`` says."""

    def fewest_samples(self, num_samples: int, plan: Plan, accumulate: int) -> int:
        """Return the fewest samples that the model is called with in one step.

        Args:
            num_samples: of the global batch; no fewer than workers.
            plan: who takes part.
            accumulate: parts that each worker cuts its share into.
        """
        shard = num_samples // plan.num_workers
        return shard // min(accumulate, shard)

    def check(self, replica: Replica) -> None:  # noqa: B027  most train whatever can be trained
        """Refuse what this strategy cannot train, before anything trains; nothing is sent.

        Args:
            replica: one that is thrown away; a step has been made with its model.

        Raises:
            UserError: what it is, and what to do.
        """

    @abstractmethod
    def setup(self, replica: Replica) -> None:
        """Get ready to train; all ranks that take part call it together."""

    @abstractmethod
    def shards(self) -> Iterator[Shard]:
        """Yield the shares that this worker trains on, each after the step before it."""

    @abstractmethod
    def step(self, batch: Batch) -> StepReport:
        """Train on one batch."""

    def notes(self) -> tuple[str, ...]:
        """Return what only ``setup`` could find out and must stand beside every result."""
        return ()

    def memory(self) -> Memory:
        """Return what this rank holds when training ends, before ``finish``."""
        return Memory()

    @abstractmethod
    def finish(self) -> nn.Module:
        """Return the trained plain model, the same on all ranks that take part.

        All ranks that take part call it together.  Running statistics such as BatchNorm's
        are each rank's own; those of rank 0 count.
        """

    def save(self, replica: Replica) -> State:
        """Return what this rank needs to go on from here, after any step.

        A strategy that holds more than the model and its optimizers adds it.  Where workers
        are asynchronous, rank 0 alone is asked, while the others train on.

        Args:
            replica: the one that was set up.
        """
        return {
            "model": replica.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in replica.optimizers],
        }

    def load(self, replica: Replica, state: State) -> None:
        """Go on from what ``save`` returned, after ``setup``.

        A ``"model"`` in the state has been loaded before ``setup`` already, so that whatever
        copies the model there copies that.
        """
        replica.model.load_state_dict(state["model"])
        for mine, theirs in zip(replica.optimizers, state["optimizers"], strict=False):
            mine.load_state_dict(theirs)  # ranks that made none have nothing to load

    def lost_shards(self) -> Sequence[Shard]:
        """Return the shares that were handed out and whose worker died; on rank 0 only."""
        return ()

    @abstractmethod
    def close(self) -> None:
        """Let go of threads, files and sockets; may be called twice, and after any failure."""


class SynchronousStrategy(Strategy):
    """Every rank trains a copy of the model on its part of every global batch, in step.

    What differs is overridden; ``step`` is always a strategy's own.
    """

    _replica: Replica
    _optimizer: torch.optim.Optimizer

    def plan(self, state: RankState) -> Plan:
        """Every rank."""
        return Plan(num_ranks=state.world_size, num_workers=state.world_size, synchronous=True)

    def setup(self, replica: Replica) -> None:
        """Make this rank's optimizer; all weights are the same already."""
        self._replica = replica
        self._optimizer = replica.optimizer(replica.parameters)

    def shards(self) -> Iterator[Shard]:
        """This rank's part of every global batch."""
        return self._replica.shards()

    def memory(self) -> Memory:
        """All parameters, and the optimizer's state."""
        return Memory.of(self._replica.model.parameters(), self._optimizer)

    def finish(self) -> nn.Module:
        """Return the model: all ranks have the same weights since the last step."""
        return self._replica.model

    def close(self) -> None:
        """Nothing to let go of: the process group belongs to the rank."""
