"""Draws one row per strategy, with its speed, step and memory.  Runs in the kernel."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle

from ddpnb.protocol.catalogue import BASELINE, CEILING, Style
from ddpnb.protocol.messages import Memory, Parts
from ddpnb.reports.figures.axes import Drawn, marker, prepare_axes, round_up, shortened
from ddpnb.reports.formatting import number, percent, short, size
from ddpnb.reports.kit import DPI, Look, legend
from ddpnb.reports.style import INK, MEMORY_COLOURS, MUTED, PART_COLOURS, SMALL_POINTS, ink_of
from ddpnb.results.frames import staleness_counts
from ddpnb.results.run import slowness

BAR = 0.6
"""Height of a bar, as a share of the row's height."""
LEGEND: Look = {
    **{"labelcolor": MUTED, "fontsize": SMALL_POINTS},
    **{"handlelength": 0.8, "labelspacing": 0.1, "columnspacing": 0.8},
}
MB = 1e6
SLOW = 1.25
"""A rank is slow if its own work takes at least this many times as long as the fastest rank's."""
MAX_SHOWN_STALENESS = 8
"""Staleness of the histogram's last bar.  This bar also counts updates with greater staleness."""
LEAST_DIFFERENCE = 1.5
"""The memory column is shown if the memory of two strategies differs by more than this factor."""

HIDDEN_LOOK: Look = {
    **{"facecolor": "white", "edgecolor": PART_COLOURS["communication"], "hatch": "//////"},
}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class FigureColumn:
    """A column that shows one quantity for all strategies."""

    title: str
    draw: Callable[[Axes, Drawn, float], str]
    """A function that draws a strategy's row at a given height, and returns the text beside it."""
    reach: Callable[[Drawn], float]
    """A function that returns where a strategy's row ends on the x axis, or 0 for an empty row."""
    says: Callable[[Sequence[Drawn]], bool] = lambda _: True
    """A function that returns True if the column is informative for the given strategies."""
    share: float
    """Width of the column, relative to the other columns."""
    text_inches: float
    """Width in inches of the text at the right of the column."""
    below: Callable[[Sequence[Drawn]], str] = lambda _: ""
    """A function that returns the label below the ticks."""
    looks: Mapping[str, str | Look] = field(default_factory=dict)
    """Names and looks of the entries in the legend below the ticks."""


def draw_column(
    axes: Axes, column: FigureColumn, strategies: Sequence[Drawn], num_rows: int
) -> None:
    """Draw a column on empty axes.

    Args:
        axes: empty axes.  The middle of the lowest row will be at y = 0.5.
        column: the column.
        strategies: the strategies that have begun.
        num_rows: the final number of rows, including strategies that have not begun.
    """
    prepare_axes(axes, column.title, lines="x")
    axes.spines["bottom"].set_visible(False)
    axes.tick_params(length=0)
    axes.set_yticks([])
    for index, each in enumerate(strategies):
        middle = num_rows - index - 0.5
        if text := column.draw(axes, each, middle):
            beside: Look = {"transform": axes.get_yaxis_transform(), "va": "center", "color": INK}
            axes.text(1.03, middle - 0.02, text, fontsize=SMALL_POINTS, **beside)
    right = max(map(column.reach, strategies), default=0.0)
    if column is STALENESS:
        shown = range(0, MAX_SHOWN_STALENESS + 1, 2)
        axes.set_xticks([value + 0.5 for value in shown], [str(value) for value in shown])
    axes.set(xlim=(0.0, right or 1.0), ylim=(0.0, num_rows))
    axes.tick_params(labelbottom=right > 0)
    below = column.below(strategies)
    axes.set_xlabel(below, loc="left", fontsize=SMALL_POINTS, color=MUTED, labelpad=3)
    drawn = {each.get_label() for each in axes.patches}
    if looks := {name: look for name, look in column.looks.items() if name in drawn}:
        at = (0.0, -0.24 * DPI / axes.bbox.height)  # three lines below the ticks
        num = (len(looks) + 2) // 3
        legend(axes, looks, loc="upper left", bbox_to_anchor=at, ncols=num, **LEGEND)


def draw_name(
    figure: Figure, label: str, style: Style, at: tuple[float, float], *, is_begun: bool
) -> None:
    """Draw a strategy's marker and name at a position in inches from the lower left corner."""
    width, height = figure.get_size_inches()
    x, y = at[0] / width, at[1] / height
    look = {**marker(style), "markersize": 9, "markeredgecolor": style.colour}
    look["alpha"] = 1.0 if is_begun else 0.45
    figure.add_artist(Line2D([x], [y], transform=figure.transFigure, **look))
    ink, weight = (ink_of(style), "bold") if is_begun else (MUTED, "normal")
    text = figure.text(x + 0.2 / width, y, shortened(label), va="center", color=ink)
    text.set(fontsize=SMALL_POINTS, weight=weight)


