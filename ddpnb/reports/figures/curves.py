"""Draws a panel with the curves of one quantity, such as the loss, for all strategies.

If there is one run, the strong line is its moving average, and the faint line shows every update.
If there are several repeats, the strong line is their median, and each faint line is a repeat.
Runs in the kernel.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator
from numpy.typing import NDArray

from ddpnb.reports.figures.axes import Drawn, marker, prepare_axes, round_up, shortened
from ddpnb.reports.formatting import tick
from ddpnb.reports.kit import Look
from ddpnb.reports.style import INK, LINES, MUTED, SMALL_POINTS, ink_of
from ddpnb.results.curve import smoothed
from ddpnb.results.rows import Floats
from ddpnb.results.run import RunSnapshot

GRID_POINTS = 240
"""Number of points of the line that shows the median of repeats."""
LABEL_GAP_POINTS = SMALL_POINTS * 1.35
LEADER_INCHES = (0.02, 0.07, 0.16, 0.19)
"""Distances from the axes in inches: a leader line's start, bend and end, and its label's start."""
MAX_NAMED = 2
"""Maximum number of a strategy's events, such as the death of a rank, that have a label."""

Points = tuple[Floats, Floats]
"""The x coordinates and the y coordinates of points."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Line:
    """The strong line and the faint lines of one strategy in one panel."""

    x: Floats
    y: Floats
    faint_x: Floats
    faint_y: Floats
    bad_x: Floats = field(default_factory=lambda: np.empty(0))
    """The x coordinates of NaN or infinite losses."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class CurvePanel:
    """The content of one panel."""

    title: str
    lines: Sequence[tuple[Drawn, Line]]
    x: str
    """The quantity on the x axis, ``"samples"`` or ``"seconds"``."""
    log: bool = False
    target: float | None = None
    """The target, drawn as a horizontal line.  None if there is no target in this panel."""
    is_share: bool = False
    """True if y is a share.  The y axis then begins near the lowest share and ends at 1."""


# -- lines ---------------------------------------------------------------------------------


def losses(runs: Sequence[RunSnapshot], x: str) -> Line:
    """Return a ``Line`` of the training loss.  ``x`` is ``"samples"`` or ``"seconds"``."""
    curves = [run.curve for run in runs if len(run.curve)]
    if x == "samples":  # a hand-written loop may not count samples
        curves = [curve for curve in curves if curve.samples[-1] > 0]
    ats: list[Floats] = [getattr(curve, x) for curve in curves]
    pairs = list(zip(ats, curves, strict=True))
    raw = [  # lines through the lowest and the highest loss of each point
        (np.repeat(at, 2), np.column_stack([curve.lowest, curve.highest]).ravel())
        for at, curve in pairs
    ]
    bad = [at[curve.num_bad > 0] for at, curve in pairs]
    line = _line([(at, smoothed(curve)) for at, curve in pairs], raw)
    return replace(line, bad_x=np.concatenate([np.empty(0), *bad]))


def held_out(runs: Sequence[RunSnapshot], x: str, y: str) -> Line:
    """Return a ``Line`` of held-out loss or accuracy (``y``) over samples or seconds (``x``)."""
    across = {"samples": "num_samples", "seconds": "seconds"}[x]
    found = [[(getattr(e, across), getattr(e, y)) for e in run.evaluations] for run in runs]
    arrays = [np.array(points) for points in found if points]
    lines = [(each[:, 0], each[:, 1]) for each in arrays if np.isfinite(each[:, 1]).any()]
    line = _line(lines)
    if len(lines) < 2 or len({len(x) for x, _ in lines}) > 1:
        return line
    medians = [np.median(np.array(each), axis=0) for each in zip(*lines, strict=True)]
    return replace(line, x=medians[0], y=medians[1])  # point n: the median of all points n


def _line(strong: Sequence[Points], raw: Sequence[Points] = ()) -> Line:
    """Return a ``Line``: one run with its ``raw`` points, or the median of several repeats."""
    gap = np.array([np.nan])
    faint = [
        each for points in (strong if len(strong) > 1 else raw) for each in (points, (gap, gap))
    ]
    faint_x, faint_y = (
        np.concatenate([gap, *each]) for each in zip((gap, gap), *faint, strict=True)
    )
    x, y = strong[0] if len(strong) == 1 else _median(strong)
    return Line(x=x, y=y, faint_x=faint_x, faint_y=faint_y)


