"""One quantity of all strategies as curves (kernel)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator
from numpy.typing import NDArray

from ddpnb.reports.figures.axes import Look, draw_target, marker, prepare, round_down, round_up
from ddpnb.reports.figures.layout import shortened, spread_out, width_inches
from ddpnb.reports.figures.series import Line, Series
from ddpnb.reports.style import MUTED, SMALL_POINTS

LABEL_GAP_POINTS = SMALL_POINTS * 1.35
LEADER_INCHES = (0.02, 0.07, 0.16, 0.19)
"""Distances right of the axes: where a leader begins, bends and ends, where its label begins."""
MAX_BAD_SHOWN = 16
"""About the largest number of NaN or infinite losses that are marked."""
MAX_NAMED = 2
"""The number of a strategy's marks that are named: two, as for a rank killed and replaced."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class CurvePanel:
    """What a pair of axes shows."""

    title: str
    lines: Sequence[tuple[Series, Line]]
    right: float
    """The end of the x axis; it goes on where a line is longer."""
    is_of_time: bool = False
    """Whether the x axis is time; else it counts samples or updates."""
    log: bool = False
    target: float | None = None
    """The height of a line across."""
    is_share: bool = False
    """Whether the y axis ends at 1, and begins near the lowest share."""
    awaited: str = "the first steps"
    """What is waited for until there is a line."""


def draw_curves(axes: Axes, panel: CurvePanel) -> None:
    """Draw each strategy's line on bare axes, with its name at the right."""
    prepare(axes, panel.title, lines="y", num_ticks=6)
    axes.tick_params(axis="x", length=4)
    axes.tick_params(axis="y", length=0)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=4, steps=[1, 2, 2.5, 5, 10]))
    if panel.log:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0), numticks=6))
        axes.yaxis.set_minor_locator(NullLocator())
    if panel.target is not None:
        draw_target(axes, panel.target, is_reached_from_below=panel.is_share)
    shown = [each for each in panel.lines if _can_show(each[1], panel.log).any()]
    longest = max((float(np.nanmax(line.x)) for _, line in shown), default=0.0)
    right = (panel.right if longest <= panel.right * 1.001 else round_up(longest)) or 1.0
    axes.set(xlim=(0.0, right), ylim=_y_limits(panel, [line for _, line in shown]))
    if not shown:
        look: Look = {"ha": "center", "va": "center", "fontsize": SMALL_POINTS, "color": MUTED}
        axes.text(0.5, 0.5, f"waiting for {panel.awaited}", transform=axes.transAxes, **look)
        axes.tick_params(labelbottom=False, labelleft=False)
        return
    for series, line in shown:
        _draw_line(axes, series, line)
    _draw_labels(axes, shown, panel.log)
    num_note_lines = 0
    for series, line in panel.lines:
        note, at = _draw_events(axes, series, line, is_of_time=panel.is_of_time)
        if note:
            up = (0.3 if panel.is_share else 0.94) - 0.09 * num_note_lines  # clear of most lines
            _draw_note(axes, note, at / right, up, series.style.ink)
            num_note_lines += note.count("\n") + 1


def _can_show(line: Line, is_log: bool) -> NDArray[np.bool_]:
    """Return which points of the strong line have a place on the y axis."""
    return np.isfinite(line.y) & (line.y > (0 if is_log else -math.inf))


def _y_limits(panel: CurvePanel, lines: Sequence[Line]) -> tuple[float, float]:
    """Return the ends of the y axis: round numbers around all lines and the target."""
    extents = [_extent(line, panel.log) for line in lines]
    goals = [] if panel.target is None else [panel.target]
    lows = [low for low, _ in extents] + goals
    top = round_up(1.04 * max([high for _, high in extents] + goals, default=0.0))
    if panel.is_share:
        return (1.0 - round_up((1.0 - min(lows)) * 1.04) if lows else 0.0), 1.0
    if panel.log:
        bottom = round_down(0.9 * min(lows)) if lows else 0.1
    else:
        bottom = -round_up(-min([0.0, *lows]))
    return bottom, top if top > bottom else bottom + 1.0


