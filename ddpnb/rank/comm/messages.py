"""What do a worker and the parameter server tell each other?  (Rank side.)

Besides tensors, a few numbers of fixed size, never a pickle.
"""

import struct
from enum import IntEnum
from typing import NamedTuple, Self

NOBODY = -1

_REQUEST = struct.Struct("<qd")
_REPLY = struct.Struct("<qqqqdqq?")
REQUEST_BYTES, REPLY_BYTES = _REQUEST.size, _REPLY.size


class PeerGoneError(Exception):
    """The other end has closed its socket, or its process has died."""


class RankLostError(RuntimeError):
    """A rank has left in the middle of a run, or makes no progress: the run is over."""

    def __init__(self, rank: int) -> None:
        super().__init__(
            f"Rank {rank} left in the middle of the run, or no longer answers "
            "(slow steps need a longer timeout, as in async:timeout=120)."
        )
        self.rank = rank


class RunOverError(Exception):
    """There is no server to join: the run has ended."""


class Request(IntEnum):
    """What a worker asks of the server."""

    BEGIN = 1
    """Give me the first parameters and share, when all workers are here."""
    PUSH = 2
    """Here is my gradient; give me parameters and my next share."""
    DONE = 3
    """I have made my last step; give me the final parameters."""
    LEAVE = 4
    """I have the final parameters, or else have failed; nothing is expected."""


class Asked(NamedTuple):
    """What a worker asks, in full."""

    request: Request
    weight: float = 0.0
    """Of the gradient that is pushed: the worker's share of the global batch."""

    def pack(self) -> bytes:
        """Return this as bytes."""
        return _REQUEST.pack(*self)

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        """Return what was packed."""
        request, weight = _REQUEST.unpack(data)
        return cls(Request(request), weight)


class Reply(NamedTuple):
    """What the server answers, with the parameters."""

    staleness: int = 0
    """Updates by others between this worker's pull and the use of its gradient."""
    first_shard: int = 0
    num_shards: int = 0
    stride: int = 1
    """Numbers of the shares to train on next, so far apart; none at the end."""
    waited_seconds: float = 0.0
    """How long the answer had to wait for other workers."""
    lost_rank: int = NOBODY
    """Why there are no parameters: who left in the middle of the run."""
    copy: int = 0
    """Which copy of the parameters to train on, for who shares their memory with the server."""
    is_complete: bool = True
    """Whether no worker has been lost so far."""

    @property
    def shards(self) -> range:
        """Numbers of the shares to train on, after those handed out before."""
        end = self.first_shard + self.num_shards * self.stride
        return range(self.first_shard, end, self.stride)

    def pack(self) -> bytes:
        """Return this as bytes."""
        return _REPLY.pack(*self)

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        """Return what was packed."""
        return cls(*_REPLY.unpack(data))
