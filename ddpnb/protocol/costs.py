"""Computes how long a collective takes and how many bytes it sends.  Used in every process.

N ranks take part, and each rank has B bytes.  In a scatter, each rank receives B bytes.  L is log2
N, rounded up: the number of rounds of a binomial tree.  In the tree, a rank sends the message to K
other ranks, and the root sends it to L ranks.  Each rank has one link to all other ranks, with a
one-way latency and a rate.  A message of n bytes takes latency + n / rate.  In each direction, a
link carries one message at a time.  A collective takes as long as its busiest link needs.

Sources: Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in
MPICH", IJHPCA 19(1), 2005 (the model, in section 3; trees, doubling); Patarasuk and Yuan,
"Bandwidth Optimal All-reduce Algorithms for Clusters of Workstations", JPDC 69(2), 2009 (ring);
Sanders, Speck and Träff, "Two-tree Algorithms for Full Bandwidth Broadcast, Reduction and Scan",
Parallel Computing 35(12), 2009 (double trees, as NCCL has them).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from ddpnb.protocol.notation import LinkSpec

BUCKET_BYTES = 25 * 2**20
"""The default size of DDP's buckets (``bucket_cap_mb``)."""


class Cost(NamedTuple):
    """The cost of a collective: its time on the busiest link, and the bytes of one rank."""

    num_rounds: float
    """Number of messages that follow one another, because each message needs the one before."""
    num_bytes: float = 0.0
    """Number of bytes that the busiest link sends in all these rounds."""
    sent: float = 0.0
    received: float = 0.0

    def seconds(self, link: LinkSpec) -> float:
        """Return how long the exchange takes on a link."""
        return self.num_rounds * link.latency_seconds + self.num_bytes * 8 / link.bits_per_second


class Algorithm(NamedTuple):
    """The algorithm of a collective, with formulas of N, L, B and K to show to users."""

    cost: Callable[[float, int, int], Cost]
    """Function of B, N and a rank's place.  The root has place 0, and the next rank place 1."""
    name: str
    rounds: str
    num_bytes: str
    sent: str

    def of(self, size: float, num_ranks: int, place: int = 0) -> Cost:
        """Return the cost; a single rank sends nothing."""
        return self.cost(size, num_ranks, place) if num_ranks > 1 else Cost(0)


def _ring_all_reduce(size: float, num: int, _: int) -> Cost:
    around = 2 * (num - 1) * size / num
    return Cost(2 * (num - 1), around, around, around)


def _ring_all_gather(size: float, num: int, _: int) -> Cost:
    around = (num - 1) * size
    return Cost(num - 1, around, around, around)


def _ring_reduce_scatter(size: float, num: int, _: int) -> Cost:
    around = (num - 1) * size / num
    return Cost(num - 1, around, around, around)


def _to_each_other(size: float, num: int, _: int) -> Cost:
    each = (num - 1) * size / num
    return Cost(1, each, each, each)


def _tree_broadcast(size: float, num: int, place: int) -> Cost:
    depth = _depth(num)
    return Cost(depth, depth * size, _children(num, place) * size, size if place else 0)


def _tree_reduce(size: float, num: int, place: int) -> Cost:
    depth = _depth(num)
    return Cost(depth, depth * size, size if place else 0, _children(num, place) * size)


def _gather(size: float, num: int, place: int) -> Cost:
    every = (num - 1) * size
    return Cost(1, every, sent=size if place else 0, received=0 if place else every)


def _scatter(size: float, num: int, place: int) -> Cost:
    every = (num - 1) * size
    return Cost(1, every, sent=0 if place else every, received=size if place else 0)


def _barrier(size: float, num: int, place: int) -> Cost:
    return Cost(_depth(num))


def _send(size: float, num: int, place: int) -> Cost:
    return Cost(1, size, sent=size)


def _recv(size: float, num: int, place: int) -> Cost:
    return Cost(1, size, received=size)


def _ring_reduce(size: float, num: int, place: int) -> Cost:
    around, chunk = 2 * (num - 1) * size / num, size / num
    return Cost(
        2 * (num - 1),
        around,
        sent=(num - 1) * chunk + (chunk if place else 0),
        received=(num - 1) * chunk + (0 if place else (num - 1) * chunk),
    )


def _chain_broadcast(size: float, num: int, place: int) -> Cost:
    return Cost(num - 1, size, size if place < num - 1 else 0, size if place else 0)


def _chain_reduce(size: float, num: int, place: int) -> Cost:
    return Cost(num - 1, size, size if place else 0, 0 if place == 1 else size)


def _double_tree(size: float, num: int, _: int) -> Cost:
    sent = 2 * (num - 1) * size / num  # the mean over all ranks
    return Cost(2 * _depth(num), 2 * size, sent, sent)


def _depth(num: int) -> int:
    return math.ceil(math.log2(num))


