"""What curves and rows share: their strategies, the look of axes, the ends of scales (kernel)."""

import math
from dataclasses import dataclass
from typing import Literal

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator

from ddpnb.history.summary import StrategySummary
from ddpnb.reports.formatting import tick
from ddpnb.reports.kit import DPI, Look, dress
from ddpnb.reports.style import SMALL_POINTS, Style

LABEL_CHARACTERS = 26
"""Maximum length of a label; a longer one is shortened."""
ROUND = (1.0, 1.2, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0)
"""An axis ends at one of these times a power of ten, so that it seldom changes."""
TICK_WIDTH = 3.0
"""Least distance of the ticks of an x axis, as a multiple of their numbers' height."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Strategy:
    """One strategy of the figure."""

    style: Style
    summary: StrategySummary


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


def marker(style: Style) -> Look:
    """Return the look of a strategy's marker: an outline, where it is a variant or emulated."""
    return {
        "marker": style.marker,
        "linestyle": "",
        "markerfacecolor": "white" if style.is_hollow else style.colour,
        "markeredgecolor": style.colour if style.is_hollow else "white",
        "markeredgewidth": 2.0 if style.is_hollow else 1.0,
    }


def shortened(label: str) -> str:
    """Return a label of at most ``LABEL_CHARACTERS``."""
    is_whole = len(label) <= LABEL_CHARACTERS
    return label if is_whole else f"{label[: LABEL_CHARACTERS - 1]}…"


# -- ends of scales ------------------------------------------------------------------------


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
