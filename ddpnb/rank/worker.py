"""What a strategy is given: the worker with its model, and the batches it trains on (ranks)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from ddpnb.rank.cancellation import CancellationToken
from ddpnb.rank.collectives.flat import local
from ddpnb.rank.laboratory import Laboratory
from ddpnb.rank.meter import Meter
from ddpnb.rank.tasks.base import CLASSIFY, OptimizerFactory, StepFunction, split_step
from ddpnb.rank.tasks.batches import Shard, Tree, rows


def state_of(model: nn.Module) -> list[Tensor]:
    """Return all parameters and buffers of a model, in its order."""
    return [*model.parameters(), *model.buffers()]


@final
class Activations:
    """Measures what autograd keeps of one forward pass, and leaves all others alone."""

    def __init__(self, *, is_due: bool = False) -> None:
        self.is_due = is_due
        """Whether the next forward pass is measured."""
        self.num_bytes = 0
        """What autograd kept of it, without the parameters; 0: not known."""
        self._kept: dict[int, torch.UntypedStorage] = {}

    def of(self, forward: Callable[[], Tensor], model: nn.Module) -> Tensor:
        """Return the loss of a forward pass through a model; measure it where that is due."""
        if not self.is_due:
            return forward()
        try:
            with self.hooks():
                loss = forward()
        except RuntimeError as error:
            if "saved tensor hooks" not in str(error):
                raise
            self.is_due = False  # the functions of torch.func refuse such hooks
            return forward()
        for parameter in map(local, model.parameters()):
            self._kept.pop(parameter.untyped_storage().data_ptr(), None)
        self.num_bytes = sum(storage.nbytes() for storage in self._kept.values())
        self.is_due, self._kept = False, {}
        return loss

    def hooks(self) -> AbstractContextManager[object]:
        """Return the context in which this thread's part of the forward pass is measured."""
        return saved_tensors_hooks(self._keep, lambda kept: kept) if self.is_due else nullcontext()

    def _keep(self, tensor: Tensor) -> Tensor:
        if (here := local(tensor)).layout == torch.strided:
            storage = here.untyped_storage()
            self._kept[storage.data_ptr()] = storage
        return tensor


