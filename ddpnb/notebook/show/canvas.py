"""How does a figure become a picture several times a second, cheaply?  (Notebook side.)

What stands still (paper, axes, ticks, titles) is drawn once and copied back; onto it, also once,
what has settled (runs that have ended); only what moves is drawn every time.
"""

from collections.abc import Hashable, Sequence
from typing import Any, final

import numpy as np
from matplotlib.artist import Artist
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from ddpnb.notebook.show.png import PngEncoder


@final
class QuickCanvas:
    """Draws one figure again and again.

    Args:
        figure: its moving artists are ``animated``, so that matplotlib leaves them out.
    """

    def __init__(self, figure: Figure) -> None:
        self._canvas: Any = FigureCanvasAgg(figure)  # matplotlib leaves its methods untyped
        self._encoder = PngEncoder()
        self._still: Any = None
        self._still_state: Hashable = None
        self._settled: Any = None
        self._settled_state: Hashable = None

    def png(
        self,
        *,
        moving: Sequence[Artist],
        settled: Sequence[Artist],
        settled_state: Hashable,
        still_state: Hashable,
    ) -> bytes:
        """Return the figure as PNG.

        Args:
            moving: what is drawn anew, from back to front.
            settled: what lies behind it.
            settled_state: that is drawn anew only if this differs from the last time;
            still_state: and the rest only if this does.
        """
        is_new = self._still is None or still_state != self._still_state
        if is_new:
            self._canvas.draw()
            self._still = self._kept()
            self._still_state = still_state
        if is_new or settled_state != self._settled_state:
            self._canvas.restore_region(self._still)
            self._draw(settled)
            self._settled = self._kept()
            self._settled_state = settled_state
        self._canvas.restore_region(self._settled)
        self._draw(moving)
        return self._encoder.encode(np.asarray(self._canvas.buffer_rgba()))

    def _kept(self) -> Any:
        return self._canvas.copy_from_bbox(self._canvas.figure.bbox)

    def _draw(self, artists: Sequence[Artist]) -> None:
        renderer = self._canvas.get_renderer()
        for artist in artists:
            artist.draw(renderer)
