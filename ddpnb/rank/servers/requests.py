"""What a worker asks of the queue, and what it is answered: a few numbers of fixed size (ranks)."""

import struct
from enum import IntEnum
from typing import NamedTuple

NO_RANK = -1
REQUEST, REPLY = struct.Struct("<qd"), struct.Struct("<qqqqqdqqd")
"""A request's kind and weight, and the fields of ``Reply``, as bytes."""


class RequestKind(IntEnum):
    """What a worker requests."""

    BEGIN = 1
    """The first shards and parameters, once all workers have arrived."""
    STEP = 2
    """The next shard and parameters, in exchange for a gradient or an update."""
    DONE = 3
    """The final parameters, once all workers have made their last step."""
    FAIL = 4
    """Nothing, not even a reply: the worker has failed."""


class Reply(NamedTuple):
    """The reply, without the parameters."""

    staleness: int = 0
    """Updates by others between this worker's read and its write."""
    version: int = 0
    """The number of the update that it goes into."""
    first_shard: int = 0
    num_shards: int = 0
    stride: int = 1
    """Numbers of the next shards: this many, this far apart; none at the end."""
    waited_seconds: float = 0.0
    """How long the reply had to wait for other workers."""
    lost_rank: int = NO_RANK
    """The lost rank that ended the run; then there are no parameters."""
    copy: int = 0
    """The copy of the parameters to train on."""
    now: float = 0.0
    """The virtual time at which an emulated worker has the reply."""

    @property
    def shards(self) -> range:
        """Numbers of the shards to train on, after those handed out before."""
        end = self.first_shard + self.num_shards * self.stride
        return range(self.first_shard, end, self.stride)
