"""What the spans of a trace say, as numbers and in words (kernel)."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

from ddpnb.protocol.notation import format_ranks
from ddpnb.protocol.trace import Span, Trace
from ddpnb.reports.formatting import counted, number, size

MAX_RANKS = 16
"""Ranks that are drawn; of the others only the number is said."""
MAX_LINES = 40
"""Spans that the text lists."""


def timeline_text(trace: Trace) -> str:
    """Return a trace in words: what each rank did in all, who waited, and the first spans."""
    begin, end = bounds(trace.spans)
    lines = [f"{trace.title}: {in_units(end - begin)} from the first call to the last end"]
    for rank in range(min(trace.num_ranks, MAX_RANKS)):
        lines.append(f"rank {rank}: {_sums_of(trace, rank) or 'nothing'}")
    lines += notes_of(trace)
    shown = sorted(trace.spans, key=lambda span: (span.start, span.rank))
    for span in shown[:MAX_LINES]:
        lines.append(f"  {in_units(span.start - begin):>8}  {_described(span)}")
    if len(shown) > MAX_LINES:
        lines.append(f"  and {len(shown) - MAX_LINES:,} more")
    return "\n".join(lines)


def _sums_of(trace: Trace, rank: int) -> str:
    """Return for each kind of thing that a rank did: how often, how long, how much."""
    found: dict[str, list[tuple[Span, float]]] = defaultdict(list)
    for span, until in zip(trace.spans, last_arrivals(trace), strict=True):
        if span.rank == rank:
            found[kind_of(span)].append((span, until - span.start))
    sums = []
    for kind, each in found.items():
        num_bytes = sum(span.num_bytes or 0 for span, _ in each)
        waited = sum(seconds for _, seconds in each)
        parts = [in_units(sum(span.seconds for span, _ in each))]
        parts += [size(num_bytes)] if num_bytes else []
        parts += [f"{in_units(waited)} of it waiting for the last rank"] if waited > 0 else []
        sums.append(f"{len(each)} {kind} ({', '.join(parts)})")
    return "; ".join(sums)


def _described(span: Span) -> str:
    """Return a span in one line: who, what, how long, how much, which ranks, and where."""
    parts = [f"rank {span.rank} {span.name}", in_units(span.seconds)]
    parts += [size(span.num_bytes)] if span.num_bytes is not None else []
    parts += [f"ranks {format_ranks(span.group)}"] if len(span.group) > 1 else []
    return ", ".join([*parts, span.line] if span.line else parts)


def in_units(seconds: float) -> str:
    """Return a time in the unit that suits it, e.g. ``12.5 ms``."""
    scale, unit = time_unit(seconds)
    return f"{number(seconds * scale)} {unit}"


def meetings(trace: Trace) -> list[list[int]]:
    """Return which spans are one collective, or one message, as indices; the last to come is last.

    The k-th call of one rank in a group meets the k-th call of each other rank there; a ``send``
    meets the receiver's ``recv``.  Calls of which not every rank's is known are left out.
    """
    numbers: Counter[Any] = Counter()
    found: dict[Any, list[int]] = defaultdict(list)
    for index in sorted(range(len(trace.spans)), key=lambda index: trace.spans[index].start):
        span = trace.spans[index]
        if span.lane != "communication" or len(span.group) < 2:
            continue
        kind = "message" if span.name in ("send", "recv") else "collective"
        place = kind, span.group, span.rank
        found[kind, span.group, numbers[place]].append(index)
        numbers[place] += 1
    return [
        indices
        for (kind, group, _), indices in found.items()
        if len(indices) == len(group)
        and (kind == "message" or len({trace.spans[index].name for index in indices}) == 1)
    ]


def last_arrivals(trace: Trace) -> list[float]:
    """Return for each span until when it waited for the last rank to make the same call.

    A span that did not wait, or of which the others' calls are not known, has its own start.
    """
    found = [span.start for span in trace.spans]
    for indices in meetings(trace):
        last = trace.spans[indices[-1]].start
        for index in indices:
            span = trace.spans[index]
            if span.name != "send" and last <= span.end:  # else it has not waited for the last
                found[index] = last
    return found


def notes_of(trace: Trace) -> list[str]:
    """Return the sentences for below the picture: first what it lacks."""
    notes = []
    if trace.num_dropped:
        notes.append(
            f"{trace.num_dropped:,} later calls are missing: a trace holds the first of each rank."
        )
    if (rest := trace.num_ranks - MAX_RANKS) > 0:
        notes.append(f"And {counted(rest, 'more rank')}, not drawn.")
    return [*notes, *trace.notes]


def bounds(spans: Sequence[Span]) -> tuple[float, float]:
    """Return the first start and the last end; a moment apart where nothing takes time."""
    begin = min((span.start for span in spans), default=0.0)
    end = max((span.end for span in spans), default=0.0)
    return begin, end if end > begin else begin + 1e-6


def time_unit(seconds: float) -> tuple[float, str]:
    """Return the factor from seconds to the unit that an axis of this length has, and its name."""
    if seconds >= 10:
        return 1.0, "s"
    return (1e3, "ms") if seconds >= 1e-3 else (1e6, "µs")


def kind_of(span: Span) -> str:
    """Return a span's name in the legend: ``"bucket"`` for all buckets."""
    return "bucket" if span.name.startswith("bucket") else span.name
