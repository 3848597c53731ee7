"""One quantity of all strategies as curves (kernel)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator
from matplotlib.transforms import Bbox
from numpy.typing import NDArray

from ddpnb.history.database import Floats
from ddpnb.reports.figures.axes import add_line, draw_target, prepare, round_down, round_up
from ddpnb.reports.figures.layout import shortened, spread_out, width_inches
from ddpnb.reports.figures.series import Line, Series
from ddpnb.reports.style import MUTED, SMALL_POINTS

LABEL_GAP_POINTS = SMALL_POINTS * 1.35

LEADER_INCHES = (0.02, 0.07, 0.16, 0.19)
"""Distances right of the axes: where a leader begins, bends and ends, where its label begins."""

MAX_BAD_SHOWN = 16
"""About the largest number of NaN or infinite losses that are marked."""

MAX_NAMED = 2
"""The number of a strategy's marks that are named: two, as for a rank killed and replaced."""


@dataclass(frozen=True, slots=True, eq=False)
class LabelledLine:
    """One strategy's line in a panel."""

    series: Series
    line: Line
    marks: tuple[tuple[float, str], ...] = ()
    """Events of the run: their place on the x axis, and their text."""


@final
class CurvePanel:
    """One pair of axes, redrawn in place; its y limits only ever grow.

    Args:
        axes: bare axes; the panel adds its lines and labels.
        title: the quantity on the y axis.
        x_label: the quantity on the x axis.
        log: whether the y axis is logarithmic.
        target: the height of a line across; None: no line.
        names_marks: whether marks are named as well as shown.
        is_share: whether the y axis ends at 1, and begins near the lowest share.
        awaited: what is waited for until there is a line.
    """

    def __init__(
        self,
        axes: Axes,
        *,
        title: str,
        x_label: str,
        log: bool = False,
        target: float | None = None,
        names_marks: bool = False,
        is_share: bool = False,
        awaited: str = "the first steps",
    ) -> None:
        self.axes = axes
        self._is_log = log
        self._is_share = is_share
        self._names_marks = names_marks
        self._inches = axes.figure.dpi_scale_trans
        self._artists: list[LineArtists] = []
        self._limits = [0.0, math.inf if log else 0.0, 0.0]  # right, bottom, top
        if is_share:
            self._limits[1:] = [1.0 if target is None else _below_share(target), 1.0]
        elif target is not None:
            self._limits[1:] = [round_down(target * 0.9) if log else min(target, 0.0), target]
        self._longest = 0.0
        if target is not None:
            draw_target(axes, target, is_reached_from_below=is_share)
        _prepare(axes, title, x_label, log)
        self._waiting = axes.text(
            0.5,
            0.5,
            f"waiting for {awaited}",
            ha="center",
            va="center",
            fontsize=SMALL_POINTS,
            color=MUTED,
            transform=axes.transAxes,
        )
        self.axes.tick_params(labelbottom=False, labelleft=False)

    def update(self, lines: Sequence[LabelledLine], right: float = 0.0) -> None:
        """Show ``lines``; the x axis ends at ``right``, or beyond it if a line is longer."""
        shown = [labelled for labelled in lines if _can_show(labelled.line, self._is_log).any()]
        while len(self._artists) < len(shown):
            self._artists.append(LineArtists(self.axes, self._names_marks))
        changed = [
            labelled.line
            for artists, labelled in zip(self._artists, shown, strict=False)
            if artists.show(labelled, self._is_log)
        ]
        for artists in self._artists[len(shown) :]:
            artists.hide()
        self._grow(changed, right)
        self._place_labels(len(shown))
        num_note_lines, inches = 0, self._box_inches().width
        for artists in self._artists:
            num_note_lines += artists.place_note(
                0.94 - 0.09 * num_note_lines, self._limits[0], inches
            )
        if self._waiting.get_visible() == bool(shown):
            self._waiting.set_visible(not shown)
            self.axes.tick_params(labelbottom=bool(shown), labelleft=bool(shown))

    def artists(self) -> list[Artist]:
        """Return the artists that may change at an update, from back to front."""
        return [artist for artists in self._artists for artist in artists.artists]

    def _grow(self, lines: Sequence[Line], right: float) -> None:
        for line in lines:
            self._longest = max(self._longest, float(np.nanmax(line.x)))
            lowest, highest = _extent(line, self._is_log)
            if self._is_log:
                self._limits[1] = min(self._limits[1], round_down(lowest))
            elif self._is_share:
                self._limits[1] = min(self._limits[1], _below_share(lowest))
                continue
            else:
                self._limits[1] = min(self._limits[1], -round_up(-lowest) if lowest < 0 else 0.0)
            self._limits[2] = max(self._limits[2], round_up(highest * 1.04))
        self._limits[0] = right if self._longest <= right * 1.001 else round_up(self._longest)
        end, bottom, top = self._limits
        if not math.isfinite(bottom):
            bottom, top = 0.1, 1.0
        x_limits, y_limits = (0.0, end or 1.0), (bottom, top if top > bottom else bottom + 1.0)
        if (self.axes.get_xlim(), self.axes.get_ylim()) != (x_limits, y_limits):
            self.axes.set(xlim=x_limits, ylim=y_limits)

    def _place_labels(self, num_shown: int) -> None:
        to_share = self.axes.transData - self.axes.transAxes
        ends = [artists.end for artists in self._artists[:num_shown]]
        wanted = [float(at) for _, at in to_share.transform(ends)] if ends else []
        inches = self._box_inches()
        gap = LABEL_GAP_POINTS / (inches.height * 72)
        inside = [min(max(position, 0.0), 1.0) for position in wanted]
        placed = spread_out(inside, gap, 0.02, 1.0)
        for artists, at, label_at in zip(self._artists, inside, placed, strict=False):
            artists.place_label(at, label_at, inches.width)

    def _box_inches(self) -> Bbox:
        return self.axes.bbox.transformed(self._inches.inverted())


