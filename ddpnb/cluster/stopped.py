"""Has a rank's process been stopped from outside, and what gets it going?  (Notebook side.)

A process that was sent SIGSTOP, by ``kill``, a terminal or a container's pause, lives and
answers nothing.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass, field

import psutil

from ddpnb.cluster.cluster import Cluster
from ddpnb.protocol.rank_sets import format_ranks

NUM_LOOKS = 3
"""How often in a row a process must have been found stopped; a profiler stops it for a moment."""

STOPPED = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)


@dataclass(kw_only=True, slots=True)
class StoppedProcesses:
    """Finds ranks that were stopped while a call runs.

    Looks are counted, not seconds: where this kernel was stopped too, as with a laptop
    that sleeps, time passes without a look.

    Args:
        cluster: where the call runs.
    """

    cluster: Cluster
    _looked_at: float = field(default_factory=time.monotonic)
    _num_looks: dict[int, int] = field(default_factory=dict)

    def check(self, running: Iterable[int]) -> str:
        """Return which of the running ranks have been found stopped; empty where none newly is."""
        now = time.monotonic()
        if now - self._looked_at < self.cluster.timeouts.stopped_poll_seconds:
            return ""
        self._looked_at = now
        found = stopped_ranks(self.cluster, running)
        self._num_looks = {rank: self._num_looks.get(rank, 0) + 1 for rank in found}
        new = [rank for rank, num in self._num_looks.items() if num == NUM_LOOKS]
        if not new:
            return ""
        ways_out = describe_stopped(self.cluster, new)
        return f"{ways_out} An interrupt ends the cell and keeps the variables."


def stopped_ranks(cluster: Cluster, ranks: Iterable[int]) -> list[int]:
    """Return those of the ranks whose processes the operating system calls stopped."""
    found = []
    for rank in sorted(set(ranks) & set(cluster.living)):
        try:
            if psutil.Process(cluster.states[rank].pid).status() in STOPPED:
                found.append(rank)
        except psutil.NoSuchProcess:
            continue  # its death is told by the fork server
    return found


def describe_stopped(cluster: Cluster, ranks: Iterable[int]) -> str:
    """Say that ranks are stopped, and the ways out."""
    chosen = sorted(ranks)
    is_one = len(chosen) == 1
    who = f"Rank {chosen[0]} is" if is_one else f"Ranks {format_ranks(chosen)} are"
    pids = " ".join(str(cluster.states[rank].pid) for rank in chosen)
    return (
        f"{who} stopped (SIGSTOP): `kill -CONT {pids}` lets {'it' if is_one else 'them'} go on, "
        f"%ddp_restart --ranks {format_ranks(chosen)} starts {'it' if is_one else 'them'} anew."
    )
