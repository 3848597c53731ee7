"""What does each collective exchange?  One table for clocks, predictions and what is shown.

N ranks take part, of which each gives B bytes; a scatter gives each B.  L is log2 N, rounded up:
the rounds of a binomial tree, in which a rank passes a message on to K others, the root to L.  Each
rank has one link to all others, with a latency (one way) and a rate in each direction.  A message
of n bytes takes latency + n / rate; messages that go through one end in one direction follow each
other.  A collective takes what follows each other on its busiest link.

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
"""The size of DDP's buckets (``bucket_cap_mb``)."""


class Messages(NamedTuple):
    """What follows each other on the busiest link of an exchange."""

    number: float
    num_bytes: float = 0.0
    """Of all of them."""

    def seconds(self, link: LinkSpec) -> float:
        """Return how long they take."""
        return self.number * link.latency_seconds + self.num_bytes * 8 / link.bits_per_second


class Algorithm(NamedTuple):
    """How a collective is carried out, in formulas of N, L, B and K that users read too."""

    name: str
    messages: str
    """How many follow each other on the busiest link."""
    num_bytes: str
    """Bytes of these."""
    others_send: str = ""
    """The bytes that a rank sends, where these are not ``num_bytes``."""
    root_sends: str = ""
    """The bytes that the root sends, where these are others."""

    @property
    def sent(self) -> str:
        """The bytes that a rank sends, for users."""
        sent = self.others_send or self.num_bytes
        return f"{sent}; the root {self.root_sends}" if self.root_sends else sent

    def cost(self, size: float, num_ranks: int) -> Messages:
        """Return what follows each other on the busiest link."""
        return Messages(*(_value(each, size, num_ranks) for each in self[1:3]))

    def bytes_sent(self, size: float, num_ranks: int, place: int) -> float:
        """Return how many bytes a rank sends; ``place``: after the root, which is 0."""
        if num_ranks == 1:
            return 0.0
        formula = self.others_send or self.num_bytes
        return _value((place == 0 and self.root_sends) or formula, size, num_ranks, place)


def _value(formula: str, size: float, num_ranks: int, place: int = 0) -> float:
    """Compute a formula of the tables below."""
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
    "all_to_all": Algorithm("each sends to each", "N - 1", "(N - 1) B / N"),
    "broadcast": Algorithm("binomial tree", "L", "L B", "K B"),
    "reduce": Algorithm("binomial tree", "L", "L B", "B", "0"),
    "gather": Algorithm("each sends to the root", "N - 1", "(N - 1) B", "B", "0"),
    "scatter": Algorithm("the root sends to each", "N - 1", "(N - 1) B", "0", "(N - 1) B"),
    "barrier": Algorithm(
        "dissemination: in round k a rank notifies the one 2^k places further", "L", "0"
    ),
    "send": Algorithm("one message", "1", "B"),
    "recv": Algorithm("one message", "1", "B", "0"),
}
"""By the name of the collective: what emulated devices take, and what predictions count."""

GLOO: Mapping[str, Algorithm] = {
    "reduce": Algorithm(
        "ring: a reduce-scatter, then each sends its part to the root",
        "2 (N - 1)",
        _ALL_REDUCE_BYTES,
        "B",
        "(N - 1) B / N",
    ),
    "reduce_scatter": Algorithm(
        "an all-reduce of the whole by a ring, of which each rank keeps its part",
        "2 (N - 1)",
        _ALL_REDUCE_BYTES,
    ),
}
"""Where gloo does something else, as bytes counted on its sockets confirm."""

DOUBLE_TREE = Algorithm(
    "half of the bytes along each of two trees, in small parts", "2 L", "2 B", _ALL_REDUCE_BYTES
)
"""An all-reduce of NCCL; ranks send as much on average."""

BEST = "best"
"""The faster of ring and double trees, as NCCL chooses by size."""


def algorithm_of(name: str, backend: str = "") -> Algorithm | None:
    """Return how a backend carries out a collective, ``"all_gather_single"``; None if not known.

    Without a backend, it is how emulated devices do.
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
    """Return when each of a number of parts of a collective begins and ends.

    A part takes ``seconds``.  It begins when the last rank has it ready, and the link, which is
    ``free`` from then on, has sent the part before.
    """
    found = []
    for part in range(1, number + 1):
        last_ready = max(first + (last - first) * part / number for first, last in ready)
        begin = max(last_ready, free)
        free = begin + seconds
        found.append((begin, free))
    return found
