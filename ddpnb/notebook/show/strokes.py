"""How is one strategy's line drawn?  (Notebook side.)"""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from ddpnb.notebook.record.pyramid import Floats
from ddpnb.notebook.show.measure import width_inches
from ddpnb.notebook.show.series import Line
from ddpnb.notebook.show.stamp import Stamp
from ddpnb.notebook.show.theme import SMALL_POINTS, Style

LEADER_INCHES = (0.02, 0.07, 0.16, 0.19)
"""How far right of the axes a leader begins, bends and ends, and its label begins."""

MAX_BAD_SHOWN = 16
"""About as many losses that are no numbers are shown as such."""


MAX_NAMED = 2
"""So many marks of a strategy are named: a rank was killed, and came back."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Labelled:
    """One strategy's line in this panel, and what stands at its end."""

    text: str
    style: Style
    line: Line
    is_live: bool = False
    marks: tuple[tuple[float, str], ...] = ()
    """Where on the x axis something happened, and what."""


@final
class Strokes:
    """What one line consists of: faint, strong, a mark at its end, a leader, a label."""

    def __init__(self, axes: Axes, names_marks: bool) -> None:
        self.faint = axes.add_line(Line2D([], [], linewidth=1.0, alpha=0.28, zorder=2))
        self.strong = axes.add_line(Line2D([], [], linewidth=2.6, zorder=3))
        self.bad = axes.add_line(
            Line2D([], [], marker="x", markersize=6, markeredgewidth=2, linestyle="", zorder=4)
        )
        self.bad.set_transform(axes.get_xaxis_transform())
        self.bad.set_clip_on(False)
        self.happened = axes.add_line(Line2D([], [], linewidth=1.4, linestyle=":", zorder=3))
        self.happened.set_transform(axes.get_xaxis_transform())
        self.mark = axes.add_line(Line2D([], [], markersize=8, linestyle="", zorder=4))
        self.leader = axes.add_line(Line2D([], [], linewidth=1.0, alpha=0.7, zorder=1))
        self.leader.set_transform(axes.transAxes)
        self.leader.set_clip_on(False)
        self.mark.set_clip_on(False)
        self.label = Stamp(axes, fontsize=SMALL_POINTS, va="center")
        self.label.set_transform(axes.transAxes)
        self.told = axes.text(0, 0.985, "", fontsize=SMALL_POINTS, va="top")
        self.told.set_transform(axes.get_xaxis_transform())
        self.told.set_bbox({"facecolor": "white", "alpha": 0.8, "edgecolor": "none", "pad": 0.5})
        self._names_marks = names_marks
        self._told_at = 0.0
        self._shown: Labelled | None = None
        self._num_changes = 0
        self.end = (0.0, 0.0)
        """Where the line ends."""
        for artist in self.layers():
            artist.set_animated(True)

    def layers(self) -> tuple[Artist, ...]:
        """Return all artists."""
        return (*self._lines(), self.leader, self.label)

    def moving(self) -> tuple[Artist, ...]:
        """Return what changes at every update, from back to front."""
        if self._shown is not None and self._shown.is_live:
            return self.layers()
        return self.leader, self.label  # they make room for what moves

    def settled(self) -> tuple[Artist, ...]:
        """Return the line of a run that has ended."""
        return () if self._shown is None or self._shown.is_live else self._lines()

    def state(self) -> Hashable:
        """Return what tells two states of what has settled apart."""
        shown = self._shown
        return None if shown is None or shown.is_live else self._num_changes

    def show(self, labelled: Labelled, is_log: bool) -> bool:
        """Show a strategy; return whether it has changed, without which it costs nothing."""
        line, style, before = labelled.line, labelled.style, self._shown
        self._shown = labelled
        self.label.set_text(labelled.text)
        if before is not None and before.line is line and before.is_live == labelled.is_live:
            return False
        self._num_changes += 1
        x, y = self.end = end_of(line, is_log)
        self.faint.set_data(line.faint_x, line.faint_y)
        self.strong.set_data(line.x, line.y)
        self.strong.set_linestyle(style.dashes)
        self.mark.set_data([x], [y])
        self.mark.set_marker(style.marker)
        self.bad.set_data(line.bad_x, np.full(len(line.bad_x), 0.985))
        self.bad.set_markevery(max(1, len(line.bad_x) // MAX_BAD_SHOWN))
        self._show_marks(labelled.marks, line.bad_x)
        for drawn in (
            self.faint,
            self.strong,
            self.mark,
            self.leader,
            self.bad,
            self.happened,
        ):
            drawn.set_color(style.colour)
        self.mark.set_markerfacecolor("white" if style.is_hollow else style.colour)
        self.mark.set_markeredgecolor(style.colour if style.is_hollow else "white")
        self.mark.set_markeredgewidth(2.0 if style.is_hollow else 1.0)
        self.label.set_color(style.ink)
        self.told.set_color(style.ink)
        for artist in self.layers():
            artist.set_visible(True)
        self.told.set_visible(bool(self.told.get_text()))
        return True

    def hide(self) -> None:
        """Show nothing."""
        self._num_changes += 1
        self._shown = None
        for artist in self.layers():
            artist.set_visible(False)

    def place_label(self, line_ends_at: float, label_at: float, axes_inches: float) -> None:
        """Put the label beside the axes, with a leader from where the line ends."""
        x = [1 + inches / axes_inches for inches in LEADER_INCHES]
        self.leader.set_data(x[:3], [line_ends_at, line_ends_at, label_at])
        self.label.set_position((x[3], label_at))

    def place_told(self, y: float, right: float, axes_inches: float) -> int:
        """Put what is said of marks at this height, inside the axes; return how many lines."""
        if not self.told.get_visible():
            return 0
        lines = self.told.get_text().split("\n")
        taken = max(map(width_inches, lines)) / axes_inches
        begins = self._told_at / (right or 1.0)
        is_right_of_mark = begins + taken <= 1.0 or begins < taken
        self.told.set_horizontalalignment("left" if is_right_of_mark else "right")
        left = max(min(begins, 1.0 - taken), 0.0)
        self.told.set_position(((left if is_right_of_mark else begins) * (right or 1.0), y))
        return len(lines)

    def _show_marks(self, marks: Sequence[tuple[float, str]], bad_x: Floats) -> None:
        """Draw a line up at each mark; name the last, or say that losses are no numbers.

        What is named stands beside the first of those named, a line for each.
        """
        self.happened.set_data(
            [x for at, _ in marks for x in (at, at, math.nan)], [0.0, 1.0, math.nan] * len(marks)
        )
        named = _last_named(marks) if self._names_marks else {}
        if len(bad_x):
            named = {"NaN or ∞": float(bad_x[0])}
        self.told.set_text("\n".join(f" {told} " for told in named))
        self._told_at = min(named.values(), default=0.0)

    def _lines(self) -> tuple[Artist, ...]:
        return self.faint, self.happened, self.strong, self.bad, self.mark, self.told


def _last_named(marks: Sequence[tuple[float, str]]) -> dict[str, float]:
    """Return the last marks that differ in what they say, and where each of them stands."""
    where = {told: at for at, told in sorted(marks, reverse=True)}  # repeats: where it was first
    return dict(sorted(where.items(), key=lambda item: item[1])[-MAX_NAMED:])


def end_of(line: Line, is_log: bool) -> tuple[float, float]:
    """Return the last point of the strong line that can be shown."""
    shown = np.isfinite(line.y) & (line.y > (0 if is_log else -math.inf))
    at = int(np.flatnonzero(shown)[-1])
    return float(line.x[at]), float(line.y[at])
