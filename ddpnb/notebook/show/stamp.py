"""How is a text drawn that moves but seldom changes?  (Notebook side.)"""

from typing import Any, final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import RendererAgg
from matplotlib.text import Text

MARGIN = 3
"""Pixels kept around the letters."""


@final
class Stamp(Text):
    """A plain text whose pixels are kept: drawn anew, it costs a copy in place of a layout.

    Only on a canvas of pixels; in a PDF or an SVG it is a text like any other.
    """

    def __init__(self, axes: Axes, **look: Any) -> None:
        super().__init__(**look)
        axes.add_artist(self)
        self._stamp_of: tuple[object, ...] = ()
        self._stamp: Any = None

    def draw(self, renderer: Any) -> None:
        """Draw the text; matplotlib's own way wherever that is not onto pixels."""
        if not isinstance(renderer, RendererAgg) or self.get_bbox_patch() is not None:
            super().draw(renderer)
            return
        if not self.get_visible() or not self.get_text():
            return
        box = self.get_window_extent(renderer)
        left, low = round(box.x0) - MARGIN, round(box.y0) - MARGIN
        made_of = (self.get_text(), self.get_color(), renderer.dpi)
        if made_of != self._stamp_of:
            self._stamp_of = made_of
            self._stamp = self._pixels(renderer, box.width, box.height)
        context = renderer.new_gc()
        renderer.draw_image(context, left, low, self._stamp)
        context.restore()

    def _pixels(self, renderer: RendererAgg, width: float, height: float) -> Any:
        """Return the letters alone, as red, green, blue, alpha, from the bottom row up."""
        size = (int(np.ceil(width)) + 2 * MARGIN, int(np.ceil(height)) + 2 * MARGIN)
        canvas: Any = RendererAgg(*size, renderer.dpi)  # type: ignore[no-untyped-call]
        context = canvas.new_gc()
        context.set_foreground(self.get_color())
        below = (  # as matplotlib lays a line out: as deep as "lp" at least
            canvas.get_text_width_height_descent(text, self.get_fontproperties(), ismath=False)[2]
            for text in (self.get_text(), "lp")
        )
        bottom = canvas.height - MARGIN - max(below)
        canvas.draw_text(context, MARGIN, bottom, self.get_text(), self.get_fontproperties(), 0.0)
        context.restore()
        return np.flipud(np.asarray(canvas.buffer_rgba())).copy()
