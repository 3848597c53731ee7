"""What curves and rows share: their strategies, the look of axes, the ends of scales (kernel)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import RendererAgg
from matplotlib.font_manager import FontProperties
from matplotlib.ticker import FuncFormatter, MaxNLocator

from ddpnb.history.comparison import Comparison
from ddpnb.history.model import RunSnapshot
from ddpnb.history.summary import StrategySummary
from ddpnb.reports.formatting import tick
from ddpnb.reports.kit import DPI, dress
from ddpnb.reports.style import SMALL_POINTS, Style

LABEL_CHARACTERS = 26
"""Maximum length of a label; a longer one is shortened."""
ROUND = (1.0, 1.2, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0)
"""An axis ends at one of these times a power of ten, so that it seldom changes."""
TICK_WIDTH = 3.0
"""Least distance of the ticks of an x axis, as a multiple of their numbers' height."""
LEAST_SHARE = 0.02
"""Once this share of a run is done, its duration is estimated, and the axes show all of it."""
SLACK = 1.1
"""The length of an axis over the estimated duration at first, because rates vary."""
LONGEST = 1.7
"""An axis longer than this, over the estimated duration, is shortened."""

Look = dict[str, Any]
"""Arguments for matplotlib."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Strategy:
    """One strategy of the figure."""

    label: str
    style: Style
    summary: StrategySummary
    runs: Sequence[RunSnapshot]
    """Its repeats."""


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


# -- text ----------------------------------------------------------------------------------


def shortened(label: str) -> str:
    """Return a label of at most ``LABEL_CHARACTERS``."""
    is_whole = len(label) <= LABEL_CHARACTERS
    return label if is_whole else f"{label[: LABEL_CHARACTERS - 1]}…"


@lru_cache(maxsize=1000)
def width_inches(text: str, weight: Literal["normal", "bold"] = "normal") -> float:
    """Return the width of a line of small text in inches."""
    canvas: Any = RendererAgg(1, 1, DPI)  # type: ignore[no-untyped-call]
    look = FontProperties(size=SMALL_POINTS, weight=weight)
    return float(canvas.get_text_width_height_descent(text, look, ismath=False)[0]) / DPI


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


def planned_samples(comparison: Comparison) -> float:
    """Return the end of an axis of samples: those of the longest run, as planned while it trains.

    Of a plan that has only just begun, so much is shown as there is to see.
    """
    known = [(run, run.header) for run in comparison.runs if run.header is not None]
    seen = max((run.num_samples for run, _ in known), default=0)
    if not any(run.is_running for run, _ in known):
        return seen
    planned = max(header.num_samples for _, header in known)
    return planned if seen >= LEAST_SHARE * planned else round_up(SLACK * seen)


def planned_seconds(comparison: Comparison, shown: float = 0.0) -> float:
    """Return the end of an axis of seconds, a round number.

    Args:
        comparison: the runs.
        shown: the end of the axis so far, kept while it fits.
    """
    longest = max(map(_seconds_of, comparison.runs), default=0.0)
    if not any(run.is_running for run in comparison.runs):
        return round_up(longest)
    if longest <= shown <= LONGEST * longest:
        return shown
    return round_up(SLACK * longest)


def _seconds_of(run: RunSnapshot) -> float:
    """Return the duration of a run, estimated while it trains."""
    planned = run.header.num_samples if run.header and run.is_running else 0
    share = run.num_samples / planned if planned else 1.0
    return run.seconds / share if LEAST_SHARE <= share < 1 else run.seconds
