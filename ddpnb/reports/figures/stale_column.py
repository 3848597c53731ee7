"""How stale were the gradients of each asynchronous strategy? (kernel)"""

from typing import final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Polygon

from ddpnb.reports.figures.columns import FigureColumn, Row, beside, set_row_text
from ddpnb.reports.figures.series import Series

MAX_SHOWN_STALENESS = 8
"""Greater staleness is counted here."""


@final
class StaleColumn(FigureColumn):
    """The number of updates by their staleness."""

    title = "Staleness"
    below = "updates by others"

    def _new_row(self) -> Row:
        return _Stale(self.axes)

    def _reach(self, series: Series) -> float:
        if len(series.staleness) == 0:
            return 0.0
        return float(min(max(len(series.staleness), 4), MAX_SHOWN_STALENESS + 1))


@final
class _Stale(Row):
    def __init__(self, axes: Axes) -> None:
        self.shape = Polygon(np.zeros((3, 2)), closed=True, zorder=2, linewidth=0)
        axes.add_patch(self.shape)
        self.text = beside(axes)
        super().__init__(axes, (self.shape, self.text))

    def show(self, series: Series, right: float) -> None:
        counts = series.staleness
        self.shape.set_visible(len(counts) > 0)
        if len(counts) == 0:
            set_row_text(self.text, "", self.middle)
            return
        drawn = counts[: MAX_SHOWN_STALENESS + 1].astype(np.float64)
        drawn[-1] += counts[MAX_SHOWN_STALENESS + 1 :].sum()
        tops = 0.84 * drawn / max(drawn.max(), 1.0)
        low = self.middle - 0.42
        x = np.repeat(np.arange(len(drawn)), 4) + np.tile([0.08, 0.08, 0.92, 0.92], len(drawn))
        y = low + np.column_stack([np.zeros(len(tops)), tops, tops, np.zeros(len(tops))]).ravel()
        self.shape.set_xy(np.column_stack([x, y]))
        self.shape.set_facecolor(series.style.colour)
        median = series.summary.staleness_median
        set_row_text(self.text, f"median {median:g}", self.middle)


def centre_staleness_ticks(axes: Axes) -> None:
    """Put each tick below the middle of its bar."""
    shown = range(0, MAX_SHOWN_STALENESS + 1, 2)
    axes.set_xticks([value + 0.5 for value in shown], [str(value) for value in shown])
