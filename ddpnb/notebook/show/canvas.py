"""How does a figure become a picture several times a second, cheaply?  (Notebook side.)

What stands still (paper, axes, ticks, titles, runs that have ended) is drawn once and copied
back; only what moves is drawn again.
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

    def png(self, moving: Sequence[Artist], still_state: Hashable) -> bytes:
        """Return the figure as PNG.

        Args:
            moving: what is drawn anew, from back to front.
            still_state: the rest is drawn anew only if this differs from the last time.
        """
        if self._still is None or still_state != self._still_state:
            self._canvas.draw()
            self._still = self._canvas.copy_from_bbox(self._canvas.figure.bbox)
            self._still_state = still_state
        self._canvas.restore_region(self._still)
        renderer = self._canvas.get_renderer()
        for artist in moving:
            artist.draw(renderer)
        return self._encoder.encode(np.asarray(self._canvas.buffer_rgba()))
