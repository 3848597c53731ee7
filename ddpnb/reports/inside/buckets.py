"""Steps of DDP: the buckets, and the hidden and exposed parts of their all-reduces (kernel)."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, final

from ddpnb.protocol.inspection import Bucket, CapReport
from ddpnb.protocol.notation import spoken_ranks
from ddpnb.protocol.trace import Span
from ddpnb.reports.formatting import counted, in_units, listed, size
from ddpnb.reports.inside.timeline import bounds, draw_timeline
from ddpnb.reports.kit import Picture, Shown
from ddpnb.reports.table import Column, Table, table_row

MAX_BUCKETS, MAX_NAMES = 4, 3
"""The most buckets in a row of the table, and the most parameters named in a sentence."""
FORMULA = (
    "Hidden: a bucket is sent while this rank computes.  Exposed: a bucket is sent while this "
    "rank is idle.  An all-reduce lasts from the moment that this rank's bucket is full until the "
    "slowest rank's bucket arrives.  Times are means over ranks and medians over steps."
)
QUEUED = "If a bucket is full before earlier buckets are sent, its bar begins at their end."


class Split(NamedTuple):
    """Seconds of a step, of its exposed communication, and of its hidden communication."""

    step: float
    exposed: float
    hidden: float


@final
@dataclass(frozen=True, kw_only=True, repr=False)
class DdpInspection(Shown):
    """The steps of one model with DDP, on every rank."""

    title: str
    unused: Mapping[str, tuple[int, ...]]
    """Parameters that did not contribute to the loss, and the ranks where this happened."""
    reports: tuple[tuple[CapReport, ...], ...]
    """Each rank's report for each value of ``bucket_cap_mb``.  The model's value is first."""

    @property
    def caps(self) -> tuple[CapReport, ...]:
        """Rank 0's reports."""
        return self.reports[0]

    @property
    def gradient_bytes(self) -> int:
        """The size of all gradients of one rank in bytes."""
        return sum(bucket.num_bytes for bucket in self.caps[0].buckets)

    def steps(self, index: int) -> list[list[Span]]:
        """Return the spans of all ranks in each step, for one value of ``bucket_cap_mb``."""
        of_ranks = zip(*(report[index].steps for report in self.reports), strict=True)
        return [[span for own in step for span in own] for step in of_ranks]

    def split(self, index: int = 0) -> Split:
        """Return the duration of a step, and of its exposed and hidden communication."""
        found = [split_of(step, len(self.reports)) for step in self.steps(index)]
        return Split(*map(statistics.median, zip(*found, strict=True)))

    def pictures(self) -> list[Picture]:
        """Return a picture of the median step for each value of ``bucket_cap_mb``."""
        return [self._picture(index, cap.cap_mb) for index, cap in enumerate(self.caps)]

    def _picture(self, index: int, cap_mb: float) -> Picture:
        steps = sorted(self.steps(index), key=_length)
        title = f"One step of {self.title} with bucket_cap_mb={cap_mb:g}"
        notes = [f"The median of {counted(len(steps), 'step')}.  {QUEUED}"]
        spans = one_by_one(steps[len(steps) // 2])
        return Picture(draw_timeline(title, spans, len(self.reports), notes), title)

    def table(self) -> Table:
        """Return a row for each value of ``bucket_cap_mb``: communication times and buckets."""
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
            caption=f"{self.title}: {size(self.gradient_bytes)} of gradients, with all-reduces "
            "that the backward pass hides or that are exposed",
            columns=(
                Column(title="bucket_cap_mb"),
                *(Column(title=each, is_number=True) for each in (*Split._fields, "buckets")),
                Column(title="bytes, when it is full, first parameter", is_prose=True),
            ),
            rows=tuple(rows),
            notes=(FORMULA, *self.notes()),
        )

    def notes(self) -> list[str]:
        """Return a sentence about parameters that did not contribute to the loss, if any."""
        if not self.unused:
            return []
        ranks = {rank for ranks in self.unused.values() for rank in ranks}
        names = [*self.unused][:MAX_NAMES]
        rest = len(self.unused) - len(names)
        return [
            f"Parameters without a part in the loss on {spoken_ranks(sorted(ranks))}: "
            f"{listed([*names, f'{rest} more'] if rest else names)}.  "
            "Plain DDP would raise an error in its second step.  ddpnb therefore used "
            "find_unused_parameters=True, which sends zeros for missing gradients."
        ]


def _described(cap: CapReport, bucket: Bucket) -> str:
    """Return a bucket's size, when it was full after the backward pass began, and first name."""
    full = max((cap.ready_seconds.get(name, 0.0) for name in bucket.names), default=0.0)
    when = f" at {in_units(full)}" if full else ""  # 0 if no gradient is ready
    return f"{size(bucket.num_bytes)}{when} ({bucket.names[0]})"


def split_of(spans: Sequence[Span], num_ranks: int) -> Split:
    """Return the times of one step as means over the ranks."""
    exposed = hidden = 0.0
    for rank in range(num_ranks):
        own = [span for span in spans if span.rank == rank and span.lane != "wait"]
        sent = _covered([span for span in own if span.lane == "communication"])
        busy = _covered([span for span in own if span.lane == "compute"])
        exposed += _covered(own) - busy
        hidden += sent + busy - _covered(own)
    return Split(_length(spans), exposed / num_ranks, hidden / num_ranks)


def _covered(spans: Sequence[Span]) -> float:
    """Return the seconds that the spans cover together."""
    covered, until = 0.0, -math.inf
    for span in sorted(spans, key=lambda span: span.start):
        covered += max(0.0, span.end - max(span.start, until))
        until = max(until, span.end)
    return covered


def _length(spans: Sequence[Span]) -> float:
    """Return the seconds from the first rank's start to the last rank's end."""
    begin, end = bounds(spans)
    return end - begin


def one_by_one(spans: Sequence[Span]) -> list[Span]:
    """Delay buckets of a step, so that each begins when the rank's previous bucket has ended.

    A bucket that ends before the previous bucket stays as it is.
    """
    found, ends = [], dict[int, float]()
    for span in sorted(spans, key=lambda span: span.start):
        if span.lane == "communication":
            ahead = ends.get(span.rank, span.start)
            ends[span.rank] = max(ahead, span.end)
            span = replace(span, start=max(span.start, ahead)) if span.end > ahead else span
        found.append(span)
    return found
