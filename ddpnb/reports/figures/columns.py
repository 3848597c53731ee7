"""The columns below the curves, one row per strategy, and the names of their rows (kernel)."""

from collections.abc import Sequence
from typing import final

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.text import Text

from ddpnb.history.comparison import Comparison
from ddpnb.history.metrics import absences, slowness
from ddpnb.history.model import RunSnapshot
from ddpnb.history.summary import group_runs, memory_of
from ddpnb.protocol.catalogue import BASELINE, CEILING, STRATEGIES
from ddpnb.reports.figures.layout import NAMES_LEFT, WIDTH, Layout, shortened
from ddpnb.reports.figures.rows import SLOW, MemoryRow, RankRow, RateRow, Row, SplitRow, StaleRow
from ddpnb.reports.figures.series import Series
from ddpnb.reports.style import MUTED, SMALL_POINTS, Style, style_of

MOST_COLUMNS = 4
LEAST_DIFFERENCE = 1.1
"""How many times as much memory is worth a column."""


def memory_differs(comparison: Comparison) -> bool:
    """Return whether a rank of one strategy holds more than that of another.

    ``single``, whose batch is whole, and the ceiling are not looked at.
    """
    groups = group_runs(comparison.runs).items()
    others = [r for (_, name), r in groups if name.partition(":")[0] not in (BASELINE, CEILING)]
    totals = [total for runs in others if (total := memory_of(runs).total)]
    return max(totals, default=0) > LEAST_DIFFERENCE * min(totals, default=0)


def has_detail(comparison: Comparison) -> bool:
    """Return whether there is, or will be, more to show than curves."""
    return bool(comparison.specs) or any(map(_is_split, comparison.runs))


@final
class Detail:
    """One row per strategy: its name, its speed, its step, its ranks, its staleness.

    Args:
        figure: the figure.
        layout: the places in the figure.
        comparison: decides on the columns: while it trains, those that may be filled; when it
            has ended, those that are filled.
    """

    def __init__(self, figure: Figure, layout: Layout, comparison: Comparison) -> None:
        self._figure = figure
        self._layout = layout
        self._names: list[_Name] = []
        kinds: list[type[Row]] = [RateRow]
        may_come = len(comparison.specs) > sum(not run.is_running for run in comparison.all_runs)
        if may_come or any(map(_is_split, comparison.runs)):
            kinds.append(SplitRow)
        if may_come or any(len(run.ranks) > 1 for run in comparison.runs):
            kinds.append(RankRow)
        planned = [STRATEGIES.get(s.strategy.partition(":")[0]) for s in comparison.specs]
        may_be_stale = may_come and any(entry and entry.is_asynchronous for entry in planned)
        if may_be_stale or any(len(run.staleness) for run in comparison.runs):
            kinds.append(StaleRow)
        self.has_memory = memory_differs(comparison)
        if self.has_memory:
            kinds.append(MemoryRow)
        if len(kinds) > MOST_COLUMNS:  # memory is in the table too
            kinds.remove(RankRow if all(map(_is_even, comparison.runs)) else MemoryRow)
        self._columns = [FigureColumn(figure.add_axes((0, 0, 1, 1)), kind) for kind in kinds]

    def update(self, comparison: Comparison, series: Sequence[Series], seconds: float) -> None:
        """Show the comparison as it is now, with the names of its planned strategies.

        Args:
            comparison: all strategies.
            series: those that have begun.
            seconds: the duration of the longest run.
        """
        rows = [(each.label, each.style) for each in series]
        begun = {each.summary.name for each in series}
        rows += [
            (name, style_of(name, comparison.strategies))
            for name in comparison.strategies
            if name not in begun
        ]
        num_rows = max(len(rows), self._layout.num_strategies)
        while len(self._names) < len(rows):
            self._names.append(_Name(self._figure))
        for index, (name, (label, style)) in enumerate(zip(self._names, rows, strict=True)):
            middle = self._layout.row_middle(index, num_rows)
            name.show(label, style, middle, is_begun=index < len(series))
        for column in self._columns:
            column.update(series, num_rows, seconds)

    def make_room(self, name_width: float) -> None:
        """Place the columns; ``name_width`` is the width of the widest name in inches."""
        rooms = [column.kind.room for column in self._columns]
        boxes = self._layout.rows(name_width, rooms)
        for column, box in zip(self._columns, boxes, strict=True):
            column.axes.set_position(box)

    def artists(self) -> list[Artist]:
        """Return the artists that may change at an update, from back to front."""
        return [artist for column in self._columns for artist in column.artists()]


@final
class FigureColumn:
    """One quantity of all strategies; its limit only grows, unless it is a time."""

    def __init__(self, axes: Axes, kind: type[Row]) -> None:
        self.axes = axes
        self.kind = kind
        self._rows: list[Row] = []
        self._right = 0.0
        self._limits = (0, 0.0)
        kind.prepare(axes)

    def update(self, series: Sequence[Series], num_rows: int, seconds: float) -> None:
        """Show one row per series.

        Args:
            series: the strategies that have begun.
            num_rows: the number of rows that there will be.
            seconds: the end of the training.
        """
        while len(self._rows) < len(series):
            self._rows.append(self.kind(self.axes))
        for index, (row, each) in enumerate(zip(self._rows, series, strict=False)):
            row.update(each, num_rows - index - 0.5)
        reach = max(map(self.kind.reach, series), default=0.0)
        if self.kind.is_of_time:
            self._right = max(reach, seconds if reach else 0.0)
        else:
            self._right = max(self._right, reach)
        legend = self.kind.legend(series)
        if legend != self.axes.get_xlabel():
            self.axes.set_xlabel(legend, loc="left")
        limits = (num_rows, self._right or 1.0)
        if limits != self._limits:
            self._limits = limits
            self.axes.set_ylim(0, limits[0])
            self.axes.set_xlim(0, limits[1])
            self.axes.tick_params(labelbottom=self._right > 0)

    def artists(self) -> list[Artist]:
        """Return the artists that may change at an update, from back to front."""
        return [artist for row in self._rows for artist in row.artists]


@final
class _Name:
    """A strategy's marker, line and name at the left of its row."""

    def __init__(self, figure: Figure) -> None:
        self._left = NAMES_LEFT / WIDTH
        self._line = Line2D([], [], linewidth=2.6, markersize=9, transform=figure.transFigure)
        figure.add_artist(self._line)
        self._text: Text = figure.text(0, 0, "", fontsize=SMALL_POINTS, va="center")
        self._shown: tuple[object, ...] = ()

    def show(self, label: str, style: Style, middle: float, *, is_begun: bool) -> None:
        shown = (label, style, middle, is_begun)
        if shown == self._shown:
            return
        self._shown = shown
        self._line.set_data([self._left], [middle])
        self._line.set_marker(style.marker)
        self._line.set_markerfacecolor("white" if style.is_hollow else style.colour)
        self._line.set_markeredgecolor(style.colour)
        self._line.set_markeredgewidth(2.0 if style.is_hollow else 1.0)
        self._line.set_alpha(1.0 if is_begun else 0.45)
        self._text.set_position((self._left + 0.2 / WIDTH, middle))
        self._text.set_text(shortened(label))
        self._text.set_color(style.ink if is_begun else MUTED)
        self._text.set_fontweight("bold" if is_begun else "normal")


def _is_even(run: RunSnapshot) -> bool:
    """Return whether no rank was slow or away."""
    times = slowness(run.ranks).values()
    return max(times, default=0.0) < SLOW and not absences(run)


def _is_split(run: RunSnapshot) -> bool:
    return any(any(rank.parts) for rank in run.ranks)
