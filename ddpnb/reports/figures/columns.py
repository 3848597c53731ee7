"""Columns with one row per strategy (kernel).

All columns have the same rows, so that each strategy is named once, at the left.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.text import Text

from ddpnb.reports.figures.axes import prepare
from ddpnb.reports.figures.panels import set_live
from ddpnb.reports.figures.series import Series
from ddpnb.reports.style import INK, SMALL_POINTS

BAR = 0.56
"""Height of a bar, as a share of its row."""


class FigureColumn(ABC):
    """One quantity of all strategies; its limit only grows, unless it is a time."""

    title: ClassVar[str]
    below: ClassVar[str] = ""
    """The label below the ticks."""
    is_of_time: ClassVar[bool] = False
    """Whether the column ends at the end of the training."""

    def __init__(self, axes: Axes) -> None:
        self.axes = axes
        self._rows: list[Row] = []
        self._right = 0.0
        self._num_rows = 1
        self._limits = (0, 0.0)
        _prepare(axes, self.title, self.below)

    def update(self, series: Sequence[Series], num_rows: int, seconds: float) -> None:
        """Show one row per series.

        Args:
            series: the strategies that have begun.
            num_rows: the number of rows that there will be.
            seconds: the end of the training.
        """
        self._num_rows = max(num_rows, len(series), 1)
        while len(self._rows) < len(series):
            self._rows.append(self._new_row())
        reach = max(map(self._reach, series), default=0.0)
        if self.is_of_time:
            self._right = max(reach, seconds if reach else 0.0)
        else:
            self._right = max(self._right, reach)
        for index, (row, each) in enumerate(zip(self._rows, series, strict=False)):
            row.place(self._num_rows - index - 0.5)
            row.show_if_new(each, self._right)
        limits = (self._num_rows, self._right or 1.0)
        if limits != self._limits:
            self._limits = limits
            self.axes.set_ylim(0, limits[0])
            self.axes.set_xlim(0, limits[1])
            self.axes.tick_params(labelbottom=self._right > 0)

    def artists(self) -> list[Artist]:
        """Return the artists that may change at an update, from back to front."""
        return [artist for row in self._rows for artist in row.artists]

    @abstractmethod
    def _new_row(self) -> "Row":
        """Return one more row."""

    @abstractmethod
    def _reach(self, series: Series) -> float:
        """Return the right end of a row, rounded up."""


class Row(ABC):
    """The artists of one strategy in one column."""

    def __init__(self, axes: Axes, artists: Sequence[Artist]) -> None:
        self.axes = axes
        self.artists = tuple(artists)
        for artist in artists:
            artist.set_animated(True)
        self.middle = 0.5
        self._shown: tuple[Series, float, float] | None = None

    def place(self, middle: float) -> None:
        """Set the height of the row's middle; the lowest row is centred at 0.5."""
        self.middle = middle

    def show_if_new(self, series: Series, right: float) -> None:
        """Set the artists if anything has changed."""
        shown = (series, self.middle, right)
        if self._shown == shown:
            return
        self._shown = shown
        for artist in self.artists:
            set_live(artist, series.is_live)
        self.show(series, right)

    @abstractmethod
    def show(self, series: Series, right: float) -> None:
        """Set the artists."""


def _prepare(axes: Axes, title: str, below: str) -> None:
    prepare(axes, title, below, pad=8, lines="x", num_ticks=3)
    axes.set_xlabel(below, loc="left")
    axes.spines["bottom"].set_visible(False)
    axes.tick_params(length=0)
    axes.set_yticks([])
    axes.set_navigate(False)  # a zoom would not move the texts beside the rows


def rectangle(axes: Axes, **look: object) -> Rectangle:
    """Add and return a bar without a place."""
    made = Rectangle((0, 0), 0, 0, zorder=2, **look)  # type: ignore[arg-type]
    axes.add_patch(made)
    return made


def line(axes: Axes, **look: object) -> Line2D:
    """Add and return a line, or markers, without data."""
    return axes.add_line(Line2D([], [], zorder=3, clip_on=False, **look))  # type: ignore[arg-type]


def beside(axes: Axes) -> Text:
    """Add and return a text at the right of a row."""
    return axes.text(
        1.03,
        0,
        "",
        fontsize=SMALL_POINTS,
        color=INK,
        va="center",
        transform=axes.get_yaxis_transform(),
    )


def set_row_text(artist: Text, text: str, middle: float) -> None:
    """Set the text at the right of a row."""
    artist.set_text(text)
    artist.set_y(middle - 0.02)


def place(bar: Rectangle, left: float, low: float, width: float, height: float) -> None:
    """Set the place of a bar; hide it if it has no width."""
    is_shown = math.isfinite(width) and width > 0
    bar.set_visible(is_shown)
    if is_shown:
        bar.set_bounds(left, low, width, height)
