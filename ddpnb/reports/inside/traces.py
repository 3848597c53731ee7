"""A cell's trace as users hold it: picture, text, file for Perfetto (kernel)."""

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, final

from ddpnb.protocol.notation import format_ranks
from ddpnb.protocol.trace import RankSpans, Span, Trace
from ddpnb.reports.formatting import counted
from ddpnb.reports.inside.spans import (
    bounds,
    in_units,
    last_arrivals,
    meetings,
    timeline_text,
)
from ddpnb.reports.inside.timeline import draw_timeline
from ddpnb.reports.kit import Picture, Shown

CALL_SECONDS = 20e-6
"""What recording costs, about: 5 to 12 microseconds on a rank, 26 until a waiting pair is done."""
CLOCK = (
    "A bar lasts from a rank's call until its exchange is complete, by the clock that all ranks of "
    "this host share; between bars a rank computes."
)
SEVERAL_CLOCKS = (
    "A bar lasts from a rank's call until its exchange is complete; between bars a rank computes.  "
    "The hosts' clocks are compared by the time of day, which may be milliseconds apart."
)
ON_GPU = "NCCL's bars end when a call is queued on the GPU, not when it is done there."
NOTHING = (
    "No rank called a collective, sent or received in this cell, so there is nothing to draw: "
    "call dist.all_reduce, or train with DDP, under %%ddp --trace."
)
ALONE = "There is one rank: its exchanges are with itself, and send nothing."
THREADS_A_LANE = 100
LANES = ("compute", "communication", "wait")


def joined(
    title: str,
    recorded: Sequence[RankSpans],
    *,
    hosts: Sequence[str],
    ranks: Sequence[int] = (),
    backend: str = "gloo",
) -> Trace:
    """Return what several ranks recorded as one trace.

    Args:
        title: above the picture.
        recorded: by the ranks of which it is known.
        hosts: where each rank of the cluster is.
        ranks: those that ran the cell; empty: all.
        backend: of the default group.
    """
    are_several = len(set(hosts)) > 1
    spans = []
    for each in recorded:
        late = each.clock_at - recorded[0].clock_at if are_several else 0.0
        spans += [replace(s, start=s.start + late, end=s.end + late) for s in each.spans]
    notes = [SEVERAL_CLOCKS if are_several else CLOCK]
    missing = sorted(set(ranks or range(len(hosts))) - {each.rank for each in recorded})
    if missing:
        notes.append(f"Nothing is known of rank {format_ranks(missing)}.")
    if num_open := sum(each.num_open for each in recorded):
        notes.append(f"{counted(num_open, 'call')} had not ended when the cell did.")
    if backend == "nccl":
        notes.append(ON_GPU)
    if len(hosts) == 1:
        notes.append(ALONE)
    if spans:
        begin, end = bounds(spans)
        cost = in_units(max(len(each.spans) for each in recorded) * CALL_SECONDS)
        notes.append(
            f"Recording costs about {in_units(CALL_SECONDS)} a call, here {cost} of "
            f"{in_units(end - begin)}."
        )
    return Trace(
        title=title,
        num_ranks=len(hosts),
        spans=spans,
        num_dropped=sum(each.num_dropped for each in recorded),
        notes=tuple(notes),
    )


@final
class TraceResult(Shown):
    """The trace of one cell, which a notebook shows as a picture and as a text."""

    endings = (".json", *Shown.endings)
    """JSON is for Perfetto (ui.perfetto.dev) and chrome://tracing."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace

    def pictures(self) -> list[Picture]:
        """Return the time line, if there is something to draw."""
        if not self.trace.spans:
            return []
        return [Picture(draw_timeline(self.trace), self.trace.title)]

    def text(self) -> str:
        """Return the trace in words."""
        return timeline_text(self.trace) if self.trace.spans else NOTHING

    def content(self, ending: str) -> bytes:
        """Return a file; Perfetto's is a trace in Chrome's format."""
        if ending == ".json":
            return json.dumps(chrome_trace(self.trace)).encode()
        return super().content(ending)


# -- the file for Perfetto -----------------------------------------------------------------


def chrome_trace(trace: Trace) -> dict[str, Any]:
    """Return a trace in Chrome's trace event format, as torch's profiler exports its own.

    Each rank is a process and each lane a thread, or several where its spans overlap.  A span's
    arguments have torch's names where it has one.  The time that a call waits for the last rank is
    a span inside it, and an arrow comes from the rank that was last.
    """
    begin, _ = bounds(trace.spans)
    threads = _threads(trace)
    until = last_arrivals(trace)
    events: list[dict[str, Any]] = []
    for rank in range(trace.num_ranks):
        events.append(_named("process", _pid(rank), 0, f"rank {rank}"))
    named = {
        (span.rank, thread): span.lane for span, thread in zip(trace.spans, threads, strict=True)
    }
    for (rank, thread), lane in sorted(named.items()):
        events.append(_named("thread", _pid(rank), thread, lane))
    for span, thread, last in zip(trace.spans, threads, until, strict=True):
        place = {"pid": _pid(span.rank), "tid": thread, "ts": _micro(span.start - begin)}
        events.append(
            {"ph": "X", "cat": span.lane, "name": span.name, **place}
            | {"dur": _micro(span.seconds), "args": _arguments(span, last)}
        )
        if last > span.start:
            waits = {"name": "waits for the last rank", "dur": _micro(last - span.start)}
            events.append({"ph": "X", "cat": "wait", **waits, **place, "args": {}})
    for number, indices in enumerate(meetings(trace), start=1):
        *early, latest = indices
        flow = {"cat": "arrival", "name": "last rank", "id": number}
        for kind, index in [("s", latest), *(("f", index) for index in early)]:
            span, at = trace.spans[index], trace.spans[latest].start
            place = {"pid": _pid(span.rank), "tid": threads[index]}
            at = min(max(at, span.start), span.end)
            end = {"bp": "e"} if kind == "f" else {}
            events.append({"ph": kind, **flow, **place, "ts": _micro(at - begin), **end})
    return {
        "schemaVersion": 1,
        "traceName": trace.title,
        "displayTimeUnit": "ms",
        "notes": list(trace.notes),
        "numDropped": trace.num_dropped,
        "traceEvents": events,
    }


def _named(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    place = {"ph": "M", "ts": 0, "pid": pid, "tid": tid}
    return {**place, "name": f"{what}_name", "args": {"name": name}}


def _pid(rank: int) -> int:
    """Return a process number: Perfetto takes 0 for the idle process."""
    return rank + 1


def _micro(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def _arguments(span: Span, last: float) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if span.lane == "communication":
        found |= {"Collective name": span.name, "Group size": len(span.group)}
        found["Process Group Ranks"] = list(span.group)
        found["waited for the last rank (us)"] = _micro(last - span.start)
    if span.num_bytes is not None:
        found["bytes"] = span.num_bytes
    if span.line:
        found["line"] = span.line
    return found


def _threads(trace: Trace) -> list[int]:
    """Return the thread of each span: a lane has a hundred, so that none of a thread's overlap."""
    ends: dict[tuple[int, str], list[float]] = defaultdict(list)
    found = [0] * len(trace.spans)
    for index in sorted(range(len(trace.spans)), key=lambda index: trace.spans[index].start):
        span = trace.spans[index]
        taken = ends[span.rank, span.lane]
        slot = next((n for n, end in enumerate(taken) if end <= span.start), len(taken))
        if slot == len(taken):
            taken.append(span.end)
        taken[slot] = span.end
        found[index] = THREADS_A_LANE * LANES.index(span.lane) + slot + 1
    return found
