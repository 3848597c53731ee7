"""How fast is each strategy, and how fast could it be? (kernel)"""

import math
from collections.abc import Sequence
from typing import final

from matplotlib.axes import Axes

from ddpnb.reports.figures.axes import round_up
from ddpnb.reports.figures.columns import (
    BAR,
    FigureColumn,
    Row,
    beside,
    line,
    place,
    rectangle,
    set_row_text,
)
from ddpnb.reports.figures.series import Series
from ddpnb.reports.formatting import percent, short
from ddpnb.reports.style import INK, MUTED


@final
class RateColumn(FigureColumn):
    """Samples per second: a bar, its range, the ideal as an outline, the ceiling as a tick."""

    title = "Samples per second"

    def update(self, series: Sequence[Series], num_rows: int, seconds: float) -> None:
        """Show one row per series, with a legend if there are outlines or ticks."""
        super().update(series, num_rows, seconds)
        has_ideal = any(ideal_of(each) > 0 for each in series)
        has_ceiling = any(math.isfinite(each.summary.share_of_ceiling) for each in series)
        if has_ceiling:
            legend = "outline: ideal  ┃ no-comm" if has_ideal else "┃ no-comm"
        else:
            legend = "outline: workers × single" if has_ideal else ""
        if legend != self.axes.get_xlabel():
            self.axes.set_xlabel(legend, loc="left")

    def _new_row(self) -> Row:
        return _Rate(self.axes)

    def _reach(self, series: Series) -> float:
        speed = series.summary.samples_per_second
        values = (speed.middle, speed.high, ideal_of(series))
        return round_up(
            max((value for value in values if math.isfinite(value)), default=0.0) * 1.01
        )


@final
class _Rate(Row):
    def __init__(self, axes: Axes) -> None:
        self.bar = rectangle(axes, linewidth=0)
        self.ideal = rectangle(axes, facecolor="none", edgecolor=MUTED, linewidth=1.0)
        self.range = line(axes, color=INK, linewidth=1.6)
        self.ceiling = line(axes, color=INK, linewidth=3.0)
        self.text = beside(axes)
        super().__init__(axes, (self.bar, self.ideal, self.range, self.ceiling, self.text))

    def show(self, series: Series, right: float) -> None:
        summary, low = series.summary, self.middle - BAR / 2
        speed = summary.samples_per_second
        place(self.bar, 0, low, speed.middle, BAR)
        self.bar.set_facecolor(series.style.colour)
        place(self.ideal, 0, low, ideal_of(series), BAR)
        self.range.set_data([speed.low, speed.high], [self.middle, self.middle])
        at = speed.middle / summary.share_of_ceiling
        is_own = summary.share_of_ceiling == 1.0
        self.ceiling.set_data([] if is_own else [at, at], [] if is_own else [low, low + BAR])
        parts = [short(speed.middle)] if math.isfinite(speed.middle) else []
        if math.isfinite(summary.speed_up) and summary.speed_up != 1.0:
            parts.append(f"{summary.speed_up:.2f}×")
            parts += [percent(summary.efficiency)] if summary.num_workers > 1 else []
        set_row_text(self.text, "  ".join(parts), self.middle)


def ideal_of(series: Series) -> float:
    """Return the speed of ``single`` times the number of workers."""
    summary = series.summary
    if summary.num_workers < 2:
        return math.nan
    return summary.samples_per_second.middle / summary.efficiency if summary.efficiency else 0.0
