"""What looks inside: asks the ranks, and returns what a notebook shows (kernel)."""

from collections.abc import Sequence
from typing import Any

from ddpnb.cluster.cluster import Cluster
from ddpnb.protocol import calls
from ddpnb.protocol.errors import UserError, one_of
from ddpnb.protocol.notation import parse_ranks
from ddpnb.protocol.replicas import SamplerSpec
from ddpnb.protocol.trace import SHOWN, TRACE, CollectiveSpec
from ddpnb.reports.inside.causes import with_causes
from ddpnb.reports.inside.collective import CollectiveResult
from ddpnb.reports.inside.replicas import Finding, ReplicaCheck, find, measured
from ddpnb.reports.inside.samples import Handout, handout_of
from ddpnb.session.asking import ask

# -- are the replicas the same? ------------------------------------------------------------


def check_replicas(cluster: Cluster, names: Sequence[str]) -> ReplicaCheck:
    """Compare what the ranks hold: by digests, then by the values of what differs first."""
    if len(cluster.ranks) < 2:
        raise UserError("There is one rank, and nothing to compare it with: %ddp_restart -n 2.")
    replicas = list(ask(cluster, calls.digests(tuple(names))).values())
    if not any(each.held for each in replicas):
        raise UserError(
            "No rank has a model or an optimizer: make one in a %%ddp cell, or name what to "
            "compare, %ddp_check x."
        )
    found = [_measure(cluster, each) for each in find(replicas)]
    return ReplicaCheck(findings=with_causes(found, replicas), ranks=tuple(cluster.ranks))


def _measure(cluster: Cluster, finding: Finding) -> Finding:
    """Return a finding with the size of its first difference, if it has one."""
    if not finding.chunks:
        return finding
    ranks = finding.measured_ranks
    wanted = finding.name, finding.part, finding.tensor, finding.chunks
    found = ask(cluster, calls.elements(ranks, *wanted))
    return measured(finding, [each for rank in ranks if (each := found[rank]) is not None])


# -- which rank gets which samples? --------------------------------------------------------


def samples_of_sampler(cluster: Cluster, spec: SamplerSpec) -> Handout:
    """Return what a sampler hands out to each rank, as the ranks read it."""
    found = ask(cluster, calls.samples(spec))
    return handout_of(spec, [found[rank] for rank in cluster.ranks])


# -- one collective ------------------------------------------------------------------------


def collective_spec(name: str, num_ranks: int, ranks: str | None, **chosen: Any) -> CollectiveSpec:
    """Return what is to be run; ``chosen`` are its options.

    Raises:
        UserError: an option does not suit the collective.
    """
    if name not in SHOWN:
        raise one_of("collective", name, (*SHOWN, TRACE))
    return CollectiveSpec(name=name, ranks=parse_ranks(ranks, num_ranks), **chosen)


def run_collective(cluster: Cluster, spec: CollectiveSpec) -> CollectiveResult:
    """Run a collective on the ranks; return what each of them had, sent and measured."""
    cluster.ensure_group()
    found = ask(cluster, calls.show_collective(spec))
    taken_part = [each for rank in cluster.ranks if (each := found[rank]) is not None]
    return CollectiveResult(spec, taken_part)
