"""What must every data-parallel strategy be able to do?  (Every rank.)

A strategy is told where it stands (``setup``), is given batches (``step``), and
hands back the trained model (``finish``).  It returns numbers; it never prints,
logs or publishes.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from ddpnb.rank.order import Share
from ddpnb.rank.tasks.base import LossFunction, OptimizerFactory
from ddpnb.wire import RankState


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Who takes part in a strategy, known before anything is set up."""

    num_ranks: int
    """Ranks that take part: the first ones of the group."""
    num_workers: int
    """Ranks or replicas that train."""
    synchronous: bool
    """Whether all workers make step k together."""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """What one rank brings to a strategy: its copy of the model and its place in the group."""

    model: nn.Module
    """Plain, on ``device``, in training mode; the same weights on every rank."""
    loss: LossFunction
    optimizer: OptimizerFactory
    device: torch.device
    rank: int
    world_size: int
    num_steps: int
    """Global batches to train on."""
    folder: Path
    """A directory that all ranks of this host, and nobody else, can reach."""
    name: str
    """What names of files in ``folder`` begin with: no two trainings share it."""

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters that are trained, in the model's order."""
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One worker's share of a global batch, on its device."""

    inputs: Tensor
    targets: Tensor
    num_samples: int
    num_global: int
    """Samples in the whole global batch, over all workers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """What one step of one worker was."""

    loss: Tensor
    """Mean loss over the worker's samples before the update; shape (), on the device, detached."""
    num_samples: int
    staleness: int | None = None
    """Updates by others between the pull of the parameters and the use of the gradient."""


class Strategy(ABC):
    """One way of training a model on several workers."""

    @classmethod
    @abstractmethod
    def plan(cls, state: RankState) -> Plan:
        """Return who takes part where a rank and its group are as ``state`` says."""

    @abstractmethod
    def setup(self, replica: Replica) -> None:
        """Get ready to train; all ranks that take part call it together."""

    @abstractmethod
    def shares(self) -> Iterator[Share]:
        """Yield the shares that this worker trains on, each after the step before it."""

    @abstractmethod
    def step(self, batch: Batch) -> StepReport:
        """Train on one batch."""

    @abstractmethod
    def finish(self) -> nn.Module:
        """Return the trained plain model, the same on all ranks that take part.

        All ranks that take part call it together.  Running statistics such as BatchNorm's
        are each rank's own; those of rank 0 count.
        """

    @abstractmethod
    def close(self) -> None:
        """Let go of threads, files and sockets; may be called twice, and after any failure."""
