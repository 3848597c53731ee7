"""What does a collective cost on the busiest link: which messages, how many bytes?  (ranks)

Each rank has one link to all others, with a latency (one way) and a rate in each direction.  A
message of n bytes takes latency + n / rate; messages that go through one end in one direction
follow each other.  This is the model of Thakur, Rabenseifner and Gropp, "Optimization of Collective
Communication Operations in MPICH", IJHPCA 19(1), 2005, section 3, where the lists of messages
are from; the ring's is in Patarasuk and Yuan, JPDC 69(2), 2009.
"""

import math
from typing import NamedTuple

from ddpnb.protocol.notation import LinkSpec


class Messages(NamedTuple):
    """What follows each other on the busiest link of an exchange."""

    number: float
    num_bytes: float = 0.0
    """Of all of them."""

    def seconds(self, spec: LinkSpec) -> float:
        """Return how long they take."""
        return self.number * spec.latency_seconds + self.num_bytes * 8 / spec.bits_per_second


def all_reduce(size: int, num_ranks: int) -> Messages:
    """Around the ring twice, an N-th of ``size`` bytes in each message."""
    number = 2 * (num_ranks - 1)
    return Messages(number, number * size / num_ranks)


def ring(part: float, num_ranks: int) -> Messages:
    """Around the ring once, ``part`` bytes in each message: all-gather."""
    return Messages(num_ranks - 1, (num_ranks - 1) * part)


def ring_of_whole(size: int, num_ranks: int) -> Messages:
    """Around the ring once, an N-th of ``size`` in each message: reduce-scatter, all-to-all."""
    return ring(size / num_ranks, num_ranks)


def tree(size: int, num_ranks: int) -> Messages:
    """Down a binomial tree of all ranks, or up: broadcast, reduce and barrier."""
    rounds = math.ceil(math.log2(num_ranks))
    return Messages(rounds, rounds * size)


def rooted(part: int, num_ranks: int) -> Messages:
    """``part`` bytes to or from each other rank, along such a tree: gather and scatter."""
    return Messages(math.ceil(math.log2(num_ranks)), (num_ranks - 1) * part)


def message(size: int, _: int) -> Messages:
    """From one rank to another: send and receive."""
    return Messages(1, size)
