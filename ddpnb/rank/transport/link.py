"""How does a worker send its gradient, and get parameters and work?  (Every rank.)"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor, nn

from ddpnb.rank.transport.message import Reply
from ddpnb.rank.transport.packed import Packed
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
    def push(self, weight: float = 1.0) -> Reply:
        """Send the gradients that the parameters have; take parameters and the next share.

        Args:
            weight: this worker's share of the global batch, which the gradients do not have.
        """

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
        copies: where they may be written to.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], copies: Sequence[Packed]) -> None:
        self._copies = copies
        numbered = list(enumerate(parameters))
        self._in_place = [(n, parameter) for n, parameter in numbered if _fits(parameter)]
        self._copied = [(n, parameter) for n, parameter in numbered if not _fits(parameter)]
        self._number: int | None = None
        """Of the copy that holds the parameters that are in place."""

    def take(self, number: int = 0) -> None:
        """Train on a copy from now on; bring in from it what is not in place."""
        tensors = self._copies[number].tensors
        if number != self._number:
            self._number = number
            for n, parameter in self._in_place:
                parameter.data = tensors[n]
        if self._copied:
            self._copy(tensors)

    def leave(self) -> None:
        """Give the parameters memory of their own; may be called twice."""
        if self._number is not None:
            self._number = None
            for _, parameter in self._in_place:
                parameter.data = parameter.data.clone()

    @torch.no_grad()
    def _copy(self, tensors: Sequence[Tensor]) -> None:
        for n, parameter in self._copied:
            parameter.copy_(tensors[n])


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
        self._landing = Landing(parameters, server.master.copies)
        self._is_over = False

    def begin(self) -> Reply:
        """Call the server."""
        return self._taken(self._server.begin(self._rank))

    def push(self, weight: float = 1.0) -> Reply:
        """Call the server, with the gradients as they are or, from a GPU, copied."""
        gradients = [None if p.grad is None else p.grad.cpu() for p in self._parameters]
        return self._taken(self._server.push(self._rank, gradients, weight))

    def finish(self) -> None:
        """Call the server."""
        self._taken(self._server.finish(self._rank))
        self._landing.leave()
        self._is_over = True

    def close(self) -> None:
        """Tell the server."""
        if not self._is_over:
            self._is_over = True
            self._server.fail(self._rank)
            self._landing.leave()

    def _taken(self, reply: Reply) -> Reply:
        self._landing.take(reply.copy)
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
