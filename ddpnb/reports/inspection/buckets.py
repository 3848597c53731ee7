"""Shows measured steps of DDP: buckets, hidden and exposed time.  Runs in the kernel."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, final

from ddpnb.protocol.inspection import Bucket, CapReport
from ddpnb.protocol.notation import spoken_ranks
from ddpnb.protocol.trace import Span
from ddpnb.reports.formatting import counted, in_units, listed, size
from ddpnb.reports.inspection.timeline import bounds, draw_timeline
from ddpnb.reports.kit import Picture, Shown
from ddpnb.reports.table import Column, Table, table_row

MAX_BUCKETS, MAX_NAMES = 4, 3
"""Maximum number of buckets in a table row, and maximum number of parameter names in a note."""
FORMULA = (
    "Hidden means that a bucket is sent while this rank computes.  Exposed means that a bucket is "
    "sent while this rank is idle.  An all-reduce begins when this rank's bucket is full.  It ends "
    "when the slowest rank's bucket arrives.  Times are means over ranks and medians over steps."
)
QUEUED = "If a bucket must wait until an earlier bucket is sent, its bar begins after this wait."


class Split(NamedTuple):
    """Durations in seconds: a whole step, its exposed communication, its hidden communication."""

    step: float
    exposed: float
    hidden: float


@final
@dataclass(frozen=True, kw_only=True, repr=False)
class DdpInspection(Shown):
    """The measured steps of one model with DDP, on all ranks."""

    title: str
    unused: Mapping[str, tuple[int, ...]]
    """Maps each parameter that did not contribute to the loss on some ranks to these ranks."""
    reports: tuple[tuple[CapReport, ...], ...]
    """For each rank, one report per value of ``bucket_cap_mb``.  The model's own value is first."""

    @property
    def caps(self) -> tuple[CapReport, ...]:
        """The reports of rank 0, one for each value of ``bucket_cap_mb``."""
        return self.reports[0]

    @property
    def gradient_bytes(self) -> int:
        """Number of bytes of all gradients of one rank."""
        return sum(bucket.num_bytes for bucket in self.caps[0].buckets)

    def steps(self, index: int) -> list[list[Span]]:
        """Return the spans of all ranks in each step.  ``index`` is a position in ``caps``."""
        of_ranks = zip(*(report[index].steps for report in self.reports), strict=True)
        return [[span for own in step for span in own] for step in of_ranks]

    def split(self, index: int = 0) -> Split:
        """Return the median times of a step.  ``index`` is a position in ``caps``."""
        found = [split_of(step, len(self.reports)) for step in self.steps(index)]
        return Split(*map(statistics.median, zip(*found, strict=True)))

    def pictures(self) -> list[Picture]:
        """Return a picture of the median step for each value of ``bucket_cap_mb``."""
        return [self._picture(index, cap.cap_mb) for index, cap in enumerate(self.caps)]

    def _picture(self, index: int, cap_mb: float) -> Picture:
        steps = sorted(self.steps(index), key=_length)
        title = f"One step of {self.title} with bucket_cap_mb={cap_mb:g}"
        notes = [f"This is the median of {counted(len(steps), 'step')}.  {QUEUED}"]
        spans = one_by_one(steps[len(steps) // 2])
        return Picture(draw_timeline(title, spans, len(self.reports), notes), title)

    def table(self) -> Table:
        """Return a table with a row for each value of ``bucket_cap_mb``: its times and buckets."""
        rows = []
        for index, cap in enumerate(self.caps):
            head = f"{cap.cap_mb:g} MB" + (" (the model's)" if index == 0 else "")
            shown = [_described(cap, bucket) for bucket in cap.buckets[:MAX_BUCKETS]]
            rest = len(cap.buckets) - len(shown)
            rows.append(
                table_row(
                    head,
                    *map(in_units, self.split(index)),
                    len(cap.buckets),
                    "; ".join([*shown, f"and {rest} more"] if rest else shown),
                )
            )
        return Table(
            caption=f"{self.title}: {size(self.gradient_bytes)} of gradients, with the hidden and "
            "the exposed time of their all-reduces",
            columns=(
                Column(title="bucket_cap_mb"),
                *(Column(title=each, is_number=True) for each in (*Split._fields, "buckets")),
                Column(title="size, time when full, first parameter", is_prose=True),
            ),
            rows=tuple(rows),
            notes=(FORMULA, *self.notes()),
        )

    def notes(self) -> list[str]:
        """Return a note about parameters that did not contribute to the loss, if there are any."""
        if not self.unused:
            return []
        ranks = {rank for ranks in self.unused.values() for rank in ranks}
        names = [*self.unused][:MAX_NAMES]
        rest = len(self.unused) - len(names)
        return [
            f"These parameters did not contribute to the loss on {spoken_ranks(sorted(ranks))}: "
            f"{listed([*names, f'{rest} more'] if rest else names)}.  DDP would therefore raise an "
            "error in its second step.  ddpnb used find_unused_parameters=True, so DDP sent zeros "
            "instead of the missing gradients."
        ]


def _described(cap: CapReport, bucket: Bucket) -> str:
    """Return a bucket's size, the time when it was full, and its first parameter."""
    full = max((cap.ready_seconds.get(name, 0.0) for name in bucket.names), default=0.0)
    when = f" at {in_units(full)}" if full else ""  # 0 if no gradient was ready
    return f"{size(bucket.num_bytes)}{when} ({bucket.names[0]})"


def split_of(spans: Sequence[Span], num_ranks: int) -> Split:
    """Return the times of one step.  The communication times are averaged over the ranks."""
    exposed = hidden = 0.0
    for rank in range(num_ranks):
        own = [span for span in spans if span.rank == rank and span.lane != "wait"]
        sent = _covered([span for span in own if span.lane == "communication"])
        busy = _covered([span for span in own if span.lane == "compute"])
        exposed += _covered(own) - busy
        hidden += sent + busy - _covered(own)
    return Split(_length(spans), exposed / num_ranks, hidden / num_ranks)


def _covered(spans: Sequence[Span]) -> float:
    """Return the total seconds during which at least one of the spans is active."""
    covered, until = 0.0, -math.inf
    for span in sorted(spans, key=lambda span: span.start):
        covered += max(0.0, span.end - max(span.start, until))
        until = max(until, span.end)
    return covered


def _length(spans: Sequence[Span]) -> float:
    """Return the seconds from the start of the first span to the end of the last span."""
    begin, end = bounds(spans)
    return end - begin


def one_by_one(spans: Sequence[Span]) -> list[Span]:
    """Return a step's spans, changed so that each bucket begins after its rank's previous bucket.

    If a bucket ends before its rank's previous bucket, the span is not changed.
    """
    found, ends = [], dict[int, float]()
    for span in sorted(spans, key=lambda span: span.start):
        if span.lane == "communication":
            ahead = ends.get(span.rank, span.start)
            ends[span.rank] = max(ahead, span.end)
            span = replace(span, start=max(span.start, ahead)) if span.end > ahead else span
        found.append(span)
    return found
