"""How does a figure become a picture several times a second, cheaply?  (Notebook side.)

What stands still is drawn once and copied back: the ground (paper, titles, names), and on it each
pair of axes, which alone is drawn anew where its limits change.  Onto that, also once, comes what
has settled (runs that have ended); only what moves is drawn every time.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from numpy.typing import NDArray

from ddpnb.notebook.show.png import PngEncoder

Pixels = NDArray[np.uint8]
Place = tuple[slice, slice]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A pair of axes, with ticks and titles."""

    axes: Axes
    state: Hashable
    """It is drawn anew only if this differs from the last time."""


@final
class QuickCanvas:
    """Draws one figure again and again.

    Args:
        figure: its moving artists are ``animated``, so that matplotlib leaves them out.
    """

    def __init__(self, figure: Figure) -> None:
        self._canvas: Any = FigureCanvasAgg(figure)  # matplotlib leaves its methods untyped
        self._encoder = PngEncoder()
        self._ground: Pixels | None = None
        self._ground_state: Hashable = None
        self._places: dict[Axes, Place] = {}
        """Rows and columns of the picture that each pair of axes has drawn on."""
        self._states: dict[Axes, Hashable] = {}
        self._still: Pixels = np.empty(0, dtype=np.uint8)
        self._settled: Pixels = np.empty(0, dtype=np.uint8)
        self._settled_state: Hashable = None

    def png(
        self,
        *,
        ground_state: Hashable,
        pieces: Sequence[Piece],
        settled: Sequence[Artist],
        settled_state: Hashable,
        moving: Sequence[Artist],
    ) -> bytes:
        """Return the figure as PNG.

        Args:
            ground_state: what is no axes is drawn anew if this differs from the last time.
            pieces: all axes in the figure; those are drawn anew whose state differs.
            settled: what lies on them;
            settled_state: that is drawn anew only if this differs, or the axes have changed.
            moving: what is drawn anew every time, from back to front.
        """
        has_changed = self._draw_still(ground_state, pieces)
        if has_changed or settled_state != self._settled_state:
            self._pixels()[:] = self._still
            self._draw(settled)
            self._settled = self._pixels().copy()
            self._settled_state = settled_state
        self._pixels()[:] = self._settled
        self._draw(moving)
        return self._encoder.encode(self._pixels())

    def _draw_still(self, ground_state: Hashable, pieces: Sequence[Piece]) -> bool:
        """Bring ``_still`` up to date; tell whether it had to be."""
        changed = [p for p in pieces if self._states.get(p.axes) != p.state]
        changed += [p for p in pieces if p not in changed and self._lies_on(p.axes, changed)]
        is_new = self._ground is None or ground_state != self._ground_state
        if not (changed or is_new):
            return False
        for piece in changed:
            self._erase(piece.axes)
        if is_new:
            self._draw_ground(pieces)
            self._ground_state = ground_state
        for piece in changed:
            self._draw_piece(piece.axes)
            self._states[piece.axes] = piece.state
        return True

    def _lies_on(self, axes: Axes, others: Sequence[Piece]) -> bool:
        """Tell whether axes have drawn where others have: who erases these, erases those."""
        places = [self._places.get(other.axes) for other in others]
        place = self._places.get(axes)
        return place is not None and any(_overlap(place, o) for o in places if o is not None)

    def _erase(self, axes: Axes) -> None:
        if self._ground is not None and (place := self._places.pop(axes, None)) is not None:
            self._still[place] = self._ground[place]

    def _draw_ground(self, pieces: Sequence[Piece]) -> None:
        """Draw all but the axes anew; those that have been drawn are copied onto it."""
        for piece in pieces:
            piece.axes.set_visible(False)
        self._canvas.draw()
        for piece in pieces:
            piece.axes.set_visible(True)
        before, self._ground = self._still, self._pixels().copy()
        self._still = self._ground.copy()
        for place in self._places.values():
            self._still[place] = before[place]

    def _draw_piece(self, axes: Axes) -> None:
        """Draw axes that are not in ``_still``; note where they have left a trace."""
        pixels = self._pixels()
        pixels[:] = self._still
        self._draw([axes])
        differs = _whole(pixels) != _whole(self._still)
        (rows,), (columns,) = differs.any(axis=1).nonzero(), differs.any(axis=0).nonzero()
        if len(rows):
            self._places[axes] = (
                slice(rows[0], rows[-1] + 1),
                slice(columns[0], columns[-1] + 1),
            )
        self._still = pixels.copy()

    def _pixels(self) -> Pixels:
        """Return the canvas itself, of shape ``[height, width, 4]``: to read and to write."""
        return np.asarray(self._canvas.buffer_rgba())

    def _draw(self, artists: Sequence[Artist]) -> None:
        renderer = self._canvas.get_renderer()
        for artist in artists:
            artist.draw(renderer)


def _overlap(one: Place, other: Place) -> bool:
    pairs = zip(one, other, strict=True)
    return all(a.start < b.stop and b.start < a.stop for a, b in pairs)


def _whole(pixels: Pixels) -> NDArray[np.uint32]:
    """Return the four bytes of each pixel as one number; shape ``[height, width]``."""
    return pixels.view(np.uint32)[..., 0]
