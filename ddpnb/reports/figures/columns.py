"""How are strategies drawn one below the other?  (Notebook side.)

Every column has the same rows, so a strategy is named but once, at the left.
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
"""Height of a bar, of its row."""


class FigureColumn(ABC):
    """One quantity of all strategies; its limits only ever grow, unless they are of time."""

    title: ClassVar[str]
    below: ClassVar[str] = ""
    """What stands below the ticks."""
    is_of_time: ClassVar[bool] = False
    """Whether it reaches as far as the training will last."""

    def __init__(self, axes: Axes) -> None:
        self.axes = axes
        self._rows: list[Row] = []
        self._right = 0.0
        self._num_rows = 1
        self._limits = (0, 0.0)
        _prepare(axes, self.title, self.below)

    def update(self, series: Sequence[Series], num_rows: int, seconds: float) -> None:
        """Show one row per series, of ``num_rows`` that there will be, in so many seconds."""
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
        """Return what may change at an update, from back to front."""
        return [artist for row in self._rows for artist in row.artists]

    @abstractmethod
    def _new_row(self) -> "Row":
        """Make the artists of one more row."""

    @abstractmethod
    def _reach(self, series: Series) -> float:
        """Return how far to the right a row goes, rounded up."""


class Row(ABC):
    """The artists of one strategy in one column; row 0 ends at the bottom."""

    def __init__(self, axes: Axes, artists: Sequence[Artist]) -> None:
        self.axes = axes
        self.artists = tuple(artists)
        for artist in artists:
            artist.set_animated(True)
        self.middle = 0.5
        self._shown: tuple[Series, float, float] | None = None

    def place(self, middle: float) -> None:
        """Put the row at this height."""
        self.middle = middle

    def show_if_new(self, series: Series, right: float) -> None:
        """Set the artists, where anything has changed."""
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
    axes.set_navigate(False)  # there is nothing to zoom into, and what stands beside would stay


def rectangle(axes: Axes, **look: object) -> Rectangle:
    """Return a bar, yet to be placed."""
    made = Rectangle((0, 0), 0, 0, zorder=2, **look)  # type: ignore[arg-type]
    axes.add_patch(made)
    return made


def line(axes: Axes, **look: object) -> Line2D:
    """Return a line, or markers, yet without data."""
    return axes.add_line(Line2D([], [], zorder=3, clip_on=False, **look))  # type: ignore[arg-type]


def beside(axes: Axes) -> Text:
    """Return a text at the right of a row."""
    return axes.text(
        1.03,
        0,
        "",
        fontsize=SMALL_POINTS,
        color=INK,
        va="center",
        transform=axes.get_yaxis_transform(),
    )


def tell(text: Text, told: str, middle: float) -> None:
    """Set what stands at the right of a row."""
    text.set_text(told)
    text.set_y(middle - 0.02)


def place(bar: Rectangle, left: float, low: float, width: float, height: float) -> None:
    """Put a bar where it belongs; of no width, nowhere."""
    is_shown = math.isfinite(width) and width > 0
    bar.set_visible(is_shown)
    if is_shown:
        bar.set_bounds(left, low, width, height)
