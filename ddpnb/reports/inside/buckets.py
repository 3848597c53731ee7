"""What happens in a step of DDP: its buckets, and what of their all-reduces hides (kernel).

Pure functions of what the ranks have measured.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, final

from ddpnb.protocol.inspection import Bucket, CapReport
from ddpnb.protocol.notation import spoken_ranks
from ddpnb.protocol.trace import Span
from ddpnb.reports.formatting import NOTHING, counted, listed, percent, size
from ddpnb.reports.inside.spans import bounds, in_units
from ddpnb.reports.inside.timeline import draw_timeline
from ddpnb.reports.kit import Picture, Shown
from ddpnb.reports.table import Column, Table, columns, table_row

MAX_ROWS, MAX_NAMES = 12, 3
"""Buckets in the table, and parameters that are named in a row or a sentence."""
FORMULA = (
    "Hidden: a bucket is on its way while this rank computes.  Exposed: one is, and this rank is "
    "idle.  An all-reduce lasts from when this rank's bucket is full until the slowest rank's has "
    "come.  Means over ranks, medians over steps."
)
QUEUED = "A bucket that is full while earlier ones are still sent is drawn from their end on."


class Split(NamedTuple):
    """The seconds of a step in which gradients are on their way."""

    step: float
    exposed: float
    hidden: float


@final
@dataclass(frozen=True, kw_only=True, repr=False)
class DdpInspection(Shown):
    """The steps of one model through DDP, on every rank; drawn from these numbers alone."""

    title: str
    unused: Mapping[str, tuple[int, ...]]
    """Parameters that had no part in the loss, and on which ranks."""
    reports: tuple[tuple[CapReport, ...], ...]
    """Of each rank, on each value of ``bucket_cap_mb``: the model's own first."""
    devices: str = ""

    @property
    def caps(self) -> tuple[CapReport, ...]:
        """Rank 0's reports."""
        return self.reports[0]

    @property
    def gradient_bytes(self) -> int:
        """Bytes of all gradients of one rank."""
        return sum(bucket.num_bytes for bucket in self.caps[0].buckets)

    def steps(self, index: int) -> list[list[Span]]:
        """Return what all ranks did in each step with one of the values of ``bucket_cap_mb``."""
        of_ranks = zip(*(report[index].steps for report in self.reports), strict=True)
        return [[span for own in step for span in own] for step in of_ranks]

    def split(self, index: int = 0) -> Split:
        """Return how long a step takes, and how much of its communication is exposed."""
        found = [split_of(step, len(self.reports)) for step in self.steps(index)]
        return Split(*map(statistics.median, zip(*found, strict=True)))

    def pictures(self) -> list[Picture]:
        """Return the median step with each value of ``bucket_cap_mb``."""
        return [self._picture(index, cap.cap_mb) for index, cap in enumerate(self.caps)]

    def _picture(self, index: int, cap_mb: float) -> Picture:
        steps = sorted(self.steps(index), key=_length)
        over = f", on {self.devices}" if self.devices else ""
        title = f"One step of {self.title} with bucket_cap_mb={cap_mb:g}{over}"
        notes = [f"The median of {counted(len(steps), 'step')}.  {QUEUED}"]
        spans = one_by_one(steps[len(steps) // 2])
        return Picture(draw_timeline(title, spans, len(self.reports), notes), title)

    def tables(self) -> tuple[Table, ...]:
        """Return a row for each value of ``bucket_cap_mb``; then one for each bucket."""
        return self._caps_table(), self._buckets_table()

    def _caps_table(self) -> Table:
        rows = []
        for index, cap in enumerate(self.caps):
            head = f"{cap.cap_mb:g} MB" + (" (its own)" if index == 0 else "")
            largest = size(max(bucket.num_bytes for bucket in cap.buckets))
            seconds = map(in_units, self.split(index))
            rows.append(table_row(head, len(cap.buckets), largest, *seconds))
        return Table(
            caption=f"{self.title}: all-reduces hidden behind the backward pass",
            columns=columns("bucket_cap_mb", "buckets", "largest", "step", "exposed", "hidden"),
            rows=tuple(rows),
            notes=(FORMULA,),
        )

    def _buckets_table(self) -> Table:
        own = self.caps[0]
        rows = []
        for number, bucket in enumerate(own.buckets[:MAX_ROWS]):
            full = _full_seconds(own, bucket)
            names = [
                f"{name} (no gradient)" if name in self.unused else name for name in bucket.names
            ]
            rows.append(
                table_row(
                    f"bucket {number}",
                    size(bucket.num_bytes),
                    percent(bucket.num_bytes / self.gradient_bytes),
                    in_units(full) if full else NOTHING,
                    _first(names),
                )
            )
        rest = len(own.buckets) - MAX_ROWS
        return Table(
            caption=f"{self.title}: {size(self.gradient_bytes)} of gradients in "
            f"{counted(len(own.buckets), 'bucket')}, as they are sent, and when "
            "each is full in the backward pass",
            columns=(
                *columns("", "bytes", "of all", "full"),
                Column(title="parameters", is_prose=True),
            ),
            rows=tuple(rows),
            notes=(*([f"And {counted(rest, 'more bucket')}."] if rest > 0 else []), *self.words()),
        )

    def words(self) -> list[str]:
        """Return what the buckets show: which one matters, and which parameters had no part."""
        said = [_about_largest(self.caps[0])]
        if self.unused:
            ranks = {rank for ranks in self.unused.values() for rank in ranks}
            said.append(
                f"No part in the loss on {spoken_ranks(sorted(ranks))}: "
                f"{_first(list(self.unused))}.  Plain DDP would raise an error in its second step, "
                "so find_unused_parameters=True was used here; zeros are sent for what is missing."
            )
        if self.devices:
            said.append(f"On {self.devices} time is computed; the gradients are real.")
        return said

    def text(self) -> str:
        """Return the tables."""
        return "\n\n".join(table.text() for table in self.tables())


def split_of(spans: Sequence[Span], num_ranks: int) -> Split:
    """Return the times of one step, as means over the ranks."""
    exposed = hidden = 0.0
    for rank in range(num_ranks):
        own = [span for span in spans if span.rank == rank and span.lane != "wait"]
        sent = _covered([span for span in own if span.lane == "communication"])
        busy = _covered([span for span in own if span.lane == "compute"])
        exposed += _covered(own) - busy
        hidden += sent + busy - _covered(own)
    return Split(_length(spans), exposed / num_ranks, hidden / num_ranks)


def _covered(spans: Sequence[Span]) -> float:
    """Return the seconds in which there is any of the spans."""
    covered, until = 0.0, -math.inf
    for span in sorted(spans, key=lambda span: span.start):
        covered += max(0.0, span.end - max(span.start, until))
        until = max(until, span.end)
    return covered


def _length(spans: Sequence[Span]) -> float:
    """Return from the first rank's begin to the last one's end."""
    begin, end = bounds(spans)
    return end - begin


def one_by_one(spans: Sequence[Span]) -> list[Span]:
    """Return a step in which no bucket of a rank begins before the one ahead of it has ended.

    One that overtakes another stays as it is.
    """
    found, ends = [], dict[int, float]()
    for span in sorted(spans, key=lambda span: span.start):
        if span.lane == "communication":
            ahead = ends.get(span.rank, span.start)
            ends[span.rank] = max(ahead, span.end)
            span = replace(span, start=max(span.start, ahead)) if span.end > ahead else span
        found.append(span)
    return found


def _full_seconds(cap: CapReport, bucket: Bucket) -> float:
    """Return when a bucket is full, since the backward pass began; 0: it has no gradient."""
    return max((cap.ready_seconds.get(name, 0.0) for name in bucket.names), default=0.0)


def _about_largest(cap: CapReport) -> str:
    """Return how much the largest bucket holds, and when it is full."""
    if len(cap.buckets) == 1:
        return (
            "All gradients share one bucket, so none is sent before the last is there: a smaller "
            "bucket_cap_mb makes more buckets."
        )
    number, largest = max(enumerate(cap.buckets), key=lambda each: each[1].num_bytes)
    share = largest.num_bytes / sum(bucket.num_bytes for bucket in cap.buckets)
    end = max(cap.ready_seconds.values())
    return (
        f"The largest bucket, {number}, holds {percent(share)} of the bytes and is full after "
        f"{percent(_full_seconds(cap, largest) / end)} of the backward pass.  The last one, "
        f"{len(cap.buckets) - 1}, is full at its end, so it is exposed."
    )


def _first(names: Sequence[str]) -> str:
    """Return the first few of some names."""
    if len(names) <= MAX_NAMES:
        return listed(names)
    return f"{', '.join(names[:MAX_NAMES])} and {len(names) - MAX_NAMES} more"