def _bar(axes: Axes, left: float, low: float, width: float, height: float, **look: Any) -> None:
    """Draw a bar if its width is positive."""
    if math.isfinite(width) and width > 0:
        whole: Look = {"linewidth": 0, "zorder": 2, **look}
        axes.add_artist(Rectangle((left, low), width, height, **whole))


# -- samples per second --------------------------------------------------------------------


def _draw_rate(axes: Axes, strategy: Drawn, middle: float) -> str:
    """Draw the speed as a bar, its range as a line, the ideal as an outline, no-comm as a mark."""
    row, low = strategy.row, middle - BAR / 2
    speed, speed_up = row["samples_per_second"], row["speed_up"]
    _bar(axes, 0, low, speed, BAR, facecolor=strategy.style.colour)
    _bar(axes, 0, low, _ideal_of(strategy), BAR, facecolor="none", edgecolor=MUTED, linewidth=1.0)
    line: Look = {"color": INK, "zorder": 3, "clip_on": False}
    ends = [row["samples_per_second_low"], row["samples_per_second_high"]]
    axes.plot(ends, [middle, middle], linewidth=1.6, **line)
    if _has_ceiling(strategy) and row["strategy"] != CEILING:
        axes.plot([row["ceiling"]] * 2, [low, low + BAR], linewidth=3.0, **line)
    parts = [short(speed)] if math.isfinite(speed) else []
    if math.isfinite(speed_up) and row["strategy"] != BASELINE:
        parts.append(f"{speed_up:.2f}×")
        parts += [percent(row["efficiency"])] if row["num_workers"] > 1 else []
    text = "  ".join(parts)
    return f"({text})" if row["is_emulated"] and text else text


def _rate_reach(strategy: Drawn) -> float:
    speeds = ("samples_per_second", "samples_per_second_high")
    values = (*(strategy.row[name] for name in speeds), _ideal_of(strategy))
    return round_up(max(filter(math.isfinite, values), default=0.0) * 1.01)


def _rate_legend(strategies: Sequence[Drawn]) -> str:
    has_ideal = any(_ideal_of(each) > 0 for each in strategies)
    has_ceiling = any(map(_has_ceiling, strategies))
    return "  ".join(["outline: ideal"] * has_ideal + ["┃ no-comm"] * has_ceiling)


def _has_ceiling(strategy: Drawn) -> bool:
    is_known = math.isfinite(strategy.row["ceiling"]) and strategy.row["strategy"] != BASELINE
    return bool(is_known and math.isfinite(strategy.row["samples_per_second"]))


def _ideal_of(strategy: Drawn) -> float:
    """Return the ideal: the speed of ``single`` times the number of devices.  NaN if unknown."""
    return float(strategy.row["ideal"]) if strategy.row["num_workers"] > 1 else math.nan


RATE = FigureColumn(
    title="Samples per second",
    draw=_draw_rate,
    reach=_rate_reach,
    share=1.0,
    text_inches=1.68,
    below=_rate_legend,
)

# -- time of one step ----------------------------------------------------------------------


def _draw_split(axes: Axes, strategy: Drawn, middle: float) -> str:
    """Draw the parts of a step.  Hidden communication is drawn hatched, below the backward pass."""
    row, low = strategy.row, middle - BAR / 2
    parts = {name: 1000 * row[f"{name}_seconds"] for name in Parts._fields}
    thickness = BAR * (0.68 if parts["hidden"] > 0 else 1.0)
    left = behind = 0.0
    for name, colour in PART_COLOURS.items():
        look = {"facecolor": colour, "label": name}
        _bar(axes, left, low + BAR - thickness, parts[name], thickness, **look)
        left += parts[name]
        behind = left if name == "backward" else behind
    begin, hidden = max(behind - parts["hidden"], 0.0), {**HIDDEN_LOOK, "linewidth": 0.8}
    _bar(axes, begin, low, parts["hidden"], BAR - thickness, label="hidden", **hidden)
    if not row["step_seconds"] > 0:
        return ""
    exposed = row["exposed"]
    text = f"{number(1000 * row['step_seconds'])} ms"
    return text + (f"  {percent(exposed)} exposed" if exposed >= 0.005 else "")


SPLIT = FigureColumn(
    title="Time of one step, ms",
    draw=_draw_split,
    reach=lambda strategy: round_up(1000 * strategy.row["step_seconds"] * 1.01),
    share=1.35,
    text_inches=2.12,
    looks={**PART_COLOURS, "hidden": HIDDEN_LOOK},
)

# -- ranks ---------------------------------------------------------------------------------


def _dead(strategy: Drawn) -> list[int]:
    """Return the ranks that died in the latest repeat."""
    marks = strategy.runs[-1].marks
    return sorted({mark.rank for mark in marks if mark.kind.is_death})


def _is_uneven(strategy: Drawn) -> bool:
    """Return True if a rank was slow or died."""
    times = slowness(strategy.runs[-1].ranks)
    return bool(_dead(strategy)) or max(times.values(), default=0.0) >= SLOW


