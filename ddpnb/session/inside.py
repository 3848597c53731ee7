"""What looks inside: asks the ranks, and returns what a notebook shows (kernel)."""

import time
from collections.abc import Sequence
from typing import Any

from ddpnb.cluster.cluster import Cluster
from ddpnb.protocol.errors import UserError, one_of
from ddpnb.protocol.messages import Failure, OnRank
from ddpnb.protocol.notation import parse_ranks, parse_size, spoken_ranks
from ddpnb.protocol.replicas import SamplerSpec
from ddpnb.protocol.trace import COLLECTIVES, REDUCING, REDUCTIONS, ROOTED, TRACE, CollectiveSpec
from ddpnb.reports.inside.causes import with_causes
from ddpnb.reports.inside.collective import CollectiveResult
from ddpnb.reports.inside.links import LinkMatrix
from ddpnb.reports.inside.replicas import Finding, ReplicaCheck, check_held, find, measured
from ddpnb.reports.inside.samples import Handout, handout_of
from ddpnb.session import cells
from ddpnb.session.variables import answers, cause_of

ASK_SECONDS = 300.0
"""How long an answer may take: a digest of 1 GB takes a second."""

# -- are the replicas the same? ------------------------------------------------------------


def check_replicas(cluster: Cluster, names: Sequence[str]) -> ReplicaCheck:
    """Compare what the ranks hold: by digests, then by the values of what differs first."""
    if len(cluster.ranks) < 2:
        raise UserError("There is one rank, and nothing to compare it with: %ddp_restart -n 2.")
    replicas = ask(cluster, "digests", tuple(names))
    check_held(replicas, is_named=bool(names))
    found = [_measure(cluster, each) for each in find(replicas)]
    return ReplicaCheck(with_causes(found, replicas), cluster.ranks)


def _measure(cluster: Cluster, finding: Finding) -> Finding:
    """Return a finding with the size of its first difference, if it has one."""
    first = finding.first
    if first is None or not first.chunks:
        return finding
    wanted = (finding.name, finding.part, first.tensor, first.chunks)
    return measured(finding, ask(cluster, "elements", *wanted, ranks=first.measured_ranks))


def ask(
    cluster: Cluster, function: str, *arguments: object, ranks: Sequence[int] | None = None
) -> list[Any]:
    """Return what each rank answers; raises a UserError where one does not, or where it fails."""
    chosen = cluster.ranks if ranks is None else ranks
    call = cluster.submit(OnRank(function), *arguments, ranks=chosen)
    try:
        found = answers(cluster, call, ASK_SECONDS)
    except (KeyboardInterrupt, UserError):
        cluster.interrupt(chosen)  # else they compute on
        raise
    for each in found:
        if isinstance(each, Failure):
            is_ours = each.name == UserError.__name__
            cause = each.text if is_ours else f"cannot answer: {cause_of(each)}"
            raise UserError(f"Rank {each.rank} {cause}")
    return found


# -- which rank gets which samples? --------------------------------------------------------


def samples_of_sampler(cluster: Cluster, spec: SamplerSpec) -> Handout:
    """Return what a sampler hands out to each rank, as the ranks read it."""
    return handout_of(spec, ask(cluster, "samples", spec))


# -- one collective ------------------------------------------------------------------------

MAX_SHOWN_BYTES = 256 * 10**6


def collective_spec(
    name: str,
    num_ranks: int,
    *,
    size: str | int = "",
    root: int | None = None,
    op: str = "",
    ranks: str | None = None,
) -> CollectiveSpec:
    """Return what is to be run.

    Raises:
        UserError: an option does not suit the collective.
    """
    if name not in COLLECTIVES:
        raise one_of("collective", name, (*COLLECTIVES, TRACE))
    chosen = parse_ranks(ranks, num_ranks)
    if op and op not in REDUCTIONS:
        raise one_of("op", op, REDUCTIONS)
    if op and name not in REDUCING:
        raise UserError(f"{name} computes nothing: leave --op out.")
    if root is not None and name not in ROOTED:
        raise UserError(f"{name} has no root: leave --root out.")
    if root is not None and root not in chosen:
        raise UserError(f"--root {root} does not take part: {spoken_ranks(chosen)} would.")
    num_bytes = parse_size(size) if size else 0
    if num_bytes > MAX_SHOWN_BYTES:
        raise UserError(f"--size {size} is too large to be shown: at most 256MB a rank.")
    return CollectiveSpec(name=name, ranks=chosen, num_bytes=num_bytes, root=root, op=op or "sum")


def run_collective(cluster: Cluster, spec: CollectiveSpec) -> CollectiveResult:
    """Run a collective on the ranks; return what each of them had, sent and measured."""
    cluster.require_group()
    found = cells.ask(cluster, OnRank("show_collective"), spec)
    taken_part = [found[rank] for rank in cluster.ranks if found[rank] is not None]
    return CollectiveResult(spec, taken_part)


# -- links ---------------------------------------------------------------------------------

MAX_MEASURED_RANKS = 8
"""Of more, as many of each host are measured as fit: every pair takes its time."""
LINK_SECONDS = 60.0
"""How long measuring may take over the slowest network; it takes a few seconds."""


def measure_links(cluster: Cluster) -> LinkMatrix:
    """Measure latency and bandwidth between ranks; raises a UserError where that fails."""
    if len(cluster.ranks) < 2:
        raise UserError("There is one rank only, and nothing to measure between ranks.")
    cluster.require_group()
    ranks = measured_ranks([state.host for state in cluster.states])
    began = time.monotonic()
    call = cluster.submit(OnRank("measure_links"), ranks, ranks=cluster.ranks)

    def free() -> None:
        cluster.abort(cluster.ranks)  # else they would wait for each other

    try:
        found = answers(cluster, call, LINK_SECONDS, on_failure=free)
    except UserError as error:
        free()
        if broken := cluster.processes.unreachable():
            raise UserError(f"Measuring failed: {broken}.") from error
        raise
    except KeyboardInterrupt:
        free()
        raise
    failures = [each for each in found if isinstance(each, Failure)]
    for failure in sorted(failures, key=lambda each: each.is_consequence):
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
