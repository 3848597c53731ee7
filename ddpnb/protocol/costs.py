"""What does each collective exchange?  One table for clocks, predictions and what is shown.

N ranks take part, of which each gives B bytes; a scatter gives each B.  L is log2 N, rounded up.
Each rank has one link to all others, with a latency (one way) and a rate in each direction.  A
message of n bytes takes latency + n / rate; messages that go through one end in one direction
follow each other.  A collective takes what follows each other on its busiest link.

Sources: Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in
MPICH", IJHPCA 19(1), 2005 (the model, in section 3; trees, doubling); Patarasuk and Yuan,
"Bandwidth Optimal All-reduce Algorithms for Clusters of Workstations", JPDC 69(2), 2009 (ring);
Sanders, Speck and Träff, "Two-tree Algorithms for Full Bandwidth Broadcast, Reduction and Scan",
Parallel Computing 35(12), 2009 (double trees, as NCCL has them).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ddpnb.protocol.notation import LinkSpec

BUCKET_BYTES = 25 * 2**20
"""The size of DDP's buckets (``bucket_cap_mb``)."""
FIRST_BUCKET_BYTES = 2**20
"""DDP sends its first bucket early, so that the link is soon in use."""


class Messages(NamedTuple):
    """What follows each other on the busiest link of an exchange."""

    number: float
    num_bytes: float = 0.0
    """Of all of them."""

    def seconds(self, link: LinkSpec) -> float:
        """Return how long they take."""
        return self.number * link.latency_seconds + self.num_bytes * 8 / link.bits_per_second


def depth(num_ranks: int) -> int:
    """Return L, the rounds of a binomial tree."""
    return math.ceil(math.log2(num_ranks))


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """How a collective is carried out."""

    name: str
    messages: str
    """How many follow each other on the busiest link: a formula, for users."""
    num_bytes: str
    """Bytes of these."""
    cost: Callable[[float, int], Messages]
    """Both formulas, of B and N."""
    sent: str = ""
    """The bytes that a rank sends; empty: ``num_bytes``."""
    sent_by: Callable[[float, int, int], float] | None = None
    """The same, of B, N and a rank's place after the root, which is 0."""

    def bytes_sent(self, size: float, num_ranks: int, place: int) -> float:
        """Return how many bytes a rank sends; ``place``: after the root, which is 0."""
        if num_ranks == 1:
            return 0.0
        if self.sent_by is not None:
            return self.sent_by(size, num_ranks, place)
        return self.cost(size, num_ranks).num_bytes


def _rooted(size: float, num_ranks: int) -> Messages:
    """The root's link has a message for each other rank."""
    return Messages(num_ranks - 1, (num_ranks - 1) * size)


def _once(size: float, num_ranks: int) -> Messages:
    """An N-th of all bytes in each of N - 1 messages."""
    return Messages(num_ranks - 1, (num_ranks - 1) * size / num_ranks)


def _down(size: float, num_ranks: int) -> Messages:
    """Everything in each round of a tree."""
    return Messages(depth(num_ranks), depth(num_ranks) * size)


def _children(num_ranks: int, place: int) -> int:
    """Return to how many ranks one passes a message on in a binomial tree."""
    return sum(place < 2**k and place + 2**k < num_ranks for k in range(num_ranks.bit_length()))


RING = Algorithm(
    name="ring: a reduce-scatter, then an all-gather",
    messages="2 (N - 1)",
    num_bytes="2 (N - 1) B / N",
    cost=lambda size, n: Messages(2 * (n - 1), 2 * (n - 1) * size / n),
)

