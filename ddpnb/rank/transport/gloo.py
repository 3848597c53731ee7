"""How do ranks of different hosts exchange tensors?  By gloo's send and recv.  (Rank side.)

All ranks form a gloo group of the run's own.  Besides tensors go messages of fixed size, as
bytes.  Only members of the process group can take part: nobody joins later.
"""

import contextlib
import threading
from collections.abc import Sequence
from enum import IntEnum
from functools import partial
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddpnb.rank.transport.host import Caller, Host, serve
from ddpnb.rank.transport.link import Landing, Link, write_gradients
from ddpnb.rank.transport.meeting import seconds
from ddpnb.rank.transport.message import (
    NOBODY,
    REPLY_BYTES,
    Asked,
    PeerGoneError,
    RankLostError,
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


class GlooGroup:
    """The group of one run; takes part: every rank.

    Args:
        timeout_seconds: how long one message may take.
    """

    def __init__(self, timeout_seconds: float) -> None:
        self._group = dist.new_group(backend="gloo", timeout=seconds(timeout_seconds))
        self._is_open = True

    def send(self, tensor: Tensor, rank: int, tag: _Tag) -> None:
        """Send a tensor.

        Raises:
            PeerGoneError: by this and ``receive``: the other rank is gone.
        """
        try:
            dist.send(tensor, rank, group=self._group, tag=tag)
        except RuntimeError as error:
            raise PeerGoneError from error

    def receive(self, tensor: Tensor, rank: int, tag: _Tag) -> None:
        """Fill a tensor."""
        try:
            dist.recv(tensor, rank, group=self._group, tag=tag)
        except RuntimeError as error:
            raise PeerGoneError from error

    def close(self) -> None:
        """Leave the group; may be called twice."""
        if self._is_open:
            self._is_open = False
            dist.destroy_process_group(self._group)


@final
class GlooHost(Host):
    """A thread for each other rank, which waits for its messages.

    Args:
        server: what the workers call.
        group: the run's own.
        ranks: the workers of other ranks.
        timeout_seconds: how long a thread may take to end.
    """

    def __init__(
        self, server: Server, group: GlooGroup, *, ranks: Sequence[int], timeout_seconds: float
    ) -> None:
        self._group = group
        self._timeout = timeout_seconds
        self._threads = [
            threading.Thread(
                target=partial(serve, server, _GlooCaller(group, rank, server)),
                name="ddpnb-server",
                daemon=True,
            )
            for rank in ranks
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
    def __init__(self, group: GlooGroup, rank: int, server: Server) -> None:
        self.rank = rank
        self.gradients = pack(server.master.tensors)
        self._parameters = server.parameters
        self._group = group

    def receive(self) -> Asked:
        numbers = torch.empty(2, dtype=torch.float64)
        self._group.receive(numbers, self.rank, _Tag.REQUEST)
        request, weight = numbers.tolist()
        asked = Asked(Request(int(request)), weight)
        if asked.request is Request.PUSH:
            self._group.receive(self.gradients.raw, self.rank, _Tag.GRADIENTS)
        return asked

    def answer(self, reply: Reply) -> None:
        data = torch.frombuffer(bytearray(reply.pack()), dtype=torch.uint8)
        self._group.send(data, self.rank, _Tag.REPLY)
        if reply.lost_rank == NOBODY:
            self._group.send(self._parameters(reply), self.rank, _Tag.PARAMETERS)


@final
class GlooLink(Link):
    """A worker's messages to rank 0.

    Args:
        group: the run's own.
        parameters: the parameters to train, on this worker's device.
    """

    def __init__(self, group: GlooGroup, parameters: Sequence[nn.Parameter]) -> None:
        self._group = group
        self._parameters = parameters
        self._gradients = pack(parameters)
        self._received = pack(parameters)
        self._landing = Landing(parameters, [self._received])
        self._is_over = False

    def begin(self) -> Reply:
        """Wait for the first answer."""
        return self._take()

    def push(self, weight: float = 1.0) -> Reply:
        """Send the gradients, and wait for the answer."""
        write_gradients(self._gradients.tensors, self._parameters)
        self._ask(Asked(Request.PUSH, weight))
        self._send(self._gradients.raw, _Tag.GRADIENTS)
        return self._take()

    def finish(self) -> None:
        """Wait for the last answer."""
        self._ask(Asked(Request.DONE))
        self._take()
        self._is_over = True
        self.close()

    def close(self) -> None:
        """Say that this worker failed, if it has not finished; leave the group."""
        if not self._is_over:
            self._is_over = True
            with contextlib.suppress(RankLostError):
                self._ask(Asked(Request.LEAVE))
        self._landing.leave()
        self._group.close()

    def _ask(self, asked: Asked) -> None:
        self._send(torch.tensor(asked, dtype=torch.float64), _Tag.REQUEST)

    def _send(self, tensor: Tensor, tag: _Tag) -> None:
        try:
            self._group.send(tensor, SERVER_RANK, tag)
        except PeerGoneError as error:
            self._is_over = True
            raise RankLostError(SERVER_RANK) from error

    def _take(self) -> Reply:
        data = torch.empty(REPLY_BYTES, dtype=torch.uint8)
        try:
            self._group.receive(data, SERVER_RANK, _Tag.REPLY)
            reply = Reply.unpack(bytes(data.tolist()))
            self._group.receive(self._received.raw, SERVER_RANK, _Tag.PARAMETERS)
        except PeerGoneError as error:
            self._is_over = True
            raise RankLostError(SERVER_RANK) from error
        except RankLostError:
            self._is_over = True
            raise
        self._landing.take()
        return reply
