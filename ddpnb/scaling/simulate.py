"""What happens event by event, where no formula holds; and stragglers, by chance.  (Kernel.)

Everything is deterministic: the same input gives the same times.  Where a formula holds, as for
ranks that begin at once, these give what it gives; the tests compare them.
"""

import heapq
import math
from collections import deque
from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple, final

import numpy as np

from ddpnb.protocol.notation import LinkSpec
from ddpnb.scaling.links import message


@final
class Clock:
    """A queue of what happens next."""

    def __init__(self) -> None:
        self.now = 0.0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0

    def at(self, seconds: float, action: Callable[[], None]) -> None:
        """Call ``action`` at a time; of equal times, in the order of these calls."""
        self._number += 1
        heapq.heappush(self._queue, (seconds, self._number, action))

    def run(self, until: float = math.inf) -> None:
        """Make everything happen, up to a time."""
        while self._queue and self._queue[0][0] <= until:
            self.now, _, action = heapq.heappop(self._queue)
            action()


@final
class Server:
    """One link direction, or one processor: who comes first is served first."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._waiting: deque[tuple[float, Callable[[], None]]] = deque()
        self._is_busy = False
        self.busy_seconds = 0.0

    def serve(self, seconds: float, then: Callable[[], None]) -> None:
        """Take ``seconds`` once all that came before is done, then call ``then``."""
        self._waiting.append((seconds, then))
        if not self._is_busy:
            self._next()

    def _next(self) -> None:
        self._is_busy = bool(self._waiting)
        if not self._is_busy:
            return
        seconds, then = self._waiting.popleft()
        self.busy_seconds += seconds

        def end() -> None:
            then()
            self._next()

        self._clock.at(self._clock.now + seconds, end)


# -- all-reduces ---------------------------------------------------------------------------


def ring_all_reduce(spec: LinkSpec, size: float, starts: Sequence[float]) -> list[float]:
    """Return when each rank ends an all-reduce around the ring, message by message.

    A rank passes on what it has received, as soon as its own link is free; the latency passes on
    the way.

    Args:
        spec: each rank's link.
        size: bytes.
        starts: when each rank comes to it.
    """
    num = len(starts)
    if num == 1:
        return [starts[0]]
    clock = Clock()
    links = [Server(clock) for _ in starts]
    sending = size / num * 8 / spec.bits_per_second
    rounds = 2 * (num - 1)
    received = [0] * num
    sent = [0] * num
    ends = [0.0] * num
    has_come = [False] * num

    def send_if_able(rank: int) -> None:
        # message k may leave once message k - 1 has come in
        while has_come[rank] and sent[rank] < rounds and received[rank] >= sent[rank]:
            sent[rank] += 1
            links[rank].serve(
                sending,
                lambda: clock.at(
                    clock.now + spec.latency_seconds, lambda: arrive((rank + 1) % num)
                ),
            )

    def arrive(rank: int) -> None:
        received[rank] += 1
        ends[rank] = max(clock.now, starts[rank])
        send_if_able(rank)

    def come(rank: int) -> None:
        has_come[rank] = True
        send_if_able(rank)

    for rank, start in enumerate(starts):
        clock.at(start, lambda rank=rank: come(rank))  # type: ignore[misc]
    clock.run()
    return ends


class Bucket(NamedTuple):
    """A part of the gradients that is sent at once."""

    num_bytes: float
    ready: float
    """When its last gradient is there, as a share of the backward pass."""


def overlapped(
    backward: float, buckets: Sequence[Bucket], all_reduce: Callable[[float], float]
) -> float:
    """Return when the last bucket has been all-reduced, from the start of the backward pass.

    Buckets use one link in turn, as DDP sends them: each begins once it is ready and the one
    before has ended.  It is never before the end of the backward pass.
    """
    clock = Clock()
    link = Server(clock)
    ends = [backward]
    for bucket in buckets:
        seconds = all_reduce(bucket.num_bytes)
        clock.at(
            bucket.ready * backward,
            lambda seconds=seconds: link.serve(  # type: ignore[misc]
                seconds, lambda: ends.append(clock.now)
            ),
        )
    clock.run()
    return max(ends)


# -- a parameter server --------------------------------------------------------------------


def server_rate(
    spec: LinkSpec,
    size: float,
    compute: Sequence[float],
    *,
    update: float = 0.0,
    num_shards: int = 1,
    num_steps: int = 60,
) -> float:
    """Return how many gradients a parameter server takes in a second, worker by worker.

    Each worker computes, pushes its gradient and pulls the parameters.  Pushes follow each other
    into the server's link, pulls out of it; the update follows the push in the server's
    processor.  Each of ``num_shards`` servers on links of their own holds an equal part.

    Args:
        spec: every link.
        size: bytes of the gradients, and of the parameters.
        compute: seconds that each worker computes in a step.
        update: seconds of one whole update in the server.
        num_shards: servers.
        num_steps: of each worker; the first third is not counted.
    """
    clock = Clock()
    into, inside, out = ([Server(clock) for _ in range(num_shards)] for _ in range(3))
    sending = size / num_shards * 8 / spec.bits_per_second
    ends: list[float] = []

    def begin(worker: int) -> None:
        missing = [num_shards]

        def done() -> None:
            missing[0] -= 1
            if missing[0] == 0:
                ends.append(clock.now)
                if len(ends) < num_steps * len(compute):
                    begin(worker)

        def exchange() -> None:
            for shard in range(num_shards):
                into[shard].serve(sending, lambda s=shard: after(s, update_at))  # type: ignore[misc]

        def after(shard: int, then: Callable[[int], None]) -> None:
            clock.at(clock.now + spec.latency_seconds, lambda: then(shard))

        def update_at(shard: int) -> None:
            inside[shard].serve(update / num_shards, lambda: pull_from(shard))

        def pull_from(shard: int) -> None:
            out[shard].serve(sending, lambda: after(shard, lambda _: done()))

        clock.at(clock.now + compute[worker], exchange)

    for worker in range(len(compute)):
        begin(worker)
    clock.run()
    first = num_steps // 3 * len(compute) - 1
    last = num_steps * len(compute) - 1
    return (last - first) / (ends[last] - ends[first])


def server_bound(
    spec: LinkSpec,
    size: float,
    compute: float,
    num_workers: int,
    *,
    update: float = 0.0,
    num_shards: int = 1,
) -> float:
    """Return the same by formula, for workers that are alike.

        min( N / (c + e), 1 / s ),    e = 2 (a + S b / k) + u / k,    s = max(S b, u) / k

    c is what a worker computes, e an exchange that nobody disturbs, s what the busiest part of a
    server needs for each gradient: the asymptotes of a closed queue (Denning and Buzen, "The
    Operational Analysis of Queueing Network Models", ACM Computing Surveys 10(3), 1978), which
    are reached where nothing varies.
    """
    part = message(spec, size / num_shards)
    exchange = 2 * part + update / num_shards
    busiest = max(part - spec.latency_seconds, update / num_shards)
    alone = num_workers / (compute + exchange)
    return min(alone, 1 / busiest) if busiest > 0 else alone


# -- cores ---------------------------------------------------------------------------------

SLICE_SECONDS = 3e-3
"""How long Linux lets one process run where others wait for the core."""


def on_cores(
    work: float, num_ranks: int, num_cores: float, *, slice_: float = SLICE_SECONDS
) -> float:
    """Return when the last of some ranks has done its work, of which each needs one core.

    They take turns on the cores, a slice each, from one queue.  With k slices of work each,
    ceil(N k / C) slices follow each other: for short work N / C rounded up, for long work N / C.
    """
    if num_ranks <= num_cores or work <= 0:
        return work
    num_slices = math.ceil(work / slice_)
    rounds = math.ceil(num_ranks * num_slices / num_cores)
    return rounds * work / num_slices


# -- stragglers ----------------------------------------------------------------------------

DISTRIBUTIONS = ("normal", "exponential")


@cache
def expected_max(num: int, distribution: str = "normal") -> float:
    """Return the expected maximum of ``num`` independent values, in standard deviations.

    Above their mean, of values with mean 0 and standard deviation 1:

        normal       the integral of x d(F(x)^N), F the normal distribution; about sqrt(2 ln N)
        exponential  1 + 1/2 + ... + 1/N - 1, of values that are never below -1

    Source: David and Nagaraja, "Order Statistics", 2003, chapters 3 and 4.
    """
    if distribution not in DISTRIBUTIONS:
        raise ValueError(f"no distribution {distribution!r}")
    if num == 1:
        return 0.0
    if distribution == "exponential":
        return float(np.sum(1.0 / np.arange(1, num + 1))) - 1.0
    x = np.linspace(0.0, 10.0, 4001)
    tail = np.array([0.5 * math.erfc(value / math.sqrt(2)) for value in x])
    # E[max] = integral over x > 0 of 1 - F(x)^N - F(-x)^N
    return float(np.trapezoid(1 - (1 - tail) ** num - tail**num, x))
