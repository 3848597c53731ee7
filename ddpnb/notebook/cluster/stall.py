"""Is a call stuck, and why?  Asked now and then while it runs.  (Notebook side.)"""

import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from ddpnb.notebook.cluster.call import Call
from ddpnb.notebook.cluster.cluster import Cluster
from ddpnb.notebook.cluster.diagnosis import diagnose, is_stuck
from ddpnb.processes import Order
from ddpnb.wire import Whereabouts

ASK_SECONDS = 0.8
"""How often the ranks are asked where they are; twice a second cost a training 1 %."""
STUCK_SECONDS = 2.0
"""How long ranks must have waited for each other, with nothing going on, to be stuck."""
LONGEST_GAP_SECONDS = 1.0
"""What the time between two answers counts for at most.

Where it was longer, this kernel or the ranks were stopped, as with a laptop that sleeps:
that nothing went on meanwhile says nothing.
"""


@dataclass(kw_only=True, slots=True)
class StallDetector:
    """Asks the running ranks where they are, and finds out when they wait for ever.

    Args:
        cluster: where the call runs.
        call: the call.
    """

    cluster: Cluster
    call: Call
    _asked: dict[int, "Future[Any]"] = field(default_factory=dict)
    _asked_at: float = field(default_factory=time.monotonic)
    _heard_at: float = field(default_factory=time.monotonic)
    _first: tuple[Whereabouts, ...] = ()
    """Where the ranks were when they all began to wait."""
    _waited: float = 0.0
    """Seconds that have been seen to pass since."""

    def check(self, finished: Mapping[int, int]) -> str:
        """Return why the call is stuck; empty where it is not, as far as is known.

        Args:
            finished: the ranks that have ended, each with the collectives it had begun.
        """
        now = time.monotonic()
        if self._asked:
            return self._hear(now, finished)
        if now - self._asked_at > ASK_SECONDS:
            self._asked_at = now
            ranks = sorted(self.call.running & set(self.cluster.living))
            self._asked = {rank: self.cluster.processes.order(rank, Order.WHERE) for rank in ranks}
        return ""

    def begin_anew(self) -> None:
        """Forget what was seen: the ranks were freed just now, and need time to notice."""
        self._asked, self._first = {}, ()

    def _hear(self, now: float, finished: Mapping[int, int]) -> str:
        """Judge once all have answered; a rank that is stopped answers when it goes on."""
        answers = {rank: a for rank, a in self._asked.items() if rank in self.call.running}
        if not all(answer.done() for answer in answers.values()):
            return ""
        self._asked = {}
        found = [answer.result() for answer in answers.values()]
        passed, self._heard_at = min(now - self._heard_at, LONGEST_GAP_SECONDS), now
        return self._judge(passed, tuple(Whereabouts(**w) for w in found if w), finished)

    def _judge(
        self, passed: float, where: tuple[Whereabouts, ...], finished: Mapping[int, int]
    ) -> str:
        self._waited += passed
        if len(where) != len(self.call.running) or not all(each.call for each in where):
            self._first = ()
        elif not self._first or not is_stuck(self._first, where, self._waited):
            self._first, self._waited = where, 0.0
        elif self._waited >= STUCK_SECONDS:
            idle = set(self.cluster.ranks) - set(self.call.ranks)
            return diagnose(where, finished, idle)
        return ""
