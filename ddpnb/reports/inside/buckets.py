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
from ddpnb.reports.formatting import counted, in_units, listed, size
from ddpnb.reports.inside.timeline import bounds, draw_timeline
from ddpnb.reports.kit import Picture, Shown
from ddpnb.reports.table import Column, Table, table_row

MAX_BUCKETS, MAX_NAMES = 4, 3
"""Buckets in a row of the table, and parameters that are named in a sentence."""
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
        title = f"One step of {self.title} with bucket_cap_mb={cap_mb:g}"
        notes = [f"The median of {counted(len(steps), 'step')}.  {QUEUED}"]
        spans = one_by_one(steps[len(steps) // 2])
        return Picture(draw_timeline(title, spans, len(self.reports), notes), title)

    def table(self) -> Table:
        """Return a row for each value of ``bucket_cap_mb``: what hides, and the buckets."""
        rows = []
        for index, cap in enumerate(self.caps):
            head = f"{cap.cap_mb:g} MB" + (" (its own)" if index == 0 else "")
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
            caption=f"{self.title}: {size(self.gradient_bytes)} of gradients, whose all-reduces "
            "hide behind the backward pass or are exposed",
            columns=(
                Column(title="bucket_cap_mb"),
                *(Column(title=each, is_number=True) for each in (*Split._fields, "buckets")),
                Column(title="bytes, when it is full, first parameter", is_prose=True),
            ),
            rows=tuple(rows),
            notes=(FORMULA, *self.notes()),
        )

    def notes(self) -> list[str]:
        """Return which parameters had no part in the loss, if there are any."""
        if not self.unused:
            return []
        ranks = {rank for ranks in self.unused.values() for rank in ranks}
        names = [*self.unused][:MAX_NAMES]
        rest = len(self.unused) - len(names)
        return [
            f"No part in the loss on {spoken_ranks(sorted(ranks))}: "
            f"{listed([*names, f'{rest} more'] if rest else names)}.  "
            "Plain DDP would raise an error in its second step, so find_unused_parameters=True "
            "was used here; zeros are sent for what is missing."
        ]


def _described(cap: CapReport, bucket: Bucket) -> str:
    """Return a bucket's size, when it is full since the backward pass began, and its first name."""
    full = max((cap.ready_seconds.get(name, 0.0) for name in bucket.names), default=0.0)
    when = f" at {in_units(full)}" if full else ""  # else it has no gradient
    return f"{size(bucket.num_bytes)}{when} ({bucket.names[0]})"


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
