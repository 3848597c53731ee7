"""The look of axes, and the ends of their scales (kernel)."""

import math
from typing import Any, Literal

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator

from ddpnb.history.comparison import Comparison
from ddpnb.history.model import RunSnapshot
from ddpnb.reports.formatting import short
from ddpnb.reports.kit import DPI, dress
from ddpnb.reports.style import INK, SMALL_POINTS, Style

ROUND = (1.0, 1.2, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0)
"""An axis ends at one of these times a power of ten, so that it seldom changes."""
TICK_WIDTH = 3.0
"""Least distance of the ticks of an x axis, as a multiple of their numbers' height."""

LEAST_SHARE = 0.02
"""The share of a run from which on its duration is estimated, and all of it has a place."""

SLACK = 1.1
"""The length of an axis over the estimated duration at first, because rates vary."""

LONGEST = 1.7
"""An axis longer than this, over the estimated duration, is shortened."""

Look = dict[str, Any]
"""Arguments for matplotlib."""


def prepare(axes: Axes, title: str, *, lines: Literal["x", "y"], num_ticks: int) -> None:
    """Give axes the look that all panels and columns share.

    Args:
        axes: the axes.
        title: shown above, at the left.
        lines: the axis that has grid lines.
        num_ticks: the maximum number of ticks on the x axis.
    """
    dress(axes, title=title, grid=lines)
    num_places = int(axes.bbox.width * 72 / DPI / (TICK_WIDTH * SMALL_POINTS))
    nbins = max(1, min(num_ticks, num_places))
    axes.xaxis.set_major_locator(MaxNLocator(nbins=nbins, steps=[1, 2, 5, 10]))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: tick(value)))


def draw_target(axes: Axes, target: float, *, is_reached_from_below: bool = False) -> None:
    """Draw a line across at ``target``, with its label at the right, far from the curves."""
    axes.axhline(target, color=INK, linewidth=1.2, linestyle=(0, (4, 3)), zorder=1.5)
    up, va = (0.03, "bottom") if is_reached_from_below else (0.97, "top")
    look: Look = {"ha": "right", "va": va, "fontsize": SMALL_POINTS, "color": INK}
    axes.text(1.0, up, f"- - target {tick(target)}", transform=axes.transAxes, **look)


def marker(style: Style) -> Look:
    """Return the look of a strategy's marker: an outline, where it is a variant or emulated."""
    return {
        "marker": style.marker,
        "linestyle": "",
        "markerfacecolor": "white" if style.is_hollow else style.colour,
        "markeredgecolor": style.colour if style.is_hollow else "white",
        "markeredgewidth": 2.0 if style.is_hollow else 1.0,
    }


def tick(value: float) -> str:
    """Return the label of a tick: short, without trailing zeros."""
    text = short(value)
    number, unit = (text[:-1], text[-1]) if text[-1] in "kMGT" else (text, "")
    return (number.rstrip("0").rstrip(".") if "." in number else number) + unit


def round_down(value: float) -> float:
    """Return the next round number at or below ``value``, which is positive."""
    unit = 10.0 ** math.floor(math.log10(value))
    return max(step * unit for step in ROUND if step * unit <= value * (1 + 1e-9))


def round_up(value: float) -> float:
    """Return the next round number at or above ``value``."""
    if value <= 0:
        return 0.0
    unit = 10.0 ** math.floor(math.log10(value))
    return next((step * unit for step in ROUND if step * unit >= value * (1 - 1e-9)), 10 * unit)


def planned_samples(comparison: Comparison) -> float:
    """Return the end of an axis of samples: those of the longest run, as planned while it trains.

    Of a plan that has only just begun, so much is shown as there is to see.
    """
    known = [(run, run.header) for run in comparison.runs if run.header is not None]
    seen = max((run.num_samples for run, _ in known), default=0)
    if not any(run.is_running for run, _ in known):
        return seen
    planned = max(header.num_samples for _, header in known)
    return planned if seen >= LEAST_SHARE * planned else round_up(SLACK * seen)


def planned_seconds(comparison: Comparison, shown: float) -> float:
    """Return the end of an axis of seconds, a round number.

    Args:
        comparison: the runs.
        shown: the end of the axis so far, kept while it fits.
    """
    longest = max(map(_seconds_of, comparison.runs), default=0.0)
    if not any(run.is_running for run in comparison.runs):
        return round_up(longest)
    if longest <= shown <= LONGEST * longest:
        return shown
    return round_up(SLACK * longest)


def _seconds_of(run: RunSnapshot) -> float:
    """Return the duration of a run, estimated while it trains."""
    seconds = run.seconds
    if not run.is_running or run.header is None or run.header.num_samples == 0:
        return seconds
    share = run.num_samples / run.header.num_samples
    return seconds / share if LEAST_SHARE <= share < 1 else seconds
