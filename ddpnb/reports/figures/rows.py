"""What each column shows of a strategy: speed, parts of a step, ranks, staleness (kernel)."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, final

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.image import AxesImage
from matplotlib.legend import Legend
from matplotlib.patches import Polygon, Rectangle
from matplotlib.transforms import ScaledTranslation

from ddpnb.history.database import Floats
from ddpnb.history.metrics import slowness
from ddpnb.reports.figures.axes import add_line, prepare, round_up
from ddpnb.reports.figures.panels import set_live
from ddpnb.reports.figures.series import Series
from ddpnb.reports.formatting import number, percent, short, size
from ddpnb.reports.style import INK, MEMORY_COLOURS, MUTED, PART_COLOURS, SMALL_POINTS

BAR = 0.56
"""Height of a bar, as a share of its row."""

STACKED = ("data", "forward", "backward", "optimizer", "communication", "waiting")
"""The parts of a step from left to right: a rank's own work first."""

LANE_POINTS = 80
"""Number of times in a rank's lane."""

MB = 1e6

SLOW = 1.25
"""A rank is named if its own work takes this many times as long as that of the fastest."""

MAX_SHOWN_STALENESS = 8
"""Greater staleness is counted here."""


class Row(ABC):
    """The artists of one strategy in one column, and a text at their right.

    Args:
        axes: those of the column.
        artists: without the text.
    """

    title: ClassVar[str]
    room: ClassVar[tuple[float, float]]
    """Width of the column, as a share, and inches for the text at its right."""
    below: ClassVar[str] = ""
    """The label below the ticks."""
    is_of_time: ClassVar[bool] = False
    """Whether the column ends at the end of the training."""

    def __init__(self, axes: Axes, *artists: Artist) -> None:
        self._text = axes.text(1.03, 0, "", fontsize=SMALL_POINTS, color=INK, va="center")
        self._text.set_transform(axes.get_yaxis_transform())
        self.artists = (*artists, self._text)
        for artist in self.artists:
            artist.set_animated(True)
        self.middle = 0.5
        """The height of its middle; the lowest row is centred at 0.5."""
        self._shown: tuple[Series, float] | None = None

    @classmethod
    def prepare(cls, axes: Axes) -> None:
        """Give the axes of a column the look that its rows need."""
        prepare(axes, cls.title, "", pad=8, lines="x", num_ticks=3)
        axes.spines["bottom"].set_visible(False)
        axes.tick_params(length=0)
        axes.set_yticks([])
        axes.set_navigate(False)  # a zoom would not move the texts beside the rows

    @classmethod
    def legend(cls, series: Sequence[Series]) -> str:
        """Return what stands below the ticks."""
        return cls.below

    @staticmethod
    @abstractmethod
    def reach(series: Series) -> float:
        """Return the right end of a row, rounded up."""

    def update(self, series: Series, middle: float) -> None:
        """Set the artists if anything has changed."""
        if self._shown == (series, middle):
            return
        self._shown, self.middle = (series, middle), middle
        for artist in self.artists:
            set_live(artist, series.is_live)
        self._text.set_text(self._show(series))
        self._text.set_y(middle - 0.02)

    @abstractmethod
    def _show(self, series: Series) -> str:
        """Set the artists; return the text."""


@final
class RateRow(Row):
    """Samples per second: a bar, its range, the ideal as an outline, the ceiling as a tick."""

    title = "Samples per second"
    room = (1.0, 1.68)

    def __init__(self, axes: Axes) -> None:
        self._bar = _rectangle(axes, linewidth=0)
        self._ideal = _rectangle(axes, facecolor="none", edgecolor=MUTED, linewidth=1.0)
        self._range = add_line(axes, color=INK, linewidth=1.6, zorder=3, clip_on=False)
        self._ceiling = add_line(axes, color=INK, linewidth=3.0, zorder=3, clip_on=False)
        super().__init__(axes, self._bar, self._ideal, self._range, self._ceiling)

    @classmethod
    def legend(cls, series: Sequence[Series]) -> str:
        """Return a legend if there are outlines or ticks."""
        has_ideal = any(_ideal_of(each) > 0 for each in series)
        if any(math.isfinite(each.summary.share_of_ceiling) for each in series):
            return "outline: ideal  ┃ no-comm" if has_ideal else "┃ no-comm"
        return "outline: workers × single" if has_ideal else ""

    @staticmethod
    def reach(series: Series) -> float:
        """Return the greatest speed of the row, rounded up."""
        speed = series.summary.samples_per_second
        values = (speed.middle, speed.high, _ideal_of(series))
        return round_up(max(filter(math.isfinite, values), default=0.0) * 1.01)

    def _show(self, series: Series) -> str:
        summary, low = series.summary, self.middle - BAR / 2
        speed = summary.samples_per_second
        _place(self._bar, 0, low, speed.middle, BAR)
        self._bar.set_facecolor(series.style.colour)
        _place(self._ideal, 0, low, _ideal_of(series), BAR)
        self._range.set_data([speed.low, speed.high], [self.middle, self.middle])
        at = speed.middle / summary.share_of_ceiling
        is_own = summary.share_of_ceiling == 1.0
        self._ceiling.set_data([] if is_own else [at, at], [] if is_own else [low, low + BAR])
        parts = [short(speed.middle)] if math.isfinite(speed.middle) else []
        if math.isfinite(summary.speed_up) and summary.speed_up != 1.0:
            parts.append(f"{summary.speed_up:.2f}×")
            parts += [percent(summary.efficiency)] if summary.num_workers > 1 else []
        text = "  ".join(parts)
        return f"({text})" if summary.is_emulated and text else text