@final
@dataclass(slots=True, kw_only=True)
class Worker:
    """What one rank brings to a strategy: its copy of the model and its place in the group."""

    model: nn.Module
    """Plain, on ``device``, in training mode; the same weights on every rank."""
    make_model: Callable[[], nn.Module]
    """Makes the plain model anew, on ``device``, with the weights that training began with."""
    training_step: StepFunction = CLASSIFY
    make_optimizer: OptimizerFactory
    """Makes an optimizer with its scheduler and clipping."""
    device: torch.device
    rank: int
    world_size: int
    local_world_size: int
    """How many ranks this host has."""
    num_parts: int
    """Ranks that share each global batch: all of them, or this one alone."""
    num_steps: int
    """Global batches to train on."""
    folder: Path
    """A directory that only the ranks of this host can reach."""
    name: str
    """Prefix of file names in ``folder``; no two trainings share it."""
    meter: Meter = field(default_factory=Meter)
    """Counts seconds and bytes; whatever carries messages reports to it."""
    activations: Activations = field(default_factory=Activations)
    """Measures what autograd keeps of one forward pass."""
    accumulate: int = 1
    """Micro-batches that each batch is split into, for gradient accumulation."""
    amp: torch.dtype | None = None
    """Type of the forward pass where it is safe; None: the model's own."""
    laboratory: Laboratory | None = None
    """The emulated devices that it is one of; None: its time is measured."""
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)
    """Those that ``optimizer`` has made, in order."""
    metrics: dict[str, Tensor] = field(default_factory=dict)
    """What the task's step has returned besides the loss, in this step."""
    staleness: int | None = None
    """Updates by others between the pull of the parameters and the use of the last gradient; an
    asynchronous strategy sets it in each step."""
    version: int = 0
    """The number of the update that the last gradient went into; 0: updates are not counted."""
    notes: list[str] = field(default_factory=list)
    """Sentences for the results; a strategy adds what only its ``setup`` can discover."""
    num_prefetched: int = 0
    """Shards that are taken in advance, so that their samples can be fetched."""
    delay: Callable[[], None] = lambda: None
    """Called in each step, between the forward and the backward pass: where a fault is injected
    that makes this worker slow."""
    joins: bool = False
    """Whether the others train already, and this rank is in no group with them."""
    cancellation: CancellationToken = field(default_factory=CancellationToken)
    """Frees this rank from waiting for others."""

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters that are trained, in the model's order."""
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def optimizer(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        """Make the task's optimizer for some parameters."""
        self.optimizers.append(self.make_optimizer(parameters))
        return self.optimizers[-1]

    def shard(self, number: int) -> Shard:
        """Return the shard of a number, where one queue hands out all slices in order."""
        step, part = divmod(number, self.world_size)
        return Shard(step=step, part=part, num_parts=self.world_size)

    def autocast(self) -> AbstractContextManager[object]:
        """Return the context in which the model and the loss are computed."""
        if self.amp is None:
            return nullcontext()
        return torch.autocast(self.device.type, self.amp)

    def compute_gradients(
        self,
        batch: Batch,
        *,
        weight: float = 1.0,
        model: nn.Module | None = None,
        loss_of: Callable[[Batch, float], Tensor] | None = None,
        unsynced: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> Tensor:
        """Run forward and backward on a batch, one micro-batch after the other.

        Afterwards each parameter's ``grad`` is ``weight`` times the gradient of the mean loss.

        Args:
            batch: on this rank's device.
            weight: e.g. this worker's share of the global batch.
            model: a wrapper to call in place of the plain model.
            loss_of: computes the loss of a micro-batch from it and its share of the batch.
            unsynced: makes the context for all micro-batches but the last, e.g. DDP's ``no_sync``.

        Returns:
            The mean loss over the batch, before any update; shape (), detached.
        """
        called = self.model if model is None else model
        called.zero_grad()
        micro_batches = batch.split(self.accumulate)
        total = torch.zeros((), device=self.device)
        meter = self.meter
        for number, micro_batch in enumerate(micro_batches, start=1):
            share = micro_batch.num_samples / batch.num_samples
            with unsynced() if number < len(micro_batches) else nullcontext():
                meter.compute("forward", micro_batch.num_samples)
                forward = partial(loss_of or partial(self._loss_of, called), micro_batch, share)
                with self.autocast():
                    loss = self.activations.of(forward, self.model)
                self.delay()
                meter.compute("backward", micro_batch.num_samples)
                (loss * (weight * share)).backward()
            total += share * loss.detach()
        meter.computed()
        meter.backward_ended()
        return total

    def _loss_of(self, called: nn.Module, batch: Batch, share: float) -> Tensor:
        return self.loss_in(self.training_step(called, batch.tree), share)

    def loss_in(self, result: Tensor | Mapping[str, Any], share: float = 1.0) -> Tensor:
        """Return the loss in what the task's step has returned; note its further numbers.

        ``share``: of the samples that this worker trains on in this step.
        """
        if isinstance(result, Tensor):
            return result
        loss, metrics = split_step(result)
        for name, value in metrics.items():
            held = torch.as_tensor(value).detach().float().reshape(())
            self.metrics[name] = self.metrics.get(name, 0.0) + share * held
        return loss

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """Make the optimizer's step."""
        self.meter.begin("optimizer")
        optimizer.step()


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One worker's slice of a global batch, on its device."""

    tree: Tree
    """Tensors in a tree, usually inputs and targets."""
    num_samples: int
    num_global: int
    """Samples in the whole global batch, over all workers."""
    most_parts: int | None = None
    """Samples of the smallest slice, and so the most micro-batches that every worker can make;
    None: those of this slice."""

    @property
    def weight(self) -> float:
        """This worker's share of the global batch."""
        return self.num_samples / self.num_global

    def split(self, num_parts: int) -> list[Batch]:
        """Return as many micro-batches, or ``most_parts`` where these are fewer."""
        if num_parts == 1:
            return [self]
        num = min(num_parts, self.most_parts or self.num_samples)
        return self.cut(map(len, torch.arange(self.num_samples, device="cpu").tensor_split(num)))

    def cut(self, sizes: Iterable[int]) -> list[Batch]:
        """Return slices with so many samples each; refuse what ``rows`` does."""
        parts, begin = [], 0
        for size in sizes:
            part = rows(self.tree, begin, begin + size, self.num_samples)
            parts.append(replace(self, tree=part, num_samples=size))
            begin += size
        return parts
