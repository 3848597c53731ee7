"""What still runs on ranks that another kernel has left?  (Notebook side.)

Its call went with that kernel, and so did its output.  But a rank does one thing after
the other: a call sent now returns when the one before it has ended.
"""

import contextvars
import threading
import time

from ddpnb.notebook.cluster.cluster import Cluster
from ddpnb.notebook.cluster.watch import Watch
from ddpnb.notebook.ranks import format_ranks
from ddpnb.remote_call import OnRank

IDLE_SECONDS = 2.0
"""A rank that does not answer in this time is at something."""


class LeftCell:
    """What runs on ranks since before this kernel; it is attended to, as any cell.

    Args:
        cluster: where it runs.
        ranks: the ranks that are at it.
    """

    def __init__(self, cluster: Cluster, ranks: tuple[int, ...]) -> None:
        self.ranks = ranks
        self._watch = Watch(
            cluster=cluster,
            call=cluster.submit(OnRank("state"), ranks=ranks),
            handle=lambda _: None,
            tick=lambda: None,
        )
        here = contextvars.copy_context()  # knows which cell output belongs to
        self._thread = threading.Thread(target=here.run, args=(self._run,), daemon=True)
        self._thread.start()

    @property
    def done(self) -> bool:
        """Whether every rank has ended it."""
        return self._watch.call.done

    def wait(self, timeout: float | None = None) -> None:
        """Wait until it has been attended to; ``timeout`` in seconds."""
        self._thread.join(timeout)

    def interrupt(self) -> None:
        """Stop it on all its ranks."""
        self._watch.stop_requested = True

    def _run(self) -> None:
        self._watch.run()
        if self._watch.stuck:
            print(f"What the last kernel had sent was stuck: {self._watch.stuck}")


def left_cell(cluster: Cluster) -> LeftCell | None:
    """Find out which ranks are at something, and say so; None where all are idle."""
    call = cluster.submit(OnRank("state"), ranks=cluster.living)
    deadline = time.monotonic() + IDLE_SECONDS
    while call.running and (left := deadline - time.monotonic()) > 0:
        for _ in call.happenings(left):
            pass
    if not call.running:
        return None
    busy = tuple(sorted(call.running))
    print(
        f"Rank {format_ranks(busy)} still runs what the last kernel sent, and its output goes "
        "nowhere: %ddp_interrupt stops it."
    )
    return LeftCell(cluster, busy)
