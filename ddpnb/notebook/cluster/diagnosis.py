"""Why does a cell not end?  In words that a student understands.  (Notebook side.)"""

from collections.abc import Collection, Mapping, Sequence

from ddpnb.notebook.ranks import format_ranks, spoken_ranks
from ddpnb.wire import Whereabouts

IDLE_SHARE = 0.2
"""Processor time per second below which a rank that waits sends and receives nothing either."""


def is_stuck(before: Sequence[Whereabouts], now: Sequence[Whereabouts], seconds: float) -> bool:
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


def is_same_wait(before: Whereabouts | None, now: Whereabouts, seconds: float) -> bool:
    """Tell whether a rank stands where it stood, and has done nothing in between."""
    if before is None or (before.call, before.line) != (now.call, now.line):
        return False
    is_idle = now.cpu_seconds - before.cpu_seconds < IDLE_SHARE * seconds
    return before.num_collectives == now.num_collectives and is_idle


def diagnose(
    stuck: Sequence[Whereabouts], finished: Mapping[int, int], idle: Collection[int] = ()
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


def describe(where: Whereabouts) -> str:
    """Say where one rank stands."""
    if not where.is_busy:
        return f"rank {where.rank} is idle"
    if where.call:
        return f"{_who([where.rank])} {_where(where)}"
    if not where.line:
        return f"rank {where.rank} trains, and is in no collective"
    return f"rank {where.rank} is at line {where.line} of In [{where.cell}], in no collective"


def _by_place(stuck: Sequence[Whereabouts]) -> list[tuple[Whereabouts, list[int]]]:
    """Group ranks that wait in the same call, at the same line, with the same tensor."""
    places: dict[tuple[object, ...], list[Whereabouts]] = {}
    for where in stuck:
        key = (where.call, where.line, where.tensor, where.in_backward, where.peer)
        places.setdefault(key, []).append(where)
    return [(group[0], [where.rank for where in group]) for group in places.values()]


def _who(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]} waits"
    return f"ranks {format_ranks(ranks)} wait"


def _where(where: Whereabouts) -> str:
    call = f"{where.call} of DDP's backward" if where.in_backward else where.call
    towards = "" if where.peer is None else f" {_direction(where)} rank {where.peer}"
    line = f"line {where.line}" if where.line else ""
    aside = ", ".join(part for part in (line, where.tensor) if part)
    return f"in {call}{towards}" + (f" ({aside})" if aside else "")


def _direction(where: Whereabouts) -> str:
    return "to" if "send" in where.call else "from"


def _point_to_point(stuck: Sequence[Whereabouts], finished: Collection[int]) -> list[str]:
    """Say which peers do not do their part."""
    reasons = []
    for where in stuck:
        if where.peer is not None:
            part = "receiving" if "send" in where.call else "sending"
            how = "has finished the cell without" if where.peer in finished else "is not"
            reasons.append(f"rank {where.peer} {how} {part}")
    return list(dict.fromkeys(reasons))


def _others(
    stuck: Sequence[Whereabouts], finished: Mapping[int, int], idle: Collection[int]
) -> list[str]:
    """Say what the ranks that they wait for have done instead."""
    reasons = []
    if finished:
        reasons.append(f"{spoken_ranks(finished)} {_finished_how(stuck, finished)}")
    if idle:
        do = "does" if len(idle) == 1 else "do"
        reasons.append(f"{spoken_ranks(idle)} {do} not run this cell")
    return reasons


def _finished_how(stuck: Sequence[Whereabouts], finished: Mapping[int, int]) -> str:
    """Say how many calls the finished ranks lack, where that is known."""
    if any(where.in_backward for where in stuck):
        return "finished the cell with fewer batches"
    lacking = {where.num_collectives - num for where in stuck for num in finished.values()}
    if len(lacking) == 1 and (num := lacking.pop()) > 1:
        return f"finished the cell with {num} calls fewer"
    return "finished the cell without calling it"
