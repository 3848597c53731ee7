"""What ranks did, drawn on one time line (kernel).

Pure functions of a ``Trace``.  A rank has a row for each kind of thing that it did; computing and
waiting share one.  Where all ranks of a group make the same call, those that come early are hatched
until the last one has come.
"""

import math
import zlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PatchCollection
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Patch, Rectangle
from matplotlib.ticker import MaxNLocator

from ddpnb.protocol.trace import Span, Trace
from ddpnb.reports.formatting import size
from ddpnb.reports.inside.spans import (
    SERVER,
    TimeAxis,
    in_units,
    kind_of,
    last_arrivals,
    notes_of,
    shown_ranks,
    time_unit,
    timeline_text,
)
from ddpnb.reports.style import (
    FONT_POINTS,
    INK,
    MUTED,
    PAPER,
    PART_COLOURS,
    RULE,
    SMALL_POINTS,
    TITLE_POINTS,
)

__all__ = ["colour_of", "draw_timeline", "shades", "sheet", "timeline_text", "wrapped"]

MAX_LEVELS = 3
"""Spans of one row that overlap and are drawn below each other; further ones share the last."""
WIDTH, DPI = 14.0, 100
LEFT, RIGHT, TOP, BOTTOM = 1.7, 0.45, 0.95, 1.0
"""Inches around the rows."""
NOTE_HEIGHT = 0.24
LEVEL_HEIGHT, LEAST_LEVEL_HEIGHT = 0.36, 0.13
MAX_ROWS_HEIGHT = 8.0
"""Inches; beyond, the rows become lower."""
LABEL_LEVEL = 0.2
"""Inches of height from which on a bar has its name in it."""
CHARACTER = 0.082
"""Inches of width for a character of a bar's name."""
ROWS = {
    "compute": "compute",
    "wait": "compute",
    "communication": "exchange",
    "server": "server",
}
"""Lane to row, from top to bottom."""
NAMED_COLOURS = PART_COLOURS | {
    "optimizer step": PART_COLOURS["optimizer"],
    "update": PART_COLOURS["optimizer"],
    "wait": PART_COLOURS["waiting"],
    "all_reduce": "#d1495b",
    "broadcast": "#2b7a78",
    "barrier": "#8d8d99",
    "all_gather": "#4f6db8",
    "reduce_scatter": "#a05195",
    "all_to_all": "#c97b2a",
    "send": "#6a994e",
    "recv": "#386641",
}
SPARE_COLOURS = ("#7a5c9e", "#2f7fb5", "#b5654a", "#5c8a3a", "#a8517f", "#4a7c7c")
WAITING = PART_COLOURS["waiting"]
LATE = "waits for the last rank"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shades:
    """The colours of a picture besides those of what it shows."""

    ink: str
    muted: str
    rule: str
    paper: str


LIGHT = Shades(ink=INK, muted=MUTED, rule=RULE, paper=PAPER)
DARK = Shades(ink="#e8eaed", muted="#a9b0b8", rule="#3a3f46", paper="#17191c")


def shades(dark: bool) -> Shades:
    """Return the colours for a light or a dark page."""
    return DARK if dark else LIGHT


def colour_of(span: Span) -> str:
    """Return a span's colour: that of its kind, or one that its name always has."""
    if span.lane == "wait":
        return WAITING
    if span.name in NAMED_COLOURS:
        return NAMED_COLOURS[span.name]
    for name, colour in NAMED_COLOURS.items():
        if span.name.startswith(f"{name}_"):
            return colour
    if span.name.startswith("bucket"):
        return PART_COLOURS["communication"]
    return SPARE_COLOURS[zlib.crc32(span.name.encode()) % len(SPARE_COLOURS)]


@dataclass(slots=True)
class _Row:
    rank: int
    name: str
    spans: list[tuple[Span, float, int]]
    """Each with until when it waited for the last rank, and its level."""
    num_levels: int = 1
    top: float = 0.0
    """In levels from above."""


def draw_timeline(trace: Trace, *, dark: bool = False) -> Figure:
    """Return a trace as a figure: one band per rank, time from left to right in milliseconds.

    Args:
        trace: up to 16 ranks of it are drawn.
        dark: whether for a dark page.
    """
    look = shades(dark)
    rows = _rows(trace)
    bands = len({row.rank for row in rows})
    num_levels = sum(row.num_levels for row in rows) + 0.5 * bands
    level = min(max(MAX_ROWS_HEIGHT / max(num_levels, 1), LEAST_LEVEL_HEIGHT), LEVEL_HEIGHT)
    time = TimeAxis(trace.spans)
    folded = ["Grey: a time in which nothing was called, folded."] if time.folds else []
    notes = [line for note in (*notes_of(trace), *folded) for line in wrapped(note)]
    rows_height = max(num_levels * level, 0.6)
    bottom = BOTTOM + NOTE_HEIGHT * len(notes)
    height = TOP + rows_height + bottom
    figure = sheet(height, trace.title, look)
    axes = figure.add_axes(
        (LEFT / WIDTH, bottom / height, (WIDTH - LEFT - RIGHT) / WIDTH, rows_height / height)
    )
    _look_of(axes, look, num_levels)
    _scale(axes, time, look)
    for row in rows:
        _draw_row(axes, row, time, level, look)
    _name_rows(axes, rows, look, level)
    _legend(axes, rows, look, rows_height)
    for index, line in enumerate(reversed(notes)):
        figure.text(
            0.3 / WIDTH,
            (0.32 + NOTE_HEIGHT * index) / height,
            line,
            fontsize=SMALL_POINTS - 1,
            color=look.muted,
        )
    return figure


