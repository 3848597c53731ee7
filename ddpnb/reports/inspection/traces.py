"""The trace of a cell, shown as a picture, a text and a file for Perfetto.  Runs in the kernel."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, final

from ddpnb.protocol.notation import format_ranks
from ddpnb.protocol.trace import RankSpans, Span
from ddpnb.reports.formatting import counted, in_units, size
from ddpnb.reports.inspection.timeline import bounds, draw_timeline, last_arrivals
from ddpnb.reports.kit import Picture, Shown

MAX_CALLS = 40
"""Maximum number of spans that the text lists."""
BARS = "A bar lasts from a call until its exchange is complete.  Between bars, the rank computes."
SEVERAL_CLOCKS = (
    "The timelines of different hosts are aligned by their system clocks, so they may be off by a "
    "few milliseconds."
)
ON_GPU = "NCCL's bars end when the call is queued on the GPU, before the exchange is complete."
NO_CALLS = (
    "No rank used a collective, send or recv in this cell, so there is nothing to draw.  In a cell "
    "with %%ddp --trace, call for example dist.all_reduce, or train with DDP."
)


@final
@dataclass(frozen=True, kw_only=True, repr=False)
class TraceResult(Shown):
    """The trace of one cell.  It is shown as a picture and as text."""

    endings: ClassVar = {".json": "open it at ui.perfetto.dev or chrome://tracing", **Shown.endings}

    title: str
    num_ranks: int
    spans: Sequence[Span]
    notes: tuple[str, ...] = ()
    """Sentences that are shown below the picture."""

    def pictures(self) -> list[Picture]:
        """Return a list that contains the timeline, or an empty list if there are no spans."""
        if not self.spans:
            return []
        figure = draw_timeline(self.title, self.spans, self.num_ranks, self.notes)
        return [Picture(figure, self.title)]

    def text(self) -> str:
        """Return one line for each of the first 40 calls: start, name, duration, bytes, group."""
        if not self.spans:
            return NO_CALLS
        begin, end = bounds(self.spans)
        duration = f"{in_units(end - begin)} from the first call's start to the last call's end"
        lines = [f"{self.title}: {duration}", *self.notes]
        calls = sorted(
            zip(self.spans, last_arrivals(self.spans), strict=True),
            key=lambda call: (call[0].start, call[0].rank),
        )
        for span, until in calls[:MAX_CALLS]:
            lines.append(f"  {in_units(span.start - begin):>8}  {_described(span, until)}")
        if len(calls) > MAX_CALLS:
            lines.append(f"  and {len(calls) - MAX_CALLS:,} more calls")
        return "\n".join(lines)

    def content(self, ending: str) -> bytes:
        """Return a file's content.  A ``.json`` file has Chrome's trace format, for Perfetto."""
        if ending == ".json":
            return json.dumps(chrome_trace(self)).encode()
        return super().content(ending)


def _described(span: Span, until: float) -> str:
    parts = [f"rank {span.rank} {span.name}", in_units(span.seconds)]
    if until > span.start:
        parts.append(f"{in_units(until - span.start)} of it waiting for the last rank")
    if span.num_bytes is not None:
        parts.append(size(span.num_bytes))
    if len(span.group) > 1:
        parts.append(f"ranks {format_ranks(span.group)}")
    return ", ".join([*parts, span.line] if span.line else parts)


def join_traces(
    title: str,
    recorded: Sequence[RankSpans],
    *,
    hosts: Sequence[str],
    ranks: Sequence[int] = (),
    backend: str = "gloo",
) -> TraceResult:
    """Join the recorded spans of several ranks into one trace.

    Args:
        title: the title above the picture.
        recorded: the spans that each rank recorded and sent.
        hosts: the host of each rank of the cluster.
        ranks: the ranks that ran the cell.  If empty, all ranks ran the cell.
        backend: the backend of the default group.
    """
    are_several = len(set(hosts)) > 1
    spans = []
    for each in recorded:
        late = each.clock_at - recorded[0].clock_at if are_several else 0.0
        spans += [replace(s, start=s.start + late, end=s.end + late) for s in each.spans]
    notes = [BARS]
    if are_several:
        notes.append(SEVERAL_CLOCKS)
    missing = sorted(set(ranks or range(len(hosts))) - {each.rank for each in recorded})
    if missing:
        notes.append(f"Rank {format_ranks(missing)} sent no records, so its calls are missing.")
    if num_dropped := sum(each.num_dropped for each in recorded):
        notes.append(f"{num_dropped:,} calls are missing: only each rank's first calls are kept.")
    if num_open := sum(each.num_open for each in recorded):
        notes.append(f"{counted(num_open, 'call')} had not ended when the cell ended.")
    if backend == "nccl":
        notes.append(ON_GPU)
    return TraceResult(title=title, num_ranks=len(hosts), spans=spans, notes=tuple(notes))


# -- the file for Perfetto -----------------------------------------------------------------


def chrome_trace(trace: TraceResult) -> dict[str, Any]:
    """Return a trace in Chrome's trace event format, which torch's profiler also writes.

    A rank is shown as a process with one thread, or with several threads if its spans overlap.
    If torch's profiler has a name for a span's argument, the trace uses this name.  If a call waits
    for the last rank, its span contains another span for the waiting time.
    """
    begin, _ = bounds(trace.spans)
    events: list[dict[str, Any]] = []

    def add(kind: str, name: str, rank: int, thread: int, **more: Any) -> None:
        events.append({"ph": kind, "name": name, "pid": rank + 1, "tid": thread, **more})

    ends: list[list[float]] = [[] for _ in range(trace.num_ranks)]
    calls = zip(trace.spans, last_arrivals(trace.spans), strict=True)
    for span, until in sorted(calls, key=lambda call: call[0].start):
        taken = ends[span.rank]
        thread = next((n for n, end in enumerate(taken) if end <= span.start), len(taken))
        taken[thread : thread + 1] = [span.end]
        args: dict[str, Any] = {"bytes": span.num_bytes or 0, "line": span.line}
        args |= {"Collective name": span.name, "Process Group Ranks": list(span.group)}
        place, at = (span.rank, thread), _micro(span.start - begin)
        add("X", span.name, *place, ts=at, dur=_micro(span.seconds), cat=span.lane, args=args)
        if until > span.start:
            waited = _micro(until - span.start)
            add("X", "waits for the last rank", *place, ts=at, dur=waited, cat="wait", args={})
    for rank, threads in enumerate(ends):
        add("M", "process_name", rank, 0, args={"name": f"rank {rank}"})
        for thread in range(len(threads)):
            add("M", "thread_name", rank, thread, args={"name": "communication"})
    return {
        "schemaVersion": 1,
        "traceName": trace.title,
        "displayTimeUnit": "ms",
        "notes": list(trace.notes),
        "traceEvents": events,
    }


def _micro(seconds: float) -> float:
    return round(seconds * 1e6, 3)
