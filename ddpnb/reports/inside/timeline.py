"""What ranks did, drawn on one time line (kernel).

A rank has a row for each kind of thing that it did; computing and waiting share one.  Where all
ranks of a group make the same call, those that come early are hatched until the last one has come.
"""

import zlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from ddpnb.protocol.trace import Span, Trace
from ddpnb.reports.formatting import size
from ddpnb.reports.inside.spans import (
    MAX_RANKS,
    bounds,
    kind_of,
    last_arrivals,
    notes_of,
    time_unit,
)
from ddpnb.reports.kit import (
    DPI,
    RIGHT,
    ROW_NAMES,
    WAITING,
    WIDTH,
    Look,
    Sheet,
    dress,
    ink_on,
    legend,
    name_row,
    write,
)
from ddpnb.reports.style import MUTED, PAPER, PART_COLOURS, RULE, SMALL_POINTS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ROW_HEIGHT, LEAST_ROW_HEIGHT, MAX_ROWS_HEIGHT = 0.36, 0.13, 8.0
"""Inches of a row; and of all rows, beyond which they become lower."""
LABEL_HEIGHT, CHARACTER_WIDTH = 0.2, 0.082
"""Inches: rows at least this tall have names in their bars; a character of such a name."""
TICKS_HEIGHT = 0.75
MAX_COLOURS = 9
"""Names in the legend."""
PIXELS = (WIDTH - ROW_NAMES - RIGHT) * DPI
"""The length of the axis of time."""

ROWS = {"compute": "compute", "wait": "compute", "communication": "exchange"}
"""Lane to row."""
COLOURS = PART_COLOURS | {
    "update": PART_COLOURS["optimizer"],
    "bucket": PART_COLOURS["communication"],
    "all_reduce": PART_COLOURS["communication"],
    "broadcast": "#2b7a78",
    "barrier": "#8d8d99",
    "all_gather": "#4f6db8",
    "reduce_scatter": "#a05195",
    "all_to_all": "#c97b2a",
    "send": "#6a994e",
    "recv": "#386641",
}
SPARE_COLOURS = ("#7a5c9e", "#2f7fb5", "#b5654a", "#5c8a3a", "#a8517f", "#4a7c7c")


class _Bar(NamedTuple):
    span: Span
    waits_until: float
    """Until when it waits for the last rank to make the same call."""


def draw_timeline(trace: Trace) -> "Figure":
    """Return a trace as a figure: a band for each of up to 16 ranks, time from left to right."""
    bands = _bands(trace)
    num_rows = sum(map(len, bands.values())) + 0.5 * len(bands)
    row_height = min(max(MAX_ROWS_HEIGHT / num_rows, LEAST_ROW_HEIGHT), ROW_HEIGHT)
    height = max(num_rows * row_height, 0.6)
    begin, end = bounds(trace.spans)
    scale, unit = time_unit(end - begin)
    sheet = Sheet(trace.title, height + TICKS_HEIGHT, notes_of(trace))
    axes = sheet.axes(height, left=ROW_NAMES)
    dress(axes, x_label=f"{unit} since the first call")
    axes.set(xlim=(0, (end - begin) * scale), ylim=(num_rows, -0.2), yticks=[])
    top = 0.0
    for rank, rows in bands.items():
        if top:
            axes.axhline(top - 0.25, color=RULE, linewidth=1.0, zorder=1)
        name_row(axes, top + len(rows) / 2, f"rank {rank}", rank=rank)
        for row, bars in rows.items():
            if row_height >= LABEL_HEIGHT and (len(rows) > 1 or not bars):
                look: Look = {"transform": axes.get_yaxis_transform(), "ha": "right"}
                name, points = row or "nothing", SMALL_POINTS - 2.5
                write(axes, -0.006, top + 0.5, name, points=points, colour=MUTED, **look)
            _draw_row(axes, top, bars, begin, scale, has_names=row_height >= LABEL_HEIGHT)
            top += 1
        top += 0.5
    _add_legend(axes, [bar for rows in bands.values() for bars in rows.values() for bar in bars])
    return sheet.figure


