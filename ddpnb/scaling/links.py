"""How long do exchanges last over a link?  Closed forms, and links by name.  (Kernel.)

A message of n bytes takes a + n b, with a the latency in seconds and b the seconds of a byte.  An
exchange takes as many messages, and bytes, as follow each other on its busiest link.

References: Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in
MPICH", IJHPCA 19(1), 2005, section 3 (trees, recursive doubling, Rabenseifner's all-reduce);
Patarasuk and Yuan, "Bandwidth Optimal All-reduce Algorithms for Clusters of Workstations", JPDC
69(2), 2009 (ring); Sanders, Speck and Träff, "Two-tree algorithms for full bandwidth broadcast,
reduction and scan", Parallel Computing 35(12), 2009 (double trees, as NCCL has them since 2.4).
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ddpnb.protocol.errors import one_of
from ddpnb.protocol.notation import LINKS, LinkSpec, parse_link


def _named(gigabits: float, microseconds: float) -> LinkSpec:
    return LinkSpec(bits_per_second=gigabits * 1e9, latency_seconds=microseconds * 1e-6)


PRESETS: Mapping[str, LinkSpec] = {
    **LINKS,
    "25GbE": _named(25, 20),
    "100GbE": _named(100, 10),
    "InfiniBand-HDR": _named(200, 5),
    "InfiniBand-NDR": _named(400, 5),
    "pcie5": _named(400, 10),
    "NVLink-V100": _named(1040, 10),
    "NVLink-A100": _named(1840, 10),
    "NVLink-H100": _named(2880, 10),
}
"""Typical links: those of ``--link`` in a comparison, and faster ones.

Ethernet and InfiniBand have the rate of one port; latencies are those of one message of a
collective, software included.  NVLink has what all-reduces reach within a host of 8: 130, 230 and
360 GB/s (the order of what NVIDIA's nccl-tests report).
"""


def link_named(text: str) -> LinkSpec:
    """Parse a name in ``PRESETS``, or ``1Gbit,0.5ms``."""
    if text in PRESETS:
        return PRESETS[text]
    if "bit" not in text.lower():
        raise one_of("link", text, PRESETS)
    return parse_link(text)


def message(spec: LinkSpec, num_bytes: float, *, count: float = 1.0) -> float:
    """Return the seconds of ``count`` messages that follow each other, of so many bytes in all."""
    return count * spec.latency_seconds + num_bytes * 8 / spec.bits_per_second


# -- all-reduces of ``size`` bytes ---------------------------------------------------------


def ring(spec: LinkSpec, size: float, num_ranks: int) -> float:
    """Around a ring twice: 2 (N - 1) messages of an N-th each."""
    number = 2 * (num_ranks - 1)
    return message(spec, number * size / num_ranks, count=number)


def tree(spec: LinkSpec, size: float, num_ranks: int) -> float:
    """Up a binomial tree and down again, whole messages: 2 L of them, L = log2 N rounded up."""
    rounds = 2 * depth(num_ranks)
    return message(spec, rounds * size, count=rounds)


def recursive_doubling(spec: LinkSpec, size: float, num_ranks: int) -> float:
    """Exchange everything with a partner twice as far away in each of L rounds."""
    rounds = depth(num_ranks)
    return message(spec, rounds * size, count=rounds)


def rabenseifner(spec: LinkSpec, size: float, num_ranks: int) -> float:
    """Reduce-scatter by recursive halving, all-gather by recursive doubling."""
    moved = 2 * (num_ranks - 1) / num_ranks * size
    return message(spec, moved, count=2 * depth(num_ranks))


def double_tree(spec: LinkSpec, size: float, num_ranks: int) -> float:
    """Half of the bytes along each of two trees, pipelined: 2 L latencies, 2 n bytes at most.

    A rank is an inner node of at most one of the trees.  So each link carries n bytes up and n
    down, but the first and the last rank's less: 2 (N - 1) / N n on average, as in a ring.
    """
    return rabenseifner(spec, size, num_ranks)


def best(spec: LinkSpec, size: float, num_ranks: int) -> float:
    """Return the shorter of ring and double trees, as NCCL chooses by size."""
    return min(ring(spec, size, num_ranks), double_tree(spec, size, num_ranks))


AllReduce = Callable[[LinkSpec, float, int], float]

ALGORITHMS: Mapping[str, AllReduce] = {
    "ring": ring,
    "tree": tree,
    "doubling": recursive_doubling,
    "rabenseifner": rabenseifner,
    "double-tree": double_tree,
    "best": best,
}
"""By the name that users give."""


# -- other exchanges -----------------------------------------------------------------------


def depth(num_ranks: int) -> int:
    """Return the rounds of a binomial tree: log2 N, rounded up."""
    return math.ceil(math.log2(num_ranks))


def around(spec: LinkSpec, size: float, num_ranks: int) -> float:
    """Around a ring once: an all-gather or a reduce-scatter of ``size`` bytes in all."""
    return message(spec, (num_ranks - 1) * size / num_ranks, count=num_ranks - 1)


def broadcast(spec: LinkSpec, size: float, num_ranks: int) -> float:
    """Down a binomial tree; a reduce takes as long."""
    rounds = depth(num_ranks)
    return message(spec, rounds * size, count=rounds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """What lies between the ranks: one link to all others, or one inside hosts, one between."""

    link: LinkSpec
    """Between hosts; where there is one rank on each, or one host, between all ranks."""
    inside: LinkSpec | None = None
    """Between the ranks of one host, where several hosts have several ranks each."""
    ranks_per_host: int = 1
    """1: every rank has a link of its own to all others."""
    algorithm: str = "ring"

    def all_reduce(self, size: float, num_ranks: int) -> float:
        """Return the seconds of an all-reduce of ``size`` bytes.

        Over several hosts of p ranks each: a reduce-scatter inside each host, p all-reduces of a
        p-th each between them at once, which share the host's link, then an all-gather inside.
        """
        reduce = ALGORITHMS[self.algorithm]
        if num_ranks == 1:
            return 0.0
        if self.inside is None:
            return reduce(self.link, size, num_ranks)
        within = min(self.ranks_per_host, num_ranks)
        hosts = math.ceil(num_ranks / self.ranks_per_host)
        if hosts == 1:
            return reduce(self.inside, size, num_ranks)
        return 2 * around(self.inside, size, within) + reduce(self.link, size, hosts)

    def once_around(self, size: float, num_ranks: int) -> float:
        """Return the seconds of an all-gather, or a reduce-scatter, of ``size`` bytes in all.

        Over several hosts: one inside of what a host's ranks hold of each, one between.
        """
        if num_ranks == 1:
            return 0.0
        if self.inside is None:
            return around(self.link, size, num_ranks)
        within = min(self.ranks_per_host, num_ranks)
        hosts = math.ceil(num_ranks / self.ranks_per_host)
        between = around(self.link, size, hosts) if hosts > 1 else 0.0
        return around(self.inside, size, within) + between

    def farthest(self, num_ranks: int) -> LinkSpec:
        """Return the link between two ranks that are as far apart as any."""
        if self.inside is not None and num_ranks <= self.ranks_per_host:
            return self.inside
        return self.link
