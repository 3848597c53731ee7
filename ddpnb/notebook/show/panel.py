"""How is one quantity of all strategies drawn on one pair of axes?  (Notebook side.)"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.text import Text
from matplotlib.ticker import FuncFormatter, MaxNLocator

from ddpnb.notebook.show.labels import spread_out
from ddpnb.notebook.show.series import Line
from ddpnb.notebook.show.theme import FONT_POINTS, INK, MUTED, RULE, SMALL_POINTS, Style
from ddpnb.notebook.show.words import short

ROUND = (1.0, 1.2, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0)
"""Axes end at one of these times a power of ten, so that they seldom change."""

LABEL_GAP_POINTS = SMALL_POINTS * 1.35


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Labelled:
    """One strategy's line in this panel, and what stands at its end."""

    text: str
    style: Style
    line: Line


@final
class Panel:
    """One pair of axes, redrawn in place; its limits only ever grow.

    Args:
        axes: where to draw; the panel adds its own lines and labels.
        title: what the panel shows.
        x_label: what its x axis counts.
    """

    def __init__(self, axes: Axes, *, title: str, x_label: str) -> None:
        self.axes = axes
        self._inches = axes.figure.dpi_scale_trans
        self._artists: list[_Artists] = []
        self._limits = [0.0, 0.0, 0.0]  # right, bottom, top
        self._waiting = _prepared(axes, title, x_label)

    def update(self, lines: Sequence[Labelled], right: float = 0.0) -> None:
        """Show ``lines``; the x axis reaches at least to ``right``."""
        shown = [labelled for labelled in lines if np.isfinite(labelled.line.y).any()]
        while len(self._artists) < len(shown):
            self._artists.append(_Artists(self.axes))
        for artists, labelled in zip(self._artists, shown, strict=False):
            artists.show(labelled)
        for artists in self._artists[len(shown) :]:
            artists.hide()
        self._grow([labelled.line for labelled in shown], right)
        self._place_labels(shown)
        self._waiting.set_visible(not shown)
        self.axes.tick_params(labelbottom=bool(shown), labelleft=bool(shown))

    def moving(self) -> list[Artist]:
        """Return what changes at every update, from back to front."""
        layers = [artists.layers() for artists in self._artists]
        return [self._waiting, *(artist for layer in zip(*layers, strict=True) for artist in layer)]

    def limits(self) -> tuple[float, ...]:
        """Return what the axes and their ticks depend on."""
        return (*self._limits, self._waiting.get_visible())

    def _grow(self, lines: Sequence[Line], right: float) -> None:
        for line in lines:
            end = float(line.x[-1])
            self._limits[0] = max(self._limits[0], right if end <= right * 1.001 else _up(end))
            lowest, highest = _extent(line)
            self._limits[1] = min(self._limits[1], -_up(-lowest) if lowest < 0 else 0.0)
            self._limits[2] = max(self._limits[2], _up(highest * 1.04))
        end, bottom, top = self._limits
        self.axes.set_xlim(0, end or right or 1.0)
        self.axes.set_ylim(bottom, top if top > bottom else bottom + 1.0)

    def _place_labels(self, shown: Sequence[Labelled]) -> None:
        bottom, top = self.axes.get_ylim()
        wanted = [(_last(labelled.line)[1] - bottom) / (top - bottom) for labelled in shown]
        height_inches = self.axes.bbox.transformed(self._inches.inverted()).height
        gap = LABEL_GAP_POINTS / (height_inches * 72)
        inside = [min(max(position, 0.0), 1.0) for position in wanted]
        placed = spread_out(inside, gap, 0.02, 1.0)
        for artists, at, label_at in zip(self._artists, inside, placed, strict=False):
            artists.place_label(at, label_at)


