"""The replicas of ``dp``, on the GPUs or on threads of one process (rank 0).

Both do what torch's ``DataParallel`` does in each step: copy the parameters to all replicas, run
them on their slices of the batch, gather the outputs on the first, and sum the gradients there.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from itertools import repeat
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.parallel import gather, parallel_apply, replicate

from ddpnb.rank.collectives.costs import Messages
from ddpnb.rank.collectives.flat import num_bytes
from ddpnb.rank.strategies.worker import Worker, state_of
from ddpnb.rank.tasks.base import StepFunction
from ddpnb.rank.tasks.batches import moved


class Replicas(ABC):
    """Copies of a model, the first of which is trained."""

    num: int

    @abstractmethod
    def run(self, call: StepFunction, slices: list[Any]) -> list[Any]:
        """Copy the first replica to the others; call something with each and its slice."""

    @abstractmethod
    def gather(self, outputs: list[Tensor]) -> Tensor:
        """Return the rows of all outputs on the first device.

        A backward pass through them leaves the sum of all gradients in the first replica.
        """

    def close(self) -> None:  # noqa: B027  only threads have something to end
        """End what runs; may be called twice."""


@final
class GpuReplicas(Replicas):
    """Torch's own functions; autograd sums the gradients when it goes back through them."""

    def __init__(self, worker: Worker, gpus: list[int]) -> None:
        self.num = len(gpus)
        self._gpus = gpus
        self._meter = worker.meter
        self._first = AutocastModel(worker.model, worker.autocast)
        self._num_copied = num_bytes(state_of(worker.model))
        self._num_summed = num_bytes(worker.parameters)  # gradients are as large

    def run(self, call: StepFunction, slices: list[Any]) -> list[Any]:
        """Replicate, and run each replica on its GPU."""
        gpus = self._gpus[: len(slices)]
        with self._meter.communicating():
            devices = [torch.device("cuda", gpu) for gpu in gpus]
            placed = [moved(each, device) for each, device in zip(slices, devices, strict=True)]
            copies = replicate(self._first, gpus)
        others = len(gpus) - 1
        self._meter.count(sent=others * self._num_copied, received=others * self._num_summed)
        return list(parallel_apply(copies, [(call, each) for each in placed], None, gpus))

    def gather(self, outputs: list[Tensor]) -> Tensor:
        """Gather with torch's function, through which the gradients go back."""
        with self._meter.communicating():
            gathered: Tensor = gather(outputs, self._gpus[0])
        return gathered


@final
class ThreadReplicas(Replicas):
    """The same steps, each replica on a thread of its own.

    Over an emulated link what passes between the first replica and the others takes its time: one
    message for each other replica, one after the other, through the first one's link.
    """

    def __init__(self, worker: Worker) -> None:
        self.num = worker.world_size
        self._meter = worker.meter
        self._link = worker.link
        plain = [worker.model, *(worker.make_model() for _ in range(self.num - 1))]
        self.models = [AutocastModel(each.train(), worker.autocast) for each in plain]
        self._pool = ThreadPoolExecutor(self.num, thread_name_prefix="ddpnb-replica")

    def run(self, call: StepFunction, slices: list[Any]) -> list[Any]:
        """Replicate, and run each replica on its thread."""
        with self._meter.communicating():
            self._replicate()
        return list(self._pool.map(AutocastModel.__call__, self.models, repeat(call), slices))

    def gather(self, outputs: list[Tensor]) -> Tensor:
        """Return the rows of all outputs; their gradient goes back to each replica's thread."""
        sizes = [len(output) for output in outputs]

        def go_back(gradient: Tensor) -> None:
            with self._lasting([each] for each in outputs[1:]):
                slices = gradient.split(sizes)
            list(self._pool.map(Tensor.backward, outputs, slices))  # the list waits, and raises
            with self._meter.communicating():
                self._sum()

        with self._meter.communicating(), self._lasting([each] for each in outputs[1:]):
            gathered = torch.cat([output.detach() for output in outputs]).requires_grad_()
        gathered.register_hook(go_back)
        return gathered

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown(cancel_futures=True)

    @torch.no_grad()
    def _replicate(self) -> None:
        """Copy parameters and buffers of the first replica to all others.

        As in torch, only the first replica's changes to buffers last.
        """
        first, *others = map(state_of, self.models)
        with self._lasting(others):
            for other in others:
                for mine, theirs in zip(first, other, strict=True):
                    theirs.copy_(mine)
        self._meter.count(sent=len(others) * num_bytes(first))

    @torch.no_grad()
    def _sum(self) -> None:
        first, *others = self.models
        found = [[p.grad for p in other.parameters() if p.grad is not None] for other in others]
        with self._lasting(found):
            for other in others:
                for mine, theirs in zip(first.parameters(), other.parameters(), strict=True):
                    if mine.grad is None:  # as of an expert that only the other replica has used
                        mine.grad = theirs.grad
                    elif theirs.grad is not None:
                        mine.grad.add_(theirs.grad)
                other.zero_grad()
        trained = [each for each in first.parameters() if each.requires_grad]
        self._meter.count(received=len(others) * num_bytes(trained))

    def _lasting(self, messages: Iterable[Iterable[Tensor]]) -> AbstractContextManager[None]:
        """Have the body last as long as so many messages over the link."""
        sizes = [num_bytes(message) for message in messages]
        return self._link.lasting(Messages(len(sizes), sum(sizes)))


@final
class AutocastModel(nn.Module):
    """A model that enters its context itself, on whatever thread it is called.

    The context that torch's ``DataParallel`` opens in its threads is float16 on every GPU,
    whichever type was asked for.
    """

    def __init__(
        self, model: nn.Module, autocast: Callable[[], AbstractContextManager[object]]
    ) -> None:
        super().__init__()
        self.model = model
        self.autocast = autocast

    def forward(self, call: StepFunction, part: Any) -> Any:
        """Call something with the model and a slice of the batch, in the context."""
        with self.autocast():
            return call(self.model, part)
