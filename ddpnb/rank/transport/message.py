"""What do a worker and the parameter server tell each other?  (Rank side.)

Besides tensors, a few numbers of fixed size, never a pickle.
"""

import socket
import struct
from enum import IntEnum
from typing import NamedTuple

KEY_BYTES = 32
"""Length of the secret that a worker shows when it connects."""
NOBODY = -1

_HELLO = struct.Struct(f"<{KEY_BYTES}sq")
_REQUEST = struct.Struct("<qd")
_REPLY = struct.Struct("<qqqqdqq")
REPLY_BYTES = _REPLY.size


class PeerGoneError(Exception):
    """The other end has closed its socket, or its process has died."""


class RankLostError(RuntimeError):
    """A rank has left in the middle of a run, or makes no progress: the run is over."""

    def __init__(self, rank: int) -> None:
        super().__init__(f"Rank {rank} left in the middle of the run, or no longer answers.")
        self.rank = rank


class RunOverError(Exception):
    """There is no server to join: the run has ended."""


class Request(IntEnum):
    """What a worker asks of the server."""

    PUSH = 1
    """Here is my gradient; give me parameters and my next share."""
    DONE = 2
    """I have made my last step; give me the final parameters."""
    LEAVE = 3
    """I have failed; no answer is wanted."""


class Asked(NamedTuple):
    """What a worker asks, in full."""

    request: Request
    weight: float = 0.0
    """Of the gradient that is pushed: the worker's share of the global batch."""


class Reply(NamedTuple):
    """What the server answers, with the parameters."""

    staleness: int = 0
    """Updates by others between this worker's pull and the use of its gradient."""
    first_share: int = 0
    num_shares: int = 0
    stride: int = 1
    """Numbers of the shares to train on next, so far apart; none at the end."""
    waited_seconds: float = 0.0
    """How long the answer had to wait for other workers."""
    lost_rank: int = NOBODY
    """Why there are no parameters: who left in the middle of the run."""
    copy: int = 0
    """Which copy of the parameters to train on, for who shares their memory with the server."""

    @property
    def shares(self) -> range:
        """Numbers of the shares to train on, after those handed out before."""
        end = self.first_share + self.num_shares * self.stride
        return range(self.first_share, end, self.stride)

    def pack(self) -> bytes:
        """Return this as bytes."""
        return _REPLY.pack(*self)

    @classmethod
    def unpack(cls, data: bytes) -> "Reply":
        """Return what was packed.

        Raises:
            RankLostError: where it says that somebody is lost.
        """
        reply = cls(*_REPLY.unpack(data))
        if reply.lost_rank != NOBODY:
            raise RankLostError(reply.lost_rank)
        return reply


def send_hello(connection: socket.socket, key: bytes, rank: int) -> None:
    """Show the secret and say who is calling."""
    send(connection, _HELLO.pack(key, rank))


def receive_hello(connection: socket.socket) -> tuple[bytes, int]:
    """Return the secret and the rank of who is calling."""
    key, rank = _HELLO.unpack(receive(connection, _HELLO.size))
    return key, rank


def send_request(connection: socket.socket, asked: Asked) -> None:
    """Ask the server."""
    send(connection, _REQUEST.pack(*asked))


def receive_request(connection: socket.socket) -> Asked:
    """Return what a worker asks."""
    request, weight = _REQUEST.unpack(receive(connection, _REQUEST.size))
    return Asked(Request(request), weight)


def set_timeout(connection: socket.socket, seconds: float) -> None:
    """Bound each wait by the kernel's own clock: Python's costs a system call more for each."""
    connection.settimeout(None)
    value = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        connection.setsockopt(socket.SOL_SOCKET, option, value)


def send(connection: socket.socket, data: bytes) -> None:
    """Send bytes.

    Raises:
        PeerGoneError: the other end is gone, or does not take them.
    """
    try:
        connection.sendall(data)
    except OSError as error:
        raise PeerGoneError from error


def receive(connection: socket.socket, num_bytes: int) -> bytes:
    """Return exactly so many bytes.

    Raises:
        PeerGoneError: the other end is gone, or was silent for longer than the timeout.
    """
    data = b""
    while len(data) < num_bytes:
        try:
            part = connection.recv(num_bytes - len(data))
        except OSError as error:
            raise PeerGoneError from error
        if not part:
            raise PeerGoneError
        data += part
    return data