def _ideal_of(series: Series) -> float:
    """Return the speed of ``single`` times the number of workers."""
    summary = series.summary
    if summary.num_workers < 2:
        return math.nan
    return summary.samples_per_second.middle / summary.efficiency if summary.efficiency else 0.0


@final
class SplitRow(Row):
    """The parts of a step; hidden communication is hatched below the backward pass."""

    title = "Time of one step, ms"
    room = (1.35, 2.12)

    def __init__(self, axes: Axes) -> None:
        self._bars = [_rectangle(axes, **_look(name), linewidth=0) for name in STACKED]
        self._hidden = _rectangle(axes, **_look("hidden"), linewidth=0.8)
        super().__init__(axes, *self._bars, self._hidden)

    @classmethod
    def prepare(cls, axes: Axes) -> None:
        """Add a legend of the parts, in two lines below the axes."""
        super().prepare(axes)
        _add_legend(axes, 0.3, {part: _look(part) for part in STACKED[:4]})
        _add_legend(axes, 0.53, {part: _look(part) for part in (*STACKED[4:], "hidden")})

    @staticmethod
    def reach(series: Series) -> float:
        """Return the duration of the step, rounded up."""
        return round_up(1000 * series.summary.split.seconds * 1.01)

    def _show(self, series: Series) -> str:
        split, low = series.summary.split, self.middle - BAR / 2
        parts = {name: 1000 * seconds for name, seconds in split.parts._asdict().items()}
        thickness = BAR * (0.68 if parts["hidden"] > 0 else 1.0)
        left = behind = 0.0
        for name, bar in zip(STACKED, self._bars, strict=True):
            _place(bar, left, low + BAR - thickness, parts[name], thickness)
            left += parts[name]
            behind = left if name == "backward" else behind
        start = max(behind - parts["hidden"], 0.0)
        _place(self._hidden, start, low, parts["hidden"], BAR - thickness)
        if not split.is_known:
            return ""
        exposed = split.exposed_share
        text = f"{number(1000 * split.seconds)} ms"
        return text + (f"  {percent(exposed)} exposed" if exposed >= 0.005 else "")


