"""The replicas of ``dp``, on the GPUs or on one device (rank 0), each on a thread of its own.

Both do what torch's ``DataParallel`` does in each step: copy the parameters to all replicas, run
them on their slices of the batch, gather the outputs on the first, and sum the gradients there.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.parallel import gather, replicate

from ddpnb.rank.collectives.costs import Messages
from ddpnb.rank.collectives.flat import num_bytes
from ddpnb.rank.strategies.worker import Worker, state_of
from ddpnb.rank.tasks.base import StepFunction
from ddpnb.rank.tasks.batches import moved


class Replicas(ABC):
    """Copies of a model, the first of which is trained."""

    def __init__(self, worker: Worker, devices: list[torch.device]) -> None:
        self.num = len(devices)
        self._worker = worker
        self._meter = worker.meter
        self._devices = devices
        self._pool = ThreadPoolExecutor(self.num, thread_name_prefix="ddpnb-replica")

    def run(self, call: StepFunction, slices: list[Any]) -> list[Any]:
        """Copy the first replica to the others; call something with each and its slice."""
        devices = self._devices[: len(slices)]
        with self._meter.communicating():
            models = self._copies(devices)
            placed = list(map(moved, slices, devices))

        def run_one(model: nn.Module, part: Any, device: torch.device) -> Any:
            index = device.index if device.type == "cuda" else -1
            with torch.cuda.device(index), self._worker.autocast():  # which hold for one thread
                return call(model, part)

        return list(self._pool.map(run_one, models, placed, devices))

    @abstractmethod
    def _copies(self, devices: list[torch.device]) -> Sequence[nn.Module]:
        """Return replicas on the first devices with the first one's parameters and buffers."""

    @abstractmethod
    def gather(self, outputs: list[Tensor]) -> Tensor:
        """Return the rows of all outputs on the first device.

        A backward pass through them leaves the sum of all gradients in the first replica.
        """

    def close(self) -> None:
        """End the threads; may be called twice."""
        self._pool.shutdown(cancel_futures=True)


@final
class GpuReplicas(Replicas):
    """Torch's own functions; autograd sums the gradients when it goes back through them."""

    def _copies(self, devices: list[torch.device]) -> Sequence[nn.Module]:
        others = len(devices) - 1
        self._meter.count(
            sent=others * num_bytes(state_of(self._worker.model)),
            received=others * num_bytes(self._worker.parameters),  # gradients are as large
        )
        copies: Sequence[nn.Module] = replicate(self._worker.model, devices)
        return copies

    def gather(self, outputs: list[Tensor]) -> Tensor:
        """Gather with torch's function, through which the gradients go back."""
        with self._meter.communicating():
            gathered: Tensor = gather(outputs, self._devices[0])
        return gathered


@final
class ThreadReplicas(Replicas):
    """The same steps on one device.

    Over an emulated link what passes between the first replica and the others takes its time: one
    message for each other replica, one after the other, through the first one's link.
    """

    def __init__(self, worker: Worker) -> None:
        super().__init__(worker, [worker.device] * worker.world_size)
        others = [worker.make_model().train() for _ in range(self.num - 1)]
        self.models = [worker.model, *others]

    @torch.no_grad()
    def _copies(self, devices: list[torch.device]) -> Sequence[nn.Module]:
        # As in torch, only the first replica's changes to buffers last.
        first, *others = map(state_of, self.models)
        with self._lasting(others):
            for other in others:
                for mine, theirs in zip(first, other, strict=True):
                    theirs.copy_(mine)
        self._meter.count(sent=len(others) * num_bytes(first))
        return self.models

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
        self._meter.count(received=len(others) * num_bytes(self._worker.parameters))

    def _lasting(self, messages: Iterable[Iterable[Tensor]]) -> AbstractContextManager[None]:
        """Have the body last as long as so many messages over the link."""
        sizes = [num_bytes(message) for message in messages]
        return self._worker.link.lasting(Messages(len(sizes), sum(sizes)))
