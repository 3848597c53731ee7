"""Detects from the ranks' reports that ranks wait without end.  Runs in the kernel."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, final

from ddpnb.cluster.call import Call
from ddpnb.cluster.cluster import Cluster
from ddpnb.cluster.wording import describe_silent, say, to_sentence
from ddpnb.protocol.processes import RankCommand, RankStatus

NUM_AT_FULL_RATE = 32
"""If a call has more ranks than this, each rank is polled less often."""
IDLE_SHARE = 0.2
"""Maximum share of a CPU core that an idle rank uses.  A rank that sends data uses more."""


@final
class HangDetector:
    """Asks the ranks of a call for their positions, to detect that the ranks wait without end.

    The detector asks in rounds.  A round ends when all running ranks have answered.
    """

    def __init__(self, cluster: Cluster, call: Call) -> None:
        self._cluster = cluster
        self._call = call
        self._answers: dict[int, Future[Any]] = {}
        self._polled_at: float | None = None
        self._round_seconds = 0.0
        """Seconds since the round began."""
        self._has_named = False
        """True if the user has been told about the silent ranks of this round."""
        self._first: Sequence[RankStatus] = ()
        """The reports of the first round in which all ranks were waiting."""
        self._waited = 0.0
        """Seconds since the first round in which all ranks were waiting."""
        self._reported_at = 0.0

    def poll(self, now: float) -> Sequence[RankStatus]:
        """Return the reports of the running ranks if the ranks hang, and otherwise ``()``.

        If a new round is due, this method begins the round.  ``now`` is in seconds.
        """
        timeouts, running = self._cluster.timeouts, self._call.running
        rarity = max(1.0, len(running) / NUM_AT_FULL_RATE)  # the total cost does not grow
        passed = 0.0 if self._polled_at is None else now - self._polled_at
        self._polled_at = now
        self._round_seconds += min(passed, timeouts.longest_gap_seconds)
        answers = [answer for rank, answer in self._answers.items() if rank in running]
        if not all(answer.done() for answer in answers):
            return ()
        if not self._answers:
            if self._round_seconds > timeouts.poll_seconds * rarity:
                self._round_seconds = 0.0
                command = self._cluster.processes.command
                alive = running & set(self._cluster.living)
                self._answers = {rank: command(rank, RankCommand.STATUS) for rank in alive}
            return ()
        self._answers, self._has_named = {}, False
        reports = [RankStatus(**each.result()) for each in answers if each.exception() is None]
        self._waited += min(now - self._reported_at, timeouts.longest_gap_seconds * rarity)
        self._reported_at = now
        if len(reports) != len(running):
            self._first = ()
        elif not still_wait(self._first, reports, self._waited):
            self._first, self._waited = reports, 0.0
        is_hang = bool(self._first) and self._waited >= timeouts.hang_after_seconds
        return reports if is_hang else ()

    def notice(self) -> str:
        """Return a message about silent ranks once per round, and otherwise an empty string."""
        asked = {rank for rank, answer in self._answers.items() if not answer.done()}
        is_late = self._round_seconds > self._cluster.timeouts.silent_after_seconds
        if self._has_named or not is_late or not (silent := asked & self._call.running):
            return ""
        self._has_named = True
        return (
            f"{to_sentence(describe_silent(silent))} ddpnb cannot detect hangs until all ranks "
            "answer. Interrupt the cell to stop it."
        )


def still_wait(before: Sequence[RankStatus], now: Sequence[RankStatus], seconds: float) -> bool:
    """Return True if all ranks have waited in their collective calls for the last ``seconds``.

    A rank waits only if the rank has used hardly any CPU time.  Return False if a rank is outside a
    collective (it computes, loads data or sleeps), or if a slow network still transfers data.
    """
    fields = ("call", "file", "line", "num_collectives", "num_bytes_between_hosts")
    earlier = {status.rank: status for status in before}

    def waits(now: RankStatus) -> bool:
        if (first := earlier.get(now.rank)) is None:
            return False
        is_there = all(getattr(first, name) == getattr(now, name) for name in fields)
        return is_there and now.cpu_seconds - first.cpu_seconds < IDLE_SHARE * seconds

    return bool(now) and all(status.call and waits(status) for status in now)


def describe_hang(
    waiting: Sequence[RankStatus], finished: Mapping[int, int], idle: Collection[int]
) -> str:
    """Return clauses that say where ranks wait, and why the other ranks do not join the call.

    ``finished`` maps each rank that has finished the cell to the rank's number of collectives.
    ``idle`` has the ranks that do not run the cell at all.
    """
    places: dict[tuple[object, ...], list[RankStatus]] = {}
    for each in waiting:
        key = (each.call, each.file, each.line, each.tensor, each.in_backward, each.peer)
        places.setdefault(key, []).append(each)
    where = [
        f"{say([status.rank for status in group], 'waits')} {_place(group[0])}"
        for group in places.values()
    ]
    reasons = list(dict.fromkeys(_peers(waiting, finished)))
    if any(status.peer is None for status in waiting):
        reasons += [say(finished, _finished_how(waiting, finished))] if finished else []
        reasons += [say(idle, "does not run this cell")] if idle else []
    if not reasons and len(where) > 1:
        reasons = ["the ranks wait in different calls"]
    return "; ".join([", ".join(where), *reasons])


def describe_position(status: RankStatus) -> str:
    """Return a clause that says what one rank is doing."""
    if not status.is_busy:
        return f"rank {status.rank} is idle"
    if status.call:
        return f"rank {status.rank} waits {_place(status)}"
    if not status.line:
        return f"rank {status.rank} is training and is not in a collective"
    where = status.file or f"In [{status.cell}]"
    return f"rank {status.rank} is at line {status.line} of {where}, not in a collective"


def _peers(waiting: Sequence[RankStatus], finished: Collection[int]) -> Iterator[str]:
    """Yield a clause about each rank that a ``send`` or a ``recv`` waits for."""
    for status in waiting:
        if status.peer is not None:
            part = "receiving" if "send" in status.call else "sending"
            how = "has finished the cell without" if status.peer in finished else "is not"
            yield f"rank {status.peer} {how} {part}"


def _finished_how(waiting: Sequence[RankStatus], finished: Mapping[int, int]) -> str:
    """Return a phrase that says that ranks finished the cell with fewer calls or batches."""
    if any(status.in_backward for status in waiting):
        return "finished the cell with fewer batches"
    lacking = {status.num_collectives - num for status in waiting for num in finished.values()}
    if len(lacking) == 1 and (num := lacking.pop()) > 1:
        return f"finished the cell with {num} fewer calls"
    return "finished the cell without making this call"


def _place(status: RankStatus) -> str:
    call = f"{status.call} of the backward pass" if status.in_backward else status.call
    direction = "to" if "send" in status.call else "from"
    towards = "" if status.peer is None else f" {direction} rank {status.peer}"
    line = f"line {status.line}" if status.line else ""
    line += f" of {status.file}" if status.file else ""
    aside = ", ".join(part for part in (line, status.tensor) if part)
    return f"in {call}{towards}" + (f" ({aside})" if aside else "")
