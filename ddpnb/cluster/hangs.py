"""Why a call does not end: ranks wait for each other without end, or were stopped (kernel)."""

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from ddpnb.cluster.call import Call
from ddpnb.cluster.cluster import Cluster
from ddpnb.protocol.messages import RankStatus
from ddpnb.protocol.notation import format_ranks, spoken_ranks
from ddpnb.protocol.processes import RankCommand

IDLE_SHARE = 0.2
"""Processor time per second below which a waiting rank counts as idle: it moves no data."""
NUM_STOPPED_POLLS = 3
"""How often in a row a process must be found stopped: a profiler stops it for a moment only."""

NUM_ASKED = 8
"""How many ranks are asked at a time where they are; all of them once none of these goes on."""


@dataclass(kw_only=True, slots=True)
class HangDetector:
    """Polls the ranks that run a call, and finds out when they wait for each other without end.

    One rank that goes on is proof that the call does not hang.  So among many ranks only a few are
    asked, first those that went on when all were asked.  Once the few stand still, all are asked.
    """

    cluster: Cluster
    call: Call
    _answers: dict[int, "Future[Any]"] = field(default_factory=dict)
    _polled_at: float = field(default_factory=time.monotonic)
    _answered_at: float = field(default_factory=time.monotonic)
    _few: tuple[RankStatus, ...] = ()
    """What the few ranks answered last."""
    _going: tuple[int, ...] = ()
    """The ranks that went on when all were asked last."""
    _asks_all: bool = False
    _first: tuple[RankStatus, ...] = ()
    """The ranks' statuses when all of them had begun to wait."""
    _waited: float = 0.0
    """Seconds since, with every gap counted at most as ``longest_gap_seconds``."""
    _looked_at: float = field(default_factory=time.monotonic)
    _unanswered: float = 0.0
    """Seconds for which the ranks asked last have not all answered; gaps count likewise."""
    _named_silent: bool = False

    def check(self, finished: Mapping[int, int]) -> str:
        """Return why the call hangs; empty as long as it is not known to.

        ``finished``: ranks that have finished the cell, each with its number of collectives.
        """
        now = time.monotonic()
        if self._answers:
            return self._collect(now, finished)
        if now - self._polled_at > self.cluster.timeouts.poll_seconds:
            self._ask(now)
        return ""

    def name_silent(self) -> str:
        """Return a sentence on ranks that have not answered for long, once; else an empty one.

        To be called often.
        """
        now, timeouts = time.monotonic(), self.cluster.timeouts
        passed, self._looked_at = min(now - self._looked_at, timeouts.longest_gap_seconds), now
        self._unanswered = self._unanswered + passed if self._answers else 0.0
        if self._named_silent or self._unanswered < timeouts.silent_after_seconds:
            return ""
        silent = [rank for rank, answer in self._answers.items() if not answer.done()]
        running = self.call.running & set(silent)
        if not (silent := sorted(running - set(stopped_ranks(self.cluster, running)))):
            return ""
        self._named_silent = True
        return (
            f"R{no_answer(silent)[1:]}; until then no hang is noticed. An interrupt ends the cell."
        )

    def reset(self) -> None:
        """Start over: the ranks were just freed, and need time to notice."""
        self._answers, self._first = {}, ()
        self._few, self._asks_all = (), False

    def _ask(self, now: float) -> None:
        self._polled_at = now
        ranks = sorted(self.call.running & set(self.cluster.living))
        if not self._asks_all:
            ranks = sorted(ranks, key=lambda rank: rank not in self._going)[:NUM_ASKED]
        self._answers = {
            rank: self.cluster.processes.command(rank, RankCommand.STATUS) for rank in ranks
        }

    def _collect(self, now: float, finished: Mapping[int, int]) -> str:
        """Judge once all ranks have answered; a stopped one answers when it continues."""
        answers = [a for rank, a in self._answers.items() if rank in self.call.running]
        if not all(answer.done() for answer in answers):
            return ""
        self._answers = {}
        found = [answer.result() for answer in answers if answer.exception() is None]
        longest = self.cluster.timeouts.longest_gap_seconds
        passed, self._answered_at = min(now - self._answered_at, longest), now
        statuses = tuple(RankStatus(**each) for each in found)
        if len(self.call.running) <= NUM_ASKED or self._asks_all:
            return self._judge(passed, statuses, finished)
        self._asks_all = bool(self._few) and still_wait(self._few, statuses, passed)
        self._few = statuses
        if self._asks_all:
            self._ask(now)
        return ""

    def _judge(
        self, passed: float, now: tuple[RankStatus, ...], finished: Mapping[int, int]
    ) -> str:
        self._waited += passed
        first = {status.rank: status for status in self._first}
        self._going = tuple(
            status.rank
            for status in now
            if not status.call
            or (first and not is_same_wait(first.get(status.rank), status, self._waited))
        )
        self._asks_all = not self._going
        if len(now) != len(self.call.running) or not all(status.call for status in now):
            self._first = ()
        elif not self._first or not still_wait(self._first, now, self._waited):
            self._first, self._waited = now, 0.0
        elif self._waited >= self.cluster.timeouts.hang_after_seconds:
            idle = set(self.cluster.ranks) - set(self.call.ranks)
            return diagnose(now, finished, idle)
        return ""


