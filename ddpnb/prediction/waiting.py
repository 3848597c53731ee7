"""Computes how long ranks wait for a server, a core or a slow rank.  Runs in the kernel."""

import math
from functools import cache

import numpy as np

from ddpnb.protocol.costs import Cost
from ddpnb.protocol.notation import LinkSpec

SLICE_SECONDS = 3e-3
"""Seconds that Linux lets one process run while other processes wait for the core."""


def server_bound(link: LinkSpec, size: float, compute: float, num_workers: int) -> float:
    """Return the number of gradients per second that a server receives from N equal workers.

        min( N / (c + e), 1 / s ),    e = 2 (a + S b),    s = S b

    A worker computes for c seconds.  An undisturbed exchange takes e seconds: S bytes each way, at
    b seconds per byte, with latency a.  The server's link needs s seconds for one gradient.  Both
    limits are asymptotes of a closed queue, reached if all times are constant (Denning, Buzen, "The
    Operational Analysis of Queueing Network Models", ACM Computing Surveys 10(3), 1978).
    """
    message = Cost(1, size).seconds(link)
    busiest = message - link.latency_seconds
    alone = num_workers / (compute + 2 * message)
    return min(alone, 1 / busiest) if busiest > 0 else alone


def on_cores(work: float, num_ranks: int, num_cores: float) -> float:
    """Return the time until all ranks finish, if each rank needs ``work`` on a free core.

    N ranks wait in one queue and take turns on C cores, one time slice per turn.  If each rank
    needs k slices, the last rank finishes after ceil(N k / C) slices.  Times are in seconds.
    """
    if num_ranks <= num_cores or work <= 0:
        return work
    num_slices = math.ceil(work / SLICE_SECONDS)
    rounds = math.ceil(num_ranks * num_slices / num_cores)
    return rounds * work / num_slices


@cache
def expected_max(num: int) -> float:
    """Return the expected maximum of ``num`` independent standard normal values.

    The result is the integral of x d(F(x)^N), about sqrt(2 ln N).  F is the normal distribution.
    Source: David and Nagaraja, "Order Statistics", 2003, chapters 3 and 4.
    """
    if num == 1:
        return 0.0
    x = np.linspace(0.0, 10.0, 4001)
    tail = np.array([0.5 * math.erfc(value / math.sqrt(2)) for value in x])
    # E[max] = integral over x > 0 of 1 - F(x)^N - F(-x)^N
    return float(np.trapezoid(1 - (1 - tail) ** num - tail**num, x))
