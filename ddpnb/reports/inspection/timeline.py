"""A timeline of the activity of all ranks.  Runs in the kernel.

Each rank has a row for computing and waiting, and a row for communication.  If an early rank waits
in a call for other ranks, its bar is hatched until the last rank makes the same call.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import cycle
from typing import TYPE_CHECKING, Any

from ddpnb.protocol.trace import Span
from ddpnb.reports.formatting import size, time_unit
from ddpnb.reports.kit import (
    DPI,
    MAX_DRAWN_RANKS,
    RIGHT,
    ROW_NAMES,
    WAITING_LOOK,
    WIDTH,
    Look,
    Sheet,
    dress,
    ink_on,
    legend,
    name_row,
    write_label,
)
from ddpnb.reports.style import MUTED, PAPER, PART_COLOURS, RULE, TINY_POINTS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ROW_HEIGHT, MAX_ROWS_HEIGHT, TICKS_HEIGHT = 0.36, 8.0, 0.75
"""Height of a row, maximum height of all rows, height of the ticks with their label, in inches."""
CHARACTER_WIDTH = 0.082
"""Width of a character in a bar's name, in inches."""
PIXELS = (WIDTH - ROW_NAMES - RIGHT) * DPI
"""Length of the time axis in pixels."""
MAX_COLOURS = 9
"""Maximum number of colours in the legend."""
BAR_COLOURS = {
    "forward": PART_COLOURS["forward"],
    "backward": PART_COLOURS["backward"],
    "update": PART_COLOURS["optimizer"],
    "bucket": PART_COLOURS["communication"],
    "all_reduce": PART_COLOURS["communication"],
}
OTHER_COLOURS = (
    *("#2b7a78", "#8d8d99", "#4f6db8", "#a05195", "#c97b2a"),
    *("#6a994e", "#7a5c9e", "#b5654a", "#386641"),
)
"""Colours of all other kinds of spans.  The kind with the earliest span gets the first colour."""

Bar = tuple[Span, float]
"""A span, and the time when its wait for other ranks ends (its start if it does not wait)."""


def draw_timeline(
    title: str, spans: Sequence[Span], num_ranks: int, notes: Sequence[str]
) -> "Figure":
    """Return a figure with a band of rows for each of the first 16 ranks."""
    begin, end = bounds(spans)
    scale, unit = time_unit(end - begin)
    spans = [
        replace(span, start=(span.start - begin) * scale, end=(span.end - begin) * scale)
        for span in sorted(spans, key=lambda span: span.start)
    ]
    bars = list(zip(spans, last_arrivals(spans), strict=True))
    bands = [_rows(rank, bars) for rank in range(min(num_ranks, MAX_DRAWN_RANKS))]
    colours = _colours(spans)
    num_rows = sum(map(len, bands)) + 0.5 * len(bands)
    height = min(num_rows * ROW_HEIGHT, MAX_ROWS_HEIGHT)
    rest = num_ranks - len(bands)
    missing = [f"The picture shows {len(bands)} of {num_ranks} ranks."] if rest else []
    sheet = Sheet(title, height + TICKS_HEIGHT, [*missing, *notes])
    axes = sheet.axes(height, left=ROW_NAMES)
    dress(axes, x_label=f"{unit} since the first call")
    axes.set(xlim=(0, (end - begin) * scale), ylim=(num_rows, -0.2), yticks=[])
    top = 0.0
    for rank, rows in enumerate(bands):
        if rank:
            axes.axhline(top - 0.25, color=RULE, linewidth=1.0, zorder=1)
        name_row(axes, top + len(rows) / 2, f"rank {rank}", rank=rank)
        for name, row in rows.items():
            if len(rows) > 1 or not row:
                look: Look = {"transform": axes.get_yaxis_transform(), "ha": "right"}
                write_label(axes, -0.006, top + 0.5, name, points=TINY_POINTS, colour=MUTED, **look)
            _draw_row(axes, top, row, colours)
            top += 1
        top += 0.5
    looks: dict[str, str | Look] = dict(list(colours.items())[:MAX_COLOURS])
    if any(span.lane == "wait" for span in spans):
        looks["waits"] = WAITING_LOOK
    if any(until > span.start for span, until in bars):
        looks["waits for the last rank"] = WAITING_LOOK
    if looks:
        legend(axes, looks)
    return sheet.figure


