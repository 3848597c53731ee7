"""What happens in a step of DDP: its buckets, and what of their all-reduces hides (kernel).

Pure functions of what the ranks have measured.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, final

from ddpnb.protocol.inspection import CapReport, ParameterSize
from ddpnb.protocol.notation import spoken_ranks
from ddpnb.protocol.trace import Span, Trace
from ddpnb.reports.formatting import NOTHING, counted, listed, percent, size
from ddpnb.reports.inside.spans import in_units, timeline_text
from ddpnb.reports.inside.timeline import draw_timeline
from ddpnb.reports.kit import Picture, Shown
from ddpnb.reports.table import Column, Table, columns, table_row

NEARLY_ALL = 0.8
"""Say so of a bucket that holds at least this share of all gradients."""
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
    parameters: tuple[ParameterSize, ...]
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
        return sum(each.num_bytes for each in self.parameters)

    def trace(self, index: int = 0) -> Trace:
        """Return the median step with one of the values of ``bucket_cap_mb``."""
        steps = [_spans(self.reports, index, k) for k in range(len(self.caps[index].steps))]
        by_length = sorted(steps, key=_length)
        cap = self.caps[index].cap_mb
        over = f", on {self.devices}" if self.devices else ""
        return Trace(
            title=f"One step of {self.title} with bucket_cap_mb={cap:g}{over}",
            num_ranks=len(self.reports),
            spans=one_by_one(by_length[len(by_length) // 2]),
            notes=(f"The median of {counted(len(steps), 'step')}.  {QUEUED}",),
        )

    def split(self, index: int = 0) -> Split:
        """Return how long a step takes, and how much of its communication is exposed."""
        steps = range(len(self.caps[index].steps))
        found = [split_of(_spans(self.reports, index, k), len(self.reports)) for k in steps]
        return Split(*(statistics.median(values) for values in zip(*found, strict=True)))

    def tables(self) -> tuple[Table, ...]:
        """Return a row for each value of ``bucket_cap_mb``; then one for each bucket."""
        return self._caps_table(), self._buckets_table()

    def _caps_table(self) -> Table:
        rows = []
        for index, cap in enumerate(self.caps):
            split = self.split(index)
            largest = max((bucket.num_bytes for bucket in cap.buckets), default=0)
            rows.append(
                table_row(
                    f"{cap.cap_mb:g} MB" + (" (its own)" if index == 0 else ""),
                    len(cap.buckets),
                    size(largest),
                    in_units(split.step),
                    in_units(split.exposed),
                    in_units(split.hidden),
                )
            )
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
            ready = [own.ready_seconds[name] for name in bucket.names if name in own.ready_seconds]
            names = [
                f"{name} (no gradient)" if name in self.unused else name for name in bucket.names
            ]
            rows.append(
                table_row(
                    f"bucket {number}",
                    size(bucket.num_bytes),
                    percent(bucket.num_bytes / max(self.gradient_bytes, 1)),
                    in_units(max(ready)) if ready else NOTHING,
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
        about = [_about_largest(self.caps[0], self.gradient_bytes)]
        if self.unused:
            about.append(_about_unused(self.unused, len(self.reports)))
        if self.devices:
            about.append(f"On {self.devices} time is computed; the gradients are real.")
        return about

    def pictures(self) -> list[Picture]:
        """Return a step with each value of ``bucket_cap_mb``."""
        steps = [self.trace(index) for index in range(len(self.caps))]
        return [Picture(draw_timeline(step), step.title) for step in steps]

    def text(self) -> str:
        """Return the step with the model's own buckets in words, and the tables."""
        return "\n\n".join([timeline_text(self.trace()), *(t.text() for t in self.tables())])


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


# -- in words ------------------------------------------------------------------------------


def _about_largest(cap: CapReport, total: int) -> str:
    """Return what it means that a bucket holds nearly everything, or that none does."""
    sizes = [bucket.num_bytes for bucket in cap.buckets]
    if len(sizes) == 1:
        return (
            "All gradients share one bucket, so none is sent before the last is there: a smaller "
            "bucket_cap_mb makes more buckets."
        )
    share, last = max(sizes) / max(total, 1), len(sizes) - 1
    number = sizes.index(max(sizes))
    if share < NEARLY_ALL:
        return (
            f"{counted(len(sizes), 'bucket')}; the largest, {number}, has {percent(share)} of the "
            f"bytes.  The last one, {last}, is full when the backward pass ends: it is exposed."
        )
    names = max(cap.buckets, key=lambda bucket: bucket.num_bytes).names
    when = max(names, key=lambda name: cap.ready_seconds.get(name, 0.0))
    seconds, end = cap.ready_seconds.get(when, 0.0), max(cap.ready_seconds.values(), default=0.0)
    left = f"the last {percent(1 - seconds / end)} of the backward pass is" if end > 0 else "little"
    after = "nothing is" if number == last else left
    return (
        f"Bucket {number} holds {percent(share)} of the bytes, nearly everything: it is full once "
        f"{when} has its gradient, and {after} left to hide it."
    )


def _about_unused(unused: Mapping[str, tuple[int, ...]], num_ranks: int) -> str:
    everywhere = all(len(ranks) == num_ranks for ranks in unused.values())
    some = sorted({rank for ranks in unused.values() for rank in ranks})
    where = "" if everywhere else f" on {spoken_ranks(some)}"
    verb = "has" if len(unused) == 1 else "have"
    return (
        f"{_first(list(unused))} {verb} no part in the loss{where}: plain DDP would raise an error "
        "in its second step.  So find_unused_parameters=True was used here, and zeros are sent in "
        "place of a missing gradient."
    )


def _first(names: Sequence[str]) -> str:
    """Return the first few of some names."""
    if len(names) <= MAX_NAMES:
        return listed(names)
    return f"{', '.join(names[:MAX_NAMES])} and {len(names) - MAX_NAMES} more"


# -- spans ---------------------------------------------------------------------------------


def _spans(reports: Sequence[Sequence[CapReport]], index: int, step: int) -> tuple[Span, ...]:
    return tuple(span for report in reports for span in report[index].steps[step])


def _length(spans: Sequence[Span]) -> float:
    """Return from the first rank's begin to the last one's end."""
    return max(span.end for span in spans) - min(span.start for span in spans)


def one_by_one(spans: Sequence[Span]) -> tuple[Span, ...]:
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
    return tuple(found)