def _median(lines: Sequence[Points]) -> Points:
    """Return the median of several lines, at each x that at least half of these lines reach."""
    if not lines:
        return np.empty(0), np.empty(0)
    first = min(float(x[0]) for x, _ in lines)
    last = max(float(x[-1]) for x, _ in lines)
    grid = np.linspace(first, last, GRID_POINTS)
    values = np.array([np.interp(grid, x, y, left=np.nan, right=np.nan) for x, y in lines])
    num_known = np.count_nonzero(~np.isnan(values), axis=0)
    known = (num_known > 0) & (2 * num_known >= len(lines))
    return grid[known], np.nanmedian(values[:, known], axis=0)


# -- panels --------------------------------------------------------------------------------


def draw_curves(axes: Axes, panel: CurvePanel) -> None:
    """Draw the lines of all strategies on empty axes, and write the names at the right."""
    axes.set_yscale("log" if panel.log else "linear")
    prepare_axes(axes, panel.title, lines="y")
    axes.tick_params(axis="y", length=0)
    axes.yaxis.set_minor_locator(NullLocator())
    logarithmic = LogLocator(subs=(1.0, 2.0, 5.0), numticks=6)
    linear = MaxNLocator(nbins=4, steps=[1, 2, 2.5, 5, 10])
    axes.yaxis.set_major_locator(logarithmic if panel.log else linear)
    if panel.target is not None:
        _draw_target(axes, panel.target, is_reached_from_below=panel.is_share)
    shown = [each for each in panel.lines if _can_show(each[1], panel.log).any()]
    longest = max((float(np.nanmax(line.x)) for _, line in shown), default=0.0)
    right = round_up(longest) or 1.0
    axes.set(xlim=(0.0, right), ylim=_y_limits(panel, [line for _, line in shown]))
    if not shown:
        look: Look = {"ha": "center", "va": "center", "fontsize": SMALL_POINTS, "color": MUTED}
        axes.text(0.5, 0.5, "waiting for the first steps", transform=axes.transAxes, **look)
        axes.tick_params(labelbottom=False, labelleft=False)
        return
    for strategy, line in shown:
        colour, dashes = strategy.style.colour, LINES[strategy.style.dashes]
        axes.plot(line.faint_x, line.faint_y, color=colour, linewidth=1.0, alpha=0.28, zorder=2)
        axes.plot(line.x, line.y, color=colour, linestyle=dashes, linewidth=2.6, zorder=3)
    _draw_labels(axes, shown, panel.log)
    up = 0.3 if panel.is_share else 0.94  # a height with few lines
    for strategy, line in panel.lines:
        up -= 0.09 * _draw_events(axes, strategy, line, panel.x, up)


def _draw_target(axes: Axes, target: float, *, is_reached_from_below: bool) -> None:
    """Draw a horizontal line at ``target``.  The label is at the right, far from curves."""
    axes.axhline(target, color=INK, linewidth=1.2, linestyle=(0, (4, 3)), zorder=1.5)
    up, va = (0.03, "bottom") if is_reached_from_below else (0.97, "top")
    look: Look = {"ha": "right", "va": va, "fontsize": SMALL_POINTS, "color": INK}
    axes.text(1.0, up, f"- - target {tick(target)}", transform=axes.transAxes, **look)


def _can_show(line: Line, is_log: bool) -> NDArray[np.bool_]:
    """Return a mask that selects the points of the strong line that the y axis can show."""
    return np.isfinite(line.y) & (line.y > (0 if is_log else -math.inf))


def _y_limits(panel: CurvePanel, lines: Sequence[Line]) -> tuple[float, float]:
    """Return the lower and upper end of the y axis, so that it shows all lines and the target."""
    ends = [end for line in lines for end in _extent(line, panel.log)]
    ends += [] if panel.target is None else [panel.target]
    low, top = min(ends, default=0.0), round_up(1.04 * max(ends, default=0.0))
    if panel.is_share:
        return 1.0 - round_up((1.0 - low) * 1.04), 1.0
    bottom = 0.9 * low or 0.1 if panel.log else -round_up(-min(0.0, low))
    return bottom, top if top > bottom else bottom + 1.0


def _extent(line: Line, is_log: bool) -> tuple[float, float]:
    """Return the smallest and the largest y of a ``Line``.  Ignore outliers of the faint lines."""
    strong = line.y[_can_show(line, is_log)]
    faint = line.faint_y[np.isfinite(line.faint_y)]
    faint = faint[faint > 0] if is_log else faint
    ends = np.append(strong, np.quantile(faint, (0.01, 0.99)) if len(faint) else [])
    return float(ends.min()), float(ends.max())


