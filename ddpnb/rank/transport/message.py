"""What do a worker and the parameter server tell each other?  (Rank side.)

Tensors lie in shared memory; what goes through the socket is a few integers of fixed
size, never a pickle.  Every wait has a timeout, and a peer that is gone is an error.
"""

import socket
import struct
from dataclasses import astuple, dataclass, fields
from enum import IntEnum

KEY_BYTES = 32
"""Length of the secret that a worker shows when it connects."""
NO_SHARE = -1
NOBODY = -1

_HELLO = struct.Struct(f"<{KEY_BYTES}sq")
_REQUEST = struct.Struct("<q")
_REPLY = struct.Struct("<qq?q")


class PeerGoneError(Exception):
    """The other end has closed its socket, or its process has died."""


class RankLostError(RuntimeError):
    """A rank has left in the middle of a run, or makes no progress: the run is over."""

    def __init__(self, rank: int) -> None:
        super().__init__(f"Rank {rank} left in the middle of the run, or no longer answers.")
        self.rank = rank


class Request(IntEnum):
    """What a worker asks of the server; its gradient lies in shared memory by then."""

    PUSH = 1
    """Apply my gradient, give me the new parameters and my next share."""
    DONE = 2
    """I have made my last step: give me the parameters, and say whether everybody has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What the server answers; the parameters lie in shared memory by then."""

    staleness: int = 0
    """Updates by others between this worker's pull and the use of its gradient."""
    share: int = NO_SHARE
    """Number of the share to train on next; ``NO_SHARE`` at the end."""
    settled: bool = False
    """Whether every worker is done, so that these parameters are final."""
    lost_rank: int = NOBODY
    """Who left in the middle of the run, which is over for everybody."""


def send_hello(connection: socket.socket, key: bytes, rank: int) -> None:
    """Show the secret and say who is calling."""
    connection.sendall(_HELLO.pack(key, rank))


def receive_hello(connection: socket.socket) -> tuple[bytes, int]:
    """Return the secret and the rank of who is calling."""
    key, rank = _HELLO.unpack(_receive(connection, _HELLO.size))
    return key, rank


def send_request(connection: socket.socket, request: Request) -> None:
    """Ask the server."""
    _send(connection, _REQUEST.pack(request))


def receive_request(connection: socket.socket) -> Request:
    """Return what a worker asks."""
    return Request(*_REQUEST.unpack(_receive(connection, _REQUEST.size)))


def send_reply(connection: socket.socket, reply: Reply) -> None:
    """Answer a worker."""
    _send(connection, _REPLY.pack(*astuple(reply)))


def receive_reply(connection: socket.socket) -> Reply:
    """Return the server's answer."""
    names = (field.name for field in fields(Reply))
    values = _REPLY.unpack(_receive(connection, _REPLY.size))
    return Reply(**dict(zip(names, values, strict=True)))


def _send(connection: socket.socket, data: bytes) -> None:
    try:
        connection.sendall(data)
    except (BrokenPipeError, ConnectionResetError) as error:
        raise PeerGoneError from error


def _receive(connection: socket.socket, num_bytes: int) -> bytes:
    """Return exactly so many bytes; each wait is bounded by the socket's timeout."""
    data = b""
    while len(data) < num_bytes:
        try:
            part = connection.recv(num_bytes - len(data))
        except ConnectionResetError as error:
            raise PeerGoneError from error
        if not part:
            raise PeerGoneError
        data += part
    return data