def _draw_ranks(axes: Axes, strategy: Drawn, middle: float) -> str:
    """Draw a bar for each rank: its length is the training time.  Slow ranks have darker bars."""
    latest = strategy.runs[-1]
    times = slowness(latest.ranks)
    if len(times) < 2:
        return ""
    height = min(0.86, 0.24 * len(times) + 0.3) / len(times)
    top = middle + height * len(times) / 2
    ink = np.array(to_rgb(ink_of(strategy.style)))
    look: Look = {"marker": "v", "markersize": 8, "markeredgecolor": "white", "zorder": 3}
    for index, rank in enumerate(latest.ranks):
        depth = min(max((times[rank.rank] - 0.9) / 1.1, 0.0), 1.0)  # pale at 0.9×, dark at 2×
        colour = (0.88 + 0.12 * ink) * (1 - depth) + ink * depth
        low = top - height * (index + 1)
        _bar(axes, 0.0, low + 0.07 * height, rank.seconds, 0.86 * height, facecolor=tuple(colour))
        for mark in latest.marks:
            if mark.rank == rank.rank:
                axes.plot(mark.seconds, low + height / 2, color=INK, clip_on=False, **look)
    if dead := _dead(strategy):
        return f"rank {dead[0]} died" if len(dead) == 1 else f"{len(dead)} ranks died"
    slowest = max(times, key=lambda rank: times[rank])
    return f"rank {slowest}: {times[slowest]:.1f}×" if times[slowest] >= SLOW else "even"


def _ranks_reach(strategy: Drawn) -> float:
    ranks = strategy.runs[-1].ranks
    return max(rank.seconds for rank in ranks) if len(ranks) > 1 else 0.0


RANKS = FigureColumn(
    title="Own work by rank",
    draw=_draw_ranks,
    reach=_ranks_reach,
    says=lambda strategies: any(map(_is_uneven, strategies)),
    share=0.9,
    text_inches=1.12,
    below=lambda _: "seconds (dark = slow)",
)

# -- staleness and memory ------------------------------------------------------------------


def _draw_staleness(axes: Axes, strategy: Drawn, middle: float) -> str:
    """Draw a histogram of staleness: the number of updates with staleness 0, 1, 2, ..."""
    counts = staleness_counts(strategy.runs)
    if len(counts) == 0:
        return ""
    drawn = counts[: MAX_SHOWN_STALENESS + 1].astype(np.float64)
    drawn[-1] += counts[MAX_SHOWN_STALENESS + 1 :].sum()
    for staleness, top in enumerate(0.84 * drawn / max(drawn.max(), 1.0)):
        _bar(axes, staleness + 0.08, middle - 0.42, 0.84, top, facecolor=strategy.style.colour)
    return f"median {strategy.row['staleness_median']:g}"


def _staleness_reach(strategy: Drawn) -> float:
    """Return the end of the x axis, at least 4.  If staleness is unknown, return 0."""
    num = len(staleness_counts(strategy.runs))
    return float(min(max(num, 4), MAX_SHOWN_STALENESS + 1)) if num else 0.0


STALENESS = FigureColumn(
    title="Staleness",
    draw=_draw_staleness,
    reach=_staleness_reach,
    says=lambda strategies: any(staleness_counts(s.runs)[1:].any() for s in strategies),
    share=0.62,
    text_inches=0.84,
    below=lambda _: "updates by others",
)


def _draw_memory(axes: Axes, strategy: Drawn, middle: float) -> str:
    """Draw the memory of the rank that uses the most memory.  An outline shows a GPU's peak."""
    row, low, left = strategy.row, middle - BAR / 2, 0.0
    for (part, colour), name in zip(MEMORY_COLOURS.items(), Memory._fields, strict=False):
        width = row[f"memory_{name}"] / MB
        _bar(axes, left, low, width, BAR, facecolor=colour, label=part)
        left += width
    peak = row["memory_peak"] / MB
    _bar(axes, 0, low, peak, BAR, facecolor="none", edgecolor=MUTED, linewidth=1.0)
    return size(row["memory_total"]) if row["memory_total"] else ""


def _memory_differs(strategies: Sequence[Drawn]) -> bool:
    """Return True if a rank of one strategy uses much more memory than a rank of another strategy.

    This function ignores ``no-comm`` and ``single``, which has the whole batch on one device.
    """
    others = [s.row for s in strategies if not s.row["strategy"].startswith((BASELINE, CEILING))]
    totals = [row["memory_total"] for row in others if row["memory_total"]]
    return max(totals, default=0) > LEAST_DIFFERENCE * min(totals, default=0)


MEMORY = FigureColumn(
    title="Rank's memory, MB",
    draw=_draw_memory,
    reach=lambda strategy: round_up(strategy.row["memory_total"] / MB * 1.01),
    says=_memory_differs,
    share=1.0,
    text_inches=0.92,
    looks=MEMORY_COLOURS,
)
