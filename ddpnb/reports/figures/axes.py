"""Code for axes and markers, used for curves and for rows.  Runs in the kernel."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from ddpnb.protocol.catalogue import Style
from ddpnb.reports.formatting import tick
from ddpnb.reports.kit import Look, dress
from ddpnb.results.frames import Row
from ddpnb.results.run import RunSnapshot

LABEL_CHARACTERS = 26
"""Maximum number of characters of a label.  Longer labels are shortened."""
ROUND = (1.0, 1.2, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0)
"""The end of an axis is one of these numbers times a power of ten, so the end rarely changes."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Drawn:
    """A strategy in the figure: its look and its results."""

    style: Style
    row: Row
    """The strategy's row of ``strategies_frame``."""
    runs: Sequence[RunSnapshot]
    """All repeats."""


def prepare_axes(axes: Axes, title: str, *, lines: Literal["x", "y"]) -> None:
    """Give axes the common look of all panels and columns.

    Args:
        axes: the axes.
        title: the title above the axes, at the left.
        lines: the axis with grid lines.
    """
    dress(axes, title=title, grid=lines)
    axes.xaxis.set_major_locator(MaxNLocator(nbins="auto", steps=[1, 2, 5, 10]))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, _: tick(value))


def marker(style: Style) -> Look:
    """Return the look of a marker.  Markers of variants and emulated strategies are hollow."""
    return {
        "marker": style.marker,
        "linestyle": "",
        "markerfacecolor": "white" if style.is_hollow else style.colour,
        "markeredgecolor": style.colour if style.is_hollow else "white",
        "markeredgewidth": 2.0 if style.is_hollow else 1.0,
    }


def shortened(label: str) -> str:
    """Return a label with at most ``LABEL_CHARACTERS`` characters."""
    is_whole = len(label) <= LABEL_CHARACTERS
    return label if is_whole else f"{label[: LABEL_CHARACTERS - 1]}…"


def round_up(value: float) -> float:
    """Return the smallest round number that is at least ``value``; 0 for 0 and NaN.  See ROUND."""
    if not value > 0:
        return 0.0
    unit = 10.0 ** math.floor(math.log10(value))
    return next((step * unit for step in ROUND if step * unit >= value * (1 - 1e-9)), 10 * unit)
