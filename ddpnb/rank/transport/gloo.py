"""How do ranks of different hosts exchange tensors?  By gloo's send and recv.  (Rank side.)

All ranks form a gloo group of the run's own.  Besides tensors go messages of fixed size, as
bytes.  Only members of the process group can take part: nobody joins later.
"""

import contextlib
import threading
from collections.abc import Iterator
from enum import IntEnum
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor

from ddpnb.rank.transport.link import (
    Caller,
    Channel,
    Gradients,
    Host,
    Place,
    serve,
    write_gradients,
)
from ddpnb.rank.transport.meeting import seconds
from ddpnb.rank.transport.message import (
    NOBODY,
    REPLY_BYTES,
    REQUEST_BYTES,
    Asked,
    PeerGoneError,
    Reply,
    Request,
)
from ddpnb.rank.transport.packed import pack
from ddpnb.rank.transport.server import SERVER_RANK, Server


class _Tag(IntEnum):
    """What a message between two ranks holds."""

    REQUEST = 1
    GRADIENTS = 2
    REPLY = 3
    PARAMETERS = 4


class _Group:
    """The group of one run; takes part: every rank."""

    def __init__(self, place: Place) -> None:
        timeout = seconds(place.timeout_seconds)
        self._group = dist.new_group(backend="gloo", timeout=timeout)
        self._is_open = True

    def send(self, tensor: Tensor, rank: int, tag: _Tag) -> None:
        """Send a tensor, or raise ``PeerGoneError``."""
        with _gone():
            dist.send(tensor, rank, group=self._group, tag=tag)

    def send_bytes(self, data: bytes, rank: int, tag: _Tag) -> None:
        """Send bytes, or raise ``PeerGoneError``."""
        self.send(torch.frombuffer(bytearray(data), dtype=torch.uint8), rank, tag)

    def receive(self, tensor: Tensor, rank: int, tag: _Tag) -> None:
        """Fill a tensor, or raise ``PeerGoneError``."""
        with _gone():
            dist.recv(tensor, rank, group=self._group, tag=tag)

    def receive_bytes(self, num_bytes: int, rank: int, tag: _Tag) -> bytes:
        """Return bytes, or raise ``PeerGoneError``."""
        data = torch.empty(num_bytes, dtype=torch.uint8)
        self.receive(data, rank, tag)
        return bytes(data.tolist())

    def close(self) -> None:
        """Leave the group; may be called twice."""
        if self._is_open:
            self._is_open = False
            dist.destroy_process_group(self._group)


@final
class GlooHost(Host):
    """A thread for each other rank, which waits for its messages; takes part: every rank."""

    def __init__(self, server: Server, place: Place) -> None:
        self._group = _Group(place)
        self._timeout = place.timeout_seconds
        self._threads = [
            threading.Thread(
                target=serve,
                args=(server, _GlooCaller(self._group, rank, server)),
                name="ddpnb-server",
                daemon=True,
            )
            for rank in place.others
        ]

    def start(self) -> None:
        """Start the threads."""
        for thread in self._threads:
            thread.start()

    def settle(self) -> None:
        """Wait for the threads: each ends with its worker's last message, or with its worker."""
        for thread in self._threads:
            if thread.is_alive():
                thread.join(self._timeout)

    def close(self) -> None:
        """Wait for the threads, leave the group."""
        self.settle()
        self._group.close()


@final
class _GlooCaller(Caller):
    def __init__(self, group: _Group, rank: int, server: Server) -> None:
        self.rank = rank
        self.gradients = pack(server.master.tensors)
        self._parameters = server.parameters
        self._group = group

    def receive(self) -> Asked:
        asked = Asked.unpack(self._group.receive_bytes(REQUEST_BYTES, self.rank, _Tag.REQUEST))
        if asked.request is Request.PUSH:
            self._group.receive(self.gradients.raw, self.rank, _Tag.GRADIENTS)
        return asked

    def answer(self, reply: Reply) -> None:
        self._group.send_bytes(reply.pack(), self.rank, _Tag.REPLY)
        if reply.lost_rank == NOBODY:
            self._group.send(self._parameters(reply), self.rank, _Tag.PARAMETERS)


@final
class GlooChannel(Channel):
    """A worker's messages to rank 0; takes part: every rank."""

    def __init__(self, place: Place) -> None:
        self._group = _Group(place)
        self._gradients, received = pack(place.parameters), pack(place.parameters)
        self.copies = [received] * place.world_size  # whichever the server names

    def ask(self, asked: Asked, gradients: Gradients = ()) -> Reply:
        """Send the request and the gradients, receive the answer and the parameters."""
        self._group.send_bytes(asked.pack(), SERVER_RANK, _Tag.REQUEST)
        if asked.request is Request.PUSH:
            write_gradients(self._gradients.tensors, gradients)
            self._group.send(self._gradients.raw, SERVER_RANK, _Tag.GRADIENTS)
        if asked.request is Request.LEAVE:
            return Reply()
        data = self._group.receive_bytes(REPLY_BYTES, SERVER_RANK, _Tag.REPLY)
        reply = Reply.unpack(data)
        if reply.lost_rank == NOBODY:
            self._group.receive(self.copies[0].raw, SERVER_RANK, _Tag.PARAMETERS)
        return reply

    def close(self) -> None:
        """Leave the group."""
        self._group.close()


@contextlib.contextmanager
def _gone() -> Iterator[None]:
    """Say as every transport does that the other rank is gone."""
    try:
        yield
    except RuntimeError as error:
        raise PeerGoneError from error