def _below_share(share: float) -> float:
    """Return where an axis of shares begins: a round distance from 1, below this share."""
    return 1.0 - round_up((1.0 - share) * 1.04)


def _prepare(axes: Axes, title: str, x_label: str, log: bool) -> None:
    prepare(axes, title, x_label, pad=10, lines="y", num_ticks=4)
    axes.spines["bottom"].set_color(MUTED)
    axes.tick_params(axis="x", length=4)
    axes.tick_params(axis="y", length=0)
    if log:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0), numticks=6))
        axes.yaxis.set_minor_locator(NullLocator())
    else:
        axes.yaxis.set_major_locator(MaxNLocator(nbins=4, steps=[1, 2, 2.5, 5, 10]))


def _can_show(line: Line, is_log: bool) -> NDArray[np.bool_]:
    """Return which points of the strong line have a place on the y axis."""
    return np.isfinite(line.y) & (line.y > (0 if is_log else -math.inf))


def _extent(line: Line, is_log: bool) -> tuple[float, float]:
    """Return the range of the strong line, and of the faint one without its outliers."""
    faint = line.faint_y[np.isfinite(line.faint_y)]
    strong = line.y[np.isfinite(line.y)]
    if is_log:
        faint, strong = faint[faint > 0], strong[strong > 0]
    if len(faint) == 0:
        return float(strong.min()), float(strong.max())
    low, high = np.quantile(faint, (0.01, 0.99))
    return min(float(strong.min()), float(low)), max(float(strong.max()), float(high))


