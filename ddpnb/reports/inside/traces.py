"""A cell's trace as users hold it: picture, text, file for Perfetto (kernel)."""

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, final

from ddpnb.protocol.notation import format_ranks
from ddpnb.protocol.trace import RankSpans, Trace
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
@dataclass(frozen=True, repr=False)
class TraceResult(Shown):
    """The trace of one cell, which a notebook shows as a picture and as a text."""

    endings: ClassVar = {".json": "open it at ui.perfetto.dev or chrome://tracing", **Shown.endings}

    trace: Trace

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
    events: list[dict[str, Any]] = []

    def add(kind: str, name: str, rank: int, thread: int, start: float, **more: Any) -> None:
        place = {"pid": rank + 1, "tid": thread, "ts": _micro(start - begin)}  # 0 is Perfetto's own
        events.append({"ph": kind, "name": name, **place, **more})

    for rank in range(trace.num_ranks):
        add("M", "process_name", rank, 0, begin, args={"name": f"rank {rank}"})
    lanes = {(span.rank, each): span.lane for span, each in zip(trace.spans, threads, strict=True)}
    for (rank, thread), lane in sorted(lanes.items()):
        add("M", "thread_name", rank, thread, begin, args={"name": lane})
    for span, thread, last in zip(trace.spans, threads, last_arrivals(trace), strict=True):
        args: dict[str, Any] = {"bytes": span.num_bytes, "line": span.line}
        if span.lane == "communication":
            args |= {"Collective name": span.name, "Group size": len(span.group)}
            args["Process Group Ranks"] = list(span.group)
            args["waited for the last rank (us)"] = _micro(last - span.start)
        args = {name: value for name, value in args.items() if value not in (None, "")}
        place, length = (span.rank, thread, span.start), _micro(span.seconds)
        add("X", span.name, *place, cat=span.lane, dur=length, args=args)
        if last > span.start:
            length = _micro(last - span.start)
            add("X", "waits for the last rank", *place, cat="wait", dur=length, args={})
    for number, (*early, latest) in enumerate(meetings(trace), start=1):
        flow, at = {"cat": "arrival", "id": number}, trace.spans[latest].start
        add("s", "last rank", trace.spans[latest].rank, threads[latest], at, **flow)
        for index in early:
            span = trace.spans[index]
            start = min(max(at, span.start), span.end)
            add("f", "last rank", span.rank, threads[index], start, bp="e", **flow)
    return {
        "schemaVersion": 1,
        "traceName": trace.title,
        "displayTimeUnit": "ms",
        "notes": list(trace.notes),
        "numDropped": trace.num_dropped,
        "traceEvents": events,
    }


def _micro(seconds: float) -> float:
    return round(seconds * 1e6, 3)


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
