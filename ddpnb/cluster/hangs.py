"""Detects from the ranks' reports that ranks wait without end.  Runs in the kernel."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ddpnb.cluster.call import Timeouts
from ddpnb.cluster.wording import say
from ddpnb.protocol.processes import RankStatus

NUM_AT_FULL_RATE = 32
"""If a call has more ranks than this, each rank is polled less often."""
IDLE_SHARE = 0.2
"""Maximum share of a CPU core that an idle rank uses.  A rank that sends data uses more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hang:
    """Ranks that wait for each other without end.  ``str()`` says where and why the ranks wait."""

    waiting: tuple[RankStatus, ...]
    finished: Mapping[int, int] = field(default_factory=dict)
    """Maps each rank that has finished the cell to the number of its collective calls."""
    idle: tuple[int, ...] = ()
    """Ranks that do not run the cell at all."""

    def __str__(self) -> str:
        """Describe where the ranks wait, and why the other ranks do not join the call."""
        places = [f"{say(ranks, 'waits')} {_place(first)}" for first, ranks in self._by_place()]
        reasons = list(dict.fromkeys(self._peers()))
        if any(status.peer is None for status in self.waiting):
            reasons += [say(self.finished, self._finished_how())] if self.finished else []
            reasons += [say(self.idle, "does not run this cell")] if self.idle else []
        if not reasons and len(places) > 1:
            reasons = ["the ranks wait in different calls"]
        return "; ".join([", ".join(places), *reasons])

    def _by_place(self) -> Iterator[tuple[RankStatus, list[int]]]:
        """Group the ranks that wait in the same call, at the same line, with the same tensor."""
        places: dict[tuple[object, ...], list[RankStatus]] = {}
        for each in self.waiting:
            key = (each.call, each.file, each.line, each.tensor, each.in_backward, each.peer)
            places.setdefault(key, []).append(each)
        for group in places.values():
            yield group[0], [status.rank for status in group]

    def _peers(self) -> Iterator[str]:
        """Yield a clause about each rank that a ``send`` or a ``recv`` waits for."""
        for status in self.waiting:
            if status.peer is not None:
                part = "receiving" if "send" in status.call else "sending"
                has_finished = status.peer in self.finished
                how = "has finished the cell without" if has_finished else "is not"
                yield f"rank {status.peer} {how} {part}"

    def _finished_how(self) -> str:
        """Return a phrase that says that ranks finished the cell with fewer calls or batches."""
        if any(status.in_backward for status in self.waiting):
            return "finished the cell with fewer batches"
        made = self.finished.values()
        lacking = {status.num_collectives - num for status in self.waiting for num in made}
        if len(lacking) == 1 and (num := lacking.pop()) > 1:
            return f"finished the cell with {num} fewer calls"
        return "finished the cell without making this call"


@dataclass(kw_only=True, slots=True)
class HangDetector:
    """Compares reports of ranks to detect that the ranks wait for each other without end."""

    timeouts: Timeouts
    _first: tuple[RankStatus, ...] = ()
    """The reports of the first round in which all ranks were waiting."""
    _waited: float = 0.0
    """Seconds since the first round in which all ranks were waiting."""
    _reported_at: float = 0.0

    def check(self, statuses: Sequence[RankStatus], num_running: int, now: float) -> bool:
        """Add a round of reports, and return True if the ranks hang.  ``now`` is in seconds."""
        longest_gap = self.timeouts.longest_gap_seconds * rarity(num_running)
        self._waited += min(now - self._reported_at, longest_gap)
        self._reported_at = now
        if len(statuses) != num_running:
            self._first = ()
        elif not still_wait(self._first, statuses, self._waited):
            self._first, self._waited = tuple(statuses), 0.0
        return bool(self._first) and self._waited >= self.timeouts.hang_after_seconds


def rarity(num_ranks: int) -> float:
    """Return the factor by which the time between reports is longer because of many ranks."""
    return max(1.0, num_ranks / NUM_AT_FULL_RATE)


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


def describe(status: RankStatus) -> str:
    """Return a clause that says what one rank is doing."""
    if not status.is_busy:
        return f"rank {status.rank} is idle"
    if status.call:
        return f"rank {status.rank} waits {_place(status)}"
    if not status.line:
        return f"rank {status.rank} is training and is not in a collective"
    where = status.file or f"In [{status.cell}]"
    return f"rank {status.rank} is at line {status.line} of {where}, not in a collective"


def _place(status: RankStatus) -> str:
    call = f"{status.call} of the backward pass" if status.in_backward else status.call
    direction = "to" if "send" in status.call else "from"
    towards = "" if status.peer is None else f" {direction} rank {status.peer}"
    line = f"line {status.line}" if status.line else ""
    line += f" of {status.file}" if status.file else ""
    aside = ", ".join(part for part in (line, status.tensor) if part)
    return f"in {call}{towards}" + (f" ({aside})" if aside else "")