@final
class _Artists:
    """What one line consists of: faint, strong, a mark at its end, a leader, a label."""

    def __init__(self, axes: Axes) -> None:
        sides = axes.get_yaxis_transform()  # x in axes widths
        self.faint = axes.add_line(Line2D([], [], linewidth=1.0, alpha=0.28, zorder=2))
        self.strong = axes.add_line(Line2D([], [], linewidth=2.6, zorder=3))
        self.mark = axes.add_line(Line2D([], [], markersize=8, linestyle="", zorder=4))
        self.leader = axes.add_line(Line2D([], [], linewidth=1.0, alpha=0.7, zorder=1))
        self.leader.set_transform(axes.transAxes)
        self.leader.set_clip_on(False)
        self.mark.set_clip_on(False)
        self.mark.set_markeredgecolor("white")
        self.label = axes.text(1.075, 0, "", fontsize=SMALL_POINTS, va="center", transform=sides)
        self.label.set_transform(axes.transAxes)
        for artist in self.layers():
            artist.set_animated(True)

    def layers(self) -> tuple[Artist, ...]:
        return self.leader, self.faint, self.strong, self.mark, self.label

    def show(self, labelled: Labelled) -> None:
        line, style = labelled.line, labelled.style
        x, y = _last(line)
        self.faint.set_data(line.faint_x, line.faint_y)
        self.strong.set_data(line.x, line.y)
        self.strong.set_linestyle(style.dashes)
        self.mark.set_data([x], [y])
        self.mark.set_marker(style.marker)
        for drawn in (self.faint, self.strong, self.mark, self.leader):
            drawn.set_color(style.colour)
        self.mark.set_markeredgecolor("white")
        self.label.set_color(style.ink)
        self.label.set_text(labelled.text)
        self._set_visible(True)

    def hide(self) -> None:
        self._set_visible(False)

    def place_label(self, line_ends_at: float, label_at: float) -> None:
        self.leader.set_data([1.005, 1.03, 1.065], [line_ends_at, line_ends_at, label_at])
        self.label.set_y(label_at)

    def _set_visible(self, visible: bool) -> None:
        for artist in self.layers():
            artist.set_visible(visible)


def _prepared(axes: Axes, title: str, x_label: str) -> Text:
    """Give bare axes their look; return the text that is shown while there is nothing else."""
    axes.set_facecolor("none")
    axes.set_title(title, loc="left", fontsize=FONT_POINTS, fontweight="bold", color=INK, pad=10)
    axes.set_xlabel(x_label, fontsize=SMALL_POINTS, color=MUTED, labelpad=4)
    for side in ("left", "right", "top"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(MUTED)
    axes.grid(axis="y", color=RULE, linewidth=1.0)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=SMALL_POINTS, labelcolor=MUTED, color=MUTED, length=4)
    axes.tick_params(axis="y", length=0)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(nbins=4, steps=[1, 2, 2.5, 5, 10]))
        axis.set_major_formatter(FuncFormatter(lambda value, _: _tick(value)))
    return axes.text(
        0.5,
        0.5,
        "waiting for the first steps",
        ha="center",
        va="center",
        fontsize=SMALL_POINTS,
        color=MUTED,
        transform=axes.transAxes,
        animated=True,
    )


def _tick(value: float) -> str:
    text = short(value)
    number, unit = (text[:-1], text[-1]) if text[-1] in "kMG" else (text, "")
    return (number.rstrip("0").rstrip(".") if "." in number else number) + unit


def _last(line: Line) -> tuple[float, float]:
    at = int(np.flatnonzero(np.isfinite(line.y))[-1])
    return float(line.x[at]), float(line.y[at])


def _extent(line: Line) -> tuple[float, float]:
    """Return lowest and highest of the strong line, and of all but the wildest faint points."""
    faint = line.faint_y[np.isfinite(line.faint_y)]
    strong = line.y[np.isfinite(line.y)]
    if len(faint) == 0:
        return float(strong.min()), float(strong.max())
    low, high = np.quantile(faint, (0.01, 0.99))
    return min(float(strong.min()), float(low)), max(float(strong.max()), float(high))


def _up(value: float) -> float:
    """Return the next round number at or above ``value``."""
    if value <= 0:
        return 0.0
    unit = 10.0 ** math.floor(math.log10(value))
    return next((step * unit for step in ROUND if step * unit >= value * (1 - 1e-9)), 10 * unit)
