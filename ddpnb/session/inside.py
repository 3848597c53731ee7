"""What looks inside: asks the ranks, and returns what a notebook shows (kernel)."""

from ddpnb.cluster.cluster import Cluster
from ddpnb.protocol.errors import UserError, one_of
from ddpnb.protocol.messages import Failure, OnRank
from ddpnb.protocol.notation import parse_ranks, parse_size, spoken_ranks
from ddpnb.protocol.trace import COLLECTIVES, REDUCING, REDUCTIONS, ROOTED, SHOWN, CollectiveSpec
from ddpnb.reports.inside.collective import CollectiveResult
from ddpnb.session.variables import answers, cause_of

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
        raise one_of("collective", name, (*COLLECTIVES, *SHOWN))
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


def show_collective(cluster: Cluster, spec: CollectiveSpec) -> CollectiveResult:
    """Run a collective on the ranks; return what each of them had, sent and measured."""
    cluster.ensure_group()
    call = cluster.submit(OnRank("show_collective"), spec, ranks=cluster.ranks)
    found = answers(cluster, call)
    for each in found:
        if isinstance(each, Failure):
            raise UserError(f"{spec.name} failed on rank {each.rank}: {cause_of(each)}")
    return CollectiveResult(spec, [each for each in found if each is not None])
