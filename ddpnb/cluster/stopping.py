"""How a call is ended before its time: interrupt, free, kill; and the group after that (kernel)."""

import signal
import time
from collections.abc import Callable

from ddpnb.cluster.call import Call
from ddpnb.cluster.cluster import Cluster
from ddpnb.cluster.outcome import Outcome
from ddpnb.cluster.wording import say, sentence
from ddpnb.protocol import calls
from ddpnb.protocol.errors import UserError

END_TIMEOUT_SECONDS = 10.0
"""How long a call with killed ranks may take to end."""


def stop(
    cluster: Cluster, call: Call, attend: Callable[[float], None], notify: Callable[[str], None]
) -> None:
    """Interrupt and free the ranks of a call until they stop; kill those that do not.

    ``attend`` takes the call's events until it has ended, for so many seconds at most.
    """
    timeouts = cluster.timeouts
    kill_at = time.monotonic() + timeouts.kill_after_seconds
    while call.running and time.monotonic() < kill_at:
        # A rank that received SIGSTOP could not end the cell.
        cluster.processes.signal(sorted(call.running), signal.SIGCONT)
        cluster.interrupt(tuple(call.running))
        attend(timeouts.abort_after_interrupt_seconds)
        if call.running:
            cluster.abort(tuple(call.running))
        attend(timeouts.interrupt_again_after_seconds)
    if call.running:
        kill(cluster, call, notify)
    attend(END_TIMEOUT_SECONDS)


def kill(cluster: Cluster, call: Call, notify: Callable[[str], None]) -> None:
    """Kill the ranks that still run a call."""
    notify(
        sentence(
            f"{say(call.running, 'was')} killed, as nothing else ended the wait; variables are lost"
        )
    )
    cluster.kill(sorted(call.running))


def leave_broken_group(cluster: Cluster, outcome: Outcome) -> None:
    """Have the next call form a new group if it would meet what one rank has called alone.

    A stop or a failure may come before a collective on one rank and after it on another.
    """
    if cluster.is_over:
        return
    ranks = [rank for rank in cluster.living if rank in outcome.returned]
    if any(failure.breaks_group for failure in outcome.failures):
        return cluster.abort(())
    made: dict[str, set[int | None]] = {}
    try:
        for answer in cluster.gather(calls.num_calls(), ranks, END_TIMEOUT_SECONDS):
            for group, number in answer.items():
                made.setdefault(group, set()).add(number)
    except (RuntimeError, OSError, KeyError, UserError):  # a rank, or the cluster, has ended
        return
    if any(len(numbers) > 1 or None in numbers for numbers in made.values()):
        cluster.abort(ranks)
