"""Defines the worker and the batches with which a strategy trains.  Runs on the ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from ddpnb.rank.cancellation import CancellationToken
from ddpnb.rank.clock import Clock
from ddpnb.rank.collectives.flat import local
from ddpnb.rank.emulation import Emulation
from ddpnb.rank.tasks.base import CLASSIFY, OptimizerFactory, StepFunction, split_step
from ddpnb.rank.tasks.batches import Shard, Tree, num_rows, rows


def state_of(model: nn.Module) -> list[Tensor]:
    """Return all parameters and buffers of a model, in the model's order."""
    return [*model.parameters(), *model.buffers()]


@torch.no_grad()
def copy_buffers(source: nn.Module, target: nn.Module) -> None:
    """Copy all buffers, also buffers that a step has added or resized, to the same model."""
    held = dict(target.named_buffers(remove_duplicate=False))
    for name, buffer in source.named_buffers(remove_duplicate=False):
        if name in held and held[name].shape == buffer.shape:
            held[name].copy_(buffer)
            continue
        path, _, key = name.rpartition(".")
        is_saved = name in source.state_dict()
        target.get_submodule(path).register_buffer(key, buffer.clone(), persistent=is_saved)


@final
class Activations:
    """Measures the memory that autograd keeps for one forward pass, and ignores other passes."""

    def __init__(self, *, is_due: bool = False) -> None:
        self.is_due = is_due
        """True if the next forward pass is measured."""
        self.num_bytes = 0
        """Number of bytes that autograd kept, not counting the parameters; 0 if unknown."""
        self._kept: dict[int, torch.UntypedStorage] = {}

    def of(self, forward: Callable[[], Tensor], model: nn.Module) -> Tensor:
        """Run a forward pass and return the loss.  If ``is_due``, measure ``num_bytes``."""
        if not self.is_due:
            return forward()
        try:
            with self.hooks():
                loss = forward()
        except RuntimeError as error:
            if "saved tensor hooks" not in str(error):
                raise
            self.is_due = False  # torch.func does not support such hooks
            return forward()
        for parameter in map(local, model.parameters()):
            self._kept.pop(parameter.untyped_storage().data_ptr(), None)
        self.num_bytes = sum(storage.nbytes() for storage in self._kept.values())
        self.is_due, self._kept = False, {}
        return loss

    def hooks(self) -> AbstractContextManager[object]:
        """Return a context that measures the memory of this thread's part of a forward pass."""
        return saved_tensors_hooks(self._keep, lambda kept: kept) if self.is_due else nullcontext()

    def _keep(self, tensor: Tensor) -> Tensor:
        if (here := local(tensor)).layout == torch.strided:
            storage = here.untyped_storage()
            self._kept[storage.data_ptr()] = storage
        return tensor


def is_switched(optimizer: object) -> bool:
    """Return True if an optimizer has the methods ``train`` and ``eval``."""
    return callable(getattr(optimizer, "train", None)) and callable(
        getattr(optimizer, "eval", None)
    )


