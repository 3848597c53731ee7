"""Where do the panel's figure and table stand, to be saved with the notebook?  (Notebook side.)

They are plain outputs of the panel's cell, not widgets: a PNG, and below it the
line of progress that becomes the table.
"""

import threading
from collections.abc import Sequence
from typing import final

from ddpnb.notebook.record.comparison import Comparison, overlay
from ddpnb.notebook.show.display import Slot
from ddpnb.notebook.show.drawing.figure import LiveFigure
from ddpnb.notebook.show.live import RedrawThrottle, picture_bundle, table_bundle
from ddpnb.notebook.show.progress import progress_of
from ddpnb.notebook.show.result import ComparisonResult

NOTHING_YET = "Run trains the chosen strategies; their figure and table appear here."


@final
class Stage:
    """Shows what the panel trains, with stored runs beside it; one comparison after the other."""

    def __init__(self) -> None:
        self._picture = Slot()
        self._line = Slot()
        self._lock = threading.Lock()  # the training draws, and so does who chooses runs
        self._figure = LiveFigure()
        self._current: Comparison | None = None
        self._beside: tuple[Comparison, ...] = ()
        self._is_training = False
        self._throttle = RedrawThrottle()

    def show(self) -> None:
        """Appear under the current cell; where it stands already, in both places."""
        self._picture.appear({"text/plain": "", "text/html": ""})
        self._line.appear({"text/plain": NOTHING_YET, "text/html": f"<p>{NOTHING_YET}</p>"})

    def put_beside(self, comparisons: Sequence[Comparison]) -> None:
        """Draw stored runs with what is trained."""
        with self._lock:
            self._beside = tuple(comparisons)
            self._figure = LiveFigure()  # makes room for their labels, and no more
            if not self._is_training:
                self._show_result()

    def begin(self, comparison: Comparison) -> None:
        """Draw for the first time, which costs most, while no training pays for it."""
        with self._lock:
            self._figure = LiveFigure()
            self._current, self._is_training = comparison, True
            self._show_progress(comparison)

    def is_due(self) -> bool:
        """Tell whether it is time to draw."""
        return self._throttle.is_due()

    def update(self, comparison: Comparison) -> None:
        """Show the comparison as it is now."""
        with self._lock:
            self._current = comparison
            self._throttle.draw(lambda: self._show_progress(comparison))

    def finish(self, result: ComparisonResult) -> None:
        """Show the figure for the last time, and the table in place of the progress."""
        with self._lock:
            self._current, self._is_training = result.comparison, False
            self._show_result()

    def _parts(self) -> list[Comparison]:
        return [*([] if self._current is None else [self._current]), *self._beside]

    def _draw(self) -> None:
        self._figure.update(overlay(self._parts()))
        self._picture.show(picture_bundle(self._figure.png(), repr(self._figure)))

    def _show_progress(self, comparison: Comparison) -> None:
        self._draw()
        progress = progress_of(comparison)
        self._line.show({"text/html": progress.html(), "text/plain": repr(progress)})

    def _show_result(self) -> None:
        if self._parts():
            self._draw()
            self._line.show(table_bundle(ComparisonResult(overlay(self._parts()))))