def last_arrivals(spans: Sequence[Span]) -> list[float]:
    """Return, for each span, the time at which the last rank made the matching call.

    Call number k of one rank in a group matches call number k of each other rank in this group.
    A ``send`` matches the receiver's ``recv``.  If the span did not wait, or if other ranks' calls
    are not known, the time is the span's start.
    """
    found = [span.start for span in spans]
    numbers: Counter[Any] = Counter()
    meetings: dict[Any, list[int]] = defaultdict(list)
    for index in sorted(range(len(spans)), key=found.__getitem__):
        span = spans[index]
        if span.lane == "communication" and len(span.group) > 1:
            place = span.group, span.name in ("send", "recv")
            meetings[place, numbers[place, span.rank]].append(index)
            numbers[place, span.rank] += 1
    for ((group, is_message), _), indices in meetings.items():
        names = {spans[index].name for index in indices}
        if len(indices) < len(group) or (len(names) > 1 and not is_message):
            continue
        last = spans[indices[-1]].start
        for index in indices:
            span = spans[index]
            if span.name != "send" and last <= span.end:  # otherwise the span did not wait
                found[index] = last
    return found


def bounds(spans: Sequence[Span]) -> tuple[float, float]:
    """Return the start of the first span and the end of the last span, at least 1 µs apart."""
    begin = min((span.start for span in spans), default=0.0)
    end = max((span.end for span in spans), default=0.0)
    return begin, end if end > begin else begin + 1e-6


def _rows(rank: int, bars: Sequence[Bar]) -> dict[str, list[Bar]]:
    """Return the rows of a rank with their bars.  A rank without spans has one empty row."""
    rows: dict[str, list[Bar]] = {"compute": [], "exchange": []}
    for span, until in bars:
        if span.rank == rank:
            name = "exchange" if span.lane == "communication" else "compute"
            rows[name].append((span, until))
    return {name: row for name, row in rows.items() if row} or {"nothing": []}


def _colours(spans: Sequence[Span]) -> dict[str, str]:
    """Return the colour of each kind of span.  Waiting has no colour."""
    kinds = dict.fromkeys(_kind(span) for span in spans if span.lane != "wait")
    others = cycle(OTHER_COLOURS)
    return {kind: BAR_COLOURS.get(kind) or next(others) for kind in kinds}


def _kind(span: Span) -> str:
    """Return the name of a span in the legend.  All buckets have the name ``"bucket"``."""
    return "bucket" if span.name.startswith("bucket") else span.name


def _draw_row(axes: "Axes", top: float, bars: list[Bar], colours: Mapping[str, str]) -> None:
    """Draw a row's bars, each at least one pixel wide.  Leave out bars that others would hide."""
    pixel = axes.get_xlim()[1] / PIXELS
    height = (top + 0.08, 0.84)
    solid: dict[str, list[tuple[float, float]]] = defaultdict(list)
    hatched: list[tuple[float, float]] = []
    drawn_to = -math.inf
    next_starts = [*(span.start for span, _ in bars[1:]), math.inf]
    for (span, until), next_start in zip(bars, next_starts, strict=True):
        if span.end < drawn_to + pixel / 2:
            continue
        drawn_to = max(span.end, span.start + pixel)
        place = (span.start, drawn_to - span.start)
        if span.lane == "wait":
            hatched.append(place)
            continue
        colour = colours[_kind(span)]
        solid[colour].append(place)
        if until - span.start >= pixel:
            hatched.append((span.start, until - span.start))
        _write_name(axes, span, until, min(span.end, next_start), top + 0.52, ink_on(colour))
    for colour, places in solid.items():
        # a thin bar has no edge, because the edge would cover the bar
        edge = PAPER if min(width for _, width in places) > 4 * pixel else "none"
        axes.broken_barh(places, height, facecolor=colour, edgecolor=edge, linewidth=0.4, zorder=2)
    axes.broken_barh(hatched, height, zorder=3, **WAITING_LOOK)


def _write_name(
    axes: "Axes", span: Span, start: float, end: float, middle: float, ink: str
) -> None:
    """Write a span's name into its bar, with the number of bytes and the code line if they fit."""
    inches = (end - start) / axes.get_xlim()[1] * PIXELS / DPI
    named = f"{span.name} {size(span.num_bytes)}" if span.num_bytes else span.name
    for text in (f"{named}, {span.line}" if span.line else named, named, span.name):
        if (len(text) + 1) * CHARACTER_WIDTH <= inches:
            look: Look = {"points": TINY_POINTS, "colour": ink, "ha": "center", "zorder": 4}
            write_label(axes, (start + end) / 2, middle, text, **look)
            return