@final
@dataclass(slots=True, kw_only=True)
class Worker:
    """One worker of a strategy, with its copy of the model and its place in the group."""

    model: nn.Module
    """The plain model on ``device``, in training mode, with the same weights on every rank."""
    make_model: Callable[[], nn.Module]
    """Makes a new plain model on ``device``, with the initial weights of the training."""
    training_step: StepFunction = CLASSIFY
    make_optimizer: OptimizerFactory
    """Makes an optimizer for the given parameters, with its scheduler and gradient clipping."""
    device: torch.device
    rank: int
    world_size: int
    local_world_size: int
    """The number of ranks on this host."""
    num_shards: int
    """The number of ranks that share each global batch: all ranks, or only this rank."""
    num_steps: int
    """The number of global batches to train on."""
    folder: Path
    """A private directory that the ranks of this host share."""
    name: str
    """A prefix of file names in ``folder``, unique to this training."""
    clock: Clock = field(default_factory=Clock)
    """Measures the phases of a step, and counts bytes.  By default, the clock is off."""
    activations: Activations = field(default_factory=Activations)
    """Measures the memory that autograd keeps for one forward pass."""
    accumulate: int = 1
    """The number of micro-batches per batch, for gradient accumulation."""
    amp: torch.dtype | None = None
    """The data type of autocast in the forward pass.  If None, autocast is off."""
    emulation: Emulation | None = None
    """The emulated devices to which this worker belongs; None if the worker's time is measured."""
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)
    """List of the optimizers that the method ``optimizer`` has made, in order."""
    mean_loss: Tensor = field(init=False)
    """The mean loss over the samples of this step's micro-batches, as a detached scalar tensor."""
    metrics: dict[str, Tensor] = field(default_factory=dict)
    """Metrics that the task's step function has returned in this step, without the loss."""
    staleness: int | None = None
    """Staleness of the last gradient: the number of updates by other workers since this worker read
    the parameters.  Asynchronous strategies set the staleness in each step."""
    version: int = 0
    """The number of the update that used the last gradient; 0 if updates are not counted."""
    schedule_step: int | None = None
    """Position in the learning-rate schedule.  If None, each optimizer counts its own steps."""
    notes: list[str] = field(default_factory=list)
    """Notes to show with the results, such as facts that a strategy finds out in ``setup``."""
    num_prefetched: int = 0
    """Number of shards that a worker takes in advance, so that it can fetch the samples early."""
    joins: bool = False
    """True if this rank joins a run in progress, without a process group with the other ranks."""
    cancellation: CancellationToken = field(default_factory=CancellationToken)
    """Releases this rank from waits for other ranks."""

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The trainable parameters, in the model's order."""
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def optimizer(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        """Make the task's optimizer for the given parameters."""
        self.optimizers.append(self.make_optimizer(parameters))
        self.switch_optimizers(training=True)
        return self.optimizers[-1]

    def shard(self, number: int) -> Shard:
        """Return the shard with this number.  The work queue gives shards by ascending number."""
        step, index = divmod(number, self.world_size)
        return Shard(step=step, index=index, num_shards=self.world_size)

    def autocast(self) -> AbstractContextManager[object]:
        """Return the autocast context for computing the model and the loss."""
        if self.amp is None:
            return nullcontext()
        return torch.autocast(self.device.type, self.amp)

    def micro_batches(self, batch: Batch) -> Iterator[Batch]:
        """Yield the micro-batches of a step: one, or several with gradient accumulation."""
        self.mean_loss = torch.zeros((), device=self.device)
        yield from batch.split(self.accumulate)

    def loss(
        self,
        micro_batch: Batch,
        model: nn.Module | None = None,
        *,
        loss_of: Callable[[Batch], Tensor] | None = None,
    ) -> Tensor:
        """Run the forward pass.  Return the mean loss of shape (), and add it to ``mean_loss``.

        Args:
            micro_batch: the samples, on this rank's device.
            model: a wrapped model to call instead of the plain model.
            loss_of: a function to call instead of the task's step.
        """

        def forward() -> Tensor:
            if loss_of is not None:
                return loss_of(micro_batch)
            called = self.model if model is None else model
            result = self.training_step(called, micro_batch.tree)
            return self.loss_in(result, micro_batch.share)

        self.clock.forward(micro_batch.num_samples)
        with self.autocast():
            loss = self.activations.of(forward, self.model)
        self.mean_loss += micro_batch.share * loss.detach()
        return loss

    def compute_gradients(self, batch: Batch, *, weight: float = 1.0) -> Tensor:
        """Run the forward and backward passes on a batch, one micro-batch after the other.

        Afterwards each parameter's ``grad`` is ``weight`` times the gradient of the mean loss.

        Args:
            batch: the samples, on this rank's device.
            weight: a factor for the gradients, e.g. this worker's share of the global batch.

        Returns:
            The mean loss over the batch, before any update, as a detached scalar tensor.
        """
        self.model.zero_grad()
        for micro_batch in self.micro_batches(batch):
            loss = self.loss(micro_batch)
            (weight * micro_batch.share * loss).backward()
        return self.mean_loss

    def loss_in(self, result: Tensor | Mapping[str, Any], share: float = 1.0) -> Tensor:
        """Return the loss in a result of the task's step; add other numbers to ``metrics``.

        ``share``: number of samples of the result, divided by this worker's samples in the step.
        """
        if isinstance(result, Tensor):
            return result
        loss, metrics = split_step(result)
        for name, value in metrics.items():
            held = torch.as_tensor(value).detach().float().reshape(())
            self.metrics[name] = self.metrics.get(name, 0.0) + share * held
        return loss

    def switch_optimizers(self, *, training: bool) -> None:
        """Call ``train()`` or ``eval()`` of optimizers that have them, such as schedule-free ones.

        In a schedule-free optimizer, ``eval()`` replaces the trained weights by their average.
        """
        for each in filter(is_switched, self.optimizers):
            getattr(each, "train" if training else "eval")()

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """Update the parameters with the optimizer's ``step``."""
        optimizer.step()


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One worker's shard of a global batch, or a micro-batch of it, on the worker's device."""

    tree: Tree
    """A tree of tensors, usually inputs and targets."""
    num_samples: int
    """The number of items of the data set from which the batch was made."""
    num_global: int
    """The number of samples in the global batch, over all workers."""
    max_micro_batches: int | None = None
    """Maximum number of micro-batches: the size of the smallest shard, so that all workers make the
    same number of micro-batches.  If None, the maximum is this shard's size."""
    share: float = 1.0
    """For a micro-batch: its number of samples, divided by this worker's number; otherwise 1."""
    is_last: bool = True
    """For a micro-batch: True if it is the last in its batch."""

    @property
    def weight(self) -> float:
        """This worker's share of the global batch: b_i / B in the formulas of strategies."""
        return self.num_samples / self.num_global

    @cached_property
    def num_rows(self) -> int:
        """The number of samples in ``tree``.  ``collate_fn`` may drop or add samples."""
        return num_rows(self.tree, self.num_samples)

    def split(self, num: int) -> list[Batch]:
        """Split the batch into ``num`` micro-batches, but at most ``max_micro_batches``."""
        if num == 1:
            return [self]
        num = min(num, self.max_micro_batches or self.num_samples, self.num_rows)
        sizes = [len(each) for each in torch.arange(self.num_rows, device="cpu").tensor_split(num)]
        return [
            replace(each, share=size / self.num_rows, is_last=number == num)
            for number, (size, each) in enumerate(zip(sizes, self.cut(sizes), strict=True), start=1)
        ]

    def cut(self, sizes: Iterable[int]) -> list[Batch]:
        """Return slices of the batch with the given sizes.  Raises the same errors as ``rows``."""
        slices, begin, num_all = [], 0, self.num_rows
        for size in sizes:
            tree = rows(self.tree, begin, begin + size, num_all)
            slices.append(replace(self, tree=tree, num_samples=size))
            begin += size
        return slices
