"""Can all that is to be compared be trained?  Asked before anything is.  (Notebook side.)"""

from collections.abc import Mapping

from ddpnb.errors import UserError
from ddpnb.notebook.cells import failures_of
from ddpnb.notebook.cluster.cluster import Cluster
from ddpnb.notebook.cluster.watch import Watch
from ddpnb.notebook.errors import CellInterrupt, RankError
from ddpnb.notebook.ranks import spoken_ranks
from ddpnb.remote_call import OnRank
from ddpnb.wire import Checked, RunSpec

FREE_AFTER_SECONDS = 5.0
"""How long ranks may still check after one has refused; to free them costs the group."""


def check(cluster: Cluster, spec: RunSpec) -> Checked:
    """Have every rank look for what would stop a training.

    Returns:
        What rank 0 knows of it.

    Raises:
        UserError: where the user's own mistake would.
        RankError: where the cell itself fails.
        KeyboardInterrupt: where it was interrupted; the ranks have stopped.
    """
    watch = Watch(
        cluster=cluster,
        call=cluster.submit(OnRank("check"), spec, ranks=cluster.ranks),
        handle=lambda _: None,
        tick=lambda: None,
        free_after=FREE_AFTER_SECONDS,
    )
    try:
        watch.run()
    except KeyboardInterrupt:
        raise CellInterrupt from None
    failures = failures_of(watch)
    for failure in failures:
        if failure.name == UserError.__name__:
            raise UserError(failure.text)
    if failures:
        raise RankError(failures)
    found = {rank: told for rank, told in watch.returned.items() if isinstance(told, Checked)}
    _check_sizes(found)
    return found[0]


def _check_sizes(found: Mapping[int, Checked]) -> None:
    """Refuse a training split that is larger on one rank than on another."""
    by_size: dict[int, list[int]] = {}
    for rank, told in sorted(found.items()):
        by_size.setdefault(told.num_samples, []).append(rank)
    if len(by_size) > 1:
        sizes = [f"{size} samples on {spoken_ranks(on)}" for size, on in by_size.items()]
        raise UserError(
            f"data('train') has {' and '.join(sizes)}; return the same data on every rank, "
            "each trains on its own part of them."
        )