def _children(num: int, place: int) -> int:
    """Return K: the number of ranks to which a rank sends in a binomial tree."""
    return sum(place < 2**k and place + 2**k < num for k in range(_depth(num)))


_AROUND = "2 (N - 1) B / N"
COLLECTIVES: Mapping[str, Algorithm] = {
    "all_reduce": Algorithm(
        _ring_all_reduce,
        "ring: a reduce-scatter, then an all-gather",
        "2 (N - 1)",
        _AROUND,
        _AROUND,
    ),
    "all_gather": Algorithm(_ring_all_gather, "ring", "N - 1", "(N - 1) B", "(N - 1) B"),
    "reduce_scatter": Algorithm(
        _ring_reduce_scatter, "ring", "N - 1", "(N - 1) B / N", "(N - 1) B / N"
    ),
    "all_to_all": Algorithm(
        _to_each_other,
        "each rank sends to every other rank",
        "1",
        "(N - 1) B / N",
        "(N - 1) B / N",
    ),
    "broadcast": Algorithm(_tree_broadcast, "binomial tree", "L", "L B", "K B"),
    "reduce": Algorithm(_tree_reduce, "binomial tree", "L", "L B", "root: 0; other ranks: B"),
    "gather": Algorithm(
        _gather,
        "each rank sends its bytes to the root",
        "1",
        "(N - 1) B",
        "root: 0; other ranks: B",
    ),
    "scatter": Algorithm(
        _scatter,
        "root sends a part to each rank",
        "1",
        "(N - 1) B",
        "root: (N - 1) B; other ranks: 0",
    ),
    "barrier": Algorithm(
        _barrier,
        "dissemination: in round k, each rank notifies the rank 2^k places after it",
        "L",
        "0",
        "0",
    ),
    "send": Algorithm(_send, "one message", "1", "B", "B"),
    "recv": Algorithm(_recv, "one message", "1", "B", "0"),
}
"""The usual algorithm of each collective.  The count of a run's bytes uses these algorithms."""

GLOO: Mapping[str, Algorithm] = {
    "reduce": Algorithm(
        _ring_reduce,
        "ring: a reduce-scatter, then each rank sends its part to the root",
        "2 (N - 1)",
        _AROUND,
        "root: (N - 1) B / N; other ranks: B",
    ),
    "reduce_scatter": Algorithm(
        _ring_all_reduce,
        "ring: an all-reduce of all bytes, then each rank keeps its part",
        "2 (N - 1)",
        _AROUND,
        _AROUND,
    ),
}
"""Gloo's algorithms that differ from ``COLLECTIVES``.  Byte counts on sockets confirm them."""

NCCL: Mapping[str, Algorithm] = {
    "broadcast": Algorithm(
        _chain_broadcast,
        "chain from the root, in small parts",
        "N - 1",
        "B",
        "last rank: 0; other ranks: B",
    ),
    "reduce": Algorithm(
        _chain_reduce,
        "chain to the root, in small parts",
        "N - 1",
        "B",
        "root: 0; other ranks: B",
    ),
}
"""NCCL's algorithms that differ from ``COLLECTIVES``; also of emulated cards and of ``dp``."""

DOUBLE_TREE = Algorithm(
    _double_tree,
    "double tree: each tree sends half of the bytes, in parts",
    "2 L",
    "2 B",
    _AROUND,
)
"""NCCL's double-tree all-reduce.  On average, ranks send the same number of bytes as in a ring."""

BEST = "best"
"""The name for the faster algorithm, ring or double tree.  NCCL chooses by the message size."""


def algorithm_of(name: str, backend: str = "") -> Algorithm | None:
    """Return a backend's algorithm for a collective such as ``"all_reduce"``; None if unknown.

    Without a backend, return the usual algorithm.
    """
    plain = name.removesuffix("_coalesced").removesuffix("_single")
    own = {"gloo": GLOO, "nccl": NCCL}.get(backend, {})
    return own.get(plain) or COLLECTIVES.get(plain)


# -- exchanges during a phase that computes ------------------------------------------------

Ready = tuple[float, float]
"""The times, in seconds, at which the first and the last byte of a rank's data are ready."""


def num_buckets(size: float, ready: Ready) -> int:
    """Return the number of buckets of an exchange; 1 if all bytes are ready at once."""
    return max(1, math.ceil(size / BUCKET_BYTES)) if ready[1] > ready[0] else 1


def in_turn(
    seconds: float, number: int, ready: Sequence[Ready], free: float
) -> list[tuple[float, float]]:
    """Return the begin and end of each bucket of a collective.

    Each bucket takes ``seconds``.  A bucket begins when it is ready on all ranks and the link has
    sent the previous bucket.  The link is available from time ``free``.
    """
    found = []
    for bucket in range(1, number + 1):
        last_ready = max(first + (last - first) * bucket / number for first, last in ready)
        begin = max(last_ready, free)
        free = begin + seconds
        found.append((begin, free))
    return found