@final
class LineArtists:
    """The artists of one line: faint and strong line, marker at the end, leader, label."""

    def __init__(self, axes: Axes, names_marks: bool) -> None:
        self._axes = axes
        at_x = axes.get_xaxis_transform()
        self._faint = add_line(axes, linewidth=1.0, alpha=0.28, zorder=2)
        self._strong = add_line(axes, linewidth=2.6, zorder=3)
        cross = {"marker": "x", "markersize": 6, "markeredgewidth": 2, "linestyle": ""}
        self._bad = add_line(axes, **cross, zorder=4, transform=at_x, clip_on=False)
        self._mark_lines = add_line(axes, linewidth=1.4, linestyle=":", zorder=3, transform=at_x)
        self._mark = add_line(axes, markersize=8, linestyle="", zorder=4, clip_on=False)
        self._note = axes.text(0, 0.985, "", fontsize=SMALL_POINTS, va="top", transform=at_x)
        self._note.set_bbox({"facecolor": "white", "alpha": 0.8, "edgecolor": "none", "pad": 0.5})
        self._leader = add_line(axes, linewidth=1.0, alpha=0.7, zorder=1, clip_on=False)
        self._leader.set_transform(axes.transAxes)
        self._label = axes.text(0, 0, "", fontsize=SMALL_POINTS, va="center")
        self._label.set_transform(axes.transAxes)
        self._names_marks = names_marks
        self._note_at = 0.0
        self._shown: LabelledLine | None = None
        self.end = (0.0, 0.0)
        """The end of the line."""
        self._lines: tuple[Artist, ...] = (
            self._faint,
            self._mark_lines,
            self._strong,
            self._bad,
            self._mark,
            self._note,
        )
        self.artists = (*self._lines, self._leader, self._label)
        for artist in self.artists:
            artist.set_animated(True)  # leader and label stay so, as they move aside for others

    def show(self, labelled: LabelledLine, is_log: bool) -> bool:
        """Show a strategy; return whether it has changed, and do nothing if not."""
        line, style, before = labelled.line, labelled.series.style, self._shown
        self._shown = labelled
        self._label.set_text(shortened(labelled.series.label))
        is_live = labelled.series.is_live
        if before is not None and before.line is line and before.series.is_live == is_live:
            return False
        for artist in self._lines:
            set_live(artist, is_live)
        x, y = self.end = _end_of(line, is_log)
        self._faint.set_data(line.faint_x, line.faint_y)
        self._strong.set_data(line.x, line.y)
        self._strong.set_linestyle(style.dashes)
        self._mark.set_data([x], [y])
        self._mark.set_marker(style.marker)
        self._bad.set_data(line.bad_x, np.full(len(line.bad_x), 0.985))
        self._bad.set_markevery(max(1, len(line.bad_x) // MAX_BAD_SHOWN))
        self._show_marks(labelled.marks, line.bad_x)
        for drawn in (
            self._faint,
            self._strong,
            self._mark,
            self._leader,
            self._bad,
            self._mark_lines,
        ):
            drawn.set_color(style.colour)
        self._mark.set_markerfacecolor("white" if style.is_hollow else style.colour)
        self._mark.set_markeredgecolor(style.colour if style.is_hollow else "white")
        self._mark.set_markeredgewidth(2.0 if style.is_hollow else 1.0)
        self._label.set_color(style.ink)
        self._note.set_color(style.ink)
        for artist in self.artists:
            artist.set_visible(True)
        self._note.set_visible(bool(self._note.get_text()))
        return True

    def hide(self) -> None:
        """Hide all artists."""
        if self._shown is not None:
            self._shown = None
            for artist in self.artists:
                artist.set_visible(False)

    def place_label(self, line_ends_at: float, label_at: float, axes_inches: float) -> None:
        """Put the label beside the axes, with a leader from the height of the line's end."""
        x = [1 + inches / axes_inches for inches in LEADER_INCHES]
        self._leader.set_data(x[:3], [line_ends_at, line_ends_at, label_at])
        self._label.set_position((x[3], label_at))

    def place_note(self, y: float, right: float, axes_inches: float) -> int:
        """Put the note at this height inside the axes; return its number of lines."""
        if not self._note.get_visible() or not self._note.get_text():
            return 0
        lines = self._note.get_text().split("\n")
        taken = max(map(width_inches, lines)) / axes_inches
        begins = self._note_at / (right or 1.0)
        is_right_of_mark = begins + taken <= 1.0 or begins < taken
        left = max(min(begins, 1.0 - taken), 0.0) if is_right_of_mark else begins
        self._note.set_horizontalalignment("left" if is_right_of_mark else "right")
        if self._note.get_position() != (left * (right or 1.0), y):
            self._note.set_position((left * (right or 1.0), y))
        return len(lines)

    def _show_marks(self, marks: Sequence[tuple[float, str]], bad_x: Floats) -> None:
        """Draw a vertical line at each mark; name the last ones, or the first NaN or infinite loss.

        The names are one note, a line for each, beside the first mark that it names.
        """
        self._mark_lines.set_data(
            [x for at, _ in marks for x in (at, at, math.nan)], [0.0, 1.0, math.nan] * len(marks)
        )
        named = _last_named(marks) if self._names_marks else {}
        if len(bad_x):
            named = {"NaN or ∞": float(bad_x[0])}
        self._note.set_text("\n".join(f" {text} " for text in named))
        self._note_at = min(named.values(), default=0.0)


def set_live(artist: Artist, is_live: bool) -> None:
    """Have an artist drawn at every redraw, or only when the whole figure is."""
    if artist.get_animated() != is_live:
        artist.set_animated(False)
        artist.stale = True  # matplotlib passes this on to the figure, unless it is animated
        artist.set_animated(is_live)


def _last_named(marks: Sequence[tuple[float, str]]) -> dict[str, float]:
    """Return the last marks with different texts, and the place of each."""
    where = {text: at for at, text in sorted(marks, reverse=True)}  # the first of equal texts
    return dict(sorted(where.items(), key=lambda item: item[1])[-MAX_NAMED:])


def _end_of(line: Line, is_log: bool) -> tuple[float, float]:
    """Return the last point of the strong line that can be shown."""
    at = int(np.flatnonzero(_can_show(line, is_log))[-1])
    return float(line.x[at]), float(line.y[at])
