"""How do several replicas in one process share the work of a batch?  (Rank 0.)

On GPUs torch's own ``DataParallel`` does it.  Elsewhere the same steps run on threads,
really: copy the parameters, cut the batch, run the replicas side by side, bring their
outputs together, and send the gradients back the same way.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from itertools import repeat
from typing import final

import torch
from torch import Tensor, nn

Autocast = Callable[[], AbstractContextManager[object]]
"""Makes the context to compute in, which torch keeps for each thread apart."""


class Replicas(ABC):
    """Copies of a model that share each batch; the model itself is the first of them."""

    num_replicas: int

    @abstractmethod
    def forward(self, inputs: Tensor, autocast: Autocast) -> Tensor:
        """Return the outputs of the whole batch, on the first device."""

    @abstractmethod
    def backward(self) -> None:
        """Go on from the gradient of these outputs, through each replica."""

    @abstractmethod
    def reduce(self) -> None:
        """Add the gradients of all replicas to those of the first."""

    @abstractmethod
    def close(self) -> None:
        """Let go of threads; may be called twice."""


@final
class GpuReplicas(Replicas):
    """Torch's ``DataParallel``: its outputs remember the way back."""

    def __init__(self, model: nn.Module, device_ids: list[int]) -> None:
        self.num_replicas = len(device_ids)
        self._inner = Cast(model)
        self._module = nn.DataParallel(self._inner, device_ids=device_ids)

    def forward(self, inputs: Tensor, autocast: Autocast) -> Tensor:
        """Replicate, scatter, run, gather."""
        self._inner.autocast = autocast
        outputs: Tensor = self._module(inputs)
        return outputs

    def backward(self) -> None:
        """Nothing: torch did it when the loss went backward."""

    def reduce(self) -> None:
        """Nothing: torch did it when the loss went backward."""

    def close(self) -> None:
        """Nothing to let go of."""


@final
class Cast(nn.Module):
    """A model that enters its context itself, on whatever thread it is called.

    Torch's ``DataParallel`` opens one in each of its threads, but forgets its type: that would
    be float16 on every GPU.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.autocast: Autocast = nullcontext

    def forward(self, inputs: Tensor) -> Tensor:
        """Call the model in the context."""
        return _forward(self.model, inputs, self.autocast)


@final
class ThreadReplicas(Replicas):
    """The same steps as torch's ``DataParallel``, each replica on a thread of its own."""

    def __init__(self, model: nn.Module, num_replicas: int) -> None:
        self.num_replicas = num_replicas
        self._models = [model, *(copy.deepcopy(model) for _ in range(num_replicas - 1))]
        self._pool = ThreadPoolExecutor(num_replicas, thread_name_prefix="ddpnb-replica")
        self._outputs: list[Tensor] = []
        self._gathered = torch.empty(0)

    def forward(self, inputs: Tensor, autocast: Autocast) -> Tensor:
        """Replicate, scatter, run, gather."""
        self._replicate()
        # as torch does: fewer than replicas where the batch is small, and the last may be smaller
        parts = inputs.chunk(len(self._models))
        self._outputs = list(self._pool.map(_forward, self._models, parts, repeat(autocast)))
        self._gathered = torch.cat([output.detach() for output in self._outputs])
        return self._gathered.requires_grad_()

    def backward(self) -> None:
        """Scatter the gradient of the outputs; run each replica's backward pass."""
        assert self._gathered.grad is not None, "the loss has not gone backward"
        parts = self._gathered.grad.split([len(output) for output in self._outputs])
        list(self._pool.map(_backward, self._outputs, parts))  # the list waits, and raises

    @torch.no_grad()
    def reduce(self) -> None:
        """Add up in the first replica, which the optimizer updates; the others forget theirs."""
        first, *others = self._models
        for other in others:
            for mine, theirs in zip(first.parameters(), other.parameters(), strict=True):
                if mine.grad is not None and theirs.grad is not None:
                    mine.grad.add_(theirs.grad)
            other.zero_grad()

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown(cancel_futures=True)

    @torch.no_grad()
    def _replicate(self) -> None:
        """Copy parameters and buffers to all but the first.

        So of what replicas write into buffers only the first one's lasts, as in torch.
        """
        first, *others = self._models
        for other in others:
            for mine, theirs in zip(_state(first), _state(other), strict=True):
                theirs.copy_(mine)


def fewest_of(num_samples: int, num_replicas: int) -> int:
    """Return how many samples the last replica that has any gets: 7 for 3 are cut 3, 3, 1."""
    most = -(-num_samples // num_replicas)
    return (num_samples - 1) % most + 1


def _state(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]


def _forward(model: nn.Module, inputs: Tensor, autocast: Autocast) -> Tensor:
    with autocast():
        outputs: Tensor = model(inputs)
    return outputs


def _backward(outputs: Tensor, gradient: Tensor) -> None:
    outputs.backward(gradient)
