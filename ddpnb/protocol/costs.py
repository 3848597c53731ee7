"""Computes the number of messages and bytes that a collective sends.  Used in every process.

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
import re
from collections.abc import Mapping, Sequence
from functools import cache
from types import CodeType
from typing import NamedTuple

from ddpnb.protocol.notation import LinkSpec

BUCKET_BYTES = 25 * 2**20
"""The default size of DDP's buckets (``bucket_cap_mb``)."""


class Messages(NamedTuple):
    """The messages that the busiest link of an exchange sends one after another."""

    number: float
    num_bytes: float = 0.0
    """Total number of bytes of these messages."""

    def seconds(self, link: LinkSpec) -> float:
        """Return how long the messages take on a link."""
        return self.number * link.latency_seconds + self.num_bytes * 8 / link.bits_per_second


class Algorithm(NamedTuple):
    """The algorithm of a collective.  Its formulas of N, L, B and K are also shown to users."""

    name: str
    messages: str
    """Formula of the number of messages that the busiest link sends one after another."""
    num_bytes: str
    """Formula of the total number of bytes of these messages."""
    others_send: str = ""
    """Formula of the bytes that a rank sends; if empty, ``num_bytes`` is used."""
    root_sends: str = ""
    """Formula of the bytes that the root sends; empty if the root sends the same as other ranks."""

    @property
    def sent(self) -> str:
        """The formula of the bytes that a rank sends, for users."""
        sent = self.others_send or self.num_bytes
        return f"root: {self.root_sends}; other ranks: {sent}" if self.root_sends else sent

    def cost(self, size: float, num_ranks: int) -> Messages:
        """Return the messages that the busiest link sends one after another."""
        return Messages(*(_value(each, size, num_ranks) for each in self[1:3]))

    def bytes_sent(self, size: float, num_ranks: int, place: int) -> float:
        """Return the bytes that a rank sends.  The root has ``place`` 0, the next rank 1, ..."""
        if num_ranks == 1:
            return 0.0
        formula = self.others_send or self.num_bytes
        return _value((place == 0 and self.root_sends) or formula, size, num_ranks, place)


def _value(formula: str, size: float, num_ranks: int, place: int = 0) -> float:
    """Return the value of a formula in the tables below."""
    depth = math.ceil(math.log2(num_ranks))
    children = sum(place < 2**k and place + 2**k < num_ranks for k in range(depth))
    named = {"N": num_ranks, "L": depth, "B": size, "K": children}
    return float(eval(_compiled(formula), named))


@cache
def _compiled(formula: str) -> CodeType:
    return compile(re.sub(r"(?<=[\dNLBK)]) (?=[(NLBK])", "*", formula), formula, "eval")


_ALL_REDUCE_BYTES = "2 (N - 1) B / N"
RING = Algorithm("ring: a reduce-scatter, then an all-gather", "2 (N - 1)", _ALL_REDUCE_BYTES)

COLLECTIVES: Mapping[str, Algorithm] = {
    "all_reduce": RING,
    "all_gather": Algorithm("ring", "N - 1", "(N - 1) B"),
    "reduce_scatter": Algorithm("ring", "N - 1", "(N - 1) B / N"),
    "all_to_all": Algorithm("each rank sends to every other rank", "N - 1", "(N - 1) B / N"),
    "broadcast": Algorithm("binomial tree", "L", "L B", "K B"),
    "reduce": Algorithm("binomial tree", "L", "L B", "B", "0"),
    "gather": Algorithm("each rank sends its bytes to the root", "N - 1", "(N - 1) B", "B", "0"),
    "scatter": Algorithm("root sends a part to each rank", "N - 1", "(N - 1) B", "0", "(N - 1) B"),
    "barrier": Algorithm(
        "dissemination: in round k, each rank notifies the rank 2^k places after it", "L", "0"
    ),
    "send": Algorithm("one message", "1", "B"),
    "recv": Algorithm("one message", "1", "B", "0"),
}
"""The algorithms that emulated devices and predictions use, by name of the collective."""

GLOO: Mapping[str, Algorithm] = {
    "reduce": Algorithm(
        "ring: a reduce-scatter, then each rank sends its part to the root",
        "2 (N - 1)",
        _ALL_REDUCE_BYTES,
        "B",
        "(N - 1) B / N",
    ),
    "reduce_scatter": Algorithm(
        "ring: an all-reduce of all bytes, then each rank keeps its part",
        "2 (N - 1)",
        _ALL_REDUCE_BYTES,
    ),
}
"""Gloo's algorithms that differ from ``COLLECTIVES``.  Byte counts on sockets confirm them."""

DOUBLE_TREE = Algorithm(
    "double tree: each tree sends half of the bytes, in parts", "2 L", "2 B", _ALL_REDUCE_BYTES
)
"""NCCL's double-tree all-reduce.  On average, ranks send the same number of bytes as in a ring."""

BEST = "best"
"""The name for the faster algorithm, ring or double tree.  NCCL chooses by the message size."""


def algorithm_of(name: str, backend: str = "") -> Algorithm | None:
    """Return a backend's algorithm for a collective such as ``"all_reduce"``; None if unknown.

    Without a backend, return the algorithm of emulated devices.
    """
    plain = name.removesuffix("_coalesced").removesuffix("_single")
    return (GLOO if backend == "gloo" else {}).get(plain) or COLLECTIVES.get(plain)


# -- exchanges during a phase that computes ------------------------------------------------

Ready = tuple[float, float]
"""The times, in seconds, at which the first and the last part of a rank's data are ready."""


def num_parts(size: float, ready: Ready) -> int:
    """Return the number of buckets of an exchange; 1 if all bytes are ready at once."""
    return max(1, math.ceil(size / BUCKET_BYTES)) if ready[1] > ready[0] else 1


def in_turn(
    seconds: float, number: int, ready: Sequence[Ready], free: float
) -> list[tuple[float, float]]:
    """Return the begin and end of each part of a collective.

    Each part takes ``seconds``.  A part begins when the part is ready on all ranks and the link has
    sent the previous part.  The link is available from time ``free``.
    """
    found = []
    for part in range(1, number + 1):
        last_ready = max(first + (last - first) * part / number for first, last in ready)
        begin = max(last_ready, free)
        free = begin + seconds
        found.append((begin, free))
    return found
