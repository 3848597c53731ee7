"""The messages between a worker and the parameter server (ranks).

Each is a few numbers of fixed size, never a pickle.  Tensors travel beside them.
"""

import struct
from enum import IntEnum
from typing import NamedTuple, Self

NO_RANK = -1

_REQUEST = struct.Struct("<qd")
_REPLY = struct.Struct("<qqqqdqq?")
REQUEST_BYTES, REPLY_BYTES = _REQUEST.size, _REPLY.size


class PeerGoneError(Exception):
    """The other end has closed its socket, or its process has died."""


class RankLostError(RuntimeError):
    """A rank left in the middle of a run, or makes no progress: the run is over."""

    def __init__(self, rank: int) -> None:
        super().__init__(
            f"Rank {rank} left in the middle of the run, or no longer answers "
            "(slow steps need a longer timeout, as in async:timeout=120)."
        )
        self.rank = rank


class RunOverError(Exception):
    """There is no server to join: the run has ended."""


class RequestKind(IntEnum):
    """What a worker requests."""

    BEGIN = 1
    """The first parameters and shards, once all workers have arrived."""
    PUSH = 2
    """The next parameters and shard, in exchange for a gradient."""
    DONE = 3
    """The final parameters: the worker has made its last step."""
    LEAVE = 4
    """Nothing: the worker has the final parameters, or has failed."""


class WorkerRequest(NamedTuple):
    """A worker's request, without its tensors."""

    kind: RequestKind
    weight: float = 0.0
    """Of the pushed gradient: the worker's share of the global batch."""

    def pack(self) -> bytes:
        """Return this as bytes."""
        return _REQUEST.pack(*self)

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        """Return the request that was packed."""
        kind, weight = _REQUEST.unpack(data)
        return cls(RequestKind(kind), weight)


class Reply(NamedTuple):
    """The server's reply, without the parameters."""

    staleness: int = 0
    """Updates by others between this worker's pull and the use of its gradient."""
    first_shard: int = 0
    num_shards: int = 0
    stride: int = 1
    """Numbers of the next shards: this many, this far apart; none at the end."""
    waited_seconds: float = 0.0
    """How long the reply had to wait for other workers."""
    lost_rank: int = NO_RANK
    """The lost rank that ended the run; then there are no parameters."""
    copy: int = 0
    """The copy of the parameters to train on, for a worker that shares the server's memory."""
    is_complete: bool = True
    """Whether no worker has been lost so far."""

    @property
    def shards(self) -> range:
        """Numbers of the shards to train on, after those handed out before."""
        end = self.first_shard + self.num_shards * self.stride
        return range(self.first_shard, end, self.stride)

    def pack(self) -> bytes:
        """Return this as bytes."""
        return _REPLY.pack(*self)

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        """Return the reply that was packed."""
        return cls(*_REPLY.unpack(data))