def colour_of(span: Span) -> str:
    """Return the colour of a span that is no waiting: that of its kind, or of its name."""
    kind = kind_of(span)
    for name, colour in COLOURS.items():
        if kind == name or kind.startswith((f"{name}_", f"{name} ")):
            return colour
    return SPARE_COLOURS[zlib.crc32(kind.encode()) % len(SPARE_COLOURS)]


def _bands(trace: Trace) -> dict[int, dict[str, list[_Bar]]]:
    """Return the rows of each drawn rank, with their bars by time; a rank has one at least."""
    shown = range(min(trace.num_ranks, MAX_RANKS))
    found: dict[int, dict[str, list[_Bar]]] = {rank: {} for rank in shown}
    bars = [_Bar(*each) for each in zip(trace.spans, last_arrivals(trace), strict=True)]
    for bar in sorted(bars, key=lambda bar: bar.span.start):
        if bar.span.rank in found:
            found[bar.span.rank].setdefault(ROWS[bar.span.lane], []).append(bar)
    return {rank: dict(sorted(rows.items())) or {"": []} for rank, rows in found.items()}


def _draw_row(
    axes: "Axes", top: float, bars: list[_Bar], begin: float, scale: float, *, has_names: bool
) -> None:
    pixel = axes.get_xlim()[1] / PIXELS
    height = (top + 0.08, 0.84)
    solid: dict[str, list[tuple[float, float]]] = {}
    hatched: list[tuple[float, float]] = []
    for bar, next_start in _visible(bars, pixel / scale):
        start, until, end = (
            (time - begin) * scale for time in (bar.span.start, bar.waits_until, bar.span.end)
        )
        if bar.span.lane == "wait":
            hatched.append((start, max(end - start, pixel)))
            continue
        solid.setdefault(colour_of(bar.span), []).append((start, max(end - start, pixel)))
        if until - start >= pixel:
            hatched.append((start, until - start))
        if has_names:
            end = min(end, (next_start - begin) * scale)
            _write_name(axes, bar.span, until, end, top + 0.52, (end - until) / pixel / DPI)
    for colour, places in solid.items():
        # an edge as wide as a thin bar would hide it
        edge = PAPER if min(width for _, width in places) > 4 * pixel else "none"
        axes.broken_barh(places, height, facecolor=colour, edgecolor=edge, linewidth=0.4, zorder=2)
    axes.broken_barh(hatched, height, zorder=3, **WAITING)


def _visible(bars: list[_Bar], pixel_seconds: float) -> Iterator[tuple[_Bar, float]]:
    """Yield the bars that show at least half a new pixel, each with the start of the next one."""
    drawn_to = -float("inf")
    starts = [bar.span.start for bar in bars[1:]]
    for bar, next_start in zip(bars, [*starts, float("inf")], strict=True):
        if bar.span.end >= drawn_to + pixel_seconds / 2:
            drawn_to = max(bar.span.end, bar.span.start + pixel_seconds)
            yield bar, next_start


def _write_name(
    axes: "Axes", span: Span, start: float, end: float, middle: float, inches: float
) -> None:
    """Write a span's name into its bar, with its size and line where there is room."""
    texts = [span.name]
    if span.num_bytes:
        texts.insert(0, f"{span.name} {size(span.num_bytes)}")
    if span.line:
        texts.insert(0, f"{texts[0]}, {span.line}")
    text = next((text for text in texts if (len(text) + 1) * CHARACTER_WIDTH <= inches), "")
    if text:
        look: Look = {"points": SMALL_POINTS - 2.5, "colour": ink_on(colour_of(span)), "zorder": 4}
        write(axes, (start + end) / 2, middle, text, ha="center", **look)


def _add_legend(axes: "Axes", bars: list[_Bar]) -> None:
    spans = [bar.span for bar in bars if bar.span.lane != "wait"]
    looks: dict[str, str | Look] = {kind_of(span): colour_of(span) for span in spans}
    looks = dict(list(looks.items())[:MAX_COLOURS])
    if len(spans) < len(bars):
        looks["waits"] = WAITING
    if any(bar.waits_until > bar.span.start for bar in bars):
        looks["waits for the last rank"] = WAITING
    if looks:
        legend(axes, looks)
