"""Where does the time of a step go? (kernel)"""

from typing import final

from matplotlib.axes import Axes
from matplotlib.legend import Legend
from matplotlib.patches import Rectangle
from matplotlib.transforms import ScaledTranslation

from ddpnb.reports.figures.axes import round_up
from ddpnb.reports.figures.columns import (
    BAR,
    FigureColumn,
    Row,
    beside,
    place,
    rectangle,
    set_row_text,
)
from ddpnb.reports.figures.series import Series
from ddpnb.reports.formatting import number, percent
from ddpnb.reports.style import MUTED, PART_COLOURS, SMALL_POINTS

STACKED = ("data", "forward", "backward", "optimizer", "communication", "waiting")
"""The parts of a step from left to right: a rank's own work first."""


@final
class SplitColumn(FigureColumn):
    """The parts of a step; hidden communication is hatched below the backward pass."""

    title = "Time of one step, ms"

    def __init__(self, axes: Axes) -> None:
        super().__init__(axes)
        _legend(axes)

    def _new_row(self) -> Row:
        return _Split(self.axes)

    def _reach(self, series: Series) -> float:
        return round_up(1000 * series.summary.split.seconds * 1.01)


@final
class _Split(Row):
    def __init__(self, axes: Axes) -> None:
        self.bars = [rectangle(axes, facecolor=PART_COLOURS[name], linewidth=0) for name in STACKED]
        self.hidden = _hatched(axes)
        self.text = beside(axes)
        super().__init__(axes, (*self.bars, self.hidden, self.text))

    def show(self, series: Series, right: float) -> None:
        split, low = series.summary.split, self.middle - BAR / 2
        parts = {name: 1000 * seconds for name, seconds in split.parts._asdict().items()}
        has_hidden = parts["hidden"] > 0
        thickness = BAR * (0.68 if has_hidden else 1.0)
        left = behind = 0.0
        for name, bar in zip(STACKED, self.bars, strict=True):
            place(bar, left, low + BAR - thickness, parts[name], thickness)
            left += parts[name]
            behind = left if name == "backward" else behind
        start = max(behind - parts["hidden"], 0.0)
        place(self.hidden, start, low, parts["hidden"], BAR - thickness)
        if not split.is_known:
            set_row_text(self.text, "", self.middle)
            return
        exposed = split.exposed_share
        text = f"{number(1000 * split.seconds)} ms"
        text += f"  {percent(exposed)} exposed" if exposed >= 0.005 else ""
        set_row_text(self.text, text, self.middle)


def _hatched(axes: Axes) -> Rectangle:
    colour = PART_COLOURS["hidden"]
    return rectangle(axes, facecolor="white", edgecolor=colour, hatch="//////", linewidth=0.8)


def _legend(axes: Axes) -> None:
    """Add a legend of the parts, in two lines below the axes."""
    own = {name: _swatch(name) for name in STACKED[:4]}
    others = {name: _swatch(name) for name in (*STACKED[4:], "hidden")}
    for shown, inches_down in ((own, 0.3), (others, 0.53)):
        legend = Legend(
            axes,
            list(shown.values()),
            list(shown),
            loc="upper left",
            bbox_to_anchor=(0.0, 0.0),
            bbox_transform=axes.transAxes + _down(axes, inches_down),
            borderaxespad=0,
            ncols=len(shown),
            frameon=False,
            fontsize=SMALL_POINTS,
            labelcolor=MUTED,
            handlelength=0.8,
            handleheight=0.8,
            handletextpad=0.3,
            columnspacing=0.5,
            borderpad=0,
        )
        axes.add_artist(legend)


def _down(axes: Axes, inches: float) -> ScaledTranslation:
    return ScaledTranslation(0, -inches, axes.figure.dpi_scale_trans)


def _swatch(part: str) -> Rectangle:
    colour = PART_COLOURS[part]
    if part == "hidden":
        return Rectangle((0, 0), 1, 1, facecolor="white", edgecolor=colour, hatch="//////")
    return Rectangle((0, 0), 1, 1, facecolor=colour)