def still_wait(before: Sequence[RankStatus], now: Sequence[RankStatus], seconds: float) -> bool:
    """Return whether all ranks wait, each where it did before.

    Each of them is in the same collective as ``seconds`` before, whatever the others are in, and
    has used hardly any processor time since.  A rank that computes, loads data or sleeps is in no
    collective: the ranks that wait for it do not hang.
    """
    earlier = {status.rank: status for status in before}
    return bool(now) and all(
        status.call and is_same_wait(earlier.get(status.rank), status, seconds) for status in now
    )


def is_same_wait(before: RankStatus | None, now: RankStatus, seconds: float) -> bool:
    """Return whether a rank is at the same place as before, and was idle in between."""
    if before is None or (before.call, before.file, before.line) != (now.call, now.file, now.line):
        return False
    if before.num_bytes_between_hosts != now.num_bytes_between_hosts:  # a slow network is no hang
        return False
    is_idle = now.cpu_seconds - before.cpu_seconds < IDLE_SHARE * seconds
    return before.num_collectives == now.num_collectives and is_idle


def diagnose(
    waiting: Sequence[RankStatus], finished: Mapping[int, int], idle: Collection[int] = ()
) -> str:
    """Say why hanging ranks do not go on.

    ``finished``: ranks that have finished the cell, each with its number of collectives;
    ``idle``: ranks that do not run it at all.
    """
    parts = [f"{_ranks_wait(ranks)} {_place(status)}" for status, ranks in _by_place(waiting)]
    reasons = _point_to_point(waiting, finished)
    if any(status.peer is None for status in waiting):
        reasons += _others(waiting, finished, idle)
    if not reasons and len(parts) > 1:
        reasons = ["they wait for different calls"]
    return "; ".join([", ".join(parts), *reasons])


def describe(status: RankStatus) -> str:
    """Say what one rank is doing."""
    if not status.is_busy:
        return f"rank {status.rank} is idle"
    if status.call:
        return f"{_ranks_wait([status.rank])} {_place(status)}"
    if not status.line:
        return f"rank {status.rank} trains, and is in no collective"
    where = status.file or f"In [{status.cell}]"
    return f"rank {status.rank} is at line {status.line} of {where}, in no collective"


def no_answer(ranks: Sequence[int]) -> str:
    """Say that ranks do not answer, and why that may be."""
    one = len(ranks) == 1
    return (
        f"{spoken_ranks(ranks)} {'does' if one else 'do'} not answer: "
        f"{'it' if one else 'they'} may run code that keeps all other threads waiting"
    )


def _by_place(waiting: Sequence[RankStatus]) -> list[tuple[RankStatus, list[int]]]:
    """Group ranks that wait in the same call, at the same line, with the same tensor."""
    places: dict[tuple[object, ...], list[RankStatus]] = {}
    for status in waiting:
        line = (status.file, status.line)
        key = (status.call, line, status.tensor, status.in_backward, status.peer)
        places.setdefault(key, []).append(status)
    return [(group[0], [status.rank for status in group]) for group in places.values()]


def _ranks_wait(ranks: Sequence[int]) -> str:
    return f"{spoken_ranks(ranks)} {'waits' if len(ranks) == 1 else 'wait'}"


