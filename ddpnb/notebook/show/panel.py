"""How is one quantity of all strategies drawn on one pair of axes?  (Notebook side.)"""

import math
from collections.abc import Hashable, Sequence
from typing import final

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.transforms import Bbox

from ddpnb.notebook.show.axes import draw_target, prepare, round_down, round_up
from ddpnb.notebook.show.canvas import Piece
from ddpnb.notebook.show.labels import spread_out
from ddpnb.notebook.show.series import Line
from ddpnb.notebook.show.strokes import Labelled, Strokes
from ddpnb.notebook.show.theme import SMALL_POINTS

LABEL_GAP_POINTS = SMALL_POINTS * 1.35


@final
class Panel:
    """One pair of axes, redrawn in place; its y limits only ever grow.

    Args:
        axes: where to draw; the panel adds its own lines and labels.
        title: what the panel shows.
        x_label: what its x axis counts.
        log: whether the y axis is logarithmic.
        target: where a line goes across; None: nowhere.
        names_marks: whether marks are named, and not only shown.
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
    ) -> None:
        self.axes = axes
        self._is_log = log
        self._names_marks = names_marks
        self._inches = axes.figure.dpi_scale_trans
        self._strokes: list[Strokes] = []
        self._limits = [0.0, math.inf if log else 0.0, 0.0]  # right, bottom, top
        self._longest = 0.0
        if target is not None:
            self._limits[1:] = [round_down(target * 0.9) if log else min(target, 0.0), target]
            draw_target(axes, target)
        self._waiting = prepare(axes, title, x_label, log)
        self.axes.tick_params(labelbottom=False, labelleft=False)

    def update(self, lines: Sequence[Labelled], right: float = 0.0) -> None:
        """Show ``lines``; the x axis ends at ``right``, or where a line is longer, after it."""
        shown = [labelled for labelled in lines if _can_show(labelled.line, self._is_log)]
        while len(self._strokes) < len(shown):
            self._strokes.append(Strokes(self.axes, self._names_marks))
        changed = [
            labelled.line
            for strokes, labelled in zip(self._strokes, shown, strict=False)
            if strokes.show(labelled, self._is_log)
        ]
        for strokes in self._strokes[len(shown) :]:
            strokes.hide()
        self._grow(changed, right)
        self._place_labels(len(shown))
        num_told, inches = 0, self._box_inches().width
        for strokes in self._strokes:
            num_told += strokes.place_told(0.94 - 0.09 * num_told, self._limits[0], inches)
        if self._waiting.get_visible() == bool(shown):
            self._waiting.set_visible(not shown)
            self.axes.tick_params(labelbottom=bool(shown), labelleft=bool(shown))

    def moving(self) -> list[Artist]:
        """Return what changes at every update, from back to front."""
        layers = [strokes.moving() for strokes in self._strokes]
        return [self._waiting, *(artist for layer in layers for artist in layer)]

    def layers(self) -> list[Artist]:
        """Return all that is ever animated."""
        return [self._waiting, *(artist for own in self._strokes for artist in own.layers())]

    def settled(self) -> list[Artist]:
        """Return what belongs to runs that have ended."""
        return [artist for strokes in self._strokes for artist in strokes.settled()]

    def settled_state(self) -> tuple[object, ...]:
        """Return what tells two states of that apart."""
        return tuple(strokes.state() for strokes in self._strokes)

    def pieces(self, room: Hashable) -> list[Piece]:
        """Return the axes, which depend on their limits and on the room for labels."""
        return [Piece(axes=self.axes, state=(room, *self._limits, self._waiting.get_visible()))]

    def _grow(self, lines: Sequence[Line], right: float) -> None:
        for line in lines:
            self._longest = max(self._longest, float(np.nanmax(line.x)))
            lowest, highest = _extent(line, self._is_log)
            if self._is_log:
                self._limits[1] = min(self._limits[1], round_down(lowest))
            else:
                self._limits[1] = min(self._limits[1], -round_up(-lowest) if lowest < 0 else 0.0)
            self._limits[2] = max(self._limits[2], round_up(highest * 1.04))
        self._limits[0] = right if self._longest <= right * 1.001 else round_up(self._longest)
        end, bottom, top = self._limits
        if not math.isfinite(bottom):
            bottom, top = 0.1, 1.0
        self.axes.set_xlim(0, end or 1.0)
        self.axes.set_ylim(bottom, top if top > bottom else bottom + 1.0)

    def _place_labels(self, num_shown: int) -> None:
        to_share = self.axes.transData - self.axes.transAxes
        ends = [strokes.end for strokes in self._strokes[:num_shown]]
        wanted = [float(at) for _, at in to_share.transform(ends)] if ends else []
        inches = self._box_inches()
        gap = LABEL_GAP_POINTS / (inches.height * 72)
        inside = [min(max(position, 0.0), 1.0) for position in wanted]
        placed = spread_out(inside, gap, 0.02, 1.0)
        for strokes, at, label_at in zip(self._strokes, inside, placed, strict=False):
            strokes.place_label(at, label_at, inches.width)

    def _box_inches(self) -> Bbox:
        return self.axes.bbox.transformed(self._inches.inverted())


def _can_show(line: Line, is_log: bool) -> bool:
    return bool((np.isfinite(line.y) & (line.y > (0 if is_log else -math.inf))).any())


def _extent(line: Line, is_log: bool) -> tuple[float, float]:
    """Return lowest and highest of the strong line, and of all but the wildest faint points."""
    faint = line.faint_y[np.isfinite(line.faint_y)]
    strong = line.y[np.isfinite(line.y)]
    if is_log:
        faint, strong = faint[faint > 0], strong[strong > 0]
    if len(faint) == 0:
        return float(strong.min()), float(strong.max())
    low, high = np.quantile(faint, (0.01, 0.99))
    return min(float(strong.min()), float(low)), max(float(strong.max()), float(high))
