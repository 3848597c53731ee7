"""What the spans of a trace say, as numbers (kernel)."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

from ddpnb.protocol.trace import Span
from ddpnb.reports.formatting import number

MAX_RANKS = 16
"""Ranks that are drawn; of the others only the number is said."""


def last_arrivals(spans: Sequence[Span]) -> list[float]:
    """Return for each span until when it waited for the last rank to make the same call.

    The k-th call of one rank in a group meets the k-th call of each other rank there; a ``send``
    meets the receiver's ``recv``.  A span that did not wait, or of which the others' calls are not
    known, has its own start.
    """
    found = [span.start for span in spans]
    numbers: Counter[Any] = Counter()
    meetings: dict[Any, list[int]] = defaultdict(list)
    for index in sorted(range(len(spans)), key=found.__getitem__):
        span = spans[index]
        if span.lane == "communication" and len(span.group) > 1:
            place = span.group, span.name in ("send", "recv")
            meetings[place, numbers[place, span.rank]].append(index)
            numbers[place, span.rank] += 1
    for ((group, is_message), _), indices in meetings.items():
        names = {spans[index].name for index in indices}
        if len(indices) < len(group) or (len(names) > 1 and not is_message):
            continue
        last = spans[indices[-1]].start
        for index in indices:
            span = spans[index]
            if span.name != "send" and last <= span.end:  # else it has not waited for the last
                found[index] = last
    return found


def bounds(spans: Sequence[Span]) -> tuple[float, float]:
    """Return the first start and the last end; a moment apart where nothing takes time."""
    begin = min((span.start for span in spans), default=0.0)
    end = max((span.end for span in spans), default=0.0)
    return begin, end if end > begin else begin + 1e-6


def in_units(seconds: float) -> str:
    """Return a time in the unit that suits it, e.g. ``12.5 ms``."""
    scale, unit = time_unit(seconds)
    return f"{number(seconds * scale)} {unit}"


def time_unit(seconds: float) -> tuple[float, str]:
    """Return the factor from seconds to the unit that an axis of this length has, and its name."""
    if seconds >= 10:
        return 1.0, "s"
    return (1e3, "ms") if seconds >= 1e-3 else (1e6, "µs")