COLLECTIVES: Mapping[str, Algorithm] = {
    "all_reduce": RING,
    "all_gather": Algorithm(name="ring", messages="N - 1", num_bytes="(N - 1) B", cost=_rooted),
    "reduce_scatter": Algorithm(
        name="ring", messages="N - 1", num_bytes="(N - 1) B / N", cost=_once
    ),
    "all_to_all": Algorithm(
        name="each sends to each", messages="N - 1", num_bytes="(N - 1) B / N", cost=_once
    ),
    "broadcast": Algorithm(
        name="binomial tree",
        messages="L",
        num_bytes="L B",
        cost=_down,
        sent="B for each rank that it passes the tensor on to; the root, to L",
        sent_by=lambda size, n, place: size * _children(n, place),
    ),
    "reduce": Algorithm(
        name="binomial tree",
        messages="L",
        num_bytes="L B",
        cost=_down,
        sent="B; the root 0",
        sent_by=lambda size, _, place: size if place else 0.0,
    ),
    "gather": Algorithm(
        name="each sends to the root",
        messages="N - 1",
        num_bytes="(N - 1) B",
        cost=_rooted,
        sent="B; the root 0",
        sent_by=lambda size, _, place: size if place else 0.0,
    ),
    "scatter": Algorithm(
        name="the root sends to each",
        messages="N - 1",
        num_bytes="(N - 1) B",
        cost=_rooted,
        sent="0; the root (N - 1) B",
        sent_by=lambda size, n, place: 0.0 if place else (n - 1) * size,
    ),
    "barrier": Algorithm(
        name="dissemination: in round k a rank notifies the one 2^k places further",
        messages="L",
        num_bytes="0",
        cost=lambda _, n: Messages(depth(n)),
    ),
    "send": Algorithm(
        name="one message", messages="1", num_bytes="B", cost=lambda size, _: Messages(1, size)
    ),
    "recv": Algorithm(
        name="one message",
        messages="1",
        num_bytes="B",
        cost=lambda size, _: Messages(1, size),
        sent="0",
        sent_by=lambda *_: 0.0,
    ),
}
"""By the name of the collective: what emulated devices take, and what predictions count."""

GLOO: Mapping[str, Algorithm] = {
    "reduce": Algorithm(
        name="ring: a reduce-scatter, then each sends its part to the root",
        messages="2 (N - 1)",
        num_bytes="2 (N - 1) B / N",
        cost=RING.cost,
        sent="B; the root (N - 1) B / N",
        sent_by=lambda size, n, place: size if place else (n - 1) * size / n,
    ),
    "reduce_scatter": Algorithm(
        name="an all-reduce of the whole by a ring, of which each rank keeps its part",
        messages="2 (N - 1)",
        num_bytes="2 (N - 1) B / N",
        cost=RING.cost,
    ),
}
"""Where gloo does something else, as bytes counted on its sockets confirm."""

ALL_REDUCES: Mapping[str, Algorithm] = {
    "ring": RING,
    "tree": Algorithm(
        name="a reduce up a binomial tree, then a broadcast down",
        messages="2 L",
        num_bytes="2 L B",
        cost=lambda size, n: Messages(2 * depth(n), 2 * depth(n) * size),
        sent="B up, and B down for each rank below it",
    ),
    "doubling": Algorithm(
        name="in round k all bytes to and from the rank 2^k places further",
        messages="L",
        num_bytes="L B",
        cost=_down,
    ),
    "double-tree": Algorithm(
        name="half of the bytes along each of two trees, in small parts",
        messages="2 L",
        num_bytes="2 B",
        cost=lambda size, n: Messages(2 * depth(n), 2 * size),
        sent="on average 2 (N - 1) B / N",
    ),
}
"""By the name that users give.  Nothing counts what a rank sends in trees."""

BEST = "best"
"""The faster of ring and double trees, as NCCL chooses by size."""


def algorithm_of(name: str, backend: str = "") -> Algorithm | None:
    """Return how a collective is carried out; None for one that is not known.

    Args:
        name: as users call it, such as ``"all_gather_single"``.
        backend: what really carries it out; empty: the model of emulated devices.
    """
    plain = name.removesuffix("_coalesced").removesuffix("_single")
    return (GLOO if backend == "gloo" else {}).get(plain) or COLLECTIVES.get(plain)


# -- exchanges beside a phase that computes ------------------------------------------------

Ready = tuple[float, float]
"""When the first and the last part of what a rank exchanges was ready, in seconds."""


def num_parts(size: float, ready: Ready) -> int:
    """Return in how many buckets an exchange goes: one, if all of it is ready at once."""
    return max(1, math.ceil(size / BUCKET_BYTES)) if ready[1] > ready[0] else 1


def in_turn(
    seconds: float, number: int, ready: Sequence[Ready], free: float
) -> list[tuple[float, float]]:
    """Return when each part of a collective begins and ends.

    A part begins when the last rank has it ready, and the link is free of the part before.

    Args:
        seconds: of a part.
        number: of parts; of each rank, one is ready at a time.
        ready: of each rank.
        free: when the link is free.
    """
    found = []
    for part in range(1, number + 1):
        last_ready = max(first + (last - first) * part / number for first, last in ready)
        begin = max(last_ready, free)
        free = begin + seconds
        found.append((begin, free))
    return found


def bucket_sizes(num_bytes: float, cap: float) -> list[float]:
    """Return the bytes of DDP's buckets: the first is small, the others have at most ``cap``."""
    sizes: list[float] = []
    left = num_bytes
    while left > 0:
        sizes.append(min(cap if sizes else min(FIRST_BUCKET_BYTES, cap), left))
        left -= sizes[-1]
    return sizes
