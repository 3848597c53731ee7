"""What happens in a step of DDP: its buckets, and what of their all-reduces hides (kernel).

Pure functions of what the ranks have measured.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, final

from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle

from ddpnb.protocol.inspection import (
    Bucket,
    CapReport,
    DdpReport,
    ParameterSize,
)
from ddpnb.protocol.notation import spoken_ranks
from ddpnb.protocol.trace import Span, Trace
from ddpnb.reports.formatting import counted, listed, percent, size
from ddpnb.reports.inside.spans import in_units, timeline_text
from ddpnb.reports.inside.timeline import WIDTH, Shades, draw_timeline, shades, sheet, wrapped
from ddpnb.reports.style import PART_COLOURS, SMALL_POINTS
from ddpnb.reports.table import Column, Table, table_row

NEARLY_ALL = 0.8
"""The share of all gradients from which on one bucket is pointed out."""
MAX_BOXES, MAX_LINES = 5, 9
"""Buckets that are drawn with their parameters, and parameters that are named in each."""
MAX_NAMES = 3
LINE, HEAD, GAP = 0.235, 0.62, 0.16
"""Inches: a parameter's line, a box's head, between two boxes."""
STRIP = 0.42
"""Inches from one strip to the next."""
CHARACTERS_PER_INCH = 11.5
FORMULA = (
    "Hidden: time in which a bucket is on its way while this rank computes; exposed: the rest of "
    "the time in which one is.  An all-reduce begins when this rank's bucket is full and lasts "
    "until the slowest rank's has come.  Means over ranks, medians over steps."
)
QUEUED = "A bucket that is full while earlier ones are still sent is drawn from their end on."
CLOCK = (
    "Times are of the host's monotonic clock: hooks read it on the threads that run the backward "
    "pass and complete the all-reduces."
)


class Split(NamedTuple):
    """The seconds of a step in which gradients are on their way."""

    step: float
    exposed: float
    hidden: float


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class DdpInspection:
    """The steps of one model through DDP, on every rank; drawn from these numbers alone."""

    title: str
    parameters: tuple[ParameterSize, ...]
    unused: Mapping[str, tuple[int, ...]]
    """Parameters that had no part in the loss, and on which ranks."""
    reports: tuple[DdpReport, ...]
    """By rank."""
    devices: str = ""

    @property
    def caps(self) -> tuple[CapReport, ...]:
        """Rank 0's report on each value of ``bucket_cap_mb``, the model's own first."""
        return self.reports[0].caps

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

    def table(self) -> Table:
        """Return a row for each value of ``bucket_cap_mb``, with what it shows as notes."""
        columns = ["bucket_cap_mb", "buckets", "largest", "step", "exposed", "hidden"]
        rows = []
        for index, cap in enumerate(self.caps):
            split = self.split(index)
            largest = max(cap.buckets, key=lambda bucket: bucket.num_bytes, default=None)
            rows.append(
                table_row(
                    f"{cap.cap_mb:g} MB" + (" (its own)" if index == 0 else ""),
                    len(cap.buckets),
                    size(largest.num_bytes) if largest else "–",
                    in_units(split.step),
                    in_units(split.exposed),
                    in_units(split.hidden),
                )
            )
        return Table(
            caption=f"{self.title}: all-reduces hidden behind the backward pass",
            columns=tuple(
                Column(title=title, is_number=number > 0) for number, title in enumerate(columns)
            ),
            rows=tuple(rows),
            notes=tuple(self.words()),
        )

    def words(self) -> list[str]:
        """Return what the buckets and times show, one sentence or two each."""
        own, notes = self.caps[0], []
        notes.append(_about_largest(own, self.gradient_bytes))
        if self.unused:
            notes.append(_about_unused(self.unused, len(self.reports)))
        sent = sum(span.num_bytes or 0 for span in _buckets_of(own.steps[0]))
        notes.append(
            f"The all-reduces of a step carry {sent:,} bytes of each rank's gradients; the "
            f"parameters that need one have {self.gradient_bytes:,}."
        )
        notes.append(FORMULA)
        if self.devices:
            notes.append(f"On {self.devices} time is computed; the gradients are real.")
        else:
            notes.append(CLOCK)
        return notes

    def figures(self, *, dark: bool = False) -> list[tuple[Figure, str]]:
        """Return the pictures, each with its text: the buckets, then a step with each size."""
        steps = [self.trace(index) for index in range(len(self.caps))]
        drawn = [(draw_timeline(each, dark=dark), timeline_text(each)) for each in steps]
        return [(draw_buckets(self, dark=dark), buckets_text(self)), *drawn]

    def __repr__(self) -> str:
        return "\n\n".join([buckets_text(self), timeline_text(self.trace()), self.table().text()])


def split_of(spans: Sequence[Span], num_ranks: int) -> Split:
    """Return the times of one step, as means over the ranks."""
    exposed = hidden = 0.0
    for rank in range(num_ranks):
        own = [span for span in spans if span.rank == rank]
        sent = _union([span for span in own if span.lane == "communication"])
        busy = _union([span for span in own if span.lane == "compute"])
        behind = sum(
            max(0.0, min(end, stop) - max(start, begin))
            for start, end in sent
            for begin, stop in busy
        )
        hidden += behind
        exposed += sum(end - start for start, end in sent) - behind
    return Split(_length(spans), exposed / num_ranks, hidden / num_ranks)


def buckets_text(inspection: DdpInspection) -> str:
    """Return the buckets in words."""
    own = inspection.caps[0]
    num = counted(len(own.buckets), "bucket")
    lines = [f"{inspection.title}: {size(inspection.gradient_bytes)} of gradients in {num}"]
    sizes = {each.name: each for each in inspection.parameters}
    for number, bucket in enumerate(own.buckets):
        lines.append(f"bucket {number}: {_head(own, bucket, inspection.gradient_bytes)}")
        for name in bucket.names[:MAX_LINES]:
            shape = " x ".join(map(str, sizes[name].shape)) or "1"
            unused = ", no gradient" if name in inspection.unused else ""
            lines.append(f"  {name} ({shape}), {size(sizes[name].num_bytes)}{unused}")
        if (rest := len(bucket.names) - MAX_LINES) > 0:
            lines.append(f"  and {counted(rest, 'more parameter')}")
    return "\n".join(lines)


def draw_buckets(inspection: DdpInspection, *, dark: bool = False) -> Figure:
    """Return the buckets as boxes with their parameters, in the order in which they are sent."""
    look, own = shades(dark), inspection.caps[0]
    boxes = own.buckets[:MAX_BOXES]
    rest = len(own.buckets) - len(boxes)
    num_lines = max(
        (min(len(each.names), MAX_LINES) + (len(each.names) > MAX_LINES) for each in boxes),
        default=1,
    )
    box_height = HEAD + LINE * num_lines + 0.22
    strips = inspection.caps if len(inspection.caps) > 1 else ()
    about = [_about_largest(own, inspection.gradient_bytes)]
    if inspection.unused:
        about.append(_about_unused(inspection.unused, len(inspection.reports)))
    notes = [line for note in about for line in wrapped(note)]
    below = 0.24 * len(notes) + 0.45 + (STRIP * len(strips) + 0.35 if strips else 0)
    height = 0.85 + box_height + below
    title = f"The gradients of {inspection.title} in DDP's buckets, in the order of sending"
    figure = sheet(height, title, look)
    axes: Any = figure.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    axes.set_xlim(0, WIDTH)
    axes.set_ylim(height, 0)
    room = WIDTH - 0.6 - (1.5 if rest else 0)
    width = min(4.4, (room + GAP) / max(len(boxes), 1) - GAP)
    for number, bucket in enumerate(boxes):
        left = 0.3 + number * (width + GAP)
        place = _Place(axes, left, 0.85, width, box_height, look)
        _draw_box(place, inspection, number, bucket)
    if rest:
        text = f"and {rest:,} more"
        axes.text(WIDTH - 1.6, 0.85 + box_height / 2, text, fontsize=SMALL_POINTS, color=look.muted)
    top = 0.85 + box_height + 0.3
    for strip in strips:
        _draw_strip(_Place(axes, 0.3, top, WIDTH - 0.6, STRIP, look), strip)
        top += STRIP
    for number, line in enumerate(notes):
        y = height - 0.42 - 0.24 * (len(notes) - 1 - number)
        axes.text(0.3, y, line, fontsize=SMALL_POINTS - 1, color=look.muted, va="center")
    return figure


class _Place(NamedTuple):
    axes: Any
    left: float
    top: float
    width: float
    height: float
    look: Shades


def _draw_box(place: _Place, inspection: DdpInspection, number: int, bucket: Bucket) -> None:
    axes, left, top, width, height, look = place
    colour = PART_COLOURS["communication"]
    box = FancyBboxPatch(
        (left + 0.05, top + 0.05),
        width - 0.1,
        height - 0.1,
        boxstyle="round,pad=0.05,rounding_size=0.08",
        facecolor="none",
        edgecolor=colour,
        linewidth=1.4,
    )
    axes.add_patch(box)
    total, sizes = inspection.gradient_bytes, {p.name: p.num_bytes for p in inspection.parameters}
    share = bucket.num_bytes / max(total, 1)
    inner = width - 0.24
    small: dict[str, Any] = {"fontsize": SMALL_POINTS - 1.5, "va": "center"}
    axes.text(left + 0.12, top + 0.2, f"bucket {number}", color=look.ink, weight="bold", **small)
    text = f"{size(bucket.num_bytes)}, {percent(share)}"
    axes.text(left + width - 0.12, top + 0.2, text, color=look.ink, ha="right", **small)
    axes.add_patch(Rectangle((left + 0.12, top + 0.38), inner, 0.1, color=look.rule))
    axes.add_patch(Rectangle((left + 0.12, top + 0.38), inner * share, 0.1, color=colour))
    shown = bucket.names[:MAX_LINES]
    for line, name in enumerate(shown):
        y = top + HEAD + LINE * (line + 0.5)
        num_bytes = "no gradient" if name in inspection.unused else size(sizes[name])
        room = int(inner * CHARACTERS_PER_INCH) - len(num_bytes) - 1
        shade = look.muted if name in inspection.unused else look.ink
        axes.text(left + 0.12, y, _shortened(name, room), color=shade, **small)
        axes.text(left + width - 0.12, y, num_bytes, color=look.muted, ha="right", **small)
    if (rest := len(bucket.names) - len(shown)) > 0:
        y = top + HEAD + LINE * (len(shown) + 0.5)
        axes.text(left + 0.12, y, f"and {rest:,} more", color=look.muted, **small)


def _draw_strip(place: _Place, cap: CapReport) -> None:
    """Draw the buckets of one size side by side, each as wide as its share of the bytes."""
    axes, left, top, width, height, look = place
    label = 2.7
    num = counted(len(cap.buckets), "bucket")
    axes.text(
        left,
        top + height / 2,
        f"bucket_cap_mb={cap.cap_mb:g}: {num}",
        fontsize=SMALL_POINTS - 1,
        color=look.ink,
        va="center",
    )
    total = max(sum(each.num_bytes for each in cap.buckets), 1)
    at, room = left + label, width - label
    for number, bucket in enumerate(cap.buckets):
        part = room * bucket.num_bytes / total
        axes.add_patch(
            Rectangle(
                (at, top + 0.06),
                part,
                height - 0.12,
                facecolor=PART_COLOURS["communication"],
                edgecolor=look.paper,
                linewidth=0.8 if len(cap.buckets) < 100 else 0.2,
            )
        )
        if part > 0.3:
            axes.text(
                at + part / 2,
                top + height / 2,
                str(number),
                fontsize=SMALL_POINTS - 2.5,
                color=look.paper,
                ha="center",
                va="center",
            )
        at += part


# -- in words ------------------------------------------------------------------------------


def _head(cap: CapReport, bucket: Bucket, total: int) -> str:
    share = percent(bucket.num_bytes / max(total, 1))
    ready = [cap.ready_seconds[name] for name in bucket.names if name in cap.ready_seconds]
    full = f", full {in_units(max(ready))} after the backward pass began" if ready else ""
    return f"{size(bucket.num_bytes)}, {share} of all{full}"


def _about_largest(cap: CapReport, total: int) -> str:
    """Say what a bucket that holds nearly everything means."""
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
    names = list(unused)
    shown = listed(names[:MAX_NAMES]) if len(names) <= MAX_NAMES else ", ".join(names[:MAX_NAMES])
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    everywhere = all(len(ranks) == num_ranks for ranks in unused.values())
    some = sorted({rank for ranks in unused.values() for rank in ranks})
    where = "" if everywhere else f" on {spoken_ranks(some)}"
    verb = "has" if len(names) == 1 else "have"
    return (
        f"{shown}{more} {verb} no part in the loss{where}: plain DDP would raise an error in its "
        "second step.  So find_unused_parameters=True was used here, with which the first buckets "
        "stay, and zeros are sent in place of a gradient that is missing."
    )


def _shortened(name: str, room: int) -> str:
    return name if len(name) <= room else f"…{name[-max(room - 1, 1) :]}"


# -- spans ---------------------------------------------------------------------------------


def _spans(reports: Sequence[DdpReport], index: int, step: int) -> tuple[Span, ...]:
    return tuple(span for report in reports for span in report.caps[index].steps[step])


def _buckets_of(spans: Sequence[Span]) -> list[Span]:
    return [span for span in spans if span.name.startswith("bucket")]


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


def _union(spans: Sequence[Span]) -> list[tuple[float, float]]:
    """Return the times that any of the spans covers."""
    found: list[tuple[float, float]] = []
    for start, end in sorted((span.start, span.end) for span in spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((start, end))
    return found