def _place(status: RankStatus) -> str:
    call = f"{status.call} of the backward pass" if status.in_backward else status.call
    direction = "to" if "send" in status.call else "from"
    towards = "" if status.peer is None else f" {direction} rank {status.peer}"
    line = f"line {status.line}" if status.line else ""
    line += f" of {status.file}" if status.file else ""
    aside = ", ".join(part for part in (line, status.tensor) if part)
    return f"in {call}{towards}" + (f" ({aside})" if aside else "")


def _point_to_point(waiting: Sequence[RankStatus], finished: Collection[int]) -> list[str]:
    """Say which peers do not send or receive."""
    reasons = []
    for status in waiting:
        if status.peer is not None:
            part = "receiving" if "send" in status.call else "sending"
            how = "has finished the cell without" if status.peer in finished else "is not"
            reasons.append(f"rank {status.peer} {how} {part}")
    return list(dict.fromkeys(reasons))


def _others(
    waiting: Sequence[RankStatus], finished: Mapping[int, int], idle: Collection[int]
) -> list[str]:
    """Say what the ranks do that the hanging ones wait for."""
    reasons = []
    if finished:
        reasons.append(f"{spoken_ranks(finished)} {_finished_how(waiting, finished)}")
    if idle:
        do = "does" if len(idle) == 1 else "do"
        reasons.append(f"{spoken_ranks(idle)} {do} not run this cell")
    return reasons


def _finished_how(waiting: Sequence[RankStatus], finished: Mapping[int, int]) -> str:
    """Say how many calls the finished ranks lack, if that is known."""
    if any(status.in_backward for status in waiting):
        return "finished the cell with fewer batches"
    lacking = {status.num_collectives - num for status in waiting for num in finished.values()}
    if len(lacking) == 1 and (num := lacking.pop()) > 1:
        return f"finished the cell with {num} calls fewer"
    return "finished the cell without calling it"


@dataclass(kw_only=True, slots=True)
class StopDetector:
    """Finds ranks that received SIGSTOP, by ``kill``, a terminal or a container's pause.

    It counts polls, not seconds: when a laptop sleeps, this kernel is stopped too.
    """

    cluster: Cluster
    _polled_at: float = field(default_factory=time.monotonic)
    _num_polls: dict[int, int] = field(default_factory=dict)

    def check(self, running: Iterable[int]) -> str:
        """Return a sentence on ranks that are newly found stopped; empty if there are none."""
        now = time.monotonic()
        if now - self._polled_at < self.cluster.timeouts.stopped_poll_seconds:
            return ""
        self._polled_at = now
        found = stopped_ranks(self.cluster, running)
        self._num_polls = {rank: self._num_polls.get(rank, 0) + 1 for rank in found}
        new = [rank for rank, num in self._num_polls.items() if num == NUM_STOPPED_POLLS]
        if not new:
            return ""
        ways_out = describe_stopped(self.cluster, new)
        return f"{ways_out} An interrupt ends the cell and keeps the variables."


def stopped_ranks(cluster: Cluster, ranks: Iterable[int]) -> list[int]:
    """Return those of the ranks that received SIGSTOP, as the fork server of each reports."""
    stopped = cluster.processes.stopped_members
    return [rank for rank in sorted(set(ranks) & set(cluster.living)) if rank in stopped]


def describe_stopped(cluster: Cluster, ranks: Iterable[int]) -> str:
    """Say that ranks are stopped, and what can be done."""
    chosen = sorted(ranks)
    subject, them = f"Ranks {format_ranks(chosen)} are", "them"
    if len(chosen) == 1:
        subject, them = f"Rank {chosen[0]} is", "it"
    pids: dict[str, list[str]] = {}
    for rank in chosen:
        host = "" if cluster.is_local else f" on host {cluster.states[rank].host}"
        pids.setdefault(host, []).append(str(cluster.states[rank].pid))
    kills = " and ".join(f"`kill -CONT {' '.join(each)}`{host}" for host, each in pids.items())
    return (
        f"{subject} stopped (SIGSTOP): {kills} {'lets' if len(pids) == 1 else 'let'} {them} go on, "
        f"%ddp_restart --ranks {format_ranks(chosen)} starts {them} anew."
    )
