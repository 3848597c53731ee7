"""Forms the process groups of a cluster's ranks.  Runs in the kernel."""

import contextlib
import time
from collections.abc import Sequence

from ddpnb.cluster.call import CALL_TIMEOUT_SECONDS, Call
from ddpnb.cluster.cluster import Cluster
from ddpnb.cluster.interrupts import noted_interrupts
from ddpnb.cluster.processes import wait_until
from ddpnb.cluster.wording import describe_silent, restart_command, them, to_sentence
from ddpnb.protocol.calls import calls
from ddpnb.protocol.cell_messages import StaleVariable
from ddpnb.protocol.errors import UserError

FREE_SECONDS = 10.0
"""Maximum time to wait until ranks stop forming a group, for example because a rank has died."""
FREE_AGAIN_SECONDS = 0.5


def ensure_group(cluster: Cluster, *, is_checked: bool = False) -> dict[StaleVariable, list[int]]:
    """Form a new process group unless the old group is usable and has the same ``is_checked``.

    While a rank is dead, no group is formed, and the ranks continue without a group.  If
    ``is_checked``, torch compares the ranks' collectives at each call.

    Returns:
        Each variable that still refers to the old group, with the ranks that have the variable.

    Raises:
        UserError: a rank runs a cell, or no group could be formed although all ranks are alive.
    """
    is_fit = not cluster.is_aborted and cluster.is_checked == is_checked
    if is_fit or cluster.lost or cluster.dead:
        return {}
    cluster.require_idle(cluster.ranks)
    _wait_for_aborts(cluster)
    cluster.generation += 1
    cluster.is_aborted = True  # until all ranks have joined
    call = cluster.submit(calls.form_group(cluster.generation, is_checked), cluster.ranks)
    try:
        found = call.results()
    except BaseException as error:
        _free(cluster, call)
        if not isinstance(error, RuntimeError | TimeoutError):
            raise
        if cluster.dead:  # a rank died: continue without a group
            return {}
        raise UserError(
            f"The ranks could not form a process group: {error}. Run the cell again to retry, "
            "or run %ddp_restart to start new ranks."
        ) from error
    cluster.is_aborted, cluster.is_checked = False, is_checked
    stale: dict[StaleVariable, list[int]] = {}
    for rank, variables in zip(cluster.ranks, found, strict=True):
        for each in variables:
            stale.setdefault(each, []).append(rank)
    return stale


def bring_back(cluster: Cluster, ranks: Sequence[int]) -> dict[StaleVariable, list[int]]:
    """Restart ranks in a new process group; the other ranks keep their variables.

    Returns the result of ``ensure_group``.  Raises UserError if one of the ranks dies again.
    If another rank runs a cell, this function raises UserError and does not end any rank.
    """
    cluster.require_idle(set(cluster.ranks) - set(ranks))
    with noted_interrupts():
        cluster.kill(ranks)
        try:
            wait_until(
                lambda: not set(ranks) & set(cluster.living), CALL_TIMEOUT_SECONDS, "not ended"
            )
        except TimeoutError:
            cluster.survivors |= set(ranks)
            raise UserError(cluster.remedy()) from None
        for rank in {*ranks, *cluster.dead}:  # more ranks may have died meanwhile
            cluster.restart_alone(rank)
        stale = ensure_group(cluster)
        cluster.require(ranks)
        return stale


def _wait_for_aborts(cluster: Cluster) -> None:
    """Wait for all aborts, because a late abort would close a new group's connections."""

    def late() -> list[int]:
        aborts = cluster.aborts
        return [rank for rank in cluster.living if rank in aborts and not aborts[rank].done()]

    try:
        wait_until(lambda: not late(), CALL_TIMEOUT_SECONDS, "not left")
    except TimeoutError:
        ranks = late()
        text = f"{describe_silent(ranks)}. Run {restart_command(ranks)} to restart {them(ranks)}"
        raise UserError(to_sentence(text)) from None
    cluster.aborts.clear()


def _free(cluster: Cluster, call: Call) -> None:
    """Release the ranks that wait to form a group, and wait until all ranks return."""
    deadline = time.monotonic() + FREE_SECONDS
    while call.running and time.monotonic() < deadline:
        # Repeated, because an abort may arrive before the call.
        cluster.abort(cluster.living)
        with contextlib.suppress(RuntimeError, TimeoutError):
            call.results(FREE_AGAIN_SECONDS)
