"""What do bare axes look like, and where do they end?  (Notebook side.)"""

import math
from collections.abc import Sequence
from typing import final

from matplotlib.axes import Axes
from matplotlib.axis import XAxis
from matplotlib.text import Text
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from ddpnb.notebook.show.theme import FONT_POINTS, INK, MUTED, RULE, SMALL_POINTS
from ddpnb.notebook.show.words import short

ROUND = (1.0, 1.2, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0)
"""Axes end at one of these times a power of ten, so that they seldom change."""
DIGIT_WIDTH, GAP_WIDTH = 0.66, 1.0
"""What a digit takes, and what is kept free between two numbers, as shares of their height."""


def prepare(axes: Axes, title: str, x_label: str, log: bool) -> Text:
    """Give bare axes their look; return the text that is shown while there is nothing else."""
    axes.set_facecolor("none")
    axes.set_title(
        title, loc="left", fontsize=FONT_POINTS, fontweight="bold", color=INK, pad=10, y=1.0
    )  # without y, matplotlib looks for a place above the ticks, a third of the drawing
    axes.set_xlabel(x_label, fontsize=SMALL_POINTS, color=MUTED, labelpad=4)
    for side in ("left", "right", "top"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(MUTED)
    axes.grid(axis="y", color=RULE, linewidth=1.0)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=SMALL_POINTS, labelcolor=MUTED, color=MUTED, length=4)
    axes.tick_params(axis="y", length=0)
    if log:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0), numticks=6))
        axes.yaxis.set_minor_locator(NullLocator())
    else:
        axes.yaxis.set_major_locator(MaxNLocator(nbins=4, steps=[1, 2, 2.5, 5, 10]))
    axes.xaxis.set_major_locator(RoomyLocator(4))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: tick(value)))
    return axes.text(
        0.5,
        0.5,
        "waiting for the first steps",
        ha="center",
        va="center",
        fontsize=SMALL_POINTS,
        color=MUTED,
        transform=axes.transAxes,
        animated=True,
    )


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
