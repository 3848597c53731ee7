"""How long do ranks wait: for a server, for a core, for the slowest of them?  (Kernel.)"""

import math
from functools import cache

import numpy as np

from ddpnb.protocol.costs import Messages
from ddpnb.protocol.notation import LinkSpec

SLICE_SECONDS = 3e-3
"""How long Linux lets one process run where others wait for the core."""


def server_bound(link: LinkSpec, size: float, compute: float, num_workers: int) -> float:
    """Return how many gradients a parameter server takes in a second, of workers that are alike.

        min( N / (c + e), 1 / s ),    e = 2 (a + S b),    s = S b

    c is what a worker computes, e an exchange that nobody disturbs, s what the server's link needs
    for a gradient: the asymptotes of a closed queue (Denning and Buzen, "The Operational Analysis
    of Queueing Network Models", ACM Computing Surveys 10(3), 1978), which are reached where
    nothing varies.
    """
    message = Messages(1, size).seconds(link)
    busiest = message - link.latency_seconds
    alone = num_workers / (compute + 2 * message)
    return min(alone, 1 / busiest) if busiest > 0 else alone


def on_cores(work: float, num_ranks: int, num_cores: float) -> float:
    """Return when the last of some ranks has done its work, of which each needs one core.

    They take turns on the cores, a slice each, from one queue.  With k slices of work each,
    ceil(N k / C) slices follow each other: for short work N / C rounded up, for long work N / C.
    """
    if num_ranks <= num_cores or work <= 0:
        return work
    num_slices = math.ceil(work / SLICE_SECONDS)
    rounds = math.ceil(num_ranks * num_slices / num_cores)
    return rounds * work / num_slices


@cache
def expected_max(num: int) -> float:
    """Return the expected maximum of ``num`` independent standard normal values.

    The integral of x d(F(x)^N), F the normal distribution; about sqrt(2 ln N).  Source: David and
    Nagaraja, "Order Statistics", 2003, chapters 3 and 4.
    """
    if num == 1:
        return 0.0
    x = np.linspace(0.0, 10.0, 4001)
    tail = np.array([0.5 * math.erfc(value / math.sqrt(2)) for value in x])
    # E[max] = integral over x > 0 of 1 - F(x)^N - F(-x)^N
    return float(np.trapezoid(1 - (1 - tail) ** num - tail**num, x))