def sheet(height: float, title: str, look: Shades, width: float = WIDTH) -> Figure:
    """Return an empty figure with a title, on a paper with round corners."""
    figure = Figure(figsize=(width, height), dpi=DPI, facecolor="none")
    FigureCanvasAgg(figure)
    paper = FancyBboxPatch(
        (0.17, 0.17),
        width - 0.34,
        height - 0.34,
        boxstyle="round,pad=0.15,rounding_size=0.18",
        facecolor=look.paper,
        edgecolor=look.rule,
        linewidth=1.2,
        zorder=-1,
        transform=figure.dpi_scale_trans,
    )
    figure.add_artist(paper)
    figure.text(
        0.3 / width,
        1 - 0.38 / height,
        title,
        fontsize=TITLE_POINTS,
        color=look.ink,
        weight="bold",
        va="center",
    )
    return figure


def wrapped(text: str, characters: int = 150) -> list[str]:
    """Return a sentence in lines that fit below a picture."""
    lines, line = [], ""
    for word in text.split():
        if line and len(line) + 1 + len(word) > characters:
            lines.append(line)
            line = ""
        line = f"{line} {word}".strip()
    return [*lines, line] if line else lines


def _rows(trace: Trace) -> list[_Row]:
    """Return the rows from top to bottom, with each span on the first level that is free."""
    until = last_arrivals(trace)
    ranks = shown_ranks(trace)
    order = list(dict.fromkeys(ROWS.values()))
    found: dict[tuple[int, str], list[tuple[Span, float, int]]] = {}
    ends: dict[tuple[int, str], list[float]] = defaultdict(list)
    for index in sorted(range(len(trace.spans)), key=lambda index: trace.spans[index].start):
        span = trace.spans[index]
        if span.rank not in ranks:
            continue
        place = span.rank, ROWS[span.lane]
        levels = ends[place]
        slot = next((n for n, end in enumerate(levels) if end <= span.start), len(levels))
        slot = min(slot, MAX_LEVELS - 1)
        if slot == len(levels):
            levels.append(span.end)
        levels[slot] = max(levels[slot], span.end)
        found.setdefault(place, []).append((span, until[index], slot))
    rows, top = [], 0.0
    for rank in ranks:
        mine = sorted((p for p in found if p[0] == rank), key=lambda p: order.index(p[1]))
        for place in mine or [(rank, "")]:
            num_levels = max(1, len(ends[place]))
            rows.append(_Row(rank, place[1], found.get(place, []), num_levels, top))
            top += num_levels
        top += 0.5
    return rows


def _draw_row(axes: Axes, row: _Row, time: TimeAxis, level: float, look: Shades) -> None:
    bars: dict[tuple[str, bool, bool], list[Rectangle]] = defaultdict(list)
    drawn_to: dict[int, float] = {}
    pixel = time.length / ((WIDTH - LEFT - RIGHT) * DPI)
    for span, until, slot in row.spans:
        start, end = time.place(span.start), time.place(span.end)
        if end < drawn_to.get(slot, -math.inf) + pixel / 2:
            continue  # less than half a pixel that is not yet drawn
        drawn_to[slot] = max(end, start + pixel)
        place, width = (start, row.top + slot + 0.08), max(end - start, pixel)
        is_thin = width < 5 * pixel
        bars[colour_of(span), span.lane == "wait", is_thin].append(Rectangle(place, width, 0.84))
        waited = time.place(until) - start
        if waited >= pixel:
            bars[WAITING, True, False].append(Rectangle(place, waited, 0.84))
        if level >= LABEL_LEVEL and span.lane != "wait":
            _label(axes, span, start + waited, end, pixel, row.top + slot)
    for (colour, is_hatched, is_thin), patches in bars.items():
        collection = PatchCollection(
            patches,
            facecolor=look.paper if is_hatched else colour,
            edgecolor=colour if is_hatched else look.paper,
            linewidth=0.9 if is_hatched else 0.0 if is_thin else 0.4,
            hatch="////" if is_hatched else None,
            zorder=3 if is_hatched else 2,
        )
        axes.add_collection(collection, autolim=False)


def _label(axes: Axes, span: Span, start: float, end: float, pixel: float, top: float) -> None:
    """Write a span's name into its bar, with its size and line where there is room."""
    room = (end - start) / pixel / DPI
    texts = [span.name]
    if span.num_bytes:
        texts.insert(0, f"{span.name} {size(span.num_bytes)}")
    if span.line:
        texts.insert(0, f"{texts[0]}, {span.line}")
    text = next((t for t in texts if (len(t) + 1) * CHARACTER <= room), "")
    axes.text(
        (start + end) / 2,
        top + 0.52,
        text,
        fontsize=SMALL_POINTS - 2.5,
        color=_on(colour_of(span)),
        ha="center",
        va="center",
        clip_on=True,
        zorder=4,
    )


