"""Serves a parameter server's emulated workers in order of virtual time.  Runs on rank 0.

When a worker takes a shard, ddpnb computes when the worker's gradient will arrive.  The server
waits for the real gradient of the worker that is first in virtual time, even if other workers are
faster in real time.  The server receives only one gradient at a time, and sends the parameters to
only one worker at a time.  The worker on rank 0 does not need the server's link.
"""

import math
from collections.abc import Callable, Collection
from dataclasses import KW_ONLY, dataclass
from typing import Any, Final, final

from ddpnb.protocol.costs import Cost
from ddpnb.protocol.notation import LinkSpec
from ddpnb.rank.emulation import Emulation

SERVER_RANK: Final = 0
RETURN_SECONDS: Final = 1.0
"""Virtual seconds until a new process replaces a worker that has died."""


@final
@dataclass(eq=False)
class VirtualOrder:
    """The virtual times at which workers make their next requests.

    The queue calls every method while it holds its lock.
    """

    emulation: Emulation
    """Computing times of the workers, and links between the workers and the server."""
    _: KW_ONLY
    num_workers: int
    """Number of workers that begin together at time 0."""
    shard: Callable[[int], Any]
    """Function that takes a number in the queue and returns the shard with this number."""

    def __post_init__(self) -> None:
        self.now = 0.0
        """Time at which the latest request arrived."""
        workers = range(self.num_workers)
        self._ready = dict.fromkeys(workers, 0.0)
        """Time of each worker's next request.  Infinite if the worker waits or has ended."""
        self._received = dict.fromkeys(workers, 0.0)
        """Time at which each worker received its latest shard."""
        self._steps = dict.fromkeys(workers, 0)
        self._is_here: set[int] = set()
        """Workers with a next request that takes no time, because it is here or has no gradient."""
        self._in_until = self._out_until = 0.0
        """Time from which the server's link can receive, and time from which it can send."""

    def is_next(self, rank: int) -> bool:
        """Return True if this worker's request arrives first.  On a tie, the lower rank wins."""
        mine = self._arrival(rank), rank
        return all((self._arrival(other), other) >= mine for other in self._ready)

    def arrive(self, rank: int) -> None:
        """Accept a worker's request, and set ``now`` to the request's time of arrival."""
        self.now = self._arrival(rank)
        if not self._is_local(rank):
            self._in_until = self.now - self._link(rank).latency_seconds
        self._ready[rank] = math.inf
        self._is_here.discard(rank)

    def reply(self, rank: int, shard: int | None, *, is_first: bool = False) -> float:
        """Send a worker the parameters and the next shard now, and return their time of arrival.

        If ``shard`` is None, the worker has ended.  If ``is_first``, all workers begin and already
        have the parameters.
        """
        received = self.now
        if rank != SERVER_RANK and not is_first:
            link = self._link(rank)
            self._out_until = max(self.now, self._out_until) + self._seconds(link)
            received = self._out_until + link.latency_seconds
        self._received[rank], self._ready[rank] = received, math.inf
        if shard is not None:
            num_samples = self.emulation.num_in_shard(self.shard(shard))
            seconds = self.emulation.times.step(rank, self._steps[rank], num_samples)
            self._steps[rank] += 1
            self._ready[rank] = received + seconds
        return received

    def resume(self, rank: int) -> None:
        """Let a worker that waits for other workers continue now."""
        self._ready[rank] = self.now
        self._is_here.add(rank)

    def lose(self, rank: int) -> None:
        """Expect a new process for a dead worker."""
        self._ready[rank] = self._received[rank] + RETURN_SECONDS
        self._steps[rank] = 0
        self._is_here.add(rank)

    def leave(self, rank: int) -> None:
        """Stop waiting for a worker that has finished."""
        self._ready[rank] = math.inf

    def abandon(self, ranks: Collection[int]) -> bool:
        """Stop waiting for new processes of lost workers.  Return True if there were any."""
        expected = [rank for rank in ranks if self._ready[rank] < math.inf]
        for rank in expected:
            self.leave(rank)
        return bool(expected)

    def _is_local(self, rank: int) -> bool:
        return rank == SERVER_RANK or rank in self._is_here

    def _arrival(self, rank: int) -> float:
        """Return when a worker's request arrives if this request is the next on the link."""
        ready = self._ready[rank]
        if self._is_local(rank) or math.isinf(ready):
            return ready
        link = self._link(rank)
        return max(ready, self._in_until) + self._seconds(link) + link.latency_seconds

    def _link(self, rank: int) -> LinkSpec:
        return self.emulation.devices.link_between((SERVER_RANK, rank))

    def _seconds(self, link: LinkSpec) -> float:
        """Return the seconds that a link takes to send one gradient or one set of parameters."""
        return Cost(0, self.emulation.scale * self.emulation.num_bytes).seconds(link)