def _extent(line: Line, is_log: bool) -> tuple[float, float]:
    """Return the range of the strong line, and of the faint one without its outliers."""
    faint = line.faint_y[np.isfinite(line.faint_y)]
    strong = line.y[np.isfinite(line.y)]
    if is_log:
        faint, strong = faint[faint > 0], strong[strong > 0]
    low, high = float(strong.min()), float(strong.max())
    if len(faint):
        ends = np.quantile(faint, (0.01, 0.99))
        low, high = min(low, float(ends[0])), max(high, float(ends[1]))
    return low, high


def _draw_line(axes: Axes, series: Series, line: Line) -> None:
    colour = series.style.colour
    axes.plot(line.faint_x, line.faint_y, color=colour, linewidth=1.0, alpha=0.28, zorder=2)
    axes.plot(line.x, line.y, color=colour, linestyle=series.style.dashes, linewidth=2.6, zorder=3)


def _draw_labels(axes: Axes, shown: Sequence[tuple[Series, Line]], is_log: bool) -> None:
    """Mark the end of each line, and write its name right of the axes, clear of the others."""
    box = axes.bbox.transformed(axes.figure.dpi_scale_trans.inverted())
    to_share = axes.transData - axes.transAxes
    ends = [_end_of(line, is_log) for _, line in shown]
    inside = [min(max(float(to_share.transform(end)[1]), 0.0), 1.0) for end in ends]
    placed = spread_out(inside, LABEL_GAP_POINTS / (box.height * 72), 0.02, 1.0)
    at = [1 + inches / box.width for inches in LEADER_INCHES]
    whole: Look = {"transform": axes.transAxes, "clip_on": False}
    for (series, _), end, begins, label_at in zip(shown, ends, inside, placed, strict=True):
        style, leader = series.style, [begins, begins, label_at]
        axes.plot(at[:3], leader, color=style.colour, linewidth=1.0, alpha=0.7, zorder=1, **whole)
        axes.plot(*end, markersize=8, zorder=4, clip_on=False, **marker(style))
        label: Look = {"fontsize": SMALL_POINTS, "color": style.ink, "va": "center", **whole}
        axes.text(at[3], label_at, shortened(series.label), **label)


def _draw_events(axes: Axes, series: Series, line: Line, *, is_of_time: bool) -> tuple[str, float]:
    """Draw what happened during the run; return what is written beside it, and from where on.

    Losses that are NaN or infinite are crosses at the top, and other events lines across.
    """
    at_x: Look = {"transform": axes.get_xaxis_transform(), "color": series.style.colour}
    marks = {
        f"rank {mark.rank}: {mark.text}": mark.seconds if is_of_time else samples
        for mark, samples in sorted(series.marks, key=lambda each: -each[0].seconds)
        if mark.seconds > 0
    }
    for at in marks.values():
        axes.plot([at, at], [0, 1], linewidth=1.4, linestyle=":", zorder=3, **at_x)
    named = dict(sorted(marks.items(), key=lambda item: item[1])[-MAX_NAMED:])
    if len(line.bad_x):
        named = {"NaN or ∞": float(line.bad_x[0])}
        bad = line.bad_x[:: max(1, len(line.bad_x) // MAX_BAD_SHOWN)]
        look: Look = {"marker": "x", "markersize": 6, "markeredgewidth": 2, "linestyle": ""}
        axes.plot(bad, np.full(len(bad), 0.985), zorder=4, clip_on=False, **look, **at_x)
    elif not is_of_time:
        named = {}
    return "\n".join(f" {text} " for text in named), min(named.values(), default=0.0)


def _draw_note(axes: Axes, note: str, begins: float, up: float, ink: str) -> None:
    """Write a note right of a place on the x axis, left of it where it would leave the axes."""
    box = axes.bbox.transformed(axes.figure.dpi_scale_trans.inverted())
    taken = max(map(width_inches, note.split("\n"))) / box.width
    is_right = begins + taken <= 1.0 or begins < taken
    at = max(min(begins, 1.0 - taken), 0.0) if is_right else begins
    look: Look = {"ha": "left" if is_right else "right", "va": "top", "fontsize": SMALL_POINTS}
    box_look = {"facecolor": "white", "alpha": 0.8, "edgecolor": "none", "pad": 0.5}
    axes.text(at, up, note, color=ink, bbox=box_look, transform=axes.transAxes, **look)


def _end_of(line: Line, is_log: bool) -> tuple[float, float]:
    """Return the last point of the strong line that can be shown."""
    at = int(np.flatnonzero(_can_show(line, is_log))[-1])
    return float(line.x[at]), float(line.y[at])