def _on(colour: str) -> str:
    """Return black or white, whichever is read more easily on a colour."""
    red, green, blue = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
    return INK if 0.299 * red + 0.587 * green + 0.114 * blue > 0.55 else PAPER


def _look_of(axes: Axes, look: Shades, num_levels: float) -> None:
    axes.set_facecolor("none")
    axes.set_ylim(max(num_levels, 1), -0.2)
    axes.set_yticks([])
    axes.tick_params(labelsize=SMALL_POINTS, labelcolor=look.muted, color=look.muted)
    axes.grid(axis="x", color=look.rule, linewidth=1.0)
    axes.set_axisbelow(True)
    for side in axes.spines.values():
        side.set_visible(False)


def _scale(axes: Axes, time: TimeAxis, look: Shades) -> None:
    """Write the times below the axis; a grey band is a time in which nothing happened."""
    scale, unit = time_unit(time.length)
    axes.set_xlim(0, time.length)
    axes.set_xlabel(f"{unit} since the first call", fontsize=SMALL_POINTS, color=look.muted)
    ticks: dict[float, str] = {}
    for start, end in time.parts():
        share = (end - start) / time.length
        num_bins = max(1, round(9 * share))
        low, high = (start - time.begin) * scale, (end - time.begin) * scale
        marks = MaxNLocator(num_bins, steps=[1, 2, 2.5, 5, 10]).tick_values(low, high)
        inside = [mark for mark in marks if low <= mark <= high]
        for mark in inside:
            ticks[time.place(mark / scale + time.begin)] = f"{round(mark, 6):,g}"
    axes.set_xticks(list(ticks), list(ticks.values()))
    for start, end in time.folds:
        left, right = time.place(start), time.place(end)
        axes.axvspan(left, right, facecolor=look.rule, alpha=0.6, linewidth=0, zorder=1)
        axes.text(
            (left + right) / 2,
            0.5,
            in_units(end - start),
            transform=axes.get_xaxis_transform(),
            rotation=90,
            fontsize=SMALL_POINTS - 3,
            color=look.muted,
            ha="center",
            va="center",
            zorder=4,
        )


def _name_rows(axes: Axes, rows: Sequence[_Row], look: Shades, level: float) -> None:
    """Write the ranks and their rows at the left; a line between two ranks."""
    across = axes.get_yaxis_transform()
    for rank in dict.fromkeys(row.rank for row in rows):
        mine = [row for row in rows if row.rank == rank]
        top, bottom = mine[0].top, mine[-1].top + mine[-1].num_levels
        name = "server" if rank == SERVER else f"rank {rank}"
        place = 1 - (LEFT - 0.3) / (WIDTH - LEFT - RIGHT) - 1
        options: dict[str, Any] = {"transform": across, "va": "center", "clip_on": False}
        axes.text(place, (top + bottom) / 2, name, fontsize=FONT_POINTS, color=look.ink, **options)
        if rank != rows[0].rank:
            axes.axhline(top - 0.25, color=look.rule, linewidth=1.0, zorder=1)
        if len(mine) > 1 and level >= LABEL_LEVEL:
            for row in mine:
                middle = row.top + row.num_levels / 2
                small: dict[str, Any] = {
                    "fontsize": SMALL_POINTS - 2.5,
                    "color": look.muted,
                    "ha": "right",
                }
                axes.text(-0.006, middle, row.name, **small, **options)
        if not any(row.spans for row in mine):
            axes.text(0.006, top + 0.5, "nothing", color=look.muted, **options)


def _legend(axes: Axes, rows: Sequence[_Row], look: Shades, rows_height: float) -> None:
    """List the colours above the rows, at the right."""
    names: dict[str, str] = {}
    for row in rows:
        for span, _, _ in row.spans:
            names.setdefault("waits" if span.lane == "wait" else kind_of(span), colour_of(span))
    patches = [
        Patch(facecolor=colour, label=name) for name, colour in names.items() if name != "waits"
    ]
    is_late = any(until > span.start for row in rows for span, until, _ in row.spans)
    hatched: dict[str, Any] = {"facecolor": look.paper, "edgecolor": WAITING, "hatch": "////"}
    if "waits" in names:
        patches.append(Patch(label="waits", **hatched))
    if is_late:
        patches.append(Patch(label=LATE, **hatched))
    if patches:
        axes.legend(
            handles=patches[:9],
            loc="lower right",
            bbox_to_anchor=(1.0, 1.0 + 0.04 / rows_height),
            ncols=9,
            frameon=False,
            fontsize=SMALL_POINTS - 1,
            labelcolor=look.ink,
            handlelength=1.1,
            handletextpad=0.4,
            columnspacing=1.1,
            borderaxespad=0.0,
            borderpad=0.0,
        )
