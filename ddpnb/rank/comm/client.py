"""How does a worker send its gradient, and get parameters and work?  (Every rank.)

A transport is a ``Host`` on rank 0, which takes the calls of the workers of other ranks to the
server, and a ``Channel`` for each of these workers.  Where both ends send messages, a ``Wire``
is all that differs; ``serve`` and ``WireChannel`` are its two ends.
"""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

from torch import Tensor, nn

from ddpnb.rank.cancellation import CancellationToken
from ddpnb.rank.comm.messages import (
    NOBODY,
    REPLY_BYTES,
    REQUEST_BYTES,
    Asked,
    PeerGoneError,
    RankLostError,
    Reply,
    Request,
)
from ddpnb.rank.comm.packed_tensors import PackedTensors
from ddpnb.rank.comm.parameter_server import SERVER_RANK, Server
from ddpnb.rank.comm.rendezvous import Rendezvous

Gradients = Sequence[Tensor | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where one worker of a run stands."""

    rank: int
    world_size: int
    folder: Path
    """What all ranks of this host, and nobody else, can reach."""
    name: str
    """Of the run."""
    transport: str
    """One of ``training.TRANSPORTS``; the same on every rank."""
    parameters: Sequence[nn.Parameter]
    """What is trained, on this worker's device."""
    timeout_seconds: float
    """How long the server may take to answer."""
    cancellation: CancellationToken
    """Frees this rank from waiting for another."""

    @property
    def others(self) -> range:
        """All ranks but the server's."""
        return range(1, self.world_size)


def rendezvous_of(place: Place) -> Rendezvous:
    """Return where the ranks of a run agree on its beginnings and its end."""
    return Rendezvous(
        place.name, place.rank, place.folder, place.timeout_seconds, place.cancellation
    )


class ServerTransport(ABC):
    """The server's end of a transport; it takes calls, in threads, from its making."""

    @abstractmethod
    def settle(self) -> None:
        """Wait until the last answer of every worker is on its way."""

    @abstractmethod
    def close(self) -> None:
        """End the threads, remove what is left in the folder; may be called twice."""


class Channel(ABC):
    """A worker's end of a transport; raises ``PeerGoneError`` where the server is gone."""

    copies: Sequence[PackedTensors]
    """Where the parameters of an answer lie: the copy that it names."""

    @abstractmethod
    def ask(self, asked: Asked, gradients: Gradients = ()) -> Reply:
        """Ask the server, with gradients to push; wait for its answer, except to ``LEAVE``."""

    @abstractmethod
    def close(self) -> None:
        """Hang up; may be called twice."""


class Wire(ABC):
    """One end of a connection; everything raises ``PeerGoneError`` where the other is gone."""

    @abstractmethod
    def send(self, data: bytes) -> None:
        """Send bytes."""

    @abstractmethod
    def receive(self, num_bytes: int) -> bytes:
        """Return exactly so many bytes."""

    def send_tensor(self, tensor: Tensor) -> None:  # noqa: B027
        """Send a tensor; nothing to do where it lies in memory that both ends share."""

    def receive_tensor(self, tensor: Tensor) -> None:  # noqa: B027
        """Fill a tensor; nothing to do where the other end has filled it."""


@final
class ServerClient:
    """One worker's way to the server.

    Every call blocks until the server lets the worker go on, and raises ``RankLostError``
    where the run is over.  ``close`` before ``finish`` ends the run for all.

    Args:
        channel: to the server; closed with this.
        parameters: the parameters to train, on this worker's device.
    """

    def __init__(self, channel: Channel, parameters: Sequence[nn.Parameter]) -> None:
        self._channel = channel
        self._parameters = parameters
        self._landing = Landing(parameters, channel.copies)
        self._is_over = False

    def begin(self) -> Reply:
        """Wait until all workers are there; take the first parameters and share."""
        return self._ask(Asked(Request.BEGIN))

    def push(self, weight: float = 1.0) -> Reply:
        """Send the gradients that the parameters have; take parameters and the next share.

        Args:
            weight: this worker's share of the global batch, which the gradients do not have.
        """
        return self._ask(Asked(Request.PUSH, weight), [p.grad for p in self._parameters])

    def finish(self) -> None:
        """Wait until all workers are done; take the final parameters, into own memory."""
        self._ask(Asked(Request.DONE))
        self._is_over = True
        self.close()

    def close(self) -> None:
        """Say that this worker failed, if it has not finished, and hang up."""
        if not self._is_over:
            self._is_over = True
            with contextlib.suppress(PeerGoneError):
                self._channel.ask(Asked(Request.LEAVE))
        self._landing.leave()
        self._channel.close()

    def _ask(self, asked: Asked, gradients: Gradients = ()) -> Reply:
        try:
            reply = self._channel.ask(asked, gradients)
        except PeerGoneError as error:
            self._is_over = True
            raise RankLostError(SERVER_RANK) from error
        if reply.lost_rank != NOBODY:
            self._is_over = True
            raise RankLostError(reply.lost_rank)
        self._landing.take(reply.copy)
        return reply


class Landing:
    """Where a worker's parameters come in: in place where they are on the CPU, else copied.

    Args:
        parameters: the parameters to train, on this worker's device.
        copies: where they may be written to.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], copies: Sequence[PackedTensors]) -> None:
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
        for n, parameter in self._copied:
            parameter.data.copy_(tensors[n])

    def leave(self) -> None:
        """Give the parameters memory of their own; may be called twice."""
        if self._number is not None:
            self._number = None
            for _, parameter in self._in_place:
                parameter.data = parameter.data.clone()


@final
class DirectChannel(Channel):
    """The way of rank 0's own worker: a call.

    Args:
        server: the server, in this process.
    """

    def __init__(self, server: Server) -> None:
        self._server = server
        self.copies = server.store.copies

    def ask(self, asked: Asked, gradients: Gradients = ()) -> Reply:
        """Call the server; where it failed in this very process, raise what it failed of."""
        reply = answer(self._server, SERVER_RANK, None, asked, on_cpu(gradients))
        if reply.lost_rank != NOBODY and self._server.error is not None:
            raise self._server.error
        return reply

    def close(self) -> None:
        """Nothing to hang up."""


@final
class WireChannel(Channel):
    """The way of a worker of another rank.

    Args:
        wire: to the server's thread for this worker.
        gradients: where they are packed, or shared with the server.
        copies: as of every channel.
        opened: closes the wire.
    """

    def __init__(
        self,
        wire: Wire,
        gradients: PackedTensors,
        copies: Sequence[PackedTensors],
        opened: contextlib.ExitStack,
    ) -> None:
        self.copies = copies
        self._wire = wire
        self._gradients = gradients
        self._opened = opened

    def ask(self, asked: Asked, gradients: Gradients = ()) -> Reply:
        """Send the request and the gradients, receive the answer and the parameters."""
        # Where the server has hung up, its last word, read next, says why.
        with contextlib.suppress(PeerGoneError):
            if asked.request is Request.PUSH:
                _write(self._gradients.tensors, gradients)
            self._wire.send(asked.pack())
            if asked.request is Request.PUSH:
                self._wire.send_tensor(self._gradients.raw)
        if asked.request is Request.LEAVE:
            return Reply()
        reply = Reply.unpack(self._wire.receive(REPLY_BYTES))
        if reply.lost_rank == NOBODY:
            self._wire.receive_tensor(self.copies[reply.copy].raw)
        return reply

    def close(self) -> None:
        """Hang up."""
        self._opened.close()


def answer(server: Server, rank: int, life: object, asked: Asked, gradients: Gradients) -> Reply:
    """Carry one request to the server; what goes wrong in it ends the run, and rank 0 raises it.

    Args:
        server: of this process.
        rank: the worker.
        life: which of the rank's processes it is.
        asked: what it asks.
        gradients: with a push.
    """
    try:
        match asked.request:
            case Request.PUSH:
                return server.push(rank, gradients, asked.weight, life)
            case Request.BEGIN:
                return server.begin(rank, life)
            case Request.DONE:
                return server.finish(rank, life)
            case Request.LEAVE:
                return server.leave(rank)
    except RankLostError as lost:
        return Reply(lost_rank=lost.rank)
    except Exception as error:  # noqa: BLE001  # the thread's edge
        server.fail(SERVER_RANK, error)
        return Reply(lost_rank=SERVER_RANK)


def serve(server: Server, rank: int, wire: Wire, gradients: PackedTensors) -> None:
    """Carry one worker's requests to the server until it is done, is lost or has failed."""
    life, request, lost_rank = object(), Request.BEGIN, NOBODY
    try:
        while request in (Request.BEGIN, Request.PUSH) and lost_rank == NOBODY:
            asked = Asked.unpack(wire.receive(REQUEST_BYTES))
            request = asked.request
            if request is Request.PUSH:
                wire.receive_tensor(gradients.raw)
            reply = answer(server, rank, life, asked, gradients.tensors)
            lost_rank = reply.lost_rank
            if request is not Request.LEAVE:
                wire.send(reply.pack())
                if lost_rank == NOBODY:
                    wire.send_tensor(server.parameters(reply))
    except PeerGoneError:
        server.lose(rank, life)
        with contextlib.suppress(PeerGoneError):  # it may live: it was given up, or rank 0 hangs up
            wire.send(Reply(lost_rank=server.reason(rank)).pack())


def on_cpu(gradients: Gradients) -> list[Tensor | None]:
    """Return gradients where the server can use them: as they are or, from a GPU, copied."""
    return [None if gradient is None else gradient.cpu() for gradient in gradients]


def _write(slots: Sequence[Tensor], gradients: Gradients) -> None:
    """Copy gradients; one that is missing is zero."""
    for slot, gradient in zip(slots, gradients, strict=True):
        if gradient is None:
            slot.zero_()
        else:
            slot.copy_(gradient)


def _fits(parameter: nn.Parameter) -> bool:
    return parameter.device.type == "cpu" and parameter.is_contiguous()
