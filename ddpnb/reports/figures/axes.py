"""What do bare axes look like, and where do they end?  (Notebook side.)"""

import math
from collections.abc import Sequence
from typing import Literal, final

from matplotlib.axes import Axes
from matplotlib.axis import XAxis
from matplotlib.ticker import FuncFormatter, MaxNLocator

from ddpnb.reports.formatting import short
from ddpnb.reports.style import FONT_POINTS, INK, MUTED, RULE, SMALL_POINTS
from ddpnb.runs.comparison import Comparison
from ddpnb.runs.model import RunSnapshot

ROUND = (1.0, 1.2, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0)
"""Axes end at one of these times a power of ten, so that they seldom change."""
DIGIT_WIDTH, GAP_WIDTH = 0.66, 1.0
"""What a digit takes, and what is kept free between two numbers, as shares of their height."""


LEAST_SHARE = 0.02
"""Of a run, from which on its length is estimated."""

SLACK = 1.1
"""How much longer than estimated the axis is at first: rates vary."""

LONGEST = 1.7
"""How many times too long it may be before it is cut."""


def prepare(
    axes: Axes, title: str, x_label: str, *, pad: float, lines: Literal["x", "y"], num_ticks: int
) -> None:
    """Give bare axes the look that all share.

    Args:
        axes: whose look it is.
        title: stands above, at the left.
        x_label: stands below.
        pad: points between the title and the axes.
        lines: which axis has grid lines.
        num_ticks: at most so many numbers stand below.
    """
    axes.set_facecolor("none")
    axes.set_title(
        title, loc="left", fontsize=FONT_POINTS, fontweight="bold", color=INK, pad=pad, y=1.0
    )  # without y, matplotlib looks for a place above the ticks, a third of the drawing
    axes.set_xlabel(x_label, fontsize=SMALL_POINTS, color=MUTED, labelpad=4)
    for side in ("left", "right", "top"):
        axes.spines[side].set_visible(False)
    axes.grid(axis=lines, color=RULE, linewidth=1.0)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=SMALL_POINTS, labelcolor=MUTED, color=MUTED)
    axes.xaxis.set_major_locator(RoomyLocator(num_ticks))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: tick(value)))


@final
class RoomyLocator(MaxNLocator):
    """At most so many round numbers, and fewer where their words would nearly touch."""

    def __init__(self, nbins: int) -> None:
        super().__init__(nbins=nbins, steps=[1, 2, 2.5, 5, 10])
        self._most = nbins

    def tick_values(self, vmin: float, vmax: float) -> Sequence[float]:
        """Return where numbers stand between two ends."""
        assert isinstance(self.axis, XAxis)
        points = self.axis.axes.bbox.width * 72 / self.axis.axes.figure.dpi
        for most in range(self._most, 0, -1):
            self.set_params(nbins=most)
            values = super().tick_values(vmin, vmax)
            shown = [value for value in values if vmin <= value <= vmax]
            longest = max((len(tick(value)) for value in shown), default=0)
            needed = (longest * DIGIT_WIDTH + GAP_WIDTH) * SMALL_POINTS
            if len(shown) < 2 or points * (shown[1] - shown[0]) / (vmax - vmin) >= needed:
                break
        return values


def draw_target(axes: Axes, target: float) -> None:
    """Draw a line across at ``target``; what it is stands at the upper right, far from losses."""
    line = axes.axhline(target, color=INK, linewidth=1.2, linestyle=(0, (4, 3)), zorder=1.5)
    axes.legend(
        [line],
        [f"target {tick(target)}"],
        loc="upper right",
        bbox_to_anchor=(1.0, 0.97),
        borderaxespad=0,
        borderpad=0.1,
        handlelength=1.6,
        handletextpad=0.5,
        fontsize=SMALL_POINTS,
        labelcolor=INK,
        frameon=False,
    )


def tick(value: float) -> str:
    """Return a number as it stands at an axis: short, without zeros at its end."""
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


def planned_samples(comparison: Comparison) -> int:
    """Return up to which sample the longest run will see; of runs that are over, has seen."""
    known = [(run, run.header) for run in comparison.runs if run.header is not None]
    if any(run.is_running for run, _ in known):
        return max(header.num_samples_before + header.num_samples for _, header in known)
    return max((run.num_samples_before + run.aggregate.num_samples for run, _ in known), default=0)


def planned_seconds(comparison: Comparison, shown: float) -> float:
    """Return where an axis of seconds ends, at a round number.

    Args:
        comparison: what is shown.
        shown: where the axis has ended so far; kept while it fits.
    """
    longest = max(map(_seconds_of, comparison.runs), default=0.0)
    if not any(run.is_running for run in comparison.runs):
        return round_up(longest)
    if longest <= shown <= LONGEST * longest:
        return shown
    return round_up(SLACK * longest)


def _seconds_of(run: RunSnapshot) -> float:
    """Return how long a run has taken, or as far as can be told, will have taken."""
    seconds = run.aggregate.seconds
    if not run.is_running or run.header is None or run.header.num_samples == 0:
        return seconds
    share = run.aggregate.num_samples / run.header.num_samples
    return seconds / share if LEAST_SHARE <= share < 1 else seconds
