"""Which rank is slow, and since when? (kernel)"""

from collections.abc import Mapping, Sequence
from typing import final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.image import AxesImage

from ddpnb.history.database import Floats
from ddpnb.history.metrics import slowness
from ddpnb.reports.figures.columns import FigureColumn, Row, beside, line, set_row_text
from ddpnb.reports.figures.series import Series
from ddpnb.reports.style import INK

LANE_POINTS = 80
"""Number of times in a rank's lane."""

SLOW = 1.25
"""A rank is named if its own work takes this many times as long as that of the fastest."""


@final
class RankColumn(FigureColumn):
    """One lane per rank: the slower its own work, the darker; blank while it was gone."""

    title = "Own work of each rank"
    below = "seconds; darker: slower"
    is_of_time = True

    def _new_row(self) -> Row:
        return _Lanes(self.axes)

    def _reach(self, series: Series) -> float:
        if len(series.ranks) < 2:
            return 0.0
        return max(rank.seconds for rank in series.ranks)


@final
class _Lanes(Row):
    def __init__(self, axes: Axes) -> None:
        self.image = AxesImage(axes, origin="upper", interpolation="nearest", zorder=2)
        axes.add_image(self.image)
        self.image.set_data(np.zeros((1, 1, 4)))
        self.marks = line(axes, color=INK, linestyle="", marker="v", markersize=8)
        self.marks.set_markeredgecolor("white")
        self.text = beside(axes)
        super().__init__(axes, (self.image, self.marks, self.text))

    def show(self, series: Series, right: float) -> None:
        ranks = series.ranks
        times = slowness(ranks) if len(ranks) > 1 else {}
        self.image.set_visible(bool(times))
        if not times:
            self.marks.set_data([], [])
            set_row_text(self.text, "", self.middle)
            return
        height = min(0.86, 0.24 * len(ranks) + 0.3)
        bottom, end = self.middle - height / 2, max(rank.seconds for rank in ranks)
        self.image.set_data(_lanes(series, end))
        self.image.set_extent((0.0, end, bottom, bottom + height))
        lane_of = {rank.rank: index for index, rank in enumerate(ranks)}
        known = [mark for mark, _ in series.marks if mark.rank in lane_of]
        self.marks.set_data(
            [mark.seconds for mark in known],
            [bottom + height * (1 - (lane_of[mark.rank] + 0.5) / len(ranks)) for mark in known],
        )
        set_row_text(self.text, _verdict(times, sorted(series.away)), self.middle)


def _verdict(times: Mapping[int, float], away: Sequence[int]) -> str:
    """Return which ranks died, or which is slow."""
    slowest = max(times, key=lambda rank: times[rank])
    if away:
        return f"rank {away[0]} died" if len(away) == 1 else f"{len(away)} ranks died"
    return f"rank {slowest}: {times[slowest]:.1f}×" if times[slowest] >= SLOW else "even"


def _lanes(series: Series, end: float) -> Floats:
    """Return an image, one lane of six pixels per rank, with gaps between."""
    at = np.linspace(0.0, end, LANE_POINTS)
    means = [np.nanmedian(rank.own_seconds) for rank in series.ranks if len(rank.own_seconds)]
    fastest = float(min(means, default=1.0)) or 1.0
    ink = np.array(to_rgb(series.style.ink))
    lanes = np.zeros((7 * len(series.ranks), LANE_POINTS, 4))
    for index, rank in enumerate(series.ranks):
        if len(rank.own_seconds) == 0:
            continue
        times = np.interp(at, rank.at_seconds, rank.own_seconds) / fastest
        depth = np.clip((times - 0.9) / 1.1, 0.0, 1.0)[None, :, None]  # 0.9× pale, 2× full
        lane = lanes[7 * index : 7 * index + 6]
        lane[:, :, :3] = (0.88 + 0.12 * ink) * (1 - depth) + ink * depth
        lane[:, :, 3] = at <= rank.seconds
        for begin, back in series.away.get(rank.rank, ()):
            lane[:, (begin < at) & (at < back), 3] = 0.0
    return lanes
