"""Runs each replica of ``dp`` on a separate thread, on several GPUs or on one device.

As in torch's ``DataParallel``, each step copies the parameters to all replicas and runs each
replica on its slice of the batch. The first replica then gathers outputs and sums gradients.
Runs on rank 0.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.parallel import gather, replicate

from ddpnb.rank.collectives.flat import num_bytes
from ddpnb.rank.tasks.base import StepFunction
from ddpnb.rank.tasks.batches import moved, tensors_of
from ddpnb.rank.worker import Worker, copy_buffers, state_of


class Replicas(ABC):
    """The replicas of a model. The optimizer updates only the first replica."""

    def __init__(self, worker: Worker, devices: list[torch.device]) -> None:
        self.worker = worker
        self.devices = devices
        self.clock = worker.clock
        # Reuse the threads, because torch needs milliseconds to prepare a new thread.
        self.pool = ThreadPoolExecutor(len(devices), thread_name_prefix="ddpnb-replica")

    def run(self, call: StepFunction, slices: list[Any]) -> list[Any]:
        """Copy the first replica to all others. Return the results of ``call(replica, slice)``."""
        worker, devices = self.worker, self.devices[: len(slices)]
        with self.clock.communicating():
            models = self.copies(devices)
            placed = list(map(moved, slices, devices))
        num, clock = len(slices), self.clock
        clock.exchange("scatter", num_bytes(tensors_of(slices[:1])), num)
        if num > 1:  # the first device sends all parameters once, and receives all gradients once
            sent, received = num_bytes(state_of(worker.model)), num_bytes(worker.parameters)
            clock.count(sent=clock.scale * sent, received=clock.scale * received)

        def run_one(number: int, model: nn.Module, part: Any, device: torch.device) -> Any:
            index = device.index if device.type == "cuda" else -1
            measured = nullcontext() if number else worker.activations.hooks()
            with torch.cuda.device(index), worker.autocast(), measured:  # set for each thread
                return call(model, part)

        return list(self.pool.map(run_one, range(len(models)), models, placed, devices))

    @abstractmethod
    def copies(self, devices: list[torch.device]) -> Sequence[nn.Module]:
        """Return replicas on these devices, with the first replica's parameters and buffers."""

    @abstractmethod
    def gather(self, outputs: list[Tensor]) -> Tensor:
        """Concatenate all outputs on the first device.

        A backward pass through the result sums all replicas' gradients in the first replica.
        """


@final
class GpuReplicas(Replicas):
    """Replicas on several GPUs. Autograd sums all gradients in the first replica."""

    def copies(self, devices: list[torch.device]) -> Sequence[nn.Module]:
        """Broadcast the parameters and buffers to all GPUs."""
        copies: Sequence[nn.Module] = replicate(self.worker.model, devices)
        return copies

    def gather(self, outputs: list[Tensor]) -> Tensor:
        """Call torch's ``gather``. Autograd later sends the gradients back to the replicas."""
        with self.clock.communicating():
            gathered: Tensor = gather(outputs, self.devices[0])
        return gathered


@final
class ThreadReplicas(Replicas):
    """Replicas on one device, with the same steps as on GPUs.

    On emulated devices, each exchange takes the time of NCCL's algorithm, as torch uses on GPUs.
    """

    def __init__(self, worker: Worker) -> None:
        super().__init__(worker, [worker.device] * worker.world_size)
        others = [worker.make_model().train() for _ in self.devices[1:]]
        self.models = [worker.model, *others]

    @torch.no_grad()
    def copies(self, devices: list[torch.device]) -> Sequence[nn.Module]:
        """Copy the parameters and buffers. As in torch, this overwrites other replicas' buffers."""
        first, *others = self.models[: len(devices)]
        for other in others:
            for mine, theirs in zip(first.parameters(), other.parameters(), strict=True):
                theirs.copy_(mine)
            copy_buffers(first, other)
        self.clock.exchange("broadcast", num_bytes(state_of(first)), len(devices), self.clock.scale)
        return self.models[: len(devices)]

    def gather(self, outputs: list[Tensor]) -> Tensor:
        """Concatenate the outputs. On CPUs, a thread runs each replica's backward pass."""

        def go_back(gradient: Tensor) -> None:
            slices = gradient.split([len(output) for output in outputs])
            self.clock.exchange("scatter", num_bytes(slices[:1]), len(slices))
            if self.worker.device.type == "cpu":
                list(self.pool.map(Tensor.backward, outputs, slices))  # wait for all threads
            else:  # autograd's only thread for a GPU runs this hook, so others would wait forever
                torch.autograd.backward(outputs, list(slices))
            self.sum_gradients()

        self.clock.computed()
        with self.clock.communicating():
            gathered = torch.cat([output.detach() for output in outputs]).requires_grad_()
        self.clock.exchange("gather", num_bytes(outputs[:1]), len(outputs))
        gathered.register_hook(go_back)
        return gathered

    @torch.no_grad()
    def sum_gradients(self) -> None:
        """Add the gradients of the other replicas to the first replica's gradients."""
        first, *others = ([*each.parameters()] for each in self.models)
        self.clock.computed()
        size = num_bytes(each for each in first if each.requires_grad)
        self.clock.exchange("reduce", size, 1 + len(others), self.clock.scale)
        with self.clock.communicating():
            for other in others:
                for mine, theirs in zip(first, other, strict=True):
                    if mine.grad is None:  # e.g. only the other replica used this expert
                        mine.grad = theirs.grad
                    elif theirs.grad is not None:
                        mine.grad.add_(theirs.grad)
                    theirs.grad = None
