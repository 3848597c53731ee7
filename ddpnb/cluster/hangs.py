"""Why does a cell not end?  In words that a student understands.  (Notebook side.)"""

import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from ddpnb.cluster.call import Call
from ddpnb.cluster.cluster import Cluster
from ddpnb.protocol.messages import RankStatus
from ddpnb.protocol.processes import RankCommand
from ddpnb.protocol.rank_sets import format_ranks, spoken_ranks

IDLE_SHARE = 0.2
"""Processor time per second below which a rank that waits sends and receives nothing either."""


def is_stuck(before: Sequence[RankStatus], now: Sequence[RankStatus], seconds: float) -> bool:
    """Tell whether ranks wait for each other without end.

    Every one of them waits in a collective, the same as before, and hardly any
    processor time was spent meanwhile.  A rank that computes, loads data or sleeps is
    not in a collective: whoever waits for it is not stuck.

    Args:
        before: the running ranks some time ago.
        now: the running ranks.
        seconds: the time between.
    """
    earlier = {where.rank: where for where in before}
    return bool(now) and all(
        where.call and is_same_wait(earlier.get(where.rank), where, seconds) for where in now
    )


def is_same_wait(before: RankStatus | None, now: RankStatus, seconds: float) -> bool:
    """Tell whether a rank stands where it stood, and has done nothing in between."""
    if before is None or (before.call, before.line) != (now.call, now.line):
        return False
    is_idle = now.cpu_seconds - before.cpu_seconds < IDLE_SHARE * seconds
    return before.num_collectives == now.num_collectives and is_idle


def diagnose(
    stuck: Sequence[RankStatus], finished: Mapping[int, int], idle: Collection[int] = ()
) -> str:
    """Say why ranks that are stuck do not go on.

    Args:
        stuck: the ranks that wait, and where.
        finished: ranks that have ended the cell, each with the collectives it had begun.
        idle: ranks that do not run the cell at all.
    """
    parts = [f"{_who(ranks)} {_where(where)}" for where, ranks in _by_place(stuck)]
    reasons = _point_to_point(stuck, finished)
    if any(where.peer is None for where in stuck):
        reasons += _others(stuck, finished, idle)
    if not reasons and len(parts) > 1:
        reasons = ["they wait for different calls"]
    return "; ".join([", ".join(parts), *reasons])


def describe(where: RankStatus) -> str:
    """Say where one rank stands."""
    if not where.is_busy:
        return f"rank {where.rank} is idle"
    if where.call:
        return f"{_who([where.rank])} {_where(where)}"
    if not where.line:
        return f"rank {where.rank} trains, and is in no collective"
    return f"rank {where.rank} is at line {where.line} of In [{where.cell}], in no collective"


def _by_place(stuck: Sequence[RankStatus]) -> list[tuple[RankStatus, list[int]]]:
    """Group ranks that wait in the same call, at the same line, with the same tensor."""
    places: dict[tuple[object, ...], list[RankStatus]] = {}
    for where in stuck:
        key = (where.call, where.line, where.tensor, where.in_backward, where.peer)
        places.setdefault(key, []).append(where)
    return [(group[0], [where.rank for where in group]) for group in places.values()]


def _who(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]} waits"
    return f"ranks {format_ranks(ranks)} wait"


def _where(where: RankStatus) -> str:
    call = f"{where.call} of DDP's backward" if where.in_backward else where.call
    towards = "" if where.peer is None else f" {_direction(where)} rank {where.peer}"
    line = f"line {where.line}" if where.line else ""
    aside = ", ".join(part for part in (line, where.tensor) if part)
    return f"in {call}{towards}" + (f" ({aside})" if aside else "")


def _direction(where: RankStatus) -> str:
    return "to" if "send" in where.call else "from"


def _point_to_point(stuck: Sequence[RankStatus], finished: Collection[int]) -> list[str]:
    """Say which peers do not do their part."""
    reasons = []
    for where in stuck:
        if where.peer is not None:
            part = "receiving" if "send" in where.call else "sending"
            how = "has finished the cell without" if where.peer in finished else "is not"
            reasons.append(f"rank {where.peer} {how} {part}")
    return list(dict.fromkeys(reasons))


def _others(
    stuck: Sequence[RankStatus], finished: Mapping[int, int], idle: Collection[int]
) -> list[str]:
    """Say what the ranks that they wait for have done instead."""
    reasons = []
    if finished:
        reasons.append(f"{spoken_ranks(finished)} {_finished_how(stuck, finished)}")
    if idle:
        do = "does" if len(idle) == 1 else "do"
        reasons.append(f"{spoken_ranks(idle)} {do} not run this cell")
    return reasons


def _finished_how(stuck: Sequence[RankStatus], finished: Mapping[int, int]) -> str:
    """Say how many calls the finished ranks lack, where that is known."""
    if any(where.in_backward for where in stuck):
        return "finished the cell with fewer batches"
    lacking = {where.num_collectives - num for where in stuck for num in finished.values()}
    if len(lacking) == 1 and (num := lacking.pop()) > 1:
        return f"finished the cell with {num} calls fewer"
    return "finished the cell without calling it"


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
    _first: tuple[RankStatus, ...] = ()
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
        if now - self._asked_at > self.cluster.timeouts.poll_seconds:
            self._asked_at = now
            ranks = sorted(self.call.running & set(self.cluster.living))
            self._asked = {
                rank: self.cluster.processes.command(rank, RankCommand.STATUS) for rank in ranks
            }
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
        longest = self.cluster.timeouts.longest_gap_seconds
        passed, self._heard_at = min(now - self._heard_at, longest), now
        return self._judge(passed, tuple(RankStatus(**w) for w in found if w), finished)

    def _judge(
        self, passed: float, where: tuple[RankStatus, ...], finished: Mapping[int, int]
    ) -> str:
        self._waited += passed
        if len(where) != len(self.call.running) or not all(each.call for each in where):
            self._first = ()
        elif not self._first or not is_stuck(self._first, where, self._waited):
            self._first, self._waited = where, 0.0
        elif self._waited >= self.cluster.timeouts.stuck_after_seconds:
            idle = set(self.cluster.ranks) - set(self.call.ranks)
            return diagnose(where, finished, idle)
        return ""
