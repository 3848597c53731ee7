"""How does a worker send its gradient, and get parameters and work?  (Every rank.)"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor, nn

from ddpnb.rank.transport.message import Reply
from ddpnb.rank.transport.packed import Packed, pack
from ddpnb.rank.transport.server import Server


class Link(ABC):
    """One worker's way to the server.

    Every call blocks until the server lets the worker go on, and raises ``RankLostError``
    where the run is over.  ``close`` before ``finish`` ends the run for all.
    """

    @abstractmethod
    def begin(self) -> Reply:
        """Wait until all workers are there; take the first parameters and share."""

    @abstractmethod
    def push(self) -> Reply:
        """Send the gradients that the parameters have; take parameters and the next share."""

    @abstractmethod
    def finish(self) -> None:
        """Wait until all workers are done; take the final parameters, into own memory."""

    @abstractmethod
    def close(self) -> None:
        """Hang up; may be called twice."""


class Landing:
    """Where a worker's parameters come in: in place where they are on the CPU, else copied.

    Args:
        parameters: the parameters to train, on this worker's device.
        memory: where the parameters are written to, for this worker.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], memory: Packed) -> None:
        self.memory = memory
        pairs = list(zip(parameters, memory.tensors, strict=True))
        self._in_place = [(p, slot) for p, slot in pairs if _fits(p)]
        self._copied = [(p, slot) for p, slot in pairs if not _fits(p)]
        for parameter, slot in self._in_place:
            slot.copy_(parameter.detach())
            parameter.data = slot

    def take(self) -> None:
        """Bring in what has been written."""
        if self._copied:
            self._copy()

    def leave(self) -> None:
        """Give the parameters memory of their own; may be called twice."""
        for parameter, slot in self._in_place:
            parameter.data = slot.clone()
        self._in_place = []

    @torch.no_grad()
    def _copy(self) -> None:
        for parameter, slot in self._copied:
            parameter.copy_(slot)


@final
class DirectLink(Link):
    """The way of rank 0's own worker: a call.

    Args:
        server: the server, in this process.
        rank: this worker.
        parameters: the parameters to train.
    """

    def __init__(self, server: Server, rank: int, parameters: Sequence[nn.Parameter]) -> None:
        self._server = server
        self._rank = rank
        self._parameters = parameters
        self._landing = Landing(parameters, pack(server.master.tensors))
        self._is_over = False

    def begin(self) -> Reply:
        """Call the server."""
        return self._taken(self._server.begin(self._rank, self._landing.memory))

    def push(self) -> Reply:
        """Call the server, with the gradients as they are or, from a GPU, copied."""
        gradients = [None if p.grad is None else p.grad.cpu() for p in self._parameters]
        return self._taken(self._server.push(self._rank, gradients, self._landing.memory))

    def finish(self) -> None:
        """Call the server."""
        self._taken(self._server.finish(self._rank, self._landing.memory))
        self._landing.leave()
        self._is_over = True

    def close(self) -> None:
        """Tell the server."""
        if not self._is_over:
            self._is_over = True
            self._server.fail(self._rank)
            self._landing.leave()

    def _taken(self, reply: Reply) -> Reply:
        self._landing.take()
        return reply


def write_gradients(slots: Sequence[Tensor], parameters: Sequence[nn.Parameter]) -> None:
    """Copy the parameters' gradients; one that is missing is zero."""
    for slot, parameter in zip(slots, parameters, strict=True):
        if parameter.grad is None:
            slot.zero_()
        else:
            slot.copy_(parameter.grad)


def _fits(parameter: nn.Parameter) -> bool:
    return parameter.device.type == "cpu" and parameter.is_contiguous()