def _draw_labels(axes: Axes, shown: Sequence[tuple[Drawn, Line]], is_log: bool) -> None:
    """Mark the end of each line, and write the names right of the axes without overlap."""
    box = axes.bbox.transformed(axes.figure.dpi_scale_trans.inverted())
    to_share = axes.transData - axes.transAxes
    at_end = [(line, np.flatnonzero(_can_show(line, is_log))[-1]) for _, line in shown]
    ends = [(float(line.x[at]), float(line.y[at])) for line, at in at_end]
    inside = [min(max(float(to_share.transform(end)[1]), 0.0), 1.0) for end in ends]
    placed = spread_out(inside, LABEL_GAP_POINTS / (box.height * 72), 0.02, 1.0)
    at = [1 + inches / box.width for inches in LEADER_INCHES]
    whole: Look = {"transform": axes.transAxes, "clip_on": False}
    for (each, _), end, begins, label_at in zip(shown, ends, inside, placed, strict=True):
        style, leader = each.style, [begins, begins, label_at]
        axes.plot(at[:3], leader, color=style.colour, linewidth=1.0, alpha=0.7, zorder=1, **whole)
        axes.plot(*end, markersize=8, zorder=4, clip_on=False, **marker(style))
        label: Look = {"fontsize": SMALL_POINTS, "color": ink_of(style), "va": "center", **whole}
        axes.text(at[3], label_at, shortened(each.row["label"]), **label)


def spread_out(
    wanted: Sequence[float], gap: float, low: float = 0.0, high: float = 1.0
) -> list[float]:
    """Move positions apart so that labels do not overlap, and keep their order.

    All positions are then between ``low`` and ``high``.  Neighbours are at least ``gap`` apart, or
    closer if there is too little space.  Each position is the mean of its positions in two layouts.
    The first layout only moves positions up, and the second only moves them down.
    """
    gap = min(gap, (high - low) / max(len(wanted) - 1, 1))
    order, apart = np.argsort(wanted, kind="stable"), gap * np.arange(len(wanted))
    packed = np.array(wanted)[order] - apart  # the layouts make this array non-decreasing
    up, down = np.maximum.accumulate(packed), np.minimum.accumulate(packed[::-1])[::-1]
    placed = np.empty(len(wanted))
    placed[order] = np.clip((up + down) / 2, low, high - gap * (len(wanted) - 1)) + apart
    return list(map(float, placed))


def _draw_events(axes: Axes, strategy: Drawn, line: Line, x: str, up: float) -> int:
    """Draw the events of a strategy's runs.  Return the number of text lines of the label.

    NaN or infinite losses are drawn as crosses at the top, other events as vertical lines.  The
    label's top is at the height ``up``, a share of the axes' height.
    """
    at_x: Look = {"transform": axes.get_xaxis_transform(), "color": strategy.style.colour}
    marks = {
        f" rank {mark.rank}: {mark.text} ": float(np.interp(mark.seconds, seconds, quantity))
        for run in strategy.runs
        for seconds, quantity in [(run.curve.seconds, getattr(run.curve, x))]
        for mark in run.marks
        if mark.seconds > 0 and len(seconds)
    }
    for at in marks.values():
        axes.plot([at, at], [0, 1], linewidth=1.4, linestyle=":", zorder=3, **at_x)
    named = sorted(marks, key=lambda text: marks[text])[-MAX_NAMED:] if x == "seconds" else []
    begins = min((marks[text] for text in named), default=0.0)
    if len(line.bad_x):
        look: Look = {"marker": "x", "markersize": 6, "markeredgewidth": 2, "linestyle": ""}
        heights = np.full(len(line.bad_x), 0.985)
        axes.plot(line.bad_x, heights, zorder=4, clip_on=False, **look, **at_x)
        named, begins = [" NaN or ∞ "], float(line.bad_x[0])
    if named:
        side = "left" if begins < axes.get_xlim()[1] / 2 else "right"
        box = {"facecolor": "white", "alpha": 0.8, "edgecolor": "none", "pad": 0.5}
        look = {**at_x, "color": ink_of(strategy.style), "fontsize": SMALL_POINTS}
        axes.text(begins, up, "\n".join(named), ha=side, va="top", bbox=box, **look)
    return len(named)
