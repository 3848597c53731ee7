"""In which order does a parameter server handle emulated workers?  (rank 0)

In that of virtual time.  When a worker takes a shard, it is known when its gradient will arrive: so
the server waits for the real gradient of the worker that is first, however late it comes in real
time.  Its link takes one gradient in and one copy of the parameters out at a time; rank 0's own
worker needs no link.
"""

import math
from collections.abc import Callable, Collection
from dataclasses import KW_ONLY, dataclass
from typing import Any, Final, final

from ddpnb.protocol.costs import Messages
from ddpnb.protocol.notation import LinkSpec
from ddpnb.rank.laboratory import Laboratory

SERVER_RANK: Final = 0
RETURN_SECONDS: Final = 1.0
"""What it takes until a new process has the place of one that has died."""


@final
@dataclass(eq=False)
class VirtualOrder:
    """The virtual times at which workers make their next requests.

    The queue calls it under its lock.
    """

    laboratory: Laboratory
    """How long each worker computes, and what lies between it and the server."""
    _: KW_ONLY
    num_workers: int
    """Those that begin together, at 0."""
    shard: Callable[[int], Any]
    """Returns the shard of a number in the queue."""

    def __post_init__(self) -> None:
        self.now = 0.0
        """When the latest request arrived."""
        workers = range(self.num_workers)
        self._ready = dict.fromkeys(workers, 0.0)
        """When each worker makes its next request; infinite while it waits, or has ended."""
        self._received = dict.fromkeys(workers, 0.0)
        """When each worker had its latest shard."""
        self._steps = dict.fromkeys(workers, 0)
        self._is_here: set[int] = set()
        """Workers whose request has arrived before, or brings no gradient."""
        self._in_until = self._out_until = 0.0
        """When the server's link is free, in both directions."""

    def is_next(self, rank: int) -> bool:
        """Return whether no other worker's request arrives earlier; the lower rank goes first."""
        mine = self._arrival(rank), rank
        return all((self._arrival(other), other) >= mine for other in self._ready)

    def arrive(self, rank: int) -> None:
        """Take a worker's request, for which ``now`` becomes the time."""
        self.now = self._arrival(rank)
        if not self._is_local(rank):
            self._in_until = self.now - self._link(rank).latency_seconds
        self._ready[rank] = math.inf
        self._is_here.discard(rank)

    def reply(self, rank: int, shard: int | None, *, is_first: bool = False) -> float:
        """Send a worker the parameters and its next shard, now; return when it has them.

        Without a shard it has ended.  ``is_first``: all workers begin, with parameters that they
        have.
        """
        received = self.now
        if rank != SERVER_RANK and not is_first:
            link = self._link(rank)
            self._out_until = max(self.now, self._out_until) + self._seconds(link)
            received = self._out_until + link.latency_seconds
        self._received[rank], self._ready[rank] = received, math.inf
        if shard is not None:
            num_samples = self.laboratory.num_in_shard(self.shard(shard))
            seconds = self.laboratory.times.step(rank, self._steps[rank], num_samples)
            self._steps[rank] += 1
            self._ready[rank] = received + seconds
        return received

    def resume(self, rank: int) -> None:
        """Let a worker that waits for others go on now."""
        self._ready[rank] = self.now
        self._is_here.add(rank)

    def lose(self, rank: int) -> None:
        """Expect a new process for a worker that has died before its step."""
        self._ready[rank] = self._received[rank] + RETURN_SECONDS
        self._steps[rank] = 0
        self._is_here.add(rank)

    def leave(self, rank: int) -> None:
        """Wait for a worker no longer: it is done."""
        self._ready[rank] = math.inf

    def abandon(self, ranks: Collection[int]) -> bool:
        """Expect no new processes for lost workers; return whether any was expected."""
        expected = [rank for rank in ranks if self._ready[rank] < math.inf]
        for rank in expected:
            self.leave(rank)
        return bool(expected)

    def _is_local(self, rank: int) -> bool:
        return rank == SERVER_RANK or rank in self._is_here

    def _arrival(self, rank: int) -> float:
        """Return when a worker's request arrives if it is the next over the link."""
        ready = self._ready[rank]
        if self._is_local(rank) or math.isinf(ready):
            return ready
        link = self._link(rank)
        return max(ready, self._in_until) + self._seconds(link) + link.latency_seconds

    def _link(self, rank: int) -> LinkSpec:
        return self.laboratory.devices.link_between((SERVER_RANK, rank))

    def _seconds(self, link: LinkSpec) -> float:
        """Return how long a link takes for a gradient, or for a copy of the parameters."""
        return Messages(0, self.laboratory.scale * self.laboratory.num_bytes).seconds(link)
