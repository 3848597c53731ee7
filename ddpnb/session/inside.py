"""What looks inside: asks the ranks, and returns what a notebook shows (kernel)."""

import time

from ddpnb.cluster.cluster import Cluster
from ddpnb.protocol.errors import UserError
from ddpnb.protocol.messages import Failure, OnRank
from ddpnb.reports.inside.links import LinkMatrix
from ddpnb.session.variables import answers, cause_of

# -- links ---------------------------------------------------------------------------------

MAX_MEASURED_RANKS = 8
"""Of more, as many of each host are measured as fit: every pair takes its time."""
LINK_SECONDS = 60.0
"""How long measuring may take over the slowest network; it takes a few seconds."""


def measure_links(cluster: Cluster) -> LinkMatrix:
    """Measure latency and bandwidth between ranks; raises a UserError where that fails."""
    if len(cluster.ranks) < 2:
        raise UserError("There is one rank only, and nothing to measure between ranks.")
    cluster.ensure_group()
    ranks = measured_ranks([state.host for state in cluster.states])
    began = time.monotonic()
    call = cluster.submit(OnRank("measure_links"), ranks, ranks=cluster.ranks)
    try:
        found = answers(cluster, call, LINK_SECONDS)
    except (UserError, KeyboardInterrupt):
        cluster.abort(cluster.ranks)  # else they would wait for each other
        raise
    if failure := next((each for each in found if isinstance(each, Failure)), None):
        cluster.abort(cluster.ranks)
        raise UserError(f"Measuring failed on rank {failure.rank}: {cause_of(failure)}")
    links = [link for each in found for link in each]
    return LinkMatrix(
        {(one, other): seconds for one, other, seconds, _ in links},
        {(one, other): rate for one, other, _, rate in links},
        cluster.states,
        time.monotonic() - began,
    )


def measured_ranks(hosts: list[str]) -> tuple[int, ...]:
    """Return the ranks to measure, given the host of each: all, or the first ones of each host."""
    names = list(dict.fromkeys(hosts))
    share = max(1, MAX_MEASURED_RANKS // len(names))
    firsts = [rank for rank, host in enumerate(hosts) if hosts[:rank].count(host) < share]
    return tuple(firsts[:MAX_MEASURED_RANKS])