def _add_legend(axes: Axes, inches_down: float, looks: Mapping[str, Mapping[str, Any]]) -> None:
    """Add one line of a legend below the axes."""
    down = ScaledTranslation(0, -inches_down, axes.figure.dpi_scale_trans)
    legend = Legend(
        axes,
        [Rectangle((0, 0), 1, 1, **look) for look in looks.values()],
        list(looks),
        loc="upper left",
        bbox_to_anchor=(0.0, 0.0),
        bbox_transform=axes.transAxes + down,
        borderaxespad=0,
        ncols=len(looks),
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


def _look(part: str) -> dict[str, Any]:
    colour = PART_COLOURS[part]
    if part == "hidden":
        return {"facecolor": "white", "edgecolor": colour, "hatch": "//////"}
    return {"facecolor": colour}


@final
class MemoryRow(Row):
    """What the rank that holds most holds; a GPU's peak is an outline around it."""

    title = "Memory per rank, MB"
    room = (1.0, 0.92)

    def __init__(self, axes: Axes) -> None:
        self._bars = [_rectangle(axes, facecolor=c, linewidth=0) for c in MEMORY_COLOURS.values()]
        self._peak = _rectangle(axes, facecolor="none", edgecolor=MUTED, linewidth=1.0)
        super().__init__(axes, *self._bars, self._peak)

    @classmethod
    def prepare(cls, axes: Axes) -> None:
        """Add a legend of the parts, in two lines below the axes."""
        super().prepare(axes)
        looks = {part: {"facecolor": colour} for part, colour in MEMORY_COLOURS.items()}
        for inches_down, parts in ((0.3, list(looks)[:2]), (0.53, list(looks)[2:])):
            _add_legend(axes, inches_down, {part: looks[part] for part in parts})

    @staticmethod
    def reach(series: Series) -> float:
        """Return all that the rank holds, rounded up."""
        return round_up(series.summary.memory.total / MB * 1.01)

    def _show(self, series: Series) -> str:
        memory, low, left = series.summary.memory, self.middle - BAR / 2, 0.0
        for bar, num_bytes in zip(self._bars, memory, strict=False):
            _place(bar, left, low, num_bytes / MB, BAR)
            left += num_bytes / MB
        _place(self._peak, 0, low, memory.peak / MB, BAR)
        return size(memory.total) if memory.total else ""


@final
class RankRow(Row):
    """One lane per rank: the slower its own work, the darker; blank while it was gone."""

    title = "Own work by rank"
    below = "seconds; darker: slower"
    room = (0.9, 1.12)
    is_of_time = True

    def __init__(self, axes: Axes) -> None:
        self._image = AxesImage(axes, origin="upper", interpolation="nearest", zorder=2)
        axes.add_image(self._image)
        self._image.set_data(np.zeros((1, 1, 4)))
        look = {"color": INK, "linestyle": "", "marker": "v", "markersize": 8}
        self._marks = add_line(axes, **look, markeredgecolor="white", zorder=3, clip_on=False)
        super().__init__(axes, self._image, self._marks)

    @staticmethod
    def reach(series: Series) -> float:
        """Return the training seconds of the ranks; 0 if there is only one."""
        return max(rank.seconds for rank in series.ranks) if len(series.ranks) > 1 else 0.0

    def _show(self, series: Series) -> str:
        ranks = series.ranks
        times = slowness(ranks) if len(ranks) > 1 else {}
        self._image.set_visible(bool(times))
        if not times:
            self._marks.set_data([], [])
            return ""
        height = min(0.86, 0.24 * len(ranks) + 0.3)
        bottom, end = self.middle - height / 2, max(rank.seconds for rank in ranks)
        self._image.set_data(_lanes(series, end))
        self._image.set_extent((0.0, end, bottom, bottom + height))
        lane_of = {rank.rank: index for index, rank in enumerate(ranks)}
        known = [mark for mark, _ in series.marks if mark.rank in lane_of]
        self._marks.set_data(
            [mark.seconds for mark in known],
            [bottom + height * (1 - (lane_of[mark.rank] + 0.5) / len(ranks)) for mark in known],
        )
        return _verdict(times, sorted(series.away))


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


@final
class StaleRow(Row):
    """The number of updates by their staleness."""

    title = "Staleness"
    below = "updates by others"
    room = (0.62, 0.84)

    def __init__(self, axes: Axes) -> None:
        self._shape = Polygon(np.zeros((3, 2)), closed=True, zorder=2, linewidth=0)
        axes.add_patch(self._shape)
        super().__init__(axes, self._shape)

    @classmethod
    def prepare(cls, axes: Axes) -> None:
        """Put each tick below the middle of its bar."""
        super().prepare(axes)
        shown = range(0, MAX_SHOWN_STALENESS + 1, 2)
        axes.set_xticks([value + 0.5 for value in shown], [str(value) for value in shown])

    @staticmethod
    def reach(series: Series) -> float:
        """Return the right end of the last bar, or a little more; 0 without any."""
        if len(series.staleness) == 0:
            return 0.0
        return float(min(max(len(series.staleness), 4), MAX_SHOWN_STALENESS + 1))

    def _show(self, series: Series) -> str:
        counts = series.staleness
        self._shape.set_visible(len(counts) > 0)
        if len(counts) == 0:
            return ""
        drawn = counts[: MAX_SHOWN_STALENESS + 1].astype(np.float64)
        drawn[-1] += counts[MAX_SHOWN_STALENESS + 1 :].sum()
        tops = 0.84 * drawn / max(drawn.max(), 1.0)
        low = self.middle - 0.42
        x = np.repeat(np.arange(len(drawn)), 4) + np.tile([0.08, 0.08, 0.92, 0.92], len(drawn))
        y = low + np.column_stack([np.zeros(len(tops)), tops, tops, np.zeros(len(tops))]).ravel()
        self._shape.set_xy(np.column_stack([x, y]))
        self._shape.set_facecolor(series.style.colour)
        return f"median {series.summary.staleness_median:g}"


def _rectangle(axes: Axes, **look: Any) -> Rectangle:
    """Add and return a bar without a place."""
    made = Rectangle((0, 0), 0, 0, zorder=2, **look)
    axes.add_patch(made)
    return made


def _place(bar: Rectangle, left: float, low: float, width: float, height: float) -> None:
    """Set the place of a bar; hide it if it has no width."""
    is_shown = math.isfinite(width) and width > 0
    bar.set_visible(is_shown)
    if is_shown:
        bar.set_bounds(left, low, width, height)
